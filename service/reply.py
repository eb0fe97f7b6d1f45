"""From the engine's chunks to the messages of one reply, choice by choice."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from service.chat_reply import ChatReply
from service.engine.stream import TokenStream
from service.engine.types import FinishReason, QueueStatus, SpeculationStats, TokenChunk
from service.model_card import ModelCard
from service.pb import inference_pb2
from service.receipt import ALGORITHM, receipt_digest
from service.text.detokenizer import Detokenizer
from service.text.stopping import StopMatcher
from service.text.tokenizer import Tokenizer
from service.translation import duration, sampling_message, speculation_usage
from service.validation import AcceptedRequest

REASONS = {
    FinishReason.END_OF_SEQUENCE: inference_pb2.FINISH_REASON_END_OF_SEQUENCE,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.MAX_TOKENS: inference_pb2.FINISH_REASON_MAX_TOKENS,
    FinishReason.CONTEXT_LENGTH: inference_pb2.FINISH_REASON_CONTEXT_LENGTH,
}


class ReplyObserver(Protocol):
    """Is told how the choices of replies come along; all times are in seconds."""

    def first_token(self, queued: float | None, waited: float) -> None:
        """A choice got its first token after `waited`, of which it had no slot for `queued`."""
        ...

    def delivered(self, tokens: int, since_last: float) -> None:
        """A choice got further tokens, at least one, `since_last` after those before."""
        ...

    def finished(
        self, prompt_tokens: int, completion_tokens: int, first_token: float | None, total: float
    ) -> None:
        """A choice ended after `total`; its first token, if any, came after `first_token`."""
        ...


class Reply:
    """The messages of one reply, numbered in the order in which they are asked for.

    `queued` any number of times, `started` once, then `push` for each chunk until every choice has
    ended, or `cancel`.
    """

    def __init__(
        self,
        accepted: AcceptedRequest,
        streams: Sequence[TokenStream],
        tokenizer: Tokenizer,
        card: ModelCard,
        clock: Callable[[], float] = time.monotonic,
        observers: Sequence[ReplyObserver] = (),
    ) -> None:
        """Starts the reply.

        Args:
          accepted: what was asked for.
          streams: one per choice; only their times are read here.
          tokenizer: of the served model.
          card: of the served model.
          clock: seconds, the one that the streams' times are on.
          observers: who is told how it comes along.
        """
        self._accepted = accepted
        self._card = card
        self._choices = [
            ChoiceReply(index, accepted, stream, tokenizer, card.fingerprint, clock, observers)
            for index, stream in enumerate(streams)
        ]
        self._prompt_told = not accepted.choices[0].prompt_logprobs
        self._sequence = 0

    def started(self) -> inference_pb2.GenerateResponse:
        """Returns the first message."""
        request = self._accepted.choices[0]
        started = inference_pb2.Started(
            request_id=request.request_id,
            model=self._card.name,
            fingerprint=self._card.fingerprint,
            seed=request.sampling.seed,
            prompt_tokens=len(request.prompt_ids),
        )
        return self._number(inference_pb2.GenerateResponse(started=started))

    def queued(self, status: QueueStatus) -> inference_pb2.GenerateResponse:
        """Returns a message that comes before `started`."""
        queued = inference_pb2.Queued(position=status.position)
        if status.estimated_wait_s is not None:
            queued.estimated_wait_duration.CopyFrom(duration(status.estimated_wait_s))
        return self._number(inference_pb2.GenerateResponse(queued=queued))

    def push(self, index: int, chunk: TokenChunk) -> list[inference_pb2.GenerateResponse]:
        """Adds a chunk of a choice; returns what of it can be shown, and the end if it is that."""
        choice = self._choices[index]
        return [*self._prompt(chunk), *self._messages(choice, choice.push(chunk))]

    def cancel(self) -> list[inference_pb2.GenerateResponse]:
        """Ends the choices that have not ended; returns what was held back, and their ends."""
        return [
            message
            for choice in self._choices
            if not choice.ended
            for message in self._messages(choice, choice.cancel())
        ]

    def ended(self, index: int) -> bool:
        """Whether a choice is complete: by a stop string, or because the engine ended it."""
        return self._choices[index].ended

    def _prompt(self, chunk: TokenChunk) -> list[inference_pb2.GenerateResponse]:
        """The prompt's scores, once: the first chunk of any choice has them, and they are the same."""
        if self._prompt_told or not chunk.token_ids:
            return []
        self._prompt_told = True
        prompt = inference_pb2.Prompt(
            token_ids=self._accepted.choices[0].prompt_ids, logprobs=chunk.prompt_logprobs
        )
        return [self._number(inference_pb2.GenerateResponse(prompt=prompt))]

    def _messages(
        self, choice: "ChoiceReply", deltas: Sequence[inference_pb2.Delta]
    ) -> list[inference_pb2.GenerateResponse]:
        messages = [self._number(inference_pb2.GenerateResponse(delta=delta)) for delta in deltas]
        if choice.ended:
            finished = choice.finished()
            messages.append(self._number(inference_pb2.GenerateResponse(finished=finished)))
        return messages

    def _number(self, message: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse:
        message.sequence = self._sequence
        self._sequence += 1
        return message


class ChoiceReply:
    """The pieces and the end of one choice: `push` for each chunk until `ended`, then `finished`."""

    def __init__(
        self,
        index: int,
        accepted: AcceptedRequest,
        stream: TokenStream,
        tokenizer: Tokenizer,
        fingerprint: str,
        clock: Callable[[], float],
        observers: Sequence[ReplyObserver],
    ) -> None:
        """Starts with nothing; see `Reply`."""
        self._accepted = accepted
        self._request = stream.request
        self._stream = stream
        self._fingerprint = fingerprint
        self._clock = clock
        self._observers = observers
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._stop_matcher = StopMatcher(
            accepted.stop_strings, show_match=accepted.stopping.include_stop_string
        )
        self._chat = None if accepted.chat is None else ChatReply(accepted.chat, stream.request)
        self._first_token_at: float | None = None
        self._last_token_at = 0.0
        self._completion_tokens = 0
        self._token_ids: list[int] = []  # for the receipt only
        self._speculation = SpeculationStats()
        self._finished = inference_pb2.Finished(index=index)
        self.ended = False
        """True once a stop string matched or the engine ended the request: nothing may follow."""

    def push(self, chunk: TokenChunk) -> list[inference_pb2.Delta]:
        """Adds a chunk; returns what of it can be shown, which may be nothing.

        Tokens behind the one that completes a stop string were never part of the reply.
        """
        self._speculation = chunk.speculation
        text = ""
        count = 0
        for token_id in chunk.token_ids:
            count += 1
            if self._chat is not None:
                self._chat.count(token_id)
            if count == len(chunk.token_ids) and chunk.finish in (
                FinishReason.END_OF_SEQUENCE,
                FinishReason.STOP,
            ):
                self._finished.stop_token_id = token_id  # delivered as an id, without its text
                break
            piece = self._detokenizer.feed(token_id)
            too_early = self._completion_tokens + count <= self._request.min_tokens
            text += piece if too_early else self._show(piece)
            if self.ended:
                break
        if chunk.finish is not FinishReason.NONE and not self.ended:
            text += self._show(self._detokenizer.flush())
            self._end(REASONS[chunk.finish])
            text += self._stop_matcher.flush()
        if count:
            self._take_time(count)
        self._completion_tokens += count
        if self._accepted.include_receipt:
            self._token_ids += chunk.token_ids[:count]
        return self._deltas(text, chunk, count)

    def cancel(self) -> list[inference_pb2.Delta]:
        """Ends the choice early; returns what was held back."""
        text = self._show(self._detokenizer.flush()) + self._stop_matcher.flush()
        self._end(inference_pb2.FINISH_REASON_CANCELLED)
        return self._deltas(text)

    def finished(self) -> inference_pb2.Finished:
        """Returns the end."""
        started_at, usage = self._stream.submitted_at, self._finished.usage
        usage.prompt_tokens = len(self._request.prompt_ids)
        usage.completion_tokens = self._completion_tokens
        if self._chat is not None:
            usage.reasoning_tokens = self._chat.reasoning_tokens
        if self._speculation.drafted:
            usage.speculation.CopyFrom(speculation_usage(self._speculation))
        if self._stream.admitted_at is not None:
            queued = duration(self._stream.admitted_at - started_at)
            usage.timing.queue_duration.CopyFrom(queued)
        if self._first_token_at is not None:
            waited = duration(self._first_token_at - started_at)
            usage.timing.first_token_duration.CopyFrom(waited)
        total = self._clock() - started_at
        usage.timing.total_duration.CopyFrom(duration(total))
        first_token = None if self._first_token_at is None else self._first_token_at - started_at
        for observer in self._observers:
            observer.finished(usage.prompt_tokens, usage.completion_tokens, first_token, total)
        cancelled = self._finished.reason == inference_pb2.FINISH_REASON_CANCELLED
        if self._accepted.include_receipt and not cancelled:
            self._finished.receipt.CopyFrom(self._receipt())
        return self._finished

    def _take_time(self, tokens: int) -> None:
        """Notes that tokens are delivered now, and tells the observers."""
        now, last, stream = self._clock(), self._last_token_at, self._stream
        self._last_token_at = now
        if self._first_token_at is not None:
            for observer in self._observers:
                observer.delivered(tokens, now - last)
            return
        self._first_token_at = now
        admitted_at = stream.admitted_at
        queued = None if admitted_at is None else admitted_at - stream.submitted_at
        for observer in self._observers:
            observer.first_token(queued, now - stream.submitted_at)

    def _receipt(self) -> inference_pb2.Receipt:
        sampling, stopping = sampling_message(self._request.sampling), self._accepted.stopping
        constraint, prompt_ids = self._accepted.constraint, self._request.prompt_ids
        return inference_pb2.Receipt(
            algorithm=ALGORITHM,
            digest=receipt_digest(
                self._fingerprint, prompt_ids, sampling, stopping, constraint, self._token_ids
            ),
            sampling=sampling,
            stopping=stopping,
            constraint=constraint if constraint.WhichOneof("kind") else None,
        )

    def _show(self, text: str) -> str:
        """Passes text through the stop strings; ends the choice when one matches."""
        if self.ended:
            return ""
        released = self._stop_matcher.feed(text)
        if released.stop_string is not None:
            self._finished.stop_string = released.stop_string
            self._end(inference_pb2.FINISH_REASON_STOP)
        return released.text

    def _end(self, reason: inference_pb2.FinishReason) -> None:
        if not self.ended:
            self._finished.reason = reason
        self.ended = True

    def _deltas(
        self, text: str, chunk: TokenChunk | None = None, count: int = 0
    ) -> list[inference_pb2.Delta]:
        """The pieces that say `text`, and what was asked for of the chunk's first tokens.

        One piece, or several where a chat's reply says several things.
        """
        accepted = self._accepted
        if self._chat is None:
            deltas = [inference_pb2.Delta(text=text)]
        else:
            deltas = self._chat.feed(text)
            if self.ended:
                deltas += self._chat.finish(self._finished)
        if not accepted.include_text:
            deltas = []
        if chunk is not None:
            deltas = deltas or [inference_pb2.Delta()]
            self._add_tokens(deltas[0], chunk, count)
        shown = [delta for delta in deltas if delta.ByteSize()]
        for delta in shown:
            delta.index = self._finished.index
        return shown

    def _add_tokens(self, delta: inference_pb2.Delta, chunk: TokenChunk, count: int) -> None:
        accepted, token_ids = self._accepted, chunk.token_ids[:count]
        if accepted.include_token_ids:
            delta.token_ids.extend(token_ids)
        if accepted.include_token_bytes:
            delta.token_bytes.extend(map(self._tokenizer.token_bytes, token_ids))
        if accepted.include_drafted:
            delta.drafted.extend(chunk.drafted[:count])
        # There are none unless the request asked for them.
        delta.logprobs.extend(chunk.logprobs[:count])
        for top in chunk.top_logprobs[:count]:
            delta.top_logprobs.add(
                token_ids=[token_id for token_id, _ in top], logprobs=[value for _, value in top]
            )
