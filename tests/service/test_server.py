"""Around the services: health, reflection, message sizes, draining, the process itself."""

import asyncio
import signal
import subprocess
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from fakes import FakeExecutor
from live_server import (
    LIMITS,
    failure_of,
    health_stub,
    live_server,
    message,
    rest_of,
    server_command,
)
from service.pb import inference_pb2, inference_pb2_grpc
from service.reflection import REFLECTION_SERVICES

OURS = [f"tandem.v1.{name}Service" for name in ("Inference", "Model", "Tokenizer")]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(live) -> list[int]:
    stub = health_stub(live.channel)
    requests = [health_pb2.HealthCheckRequest(service=name) for name in ("", *OURS)]
    return [(await stub.Check(request)).status for request in requests]


async def test_health_before_and_after_warm_up(checkpoint):
    async with live_server(checkpoint, warm=False) as live:
        assert await health_of(live) == [NOT_SERVING, NOT_SERVING, NOT_SERVING, SERVING]
        await live.server.serve(live.executor)
        assert await health_of(live) == [SERVING] * 4


async def test_health_of_an_unknown_service(checkpoint):
    async with live_server(checkpoint) as live:
        stub = health_stub(live.channel)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.Check(health_pb2.HealthCheckRequest(service="tandem.v1.Nothing"))
        assert failure.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_turns_red_when_the_engine_is_lost(checkpoint):
    executor = FakeExecutor(LIMITS, fail_on=("decode", 2))
    async with live_server(checkpoint, executor=executor) as live:
        await failure_of(live.inference.Complete(message()))
        await asyncio.wait_for(live.server.engine_lost(), 5)
        assert (await health_of(live))[:2] == [NOT_SERVING, NOT_SERVING]


async def test_draining_lets_streams_finish_and_ends_watches(checkpoint):
    executor = FakeExecutor(LIMITS, decode_delay_s=0.01)
    async with live_server(checkpoint, executor=executor) as live:
        watch = health_stub(live.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        call = live.inference.Generate(message(stopping={"ignoreEos": True}))
        await call.read()
        drain = asyncio.create_task(live.server.drain(20))
        assert (await watch.read()).status == NOT_SERVING
        *_, last = await rest_of(call)
        assert last.finished.reason == inference_pb2.FINISH_REASON_CONTEXT_LENGTH
        await asyncio.wait_for(drain, 5)
        failure = await failure_of(live.inference.Generate(message()))
        assert failure.code is grpc.StatusCode.UNAVAILABLE


async def test_draining_cancels_what_outlives_the_grace(checkpoint):
    executor = FakeExecutor(LIMITS, decode_delay_s=0.05)
    async with live_server(checkpoint, executor=executor) as live:
        call = live.inference.Generate(message(stopping={"ignoreEos": True}))
        await call.read()
        await asyncio.wait_for(live.server.drain(0.1), 5)
        assert (await failure_of(call)).code is grpc.StatusCode.UNAVAILABLE


async def test_a_port_is_not_shared(checkpoint):
    async with live_server(checkpoint) as live:
        other = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        with pytest.raises(RuntimeError):
            other.add_insecure_port(live.target)


async def test_messages_beyond_the_limit_are_refused(checkpoint):
    async with live_server(checkpoint) as live:
        large = message("x" * (64 << 20))
        failure = await failure_of(live.inference.Complete(large))
        assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(64 << 20) in failure.text


async def ask(live, version: str, **question) -> reflection_pb2.ServerReflectionResponse:
    call = live.channel.stream_stream(
        f"/{version}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )(iter([reflection_pb2.ServerReflectionRequest(**question)]))
    return await call.read()


@pytest.mark.parametrize("version", REFLECTION_SERVICES)
async def test_reflection_lists_every_service(checkpoint, version):
    async with live_server(checkpoint, warm=False) as live:
        response = await ask(live, version, list_services="")
        names = [service.name for service in response.list_services_response.service]
        assert names == ["grpc.health.v1.Health", *REFLECTION_SERVICES, *OURS]


@pytest.mark.parametrize("version", REFLECTION_SERVICES)
@pytest.mark.parametrize(
    "symbol",
    [
        "tandem.v1.InferenceService",
        "tandem.v1.InferenceService.Generate",
        "tandem.v1.GenerateRequest.text",
        "tandem.v1.FINISH_REASON_STOP",
    ],
)
async def test_reflection_shows_comments(checkpoint, version, symbol):
    async with live_server(checkpoint, warm=False) as live:
        response = await ask(live, version, file_containing_symbol=symbol)
        parse = descriptor_pb2.FileDescriptorProto.FromString
        files = [parse(raw) for raw in response.file_descriptor_response.file_descriptor_proto]
        names = [file.name for file in files]
        assert names == ["tandem/v1/inference.proto", "google/protobuf/duration.proto"]
        comments = [place.leading_comments for place in files[0].source_code_info.location]
        assert any("Divisor of the logits, in [0, 2]." in comment for comment in comments)


@pytest.mark.parametrize("version", REFLECTION_SERVICES)
async def test_reflection_says_what_it_does_not_know(checkpoint, version):
    async with live_server(checkpoint, warm=False) as live:
        response = await ask(live, version, file_containing_symbol="tandem.v1.Nothing")
        assert response.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
        known = await ask(live, version, file_by_filename="grpc_health/v1/health.proto")
        assert known.file_descriptor_response.file_descriptor_proto
        extensions = await ask(
            live, version, all_extension_numbers_of_type="tandem.v1.GenerateRequest"
        )
        base = extensions.all_extension_numbers_response.base_type_name
        assert base == "tandem.v1.GenerateRequest"


async def test_reflection_through_its_own_client(checkpoint):
    async with live_server(checkpoint, warm=False) as live:

        def read() -> list[str]:
            with grpc.insecure_channel(live.target) as channel:
                database = ProtoReflectionDescriptorDatabase(channel)
                file = database.FindFileContainingSymbol("grpc.reflection.v1.ServerReflection")
                return [*database.get_services(), file.package]

        assert (await asyncio.to_thread(read))[-1] == "grpc.reflection.v1"


def start(checkpoint: Path, load: str = "pass", *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*server_command(checkpoint, load), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def target_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    prefix, target = process.stdout.readline().rstrip().rsplit(" ", 1)
    assert prefix == "tandem listening on"
    return target


def test_sigterm_drains_and_exits_with_0(checkpoint):
    with start(checkpoint) as process, grpc.insecure_channel(target_of(process)) as channel:
        assert process.stdout is not None
        assert process.stdout.readline() == "tandem ready\n"
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(message(stopping={"ignoreEos": True}))
        next(call)
        process.send_signal(signal.SIGTERM)
        *_, last = call
        assert last.finished.reason == inference_pb2.FINISH_REASON_CONTEXT_LENGTH
        assert process.wait(10) == 0


def test_sigterm_during_warm_up_exits_at_once(checkpoint):
    with start(checkpoint, "time.sleep(60)") as process:
        target_of(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0


def test_a_model_that_cannot_be_loaded_exits_with_1(checkpoint):
    with start(checkpoint, "raise ValueError('no weights')") as process:
        target_of(process)
        _, errors = process.communicate(timeout=10)
        assert process.returncode == 1
        assert "no weights" in errors


def test_a_port_in_use_is_an_error(checkpoint):
    with start(checkpoint) as first:
        port = target_of(first).rsplit(":", 1)[1]
        with start(checkpoint, "pass", "--port", port) as second:
            assert second.wait(10) not in (0, None)
        first.terminate()
