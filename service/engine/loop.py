"""The one thread that owns the device.

A turn: take in aborts -> plan -> prefill chunk, inserts, decode call (all only dispatched) -> fetch
the *previous* decode call and deliver its tokens while the new one runs. Threads that submit and
abort share the scheduler with it under one lock, which is never held while the executor is called.

Slots whose replies are constrained sit every other call out (`Plan.held`). What may follow in them is
worked out while the device is at the call in between.

While a request waits there is work, so the thread does not sleep, and looks at deadlines once a turn.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence

from service.engine.constraints import accept_tokens, allowed_tokens
from service.engine.errors import EngineUnavailableError
from service.engine.estimates import Estimates
from service.engine.intake import Intake
from service.engine.scheduler import Delivery, Load, Plan, Scheduler
from service.engine.slots import Occupant
from service.engine.types import DecodeHandle, Executor, Priority, QueueStatus, Request

logger = logging.getLogger(__name__)


class EngineState(enum.Enum):
    """Life of an engine. The value is what clients are told when it takes no requests."""

    NOT_STARTED = "not started"
    RUNNING = "running"
    STOPPING = "stopping"
    """Takes no requests; those taken go on."""
    STOPPED = "stopped"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """A decode call in flight, and whom it was dispatched for."""

    handle: DecodeHandle
    decoding: tuple[tuple[int, Occupant], ...]
    draft_cap: int
    """The largest of their draft caps."""
    dispatched_at: float
    prefill_tokens: int
    """Of the chunk that was dispatched just before it; 0 for none."""
    constrained: bool
    """Whether somebody took part in one round only."""


class EngineLoop:
    """Runs the scheduler's plans on the executor. All but `step` may be called on any thread."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        admit: Callable[[Sequence[int], float], None],
        expire: Callable[[Sequence[int], float], None],
        deliver: Callable[[Sequence[Delivery]], None],
        fail: Callable[[BaseException], None],
        retry_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares the thread; `start` runs it.

        Args:
          executor: called from the thread only.
          scheduler: empty; not to be touched by anybody else from now on.
          admit: called on the thread with the tickets of requests that have just got their slots, and
            when that was.
          expire: called on the thread with the tickets of requests whose deadline has passed before
            they got a slot, and when that was noticed. They are lost.
          deliver: called on the thread, once per decode call that emitted anything.
          fail: called on the thread, once, with what the executor raised; every request is lost.
          retry_after_s: seconds that a client is told to wait when the queue is full and nothing
            is known of how fast it moves.
          clock: seconds.
        """
        self._executor = executor
        self._scheduler = scheduler
        self._admit = admit
        self._expire = expire
        self._deliver = deliver
        self._fail = fail
        self._clock = clock
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._state = EngineState.NOT_STARTED
        self._tickets = itertools.count()
        self._aborts: list[int] = []
        self._turn_began_at: float | None = None  # None while the thread sleeps
        self._estimates = Estimates(executor.limits.slots, executor.limits.prefill_chunk)
        self._intake = Intake(scheduler, self._estimates, retry_after_s)
        # Used by the thread only:
        self._in_flight: _Call | None = None
        self._fetched_at = 0.0
        # A daemon: a device that hangs must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="tandem-engine", daemon=True)

    @property
    def state(self) -> EngineState:
        """Where in its life the engine is."""
        with self._changed:
            return self._state

    def start(self) -> None:
        """Starts the thread.

        Raises:
          EngineUnavailableError: it was started or stopped before.
        """
        self.open()
        self._thread.start()

    def open(self) -> None:
        """Takes requests from now on, without a thread: the caller runs `step`.

        Raises:
          EngineUnavailableError: see `start`.
        """
        with self._changed:
            if self._state is not EngineState.NOT_STARTED:
                raise EngineUnavailableError(self._state.value)
            self._state = EngineState.RUNNING

    def refuse_new(self) -> None:
        """Takes no requests from now on; those taken go on."""
        with self._changed:
            if self._state is EngineState.RUNNING:
                self._state = EngineState.STOPPING

    def stop(self) -> None:
        """Ends the thread after the calls in flight. Requests still held end without a word."""
        with self._changed:
            if self._state is not EngineState.FAILED:
                self._state = EngineState.STOPPED
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Waits until the thread has ended; False if it has not after `timeout_s` seconds."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, request: Request) -> int:
        """Appends a request to the waiting queue.

        Returns:
          Its ticket, which names it in deliveries and to `abort`.

        Raises:
          EngineUnavailableError: the engine takes no requests.
          QueueFullError: there is no room in the waiting queue.
          RequestTooLargeError: it can never be served.
          DeadlineError: its first token is not expected in time.
        """
        (ticket,) = self.submit_all((request,))
        return ticket

    def submit_all(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """Appends the choices of one client call, all or none; like `submit` otherwise."""
        with self._changed:
            if self._state is not EngineState.RUNNING:
                raise EngineUnavailableError(self._state.value)
            self._intake.check(requests, self._clock())
            tickets = tuple(itertools.islice(self._tickets, len(requests)))
            self._scheduler.submit_all(tuple(zip(tickets, requests, strict=True)))
            self._changed.notify()
            return tickets

    def abort(self, ticket: int) -> None:
        """Gives up a request in any phase; unknown tickets are ignored.

        A waiting request is gone at once; a slot and its pages are free by the next decode call.
        Until then tokens may still be delivered for it.
        """
        with self._changed:
            if self._scheduler.is_waiting(ticket):
                self._scheduler.abort(ticket)
                return
            self._aborts.append(ticket)
            self._changed.notify()

    @property
    def draft_cap_default(self) -> int:
        """The draft cap of requests that name none."""
        with self._changed:
            return self._scheduler.draft_cap_default

    def set_draft_cap_default(self, draft_cap: int) -> None:
        """Sets the draft cap of requests that name none, from the next decode call on.

        Raises:
          ValueError: it is not in 0 .. draft_length.
        """
        with self._changed:
            self._scheduler.set_draft_cap_default(draft_cap)

    def turn_seconds(self) -> float:
        """How long the turn that the thread is at has taken so far; 0 while there is no work."""
        with self._changed:
            if self._turn_began_at is None or self._state in (
                EngineState.STOPPED,
                EngineState.FAILED,
            ):
                return 0.0
            return self._clock() - self._turn_began_at

    def load(self) -> Load:
        """How full the engine is."""
        with self._changed:
            return self._scheduler.load()

    def queue_status(self, ticket: int) -> QueueStatus | None:
        """Where a request stands in the waiting queue; None when it does not wait."""
        with self._changed:
            return self._intake.status(ticket)

    def estimated_wait_s(self, priority: Priority) -> float | None:
        """Seconds that a request which arrived now would wait; None while nothing is known."""
        with self._changed:
            return self._intake.arrival_wait_s(priority)

    def check_integrity(self) -> None:
        """Proves that queue, slots and pages fit together.

        Raises:
          RuntimeError: they do not; the text names both sides.
        """
        with self._changed:
            self._scheduler.check_integrity()

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything now; otherwise it sleeps until there is something."""
        with self._changed:
            return self._has_work()

    def step(self) -> bool:
        """Runs one turn; sleeps first while there is nothing to do.

        Returns:
          False when the engine has been stopped and the device has come to rest.
        """
        with self._changed:
            self._turn_began_at = None
            self._changed.wait_for(self._has_work)
            now = self._turn_began_at = self._clock()
            to_release = self._take_aborts(now)
            expired = self._scheduler.drop_expired(now)
            plan = None if self._state is EngineState.STOPPED else self._scheduler.plan()
            if plan is not None:
                self._estimates.admitted(plan.admitted, now)
        for slot in to_release:
            self._executor.release(slot)
        if expired:
            self._expire(expired, now)
        if plan is None:
            self._in_flight = None
            self._executor.wait()
            return False
        if plan.admitted:
            self._admit(plan.admitted, now)
        call = self._dispatch(plan)
        previous, self._in_flight = self._in_flight, call
        if previous is not None:
            self._collect(previous)
        if call is None and plan.prefill is not None:
            # The next turn has nothing to fetch. Without a wait all chunks of a long prompt would
            # be queued on the device, ahead of whoever arrives next and past any abort.
            self._executor.wait()
            with self._changed:
                seconds = self._clock() - max(now, self._fetched_at)
                self._estimates.prefilled(len(plan.prefill.tokens), seconds)
        return True

    def _run(self) -> None:
        try:
            while self.step():
                pass
        except BaseException as error:
            logger.exception("the engine failed; every request is lost")
            with self._changed:
                self._state = EngineState.FAILED
                self._scheduler.clear()
                self._aborts.clear()
                self._estimates.forget_held()
            self._in_flight = None
            self._fail(error)

    def _has_work(self) -> bool:
        return (
            self._scheduler.has_work
            or bool(self._aborts)
            or self._in_flight is not None
            or self._state is EngineState.STOPPED
        )

    def _dispatch(self, plan: Plan) -> _Call | None:
        dispatched_at = self._clock()
        for slot in plan.releases:
            self._executor.release(slot)
        for slot, draft_cap in plan.draft_caps:
            self._executor.set_draft_cap(slot, draft_cap)
        prefill_tokens = 0
        if (chunk := plan.prefill) is not None:
            prefill_tokens = len(chunk.tokens)
            scores = self._executor.prefill(
                chunk.slot,
                chunk.page_ids,
                chunk.start,
                chunk.tokens,
                chunk.next_token,
                score=chunk.occupant.request.prompt_logprobs,
            )
            if scores is not None:
                chunk.occupant.scores.append(scores)
        for slot, occupant in plan.inserts:
            self._executor.insert(slot, occupant.request, occupant.draft_cap)
        allowed, failures = allowed_tokens(
            plan.decoding, plan.draft_length, self._executor.limits.vocab_size
        )
        if failures:
            with self._changed:
                deliveries = self._scheduler.fail(plan.decoding, failures)
                self._note_ends(deliveries, dispatched_at)
            self._deliver(deliveries)
        decoding = tuple(entry for entry in plan.decoding if entry[0] not in failures)
        if not decoding:
            return None
        handle = self._executor.decode(
            plan.page_tables, plan.draft_length, allowed=allowed, held=(*plan.held, *failures)
        )
        draft_cap = max(occupant.draft_cap for _, occupant in decoding)
        return _Call(handle, decoding, draft_cap, dispatched_at, prefill_tokens, bool(allowed))

    def _collect(self, call: _Call) -> None:
        results = call.handle.fetch()
        for _, occupant in call.decoding:
            if occupant.scores:
                occupant.fetch_scores()
        failures = accept_tokens(call.decoding, results)
        started_at = max(call.dispatched_at, self._fetched_at)  # when the call before it had ended
        self._fetched_at = self._clock()
        with self._changed:
            seconds = self._fetched_at - started_at
            if call.prefill_tokens:
                self._estimates.prefilled(call.prefill_tokens, seconds)
            elif not call.constrained:
                self._scheduler.observe_call(call.draft_cap, len(call.decoding), seconds)
            deliveries = self._scheduler.record(call.decoding, results, failures)
            self._note_ends(deliveries, self._fetched_at)
        if deliveries:
            self._deliver(deliveries)

    def _note_ends(self, deliveries: Sequence[Delivery], now: float) -> None:
        for delivery in deliveries:
            if delivery.last:
                self._estimates.ended(delivery.ticket, now)

    def _take_aborts(self, now: float) -> list[int]:
        """Frees the slots of aborted requests; returns those that the executor must release."""
        slots = [self._scheduler.abort(ticket) for ticket in self._aborts]
        for ticket in self._aborts:
            self._estimates.ended(ticket, now)
        self._aborts.clear()
        return [slot for slot in slots if slot is not None]
