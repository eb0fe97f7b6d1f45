"""The engine's figures and limits as messages, and a stream of messages as one."""

from google.protobuf import duration_pb2, struct_pb2

from service.config import ServerConfig, effective
from service.engine.types import MAX_TOP_LOGPROBS, Limits, SamplingParams, SpeculationStats
from service.model_card import ModelCard
from service.pb import inference_pb2, model_pb2
from service.text.chat_output import OutputFormat
from service.text.grammar import MAX_GRAMMAR_BYTES
from service.validation import (
    MAX_CHOICES,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_TEXT_BYTES,
    max_prompt_bytes,
    max_stop_token_ids,
)


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


def sampling_message(sampling: SamplingParams) -> inference_pb2.Sampling:
    """Translates the sampling in force, every field set (`Receipt.sampling`)."""
    return inference_pb2.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=dict(sampling.logit_bias),
    )


def fold(response: inference_pb2.CompleteResponse, message: inference_pb2.GenerateResponse) -> None:
    """Adds one message of a stream to the unary response."""
    match message.WhichOneof("kind"):
        case "started":
            response.started.CopyFrom(message.started)
        case "delta":
            # Not MergeFrom: it would replace the text.
            delta = choice_of(response, message.delta.index).delta
            delta.text += message.delta.text
            delta.reasoning += message.delta.reasoning
            for call in message.delta.tool_calls:
                join_call(delta, call)
            delta.token_bytes.extend(message.delta.token_bytes)
            delta.top_logprobs.extend(message.delta.top_logprobs)
            delta.token_ids.extend(message.delta.token_ids)
            delta.drafted.extend(message.delta.drafted)
            delta.logprobs.extend(message.delta.logprobs)
        case "prompt":
            response.prompt.CopyFrom(message.prompt)
        case "finished":
            index = message.finished.index
            choice_of(response, index).finished.CopyFrom(message.finished)
        case _:
            raise ValueError("a message of the stream says nothing")


def join_call(delta: inference_pb2.Delta, piece: inference_pb2.ToolCallDelta) -> None:
    """Adds a piece of a call to what there is of it."""
    if piece.index == len(delta.tool_calls):
        delta.tool_calls.add(index=piece.index)
    whole = delta.tool_calls[piece.index]
    whole.id += piece.id
    whole.name += piece.name
    whole.arguments_json += piece.arguments_json


def choice_of(response: inference_pb2.CompleteResponse, index: int) -> inference_pb2.Choice:
    """Returns the choice at an index, made together with those before it when it is new."""
    for new in range(len(response.choices), index + 1):
        response.choices.add().delta.index = new
    return response.choices[index]


def model_message(
    card: ModelCard,
    limits: Limits,
    config: ServerConfig,
    draft_cap_default: int,
    chat_format: OutputFormat | None,
) -> model_pb2.Model:
    """Describes the served model; `chat_format` None: chats are refused."""
    defaults = card.defaults
    configuration = struct_pb2.Struct()
    configuration.update(effective(config))
    return model_pb2.Model(
        name=card.name,
        fingerprint=card.fingerprint,
        context_length=limits.max_context,
        vocab_size=limits.vocab_size,
        end_token_ids=card.end_ids,
        slots=limits.slots,
        draft_length=limits.draft_length,
        page_size=limits.page_size,
        pages=limits.pages - 1,  # without the sink page
        speculation_bytes_per_slot=limits.speculation_bytes_per_slot,
        limits=model_pb2.ModelLimits(
            max_message_bytes=config.max_message_bytes,
            max_prompt_bytes=max_prompt_bytes(limits),
            max_text_bytes=MAX_TEXT_BYTES,
            max_stop_strings=MAX_STOP_STRINGS,
            max_stop_string_bytes=MAX_STOP_STRING_BYTES,
            max_stop_token_ids=max_stop_token_ids(limits, card),
            max_waiting_requests=config.max_waiting_requests,
            max_waiting_tokens=config.max_waiting_tokens,
            max_logit_bias=limits.max_logit_bias,
            max_choices=min(MAX_CHOICES, config.max_waiting_requests),
            max_resume_window=duration(config.max_resume_seconds),
            max_top_logprobs=MAX_TOP_LOGPROBS,
            max_constraint_bytes=MAX_GRAMMAR_BYTES,
        ),
        chat_format=chat_format or "",
        configuration=configuration,
        defaults=model_pb2.ModelDefaults(
            temperature=defaults.temperature,
            top_k=defaults.top_k,
            top_p=defaults.top_p,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
            frequency_penalty=defaults.frequency_penalty,
            presence_penalty=defaults.presence_penalty,
            max_draft_tokens=draft_cap_default,
        ),
    )
