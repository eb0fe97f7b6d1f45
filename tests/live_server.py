"""A real grpc.aio server on a free port, over the engine with a `FakeExecutor`."""

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_status import rpc_status

from fakes import FakeExecutor, small_limits
from service.config import ServerConfig
from service.pb import inference_pb2, inference_pb2_grpc, model_pb2_grpc, tokenizer_pb2_grpc
from service.process import read
from service.server import Server

LIMITS = small_limits(
    slots=2, vocab_size=400, max_context=256, pages=1 + 2 * 64, max_stop_ids=4, draft_length=2
)


@dataclasses.dataclass
class LiveServer:
    """What a test needs of it."""

    server: Server
    channel: grpc.aio.Channel
    target: str
    executor: FakeExecutor

    def __post_init__(self) -> None:
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(self.channel)
        self.model = model_pb2_grpc.ModelServiceStub(self.channel)

    @property
    def engine(self):
        assert self.server.engine is not None
        return self.server.engine


def message(text: str = "fox", **fields) -> inference_pb2.GenerateRequest:
    """A request in the words of its JSON form."""
    prompt = {} if "tokens" in fields else {"text": text}
    return json_format.ParseDict(prompt | fields, inference_pb2.GenerateRequest())


@contextlib.asynccontextmanager
async def live_server(
    checkpoint: Path,
    *,
    executor: FakeExecutor | None = None,
    replies: dict[str, Sequence[int]] | None = None,
    warm: bool = True,
    **config,
) -> AsyncIterator[LiveServer]:
    """Serves until the block ends, and then proves that nothing is left in the engine."""
    executor = executor or FakeExecutor(LIMITS, replies=replies)
    settings = ServerConfig(checkpoint=checkpoint, port=0, **config)
    server = Server(settings, *read(settings))
    target = f"127.0.0.1:{await server.listen()}"
    try:
        if warm:
            await server.serve(executor)
        async with grpc.aio.insecure_channel(target) as channel:
            yield LiveServer(server, channel, target, executor)
    finally:
        await server.drain(0)
    if server.engine is not None:
        server.engine.check_integrity()


SCRIPT = """
import asyncio, os, sys, time
sys.path[:0] = {paths}
from fakes import FakeExecutor
from live_server import LIMITS
from service.config import parse_config
from service.process import run

def load():
    {load}
    return FakeExecutor(LIMITS, decode_delay_s=0.01)

os._exit(asyncio.run(run(parse_config(), load)))
"""


def server_command(checkpoint: Path, load: str = "pass") -> list[str]:
    """The command line of a server of its own process; `load` is run while it warms up."""
    tests = Path(__file__).resolve().parent
    script = SCRIPT.format(load=load, paths=[str(tests), str(tests.parent)])
    return [sys.executable, "-c", script, "--checkpoint", str(checkpoint), "--port", "0"]


async def until(condition) -> None:
    """Waits until a condition holds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def settled(live: LiveServer) -> None:
    """Waits until the engine holds nothing, and proves that it does."""

    def idle() -> bool:
        load = live.engine.load()
        return load.running + load.prefilling + load.waiting == 0

    await until(idle)
    live.engine.check_integrity()


async def rest_of(call) -> list[inference_pb2.GenerateResponse]:
    """Reads a stream to its end."""
    rest: list[inference_pb2.GenerateResponse] = []
    while event := await call.read():  # EOF is false
        rest.append(event)
    return rest


def health_stub(channel: grpc.aio.Channel) -> Any:
    """Stub of the health service, which has no types."""
    return health_pb2_grpc.HealthStub(channel)


@dataclasses.dataclass
class Failure:
    """A failed call: code, sentence, details by type, trailers."""

    code: grpc.StatusCode
    text: str
    details: dict[str, Any]
    trailers: dict[str, Any]


DETAILS = ("ErrorInfo", "BadRequest", "RetryInfo", "QuotaFailure", "RequestInfo", "ResourceInfo")


async def failure_of(call) -> Failure:
    """Awaits a call that must fail, and reads what it says."""
    try:
        if hasattr(call, "read"):
            await rest_of(call)
        else:
            await call
    except grpc.aio.AioRpcError as error:
        status = await rpc_status.aio.from_call(call)
        details: dict[str, Any] = {}
        for packed in status.details if status else ():
            name = packed.TypeName().removeprefix("google.rpc.")
            assert name in DETAILS
            details[name] = getattr(error_details_pb2, name).FromString(packed.value)
        return Failure(
            error.code(), error.details() or "", details, dict(error.trailing_metadata())
        )
    raise AssertionError("the call succeeded")
