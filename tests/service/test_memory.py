"""Case 62: memory is flat over thousands of requests, and nothing is kept of those that ended."""

import asyncio
import collections
import dataclasses
import gc
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import grpc
import pytest

from fakes import FakeExecutor
from live_server import LIMITS, live_server, message, rest_of, settled, until
from service.engine.slots import Occupant
from service.engine.stream import ChoiceStreams, TokenStream
from service.engine.types import Request
from service.pb import inference_pb2
from service.reply import ChoiceReply, Reply
from service.reply_stream import ReplyStream
from service.resume import KeptReply
from service.validation import AcceptedRequest

PER_REQUEST = (
    *(AcceptedRequest, ChoiceReply, ChoiceStreams, KeptReply, Occupant),
    *(Reply, ReplyStream, Request, TokenStream),
)
WARM, ALL = 500, 2000
STREAMS = 16
SHORT = {"maxTokens": 6, "ignoreEos": True}
SMALLEST_SERVER_BYTES = 250e6
"""Of a process with a model; without one, 2% is less than allocators vary by."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(frozen=True)
class Reading:
    """What the process holds when the server is at rest."""

    resident: int
    traced: int
    """Bytes that Python has allocated since the beginning of the test."""
    of_requests: dict[str, int]
    """Objects by the name of their type."""


def read() -> Reading:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    kept = collections.Counter(
        type(each).__name__ for each in gc.get_objects() if issubclass(type(each), PER_REQUEST)
    )
    return Reading(pages * PAGE_BYTES, tracemalloc.get_traced_memory()[0], dict(kept))


async def ask(live, number: int) -> None:
    """One request; of ten, one is cancelled, one broken and dropped, one bad, one has two choices."""
    prompt = "fox jumps over the lazy dog " * (1 + number % 3)
    match number % 10:
        case 0:
            call = live.inference.Generate(message(prompt, stopping=SHORT))
            await asyncio.sleep(number % 7 / 1000)
            call.cancel()
        case 1:
            name = f"kept-{number}"
            call = live.inference.Generate(
                message(prompt, stopping=SHORT, resumeWindow="30s", requestId=name)
            )
            await call.read()
            call.cancel()
            cancel = inference_pb2.CancelRequest(request_id=name)
            await until_found(live, cancel)
        case 2:
            with pytest.raises(grpc.aio.AioRpcError):
                await live.inference.Complete(message(prompt, choices=0))
        case 3:
            await live.inference.Complete(message(prompt, stopping=SHORT, choices=2))
        case 4:
            include = {"tokenIds": True, "logprobs": True, "receipt": True}
            await rest_of(live.inference.Generate(message(prompt, stopping=SHORT, include=include)))
        case _:
            await rest_of(live.inference.Generate(message(prompt, stopping=SHORT)))


async def until_found(live, cancel: inference_pb2.CancelRequest) -> None:
    """Drops a kept reply: before its call has ended, Cancel only ends the request."""
    while True:
        if not (await live.inference.Cancel(cancel)).found:
            return
        await asyncio.sleep(0.001)


async def ask_all(live, numbers: range) -> None:
    left = iter(numbers)

    async def one_stream() -> None:
        for number in left:
            await ask(live, number)

    await asyncio.gather(*(one_stream() for _ in range(STREAMS)))
    await settled(live)


ALONE = "MEMORY_TEST_ALONE"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_is_flat_over_2000_requests():
    """In a process of its own: what other tests have left behind must not be measured."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    run = subprocess.run(
        [*command, "-k", "measured_alone"],
        env={**environment, ALONE: "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert "1 passed" in run.stdout


@pytest.mark.skipif(ALONE not in os.environ, reason="run by the test above")
async def test_measured_alone(checkpoint):
    executor = FakeExecutor(dataclasses.replace(LIMITS, slots=8, pages=1 + 8 * 64))
    # Its diary, which other tests read, would be all that grows here.
    nothing: Any = collections.deque(maxlen=0)
    executor.log = executor.inserted = executor.draft_lengths = nothing
    executor.allowed = executor.held = nothing
    async with live_server(checkpoint, executor=executor) as live:
        tracemalloc.start()
        try:
            await ask_all(live, range(WARM))
            warm = read()
            await ask_all(live, range(WARM, ALL))
            await until(lambda: not read().of_requests)
            end = read()
        finally:
            tracemalloc.stop()
        assert end.resident - warm.resident < 0.02 * max(warm.resident, SMALLEST_SERVER_BYTES)
        assert end.traced - warm.traced < 100 * (ALL - WARM)  # bytes per request
        assert live.engine.counters.aborted > ALL / 20
