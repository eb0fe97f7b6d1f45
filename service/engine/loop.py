"""The one thread that owns the device.

A turn: take in aborts -> plan -> prefill chunk, inserts, decode call (all only dispatched) -> fetch
the *previous* decode call and deliver its tokens while the new one runs. Threads that submit and
abort share the scheduler with it under one lock, which is never held while the executor is called.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence

from service.engine.errors import EngineUnavailableError, QueueFullError, RequestTooLargeError
from service.engine.scheduler import Delivery, Load, Plan, Scheduler
from service.engine.slots import Occupant
from service.engine.types import DecodeHandle, Executor, Request
from service.engine.waiting import Refusal

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
    after_prefill: bool
    """A prefill chunk was dispatched just before it."""


class EngineLoop:
    """Runs the scheduler's plans on the executor. All but `step` may be called on any thread."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        admit: Callable[[Sequence[int], float], None],
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
          deliver: called on the thread, once per decode call that emitted anything.
          fail: called on the thread, once, with what the executor raised; every request is lost.
          retry_after_s: seconds that a client is told to wait when the queue is full.
          clock: seconds.
        """
        self._executor = executor
        self._scheduler = scheduler
        self._admit = admit
        self._deliver = deliver
        self._fail = fail
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._state = EngineState.NOT_STARTED
        self._tickets = itertools.count()
        self._aborts: list[int] = []
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
        """
        (ticket,) = self.submit_all((request,))
        return ticket

    def submit_all(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """Appends requests that belong together, all or none; like `submit` otherwise."""
        with self._changed:
            if self._state is not EngineState.RUNNING:
                raise EngineUnavailableError(self._state.value)
            tickets = tuple(itertools.islice(self._tickets, len(requests)))
            refusal = self._scheduler.submit_all(tuple(zip(tickets, requests, strict=True)))
            if refusal is not None:
                raise self._as_error(refusal)
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

    def load(self) -> Load:
        """How full the engine is."""
        with self._changed:
            return self._scheduler.load()

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
            self._changed.wait_for(self._has_work)
            to_release = self._take_aborts()
            plan = None if self._state is EngineState.STOPPED else self._scheduler.plan()
        for slot in to_release:
            self._executor.release(slot)
        if plan is None:
            self._in_flight = None
            self._executor.wait()
            return False
        if plan.admitted:
            self._admit(plan.admitted, self._clock())
        call = self._dispatch(plan)
        previous, self._in_flight = self._in_flight, call
        if previous is not None:
            self._collect(previous)
        if call is None and plan.prefill is not None:
            # The next turn has nothing to fetch. Without a wait all chunks of a long prompt would
            # be queued on the device, ahead of whoever arrives next and past any abort.
            self._executor.wait()
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
        for slot, draft_cap in plan.draft_caps:
            self._executor.set_draft_cap(slot, draft_cap)
        if (chunk := plan.prefill) is not None:
            self._executor.prefill(
                chunk.slot, chunk.page_ids, chunk.start, chunk.tokens, chunk.next_token
            )
        for slot, occupant in plan.inserts:
            self._executor.insert(slot, occupant.request, occupant.draft_cap)
        if not plan.decoding:
            return None
        handle = self._executor.decode(plan.page_tables, draft_length=plan.draft_length)
        draft_cap = max(occupant.draft_cap for _, occupant in plan.decoding)
        return _Call(handle, plan.decoding, draft_cap, dispatched_at, plan.prefill is not None)

    def _collect(self, call: _Call) -> None:
        results = call.handle.fetch()
        started_at = max(call.dispatched_at, self._fetched_at)  # when the call before it had ended
        self._fetched_at = self._clock()
        with self._changed:
            if not call.after_prefill:
                seconds = self._fetched_at - started_at
                self._scheduler.observe_call(call.draft_cap, len(call.decoding), seconds)
            deliveries = self._scheduler.record(call.decoding, results)
        if deliveries:
            self._deliver(deliveries)

    def _take_aborts(self) -> list[int]:
        """Frees the slots of aborted requests; returns those that the executor must release."""
        slots = [self._scheduler.abort(ticket) for ticket in self._aborts]
        self._aborts.clear()
        return [slot for slot in slots if slot is not None]

    def _as_error(self, refusal: Refusal) -> QueueFullError | RequestTooLargeError:
        if not refusal.queue_full:
            return RequestTooLargeError(refusal.field, refusal.value, refusal.limit)
        kind = "requests" if refusal.field == "requests" else "tokens"
        return QueueFullError(kind, refusal.limit, refusal.value, self._retry_after_s)
