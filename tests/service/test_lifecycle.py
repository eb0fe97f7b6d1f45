"""The life of a server: start, failure, stall, drain and exit, as clients and the shell see it."""

import asyncio
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from fakes import FakeExecutor
from live_server import (
    LIMITS,
    Failure,
    failure_of,
    health_stub,
    live_server,
    message,
    rest_of,
    server_command,
)
from service.engine import engine as engine_module
from service.pb import inference_pb2, inference_pb2_grpc, model_pb2, tokenizer_pb2
from service.startup import StartupLog

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
ENDLESS = {"ignoreEos": True}
INFERENCE = "tandem.v1.InferenceService"


def watch(live, service: str = INFERENCE):
    return health_stub(live.channel).Watch(health_pb2.HealthCheckRequest(service=service))


async def next_status(watching) -> int:
    return (await asyncio.wait_for(watching.read(), 20)).status


def assert_retryable(failure: Failure, reason: str) -> None:
    assert failure.code is UNAVAILABLE
    assert failure.details["ErrorInfo"].reason == reason
    assert failure.details["RetryInfo"].retry_delay.ToTimedelta().total_seconds() > 0
    assert int(failure.trailers["grpc-retry-pushback-ms"]) > 0


async def token_ids_until_failure(call) -> tuple[list[int], Failure]:
    """Reads a stream that must fail, keeping what came before."""
    token_ids: list[int] = []
    with pytest.raises(grpc.aio.AioRpcError):
        while event := await call.read():
            token_ids += event.delta.token_ids
    return token_ids, await failure_of(call)


# Failure and stall


class GatedReset(FakeExecutor):
    """Its reset waits to be let through."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.resetting = threading.Event()

    def reset(self) -> None:
        assert self.resetting.wait(20), "the test never allowed the reset"
        super().reset()


async def test_a_failure_ends_streams_keeps_what_came_and_is_over_soon(checkpoint):
    executor = GatedReset(LIMITS, fail_on=("decode", 6), stepped=True)
    async with live_server(checkpoint, executor=executor) as live:
        watching = watch(live)
        assert await next_status(watching) == SERVING
        cap = model_pb2.UpdateSpeculationRequest(max_draft_tokens=1)
        await live.model.UpdateSpeculation(cap)
        request = message(stopping=ENDLESS, requestId="a", include={"tokenIds": True})
        calls = [live.inference.Generate(request)]
        executor.allow(2)
        await calls[0].read()
        delivered = list((await calls[0].read()).delta.token_ids)
        calls += [live.inference.Generate(message(stopping=ENDLESS)) for _ in range(3)]
        # Whether one of them got the other slot depends on the moment.
        async with asyncio.timeout(20):
            while (load := live.engine.load()).waiting + load.prefilling + load.running < 4:
                await asyncio.sleep(0.001)
        executor.allow(10_000)
        for call in calls:
            token_ids, failure = await token_ids_until_failure(call)
            assert failure.code is grpc.StatusCode.INTERNAL
            assert failure.details["RequestInfo"].request_id
            delivered += token_ids if call is calls[0] else []
        assert await next_status(watching) == NOT_SERVING
        while_down = await failure_of(live.inference.Generate(message()))
        assert_retryable(while_down, "ENGINE_UNAVAILABLE")
        executor.resetting.set()
        assert await next_status(watching) == SERVING
        whole = (await live.inference.Complete(request)).choices[0].delta.token_ids
        assert 0 < len(delivered) < len(whole)
        assert delivered == whole[: len(delivered)]
        model = (await live.model.GetModel(model_pb2.GetModelRequest())).model
        assert model.defaults.max_draft_tokens == 1
        assert live.engine.counters.restarts == 1


async def test_a_lost_engine_leaves_health_red(checkpoint):
    executor = FakeExecutor(LIMITS, fail_on=("decode", 2))
    async with live_server(checkpoint, executor=executor, engine_restarts=0) as live:
        await failure_of(live.inference.Complete(message()))
        await asyncio.wait_for(live.server.engine_lost(), 20)
        for service in ("", INFERENCE):
            request = health_pb2.HealthCheckRequest(service=service)
            assert (await health_stub(live.channel).Check(request)).status == NOT_SERVING
        assert_retryable(await failure_of(live.inference.Complete(message())), "ENGINE_UNAVAILABLE")


async def test_health_is_red_while_the_engine_is_stuck(checkpoint):
    """Case 60: what was asked for before comes all the same once it gets on."""
    executor = FakeExecutor(LIMITS, stepped=True)
    async with live_server(checkpoint, executor=executor, stall_seconds=0.2) as live:
        watching = [watch(live, service) for service in ("", INFERENCE)]
        assert [await next_status(each) for each in watching] == [SERVING, SERVING]
        call = live.inference.Generate(message(stopping=ENDLESS))
        assert [await next_status(each) for each in watching] == [NOT_SERVING, NOT_SERVING]
        executor.allow(10_000)
        assert [await next_status(each) for each in watching] == [SERVING, SERVING]
        *_, last = await rest_of(call)
        assert last.finished.reason == inference_pb2.FINISH_REASON_CONTEXT_LENGTH


async def test_health_is_quick_and_green_under_load(checkpoint):
    """Case 60: 32 streams, and texts that take long to tokenise."""
    executor = FakeExecutor(LIMITS, decode_delay_s=0.002)
    async with live_server(checkpoint, executor=executor) as live:
        calls = [
            asyncio.create_task(rest_of(live.inference.Generate(message(stopping=ENDLESS))))
            for _ in range(32)
        ]
        long_text = tokenizer_pb2.TokenizeRequest(text="quick brown fox " * 20_000)
        calls += [asyncio.ensure_future(live.tokenizer.Tokenize(long_text)) for _ in range(4)]
        checks = 0
        while not all(call.done() for call in calls):
            request = health_pb2.HealthCheckRequest(service=INFERENCE)
            # Loose: the machine may be busy with other things. A blocked loop takes longer.
            check = await health_stub(live.channel).Check(request, timeout=2)
            assert check.status == SERVING
            checks += 1
            await asyncio.sleep(0.01)
        assert checks > 3
        await asyncio.gather(*calls)


# Drain


async def test_draining_lets_streams_finish_and_refuses_new_calls(checkpoint):
    executor = FakeExecutor(LIMITS, stepped=True)
    async with live_server(checkpoint, executor=executor) as live:
        watching = watch(live, "")
        assert await next_status(watching) == SERVING
        load = live.model.WatchLoad(model_pb2.WatchLoadRequest())
        await load.read()
        call = live.inference.Generate(message(stopping=ENDLESS))
        other = live.inference.Generate(message(stopping=ENDLESS, requestId="other"))
        executor.allow(4)
        await asyncio.gather(call.read(), other.read())
        drain = asyncio.create_task(live.server.drain(60))
        assert await next_status(watching) == NOT_SERVING
        assert (await failure_of(watching)).code is UNAVAILABLE
        assert_retryable(await failure_of(load), "DRAINING")
        for refused in (
            live.inference.Generate(message()),
            live.inference.Complete(message()),
            live.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text="fox")),
            live.model.GetModel(model_pb2.GetModelRequest()),
        ):
            assert_retryable(await failure_of(refused), "DRAINING")
        check = await health_stub(live.channel).Check(health_pb2.HealthCheckRequest())
        assert check.status == NOT_SERVING
        cancel = inference_pb2.CancelRequest(request_id="other")
        assert (await live.inference.Cancel(cancel)).found
        assert not drain.done()
        executor.allow(10_000)
        *_, last = await rest_of(call)
        assert last.finished.reason == inference_pb2.FINISH_REASON_CONTEXT_LENGTH
        *_, last = await rest_of(other)
        assert last.finished.reason == inference_pb2.FINISH_REASON_CANCELLED
        await asyncio.wait_for(drain, 20)
        assert (await failure_of(live.inference.Generate(message()))).code is UNAVAILABLE


async def test_what_outlives_the_grace_ends_with_unavailable(checkpoint):
    executor = FakeExecutor(LIMITS, decode_delay_s=0.05)
    async with live_server(checkpoint, executor=executor) as live:
        calls = [live.inference.Generate(message(stopping=ENDLESS)) for _ in range(4)]
        reads = [asyncio.create_task(call.read()) for call in calls]
        await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait_for(live.server.drain(0.2), 20)
        await asyncio.gather(*reads, return_exceptions=True)
        for call in calls:  # two run, two wait
            assert_retryable(await failure_of(call), "ENGINE_UNAVAILABLE")


async def test_the_grace_can_be_cut_short(checkpoint):
    executor = FakeExecutor(LIMITS, decode_delay_s=0.05)
    async with live_server(checkpoint, executor=executor) as live:
        call = live.inference.Generate(message(stopping=ENDLESS))
        await call.read()
        drain = asyncio.create_task(live.server.drain(600))
        await asyncio.wait_for(live.server.drain(0), 20)
        await asyncio.wait_for(drain, 20)
        assert_retryable(await failure_of(call), "ENGINE_UNAVAILABLE")


async def test_draining_while_the_engine_is_made_anew(checkpoint):
    executor = GatedReset(LIMITS, fail_on=("decode", 1))
    async with live_server(checkpoint, executor=executor) as live:
        watching = watch(live)
        assert await next_status(watching) == SERVING
        await failure_of(live.inference.Complete(message()))
        assert await next_status(watching) == NOT_SERVING
        await asyncio.wait_for(live.server.drain(600), 20)
        executor.resetting.set()


async def test_a_stuck_device_does_not_keep_the_server(checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(engine_module, "JOIN_TIMEOUT_S", 0.2)
    executor = FakeExecutor(LIMITS, stepped=True)
    async with live_server(checkpoint, executor=executor) as live:
        call = live.inference.Generate(message(stopping=ENDLESS))
        executor.allow(2)
        await call.read()
        await asyncio.wait_for(live.server.drain(0.1), 20)
        assert_retryable(await failure_of(call), "ENGINE_UNAVAILABLE")
        assert "the device is left as it is" in caplog.text
        executor.allow(10_000)


# The process


class Process:
    """A server in a process of its own; `load` is run while it loads."""

    def __init__(self, checkpoint: Path, load: str = "pass", arguments: Sequence[str] = ()) -> None:
        self.popen = subprocess.Popen(
            [*server_command(checkpoint, load), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        prefix, self.target = self.line().rsplit(" ", 1)
        assert prefix == "tandem listening on"
        self.channel = grpc.insecure_channel(self.target)

    def line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().rstrip()

    def ready(self) -> "Process":
        assert self.line() == "tandem ready"
        return self

    def generate(self):
        """A stream that has begun."""
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        call = stub.Generate(message(stopping=ENDLESS))
        next(call)
        return call

    def exit_code(self, timeout_s: float = 20) -> int:
        return self.popen.wait(timeout_s)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.popen.kill()
        self.popen.communicate()


SLOW = "return FakeExecutor(LIMITS, decode_delay_s=0.5)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_streams_finish_and_the_process_exits_with_0(checkpoint, number):
    with Process(checkpoint) as process:
        call = process.ready().generate()
        process.popen.send_signal(number)
        *_, last = call
        assert last.finished.reason == inference_pb2.FINISH_REASON_CONTEXT_LENGTH
        assert process.exit_code() == 0


def test_a_second_signal_does_not_wait(checkpoint):
    with Process(checkpoint, SLOW) as process:
        call = process.ready().generate()
        process.popen.send_signal(signal.SIGTERM)
        process.popen.send_signal(signal.SIGINT)
        with pytest.raises(grpc.RpcError) as failure:
            list(call)
        assert failure.value.code() is UNAVAILABLE  # type: ignore[attr-defined]
        assert process.exit_code() == 0


def test_the_grace_is_a_setting(checkpoint):
    with Process(checkpoint, SLOW, ["--grace-seconds", "0.2"]) as process:
        call = process.ready().generate()
        process.popen.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as failure:
            list(call)
        assert failure.value.code() is UNAVAILABLE  # type: ignore[attr-defined]
        assert process.exit_code() == 0


def test_a_signal_during_the_load_ends_at_once(checkpoint):
    with Process(checkpoint, "time.sleep(600)") as process:
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0


def test_a_model_that_cannot_be_loaded_exits_with_1(checkpoint):
    with Process(checkpoint, "raise ValueError('no weights')") as process:
        _, errors = process.popen.communicate(timeout=20)
        assert process.popen.returncode == 1
        assert "no weights" in errors


def test_a_lost_engine_exits_with_1(checkpoint):
    load = "return FakeExecutor(LIMITS, fail_on=('decode', 2))"
    with Process(checkpoint, load, ["--engine-restarts", "0"]) as process:
        stub = inference_pb2_grpc.InferenceServiceStub(process.ready().channel)
        with pytest.raises(grpc.RpcError) as failure:
            stub.Complete(message())
        assert failure.value.code() is grpc.StatusCode.INTERNAL  # type: ignore[attr-defined]
        _, errors = process.popen.communicate(timeout=20)
        assert process.popen.returncode == 1
        assert "the engine is lost" in errors


def test_a_port_in_use_is_an_error(checkpoint):
    with Process(checkpoint) as process:
        port = process.target.rsplit(":", 1)[1]
        second = subprocess.run(
            [*server_command(checkpoint), "--port", port], capture_output=True, timeout=60
        )
        assert second.returncode not in (0, None)


# The start


def test_the_log_of_a_start(caplog):
    caplog.set_level("INFO", logger="service.startup")
    now = 100.0
    log = StartupLog(lambda: now)
    now += 0.5
    log.stage("listening")
    for number, cached in enumerate((False, True), 1):
        now += number
        log.program(f"p{number}", number, 2, cached=cached)
    now += 0.25
    log.ready()
    assert caplog.messages == [
        "start-up: listening (0.5 s)",
        "start-up: program 1 of 2, p1: compiled (1.0 s)",
        "start-up: program 2 of 2, p2: from the compilation cache (2.0 s)",
        "start-up: ready after 3.8 s; 2 programs took 3.0 s, 1 of them were compiled and 1 came from"
        " the compilation cache",
    ]


def test_the_log_of_a_long_read(caplog):
    caplog.set_level("INFO", logger="service.startup")
    now = 0.0
    log = StartupLog(lambda: now)
    log.stage("planned")
    for second in range(0, 13):
        now = float(second)
        log.progress(100_000_000 * second, 1_200_000_000)
    log.stage("read", 1_200_000_000)
    assert caplog.messages[1:] == [
        "start-up: 500.0 MB of 1200.0 MB read, 41 %, 100.0 MB/s",
        "start-up: 1000.0 MB of 1200.0 MB read, 83 %, 100.0 MB/s",
        "start-up: read (12.0 s, 100.0 MB/s)",
    ]
