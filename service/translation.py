"""From the engine's chunks to the messages of one reply, and from those to one unary response."""

import time
from collections.abc import Callable, Sequence

from google.protobuf import duration_pb2

from service.engine.types import FinishReason, Limits, SpeculationStats, TokenChunk
from service.model_card import ModelCard
from service.pb import inference_pb2, model_pb2
from service.text.detokenizer import Detokenizer
from service.text.stopping import StopMatcher
from service.text.tokenizer import Tokenizer
from service.validation import (
    MAX_MESSAGE_BYTES,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_TEXT_BYTES,
    AcceptedRequest,
    max_prompt_bytes,
    max_stop_token_ids,
)

GenerateResponse = inference_pb2.GenerateResponse

REASONS = {
    FinishReason.END_OF_SEQUENCE: inference_pb2.FINISH_REASON_END_OF_SEQUENCE,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.MAX_TOKENS: inference_pb2.FINISH_REASON_MAX_TOKENS,
    FinishReason.CONTEXT_LENGTH: inference_pb2.FINISH_REASON_CONTEXT_LENGTH,
}


class Reply:
    """The messages of one reply, numbered in the order in which they are asked for.

    `started` once, `push` for each chunk until `ended`, then `finished`.
    """

    def __init__(
        self,
        accepted: AcceptedRequest,
        tokenizer: Tokenizer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the reply, and its clock."""
        self._accepted = accepted
        self._detokenizer = Detokenizer(tokenizer)
        self._stop_matcher = StopMatcher(accepted.stop_strings)
        self._clock = clock
        self._started_at = clock()
        self._first_token_at: float | None = None
        self._completion_tokens = 0
        self._speculation = SpeculationStats()
        self._finished = inference_pb2.Finished()
        self._sequence = 0
        self.ended = False
        """True once a stop string matched or the engine ended the request: nothing may follow."""

    def started(self, card: ModelCard) -> GenerateResponse:
        """Returns the first message."""
        request = self._accepted.request
        return self._number(
            started=inference_pb2.Started(
                request_id=request.request_id,
                model=card.name,
                fingerprint=card.fingerprint,
                seed=request.sampling.seed,
                prompt_tokens=len(request.prompt_ids),
            )
        )

    def push(self, chunk: TokenChunk) -> GenerateResponse | None:
        """Adds a chunk; returns what of it can be shown, or None when that is nothing.

        Tokens behind the one that completes a stop string were never part of the reply.
        """
        if chunk.token_ids and self._first_token_at is None:
            self._first_token_at = self._clock()
        self._speculation = chunk.speculation
        text = ""
        count = 0
        for token_id in chunk.token_ids:
            count += 1
            if count == len(chunk.token_ids) and chunk.finish in (
                FinishReason.END_OF_SEQUENCE,
                FinishReason.STOP,
            ):
                self._finished.stop_token_id = token_id  # delivered as an id, without its text
                break
            text += self._show(self._detokenizer.feed(token_id))
            if self.ended:
                break
        if chunk.finish is not FinishReason.NONE and not self.ended:
            text += self._show(self._detokenizer.flush())
            self._end(REASONS[chunk.finish])
            text += self._stop_matcher.flush()
        self._completion_tokens += count
        return self._delta(text, chunk.token_ids[:count], chunk.drafted[:count])

    def cancel(self) -> GenerateResponse | None:
        """Ends the reply early; returns what was held back."""
        text = self._show(self._detokenizer.flush()) + self._stop_matcher.flush()
        self._end(inference_pb2.FINISH_REASON_CANCELLED)
        return self._delta(text)

    def finished(self) -> GenerateResponse:
        """Returns the last message."""
        usage = self._finished.usage
        usage.prompt_tokens = len(self._accepted.request.prompt_ids)
        usage.completion_tokens = self._completion_tokens
        if self._speculation.drafted:
            usage.speculation.CopyFrom(speculation_usage(self._speculation))
        if self._first_token_at is not None:
            usage.timing.first_token_duration.CopyFrom(
                duration(self._first_token_at - self._started_at)
            )
        usage.timing.total_duration.CopyFrom(duration(self._clock() - self._started_at))
        return self._number(finished=self._finished)

    def _show(self, text: str) -> str:
        """Passes text through the stop strings; ends the reply when one matches."""
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

    def _delta(
        self, text: str, token_ids: Sequence[int] = (), drafted: Sequence[bool] = ()
    ) -> GenerateResponse | None:
        accepted = self._accepted
        delta = inference_pb2.Delta(
            text=text if accepted.include_text else "",
            token_ids=token_ids if accepted.include_token_ids else (),
            drafted=drafted if accepted.include_drafted else (),
        )
        return self._number(delta=delta) if delta.ByteSize() else None

    def _number(
        self,
        *,
        started: inference_pb2.Started | None = None,
        delta: inference_pb2.Delta | None = None,
        finished: inference_pb2.Finished | None = None,
    ) -> GenerateResponse:
        message = GenerateResponse(
            sequence=self._sequence, started=started, delta=delta, finished=finished
        )
        self._sequence += 1
        return message


def speculation_usage(speculation: SpeculationStats) -> inference_pb2.SpeculationUsage:
    """Translates what drafting did."""
    return inference_pb2.SpeculationUsage(
        num_spec_steps=speculation.rounds,
        num_draft_tokens=speculation.drafted,
        num_accepted_draft_tokens=speculation.accepted,
        acceptance_histogram=speculation.acceptance_histogram,
    )


def duration(seconds: float) -> duration_pb2.Duration:
    """Translates seconds, to the microsecond."""
    message = duration_pb2.Duration()
    message.FromMicroseconds(round(seconds * 1e6))
    return message


def fold(response: inference_pb2.CompleteResponse, message: GenerateResponse) -> None:
    """Adds one message of a stream to the unary response."""
    match message.WhichOneof("kind"):
        case "started":
            response.started.CopyFrom(message.started)
        case "delta":
            # Not MergeFrom: it would replace the text.
            response.delta.text += message.delta.text
            response.delta.token_ids.extend(message.delta.token_ids)
            response.delta.drafted.extend(message.delta.drafted)
        case "finished":
            response.finished.CopyFrom(message.finished)
        case _:
            raise ValueError("a message of the stream says nothing")


def model_message(card: ModelCard, limits: Limits, max_waiting_requests: int) -> model_pb2.Model:
    """Describes the served model."""
    return model_pb2.Model(
        name=card.name,
        fingerprint=card.fingerprint,
        context_length=limits.max_context,
        vocab_size=limits.vocab_size,
        end_token_ids=card.end_ids,
        slots=limits.slots,
        draft_length=limits.draft_length,
        page_size=limits.page_size,
        limits=model_pb2.ModelLimits(
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_prompt_bytes=max_prompt_bytes(limits),
            max_text_bytes=MAX_TEXT_BYTES,
            max_stop_strings=MAX_STOP_STRINGS,
            max_stop_string_bytes=MAX_STOP_STRING_BYTES,
            max_stop_token_ids=max_stop_token_ids(limits, card),
            max_waiting_requests=max_waiting_requests,
        ),
        defaults=model_pb2.ModelDefaults(
            temperature=card.defaults.temperature,
            top_k=card.defaults.top_k,
            top_p=card.defaults.top_p,
        ),
    )
