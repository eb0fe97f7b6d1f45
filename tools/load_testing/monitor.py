"""What the server says of itself while it is under load: slots, pages, queue, memory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import urllib.request
from collections.abc import AsyncIterator

import grpc
from google.protobuf import duration_pb2
from prometheus_client.parser import text_string_to_metric_families

from service.pb import model_pb2, model_pb2_grpc

LOAD_INTERVAL_S = 0.5
MEMORY_INTERVAL_S = 1.0
SETTLE_S = 2.0
"""Within this after the last call, everything must be free."""
MEMORY = "process_resident_memory_bytes"
MUST_BE_ZERO = ("tandem_requests_failed_total", "tandem_engine_restarts_total")


@dataclasses.dataclass
class Series:
    """Readings over time; every list of a kind is as long as that of its times."""

    load_at: list[float] = dataclasses.field(default_factory=list)
    """When loads were read, in seconds of `time.monotonic`."""
    loads: list[model_pb2.Load] = dataclasses.field(default_factory=list)
    memory_at: list[float] = dataclasses.field(default_factory=list)
    memory_bytes: list[float] = dataclasses.field(default_factory=list)
    """Resident memory of the server's process."""


def scrape(url: str) -> dict[str, float]:
    """Reads /metrics; samples that differ by labels only are added up."""
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


@contextlib.asynccontextmanager
async def watched(
    channel: grpc.aio.Channel, metrics_url: str | None, series: Series
) -> AsyncIterator[None]:
    """Reads load and memory into `series` for the length of a block.

    Raises:
      Exception: reading has failed; at the end of the block.
    """
    tasks = [asyncio.create_task(_read_loads(channel, series))]
    if metrics_url is not None:
        tasks.append(asyncio.create_task(_read_memory(metrics_url, series)))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


def watch_load(channel: grpc.aio.Channel, interval_s: float):
    """Returns the call that streams the load."""
    interval = duration_pb2.Duration()
    interval.FromMilliseconds(round(interval_s * 1000))
    stub = model_pb2_grpc.ModelServiceStub(channel)
    return stub.WatchLoad(model_pb2.WatchLoadRequest(interval=interval))


async def _read_loads(channel: grpc.aio.Channel, series: Series) -> None:
    async for message in watch_load(channel, LOAD_INTERVAL_S):
        series.load_at.append(time.monotonic())
        series.loads.append(message.load)


async def _read_memory(url: str, series: Series) -> None:
    while True:
        figures = await asyncio.to_thread(scrape, url)
        series.memory_at.append(time.monotonic())
        series.memory_bytes.append(figures[MEMORY])
        await asyncio.sleep(MEMORY_INTERVAL_S)


async def settle(channel: grpc.aio.Channel) -> tuple[float, str]:
    """Waits until nothing is held.

    Returns:
      Seconds that it took, and what is still held after `SETTLE_S`; empty when nothing is.
    """
    begun_at = time.monotonic()
    watch = watch_load(channel, 0.1)
    try:
        async for message in watch:
            load, waited = message.load, time.monotonic() - begun_at
            held = {
                name: getattr(load, name)
                for name in ("running", "prefilling", "waiting", "waiting_tokens", "pages_used")
            }
            if not any(held.values()):
                return waited, ""
            if waited > SETTLE_S:
                left = ", ".join(f"{name} {value}" for name, value in held.items() if value)
                return waited, f"{left}, {waited:.1f} s after the last call had ended"
    finally:
        watch.cancel()
    raise RuntimeError("WatchLoad ended by itself")
