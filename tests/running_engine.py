"""An engine with its thread, over a `FakeExecutor`; at the end it must be at rest."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from fakes import FakeExecutor
from service.engine.engine import Engine
from service.engine.loop import EngineState
from service.engine.stream import TokenStream
from service.engine.types import FinishReason, Request, TokenChunk

Reply = tuple[tuple[int, ...], FinishReason]


@contextlib.asynccontextmanager
async def started(executor: FakeExecutor, **options: Any) -> AsyncIterator[Engine]:
    """A running engine; at the end it must be at rest, with nothing held."""
    engine = Engine(executor, **options)
    await engine.start()
    try:
        yield engine
    finally:
        if executor.stepped:
            executor.allow(10_000)
        await engine.stop(grace_s=0)
    assert engine.state is EngineState.STOPPED
    assert_nothing_held(engine)


def assert_nothing_held(engine: Engine) -> None:
    load = engine.load()
    held = (load.running, load.prefilling, load.waiting, load.waiting_tokens, load.pages_used)
    assert held == (0, 0, 0, 0, 0)
    engine.check_integrity()


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that the engine's thread does."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def read(stream: TokenStream) -> tuple[Reply, list[TokenChunk]]:
    chunks = [chunk async for chunk in stream]
    assert all(len(chunk.token_ids) == len(chunk.drafted) for chunk in chunks)
    assert all(chunk.finish is FinishReason.NONE for chunk in chunks[:-1])
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    return (tokens, chunks[-1].finish), chunks


def ask(index: int, prompt: int = 5, max_tokens: int = 12) -> Request:
    return Request(f"r{index}", tuple(range(100 * index, 100 * index + prompt)), max_tokens)
