"""The nouns of the engine: what a request is, what an executor can do, what comes back.

Standard library only, so that the scheduler, the slots and the pages can be tested without JAX or
gRPC. Words are those of ARCHITECTURE.md: request, slot, prefill, decode call, round, draft tokens.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol


class FinishReason(enum.IntEnum):
    """Why a request ended. The values 1 to 5 are what the decode program itself reports."""

    NONE = 0
    END_OF_SEQUENCE = 1
    """The model emitted one of the checkpoint's end ids (the last token delivered)."""
    STOP = 2
    """A stop id of the request was emitted (the last token delivered), or a stop string matched."""
    MAX_TOKENS = 3
    """The request's token budget is used up."""
    CONTEXT_LENGTH = 4
    """The slot reached the longest context that this server holds."""
    NOT_FINITE = 5
    """The logits of the next token were not finite: a failure, told as one."""


class Priority(enum.IntEnum):
    """Class of the waiting queue; a larger one goes first. `waiting.py` has the exact rule."""

    LOW = 1
    NORMAL = 2
    HIGH = 3


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The choice at a position depends on these and the seed alone."""

    temperature: float = 1.0
    """0 is greedy (argmax); otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches this; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this share as likely as the likeliest; 0 keeps all."""
    seed: int = 0
    """32-bit key of the noise, which is a function of (seed, absolute position, token id)."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or reply; 1 is off."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit per occurrence in the reply."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token in the reply."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added to its logit); at most `Limits.max_logit_bias`, ids distinct."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One client call, validated and tokenised; or one choice of a call that asks for several."""

    request_id: str
    """Choices of one call share it."""
    prompt_ids: tuple[int, ...]
    """At least one id; prompt length plus one must not exceed `Limits.max_context`."""
    max_tokens: int
    """Token budget, at least 1."""
    sampling: SamplingParams = SamplingParams()
    end_ids: tuple[int, ...] = ()
    """Ids that end the request with END_OF_SEQUENCE; empty when the client ignores them."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end the request with STOP. At most `Limits.max_stop_ids` with `end_ids` together."""
    min_tokens: int = 0
    """End and stop ids are barred until this many tokens are emitted."""
    logprobs: bool = False
    """Whether the log-probability of each emitted token is wanted."""
    top_logprobs: int = 0
    """How many of the likeliest tokens are wanted per emitted token, at most `MAX_TOP_LOGPROBS`."""
    prompt_logprobs: bool = False
    """Whether the log-probability of each prompt token but the first is wanted."""
    reasoning_end: int | None = None
    """The id that ends the reasoning which the prompt has opened; None when it has opened none."""
    max_reasoning_tokens: int | None = None
    """Tokens of reasoning after which `reasoning_end` is all that can be chosen; None: no limit."""
    constraint: ConstraintFactory | None = dataclasses.field(default=None, repr=False)
    """What the reply must look like, from behind its reasoning on; None: anything. Choices of one call
    share it, and each makes a matcher of its own. Needs `end_ids`, and no `min_tokens`: once a
    constraint is met, its end may be all that it allows."""
    max_draft_tokens: int | None = None
    """Draft cap for this request; 0 is off; None leaves it to the server."""
    priority: Priority = Priority.NORMAL
    """Choices of one call share it."""
    first_token_deadline: float | None = None
    """When the first token is wanted at the latest, in seconds on the clock of `time.monotonic`: a
    call that has no slot by then is given up. None: never. Choices of one call share it."""


@dataclasses.dataclass(frozen=True, slots=True)
class QueueStatus:
    """Where a request stands in the waiting queue."""

    position: int
    """Waiting requests before it, each choice counted, in the order in which they would be served if
    none arrived."""
    estimated_wait_s: float | None
    """Seconds until it gets its slot, roughly (`estimates.py`); None while nothing is known."""


@dataclasses.dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What drafting did for one request so far. A round verifies 0..U drafts and emits >= 1 token."""

    rounds: int = 0
    drafted: int = 0
    """Draft tokens verified."""
    accepted: int = 0
    """Draft tokens that were emitted."""
    acceptance_histogram: tuple[int, ...] = ()
    """Entry n counts the rounds that accepted n draft tokens (length U + 1)."""


MAX_TOP_LOGPROBS = 20
"""The most likeliest tokens that can be asked for per position."""

TopTokens = tuple[tuple[int, float], ...]
"""(token id, log-probability) of the likeliest tokens at one position, likeliest first."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenChunk:
    """The tokens that one decode call emitted for one request; empty only when it finishes so."""

    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    """True where the token was proposed by the MTP head and accepted, per token."""
    finish: FinishReason
    """NONE while the request runs; anything else makes this the last chunk."""
    speculation: SpeculationStats
    """Cumulative over the request."""
    logprobs: tuple[float, ...] = ()
    """Per token, if `Request.logprobs`; otherwise empty."""
    top_logprobs: tuple[TopTokens, ...] = ()
    """Per token, if `Request.top_logprobs`; otherwise empty."""
    prompt_logprobs: tuple[float, ...] = ()
    """Of the prompt's tokens but the first, in the first chunk if `Request.prompt_logprobs`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The fixed shapes of an executor: what the compiled programs can hold."""

    slots: int
    """B: requests that decode together."""
    max_context: int
    """Positions (prompt and reply) that one slot can hold."""
    vocab_size: int
    """Ids in [0, vocab_size) may be sent."""
    draft_length: int
    """U: draft tokens per round; 0 when the checkpoint has no MTP head or drafting is off."""
    rounds_per_call: int
    """O: rounds in one decode call."""
    page_size: int
    """S: positions in one page of the KV caches."""
    pages: int
    """Pages in all, the sink page 0 included; usable ids are 1 .. pages - 1."""
    prefill_chunk: int
    """Tokens that one prefill call takes; chunks start at absolute multiples of it."""
    max_stop_ids: int
    """End and stop ids that one slot can watch for."""
    max_logit_bias: int = 64
    """Biased tokens per request."""
    speculation_bytes_per_slot: int = 0
    """Device memory that drafting adds to a slot's recurrent state."""

    @property
    def tokens_per_call(self) -> int:
        """The most tokens that one decode call can emit for one slot: O * (U + 1)."""
        return self.rounds_per_call * (self.draft_length + 1)

    @property
    def pages_per_slot(self) -> int:
        """Length of a slot's page table."""
        return -(-self.max_context // self.page_size)


@dataclasses.dataclass(frozen=True, slots=True)
class SlotRounds:
    """What one decode call did in one slot, round by round (lists have O entries)."""

    tokens: Sequence[Sequence[int]]
    """Emitted ids of each round; empty for a round in which the slot was frozen."""
    drafted: Sequence[int]
    """Draft tokens verified in each round."""
    accepted: Sequence[int]
    """Draft tokens emitted in each round: the first `accepted` ids of the round were drafts."""
    finish: FinishReason
    """NONE, or why the slot ended inside this call."""
    logprobs: Sequence[Sequence[float]] = ()
    """Log-probabilities of the emitted ids, of the model itself: before bias, penalties and
    temperature. Void unless the request asked for them."""
    top_logprobs: Sequence[Sequence[TopTokens]] = ()
    """Likeliest tokens at the place of each emitted id, as many as the request asked for."""
    next_drafts: Sequence[int] = ()
    """What the slot's next round verifies, as things stand after the call."""


TokenMasks = Sequence[bytes]
"""Which tokens may be chosen at each position of one round, as bits: position t follows the first t
draft tokens (`SlotRounds.next_drafts`); token i is bit i % 8 of byte i // 8. Positions that are
missing, like those behind a draft that is not allowed, are not looked at."""

NOTHING_CONSTRAINED: Mapping[int, TokenMasks] = {}


class TokenConstraint(Protocol):
    """What may follow in one reply, given its tokens so far. Used on the engine thread only."""

    def masks(self, drafts: Sequence[int]) -> TokenMasks:
        """Returns the tokens allowed next, and then behind each prefix of the draft tokens.

        Positions behind a draft that is not allowed may be missing. Changes nothing.

        Raises:
          ConstraintError: nothing is allowed next, or that is more than the constraint can compute.
        """
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Appends emitted tokens to the reply.

        Raises:
          ConstraintError: one of them is not allowed.
        """
        ...


class ConstraintFactory(Protocol):
    """A constraint that any number of replies may be held to, each by a matcher of its own."""

    def matcher(self) -> TokenConstraint:
        """Returns the constraint at the beginning of a reply."""
        ...


class ScoreHandle(Protocol):
    """A prefill chunk in flight whose tokens are scored."""

    def fetch(self) -> Sequence[float]:
        """Waits for the chunk; returns the log-probability of the token after each of its tokens."""
        ...


class DecodeHandle(Protocol):
    """A decode call in flight."""

    def fetch(self) -> Sequence[SlotRounds]:
        """Waits for the call and returns one entry per slot (one device-to-host copy)."""
        ...


class Executor(Protocol):
    """Owns the device. Called from the engine thread only.

    Methods only dispatch: programs run in the order of the calls, and nothing but
    `DecodeHandle.fetch` and `wait` waits for them.
    """

    @property
    def limits(self) -> Limits: ...

    def prefill(
        self,
        slot: int,
        page_ids: Sequence[int],
        start: int,
        tokens: Sequence[int],
        next_token: int,
        score: bool = False,
    ) -> ScoreHandle | None:
        """Writes one chunk of a prompt into a slot's caches.

        The last prompt token is never prefilled: it is the first input of the decode program, which
        then emits the first token of the reply. Slots are cleared by the chunk that starts at 0.

        Args:
          slot: in [0, slots).
          page_ids: the slot's page table so far; covers positions [0, start + len(tokens)).
          start: absolute position of tokens[0], a multiple of `Limits.prefill_chunk`.
          tokens: 1 .. prefill_chunk prompt ids.
          next_token: the prompt id at position start + len(tokens) (the MTP head's KV cache pairs
            each hidden state with the following token).
          score: whether to tell how likely the token after each of these is.

        Returns:
          None unless `score`.
        """
        ...

    def insert(self, slot: int, request: Request, draft_cap: int) -> None:
        """Makes a slot run: its prompt but for the last token is prefilled (or has one token)."""
        ...

    def release(self, slot: int) -> None:
        """Freezes a running slot (abort); the next decode call does nothing in it."""
        ...

    def set_draft_cap(self, slot: int, draft_cap: int) -> None:
        """Changes how many draft tokens a running slot verifies per round, 0 .. draft_length."""
        ...

    def decode(
        self,
        page_tables: Sequence[Sequence[int]],
        draft_length: int,
        allowed: Mapping[int, TokenMasks] = NOTHING_CONSTRAINED,
        held: Collection[int] = (),
    ) -> DecodeHandle:
        """Dispatches one decode call over all slots.

        There is a program for each draft length: a shorter one costs less, and calls of different
        ones may follow each other.

        Args:
          page_tables: one list of page ids per slot (empty for a free slot). For a running slot it
            covers every position that any call can write: position + tokens_per_call +
            `Limits.draft_length`.
          draft_length: which program runs, 0 .. `Limits.draft_length`. No slot verifies more draft
            tokens in a round of this call, or drafts more for the next round, whatever its cap;
            what an earlier call drafted beyond that is dropped unverified.
          allowed: by slot, the tokens that may be chosen in the next round. These slots take part in
            one round of this call.
          held: slots that take part in no round of this call, though they run.
        """
        ...

    def wait(self) -> None:
        """Waits until every program dispatched so far has run.

        Paces prefill while no slot decodes: there is no call to fetch then, and chunks dispatched
        far ahead would delay every later request and outlive an abort.
        """
        ...

    def reset(self) -> None:
        """Begins anew after a failure: drops all state of all slots, and proves that programs run.

        Called while no engine owns the executor, on any thread; compiles nothing. Raises whatever
        the device does if it is not fit to go on.
        """
        ...
