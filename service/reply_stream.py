"""One reply as its reader pulls it: from the streams of the choices to the messages of the call."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from service.engine.errors import RequestAbortedError
from service.engine.stream import ChoiceStreams
from service.engine.types import FinishReason, QueueStatus
from service.pb import inference_pb2
from service.reply import Reply


class ReplyStream:
    """The messages of one request, in order; for one reader at a time.

    Leaving early must free the slots: use `with stream:`, or call `abort`.
    """

    def __init__(self, choices: ChoiceStreams, reply: Reply, *, include_queue: bool) -> None:
        """Takes over what `Engine.submit_choices` returned, and the reply that it feeds."""
        self._choices = choices
        self._reply = reply
        self._include_queue = include_queue
        self._queue: AsyncGenerator[QueueStatus, None] | None = None
        self._started = False

    async def read(self) -> list[inference_pb2.GenerateResponse]:
        """Waits for more of the reply; empty at its end. Cancelling the wait loses nothing.

        Nothing comes before the request has a slot, unless it asked for its place in the queue:
        clients retry a call only until its first message.

        Raises:
          EngineError: see `ChoiceStreams`; everything that came before was returned.
        """
        try:
            if not self._started:
                return [await self._first()]
            return await self._more()
        except RequestAbortedError:
            self.abort()
            started = [] if self._started else [self._start()]
            return [*started, *self._reply.cancel()]

    async def _first(self) -> inference_pb2.GenerateResponse:
        """The place in the queue as long as it changes, then the start."""
        if not self._include_queue:
            await self._choices.admitted()
            return self._start()
        self._queue = self._queue or self._choices.queue_changes()
        try:
            status = await anext(self._queue, None)
        except asyncio.CancelledError:
            self._queue = None  # a generator does not survive that
            raise
        return self._start() if status is None else self._reply.queued(status)

    def _start(self) -> inference_pb2.GenerateResponse:
        self._started = True
        return self._reply.started()

    async def _more(self) -> list[inference_pb2.GenerateResponse]:
        async for index, chunk in self._choices:
            messages = self._reply.push(index, chunk)
            if self._reply.ended(index):  # by a stop string, perhaps: the engine knows of none
                self._choices.streams[index].abort(FinishReason.STOP)
            if messages:
                return messages
        return []

    def abort(self) -> None:
        """Frees the slots of the choices that have not ended. Idempotent."""
        self._choices.abort()

    def __enter__(self) -> "ReplyStream":
        return self

    def __exit__(self, *_: Any) -> None:
        self.abort()
