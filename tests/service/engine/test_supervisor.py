"""An engine that fails is made anew, one that is stuck is told of; what it promises stays."""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator

import pytest

import tiny
from fakes import FakeExecutor, expected_reply
from service.engine.counters import EngineCounters
from service.engine.engine import Engine
from service.engine.errors import EngineFailedError, EngineUnavailableError
from service.engine.stream import TokenStream
from service.engine.supervisor import RESTART_WINDOW_S, Supervisor, in_daemon_thread
from service.engine.types import NOTHING_CONSTRAINED, Request, SamplingParams


class BrokenExecutor(FakeExecutor):
    """Raises in every decode call while it is broken."""

    broken = True

    def decode(self, page_tables, draft_length, allowed=NOTHING_CONSTRAINED, held=()):
        if self.broken:
            raise RuntimeError("the device is broken")
        return super().decode(page_tables, draft_length, allowed, held)


@dataclasses.dataclass
class Watched:
    """A supervisor at work, and what it has reported so far."""

    supervisor: Supervisor
    reports: list[bool]
    changed: asyncio.Condition
    watching: asyncio.Task[None]

    @property
    def engine(self) -> Engine:
        return self.supervisor.engine

    async def reported(self, *expected: bool) -> None:
        """Waits until that much was reported, and checks it."""
        async with asyncio.timeout(20), self.changed:
            await self.changed.wait_for(lambda: len(self.reports) >= len(expected))
        assert self.reports == list(expected)


@contextlib.asynccontextmanager
async def watched(executor, clock=lambda: 0.0, stall_s=20.0, restarts=3) -> AsyncIterator[Watched]:
    reports: list[bool] = []
    changed = asyncio.Condition()

    async def report(serves: bool) -> None:
        async with changed:
            reports.append(serves)
            changed.notify_all()

    def build(counters: EngineCounters) -> Engine:
        return Engine(executor, counters=counters)

    supervisor = Supervisor(
        executor, build, stall_s=stall_s, restarts=restarts, report=report, clock=clock
    )
    await supervisor.start()
    watching = asyncio.create_task(supervisor.watch())
    try:
        yield Watched(supervisor, reports, changed, watching)
    finally:
        watching.cancel()
        await supervisor.engine.stop(0)
    supervisor.engine.check_integrity()


def ask(name: str, max_tokens: int = 30) -> Request:
    return Request(name, (5, 17, 23), max_tokens)


async def read(stream: TokenStream) -> tuple[int, ...]:
    return tuple([token async for chunk in stream for token in chunk.token_ids])


async def test_a_failed_engine_is_replaced_by_one_with_a_fresh_state():
    executor = FakeExecutor(fail_on=("decode", 4))
    async with watched(executor) as w:
        failed = w.engine
        failed.set_draft_cap_default(1)
        streams = [failed.submit(ask(f"r{index}")) for index in range(6)]
        delivered: list[tuple[int, ...]] = []
        for stream in streams:
            tokens: list[int] = []
            with pytest.raises(EngineFailedError, match="scripted failure of decode"):
                async for chunk in stream:
                    tokens += chunk.token_ids
            delivered.append(tuple(tokens))
        whole = expected_reply(ask("r0"), executor.limits)[0]
        assert all(tokens == whole[: len(tokens)] for tokens in delivered)
        assert any(delivered) and not all(delivered)  # the last ones still waited
        await w.reported(True, False, True)
        assert w.engine is not failed
        assert executor.calls("reset") == [("reset",)]
        assert await read(w.engine.submit(ask("r0"))) == whole
        assert w.engine.draft_cap_default == 1
        assert (w.engine.counters.failed, w.engine.counters.restarts) == (6, 1)
        assert w.engine.counters.generated_tokens == sum(map(len, delivered)) + len(whole)


async def test_requests_are_refused_until_the_engine_is_there_again():
    entered, leave = threading.Event(), threading.Event()

    class Slow(FakeExecutor):
        def reset(self) -> None:
            entered.set()
            assert leave.wait(20)
            super().reset()

    async with watched(Slow(fail_on=("decode", 1))) as w:
        with pytest.raises(EngineFailedError):
            await read(w.engine.submit(ask("a")))
        await w.reported(True, False)
        await asyncio.to_thread(entered.wait, 20)
        with pytest.raises(EngineUnavailableError):
            w.engine.submit(ask("b"))
        w.engine.set_draft_cap_default(0)
        leave.set()
        await w.reported(True, False, True)
        assert w.engine.draft_cap_default == 0
        assert await read(w.engine.submit(ask("b")))


async def test_an_engine_that_fails_again_and_again_is_lost():
    async with watched(BrokenExecutor(), restarts=2) as w:
        for count in range(3):
            with pytest.raises(EngineFailedError):
                await read(w.engine.submit(ask("r")))
            await w.reported(*[True, False] * count, True, False)
            if count < 2:
                await w.reported(*[True, False] * (count + 1), True)
        await asyncio.wait_for(w.watching, 20)
        assert w.engine.counters.restarts == 2


async def test_old_restarts_do_not_count():
    now = 0.0
    async with watched(BrokenExecutor(), clock=lambda: now, restarts=1) as w:
        for count in range(3):
            with pytest.raises(EngineFailedError):
                await read(w.engine.submit(ask("r")))
            await w.reported(*[True, False] * (count + 1), True)
            now += RESTART_WINDOW_S


async def test_a_device_that_is_not_fit_to_go_on_costs_a_restart(caplog):
    executor = BrokenExecutor(fail_on=("reset", 1))
    async with watched(executor, restarts=2) as w:
        with pytest.raises(EngineFailedError):
            await read(w.engine.submit(ask("r")))
        await w.reported(True, False, True)
        assert len(executor.calls("reset")) == 2
        assert "scripted failure of reset" in caplog.text
        with pytest.raises(EngineFailedError):
            await read(w.engine.submit(ask("r")))
        await asyncio.wait_for(w.watching, 20)
        assert w.reports == [True, False, True, False]


async def test_without_restarts_the_first_failure_is_the_last():
    executor = BrokenExecutor()
    async with watched(executor, restarts=0) as w:
        with pytest.raises(EngineFailedError):
            await read(w.engine.submit(ask("r")))
        await asyncio.wait_for(w.watching, 20)
        assert w.reports == [True, False]
        assert not executor.calls("reset")


async def test_a_stuck_engine_is_told_of_and_so_is_its_recovery(caplog):
    executor = FakeExecutor(stepped=True)
    async with watched(executor, stall_s=0.2) as w:
        stream = w.engine.submit(ask("r"))
        await w.reported(True, False)
        executor.allow(10_000)
        await w.reported(True, False, True)
        assert await read(stream) == expected_reply(ask("r"), executor.limits)[0]
        assert caplog.text.count("stuck") == 1
        assert w.engine.counters.restarts == 0


async def test_an_engine_without_work_is_not_stuck():
    executor = FakeExecutor()
    async with watched(executor, stall_s=0.5) as w:
        await read(w.engine.submit(ask("r")))
        await asyncio.sleep(1.0)  # nothing happens, which no event tells
        assert w.reports == [True]


async def test_a_stuck_engine_that_fails_was_never_well_in_between():
    executor = FakeExecutor(stepped=True, fail_on=("decode", 3))
    async with watched(executor, stall_s=0.2) as w:
        stream = w.engine.submit(ask("r"))
        await w.reported(True, False)
        executor.allow(10_000)
        with pytest.raises(EngineFailedError):
            await read(stream)
        await w.reported(True, False, False, True)


async def test_work_in_a_daemon_thread():
    assert await in_daemon_thread("work", lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        await in_daemon_thread("work", lambda: 1 // 0)
    leave = threading.Event()
    done = threading.Event()

    def work() -> None:
        leave.wait(20)
        done.set()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(in_daemon_thread("work", work), 0.01)
    leave.set()
    assert await asyncio.to_thread(done.wait, 20)


@pytest.mark.slow
async def test_the_real_executor_begins_anew_with_the_same_programs(monkeypatch):
    """The failure comes between two programs of one turn: the slot is left half made."""
    executor = tiny.executor(tiny.model(), draft_length=1, slots=2)
    executor.warm_up()
    compiled = executor.compile_counts()
    requests = [
        Request("greedy", (5, 17, 5, 17, 80), 24, SamplingParams(temperature=0.0)),
        Request("sampled", (9, 9, 4), 24, SamplingParams(temperature=0.9, seed=3), logprobs=True),
    ]
    async with watched(executor) as w:
        expected = [await read(w.engine.submit(request)) for request in requests]
        with monkeypatch.context() as patch, pytest.raises(EngineFailedError):
            patch.setattr(executor, "insert", lambda *_: 1 // 0)
            await read(w.engine.submit(requests[0]))
        await w.reported(True, False, True)
        assert [await read(w.engine.submit(request)) for request in requests] == expected
        assert executor.compile_counts() == compiled
