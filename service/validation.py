"""From a GenerateRequest to the engine's Request: limits, defaults, every bad field at once.

Pure functions of messages and limits (but for the id and the seed that a client leaves open).
"""

import dataclasses
import itertools
import secrets
import uuid
from collections.abc import Container, Iterable, Sequence

from service.engine.types import Limits, Request, SamplingParams
from service.errors import MAX_VIOLATIONS, Violation, invalid_argument
from service.model_card import GenerationDefaults, ModelCard
from service.pb import inference_pb2

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by less overflows float32."""
MAX_TEMPERATURE = 2.0
MAX_REQUEST_ID_CHARACTERS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_MESSAGE_BYTES = 64 << 20
"""Bytes of one gRPC message; the transport enforces it."""
MAX_TEXT_BYTES = 8 << 20
"""Bytes of UTF-8 of any text: tokenising this many takes seconds."""
TEXT_BYTES_PER_POSITION = 32
"""A prompt beyond this many bytes per position of the context is refused without tokenising it."""


@dataclasses.dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """A request that may run, and what its reply carries."""

    request: Request
    stop_strings: tuple[str, ...]
    include_text: bool
    include_token_ids: bool
    include_drafted: bool


def max_prompt_bytes(limits: Limits) -> int:
    """Returns the most UTF-8 bytes of a text prompt."""
    return min(limits.max_context * TEXT_BYTES_PER_POSITION, MAX_TEXT_BYTES)


def max_stop_token_ids(limits: Limits, card: ModelCard) -> int:
    """Returns how many stop ids a request may name while the end ids are in force."""
    return limits.max_stop_ids - len(card.end_ids)


def request_id_of(message: inference_pb2.GenerateRequest) -> str:
    """Returns the client's name for a request, or a new one."""
    return message.request_id or uuid.uuid4().hex


def check_text(field: str, text: str, limit: int) -> list[Violation]:
    """Checks the size of a text before it is tokenised."""
    size = len(text.encode())
    return [Violation(field, f"{size} bytes", f"at most {limit} bytes")] if size > limit else []


def accept(
    message: inference_pb2.GenerateRequest,
    request_id: str,
    text_ids: Sequence[int] | None,
    limits: Limits,
    card: ModelCard,
) -> AcceptedRequest:
    """Checks and translates one request.

    Args:
      message: what the client sent.
      request_id: from `request_id_of`.
      text_ids: the tokens of `message.text`; None when there is none, or too much to tokenise.
      limits: what the executor can hold.
      card: end ids and defaults of the checkpoint.

    Raises:
      ServiceError: INVALID_ARGUMENT with every violation.
    """
    prompt_ids = tuple(message.tokens.ids) if message.HasField("tokens") else tuple(text_ids or ())
    violations = [
        *check_request_id(message.request_id),
        *check_prompt(message, prompt_ids, limits),
        *check_sampling(message.sampling),
        *check_stopping(message.stopping, limits, card),
    ]
    if violations:
        raise invalid_argument(violations)
    stopping, include = message.stopping, message.include
    max_draft_tokens = message.speculation.max_draft_tokens
    return AcceptedRequest(
        request=Request(
            request_id=request_id,
            prompt_ids=prompt_ids,
            # Unset: a budget that the end of the context always comes before, and is told then.
            max_tokens=min(stopping.max_tokens, limits.max_context)
            if stopping.HasField("max_tokens")
            else limits.max_context,
            sampling=sampling_params(message.sampling, card.defaults, limits.vocab_size),
            end_ids=() if stopping.ignore_eos else card.end_ids,
            stop_ids=tuple(dict.fromkeys(stopping.stop_token_ids)),
            max_draft_tokens=min(max_draft_tokens, limits.draft_length)
            if message.speculation.HasField("max_draft_tokens")
            else None,
        ),
        stop_strings=tuple(dict.fromkeys(stopping.stop_strings)),
        include_text=include.text if include.HasField("text") else True,
        include_token_ids=include.token_ids,
        include_drafted=include.drafted,
    )


def sampling_params(
    sampling: inference_pb2.Sampling, defaults: GenerationDefaults, vocab_size: int
) -> SamplingParams:
    """Fills unset sampling fields: from the checkpoint's defaults, and a random seed."""
    temperature = sampling.temperature if sampling.HasField("temperature") else defaults.temperature
    top_k = sampling.top_k if sampling.HasField("top_k") else defaults.top_k
    return SamplingParams(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=0 if top_k >= vocab_size else top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else defaults.top_p,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(32),
    )


def check_request_id(request_id: str) -> list[Violation]:
    """Checks the client's own id; ids are written to logs and trailers."""
    limit = f"at most {MAX_REQUEST_ID_CHARACTERS} printable ASCII characters without spaces"
    if len(request_id) > MAX_REQUEST_ID_CHARACTERS:
        return [Violation("request_id", f"{len(request_id)} characters", limit)]
    if any(not "!" <= character <= "~" for character in request_id):
        return [Violation("request_id", ascii(request_id)[:40], limit)]
    return []


def check_prompt(
    message: inference_pb2.GenerateRequest, prompt_ids: Sequence[int], limits: Limits
) -> Iterable[Violation]:
    """Checks that there is a prompt, that it fits, and that its ids exist."""
    kind = message.WhichOneof("prompt")
    if kind is None:
        yield Violation("prompt", "not set", "one of text, tokens")
        return
    field = "text" if kind == "text" else "tokens.ids"
    too_large = check_text(field, message.text, max_prompt_bytes(limits))
    yield from too_large
    if not prompt_ids and not too_large:
        yield Violation(field, "0 tokens", "at least 1 token")
    if len(prompt_ids) >= limits.max_context:
        yield Violation(
            field,
            f"{len(prompt_ids)} tokens",
            f"at most {limits.max_context - 1} tokens (context less one)",
        )
    if kind == "tokens":
        yield from check_model_ids(field, prompt_ids, limits)


def check_sampling(sampling: inference_pb2.Sampling) -> Iterable[Violation]:
    """Checks ranges; written so that NaN, for which every comparison is false, is refused."""
    if not 0 <= sampling.temperature <= MAX_TEMPERATURE:
        yield Violation(
            "sampling.temperature", f"{sampling.temperature:g}", f"in [0, {MAX_TEMPERATURE:g}]"
        )
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        yield Violation("sampling.top_p", f"{sampling.top_p:g}", "in (0, 1]")


def check_stopping(
    stopping: inference_pb2.Stopping, limits: Limits, card: ModelCard
) -> Iterable[Violation]:
    """Checks the token budget, stop ids and stop strings."""
    if stopping.HasField("max_tokens") and stopping.max_tokens < 1:
        yield Violation("stopping.max_tokens", f"{stopping.max_tokens}", "at least 1")
    yield from check_model_ids("stopping.stop_token_ids", stopping.stop_token_ids, limits)
    room = limits.max_stop_ids if stopping.ignore_eos else max_stop_token_ids(limits, card)
    different = len(set(stopping.stop_token_ids))
    if different > room:
        yield Violation("stopping.stop_token_ids", f"{different} different ids", f"at most {room}")
    if len(stopping.stop_strings) > MAX_STOP_STRINGS:
        yield Violation(
            "stopping.stop_strings",
            f"{len(stopping.stop_strings)} strings",
            f"at most {MAX_STOP_STRINGS}",
        )
    for position, string in enumerate(stopping.stop_strings):
        size = len(string.encode())
        if not 1 <= size <= MAX_STOP_STRING_BYTES:
            limit = f"1 to {MAX_STOP_STRING_BYTES} bytes"
            yield Violation(f"stopping.stop_strings[{position}]", f"{size} bytes", limit)


def check_model_ids(field: str, token_ids: Iterable[int], limits: Limits) -> list[Violation]:
    """Checks ids that go to the model."""
    return check_token_ids(
        field, token_ids, range(limits.vocab_size), f"in [0, {limits.vocab_size})"
    )


def check_token_ids(
    field: str, token_ids: Iterable[int], vocabulary: Container[int], limit: str
) -> list[Violation]:
    """Names ids that do not exist by their position: no more than one status can tell."""
    missing = ((n, token_id) for n, token_id in enumerate(token_ids) if token_id not in vocabulary)
    return [
        Violation(f"{field}[{position}]", f"{token_id}", limit)
        for position, token_id in itertools.islice(missing, MAX_VIOLATIONS + 1)
    ]
