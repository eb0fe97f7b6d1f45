"""When calls are made: so many in flight at all times, or at random moments whatever is in flight."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

Call = Callable[[int, float], Coroutine[Any, Any, None]]
"""Makes the call of a number, which arrived at a time of `time.monotonic`."""


async def closed_loop(streams: int, seconds: float, call: Call) -> None:
    """Keeps `streams` calls in flight for so long, then waits for those that are."""
    numbers = itertools.count()
    ends_at = time.monotonic() + seconds

    async def one_stream() -> None:
        while time.monotonic() < ends_at:
            await call(next(numbers), time.monotonic())

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(one_stream())


async def open_loop(rate: float, seconds: float, seed: int, call: Call) -> None:
    """Makes `rate` calls a second on average, at the moments of a Poisson process, for so long.

    A call that could not be made in time has arrived all the same when it should have been made.
    """
    rng = random.Random(seed)
    begun_at = arrives_at = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in itertools.count():
            arrives_at += rng.expovariate(rate)
            if arrives_at > begun_at + seconds:
                return
            await asyncio.sleep(arrives_at - time.monotonic())
            group.create_task(call(number, arrives_at))
