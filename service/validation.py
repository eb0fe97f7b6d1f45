"""From a GenerateRequest to the engine's Request: limits, defaults, every bad field at once.

Pure functions of messages and limits (but for the id that a client leaves open). The sampling fields
are in `sampling.py`.
"""

import dataclasses
import itertools
import uuid
from collections.abc import Container, Iterable, Sequence
from typing import cast

from google.protobuf import duration_pb2

from service.chats import ChatPrompt
from service.constraint import check_constraint, check_ends
from service.engine.types import MAX_TOP_LOGPROBS, Limits, Priority, Request
from service.errors import MAX_VIOLATIONS, Violation, invalid_argument
from service.model_card import ModelCard
from service.pb import inference_pb2
from service.sampling import check_sampling, choice_seed, sampling_params

MAX_CHOICES = 8
"""Replies to one prompt; fewer where the waiting queue is shorter."""
MAX_REQUEST_ID_CHARACTERS = 128
MAX_STOP_TOKEN_ID_ENTRIES = 1024
"""Entries of `stop_token_ids`, repeated ones included; how many may differ, the model says."""
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_TEXT_BYTES = 8 << 20
"""Bytes of UTF-8 of any text: tokenising this many takes seconds."""
TEXT_BYTES_PER_POSITION = 32
"""A prompt beyond this many bytes per position of the context is refused without tokenising it."""
MAX_DURATION_SECONDS = 315_576_000_000
"""What google.protobuf.Duration allows."""
PRIORITIES = {
    inference_pb2.PRIORITY_UNSPECIFIED: Priority.NORMAL,
    inference_pb2.PRIORITY_LOW: Priority.LOW,
    inference_pb2.PRIORITY_NORMAL: Priority.NORMAL,
    inference_pb2.PRIORITY_HIGH: Priority.HIGH,
}


@dataclasses.dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """A request that may run, and what its reply carries."""

    choices: tuple[Request, ...]
    """What the engine gets: equal but for their seeds."""
    stop_strings: tuple[str, ...]
    stopping: inference_pb2.Stopping
    """The request's stopping as it is in force (`Receipt.stopping`)."""
    constraint: inference_pb2.Constraint
    """What the reply must look like, as a receipt tells it; empty: anything."""
    chat: ChatPrompt | None
    """What the prompt was made from; None: text or token ids."""
    include_text: bool
    include_token_ids: bool
    include_token_bytes: bool
    include_drafted: bool
    include_receipt: bool
    include_queue: bool
    resume_window_s: float | None
    """How long the reply is kept for Resume; None: not at all."""

    @property
    def request_id(self) -> str:
        """The id that all choices share."""
        return self.choices[0].request_id


def max_prompt_bytes(limits: Limits) -> int:
    """Returns the most UTF-8 bytes of a text prompt."""
    return min(limits.max_context * TEXT_BYTES_PER_POSITION, MAX_TEXT_BYTES)


def max_stop_token_ids(limits: Limits, card: ModelCard) -> int:
    """Returns how many stop ids a request may name while the end ids are in force."""
    return limits.max_stop_ids - len(card.end_ids)


def request_id_of(message: inference_pb2.GenerateRequest) -> str:
    """Returns the client's name for a request, or a new one."""
    return message.request_id or uuid.uuid4().hex


def first_token_deadline(
    message: inference_pb2.GenerateRequest, arrived_at: float, remaining_s: float | None
) -> float | None:
    """Returns when the first token is wanted at the latest; None for never.

    Args:
      message: what the client sent.
      arrived_at: when, on the clock of `time.monotonic`.
      remaining_s: seconds from then to the deadline of the call; None when it has none.
    """
    spans = [] if remaining_s is None else [remaining_s]
    if message.HasField("first_token_deadline"):
        spans.append(seconds_of(message.first_token_deadline))
    return arrived_at + min(spans) if spans else None


def check_text(field: str, text: str, limit: int) -> list[Violation]:
    """Checks the size of a text before it is tokenised."""
    size = len(text.encode())
    return [Violation(field, f"{size} bytes", f"at most {limit} bytes")] if size > limit else []


def accept(
    message: inference_pb2.GenerateRequest,
    request_id: str,
    prompt: Sequence[int] | ChatPrompt | None,
    limits: Limits,
    card: ModelCard,
    deadline: float | None = None,
    max_resume_s: float | None = None,
) -> AcceptedRequest:
    """Checks and translates one request.

    Args:
      message: what the client sent.
      request_id: from `request_id_of`.
      prompt: the tokens of `message.text`, or the chat as it is rendered; None when there is neither,
        or too much to tokenise.
      limits: what the executor can hold.
      card: end ids and defaults of the checkpoint.
      deadline: from `first_token_deadline`.
      max_resume_s: the longest resume_window; None: the call is no stream.

    Raises:
      ServiceError: INVALID_ARGUMENT with every violation.
    """
    chat = prompt if isinstance(prompt, ChatPrompt) else None
    text_ids = () if prompt is None or chat is not None else cast(Sequence[int], prompt)
    prompt_ids: Sequence[int] = message.tokens.ids if message.HasField("tokens") else text_ids
    if chat is not None:
        prompt_ids = chat.rendered.token_ids
    violations = [
        *check_request_id(message.request_id),
        *check_prompt(message, prompt_ids, limits),
        *check_sampling(message.sampling, limits),
        *check_stopping(message.stopping, limits, card),
        *check_reasoning(message, chat),
        *check_constraint(message),
        *check_constrained(message, chat, card),
        *check_include(message.include),
        *check_choices(message),
        *check_queueing(message),
        *check_streaming(message, max_resume_s),
    ]
    if violations:
        raise invalid_argument(violations)
    stopping, include = message.stopping, message.include
    max_draft_tokens = message.speculation.max_draft_tokens
    # Unset: a budget that the end of the context always comes before, and is told then.
    budget = stopping.max_tokens if stopping.HasField("max_tokens") else limits.max_context
    request = Request(
        request_id=request_id,
        prompt_ids=tuple(prompt_ids),
        max_tokens=min(budget, limits.max_context),
        sampling=sampling_params(message.sampling, card.defaults, limits.vocab_size),
        end_ids=() if stopping.ignore_eos else card.end_ids,
        stop_ids=tuple(dict.fromkeys(stopping.stop_token_ids)),
        min_tokens=min(stopping.min_tokens, limits.max_context),
        logprobs=include.logprobs,
        top_logprobs=include.top_logprobs,
        prompt_logprobs=include.prompt_logprobs,
        reasoning_end=None if chat is None else chat.open_reasoning_end,
        max_reasoning_tokens=min(stopping.max_reasoning_tokens, limits.max_context)
        if stopping.HasField("max_reasoning_tokens")
        else None,
        max_draft_tokens=min(max_draft_tokens, limits.draft_length)
        if message.speculation.HasField("max_draft_tokens")
        else None,
        priority=PRIORITIES[message.priority],
        first_token_deadline=deadline,
    )
    stop_strings = tuple(dict.fromkeys(stopping.stop_strings))
    room = limits.max_context - len(prompt_ids)
    return AcceptedRequest(
        choices=choices_of(request, message.choices if message.HasField("choices") else 1),
        stop_strings=stop_strings,
        stopping=inference_pb2.Stopping(
            max_tokens=min(request.max_tokens, room),
            stop_token_ids=request.stop_ids,
            stop_strings=stop_strings,
            ignore_eos=stopping.ignore_eos,
            min_tokens=min(request.min_tokens, room),
            include_stop_string=stopping.include_stop_string,
            max_reasoning_tokens=request.max_reasoning_tokens,
        ),
        constraint=message.constraint,
        chat=chat,
        include_text=include.text if include.HasField("text") else True,
        include_token_ids=include.token_ids,
        include_token_bytes=include.token_bytes,
        include_drafted=include.drafted,
        include_receipt=include.receipt,
        include_queue=include.queue,
        resume_window_s=seconds_of(message.resume_window)
        if message.HasField("resume_window")
        else None,
    )


def choices_of(request: Request, count: int) -> tuple[Request, ...]:
    """Returns the choices of a request, each with its own seed."""
    sampling = request.sampling
    seeds = (choice_seed(sampling.seed, index) for index in range(count))
    return tuple(
        dataclasses.replace(request, sampling=dataclasses.replace(sampling, seed=seed))
        for seed in seeds
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
        yield Violation("prompt", "not set", "one of text, tokens, chat")
        return
    field = "tokens.ids" if kind == "tokens" else kind
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
    elif kind == "tokens":
        yield from check_model_ids(field, prompt_ids, limits)


def check_reasoning(
    message: inference_pb2.GenerateRequest, chat: ChatPrompt | None
) -> Iterable[Violation]:
    """Checks that there is reasoning to limit."""
    stopping = message.stopping
    if stopping.HasField("max_reasoning_tokens") and (
        chat is None or chat.open_reasoning_end is None
    ):
        limit = "unset: the prompt opens no reasoning that a token of the checkpoint ends"
        yield Violation("stopping.max_reasoning_tokens", f"{stopping.max_reasoning_tokens}", limit)


def check_constrained(
    message: inference_pb2.GenerateRequest, chat: ChatPrompt | None, card: ModelCard
) -> Iterable[Violation]:
    """Checks what must not stand beside a constraint, or a call that the reply must make."""
    fields = ["constraint"] if message.HasField("constraint") else []
    fields += ["chat.tool_choice"] if chat is not None and chat.tool_choice.wanted else []
    for field in fields[:1]:
        yield from check_ends(message, field, card.end_ids)
        if chat is not None and chat.rendered.reasoning_open and chat.open_reasoning_end is None:
            limit = "unset: no token of the checkpoint ends the reasoning that the prompt opens"
            yield Violation(field, "set", limit)
    if len(fields) > 1:
        yield Violation("constraint", "set", "unset where chat.tool_choice asks for a call")


def check_include(include: inference_pb2.Include) -> Iterable[Violation]:
    """Checks what the messages of the reply carry."""
    if include.top_logprobs > MAX_TOP_LOGPROBS:
        limit = f"in [0, {MAX_TOP_LOGPROBS}]"
        yield Violation("include.top_logprobs", f"{include.top_logprobs}", limit)


def check_choices(message: inference_pb2.GenerateRequest) -> Iterable[Violation]:
    """Checks the number of choices; whether the waiting queue can hold them, the engine checks."""
    if message.HasField("choices") and not 1 <= message.choices <= MAX_CHOICES:
        yield Violation("choices", f"{message.choices}", f"in [1, {MAX_CHOICES}]")


def check_queueing(message: inference_pb2.GenerateRequest) -> Iterable[Violation]:
    """Checks what the waiting queue heeds."""
    if message.priority not in PRIORITIES:
        yield Violation("priority", f"{message.priority}", "one of LOW, NORMAL, HIGH (1, 2, 3)")
    if message.HasField("first_token_deadline"):
        yield from check_duration("first_token_deadline", message.first_token_deadline)


def check_streaming(
    message: inference_pb2.GenerateRequest, max_resume_s: float | None
) -> Iterable[Violation]:
    """Checks what only a stream can do; `max_resume_s` is None for a call that is no stream."""
    if message.HasField("resume_window"):
        violations = list(check_duration("resume_window", message.resume_window))
        yield from violations
        told = f"{seconds_of(message.resume_window):g} s"
        if max_resume_s is None:
            yield Violation("resume_window", told, "unset: only Generate can be resumed")
        elif not violations and seconds_of(message.resume_window) > max_resume_s:
            yield Violation("resume_window", told, f"at most {max_resume_s:g} s")
    if message.include.queue and max_resume_s is None:
        yield Violation(
            "include.queue", "true", "unset: only Generate tells the place in the queue"
        )


def seconds_of(duration: duration_pb2.Duration) -> float:
    """Returns a time span in seconds."""
    return duration.seconds + duration.nanos / 1e9


def check_duration(field: str, duration: duration_pb2.Duration) -> Iterable[Violation]:
    """Checks that a time span is one, and longer than nothing."""
    seconds, nanos = duration.seconds, duration.nanos
    valid = 0 <= seconds <= MAX_DURATION_SECONDS and 0 <= nanos < 10**9
    if not valid or (seconds, nanos) == (0, 0):
        limit = f"above 0, with seconds at most {MAX_DURATION_SECONDS} and nanos in [0, 999999999]"
        yield Violation(field, f"{seconds} s {nanos} ns", limit)


def check_stopping(
    stopping: inference_pb2.Stopping, limits: Limits, card: ModelCard
) -> Iterable[Violation]:
    """Checks the token budget, stop ids and stop strings."""
    if stopping.HasField("max_tokens") and stopping.max_tokens < 1:
        yield Violation("stopping.max_tokens", f"{stopping.max_tokens}", "at least 1")
    most = stopping.max_tokens if stopping.HasField("max_tokens") else limits.max_context
    if stopping.min_tokens > most:
        name = "max_tokens" if stopping.HasField("max_tokens") else "the context"
        yield Violation("stopping.min_tokens", f"{stopping.min_tokens}", f"at most {most} ({name})")
    room = limits.max_stop_ids if stopping.ignore_eos else max_stop_token_ids(limits, card)
    yield from check_stop_token_ids(stopping.stop_token_ids, room, limits)
    if len(stopping.stop_strings) > MAX_STOP_STRINGS:
        yield Violation(
            "stopping.stop_strings",
            f"{len(stopping.stop_strings)} strings",
            f"at most {MAX_STOP_STRINGS}",
        )
    for position, string in enumerate(stopping.stop_strings[:MAX_STOP_STRINGS]):
        size = len(string.encode())
        if not 1 <= size <= MAX_STOP_STRING_BYTES:
            limit = f"1 to {MAX_STOP_STRING_BYTES} bytes"
            yield Violation(f"stopping.stop_strings[{position}]", f"{size} bytes", limit)


def check_stop_token_ids(stop_ids: Sequence[int], room: int, limits: Limits) -> Iterable[Violation]:
    """Checks the stop ids, of which `room` different ones fit."""
    field = "stopping.stop_token_ids"
    if len(stop_ids) > MAX_STOP_TOKEN_ID_ENTRIES:
        yield Violation(field, f"{len(stop_ids)} ids", f"at most {MAX_STOP_TOKEN_ID_ENTRIES}")
        return
    yield from check_model_ids(field, stop_ids, limits)
    if (different := len(set(stop_ids))) > room:
        yield Violation(field, f"{different} different ids", f"at most {room}")


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
