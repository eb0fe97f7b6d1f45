"""An executor without a device, whose tokens can be computed by hand and which checks its callers.

The model it plays: the token after t is (t + 1) % vocab_size, unless `replies` scripts the reply of
a request id; with `seeded`, a request's seed changes its tokens. A request's round r accepts
`accepts[r % len(accepts)]` draft tokens, or as many as were verified if those are fewer; the round
after the insert verifies none, like the real program. Where a token is not allowed, the lowest
allowed one takes its place, and a draft that says otherwise is rejected.

Programs "run" when they are dispatched, on a simulated page memory: each position that a slot wrote
holds its token, rejected drafts leave garbage, and a decode call reads back all that its slots
should have in their pages. A page lost to another slot therefore shows as a broken contract.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from service.engine.types import (
    NOTHING_CONSTRAINED,
    FinishReason,
    Limits,
    Request,
    SlotRounds,
    TokenMasks,
    TopTokens,
)

REJECTED = -1
"""What a rejected draft token leaves in the page memory."""


def small_limits(**changes: int) -> Limits:
    """Limits that make every bound easy to meet; pages for three slots of maximum length."""
    limits = Limits(
        slots=4, max_context=64, vocab_size=1000, draft_length=2, rounds_per_call=2, page_size=4,
        pages=1 + 3 * 16, prefill_chunk=8, max_stop_ids=4,
    )  # fmt: skip
    return dataclasses.replace(limits, **changes)


def reply_token(
    request: Request,
    index: int,
    previous: int,
    vocab_size: int,
    replies: Mapping[str, Sequence[int]],
    seeded: bool = False,
) -> int:
    """The token at `index` of a reply. An id that `min_tokens` bars gives way to the next one."""
    script = replies.get(request.request_id, ())
    noise = (request.sampling.seed >> index % 25) % 97 if seeded else 0
    token = script[index] if index < len(script) else (previous + 1 + noise) % vocab_size
    while index < request.min_tokens and token in request.end_ids + request.stop_ids:
        token = (token + 1) % vocab_size
    return token


def end_of(request: Request, limits: Limits, reply: Sequence[int]) -> FinishReason:
    """Why a reply ends with the last of these tokens; NONE if it goes on. Stops beat lengths."""
    if reply[-1] in request.end_ids:
        return FinishReason.END_OF_SEQUENCE
    if reply[-1] in request.stop_ids:
        return FinishReason.STOP
    if len(reply) == request.max_tokens:
        return FinishReason.MAX_TOKENS
    if len(request.prompt_ids) + len(reply) == limits.max_context:
        return FinishReason.CONTEXT_LENGTH
    return FinishReason.NONE


def expected_reply(
    request: Request,
    limits: Limits,
    replies: Mapping[str, Sequence[int]] | None = None,
    seeded: bool = False,
) -> tuple[tuple[int, ...], FinishReason]:
    """What a request gets, whatever the drafts, the load and the other requests."""
    reply: list[int] = []
    previous, finish = request.prompt_ids[-1], FinishReason.NONE
    while finish is FinishReason.NONE:
        previous = reply_token(
            request, len(reply), previous, limits.vocab_size, replies or {}, seeded
        )
        reply.append(previous)
        finish = end_of(request, limits, reply)
    return tuple(reply), finish


@dataclasses.dataclass
class _Slot:
    """What the device and the contract know of one slot."""

    prompt: list[int] = dataclasses.field(default_factory=list)
    """Prefilled so far."""
    scored: int = 0
    """Tokens of them in chunks that were scored."""
    next_token: int | None = None
    page_ids: tuple[int, ...] = ()
    request: Request | None = None
    """Inserted, not released, and its end not fetched: the caller must take it for running."""
    running: bool = False
    """The device's own view: False from the round that ends the request."""
    reply: list[int] = dataclasses.field(default_factory=list)
    rounds: int = 0
    drafts: list[int] = dataclasses.field(default_factory=list)
    """Wait to be verified; the next round drops what is beyond its program."""
    unfetched: set[int] = dataclasses.field(default_factory=set)
    """Calls that it takes part in and nobody has fetched, by dispatch."""
    draft_cap: int = 0


def fake_logprob(token: int) -> float:
    """What the fake reports for a token: exact in float32."""
    return -token / 4


def fake_top_logprobs(token: int, wanted: int) -> TopTokens:
    """What the fake reports as likeliest beside a token."""
    return tuple((token + rank, fake_logprob(token) - rank) for rank in range(wanted))


def lowest_allowed(mask: bytes, token: int) -> int:
    """The token if the mask allows it, else the lowest that it allows; 0 for none, as on a device."""
    if mask[token // 8] >> token % 8 & 1:
        return token
    return next((i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1), 0)


class FakeExecutor:
    """Implements `Executor`; AssertionError when its contract is broken."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        replies: Mapping[str, Sequence[int]] | None = None,
        accepts: Sequence[int] = (2, 0, 1),
        decode_delay_s: float = 0.0,
        fail_on: tuple[str, int] | None = None,
        stepped: bool = False,
        seeded: bool = False,
    ) -> None:
        """Scripts a device.

        Args:
          limits: `small_limits()` if None.
          replies: by request id, the first tokens of the reply.
          accepts: draft tokens accepted per round of a request, repeated.
          decode_delay_s: seconds that fetching a decode call takes.
          fail_on: ("decode", 3) raises RuntimeError in the third call of `decode`, and so on.
          stepped: `fetch` and `wait` block until `allow` lets them through.
          seeded: tokens depend on the request's seed.
        """
        self.limits = limits or small_limits()
        self.replies = dict(replies or {})
        self.log: list[tuple[Any, ...]] = []
        """(method, arguments worth comparing) of each call."""
        self.inserted: list[Request] = []
        """The requests, in the order of their inserts."""
        self.draft_lengths: list[int] = []
        """Draft length of each decode call's program."""
        self.allowed: list[dict[int, TokenMasks]] = []
        self.held: list[tuple[int, ...]] = []
        """By decode call: the masks of the constrained slots, and who sat it out."""
        self._accepts = tuple(accepts)
        self._decode_delay_s = decode_delay_s
        self._fail_on = fail_on
        self.stepped = stepped
        self._seeded = seeded
        self._gate = threading.Semaphore(0) if stepped else None
        self._slots = [_Slot() for _ in range(self.limits.slots)]
        self._memory: dict[tuple[int, int], int] = {}
        self._thread: int | None = None
        self._dispatches = 0
        self._pending: dict[int, str] = {}  # programs not known to have run, by dispatch

    def calls(self, method: str) -> list[tuple[Any, ...]]:
        """The log entries of one method."""
        return [entry for entry in self.log if entry[0] == method]

    def allow(self, times: int = 1) -> None:
        """Lets that many calls of `fetch` and `wait` through (for `stepped`)."""
        assert self._gate is not None
        self._gate.release(times)

    def reset(self) -> None:
        self.log.append(("reset",))
        if self._fail_on == ("reset", len(self.calls("reset"))):
            raise RuntimeError("scripted failure of reset")
        self._slots = [_Slot() for _ in range(self.limits.slots)]
        self._memory.clear()
        self._pending.clear()
        self._thread = None  # the next engine has a thread of its own

    def prefill(
        self,
        slot: int,
        page_ids: Sequence[int],
        start: int,
        tokens: Sequence[int],
        next_token: int,
        score: bool = False,
    ) -> FakeHandle | None:
        self._enter("prefill", slot, start, len(tokens))
        state, limits = self._slots[slot], self.limits
        assert state.request is None, f"prefill of slot {slot}, where a request runs"
        assert 1 <= len(tokens) <= limits.prefill_chunk, f"chunk of {len(tokens)} tokens"
        assert start % limits.prefill_chunk == 0, f"chunk starts at {start}: not aligned"
        if start == 0:
            state = self._slots[slot] = _Slot()
        assert start == len(state.prompt), f"chunk at {start} after {len(state.prompt)} tokens"
        if state.next_token is not None:
            assert tokens[0] == state.next_token, f"{tokens[0]} follows {state.next_token}"
        self._check_pages(slot, page_ids, start + len(tokens))
        state.page_ids, state.next_token = tuple(page_ids), next_token
        state.prompt += tokens
        state.scored += len(tokens) if score else 0
        for offset, token in enumerate(tokens):
            self._write(state, start + offset, token)
        number = self._dispatched("prefill")
        scores = [fake_logprob(token) for token in (*tokens[1:], next_token)]
        return FakeHandle(lambda: self._fetch_scores(number, scores)) if score else None

    def insert(self, slot: int, request: Request, draft_cap: int) -> None:
        self._enter("insert", slot, request.request_id, draft_cap)
        self.inserted.append(request)
        state = self._slots[slot]
        assert state.request is None, f"insert into slot {slot}, where a request runs"
        self._check_draft_cap(draft_cap)
        assert len(request.end_ids) + len(request.stop_ids) <= self.limits.max_stop_ids
        if len(request.prompt_ids) == 1:
            state = self._slots[slot] = _Slot(next_token=request.prompt_ids[0])
        prefilled = (*state.prompt, state.next_token)
        assert prefilled == request.prompt_ids, (
            f"insert into slot {slot}: prefilled {prefilled}, prompt {request.prompt_ids}"
        )
        scored = len(request.prompt_ids) - 1 if request.prompt_logprobs else 0
        assert state.scored == scored, f"{state.scored} tokens scored, and {scored} wanted"
        state.request, state.running, state.draft_cap = request, True, draft_cap

    def release(self, slot: int) -> None:
        self._enter("release", slot)
        assert self._slots[slot].request is not None, f"release of slot {slot}, which does not run"
        self._slots[slot] = _Slot()

    def set_draft_cap(self, slot: int, draft_cap: int) -> None:
        self._enter("set_draft_cap", slot, draft_cap)
        assert self._slots[slot].request is not None, f"draft cap of idle slot {slot}"
        self._check_draft_cap(draft_cap)
        self._slots[slot].draft_cap = draft_cap

    def decode(
        self,
        page_tables: Sequence[Sequence[int]],
        draft_length: int,
        allowed: Mapping[int, TokenMasks] = NOTHING_CONSTRAINED,
        held: Collection[int] = (),
    ) -> FakeHandle:
        self._enter(
            "decode", *(state.request and state.request.request_id for state in self._slots)
        )
        assert 0 <= draft_length <= self.limits.draft_length, f"no program for {draft_length}"
        self.draft_lengths.append(draft_length)
        assert len(page_tables) == self.limits.slots, f"{len(page_tables)} page tables"
        for slot, page_ids in enumerate(page_tables):
            running = self._slots[slot].request is not None
            assert running or not page_ids, f"slot {slot} does not run and has pages {page_ids}"
            if running:
                state = self._slots[slot]
                tokens = [*state.prompt, state.next_token, *state.reply]
                may_write = len(tokens) - 1 + self.limits.tokens_per_call + self.limits.draft_length
                self._check_pages(slot, page_ids, min(may_write, self.limits.max_context))
                state.page_ids = tuple(page_ids)
                self._check_memory(slot, tokens[:-1])
        self._check_constrained(allowed, held)
        self.allowed.append(dict(allowed))
        self.held.append(tuple(held))
        taking_part = [
            state if slot not in held else _Slot() for slot, state in enumerate(self._slots)
        ]
        results = [
            self._run_slot(state, draft_length, allowed.get(slot))
            for slot, state in enumerate(taking_part)
        ]
        number = self._dispatched("decode")
        for state in taking_part:
            if state.request is not None:
                state.unfetched.add(number)
        return FakeHandle(lambda: self._fetch(number, results, taking_part))

    def wait(self) -> None:
        self._enter("wait")
        self._pass_gate()
        self._pending.clear()

    def _fetch_scores(self, number: int, scores: list[float]) -> list[float]:
        self._enter("fetch_scores")
        assert number not in self._pending, "to fetch the scores would be to wait for them"
        return scores

    def _fetch(
        self, number: int, results: list[SlotRounds], taking_part: list[_Slot]
    ) -> list[SlotRounds]:
        self._enter("fetch")
        self._pass_gate()
        time.sleep(self._decode_delay_s)
        self._pending = {i: kind for i, kind in self._pending.items() if i > number}
        for state, result in zip(taking_part, results, strict=True):
            state.unfetched.discard(number)
            if result.finish is not FinishReason.NONE:
                state.request = None
        return results

    def _run_slot(self, state: _Slot, draft_length: int, masks: TokenMasks | None) -> SlotRounds:
        rounds = SlotRounds([], [], [], FinishReason.NONE)
        tokens, drafted, accepted, finish = [], [], [], FinishReason.NONE
        for number in range(self.limits.rounds_per_call):
            if not state.running or (masks is not None and number > 0):
                emitted, verified, agreed = [], 0, 0
            else:
                emitted, verified, agreed, finish = self._run_round(state, draft_length, masks)
            tokens.append(emitted)
            drafted.append(verified)
            accepted.append(agreed)
        logprobs = [[fake_logprob(token) for token in row] for row in tokens]
        wanted = state.request.top_logprobs if state.request else 0
        top = [[fake_top_logprobs(token, wanted) for token in row] for row in tokens]
        return dataclasses.replace(
            rounds,
            tokens=tokens,
            drafted=drafted,
            accepted=accepted,
            finish=finish,
            logprobs=logprobs,
            top_logprobs=top if wanted else (),
            next_drafts=list(state.drafts),
        )

    def _run_round(
        self, state: _Slot, draft_length: int, masks: TokenMasks | None
    ) -> tuple[list[int], int, int, FinishReason]:
        request, limits = state.request, self.limits
        assert request is not None and state.next_token is not None
        drafts, agreed = state.drafts[:draft_length], 0
        position = len(state.prompt) + len(state.reply)
        previous = state.reply[-1] if state.reply else state.next_token
        self._write(state, position, previous)
        emitted: list[int] = []
        finish = FinishReason.NONE
        while finish is FinishReason.NONE and len(emitted) <= agreed:
            previous = self._reply_token(request, len(state.reply), previous)
            if masks is not None:
                assert len(emitted) < len(masks), f"no mask for position {len(emitted)}"
                previous = lowest_allowed(masks[len(emitted)], previous)
            emitted.append(previous)
            state.reply.append(previous)
            finish = end_of(request, limits, state.reply)
            agreed += drafts[len(emitted) - 1 : len(emitted)] == [previous]
        for draft in range(len(drafts)):
            kept = draft < agreed
            self._write(state, position + 1 + draft, emitted[draft] if kept else REJECTED)
        state.rounds += 1
        state.running = finish is FinishReason.NONE
        budget = request.max_tokens - len(state.reply)
        room = limits.max_context - len(request.prompt_ids) - len(state.reply)
        count = max(0, min(state.draft_cap, draft_length, min(budget, room) - 1))
        state.drafts = self._draft(state, request, count)
        return emitted, len(drafts), agreed, finish

    def _draft(self, state: _Slot, request: Request, count: int) -> list[int]:
        """As many right drafts as the script accepts in the next round, then wrong ones."""
        drafts: list[int] = []
        accepted = self._accepts[state.rounds % len(self._accepts)]
        for n in range(count):
            previous = (state.reply + drafts)[-1]
            right = self._reply_token(request, len(state.reply) + n, previous)
            drafts.append(right if n < accepted else (right + 1) % self.limits.vocab_size)
        return drafts

    def _reply_token(self, request: Request, index: int, previous: int) -> int:
        vocab_size = self.limits.vocab_size
        return reply_token(request, index, previous, vocab_size, self.replies, self._seeded)

    def _enter(self, method: str, *facts: Any) -> None:
        self._thread = self._thread or threading.get_ident()
        assert self._thread == threading.get_ident(), f"{method} is called from another thread"
        self.log.append((method, *facts))
        if self._fail_on == (method, len(self.calls(method))):
            raise RuntimeError(f"scripted failure of {method}")

    def _dispatched(self, program: str) -> int:
        self._dispatches += 1
        self._pending[self._dispatches] = program
        ahead = list(self._pending.values()).count(program)
        assert ahead <= 2, f"{ahead} {program} programs dispatched ahead of what was waited for"
        return self._dispatches

    def _pass_gate(self) -> None:
        if self._gate is not None:
            assert self._gate.acquire(timeout=20), "the test never allowed this call"

    def _check_constrained(self, allowed: Mapping[int, TokenMasks], held: Collection[int]) -> None:
        for slot, state in enumerate(self._slots):
            constrained = state.request is not None and state.request.constraint is not None
            assert constrained or not (slot in allowed or slot in held), f"slot {slot} is free"
            assert constrained == ((slot in allowed) + (slot in held)), f"slot {slot}"
            assert slot not in allowed or not state.unfetched, f"slot {slot} has unknown tokens"

    def _check_draft_cap(self, draft_cap: int) -> None:
        assert 0 <= draft_cap <= self.limits.draft_length, f"draft cap {draft_cap}"

    def _check_pages(self, slot: int, page_ids: Sequence[int], positions: int) -> None:
        limits = self.limits
        assert len(set(page_ids)) == len(page_ids) <= limits.pages_per_slot, f"pages {page_ids}"
        assert all(1 <= page_id < limits.pages for page_id in page_ids), f"pages {page_ids}"
        covered = len(page_ids) * limits.page_size
        assert covered >= positions, f"slot {slot}: pages cover {covered} of {positions} positions"
        for other, state in enumerate(self._slots):
            shared = set(page_ids) & set(state.page_ids)
            assert other == slot or state.request is None or not shared, (
                f"slots {slot} and {other} share pages {sorted(shared)}"
            )

    def _check_memory(self, slot: int, tokens: Sequence[int | None]) -> None:
        size, page_ids = self.limits.page_size, self._slots[slot].page_ids
        held = [self._memory.get((page_ids[i // size], i % size)) for i in range(len(tokens))]
        assert held == list(tokens), f"slot {slot}: pages hold {held} in place of {tokens}"

    def _write(self, state: _Slot, position: int, token: int) -> None:
        size = self.limits.page_size
        assert position < self.limits.max_context, f"write at {position}, beyond the context"
        self._memory[state.page_ids[position // size], position % size] = token


@dataclasses.dataclass
class FakeHandle:
    """A program whose results wait to be fetched, once and in order."""

    take: Callable[[], Any]
    fetched: bool = False

    def fetch(self) -> Any:
        assert not self.fetched, "results are fetched twice"
        self.fetched = True
        return self.take()
