"""The reply of one request, as its reader sees it: a buffer into which chunks merge."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from service.engine.types import FinishReason, Request, SpeculationStats, TokenChunk


class TokenStream:
    """Async iterator over the chunks of one request; for one reader, on the event loop's thread.

    Chunks that arrive while nobody reads become one. A reader that stops reading therefore holds at
    most `max_tokens` ids, makes nobody wait, and loses nothing: the next chunk it takes is larger.

    Leaving the stream early must abort it: use `with stream:`, or call `abort()`.
    """

    def __init__(
        self, request: Request, on_abort: Callable[[TokenStream, FinishReason], None]
    ) -> None:
        """Made by `Engine.submit`.

        Args:
          request: whose reply it is.
          on_abort: called by `abort`, whatever has become of the request by then.
        """
        self.request = request
        self._on_abort = on_abort
        self._arrived = asyncio.Event()
        self._token_ids: list[int] = []
        self._drafted: list[bool] = []
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
          EngineUnavailableError: the engine stopped before the request ended.
          EngineFailedError: the executor raised.
        """
        while not self._ended:
            if self._token_ids or self._finish is not FinishReason.NONE:
                return self._take()
            if self._error is not None:
                self._ended = True
                raise self._error
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
        self._token_ids.clear()
        self._drafted.clear()
        self._arrived.set()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def put(self, chunk: TokenChunk) -> None:
        """Merges a chunk into the buffer (for the engine)."""
        self._token_ids += chunk.token_ids
        self._drafted += chunk.drafted
        self._finish = chunk.finish
        self._speculation = chunk.speculation
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error once what has arrived is read (for the engine)."""
        self._error = error
        self._arrived.set()

    def _take(self) -> TokenChunk:
        chunk = TokenChunk(
            tuple(self._token_ids), tuple(self._drafted), self._finish, self._speculation
        )
        self._token_ids.clear()
        self._drafted.clear()
        self._ended = self._finish is not FinishReason.NONE
        return chunk
