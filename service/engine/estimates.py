"""How long a request will wait, from how long others took lately. Pure: the caller tells the times.

With all B slots held for H seconds each, one falls free every H / B seconds, so whoever has p others
before them waits (p + 1) H / B seconds. That is right on average while requests are alike. It is off

- by the spread of the holds: behind a few long replies it may be several times too short or too
  long, and by up to one hold even when all are equal, since it does not ask how far they have come;
- after the mix of requests has changed, for about 1 / `HOLD_WEIGHT` requests;
- when pages are short: then fewer slots are held than there are.

The time to the first token adds the prompt's own full chunks at the best speed of late. That is the
least that prefill can take: chunks of others in between, a last chunk that is not full and the decode
call behind it are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

MIN_HOLDS = 4
"""Requests that must have ended before anything is said of waiting."""
HOLD_WEIGHT = 0.125
"""Of one request that has ended, in the mean."""
RECENT_CHUNKS = 16
"""Full prefill chunks among which the fastest counts: a stall must not refuse requests for ever, since
without requests there would be no chunks to correct it."""


class Estimates:
    """What is expected of waiting and of prefill. Unknown, None, until enough was seen."""

    def __init__(self, slots: int, prefill_chunk: int) -> None:
        """Starts with nothing seen.

        Args:
          slots: slots of the executor.
          prefill_chunk: prompt tokens of one chunk.
        """
        self._slots = slots
        self._prefill_chunk = prefill_chunk
        self._admitted_at: dict[int, float] = {}  # by ticket, of the requests that hold slots
        self._hold_s = 0.0
        self._holds = 0
        self._chunks_s: deque[float] = deque(maxlen=RECENT_CHUNKS)

    def admitted(self, tickets: Sequence[int], now: float) -> None:
        """Takes in that requests got their slots."""
        self._admitted_at.update(dict.fromkeys(tickets, now))

    def ended(self, ticket: int, now: float) -> None:
        """Takes in that a request holds its slot no more, for whatever reason, if it held one."""
        admitted_at = self._admitted_at.pop(ticket, None)
        if admitted_at is None:
            return
        self._holds += 1
        weight = max(HOLD_WEIGHT, 1 / self._holds)  # the plain mean of the first few
        self._hold_s += weight * (now - admitted_at - self._hold_s)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Takes in how long a prefill chunk took, together with the decode call beside it if any.

        Only full chunks count: others run shorter programs, with another time per token.
        """
        if tokens == self._prefill_chunk:
            self._chunks_s.append(seconds)

    def forget_held(self) -> None:
        """Forgets who holds slots: they were lost, and say nothing."""
        self._admitted_at.clear()

    def wait_s(self, position: int, free_slots: int) -> float | None:
        """Seconds until a request gets its slot.

        Args:
          position: how many wait before it.
          free_slots: slots that those who wait can have at once.
        """
        releases = position + 1 - free_slots
        if releases <= 0:
            return 0.0
        return None if self._holds < MIN_HOLDS else releases * self._hold_s / self._slots

    def first_token_s(self, position: int, free_slots: int, prompt_tokens: int) -> float | None:
        """Seconds until the first token of a request; see `wait_s`."""
        wait_s = self.wait_s(position, free_slots)
        if wait_s is None:
            return None
        chunks = (prompt_tokens - 1) // self._prefill_chunk  # the last token is not prefilled
        return wait_s + chunks * min(self._chunks_s, default=0.0)
