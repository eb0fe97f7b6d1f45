"""Constrained replies, their neighbours, and the log-probabilities of prompts and likeliest tokens."""

import asyncio
import dataclasses

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeExecutor, expected_reply, fake_logprob, fake_top_logprobs, small_limits
from running_engine import ask, assert_nothing_held, read, started, until
from service.engine.constraints import AfterReasoning, mask_without
from service.engine.draft_policy import DraftPolicy
from service.engine.errors import ConstraintError
from service.engine.types import FinishReason, Request
from service.errors import from_exception
from token_rules import TokenRule, TokenRuleMatcher, expected_constrained, mask_of

END = 999
REASONING_END = 500


def multiples_of_three(reply: tuple[int, ...]) -> set[int]:
    """The model would count up: two drafts of three are not allowed. Ends after nine tokens."""
    return {END} if len(reply) == 9 else set(range(0, 900, 3))


def anything_but_sevens(reply: tuple[int, ...]) -> set[int]:
    """Most drafts are allowed."""
    return {token for token in range(900) if token % 10 != 7} | {END}


def dead_end_after(count: int):
    return lambda reply: set(range(900)) if len(reply) < count else set()


RULES = {"threes": multiples_of_three, "no sevens": anything_but_sevens}


def constrained(name: str, rule, prompt: int = 5, max_tokens: int = 14, **fields) -> Request:
    return Request(
        name,
        tuple(range(100, 100 + prompt)),
        max_tokens,
        constraint=TokenRule(rule),
        **{"end_ids": (END,), **fields},
    )


def tokens_of(chunks) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.token_ids)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("accepts", [(0,), (1,), (2,), (2, 0, 1)])
async def test_a_constrained_reply_is_the_same_with_any_drafts_and_in_any_company(rule, accepts):
    executor = FakeExecutor(accepts=accepts)
    async with started(executor) as engine:
        requests = [constrained(f"c{i}", rule, prompt=3 + 4 * i) for i in range(3)]
        free = [ask(i, prompt=2 + 3 * i, max_tokens=20) for i in range(4)]
        streams = [engine.submit(request) for request in (*requests, *free)]
        replies = [reply for reply, _ in await asyncio.gather(*map(read, streams))]
        for request, reply in zip(requests, replies[:3], strict=True):
            assert reply == expected_constrained(request, executor.limits, rule)
        for request, reply in zip(free, replies[3:], strict=True):
            assert reply == expected_reply(request, executor.limits)
        await until(lambda: engine.load().running == 0)
        assert_nothing_held(engine)


@given(
    accepts=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    caps=st.lists(st.integers(0, 2) | st.none(), min_size=1, max_size=6),
    rounds=st.integers(1, 3),
)
def test_any_mixture(accepts, caps, rounds):
    async def run() -> None:
        executor = FakeExecutor(small_limits(rounds_per_call=rounds), accepts=accepts)
        async with started(executor, adaptive_drafts=True) as engine:
            requests = [
                constrained(f"c{i}", multiples_of_three, prompt=1 + i, max_draft_tokens=cap)
                if i % 2
                else ask(i, prompt=3 * i + 1)
                for i, cap in enumerate(caps)
            ]
            replies = await asyncio.gather(*(read(engine.submit(r)) for r in requests))
            for request, (reply, _) in zip(requests, replies, strict=True):
                assert reply == (
                    expected_constrained(request, executor.limits, multiples_of_three)
                    if request.constraint
                    else expected_reply(request, executor.limits)
                )

    asyncio.run(run())


async def test_a_constrained_request_sits_every_other_call_out_and_the_others_none():
    executor = FakeExecutor(accepts=(0,), stepped=True)
    async with started(executor) as engine:
        free = engine.submit(ask(0, prompt=1, max_tokens=40))
        bound = engine.submit(constrained("c", multiples_of_three, prompt=1, max_tokens=5))
        executor.allow(1000)
        (free_reply, free_chunks), (_, bound_chunks) = await asyncio.gather(read(free), read(bound))
    assert free_reply == expected_reply(ask(0, prompt=1, max_tokens=40), executor.limits)
    calls = zip(executor.allowed, executor.held, strict=True)
    who = [(tuple(allowed), held) for allowed, held in calls if allowed or held]
    slot = who[0][0][0]
    assert who == [((slot,), ()), ((), (slot,))] * 5
    # The free one keeps all rounds of all calls, each dispatched before the last one is fetched.
    assert free_chunks[-1].speculation.rounds == 40
    order = [name for name, *_ in executor.log if name in ("decode", "fetch")]
    assert order[:39] == ["decode", *["decode", "fetch"] * 19]
    # And the constrained one has one round in each that it takes part in.
    assert bound_chunks[-1].speculation.rounds == 5


async def test_constrained_requests_alone_go_together_with_one_chunk_of_a_prompt_per_call():
    executor = FakeExecutor()
    async with started(executor) as engine:
        streams = [
            engine.submit(constrained(f"c{i}", multiples_of_three, prompt=prompt, max_tokens=20))
            for i, prompt in enumerate((1, 2, 40))
        ]
        await asyncio.gather(*map(read, streams))
    assert not any(executor.held)
    order = [name for name, *_ in executor.log if name in ("decode", "fetch", "prefill")]
    assert [name for name in order if name != "prefill"] == ["decode", "fetch"] * len(executor.held)
    first, last = order.index("decode"), len(order) - order[::-1].index("prefill")
    chunks = "".join(name[0] for name in order[first:last]).split("df")
    assert all(between in ("", "p") for between in chunks)


async def test_drafts_beyond_the_program_are_not_followed():
    executor, rule = FakeExecutor(accepts=(2,), stepped=True), TokenRule(anything_but_sevens)
    request = dataclasses.replace(constrained("c", anything_but_sevens, prompt=1), constraint=rule)
    async with started(executor) as engine:
        stream = engine.submit(request)
        executor.allow()
        await until(lambda: len(executor.draft_lengths) == 2)
        engine.set_draft_cap_default(0)
        executor.allow(1000)
        reply, _ = await read(stream)
        assert reply == expected_constrained(request, executor.limits, anything_but_sevens)
    assert executor.draft_lengths[:3] == [2, 2, 0]
    # The call of draft length 2 has drafted two tokens again, which the next one drops.
    assert [len(drafts) for drafts in rule.matchers[0].drafts[:4]] == [0, 2, 0, 0]


async def test_an_abort_while_held_frees_the_slot_and_changes_nothing_for_the_others():
    executor = FakeExecutor(small_limits(slots=2), stepped=True)
    async with started(executor) as engine:
        free = engine.submit(ask(0, prompt=1, max_tokens=40))
        bound = engine.submit(constrained("c", multiples_of_three, prompt=1))
        await until(lambda: len(executor.held) == 2)  # the second call is dispatched without it
        assert [len(held) for held in executor.held] == [0, 1]
        bound.abort()
        after = engine.submit(constrained("d", multiples_of_three, prompt=1))
        executor.allow(1000)
        replies = await asyncio.gather(read(free), read(after))
        assert replies[0][0] == expected_reply(ask(0, prompt=1, max_tokens=40), executor.limits)
        assert replies[1][0] == expected_constrained(
            after.request, executor.limits, multiples_of_three
        )
        await until(lambda: engine.load().running == 0)
        assert_nothing_held(engine)
    assert len(executor.calls("release")) == 1


@pytest.mark.parametrize("tokens_before", [0, 1, 4])
@pytest.mark.parametrize("accepts", [(0,), (2,)])
async def test_a_dead_end_fails_one_request_and_its_slot_is_used_again(tokens_before, accepts):
    executor = FakeExecutor(small_limits(slots=2), accepts=accepts)
    async with started(executor) as engine:
        free = engine.submit(ask(0, prompt=9, max_tokens=40))
        stuck = engine.submit(constrained("c", dead_end_after(tokens_before), prompt=3))
        after = engine.submit(constrained("d", multiples_of_three))
        delivered: list[int] = []
        with pytest.raises(ConstraintError) as raised:
            async for chunk in stuck:
                assert chunk.finish is FinishReason.NONE
                delivered += chunk.token_ids
        assert delivered == list(range(103, 103 + len(delivered)))
        assert len(delivered) <= tokens_before
        replies = await asyncio.gather(read(free), read(after))
        assert replies[0][0] == expected_reply(ask(0, prompt=9, max_tokens=40), executor.limits)
        assert replies[1][0] == expected_constrained(
            after.request, executor.limits, multiples_of_three
        )
        assert (engine.counters.dead_ends, engine.counters.failed) == (1, 0)
        await until(lambda: engine.load().running == 0)
        assert_nothing_held(engine)
    assert len(executor.calls("release")) == 1
    status = from_exception(raised.value, "c")
    assert status.code is grpc.StatusCode.FAILED_PRECONDITION
    assert status.message.startswith("constraint cannot be met with this vocabulary")


async def test_a_dead_end_behind_a_draft_that_ends_the_request_is_still_a_failure():
    executor = FakeExecutor(accepts=(2,))
    request = constrained("c", dead_end_after(3), prompt=1, max_tokens=4, end_ids=())
    async with started(executor) as engine:
        with pytest.raises(ConstraintError):
            await read(engine.submit(request))
        await until(lambda: engine.load().running == 0)
        assert_nothing_held(engine)
    assert executor.calls("release") == []  # the device has ended it by itself


async def test_choices_of_a_call_have_a_matcher_each():
    executor, rule = FakeExecutor(), TokenRule(multiples_of_three)
    request = dataclasses.replace(constrained("c", multiples_of_three), constraint=rule)
    async with started(executor) as engine:
        with engine.submit_choices((request, request, request)) as streams:
            chunks = [item async for item in streams]
    reply, _ = expected_constrained(request, executor.limits, multiples_of_three)
    for choice in range(3):
        assert tokens_of(chunk for index, chunk in chunks if index == choice) == reply
    assert [matcher.accepted for matcher in rule.matchers] == [reply] * 3


async def test_the_budget_may_end_a_reply_before_its_constraint_is_met():
    executor = FakeExecutor()
    async with started(executor) as engine:
        reply, _ = await read(engine.submit(constrained("c", multiples_of_three, max_tokens=4)))
    assert len(reply[0]) == 4
    assert reply[1] is FinishReason.MAX_TOKENS


@pytest.mark.parametrize("accepts", [(0,), (1,), (2,), (1, 2)])
@pytest.mark.parametrize("length", range(4))
async def test_the_constraint_begins_where_the_reasoning_ends_also_inside_a_round(accepts, length):
    """Case 32. The model reasons, tries the end id, ends the reasoning, and begins an answer."""
    reasoning = tuple(range(11, 11 + length))
    script = (*reasoning, END, REASONING_END, 3, 6, 7, 9)
    executor, rule = (
        FakeExecutor(replies={"c": script}, accepts=accepts),
        TokenRule(multiples_of_three),
    )
    request = dataclasses.replace(
        constrained("c", multiples_of_three, max_tokens=30),
        constraint=rule,
        reasoning_end=REASONING_END,
    )
    async with started(executor) as engine:
        (reply, finish), chunks = await read(engine.submit(request))
    assert reply[: length + 5] == (*reasoning, 0, REASONING_END, 3, 6, 0)
    assert (finish, len(reply)) == (FinishReason.END_OF_SEQUENCE, length + 2 + 10)
    assert rule.matchers[0].accepted == reply[length + 2 :]
    if accepts == (2,):
        assert any(
            REASONING_END in chunk.token_ids and chunk.token_ids[-1] != REASONING_END
            for chunk in chunks
        )


def test_masks_behind_a_drafted_end_of_the_reasoning():
    matcher = TokenRuleMatcher(multiples_of_three)
    free = mask_without((END,), 1000)
    constraint = AfterReasoning(matcher, REASONING_END, free)
    threes = mask_of(range(0, 900, 3))
    assert constraint.masks((1, 2)) == [free] * 3
    assert constraint.masks((1, REASONING_END, 3)) == [free, free, threes, threes]
    assert constraint.masks((REASONING_END, 4, 3)) == [free, threes]  # 4 is not allowed
    assert matcher.accepted == ()
    constraint.accept((5, 5))
    constraint.accept((5, REASONING_END, 3, 6))
    assert matcher.accepted == (3, 6)
    assert constraint.masks((REASONING_END,)) == [threes]
    constraint.accept((9,))
    assert matcher.accepted == (3, 6, 9)
    with pytest.raises(ConstraintError):
        constraint.accept((REASONING_END,))


def test_masks_are_little_endian_bits():
    mask = mask_without((0, 9, 15), 20)
    assert mask == bytes([0b11111110, 0b01111101, 0b11111111])
    assert mask_of({0, 9}, 20) == bytes([1, 2, 0])


async def test_held_calls_teach_the_draft_policy_nothing(monkeypatch):
    seen: list[tuple[int, bool]] = []
    costs: list[int] = []
    observe, observe_call = DraftPolicy.observe, DraftPolicy.observe_call

    def spy(self, ticket, rounds) -> None:
        seen.append((ticket, any(rounds.tokens)))
        observe(self, ticket, rounds)

    def spy_call(self, draft_length, running, cost) -> None:
        costs.append(running)
        observe_call(self, draft_length, running, cost)

    monkeypatch.setattr(DraftPolicy, "observe", spy)
    monkeypatch.setattr(DraftPolicy, "observe_call", spy_call)
    executor = FakeExecutor()
    async with started(executor, adaptive_drafts=True) as engine:
        free = engine.submit(ask(0, prompt=1, max_tokens=40))
        bound = engine.submit(constrained("c", multiples_of_three, prompt=1))
        await asyncio.gather(read(free), read(bound))
    assert all(emitted for ticket, emitted in seen if ticket == bound.ticket)
    assert sum(ticket == bound.ticket for ticket, _ in seen) == sum(map(bool, executor.allowed))
    assert set(costs) == {1}  # one round of one slot says nothing of what a call costs


@pytest.mark.parametrize("accepts", [(0,), (2,)])
@pytest.mark.parametrize("rule", [None, anything_but_sevens], ids=["free", "constrained"])
async def test_likeliest_tokens_are_one_per_token_and_aligned(accepts, rule):
    """Case 24, in a stream that nobody reads until the end."""
    executor = FakeExecutor(accepts=accepts)
    request = dataclasses.replace(ask(0), top_logprobs=3, logprobs=True, end_ids=(END,))
    if rule:
        request = dataclasses.replace(request, constraint=TokenRule(rule))
    async with started(executor) as engine:
        stream, beside = engine.submit(request), engine.submit(ask(1))
        await until(lambda: engine.counters.finished[FinishReason.MAX_TOKENS] == 2)
        chunk, plain = await anext(stream), await anext(beside)
    assert len(chunk.token_ids) == request.max_tokens
    assert chunk.logprobs == tuple(map(fake_logprob, chunk.token_ids))
    assert chunk.top_logprobs == tuple(fake_top_logprobs(token, 3) for token in chunk.token_ids)
    assert (plain.logprobs, plain.top_logprobs) == ((), ())


@pytest.mark.parametrize("prompt", [1, 2, 8, 9, 30])
async def test_prompt_scores_come_with_the_first_tokens_and_nobody_waits_for_them(prompt):
    """The fake fails when scores are fetched before the chunk is known to have run."""
    executor = FakeExecutor()
    request = dataclasses.replace(ask(3, prompt=prompt), prompt_logprobs=True)
    async with started(executor) as engine:
        stream, beside = engine.submit(request), engine.submit(ask(1, prompt=20))
        (_, chunks), (_, others) = await asyncio.gather(read(stream), read(beside))
    assert chunks[0].prompt_logprobs == tuple(map(fake_logprob, request.prompt_ids[1:]))
    assert not any(chunk.prompt_logprobs for chunk in (*chunks[1:], *others))
    assert len(executor.calls("fetch_scores")) == -(-(prompt - 1) // 8)
