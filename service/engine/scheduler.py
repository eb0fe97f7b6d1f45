"""Who goes next: pure policy, no device, no threads, no clock.

- Waiting requests are served by class and in the order of their arrival (`waiting.py` has the
  rule). Nobody overtakes the one that was chosen as the next, so a big request is not starved by
  small ones behind it.
- A request takes a free slot together with every page it may ever need, or waits. There is no
  preemption in this version: a slot that has been admitted always runs to its end.
- Slots that prefill take turns, one chunk per decode call: with B slots a prompt of one chunk waits
  for at most B - 1 chunks of others, and a huge prompt gets at least every B-th chunk.
- A slot whose reply is constrained takes part in a call only when all its tokens are known, as they
  decide what may follow; it sits out the call that is dispatched meanwhile. The others notice nothing.

The caller serialises the calls; `EngineLoop` holds its lock around each.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence

from service.engine.draft_policy import DraftPolicy
from service.engine.pages import PageAllocator
from service.engine.slots import Occupant, SlotPhase, SlotTable
from service.engine.types import (
    FinishReason,
    Limits,
    Priority,
    Request,
    SlotRounds,
    TokenChunk,
)
from service.engine.waiting import Refusal, WaitingQueue

NO_FAILURES: Mapping[int, Exception] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The arguments of one `Executor.prefill`."""

    slot: int
    page_ids: tuple[int, ...]
    start: int
    tokens: tuple[int, ...]
    next_token: int
    occupant: Occupant
    """Whose prompt it is: gets the scores, if its request wants them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to dispatch now, in the order of the fields. Once made, it must be dispatched."""

    admitted: tuple[int, ...]
    """Tickets of the requests that got their slots in this plan (there is nothing to dispatch)."""
    releases: tuple[int, ...]
    """Slots whose requests have failed while the device runs them."""
    draft_caps: tuple[tuple[int, int], ...]
    """(slot, draft cap) of the running slots whose cap has changed."""
    prefill: PrefillChunk | None
    """At most one chunk per decode call, so that a long prompt does not freeze running slots."""
    inserts: tuple[tuple[int, Occupant], ...]
    """Slots that start to run, with their occupants: their prompts are prefilled by then."""
    decoding: tuple[tuple[int, Occupant], ...]
    """Slots that take part in the decode call, those just inserted included; empty for no call."""
    held: tuple[int, ...]
    """Slots that run and sit the call out: what may follow in their constrained replies is not known
    before the call in flight is recorded."""
    page_tables: tuple[tuple[int, ...], ...]
    """One per slot. Empty unless the slot runs: a row that is frozen must not reach real pages."""
    draft_length: int
    """Of the decode call's program: the largest draft cap of the slots that take part in it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Delivery:
    """What one decode call emitted for one request."""

    ticket: int
    chunk: TokenChunk
    error: Exception | None = None
    """Why the request has failed, as its last delivery, with an empty chunk."""

    @property
    def last(self) -> bool:
        """Whether nothing follows for the request."""
        return self.error is not None or self.chunk.finish is not FinishReason.NONE


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
        self,
        limits: Limits,
        *,
        max_waiting_requests: int,
        max_waiting_tokens: int,
        draft_policy: DraftPolicy | None = None,
        single_program: bool = False,
    ) -> None:
        """Starts empty.

        Args:
          limits: of the executor.
          max_waiting_requests: requests that may wait, at least 1.
          max_waiting_tokens: prompt tokens that may wait, at least 1. An empty queue takes any
            prompt that fits the limits, or one longer than this could never be served.
          draft_policy: chooses the draft caps, up to the default, of requests that name none;
            None: they get the default.
          single_program: every decode call runs the program of the full draft length.

        Raises:
          ValueError: a bound is below 1.
        """
        self._limits = limits
        self._waiting = WaitingQueue(max_waiting_requests, max_waiting_tokens)
        self._draft_policy = draft_policy
        self._single_program = single_program
        self._slots = SlotTable(limits)
        self._pages = PageAllocator(limits.pages)
        self._prefill_turns: deque[int] = deque()
        self._releases: list[int] = []  # of slots that are free here and run on the device
        self._draft_cap_default = limits.draft_length

    @property
    def has_work(self) -> bool:
        """Whether a plan could hold anything."""
        held = self._slots.count(SlotPhase.FREE) < self._limits.slots
        return held or bool(self._waiting) or bool(self._releases)

    def load(self) -> Load:
        """How full it is now."""
        return Load(
            running=self._slots.count(SlotPhase.RUNNING),
            prefilling=self._slots.count(SlotPhase.PREFILLING),
            waiting=len(self._waiting),
            waiting_tokens=self._waiting.tokens,
            slots=self._limits.slots,
            pages_used=self._pages.used,
            pages=self._pages.usable,
        )

    @property
    def draft_cap_default(self) -> int:
        """The cap of requests that name none, or with a draft policy the most that they get."""
        return self._draft_cap_default

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
        return self.submit_all(((ticket, request),))

    def submit_all(self, entries: Sequence[tuple[int, Request]]) -> Refusal | None:
        """Appends the choices of one client call, by ticket: all, or none and says why not."""
        refusal = self.refusal([request for _, request in entries])
        if refusal is None:
            self._waiting.append(entries)
        return refusal

    def refusal(self, choices: Sequence[Request]) -> Refusal | None:
        """Why the choices of one client call cannot be taken now; None if they can."""
        refusals = (*map(self._refusal_for_ever, choices), self._waiting.refusal(choices))
        return next((refusal for refusal in refusals if refusal is not None), None)

    def drop_expired(self, now: float) -> list[int]:
        """Takes the calls out of the queue whose deadline has passed; returns their tickets."""
        return self._waiting.drop_expired(now)

    def position(self, ticket: int) -> int | None:
        """How many waiting requests are before this one; None when it does not wait."""
        return self._waiting.position(ticket)

    def arrival_position(self, priority: Priority) -> int:
        """How many waiting requests would be before one that arrived now."""
        return self._waiting.arrival_position(priority)

    @property
    def free_slots(self) -> int:
        """Slots that waiting requests can have; none while the next one waits for pages."""
        return 0 if self._waiting.is_held_up else self._slots.count(SlotPhase.FREE)

    def abort(self, ticket: int) -> int | None:
        """Forgets a request: its place in the queue, or its slot and pages.

        Returns:
          The slot that the executor must release, when the request was running; else None. A ticket
          that is not known (any more) is fine.
        """
        if self._waiting.remove(ticket):
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
        self._waiting.clear()
        self._releases.clear()
        for slot in range(self._limits.slots):
            if self._slots.occupant(slot) is not None:
                self._free(slot)

    def plan(self) -> Plan:
        """Decides what to dispatch now and writes it down as done."""
        admitted, inserts = self._admit()
        pause = self._all_wait_for_results()
        prefill = None if pause else self._next_chunk()
        if prefill is not None:
            inserts += self._insert_if_prefilled(prefill.slot)
        running = self._slots.running()
        decoding = tuple(entry for entry in running if not (pause or entry[1].held))
        held = tuple(slot for slot, occupant in running if occupant.held)
        changed = self._set_draft_caps(decoding)
        inserted = {slot for slot, _ in inserts}
        page_tables: list[tuple[int, ...]] = [()] * self._limits.slots
        for slot, occupant in running:
            page_tables[slot] = occupant.page_ids
        for _, occupant in decoding:
            occupant.unrecorded = True
        caps = [occupant.draft_cap for _, occupant in decoding]
        releases, self._releases = tuple(self._releases), []
        return Plan(
            admitted=tuple(admitted),
            releases=releases,
            draft_caps=tuple((slot, cap) for slot, cap in changed if slot not in inserted),
            prefill=prefill,
            inserts=tuple(inserts),
            decoding=decoding,
            held=held,
            page_tables=tuple(page_tables),
            draft_length=self._limits.draft_length
            if self._single_program
            else max(caps, default=0),
        )

    def record(
        self,
        decoding: Sequence[tuple[int, Occupant]],
        results: Sequence[SlotRounds],
        failures: Mapping[int, Exception] = NO_FAILURES,
    ) -> list[Delivery]:
        """Takes in what a decode call returned, frees the slots that ended in it.

        Args:
          decoding: the slots that took part in that call.
          results: one entry per slot. An entry whose slot has changed hands since the dispatch
            belongs to nobody and is dropped.
          failures: by slot, why what the call emitted there is not to be delivered: the request has
            failed.
        """
        deliveries: list[Delivery] = []
        for slot, occupant in decoding:
            if self._slots.occupant(slot) is not occupant:
                continue
            chunk = occupant.record(results[slot])
            if self._draft_policy is not None:
                self._draft_policy.observe(occupant.ticket, results[slot])
            if (error := failures.get(slot)) is not None:
                runs = chunk.finish is FinishReason.NONE
                deliveries.append(self._fail(slot, occupant, error, runs=runs))
                continue
            if chunk.finish is not FinishReason.NONE:
                # The device froze the slot by itself, and a call in flight does nothing in it:
                # whatever is dispatched from now on runs after that call.
                self._free(slot)
            deliveries.append(Delivery(occupant.ticket, chunk))
        return deliveries

    def fail(
        self, decoding: Sequence[tuple[int, Occupant]], failures: Mapping[int, Exception]
    ) -> list[Delivery]:
        """Gives up requests that run, by slot with the reasons."""
        held = dict(decoding)
        return [self._fail(slot, held[slot], error, runs=True) for slot, error in failures.items()]

    def observe_call(self, draft_cap: int, running: int, seconds: float) -> None:
        """Takes in how long a decode call took, given its largest draft cap and its slots."""
        if self._draft_policy is not None:
            self._draft_policy.observe_call(draft_cap, running, seconds)

    def check_integrity(self) -> None:
        """Proves that queue, slots and pages fit together.

        Raises:
          RuntimeError: they do not; the text names both sides.
        """
        self._pages.check_integrity()
        self._slots.check_integrity()
        self._waiting.check_integrity()
        held = [o for i in range(self._limits.slots) if (o := self._slots.occupant(i)) is not None]
        pages = sum(len(occupant.page_ids) for occupant in held)
        if pages != self._pages.used:
            raise RuntimeError(f"{pages} pages in slots != {self._pages.used} pages allocated")
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

    def _fail(self, slot: int, occupant: Occupant, error: Exception, *, runs: bool) -> Delivery:
        """Frees the slot of a failed request; `runs` says that the device goes on in it."""
        self._free(slot)
        if runs:
            self._releases.append(slot)
        nothing = TokenChunk((), (), FinishReason.NONE, occupant.speculation)
        return Delivery(occupant.ticket, nothing, error)

    def _free(self, slot: int) -> Occupant:
        occupant = self._slots.release(slot)
        self._pages.free(occupant.page_ids)
        if self._draft_policy is not None:
            self._draft_policy.forget(occupant.ticket)
        if slot in self._prefill_turns:
            self._prefill_turns.remove(slot)
        return occupant

    def _admit(self) -> tuple[list[int], list[tuple[int, Occupant]]]:
        """Gives slots to waiting requests.

        Returns:
          Their tickets, and what of them needs no prefill, to be inserted.
        """
        admitted: list[int] = []
        inserts: list[tuple[int, Occupant]] = []
        while (slot := self._slots.first_free()) is not None and (head := self._waiting.choose()):
            ticket, request = head
            pages = -(-self._positions(request) // self._limits.page_size)
            page_ids = self._pages.allocate(pages)
            if page_ids is None:  # the head waits for pages, and everybody waits behind it
                break
            self._waiting.take()
            self._slots.admit(slot, ticket, request, page_ids)
            self._prefill_turns.append(slot)
            admitted.append(ticket)
            inserts += self._insert_if_prefilled(slot)
        return admitted, inserts

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
        tokens, next_token = prompt[start:end], prompt[end]
        return PrefillChunk(slot, occupant.page_ids, start, tokens, next_token, occupant)

    def _all_wait_for_results(self) -> bool:
        """Whether there is to be no call before the one in flight is recorded.

        When all replies are constrained they go together from then on, in each call, rather than in two
        groups by turns. Prefill pauses as well, or it would get two chunks per decode call.
        """
        running = [occupant for _, occupant in self._slots.running()]
        constrained = all(occupant.request.constraint is not None for occupant in running)
        return constrained and any(occupant.held for occupant in running)

    def _insert_if_prefilled(self, slot: int) -> list[tuple[int, Occupant]]:
        occupant = self._slots.occupant(slot)
        if occupant is None or occupant.prefilled < occupant.prefill_length:
            return []
        self._prefill_turns.remove(slot)
        occupant.running = True
        return [(slot, occupant)]

    def _set_draft_caps(self, running: Sequence[tuple[int, Occupant]]) -> list[tuple[int, int]]:
        """Gives each running slot its draft cap; returns (slot, cap) of those that have changed."""
        default, most = self._draft_cap_default, self._limits.draft_length
        named = [
            None if (cap := occupant.request.max_draft_tokens) is None else min(cap, most)
            for _, occupant in running
        ]
        if self._draft_policy is None:
            caps = [default if cap is None else cap for cap in named]
        else:
            tickets = [occupant.ticket for _, occupant in running]
            caps = self._draft_policy.caps(list(zip(tickets, named, strict=True)), default)
        changed: list[tuple[int, int]] = []
        for (slot, occupant), cap in zip(running, caps, strict=True):
            if cap != occupant.draft_cap:
                occupant.draft_cap = cap
                changed.append((slot, cap))
        return changed
