"""The engine as the service sees it: submit a request, read its stream, abort it. asyncio side.

Everything here runs on the event loop's thread, but for the callbacks that the engine thread
calls (`_admit`, `_expire`, `_deliver`, `_fail`), which only hand over.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Sequence

from service.engine.counters import EngineCounters
from service.engine.draft_policy import DraftPolicy
from service.engine.errors import (
    DeadlineError,
    DuplicateRequestError,
    EngineFailedError,
    EngineUnavailableError,
    NotFiniteError,
    RequestAbortedError,
)
from service.engine.loop import EngineLoop, EngineState
from service.engine.scheduler import Delivery, Load, Scheduler
from service.engine.stream import ChoiceStreams, TokenStream
from service.engine.types import (
    Executor,
    FinishReason,
    Limits,
    Priority,
    QueueStatus,
    Request,
)

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 30.0
"""How long `stop` waits for the engine thread after the grace: far above one decode call."""


class Engine:
    """Serves requests on an executor. Methods are for the event loop's thread."""

    def __init__(
        self,
        executor: Executor,
        *,
        max_waiting_requests: int = 256,
        max_waiting_tokens: int = 1 << 20,
        retry_after_s: float = 1.0,
        adaptive_drafts: bool = False,
        single_program: bool = False,
        counters: EngineCounters | None = None,
    ) -> None:
        """Takes an executor over; nothing runs before `start`.

        Args:
          executor: owned from now on by the engine's thread.
          max_waiting_requests: requests that may wait for a slot, at least 1.
          max_waiting_tokens: prompt tokens that may wait; an empty queue takes any that fits.
          retry_after_s: seconds that a client is told to wait when the queue is full and nothing
            is known of how fast it moves.
          adaptive_drafts: requests that name no draft cap get what pays, up to the default cap.
          single_program: every decode call runs the same program whatever the draft caps, so that
            no reply depends, to the last bit, on which programs agree with each other.
          counters: what to count on; from 0 if None.

        Raises:
          ValueError: a bound is below 1.
        """
        self._limits = executor.limits
        scheduler = Scheduler(
            self._limits,
            max_waiting_requests=max_waiting_requests,
            max_waiting_tokens=max_waiting_tokens,
            draft_policy=DraftPolicy(self._limits.draft_length) if adaptive_drafts else None,
            single_program=single_program,
        )
        self._loop = EngineLoop(
            executor,
            scheduler,
            admit=self._admit,
            expire=self._expire,
            deliver=self._deliver,
            fail=self._fail,
            retry_after_s=retry_after_s,
        )
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[int, TokenStream] = {}  # by ticket
        self._tickets: dict[str, list[int]] = {}  # by request id; of the choices not ended
        self._idle = asyncio.Event()
        self._idle.set()
        self.failed = asyncio.Event()
        """Set once the executor has raised and every stream has its error."""
        self.counters = counters or EngineCounters(self._limits.draft_length)
        """Updated on the event loop's thread, before the reader sees the tokens."""

    @property
    def limits(self) -> Limits:
        """What the executor can hold."""
        return self._limits

    @property
    def state(self) -> EngineState:
        """RUNNING is the only state in which requests are taken."""
        return self._loop.state

    def stalled(self, limit_s: float) -> bool:
        """Whether one turn at the work there is takes longer than `limit_s` seconds."""
        return self._loop.turn_seconds() > limit_s

    def load(self) -> Load:
        """How full the engine is now."""
        return self._loop.load()

    async def start(self) -> None:
        """Starts the engine's thread.

        Raises:
          EngineUnavailableError: it was started or stopped before.
        """
        self._event_loop = asyncio.get_running_loop()
        self._loop.start()

    async def stop(self, grace_s: float) -> None:
        """Refuses new requests, lets those taken finish, then aborts the rest and ends the thread.

        May be called again, also while it waits: the shorter grace wins.

        Args:
          grace_s: seconds for the requests already taken, waiting ones included. Those aborted end
            with EngineUnavailableError once what had arrived is read.

        Raises:
          EngineFailedError: the device did not come to rest within `JOIN_TIMEOUT_S`.
        """
        self._loop.refuse_new()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        for stream in list(self._streams.values()):
            self._end(stream)
            self.counters.aborted += 1
            stream.fail(EngineUnavailableError(EngineState.STOPPING.value))
        self._loop.stop()
        if not await asyncio.to_thread(self._loop.join, JOIN_TIMEOUT_S):
            raise EngineFailedError(
                f"a call of the executor has not returned in {JOIN_TIMEOUT_S} s"
            )

    def submit(self, request: Request) -> TokenStream:
        """Takes a request; its tokens arrive in the stream returned.

        Raises:
          EngineUnavailableError: the engine is not started, stopping, stopped or failed.
          DuplicateRequestError: a request with the same id is being served.
          QueueFullError: there is no room in the waiting queue.
          DeadlineError: its first token is not expected in time. What is not known is no reason.
          RequestTooLargeError: it can never be served within the limits.
          ValueError: the prompt is empty, or `max_tokens` below 1.
        """
        (stream,) = self.submit_choices((request,)).streams
        return stream

    def submit_choices(self, choices: Sequence[Request]) -> ChoiceStreams:
        """Takes the choices of one call, at least one, all with the same id: all of them or none.

        Raises:
          Exception: see `submit`.
        """
        request_id = choices[0].request_id
        for choice in choices:
            if not choice.prompt_ids or choice.max_tokens < 1:
                raise ValueError(
                    f"request {request_id!r} has {len(choice.prompt_ids)} prompt ids and "
                    f"max_tokens {choice.max_tokens}; both must be at least 1"
                )
        if request_id in self._tickets:
            raise DuplicateRequestError(request_id)
        tickets = self._loop.submit_all(choices)
        arrived = asyncio.Event()
        streams = [
            TokenStream(ticket, choice, self._on_stream_abort, arrived)
            for ticket, choice in zip(tickets, choices, strict=True)
        ]
        self._streams.update(zip(tickets, streams, strict=True))
        self._tickets[request_id] = list(tickets)
        self._idle.clear()
        return ChoiceStreams(streams, arrived, lambda: self.queue_status(request_id))

    def queue_status(self, request_id: str) -> QueueStatus | None:
        """Where a request stands in the waiting queue, by its first choice that waits.

        Returns:
          None when no choice of a request of that id waits (any more).
        """
        tickets = self._tickets.get(request_id, ())
        statuses = (self._loop.queue_status(ticket) for ticket in tickets)
        return next((status for status in statuses if status is not None), None)

    def estimated_wait(self, priority: Priority = Priority.NORMAL) -> float | None:
        """Seconds that a request which arrived now would wait; None while nothing is known."""
        return self._loop.estimated_wait_s(priority)

    def abort(self, request_id: str) -> bool:
        """Gives up a request by its id, in any phase, with all its choices that have not ended.

        Its reader gets RequestAbortedError.

        Returns:
          False if no request of that id is being served (any more).
        """
        tickets = self._tickets.get(request_id)
        if tickets is None:
            return False
        for stream in [self._streams[ticket] for ticket in tickets]:
            self._end(stream)
            self.counters.aborted += 1
            stream.fail(RequestAbortedError(request_id))
        return True

    @property
    def draft_cap_default(self) -> int:
        """How many tokens are drafted per round, at most, for requests that name no cap."""
        return self._loop.draft_cap_default

    def set_draft_cap_default(self, draft_cap: int) -> None:
        """Sets how many tokens are drafted per round for requests that name no cap.

        Running requests follow from the next decode call on.

        Raises:
          ValueError: it is not in 0 .. limits.draft_length.
        """
        self._loop.set_draft_cap_default(draft_cap)

    def check_integrity(self) -> None:
        """Proves that queue, slots, pages and streams fit together.

        Raises:
          RuntimeError: they do not; the text names both sides.
        """
        self._loop.check_integrity()
        tickets = sorted(ticket for open_ in self._tickets.values() for ticket in open_)
        if tickets != sorted(self._streams):
            raise RuntimeError(f"tickets {tickets} != open streams {sorted(self._streams)}")

    def _end(self, stream: TokenStream) -> None:
        """Forgets a request before its end; the engine's thread frees what it holds."""
        self._forget(stream)
        self._loop.abort(stream.ticket)

    def _forget(self, stream: TokenStream) -> None:
        del self._streams[stream.ticket]
        tickets = self._tickets[stream.request.request_id]
        tickets.remove(stream.ticket)
        if not tickets:
            del self._tickets[stream.request.request_id]
        if not self._streams:
            self._idle.set()

    def _on_stream_abort(self, stream: TokenStream, reason: FinishReason) -> None:
        if stream.ticket not in self._streams:
            return
        self._end(stream)
        if reason is FinishReason.NONE:
            self.counters.aborted += 1
        else:
            self.counters.finished[reason] += 1

    def _admit(self, tickets: Sequence[int], admitted_at: float) -> None:
        """On the engine's thread."""
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(self._on_admitted, tickets, admitted_at)

    def _on_admitted(self, tickets: Sequence[int], admitted_at: float) -> None:
        for ticket in tickets:
            if (stream := self._streams.get(ticket)) is not None:
                stream.admit(admitted_at)

    def _expire(self, tickets: Sequence[int], expired_at: float) -> None:
        """On the engine's thread."""
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(self._on_expired, tickets, expired_at)

    def _on_expired(self, tickets: Sequence[int], expired_at: float) -> None:
        for ticket in tickets:
            stream = self._streams.get(ticket)
            if stream is None:  # aborted meanwhile
                continue
            self._forget(stream)
            self.counters.expired += 1
            deadline = stream.request.first_token_deadline
            assert deadline is not None
            stream.fail(
                DeadlineError(
                    deadline - stream.submitted_at, waited_s=expired_at - stream.submitted_at
                )
            )

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        """On the engine's thread: one wake-up per decode call, for all streams."""
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(self._on_deliveries, deliveries)

    def _on_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            stream = self._streams.get(delivery.ticket)
            if stream is None:  # aborted meanwhile
                continue
            if delivery.error is not None:
                self._forget(stream)
                self.counters.dead_ends += 1
                stream.fail(delivery.error)
                continue
            chunk = delivery.chunk
            self.counters.add(stream.request, stream.speculation, chunk)
            if chunk.finish is not FinishReason.NONE:
                self._forget(stream)
            if chunk.finish is FinishReason.NOT_FINITE:
                stream.put(dataclasses.replace(chunk, finish=FinishReason.NONE))
                stream.fail(NotFiniteError(stream.request.request_id))
            else:
                stream.put(chunk)

    def _fail(self, error: BaseException) -> None:
        """On the engine's thread, as the last thing that it does."""
        assert self._event_loop is not None
        try:
            self._event_loop.call_soon_threadsafe(self._on_failure, error)
        except RuntimeError:
            # The event loop was closed without `stop`: nobody is left to tell.
            logger.warning("the engine failed after its event loop was closed")

    def _on_failure(self, error: BaseException) -> None:
        for stream in list(self._streams.values()):
            self._forget(stream)
            self.counters.failed += 1
            failure = EngineFailedError(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            stream.fail(failure)
        self.failed.set()
