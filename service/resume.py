"""Replies that outlive their call: a stream that broke goes on where it broke, exactly.

A kept reply is pulled by at most one call at a time. What a call has pulled is remembered until the
window closes, so that the next call can repeat what the client has not seen. While nobody pulls, the
engine goes on, and what it generates merges in the streams' buffers (at most `max_tokens`).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from service.errors import resume_out_of_range, resume_superseded, resume_unknown
from service.pb import inference_pb2
from service.reply_stream import ReplyStream

Write = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]


class KeptReply:
    """One reply of a request with `resume_window`."""

    def __init__(
        self, store: "ResumeStore", request_id: str, stream: ReplyStream, window_s: float
    ) -> None:
        """Made by `ResumeStore.keep`."""
        self._store = store
        self._request_id = request_id
        self._stream = stream
        self._window_s = window_s
        self._messages: deque[inference_pb2.GenerateResponse] = deque()
        self._next = 0  # sequence number of the next message to pull
        self._ended = False
        self._error: Exception | None = None
        self._reader: asyncio.Task[None] | None = None
        self._superseded: set[asyncio.Task[None]] = set()
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def first_kept(self) -> int:
        """Sequence number of the oldest message that can be repeated."""
        return self._next - len(self._messages)

    @property
    def sent(self) -> int:
        """Messages pulled so far: their sequence numbers are 0 .. sent - 1."""
        return self._next

    @property
    def attached(self) -> bool:
        """Whether a call is reading."""
        return self._reader is not None

    async def serve(self, after_sequence: int | None, write: Write) -> None:
        """Repeats what follows `after_sequence` (None: everything), then goes on to the end.

        A call that still reads ends with ABORTED.

        Raises:
          ServiceError: OUT_OF_RANGE; ABORTED when a later call took over.
          Exception: what the reply ended with.
        """
        position = 0 if after_sequence is None else after_sequence + 1
        if not self.first_kept <= position <= self._next:
            raise resume_out_of_range(self._request_id, position - 1, self.first_kept, self._next)
        task = self._attach()
        try:
            while True:
                while position < self._next:
                    if position < self.first_kept:  # dropped while the client did not read
                        raise resume_out_of_range(
                            self._request_id, position - 1, self.first_kept, self._next
                        )
                    message = self._messages[position - self.first_kept]
                    position += 1
                    await write(message)
                if self._ended:
                    break
                await self._pull()
            if self._error is not None:
                raise self._error
        except asyncio.CancelledError:
            if task not in self._superseded:
                raise
            task.uncancel()
            raise resume_superseded(self._request_id) from None
        finally:
            self._superseded.discard(task)
            if self._reader is task:
                self._detach()

    def drop(self) -> None:
        """Frees everything; a call that reads goes on without being kept."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._store.forget(self._request_id, sum(map(message_size, self._messages)))
        self._messages.clear()
        self._stream.abort()

    def drop_oldest(self) -> int:
        """Gives up the oldest message; returns its bytes, 0 when there is none."""
        return message_size(self._messages.popleft()) if self._messages else 0

    def _attach(self) -> "asyncio.Task[None]":
        task = asyncio.current_task()
        assert task is not None, "serve runs inside a call"
        if self._reader is not None:
            self._superseded.add(self._reader)
            self._reader.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._reader = task
        return task

    def _detach(self) -> None:
        self._reader = None
        self._expiry = asyncio.get_running_loop().call_later(self._window_s, self.drop)

    async def _pull(self) -> None:
        try:
            messages = await self._stream.read()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a later call must end with it, too
            self._error, self._ended = error, True
            return
        self._ended = not messages
        self._messages.extend(messages)
        self._next += len(messages)
        self._store.account(self, sum(map(message_size, messages)))


class ResumeStore:
    """The kept replies of a server, by request id."""

    def __init__(self, max_bytes: int) -> None:
        """Starts empty.

        Args:
          max_bytes: of messages remembered for all replies together. Beyond it a reply gives up its
            oldest messages.
        """
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: dict[str, KeptReply] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """Bytes of the messages remembered."""
        return self._bytes

    def keep(self, request_id: str, stream: ReplyStream, window_s: float) -> KeptReply:
        """Keeps a reply until `window_s` seconds after its last call has ended."""
        kept = self._kept[request_id] = KeptReply(self, request_id, stream, window_s)
        return kept

    def find(self, request_id: str) -> KeptReply:
        """Returns the reply of a request.

        Raises:
          ServiceError: NOT_FOUND.
        """
        kept = self._kept.get(request_id)
        if kept is None:
            raise resume_unknown(request_id)
        return kept

    def cancel(self, request_id: str) -> bool:
        """Drops a reply that no call reads; returns whether there was one."""
        kept = self._kept.get(request_id)
        if kept is None or kept.attached:
            return False
        kept.drop()
        return True

    def drop_detached(self) -> None:
        """Drops the replies that no call reads: nobody will resume them (the server drains)."""
        for kept in [kept for kept in self._kept.values() if not kept.attached]:
            kept.drop()

    def forget(self, request_id: str, size: int) -> None:
        """Takes a reply out (for `KeptReply`)."""
        self._kept.pop(request_id, None)
        self._bytes -= size

    def account(self, kept: KeptReply, size: int) -> None:
        """Counts new messages of a reply, at the cost of its oldest (for `KeptReply`)."""
        self._bytes += size
        while self._bytes > self._max_bytes and (freed := kept.drop_oldest()):
            self._bytes -= freed


def message_size(message: inference_pb2.GenerateResponse) -> int:
    """Bytes of a message on the wire."""
    return message.ByteSize()
