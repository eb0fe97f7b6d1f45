"""How full the server is: WatchLoad, and the ORCA reports in trailers."""

import asyncio
import base64
import dataclasses
import math
import re
import struct
import sys
import types
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2

from fakes import FakeExecutor
from live_server import LIMITS, failure_of, live_server, message, rest_of, settled, until
from service.engine.counters import EngineCounters
from service.engine.scheduler import Load
from service.pb import model_pb2
from service.telemetry.load import LoadMeter
from service.telemetry.orca import RATE_WINDOW_S, OrcaInterceptor, OrcaLoadReport, Rate

GRPCURL = Path(sys.executable).with_name("grpcurl")
LONG = {"maxTokens": 100, "ignoreEos": True}
HALF_FULL = Load(
    running=1, prefilling=1, waiting=4, waiting_tokens=30, slots=4, pages_used=16, pages=64
)


def every(seconds: float) -> model_pb2.WatchLoadRequest:
    interval = duration_pb2.Duration()
    interval.FromNanoseconds(round(seconds * 1e9))
    return model_pb2.WatchLoadRequest(interval=interval)


def engine_double(load: Load = HALF_FULL, wait: float | None = None) -> Any:
    return types.SimpleNamespace(
        load=lambda: load, counters=EngineCounters(2), estimated_wait=lambda: wait
    )


async def read_until(watch, condition) -> model_pb2.Load:
    async with asyncio.timeout(10):
        while not condition(load := (await watch.read()).load):
            pass
    return load


async def test_watch_load_follows_the_engine(checkpoint):
    executor = FakeExecutor(dataclasses.replace(LIMITS, slots=1), stepped=True)
    async with live_server(checkpoint, executor=executor) as live:
        watch = live.model.WatchLoad(every(0.1))
        at_rest = (await watch.read()).load
        no_wait = duration_pb2.Duration()
        assert at_rest == model_pb2.Load(slots=1, pages=128, estimated_wait_duration=no_wait)
        prompt = {"ids": list(range(5, 12))}
        calls = [live.inference.Generate(message(tokens=prompt)) for _ in range(3)]
        executor.allow(1)  # the prefill of the first
        busy = await read_until(watch, lambda load: (load.running, load.waiting) == (1, 2))
        assert (busy.prefilling, busy.waiting_tokens, busy.slots, busy.pages) == (0, 14, 1, 128)
        assert busy.pages_used > 0
        executor.allow(10_000)
        moving = await read_until(watch, lambda load: load.draft_acceptance)
        assert 0 < moving.draft_acceptance < 1
        assert moving.tokens_per_second > 0
        for call in calls:
            await rest_of(call)
        await settled(live)
        assert await read_until(watch, lambda load: not load.tokens_per_second) == at_rest
        watch.cancel()


async def test_a_stream_without_an_interval_begins_at_once(checkpoint):
    async with live_server(checkpoint) as live:
        watch = live.model.WatchLoad(model_pb2.WatchLoadRequest())
        async with asyncio.timeout(10):
            assert (await watch.read()).load.slots == 2
        watch.cancel()


@pytest.mark.parametrize("seconds", [0, 0.099, -1, 3600.001])
async def test_an_interval_out_of_range(checkpoint, seconds):
    async with live_server(checkpoint) as live:
        failure = await failure_of(live.model.WatchLoad(every(seconds)))
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.text == f"interval is {seconds:g} s, must be from 0.1 s to 3600 s"


async def test_load_of_a_model_that_is_being_loaded(checkpoint):
    async with live_server(checkpoint, warm=False) as live:
        failure = await failure_of(live.model.WatchLoad(every(1)))
        assert failure.code is grpc.StatusCode.UNAVAILABLE
        assert failure.details["ErrorInfo"].reason == "WARMING_UP"


async def test_watch_load_ends_when_the_server_drains(checkpoint):
    async with live_server(checkpoint) as live:
        watch = live.model.WatchLoad(every(3600))
        await watch.read()
        failing = asyncio.create_task(failure_of(watch))
        async with asyncio.timeout(20):  # far below the interval and the grace
            await live.server.drain(3600)
            failure = await failing
        assert failure.code is grpc.StatusCode.UNAVAILABLE
        assert failure.details["ErrorInfo"].reason == "DRAINING"
        assert failure.details["RetryInfo"]


def test_rates_are_those_since_the_message_before():
    engine, now = engine_double(wait=2.5), [100.0]
    meter = LoadMeter(lambda: now[0])
    engine.counters.generated_tokens, engine.counters.drafted = 1000, 500
    first = meter.read(engine)
    assert (first.running, first.prefilling, first.waiting, first.waiting_tokens) == (1, 1, 4, 30)
    assert (first.slots, first.pages_used, first.pages) == (4, 16, 64)
    assert first.estimated_wait_duration.ToMilliseconds() == 2500
    assert first.tokens_per_second == first.draft_acceptance == 0
    now[0] += 0.5
    engine.counters.generated_tokens += 30
    engine.counters.drafted += 40
    engine.counters.accepted += 10
    second = meter.read(engine)
    assert (second.tokens_per_second, second.draft_acceptance) == (60, 0.25)
    now[0] += 1
    engine.estimated_wait = lambda: None
    third = meter.read(engine)
    assert not third.HasField("estimated_wait_duration")
    assert third.draft_acceptance == 0


async def trailers_of(live, method: str, request: str) -> dict[str, str]:
    """The trailers on the wire: gRPC in Python keeps those with load reports to itself."""
    process = await asyncio.create_subprocess_exec(
        *(GRPCURL, "-v", "-plaintext", "-d", request, live.target, f"tandem.v1.{method}"),
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await process.communicate()
    trailers = printed.decode().partition("Response trailers received:\n")[2]
    return dict(re.findall(r"^([\w-]+): (\S+)$", trailers, re.MULTILINE))


def report_in(trailers: dict[str, str]):
    return OrcaLoadReport.FromString(base64.b64decode(trailers["endpoint-load-metrics-bin"] + "=="))


@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_calls_that_generate_report_the_load(checkpoint, method):
    executor = FakeExecutor(dataclasses.replace(LIMITS, slots=3), stepped=True)
    async with live_server(checkpoint, executor=executor) as live:
        others = [live.inference.Generate(message(stopping=LONG)) for _ in range(2)]
        await until(lambda: live.engine.load().running + live.engine.load().waiting == 2)
        executor.allow(3)
        await until(lambda: live.engine.load().running == 2)
        refused = report_in(await trailers_of(live, f"InferenceService/{method}", "{}"))
        assert refused.named_metrics["num_requests_running"] == 2
        assert refused.named_metrics["num_requests_waiting"] == 0
        assert 0 < refused.named_metrics["kv_cache_usage_perc"] < 1
        assert refused.application_utilization == pytest.approx(2 / 3)
        assert 0 < refused.rps_fractional <= 1 / RATE_WINDOW_S
        executor.allow(10_000)
        served = report_in(await trailers_of(live, f"InferenceService/{method}", '{"text": "fox"}'))
        assert served.rps_fractional > 1 / RATE_WINDOW_S
        for call in others:
            await rest_of(call)


async def test_other_calls_do_not_report(checkpoint):
    async with live_server(checkpoint) as live:
        trailers = await trailers_of(live, "TokenizerService/Tokenize", '{"text": "fox"}')
        assert "endpoint-load-metrics-bin" not in trailers


async def test_only_failures_of_the_server_count_as_errors(checkpoint):
    async with live_server(checkpoint, warm=False) as live:
        complete = "InferenceService/Complete"
        unavailable = report_in(await trailers_of(live, complete, '{"text": "fox"}'))
        assert 0 < unavailable.eps <= 1 / RATE_WINDOW_S
        assert not unavailable.named_metrics
        await live.server.serve(live.executor)
        invalid = report_in(await trailers_of(live, complete, "{}"))
        assert 0 < invalid.eps < unavailable.eps
        assert invalid.rps_fractional > unavailable.rps_fractional


def test_a_report_on_the_wire():
    """By the field numbers of xds.data.orca.v3.OrcaLoadReport."""
    report = OrcaInterceptor(engine_double, clock=lambda: 0.0).report()
    assert b"\x49" + struct.pack("<d", 1.5) in report  # 9, application_utilization: 6 of 4 slots
    for name, value in (
        (b"kv_cache_usage_perc", 0.25),
        (b"num_requests_running", 2.0),
        (b"num_requests_waiting", 4.0),
    ):
        entry = b"\x0a" + bytes([len(name)]) + name + b"\x11" + struct.pack("<d", value)
        assert b"\x42" + bytes([len(entry)]) + entry in report  # 8, named_metrics
    rates = {"rps_fractional": 0x31, "eps": 0x39}  # 6 and 7
    for field, tag in rates.items():
        one = OrcaLoadReport(**{field: 1.5}).SerializeToString()
        assert one == bytes([tag]) + struct.pack("<d", 1.5)


def test_a_rate_settles_and_fades():
    now = [0.0]
    rate = Rate(lambda: now[0])
    for _ in range(1000):  # 10 per second for 10 windows
        now[0] += 0.1
        rate.count()
    assert rate.now() == pytest.approx(10, rel=0.01)
    now[0] += RATE_WINDOW_S
    assert rate.now() == pytest.approx(10 / math.e, rel=0.01)
