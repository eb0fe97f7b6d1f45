"""A device that takes a set time for every round and computes nothing: for measuring the host."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from service.engine.types import FinishReason, Limits, Request, SlotRounds

FIRST_TOKEN = 300
"""Replies count up from here."""
TOKENS = 256


@dataclasses.dataclass
class _Slot:
    request: Request
    emitted: int = 0


class PacedExecutor:
    """An `Executor` without drafts. Programs run one behind the other, as on a real device."""

    def __init__(self, limits: Limits, round_s: float) -> None:
        """Has `limits`, whose draft length must be 0; a round takes `round_s` seconds."""
        self.limits = limits
        self._call_s = round_s * limits.rounds_per_call
        self._slots: list[_Slot | None] = [None] * limits.slots
        self._free_at = 0.0  # when the device has run what was dispatched

    def prefill(self, *_: Any, **__: Any) -> None:
        """Takes no time."""

    def insert(self, slot: int, request: Request, draft_cap: int) -> None:
        """Makes a slot run."""
        self._slots[slot] = _Slot(request)

    def release(self, slot: int) -> None:
        """Frees a slot."""
        self._slots[slot] = None

    def set_draft_cap(self, slot: int, draft_cap: int) -> None:
        """Changes nothing: there are no drafts."""

    def wait(self) -> None:
        """Waits until the device has run what was dispatched."""
        time.sleep(max(0.0, self._free_at - time.monotonic()))

    def reset(self) -> None:
        """Frees all slots."""
        self._slots = [None] * self.limits.slots

    def decode(self, page_tables: Sequence[Sequence[int]], *_: Any, **__: Any) -> PacedHandle:
        """Dispatches one call: a token for each running slot in each round."""
        self._free_at = max(self._free_at, time.monotonic()) + self._call_s
        return PacedHandle(self._free_at, [self._run(slot) for slot in range(self.limits.slots)])

    def _run(self, index: int) -> SlotRounds:
        slot, rounds = self._slots[index], self.limits.rounds_per_call
        left = 0 if slot is None else slot.request.max_tokens - slot.emitted
        count, begun = min(left, rounds), 0 if slot is None else slot.emitted
        tokens = [
            [FIRST_TOKEN + (begun + each) % TOKENS] if each < count else []
            for each in range(rounds)
        ]
        if slot is not None:
            slot.emitted += count
        ended = slot is not None and 0 < left <= rounds
        if ended:
            self._slots[index] = None
        zeros = [0] * rounds
        finish = FinishReason.MAX_TOKENS if ended else FinishReason.NONE
        return SlotRounds(tokens, zeros, zeros, finish, [[0.0] * len(row) for row in tokens])


@dataclasses.dataclass
class PacedHandle:
    """A call that is over at a set time."""

    over_at: float
    results: list[SlotRounds]

    def fetch(self) -> list[SlotRounds]:
        """Waits for it."""
        time.sleep(max(0.0, self.over_at - time.monotonic()))
        return self.results
