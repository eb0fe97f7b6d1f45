"""Keeps an engine serving: tells when it is stuck, and makes it anew when it has failed."""

import asyncio
import collections
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from service.engine.counters import EngineCounters
from service.engine.engine import Engine
from service.engine.types import Executor

logger = logging.getLogger(__name__)

RESTART_WINDOW_S = 600.0
"""Restarts older than this no longer count against the limit."""
LOOKS_PER_STALL = 10
"""How often the engine is looked at within the time after which it counts as stuck."""
MIN_PAUSE_S = 0.01

T = TypeVar("T")


class Supervisor:
    """Owns an executor and one engine after the other. For the event loop's thread."""

    def __init__(
        self,
        executor: Executor,
        build: Callable[[EngineCounters], Engine],
        *,
        stall_s: float,
        restarts: int,
        report: Callable[[bool], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Builds the first engine; nothing runs before `start`.

        Args:
          executor: warm.
          build: makes an engine on the executor that counts on these counters.
          stall_s: seconds after which an engine that has work and does not get on with it is stuck.
          restarts: how many within `RESTART_WINDOW_S`; one more failure and the engine is lost.
          report: called with whether the engine serves, at the start and when that has changed.
          clock: seconds, to count restarts by.
        """
        self._executor = executor
        self._build = build
        self._stall_s = stall_s
        self._restarts = restarts
        self._report = report
        self._clock = clock
        self._restarted_at: collections.deque[float] = collections.deque()
        self._engine = build(EngineCounters(executor.limits.draft_length))

    @property
    def engine(self) -> Engine:
        """The engine that serves, or the one that has failed until there is another."""
        return self._engine

    async def start(self) -> None:
        """Starts the first engine."""
        await self._engine.start()
        await self._report(True)

    async def watch(self) -> None:
        """Goes on until the engine has failed for the last time."""
        while True:
            await self._until_failure()
            await self._report(False)
            if not await self._restart():
                return
            await self._report(True)

    async def _until_failure(self) -> None:
        """Reports stalls, and their ends."""
        stuck = False
        pause_s = max(self._stall_s / LOOKS_PER_STALL, MIN_PAUSE_S)
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._engine.failed.wait(), pause_s)
                return
            if self._engine.stalled(self._stall_s) is stuck:
                continue
            stuck = not stuck
            if stuck:
                logger.error("the engine is stuck: no turn has ended for %g s", self._stall_s)
            else:
                logger.warning("the engine gets on again")
            await self._report(not stuck)

    async def _restart(self) -> bool:
        """Makes an engine anew, with an empty state; False if too many were."""
        await self._engine.stop(0)
        while self._may_restart():
            count = len(self._restarted_at)
            logger.warning("restart %d of at most %d of the engine", count, self._restarts)
            try:
                await in_daemon_thread("reset", self._executor.reset)
            except Exception:
                logger.exception("the device is not fit to go on")
                continue
            failed = self._engine
            self._engine = self._build(failed.counters)
            self._engine.set_draft_cap_default(failed.draft_cap_default)
            await self._engine.start()
            self._engine.counters.restarts += 1
            logger.warning("the engine serves again")
            return True
        logger.error("the engine is lost: it has failed after %d restarts", self._restarts)
        return False

    def _may_restart(self) -> bool:
        now = self._clock()
        while self._restarted_at and self._restarted_at[0] <= now - RESTART_WINDOW_S:
            self._restarted_at.popleft()
        if len(self._restarted_at) >= self._restarts:
            return False
        self._restarted_at.append(now)
        return True


def in_daemon_thread(name: str, work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs work that cannot be interrupted where it does not keep the process alive."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def settle() -> None:
        future.set_running_or_notify_cancel()  # whoever waits may give up, the work goes on
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=settle, name=f"tandem-{name}", daemon=True).start()
    return asyncio.wrap_future(future)
