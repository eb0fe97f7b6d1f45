"""The engine as the service sees it: submit a request, read its stream, abort it. asyncio side.

Everything here runs on the event loop's thread, but for the two callbacks that the engine thread
calls (`_deliver`, `_fail`), which only hand over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from service.engine.counters import EngineCounters
from service.engine.errors import (
    DuplicateRequestError,
    EngineFailedError,
    EngineUnavailableError,
    RequestAbortedError,
)
from service.engine.loop import EngineLoop, EngineState
from service.engine.scheduler import Delivery, Load, Scheduler
from service.engine.stream import TokenStream
from service.engine.types import Executor, FinishReason, Limits, Request

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
    ) -> None:
        """Takes an executor over; nothing runs before `start`.

        Args:
          executor: owned from now on by the engine's thread.
          max_waiting_requests: requests that may wait for a slot, at least 1.
          max_waiting_tokens: prompt tokens that may wait; an empty queue takes any that fits.
          retry_after_s: seconds that a client is told to wait when the queue is full.

        Raises:
          ValueError: a bound is below 1.
        """
        self._limits = executor.limits
        scheduler = Scheduler(
            self._limits,
            max_waiting_requests=max_waiting_requests,
            max_waiting_tokens=max_waiting_tokens,
        )
        self._loop = EngineLoop(
            executor,
            scheduler,
            deliver=self._deliver,
            fail=self._fail,
            retry_after_s=retry_after_s,
        )
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[int, TokenStream] = {}  # by ticket
        self._tickets: dict[str, int] = {}  # by request id
        self._idle = asyncio.Event()
        self._idle.set()
        self.counters = EngineCounters(self._limits.draft_length)
        """Updated on the event loop's thread, before the reader sees the tokens."""

    @property
    def limits(self) -> Limits:
        """What the executor can hold."""
        return self._limits

    @property
    def state(self) -> EngineState:
        """RUNNING is the only state in which requests are taken."""
        return self._loop.state

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
        for ticket, stream in list(self._streams.items()):
            self._end(ticket, stream)
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
          RequestTooLargeError: it can never be served within the limits.
          ValueError: the prompt is empty, or `max_tokens` below 1.
        """
        if not request.prompt_ids or request.max_tokens < 1:
            raise ValueError(
                f"request {request.request_id!r} has {len(request.prompt_ids)} prompt ids and "
                f"max_tokens {request.max_tokens}; both must be at least 1"
            )
        if request.request_id in self._tickets:
            raise DuplicateRequestError(request.request_id)
        ticket = self._loop.submit(request)
        stream = TokenStream(request, self._on_stream_abort)
        self._streams[ticket] = stream
        self._tickets[request.request_id] = ticket
        self._idle.clear()
        return stream

    def abort(self, request_id: str) -> bool:
        """Gives up a request by its id, in any phase. Its reader gets RequestAbortedError.

        Returns:
          False if no request of that id is being served (any more).
        """
        ticket = self._tickets.get(request_id)
        if ticket is None:
            return False
        stream = self._streams[ticket]
        self._end(ticket, stream)
        self.counters.aborted += 1
        stream.fail(RequestAbortedError(request_id))
        return True

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
        if len(self._tickets) != len(self._streams):
            raise RuntimeError(f"{len(self._tickets)} ids != {len(self._streams)} open streams")

    def _end(self, ticket: int, stream: TokenStream) -> None:
        """Forgets a request before its end; the engine's thread frees what it holds."""
        self._forget(ticket, stream)
        self._loop.abort(ticket)

    def _forget(self, ticket: int, stream: TokenStream) -> None:
        del self._streams[ticket]
        del self._tickets[stream.request.request_id]
        if not self._streams:
            self._idle.set()

    def _on_stream_abort(self, stream: TokenStream, reason: FinishReason) -> None:
        ticket = self._tickets.get(stream.request.request_id)
        # The id may be in use again by a later request, whose stream is another one.
        if ticket is None or self._streams[ticket] is not stream:
            return
        self._end(ticket, stream)
        if reason is FinishReason.NONE:
            self.counters.aborted += 1
        else:
            self.counters.finished[reason] += 1

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        """On the engine's thread: one wake-up per decode call, for all streams."""
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(self._on_deliveries, deliveries)

    def _on_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            stream = self._streams.get(delivery.ticket)
            if stream is None:  # aborted meanwhile
                continue
            self.counters.add(stream.request, stream.speculation, delivery.chunk)
            stream.put(delivery.chunk)
            if delivery.chunk.finish is not FinishReason.NONE:
                self._forget(delivery.ticket, stream)

    def _fail(self, error: BaseException) -> None:
        """On the engine's thread, as the last thing that it does."""
        assert self._event_loop is not None
        try:
            self._event_loop.call_soon_threadsafe(self._on_failure, error)
        except RuntimeError:
            # The event loop was closed without `stop`: nobody is left to tell.
            logger.warning("the engine failed after its event loop was closed")

    def _on_failure(self, error: BaseException) -> None:
        for ticket, stream in list(self._streams.items()):
            self._forget(ticket, stream)
            self.counters.failed += 1
            failure = EngineFailedError(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            stream.fail(failure)
