"""Checks the messages of one reply as they come, whatever connections they come over."""

from __future__ import annotations

import collections
import hashlib
from array import array

from service.pb import inference_pb2

CANCELLED = inference_pb2.FINISH_REASON_CANCELLED


class StreamCheck:
    """Numbers without gaps, one Started, one Finished per choice, every token delivered once."""

    def __init__(self, choices: int) -> None:
        """Expects a reply with that many choices."""
        self._choices = choices
        self._next = 0
        self._tokens: collections.Counter[int] = collections.Counter()
        self._digests = [hashlib.sha256() for _ in range(choices)]
        self.started = False
        self.finished: dict[int, inference_pb2.Finished] = {}
        self.problem = ""
        """The first thing that was wrong; empty when nothing was."""

    @property
    def last_sequence(self) -> int | None:
        """Number of the last message; None before the first."""
        return self._next - 1 if self._next else None

    @property
    def tokens(self) -> int:
        """Tokens of all choices so far."""
        return self._tokens.total()

    @property
    def cancelled(self) -> bool:
        """Whether a choice ended because of Cancel."""
        return any(finished.reason == CANCELLED for finished in self.finished.values())

    def take(self, message: inference_pb2.GenerateResponse) -> None:
        """Checks one message."""
        if message.sequence != self._next:
            self._found(f"message {message.sequence} came where {self._next} was due")
        self._next = message.sequence + 1
        match message.WhichOneof("kind"):
            case "queued":
                if self.started:
                    self._found("a Queued came behind Started")
            case "started":
                if self.started:
                    self._found("Started came twice")
                self.started = True
            case "delta":
                self._take_delta(message.delta)
            case "finished":
                self._take_finished(message.finished)
            case kind:
                self._found(f"a message of kind {kind} came")

    def check_end(self) -> None:
        """Checks that nothing is missing, once the call has ended with OK."""
        if not self.started:
            self._found("the stream ended without Started")
        if missing := set(range(self._choices)) - set(self.finished):
            self._found(f"the stream ended without Finished of choices {sorted(missing)}")

    def digest(self) -> bytes:
        """Of the token ids of all choices."""
        return b"".join(digest.digest() for digest in self._digests)

    def _take_delta(self, delta: inference_pb2.Delta) -> None:
        index = delta.index
        if not self.started or index in self.finished or index >= self._choices:
            self._found(f"a Delta of choice {index} came before Started or behind its end")
            return
        self._tokens[index] += len(delta.token_ids)
        self._digests[index].update(array("I", delta.token_ids).tobytes())

    def _take_finished(self, finished: inference_pb2.Finished) -> None:
        index, told = finished.index, finished.usage.completion_tokens
        if not self.started or index in self.finished or index >= self._choices:
            self._found(f"a Finished of choice {index} came before Started or a second time")
            return
        self.finished[index] = finished
        if told != self._tokens[index]:
            self._found(f"choice {index} has {told} tokens, {self._tokens[index]} were delivered")

    def _found(self, problem: str) -> None:
        self.problem = self.problem or problem
