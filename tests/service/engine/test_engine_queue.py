"""The waiting queue as the service uses it: bounds, admission, deadlines, places; thread included."""

import asyncio
import dataclasses
import time

import pytest

from fakes import FakeExecutor, expected_reply, small_limits
from running_engine import ask, read, started, until
from service.engine import stream as stream_module
from service.engine.engine import Engine
from service.engine.errors import (
    DeadlineError,
    EngineFailedError,
    QueueFullError,
    RequestAbortedError,
)
from service.engine.types import FinishReason, QueueStatus


async def test_a_full_queue_refuses_at_once_and_takes_requests_again_later():
    executor = FakeExecutor(small_limits(slots=2), stepped=True)
    async with started(executor, max_waiting_requests=8) as engine:
        taken, refused = [], []
        for i in range(50):
            try:
                taken.append(engine.submit(ask(i)))
            except QueueFullError as error:
                refused.append(error)
            assert engine.load().waiting <= 8
        assert 8 <= len(taken) <= 10
        assert {(e.kind, e.limit, e.actual) for e in refused} == {("requests", 8, 9)}
        assert all(e.retry_after_s > 0 for e in refused)
        executor.allow(10_000)
        for stream in taken:
            assert (await read(stream))[0] == expected_reply(stream.request, executor.limits)
        assert (await read(engine.submit(ask(0))))[0][1] is FinishReason.MAX_TOKENS


async def test_the_time_of_admission_is_told():
    executor = FakeExecutor(small_limits(slots=1), stepped=True)
    async with started(executor) as engine:
        first, second = engine.submit(ask(0)), engine.submit(ask(1))
        await until(lambda: first.admitted_at is not None)
        assert second.admitted_at is None
        executor.allow(10_000)
        await read(first)
        await read(second)
        assert first.admitted_at is not None
        assert second.admitted_at is not None
        assert first.submitted_at <= first.admitted_at < second.admitted_at


async def test_admitted_waits_for_the_first_slot_of_a_call():
    executor = FakeExecutor(small_limits(slots=1), stepped=True)
    async with started(executor) as engine:
        running = engine.submit(ask(0))
        await until(lambda: running.admitted_at is not None)
        with engine.submit_choices((ask(1), ask(1))) as choices:
            waiting = asyncio.create_task(choices.admitted())
            done, _ = await asyncio.wait([waiting], timeout=0.02)
            assert not done
            running.abort()
            executor.allow(2)
            await waiting
            assert choices.streams[0].admitted_at is not None
            assert choices.streams[1].admitted_at is None
            await choices.admitted()  # at once, now
        with engine.submit_choices((ask(1),)) as choices:
            choices.streams[0].abort()
            await choices.admitted()  # there is nothing to wait for


async def test_admitted_tells_why_there_will_be_no_slot():
    executor = FakeExecutor(small_limits(slots=1), stepped=True, fail_on=("fetch", 2))
    engine = Engine(executor)
    await engine.start()
    running = engine.submit(ask(0))
    await until(lambda: running.admitted_at is not None)
    with engine.submit_choices((ask(1), ask(1))) as choices:
        assert engine.abort("r1")
        with pytest.raises(RequestAbortedError):
            await choices.admitted()
    with engine.submit_choices((ask(2), ask(2))) as choices:
        executor.allow(10_000)
        with pytest.raises(EngineFailedError):
            await choices.admitted()
    await engine.stop(grace_s=1)


async def test_a_call_whose_deadline_passes_while_it_waits_is_dropped():
    executor = FakeExecutor(small_limits(slots=1), stepped=True)
    async with started(executor) as engine:
        running = engine.submit(ask(0))
        await until(lambda: running.admitted_at is not None)
        deadline = time.monotonic() + 0.2
        late = dataclasses.replace(ask(1), first_token_deadline=deadline)
        patient = dataclasses.replace(ask(2), first_token_deadline=deadline + 3600)
        waiting = engine.submit(patient)
        with engine.submit_choices((late, late)) as choices:
            await until(lambda: time.monotonic() > deadline)
            executor.allow(10_000)
            with pytest.raises(DeadlineError, match="the request has waited 0") as dropped:
                await choices.admitted()
            assert dropped.value.estimated_wait_s is None
            assert dropped.value.waited_s is not None
            assert dropped.value.waited_s >= dropped.value.deadline_s > 0
            assert engine.counters.expired == 2
            assert engine.queue_status("r1") is None
            engine.submit(ask(1)).abort()  # the id is free
        for stream in (running, waiting):
            assert (await read(stream))[0] == expected_reply(stream.request, executor.limits)
        assert engine.counters.expired == 2
        assert engine.counters.failed == 0


async def test_statuses_are_told_when_the_place_in_the_queue_changes(monkeypatch):
    monkeypatch.setattr(stream_module, "QUEUE_INTERVAL_S", 0.001)
    executor = FakeExecutor(small_limits(slots=1), stepped=True)
    async with started(executor) as engine:
        running = engine.submit(ask(0))
        await until(lambda: running.admitted_at is not None)
        assert engine.queue_status("r0") is None
        before = [engine.submit(ask(i)) for i in (1, 2)]
        with engine.submit_choices((ask(3), ask(3))) as choices:
            changes = choices.queue_changes()
            assert await anext(changes) == QueueStatus(2, None) == engine.queue_status("r3")
            change = asyncio.ensure_future(anext(changes))
            done, _ = await asyncio.wait([change], timeout=0.02)
            assert not done
            before[0].abort()
            assert await change == QueueStatus(1, None)
            before[1].abort()
            running.abort()
            executor.allow(10_000)
            rest = [status async for status in changes]
            assert rest in ([], [QueueStatus(0, None)])
            assert choices.streams[0].admitted_at is not None
            assert [status async for status in choices.queue_changes()] == []
    assert engine.queue_status("r3") is None


async def test_a_queue_that_moves_fast_is_not_told_in_every_step(monkeypatch):
    monkeypatch.setattr(stream_module, "QUEUE_INTERVAL_S", 3600.0)
    executor = FakeExecutor(small_limits(slots=1), stepped=True)
    async with started(executor) as engine:
        for i in range(20):
            engine.submit(ask(i))
        await until(lambda: engine.load().waiting == 19)
        with engine.submit_choices((ask(20),)) as choices:
            executor.allow(10_000)
            assert [status.position async for status in choices.queue_changes()] == [19]


async def test_statuses_end_with_the_error_that_ends_the_waiting():
    executor = FakeExecutor(small_limits(slots=1), stepped=True)
    async with started(executor) as engine:
        engine.submit(ask(0))
        await until(lambda: engine.load().waiting == 0)
        with engine.submit_choices((ask(1),)) as choices:
            changes = choices.queue_changes()
            assert (await anext(changes)).position == 0
            engine.abort("r1")
            with pytest.raises(RequestAbortedError):
                await anext(changes)


async def test_the_expected_wait_is_told_once_enough_requests_have_ended():
    executor = FakeExecutor(small_limits(slots=1), stepped=True)
    async with started(executor) as engine:
        assert engine.estimated_wait() == 0.0
        for i in range(4):
            stream = engine.submit(ask(i, max_tokens=1))
            await until(lambda stream=stream: stream.admitted_at is not None)
            assert engine.estimated_wait() is None
            executor.allow(2)  # its call, and the empty one behind it
            await read(stream)
            await until(lambda: engine.load().running == 0)
        assert engine.estimated_wait() == 0.0
        running = engine.submit(ask(9))
        await until(lambda: running.admitted_at is not None)
        assert (engine.estimated_wait() or 0.0) > 0.0
