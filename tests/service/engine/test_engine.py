"""The engine as the service uses it: streams, aborts, bounds, failure, stop; thread included."""

import asyncio
import dataclasses
import time

import pytest

from fakes import FakeExecutor, expected_reply, small_limits
from running_engine import Reply, ask, assert_nothing_held, read, started, until
from service.engine.engine import Engine
from service.engine.errors import (
    DuplicateRequestError,
    EngineFailedError,
    EngineUnavailableError,
    RequestAbortedError,
    RequestTooLargeError,
)
from service.engine.loop import EngineState
from service.engine.stream import TokenStream
from service.engine.types import (
    FinishReason,
    Request,
    SamplingParams,
)


@pytest.mark.parametrize("together", range(1, 10))
async def test_each_request_gets_its_own_reply_in_any_company(together: int):
    executor = FakeExecutor()
    async with started(executor) as engine:
        requests = [
            ask(i, prompt=1 + 7 * i % 20, max_tokens=1 + 5 * i % 23) for i in range(together)
        ]
        replies = await asyncio.gather(*(read(engine.submit(request)) for request in requests))
        for request, (reply, _) in zip(requests, replies, strict=True):
            assert reply == expected_reply(request, executor.limits)
        await until(lambda: engine.load().running == 0)
        assert_nothing_held(engine)


@pytest.mark.parametrize(
    ("fields", "reply"),
    [
        ({"max_tokens": 5, "stop_ids": (8,)}, ((6, 7, 8), FinishReason.STOP)),
        ({"max_tokens": 5, "end_ids": (8,)}, ((6, 7, 8), FinishReason.END_OF_SEQUENCE)),
        ({"max_tokens": 3, "stop_ids": (8,)}, ((6, 7, 8), FinishReason.STOP)),
        ({"max_tokens": 2, "stop_ids": (8,)}, ((6, 7), FinishReason.MAX_TOKENS)),
        ({"max_tokens": 5, "stop_ids": (7, 9), "min_tokens": 2}, ((6, 8, 9), FinishReason.STOP)),
        ({"max_tokens": 99}, (tuple(range(6, 15)), FinishReason.CONTEXT_LENGTH)),
    ],
)
@pytest.mark.parametrize("accepts", [(0,), (1,), (2,), (0, 2, 1)])
async def test_whatever_ends_a_request_ends_it_at_the_same_token(
    fields: dict[str, object], reply: Reply, accepts: tuple[int, ...]
):
    executor = FakeExecutor(small_limits(max_context=12, rounds_per_call=3), accepts=accepts)
    async with started(executor) as engine:
        request = Request("r", (3, 4, 5), **fields)  # type: ignore[arg-type]
        assert (await read(engine.submit(request)))[0] == reply


async def test_scripted_replies_and_the_drafted_flags():
    executor = FakeExecutor(replies={"r": (50, 60, 70, 80, 90)}, accepts=(2,))
    async with started(executor) as engine:
        reply, chunks = await read(engine.submit(Request("r", (1,), 6)))
        assert reply == ((50, 60, 70, 80, 90, 91), FinishReason.MAX_TOKENS)
        drafted = [flag for chunk in chunks for flag in chunk.drafted]
        # Round 1 has no drafts; round 2 accepts both; round 3 drafts up to its budget less one.
        assert drafted == [False, True, True, False, True, False]
        assert chunks[-1].speculation.acceptance_histogram == (1, 1, 1)


async def _waiting(engine: Engine, executor: FakeExecutor) -> TokenStream:
    for i in range(executor.limits.slots):
        engine.submit(ask(90 + i, prompt=1, max_tokens=30))
    executor.allow(2)
    await until(lambda: engine.load().running == executor.limits.slots)
    return engine.submit(ask(0))


async def _prefilling(engine: Engine, executor: FakeExecutor) -> TokenStream:
    stream = engine.submit(ask(0, prompt=40))
    await until(lambda: len(executor.calls("wait")) == 1)
    return stream


async def _in_flight(engine: Engine, executor: FakeExecutor) -> TokenStream:
    stream = engine.submit(ask(0, max_tokens=50))
    await until(lambda: len(executor.calls("fetch")) == 1)
    return stream


async def _one_chunk_read(engine: Engine, executor: FakeExecutor) -> TokenStream:
    stream = await _in_flight(engine, executor)
    executor.allow()
    assert (await anext(stream)).finish is FinishReason.NONE
    return stream


async def _finished_unread(engine: Engine, executor: FakeExecutor) -> TokenStream:
    stream = engine.submit(ask(0, max_tokens=1))
    executor.allow(3)
    await until(lambda: engine.counters.finished[FinishReason.MAX_TOKENS] == 1)
    return stream


@pytest.mark.parametrize(
    "phase", [_waiting, _prefilling, _in_flight, _one_chunk_read, _finished_unread]
)
@pytest.mark.parametrize("by_id", [False, True])
async def test_an_abort_in_any_phase_gives_everything_back(phase, by_id: bool):
    executor = FakeExecutor(stepped=True)
    async with started(executor) as engine:
        stream = await phase(engine, executor)
        finished = phase is _finished_unread
        if by_id:
            assert engine.abort("r0") is not finished
            assert engine.abort("r0") is False
        else:
            stream.abort()
            stream.abort()
        assert engine.load().waiting == 0
        executor.allow(10_000)
        if by_id and not finished:
            with pytest.raises(RequestAbortedError, match="r0"):
                await anext(stream)
        assert [chunk async for chunk in stream] == [] or (by_id and finished)
        await until(lambda: engine.load().running + engine.load().prefilling == 0)
        assert_nothing_held(engine)
        assert engine.counters.aborted == (0 if finished else 1)
        if phase in (_waiting, _prefilling):
            assert "r0" not in [entry[2] for entry in executor.calls("insert")]
        # The slots work on, and the id is free again.
        reply, _ = await read(engine.submit(ask(0)))
        assert reply == expected_reply(ask(0), executor.limits)


async def test_a_hundred_abandoned_streams_leave_the_slots_to_others():
    executor = FakeExecutor(decode_delay_s=0.0005)
    async with started(executor) as engine:
        streams = [engine.submit(ask(i, prompt=1 + i % 30, max_tokens=40)) for i in range(100)]
        for i, stream in enumerate(streams):
            with stream:
                if i % 3 == 0:
                    await anext(stream)
                elif i % 3 == 1:
                    await asyncio.sleep(0.001)
        replies = await asyncio.gather(*(read(engine.submit(ask(i))) for i in range(4)))
        assert [reply for reply, _ in replies] == [
            expected_reply(ask(i), executor.limits) for i in range(4)
        ]
        await until(lambda: engine.load().running + engine.load().prefilling == 0)
        assert_nothing_held(engine)
        assert engine.counters.aborted + sum(engine.counters.finished.values()) == 104


async def test_a_cancelled_wait_loses_no_tokens():
    executor = FakeExecutor(stepped=True)
    async with started(executor) as engine:
        stream = engine.submit(ask(0))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
        executor.allow(10_000)
        assert (await read(stream))[0] == expected_reply(ask(0), executor.limits)


async def test_an_aborted_reader_that_waits_is_woken():
    executor = FakeExecutor(stepped=True)
    async with started(executor) as engine:
        stream = engine.submit(ask(0))
        reader = asyncio.create_task(anext(stream, None))
        await asyncio.sleep(0)
        stream.abort(FinishReason.STOP)
        assert await reader is None
        assert engine.counters.finished[FinishReason.STOP] == 1
        assert engine.counters.aborted == 0


async def test_tokens_on_their_way_to_an_aborted_stream_are_dropped_alone():
    executor = FakeExecutor(stepped=True)
    async with started(executor) as engine:
        aborted, other = engine.submit(ask(0, prompt=1)), engine.submit(ask(1, prompt=1))
        executor.allow()
        while len(executor.calls("fetch")) < 2:
            time.sleep(0.001)  # not asyncio's: the event loop must not take the delivery in yet
        aborted.abort()
        executor.allow(10_000)
        assert (await read(other))[0] == expected_reply(ask(1, prompt=1), executor.limits)
        assert engine.counters.generated_tokens == 12
        assert engine.counters.prompt_tokens == 1


async def test_a_slow_reader_gets_one_merged_chunk_and_blocks_nobody():
    executor = FakeExecutor()
    async with started(executor) as engine:
        slow = engine.submit(ask(0, max_tokens=40))
        reply, _ = await read(engine.submit(ask(1)))
        assert reply == expected_reply(ask(1), executor.limits)
        await until(lambda: engine.load().running == 0)
        await until(lambda: sum(engine.counters.finished.values()) == 2)
        reply, chunks = await read(slow)
        assert reply == expected_reply(ask(0, max_tokens=40), executor.limits)
        assert len(chunks) == 1
        stats = chunks[0].speculation
        assert stats.rounds + stats.accepted >= 40 == len(chunks[0].token_ids)
        assert sum(chunks[0].drafted) == stats.accepted


async def test_what_cannot_be_taken_is_refused_by_submit():
    executor = FakeExecutor(stepped=True)
    engine = Engine(executor)
    with pytest.raises(EngineUnavailableError, match="not started"):
        engine.submit(ask(0))
    async with started(executor) as engine:
        stream = engine.submit(ask(0))
        with pytest.raises(DuplicateRequestError) as duplicate:
            engine.submit(ask(0))
        assert duplicate.value.request_id == "r0"
        with pytest.raises(RequestTooLargeError):
            engine.submit(ask(1, prompt=64))
        for wrong in (ask(1, prompt=0), ask(1, max_tokens=0)):
            with pytest.raises(ValueError, match="must be at least 1"):
                engine.submit(wrong)
        stream.abort()
        engine.submit(ask(0))  # the id is free at once


async def test_an_old_stream_does_not_abort_a_new_request_of_the_same_id():
    executor = FakeExecutor()
    async with started(executor) as engine:
        old = engine.submit(ask(0))
        await read(old)
        new = engine.submit(ask(0))
        old.abort()
        assert (await read(new))[0] == expected_reply(ask(0), executor.limits)


@pytest.mark.parametrize(
    "fail_on",
    [("prefill", 2), ("insert", 1), ("decode", 1), ("decode", 3), ("fetch", 2), ("wait", 1)],
)
async def test_a_failing_executor_fails_every_request_and_nothing_hangs(fail_on: tuple[str, int]):
    executor = FakeExecutor(small_limits(slots=2), fail_on=fail_on, decode_delay_s=0.002)
    engine = Engine(executor)
    await engine.start()
    streams = [engine.submit(ask(i, prompt=20, max_tokens=40)) for i in range(4)]
    for stream in streams:
        got: list[int] = []
        with pytest.raises(EngineFailedError, match=f"scripted failure of {fail_on[0]}") as failed:
            async for chunk in stream:
                got += chunk.token_ids
        assert isinstance(failed.value.__cause__, RuntimeError)
        expected = expected_reply(stream.request, executor.limits)[0]
        assert expected[: len(got)] == tuple(got)  # what had arrived is not lost
    assert engine.state is EngineState.FAILED
    assert engine.counters.failed == 4
    assert_nothing_held(engine)
    with pytest.raises(EngineUnavailableError, match="failed"):
        engine.submit(ask(9))
    assert engine.abort("r0") is False
    await engine.stop(grace_s=1)
    assert engine.state is EngineState.FAILED


@pytest.mark.parametrize("method", ["release", "set_draft_cap"])
async def test_a_failure_while_slots_are_tended_fails_the_engine_too(method: str):
    executor = FakeExecutor(fail_on=(method, 1), stepped=True)
    engine = Engine(executor)
    await engine.start()
    stream, other = engine.submit(ask(0, max_tokens=50)), engine.submit(ask(1, max_tokens=50))
    await until(lambda: len(executor.calls("fetch")) == 1)
    if method == "release":
        other.abort()
    else:
        engine.set_draft_cap_default(0)
    executor.allow(10_000)
    with pytest.raises(EngineFailedError):
        await read(stream)
    await engine.stop(grace_s=1)


async def test_stop_lets_requests_finish_within_the_grace():
    executor = FakeExecutor(small_limits(slots=1), decode_delay_s=0.001)
    engine = Engine(executor)
    await engine.start()
    streams = [engine.submit(ask(i)) for i in range(3)]
    stopping = asyncio.create_task(engine.stop(grace_s=10))
    await asyncio.sleep(0)
    assert engine.state is EngineState.STOPPING
    with pytest.raises(EngineUnavailableError, match="stopping"):
        engine.submit(ask(9))
    for stream in streams:
        assert (await read(stream))[0] == expected_reply(stream.request, executor.limits)
    await stopping
    assert_nothing_held(engine)
    with pytest.raises(EngineUnavailableError, match="stopped"):
        engine.submit(ask(9))
    with pytest.raises(EngineUnavailableError, match="stopped"):
        await engine.start()


async def test_stop_aborts_what_is_left_after_the_grace():
    executor = FakeExecutor(small_limits(slots=1), decode_delay_s=0.02)
    engine = Engine(executor)
    await engine.start()
    running, waiting = engine.submit(ask(0, max_tokens=50)), engine.submit(ask(1))
    first = await anext(running)
    slow_stop = asyncio.create_task(engine.stop(grace_s=60))
    await asyncio.sleep(0)
    await engine.stop(grace_s=0.03)  # a second, shorter grace wins
    await slow_stop
    got = list(first.token_ids)
    with pytest.raises(EngineUnavailableError, match="stopping"):
        async for chunk in running:
            got += chunk.token_ids
    assert tuple(got) == expected_reply(running.request, executor.limits)[0][: len(got)]
    with pytest.raises(EngineUnavailableError, match="stopping"):
        await anext(waiting)
    assert engine.counters.aborted == 2
    assert_nothing_held(engine)


async def test_stop_of_an_engine_that_never_started():
    engine = Engine(FakeExecutor())
    await engine.stop(grace_s=1)
    assert engine.state is EngineState.STOPPED


async def test_counters_equal_what_was_delivered():
    executor = FakeExecutor(accepts=(2, 1, 0, 2))
    async with started(executor) as engine:
        requests = [ask(i, prompt=3 + i, max_tokens=n) for i, n in enumerate((1, 2, 3, 5, 8, 40))]
        requests.append(Request("stop", (7, 8, 9), 30, stop_ids=(15,)))
        replies = await asyncio.gather(*(read(engine.submit(request)) for request in requests))
        counters = engine.counters
        lasts = [chunks[-1].speculation for _, chunks in replies]
        flags = [flag for _, chunks in replies for chunk in chunks for flag in chunk.drafted]
        assert counters.generated_tokens == len(flags) == 1 + 2 + 3 + 5 + 8 + 40 + 6
        assert counters.accepted == sum(flags) == sum(stats.accepted for stats in lasts)
        assert counters.drafted == sum(stats.drafted for stats in lasts)
        assert counters.rounds == sum(stats.rounds for stats in lasts)
        assert counters.prompt_tokens == sum(len(request.prompt_ids) for request in requests)
        histograms = [stats.acceptance_histogram for stats in lasts]
        assert counters.accepted_per_position == [
            sum(sum(histogram[position + 1 :]) for histogram in histograms) for position in (0, 1)
        ]
        assert sum(counters.accepted_per_position) == counters.accepted
        assert {reason: n for reason, n in counters.finished.items() if n} == {
            FinishReason.MAX_TOKENS: 6,
            FinishReason.STOP: 1,
        }
        assert (counters.aborted, counters.failed) == (0, 0)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("draft_length", [1, 2, 3])
async def test_figures_equal_what_was_delivered(draft_length: int, adaptive: bool):
    """Budgets of every size and a stop inside an accepted draft, twelve times over."""
    limits = small_limits(draft_length=draft_length, max_context=80, pages=1 + 4 * 20)
    executor = FakeExecutor(limits, accepts=(3, 0, 2, 1))
    async with started(executor, adaptive_drafts=adaptive) as engine:
        for repeat in range(12):
            requests = [ask(i, max_tokens=n) for i, n in enumerate((1, 2, 3, 5, 8, 64))]
            # The reply to ..., 9 begins 10, 11, 12: the stop id comes as a draft or as a correction.
            requests.append(Request("stop", (7, 8, 9), 30, stop_ids=(12 + repeat % 4,)))
            before = dataclasses.replace(engine.counters, draft_length=draft_length)
            before.accepted_per_position = engine.counters.accepted_per_position.copy()
            replies = await asyncio.gather(*(read(engine.submit(request)) for request in requests))
            for request, ((tokens, finish), chunks) in zip(requests, replies, strict=True):
                assert (tokens, finish) == expected_reply(request, limits)
                flags = [flag for chunk in chunks for flag in chunk.drafted]
                stats = chunks[-1].speculation
                assert len(tokens) == len(flags)
                assert stats.accepted == sum(flags) <= stats.drafted
                histogram = stats.acceptance_histogram
                assert len(histogram) == draft_length + 1
                assert sum(histogram) == stats.rounds
                assert sum(n * count for n, count in enumerate(histogram)) == stats.accepted
                # A round emits its accepted drafts and one more, unless one of them ends the reply.
                assert len(tokens) - stats.accepted in (stats.rounds, stats.rounds - 1)
            after, lasts = engine.counters, [chunks[-1].speculation for _, chunks in replies]
            assert after.generated_tokens - before.generated_tokens == sum(
                len(tokens) for (tokens, _), _ in replies
            )
            for name in ("rounds", "drafted", "accepted"):
                grown = getattr(after, name) - getattr(before, name)
                assert grown == sum(getattr(stats, name) for stats in lasts)
            histograms = [stats.acceptance_histogram for stats in lasts]
            for position in range(draft_length):
                grown = (
                    after.accepted_per_position[position] - before.accepted_per_position[position]
                )
                assert grown == sum(sum(counts[position + 1 :]) for counts in histograms)


async def test_choices_are_read_as_one_and_share_an_id():
    executor = FakeExecutor(small_limits(slots=2), seeded=True)
    async with started(executor) as engine:
        requests = [Request("r", (1, 2, 3), 9 + n, SamplingParams(seed=n)) for n in range(3)]
        with engine.submit_choices(requests) as choices:
            with pytest.raises(DuplicateRequestError):
                engine.submit(requests[0])
            tokens: list[list[int]] = [[] for _ in requests]
            async for index, chunk in choices:
                tokens[index] += chunk.token_ids
            assert [tuple(reply) for reply in tokens] == [
                expected_reply(request, executor.limits, seeded=True)[0] for request in requests
            ]
        assert all(stream.admitted_at is not None for stream in choices.streams)
        assert engine.abort("r") is False
        engine.submit(requests[0]).abort()  # the id is free again


async def test_aborting_one_choice_leaves_the_others():
    executor = FakeExecutor(small_limits(slots=3), stepped=True)
    async with started(executor) as engine:
        with engine.submit_choices([Request("r", (1,), 20)] * 3) as choices:
            choices.streams[1].abort(FinishReason.STOP)
            executor.allow(10_000)
            tokens = [0, 0, 0]
            async for index, chunk in choices:
                tokens[index] += len(chunk.token_ids)
        assert tokens == [20, 0, 20]
        assert engine.counters.finished[FinishReason.STOP] == 1
        assert engine.counters.finished[FinishReason.MAX_TOKENS] == 2
        assert engine.counters.aborted == 0


async def test_an_abort_of_choices_comes_after_all_that_had_arrived():
    executor = FakeExecutor(small_limits(slots=2), stepped=True)
    async with started(executor) as engine:
        with engine.submit_choices([Request("r", (1,), 30)] * 3) as choices:
            executor.allow(2)
            await until(lambda: len(executor.calls("fetch")) == 3)
            await asyncio.sleep(0)
            assert engine.abort("r")
            executor.allow(10_000)
            got = [0, 0, 0]
            with pytest.raises(RequestAbortedError):
                async for index, chunk in choices:
                    got[index] += len(chunk.token_ids)
        assert got[0] == got[1] == engine.counters.generated_tokens / 2 > 0
        assert got[2] == 0
        assert choices.streams[2].admitted_at is None  # it was waiting
        assert engine.counters.aborted == 3


async def test_the_default_draft_cap_reaches_running_requests_that_named_none():
    executor = FakeExecutor(stepped=True, accepts=(2,))
    async with started(executor) as engine:
        assert engine.draft_cap_default == 2
        engine.set_draft_cap_default(1)
        assert engine.draft_cap_default == 1
        free = engine.submit(Request("free", (1,), 50))
        fixed = engine.submit(Request("fixed", (1,), 50, max_draft_tokens=2))
        await until(lambda: len(executor.calls("fetch")) == 1)
        assert sorted(executor.calls("insert")) == [
            ("insert", 0, "free", 1),
            ("insert", 1, "fixed", 2),
        ]
        engine.set_draft_cap_default(0)
        executor.allow(10_000)
        reply, chunks = await read(free)
        assert reply[0] == (await read(fixed))[0][0] == tuple(range(2, 52))
        assert executor.calls("set_draft_cap") == [("set_draft_cap", 0, 0)]
        stats = chunks[-1].speculation
        assert 0 < stats.accepted < stats.rounds // 2
        with pytest.raises(ValueError, match="draft cap is 3"):
            engine.set_draft_cap_default(3)
