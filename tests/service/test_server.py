"""Around the services: health, reflection, channelz, message sizes, connections."""

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from fakes import FakeExecutor
from live_server import LIMITS, failure_of, health_stub, live_server, message, rest_of
from service.pb import inference_pb2, model_pb2
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


async def test_the_limit_of_messages_is_a_setting(checkpoint):
    async with live_server(checkpoint, max_message_bytes=20_000) as live:
        model = (await live.model.GetModel(model_pb2.GetModelRequest())).model
        assert model.limits.max_message_bytes == 20_000
        assert await live.inference.Complete(message("x" * 100))
        failure = await failure_of(live.inference.Complete(message("x" * 20_000)))
        assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "20000" in failure.text


async def test_old_connections_are_replaced_and_their_streams_go_on(checkpoint):
    executor = FakeExecutor(LIMITS, stepped=True)
    async with live_server(checkpoint, executor=executor, max_connection_age_seconds=0.3) as live:
        call = live.inference.Generate(message(stopping={"ignoreEos": True}))
        executor.allow(2)
        await call.read()
        async with asyncio.timeout(20):  # until the server has told the client to connect anew
            while (state := live.channel.get_state()) is grpc.ChannelConnectivity.READY:
                await live.channel.wait_for_state_change(state)
        executor.allow(10_000)
        *_, last = await rest_of(call)
        assert last.finished.reason == inference_pb2.FINISH_REASON_CONTEXT_LENGTH
        assert await live.inference.Complete(message())


def channelz_stub(live) -> Any:
    return channelz_pb2_grpc.ChannelzStub(live.channel)


async def test_channelz_is_there_when_it_is_asked_for(checkpoint):
    name, path = "grpc.channelz.v1.Channelz", "grpc_channelz/v1/channelz.proto"
    async with live_server(checkpoint, channelz=True) as live:
        stub = channelz_stub(live)
        servers = await stub.GetServers(channelz_pb2.GetServersRequest())
        assert servers.server  # of the whole process
        response = await ask(live, REFLECTION_SERVICES[0], file_containing_symbol=name)
        parse = descriptor_pb2.FileDescriptorProto.FromString
        files = [parse(raw) for raw in response.file_descriptor_response.file_descriptor_proto]
        assert files[0].name == path
        listed = await ask(live, REFLECTION_SERVICES[0], list_services="")
        assert name in [service.name for service in listed.list_services_response.service]
    async with live_server(checkpoint) as live:
        stub = channelz_stub(live)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.GetServers(channelz_pb2.GetServersRequest())
        assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


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
        assert files[0].name == "tandem/v1/inference.proto"
        assert {file.name for file in files} >= set(files[0].dependency)
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
