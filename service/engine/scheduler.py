"""Who goes next: pure policy, no device, no threads, no clock.

- Waiting requests are served first come, first served; nobody overtakes the head of the queue, so
  a big request is not starved by small ones behind it.
- A request takes a free slot together with every page it may ever need, or waits. There is no
  preemption in this version: a slot that has been admitted always runs to its end.
- Slots that prefill take turns, one chunk per decode call: with B slots a prompt of one chunk waits
  for at most B - 1 chunks of others, and a huge prompt gets at least every B-th chunk.

The caller serialises the calls; `EngineLoop` holds its lock around each.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

from service.engine.pages import PageAllocator
from service.engine.slots import Occupant, SlotPhase, SlotTable
from service.engine.types import FinishReason, Limits, Request, SlotRounds, TokenChunk


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was not taken."""

    field: str
    """'requests' or 'tokens' of the waiting queue, or the field of `Request` that is too large."""
    value: int
    """What it would be: requests, tokens or ids."""
    limit: int
    """The most that it may be."""
    queue_full: bool
    """True: there may be room later. False: it can never be served."""


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The arguments of one `Executor.prefill`."""

    slot: int
    page_ids: tuple[int, ...]
    start: int
    tokens: tuple[int, ...]
    next_token: int


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to dispatch now, in the order of the fields. Once made, it must be dispatched."""

    draft_caps: tuple[tuple[int, int], ...]
    """(slot, draft cap) of the running slots whose cap has changed."""
    prefill: PrefillChunk | None
    """At most one chunk per decode call, so that a long prompt does not freeze running slots."""
    inserts: tuple[tuple[int, Occupant], ...]
    """Slots that start to run, with their occupants: their prompts are prefilled by then."""
    decoding: tuple[tuple[int, Occupant], ...]
    """Slots that run in the decode call, those just inserted included; empty for no call."""
    page_tables: tuple[tuple[int, ...], ...]
    """One per slot. Empty unless the slot runs: a row that is frozen must not reach real pages."""


@dataclasses.dataclass(frozen=True, slots=True)
class Delivery:
    """What one decode call emitted for one request."""

    ticket: int
    chunk: TokenChunk


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """How full the engine is."""

    running: int
    """Slots that decode."""
    prefilling: int
    """Slots whose prompt is being prefilled."""
    waiting: int
    """Requests without a slot."""
    waiting_tokens: int
    """Prompt tokens of the waiting requests."""
    slots: int
    """Slots in all."""
    pages_used: int
    """Pages held by running and prefilling slots."""
    pages: int
    """Pages that can be held (the sink page is not one of them)."""


class Scheduler:
    """The waiting queue, the slots and the pages, and what happens to them next."""

    def __init__(
        self, limits: Limits, *, max_waiting_requests: int, max_waiting_tokens: int
    ) -> None:
        """Starts empty.

        Args:
          limits: of the executor.
          max_waiting_requests: requests that may wait, at least 1.
          max_waiting_tokens: prompt tokens that may wait, at least 1. An empty queue takes any
            prompt that fits the limits, or one longer than this could never be served.

        Raises:
          ValueError: a bound is below 1.
        """
        if max_waiting_requests < 1:
            raise ValueError(f"max_waiting_requests is {max_waiting_requests}, must be at least 1")
        if max_waiting_tokens < 1:
            raise ValueError(f"max_waiting_tokens is {max_waiting_tokens}, must be at least 1")
        self._limits = limits
        self._max_waiting_requests = max_waiting_requests
        self._max_waiting_tokens = max_waiting_tokens
        self._waiting: dict[int, Request] = {}  # by ticket; a dict keeps the order of arrival
        self._waiting_tokens = 0
        self._slots = SlotTable(limits)
        self._pages = PageAllocator(limits.pages)
        self._prefill_turns: deque[int] = deque()
        self._draft_cap_default = limits.draft_length

    @property
    def has_work(self) -> bool:
        """Whether a plan could hold anything."""
        return bool(self._waiting) or self._slots.count(SlotPhase.FREE) < self._limits.slots

    def load(self) -> Load:
        """How full it is now."""
        return Load(
            running=self._slots.count(SlotPhase.RUNNING),
            prefilling=self._slots.count(SlotPhase.PREFILLING),
            waiting=len(self._waiting),
            waiting_tokens=self._waiting_tokens,
            slots=self._limits.slots,
            pages_used=self._pages.used,
            pages=self._pages.usable,
        )

    def set_draft_cap_default(self, draft_cap: int) -> None:
        """Sets the cap of requests that name none; running slots get it with the next plan.

        Raises:
          ValueError: it is not in 0 .. draft_length.
        """
        if not 0 <= draft_cap <= self._limits.draft_length:
            raise ValueError(
                f"draft cap is {draft_cap}, and must be in 0 .. {self._limits.draft_length}"
            )
        self._draft_cap_default = draft_cap

    def submit(self, ticket: int, request: Request) -> Refusal | None:
        """Appends a request to the waiting queue, or says why not (and keeps nothing of it)."""
        refusal = self._refusal_for_ever(request) or self._refusal_for_now(request)
        if refusal is None:
            self._waiting[ticket] = request
            self._waiting_tokens += len(request.prompt_ids)
        return refusal

    def abort(self, ticket: int) -> int | None:
        """Forgets a request: its place in the queue, or its slot and pages.

        Returns:
          The slot that the executor must release, when the request was running; else None. A ticket
          that is not known (any more) is fine.
        """
        if self._drop_waiting(ticket) is not None:
            return None
        slot = self._slots.find(ticket)
        if slot is None:
            return None
        return slot if self._free(slot).running else None

    def is_waiting(self, ticket: int) -> bool:
        """Whether a request waits for a slot."""
        return ticket in self._waiting

    def clear(self) -> None:
        """Forgets every request (the executor has failed: there is nothing to release)."""
        for ticket in list(self._waiting):
            self._drop_waiting(ticket)
        for slot in range(self._limits.slots):
            if self._slots.occupant(slot) is not None:
                self._free(slot)

    def plan(self) -> Plan:
        """Decides what to dispatch now and writes it down as done."""
        draft_caps = self._changed_draft_caps()
        inserts = self._admit()
        prefill = self._next_chunk()
        if prefill is not None:
            inserts += self._insert_if_prefilled(prefill.slot)
        decoding = tuple(self._slots.running())
        page_tables: list[tuple[int, ...]] = [()] * self._limits.slots
        for slot, occupant in decoding:
            page_tables[slot] = occupant.page_ids
        return Plan(draft_caps, prefill, tuple(inserts), decoding, tuple(page_tables))

    def record(
        self, decoding: Sequence[tuple[int, Occupant]], results: Sequence[SlotRounds]
    ) -> list[Delivery]:
        """Takes in what a decode call returned, frees the slots that ended in it.

        Args:
          decoding: `Plan.decoding` of that call.
          results: one entry per slot. An entry whose slot has changed hands since the dispatch
            belongs to nobody and is dropped.
        """
        deliveries: list[Delivery] = []
        for slot, occupant in decoding:
            if self._slots.occupant(slot) is not occupant:
                continue
            chunk = occupant.record(results[slot])
            if chunk.finish is not FinishReason.NONE:
                # The device froze the slot by itself, and a call in flight does nothing in it:
                # whatever is dispatched from now on runs after that call.
                self._free(slot)
            deliveries.append(Delivery(occupant.ticket, chunk))
        return deliveries

    def check_integrity(self) -> None:
        """Proves that queue, slots and pages fit together.

        Raises:
          RuntimeError: they do not; the text names both sides.
        """
        self._pages.check_integrity()
        self._slots.check_integrity()
        held = [o for i in range(self._limits.slots) if (o := self._slots.occupant(i)) is not None]
        pages = sum(len(occupant.page_ids) for occupant in held)
        if pages != self._pages.used:
            raise RuntimeError(f"{pages} pages in slots != {self._pages.used} pages allocated")
        tokens = sum(len(request.prompt_ids) for request in self._waiting.values())
        if tokens != self._waiting_tokens:
            raise RuntimeError(f"{tokens} prompt tokens wait != {self._waiting_tokens} counted")
        slots = range(self._limits.slots)
        prefilling = [i for i in slots if self._slots.phase(i) is SlotPhase.PREFILLING]
        if sorted(self._prefill_turns) != prefilling:
            raise RuntimeError(
                f"prefill turns {sorted(self._prefill_turns)} != prefilling slots {prefilling}"
            )

    def _positions(self, request: Request) -> int:
        """Positions that a request's slot may ever write to.

        The host's knowledge lags by one call when it dispatches the next, so a slot at its last
        token but one may be two calls further, and verification looks `draft_length` ahead.
        """
        slack = 2 * self._limits.tokens_per_call + self._limits.draft_length
        wanted = len(request.prompt_ids) + request.max_tokens + slack
        return min(wanted, self._limits.max_context)

    def _refusal_for_ever(self, request: Request) -> Refusal | None:
        limits = self._limits
        prompt, stop_ids = len(request.prompt_ids), len(request.end_ids) + len(request.stop_ids)
        if prompt >= limits.max_context:
            return Refusal("prompt_ids", prompt, limits.max_context - 1, queue_full=False)
        if stop_ids > limits.max_stop_ids:
            most = limits.max_stop_ids - len(request.end_ids)
            return Refusal("stop_ids", len(request.stop_ids), most, queue_full=False)
        biased = len(request.sampling.logit_bias)
        if biased > limits.max_logit_bias:
            return Refusal("logit_bias", biased, limits.max_logit_bias, queue_full=False)
        pool = self._pages.usable * limits.page_size
        excess = self._positions(request) - pool
        if excess <= 0:
            return None
        # A pool smaller than one context: all that counts is prompt + reply + slack.
        room = pool - 2 * limits.tokens_per_call - limits.draft_length
        if prompt < room:
            return Refusal("max_tokens", request.max_tokens, room - prompt, queue_full=False)
        return Refusal("prompt_ids", prompt, max(room - 1, 0), queue_full=False)

    def _refusal_for_now(self, request: Request) -> Refusal | None:
        requests = len(self._waiting) + 1
        if requests > self._max_waiting_requests:
            return Refusal("requests", requests, self._max_waiting_requests, queue_full=True)
        tokens = self._waiting_tokens + len(request.prompt_ids)
        if self._waiting and tokens > self._max_waiting_tokens:
            return Refusal("tokens", tokens, self._max_waiting_tokens, queue_full=True)
        return None

    def _drop_waiting(self, ticket: int) -> Request | None:
        request = self._waiting.pop(ticket, None)
        if request is not None:
            self._waiting_tokens -= len(request.prompt_ids)
        return request

    def _free(self, slot: int) -> Occupant:
        occupant = self._slots.release(slot)
        self._pages.free(occupant.page_ids)
        if slot in self._prefill_turns:
            self._prefill_turns.remove(slot)
        return occupant

    def _admit(self) -> list[tuple[int, Occupant]]:
        """Gives slots to waiting requests; returns those that need no prefill, to be inserted."""
        inserts: list[tuple[int, Occupant]] = []
        while self._waiting and (slot := self._slots.first_free()) is not None:
            ticket, request = next(iter(self._waiting.items()))
            pages = -(-self._positions(request) // self._limits.page_size)
            page_ids = self._pages.allocate(pages)
            if page_ids is None:  # the head waits for pages, and everybody waits behind it
                break
            self._drop_waiting(ticket)
            self._slots.admit(slot, ticket, request, page_ids)
            self._prefill_turns.append(slot)
            inserts += self._insert_if_prefilled(slot)
        return inserts

    def _next_chunk(self) -> PrefillChunk | None:
        if not self._prefill_turns:
            return None
        slot = self._prefill_turns[0]
        self._prefill_turns.rotate(-1)
        occupant = self._slots.occupant(slot)
        assert occupant is not None, f"slot {slot} has a prefill turn and no occupant"
        start, prompt = occupant.prefilled, occupant.request.prompt_ids
        end = min(start + self._limits.prefill_chunk, occupant.prefill_length)
        occupant.prefilled = end
        return PrefillChunk(slot, occupant.page_ids, start, prompt[start:end], prompt[end])

    def _insert_if_prefilled(self, slot: int) -> list[tuple[int, Occupant]]:
        occupant = self._slots.occupant(slot)
        if occupant is None or occupant.prefilled < occupant.prefill_length:
            return []
        self._prefill_turns.remove(slot)
        occupant.running = True
        occupant.draft_cap = self._wanted_draft_cap(occupant.request)
        return [(slot, occupant)]

    def _wanted_draft_cap(self, request: Request) -> int:
        asked = request.max_draft_tokens
        cap = self._draft_cap_default if asked is None else asked
        return min(cap, self._limits.draft_length)

    def _changed_draft_caps(self) -> tuple[tuple[int, int], ...]:
        changed: list[tuple[int, int]] = []
        for slot, occupant in self._slots.running():
            wanted = self._wanted_draft_cap(occupant.request)
            if wanted != occupant.draft_cap:
                occupant.draft_cap = wanted
                changed.append((slot, wanted))
        return tuple(changed)
