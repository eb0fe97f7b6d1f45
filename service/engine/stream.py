"""Replies as their reader sees them: buffers into which chunks merge."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from service.engine.types import (
    FinishReason,
    QueueStatus,
    Request,
    SpeculationStats,
    TokenChunk,
    TopTokens,
)

QUEUE_INTERVAL_S = 0.25
"""Least time between two statuses of `ChoiceStreams.queue_changes`."""


class TokenStream:
    """Async iterator over the chunks of one request; for one reader, on the event loop's thread.

    Chunks that arrive while nobody reads become one. A reader that stops reading therefore holds at
    most `max_tokens` ids, makes nobody wait, and loses nothing: the next chunk it takes is larger.

    Leaving the stream early must abort it: use `with stream:`, or call `abort()`.
    """

    def __init__(
        self,
        ticket: int,
        request: Request,
        on_abort: Callable[[TokenStream, FinishReason], None],
        arrived: asyncio.Event,
    ) -> None:
        """Made by `Engine.submit`.

        Args:
          ticket: the number of the request in the engine.
          request: whose reply it is.
          on_abort: called by `abort`, whatever has become of the request by then.
          arrived: set whenever something arrives; streams that are read together share it.
        """
        self.ticket = ticket
        self.request = request
        self.submitted_at = time.monotonic()
        self.admitted_at: float | None = None
        """When the request got its slot, on the clock of `time.monotonic`; None while it waits."""
        self._on_abort = on_abort
        self._arrived = arrived
        self._token_ids: list[int] = []
        self._drafted: list[bool] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopTokens] = []
        self._prompt_logprobs: tuple[float, ...] = ()
        self._finish = FinishReason.NONE
        self._speculation = SpeculationStats()
        self._error: Exception | None = None
        self._ended = False

    @property
    def speculation(self) -> SpeculationStats:
        """Cumulative figures of what has arrived, read or not."""
        return self._speculation

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenChunk:
        """Waits for tokens and takes all that have arrived. Cancelling the wait loses none.

        Raises:
          StopAsyncIteration: the last chunk was taken, or the reader called `abort`.
          RequestAbortedError: somebody else aborted the request.
          DeadlineError: its deadline passed before it got a slot.
          ConstraintError: its constraint lets nothing follow.
          EngineUnavailableError: the engine stopped before the request ended.
          EngineFailedError: the executor raised.
        """
        while not self._ended:
            if (chunk := self.take()) is not None:
                return chunk
            self.raise_error()
            self._arrived.clear()
            await self._arrived.wait()
        raise StopAsyncIteration

    def abort(self, reason: FinishReason = FinishReason.NONE) -> None:
        """Ends the stream: what was not read is dropped, the slot freed. Idempotent in every phase.

        Args:
          reason: what to count the request under if the reader has all it wanted (STOP: a stop
            string matched); NONE counts it as aborted.
        """
        self._on_abort(self, reason)
        self._ended = True
        self._clear()
        self._arrived.set()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def admit(self, admitted_at: float) -> None:
        """Tells that the request has got its slot (for the engine)."""
        self.admitted_at = admitted_at
        self._arrived.set()

    def put(self, chunk: TokenChunk) -> None:
        """Merges a chunk into the buffer (for the engine)."""
        self._token_ids += chunk.token_ids
        self._drafted += chunk.drafted
        self._logprobs += chunk.logprobs
        self._top_logprobs += chunk.top_logprobs
        self._prompt_logprobs += chunk.prompt_logprobs
        self._finish = chunk.finish
        self._speculation = chunk.speculation
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error once what has arrived is read (for the engine)."""
        self._error = error
        self._arrived.set()

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to take, now or later."""
        return self._ended

    def raise_error(self) -> None:
        """Raises what the stream ended with, if that was an error."""
        if self._error is not None and not self._ended:
            self._ended = True
            raise self._error

    def take(self) -> TokenChunk | None:
        """Takes all tokens that have arrived; None if none have."""
        if self._ended or not (self._token_ids or self._finish is not FinishReason.NONE):
            return None
        chunk = TokenChunk(
            tuple(self._token_ids),
            tuple(self._drafted),
            self._finish,
            self._speculation,
            tuple(self._logprobs),
            tuple(self._top_logprobs),
            self._prompt_logprobs,
        )
        self._clear()
        self._ended = self._finish is not FinishReason.NONE
        return chunk

    def _clear(self) -> None:
        self._token_ids.clear()
        self._drafted.clear()
        self._logprobs.clear()
        self._top_logprobs.clear()
        self._prompt_logprobs = ()


class ChoiceStreams:
    """The streams of one client call, one per choice, read as one; for one reader.

    Leaving early must abort them: use `with streams:`, or call `abort()`.
    """

    def __init__(
        self,
        streams: Sequence[TokenStream],
        arrived: asyncio.Event,
        queue_status: Callable[[], QueueStatus | None],
    ) -> None:
        """Made by `Engine.submit_choices`.

        Args:
          streams: by choice.
          arrived: the event that they share.
          queue_status: where they stand in the waiting queue.
        """
        self.streams = tuple(streams)
        self._arrived = arrived
        self._queue_status = queue_status
        self._first = 0

    async def admitted(self) -> None:
        """Waits until a choice has its slot, or the reader has aborted them all.

        Raises:
          EngineError: it will never have one; see `TokenStream.__anext__`.
        """
        while not self._is_admitted:
            for stream in self.streams:
                stream.raise_error()
            self._arrived.clear()
            await self._arrived.wait()

    async def queue_changes(self) -> AsyncGenerator[QueueStatus, None]:
        """Yields where they stand in the waiting queue until `admitted`: at once, then when they move.

        At most one in `QUEUE_INTERVAL_S`. Raises like `admitted`.
        """
        position = None
        while not self._is_admitted:
            status = self._queue_status()
            if status is not None and status.position != position:
                position = status.position
                yield status
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(QUEUE_INTERVAL_S):
                    await self.admitted()

    @property
    def _is_admitted(self) -> bool:
        admitted = any(stream.admitted_at is not None for stream in self.streams)
        return admitted or all(stream.ended for stream in self.streams)

    def __aiter__(self) -> ChoiceStreams:
        return self

    async def __anext__(self) -> tuple[int, TokenChunk]:
        """Waits for tokens of any choice and takes all that have arrived for it, choices in turn.

        Returns:
          The choice's index and its tokens.

        Raises:
          StopAsyncIteration: the last chunk of every choice was taken, or the reader aborted it.
          EngineError: see `TokenStream.__anext__`; everything that arrived before was taken.
        """
        while True:
            for step in range(len(self.streams)):
                index = (self._first + step) % len(self.streams)
                if (chunk := self.streams[index].take()) is not None:
                    self._first = index + 1
                    return index, chunk
            for stream in self.streams:
                stream.raise_error()
            if all(stream.ended for stream in self.streams):
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()

    def abort(self) -> None:
        """Ends every choice; see `TokenStream.abort`."""
        for stream in self.streams:
            stream.abort()

    def __enter__(self) -> ChoiceStreams:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()
