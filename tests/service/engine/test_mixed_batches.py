"""Case 16: rows with and without drafts, near the limit or far from it, for 200 requests on end."""

import asyncio
import dataclasses

import pytest

from service.config import DEMO_CHECKPOINT
from service.engine.engine import Engine
from service.engine.executor import load_executor
from service.engine.types import Request, SamplingParams, SpeculationStats
from service.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow  # the embedded checkpoint, because acceptance must be real

SOURCE = '''
class Queue:
    """A queue of bounded size."""

    def __init__(self, maxsize=0):
        self.maxsize = maxsize
        self.items = []

    def put(self, item):
        if self.maxsize and len(self.items) >= self.maxsize:
            raise ValueError("the queue is full")
        self.items.append(item)

    def get(self):
        if not self.items:
            raise ValueError("the queue is empty")
        return self.items.pop(0)

    def peek(self, position):
        if position >= len(self.items):
            raise IndexError(position)
        return self.items[position]

    def clear(self):
        del self.items[:]

    def __len__(self):
        return len(self.items)
'''
CONTEXT = 128


@pytest.fixture(scope="module")
def executor():
    built = load_executor(
        DEMO_CHECKPOINT,
        slots=16,
        max_context=CONTEXT,
        page_size=16,
        pages=None,
        draft_length=2,
        rounds_per_call=4,
        prefill_chunk=64,
        dtype="float32",
    )
    built.warm_up(single_program=True)
    return built


def requests() -> list[Request]:
    """Twenty: the first two as the case tells them, the others from 1 token up to the context."""
    ids = Tokenizer.from_directory(DEMO_CHECKPOINT).encode(SOURCE)
    assert len(ids) > CONTEXT
    lengths = [120, 64, *(1 + 7 * n for n in range(17)), 127]
    return [
        Request(
            str(n),
            ids[:length],
            24 + n,
            SamplingParams(temperature=(0.0, 0.7)[n % 2], seed=n),
        )
        for n, length in enumerate(lengths)
    ]


async def read(engine: Engine, request: Request) -> tuple[tuple[int, ...], SpeculationStats]:
    with engine.submit(request) as stream:
        tokens = tuple([token async for chunk in stream for token in chunk.token_ids])
        return tokens, stream.speculation


async def test_two_hundred_mixed_requests_equal_their_solo_runs_and_acceptance_holds(executor):
    engine = Engine(executor, single_program=True)
    await engine.start()
    plain = requests()
    solo = [(await read(engine, request))[0] for request in plain]

    pair = await asyncio.gather(*(read(engine, request) for request in plain[:2]))
    assert [tokens for tokens, _ in pair] == solo[:2]
    off = [
        dataclasses.replace(r, max_draft_tokens=0 if i % 2 else None) for i, r in enumerate(plain)
    ]
    eight = await asyncio.gather(*(read(engine, request) for request in off[2:10]))
    assert [tokens for tokens, _ in eight] == solo[2:10]
    assert [stats.drafted > 0 for _, stats in eight] == [i % 2 == 0 for i in range(2, 10)]

    in_flight = asyncio.Semaphore(16)
    results: list[tuple[int, SpeculationStats]] = []

    async def one(n: int) -> None:
        kind = n * 7 % 20  # every 20 in a row are all twenty kinds, in a mixed order
        async with in_flight:
            named = dataclasses.replace(plain[kind], request_id=f"run {n}")
            if n % 5 == 0:
                named = dataclasses.replace(named, max_draft_tokens=n % 3)
            tokens, stats = await read(engine, named)
        assert tokens == solo[kind], n
        results.append((n, stats))

    await asyncio.gather(*map(one, range(200)))

    def acceptance(of: list[tuple[int, SpeculationStats]]) -> float:
        return sum(s.accepted for _, s in of) / sum(s.drafted for _, s in of)

    first, last = acceptance(results[:50]), acceptance(results[-50:])
    assert first > 0.3
    assert abs(first - last) < 0.05
    engine.check_integrity()
    assert engine.load().pages_used == 0
    await engine.stop(0)
