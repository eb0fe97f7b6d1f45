"""Thousands of messages that nobody would send: the server answers each, and nothing is left of them.

Seeded, so that every run sends the same. Whatever a client sends, INTERNAL and UNKNOWN are bugs.
"""

import asyncio
import collections
import contextlib
import gc
import os
import random
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from fakes import expected_reply
from live_server import LIMITS, LiveServer, health_stub, live_server, message, settled
from raw_http2 import (
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    RST_STREAM,
    RawConnection,
    call_headers,
    frame,
    grpc_message,
)
from service.pb import inference_pb2, model_pb2, tokenizer_pb2

SEED = 20_000
MESSAGES = 3_000
BODIES = 1_500
CONNECTIONS = 150
AT_ONCE = 32

METHODS = {
    f"/{service.full_name}/{method.name}": (
        getattr(file, method.input_type.name),
        method.server_streaming,
    )
    for file in (inference_pb2, tokenizer_pb2, model_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Each method of ours: class of its request, and whether it streams."""

LEGITIMATE = {
    grpc.StatusCode[name]
    for name in (
        *("OK", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED"),
        *("FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "DEADLINE_EXCEEDED", "CANCELLED"),
        "UNIMPLEMENTED",  # what the contract has and this version has not
    )
}

INTEGERS = (0, 1, 2, 3, 8, 16, 255, 256, 399, 400, 1000, 2**31 - 1, 2**31, 2**32 - 1)
SIGNED = (0, 1, -1, 5, 10**9, -(10**9), 2**31 - 1, -(2**31))
LONG = (0, 1, -1, 60, 10**12, -(10**12), 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1e-45, 1e-6, 0.5, 1.0, 2.0, -1.0, 1e38, *map(float, ("nan", "inf", "-inf")))
TEXTS = (
    *(
        "",
        " ",
        "fox",
        "\0",
        "\n\r\t\x1b[2J",
        "\u202e\ufeff\u2028",
        "é",
        "e\u0301",
        "漢字",
        "👩\u200d👩",
    ),
    *("a" * 200, "<|end|>", "<tool call>", "\ud7ff\ue000", "\U0010ffff", "%s{}'\"`$(x)", "../../x"),
    *("mine", "yours", "{}", '{"type": "object"}', "[" * 500, "(a*)*b"),
)


class Generator:
    """Makes messages of any type from its descriptor."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def message(self, kind: type[Message]) -> Message:
        made = kind()
        self.fill(made, 0.25 + self.random.random() / 2)
        return made

    def fill(self, made: Message, density: float, depth: int = 0) -> None:
        for field in made.DESCRIPTOR.fields:
            if depth > 5 or self.random.random() > density:
                continue
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                for _ in range(self.random.choice((0, 1, 3, 70))):
                    getattr(made, field.name)[self.scalar(field.message_type.fields[0])] = (
                        self.scalar(field.message_type.fields[1])
                    )
            elif field.is_repeated:
                for _ in range(self.random.choice((0, 1, 2, 5, 17, 300))):
                    if field.message_type is None:
                        getattr(made, field.name).append(self.scalar(field))
                    elif depth < 3:
                        self.fill(getattr(made, field.name).add(), density, depth + 1)
            elif field.message_type is not None:
                getattr(made, field.name).SetInParent()
                self.fill(getattr(made, field.name), density, depth + 1)
            else:
                setattr(made, field.name, self.scalar(field))

    def scalar(self, field: Any) -> Any:
        kind = field.cpp_type
        choose = self.random.choice
        if kind == field.CPPTYPE_STRING:
            text = choose(TEXTS)
            return text if field.type == field.TYPE_STRING else text.encode()
        if kind == field.CPPTYPE_BOOL:
            return choose((True, False))
        if kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
            return choose((*FLOATS, self.random.random()))
        if kind == field.CPPTYPE_UINT32:
            return choose((*INTEGERS, self.random.randrange(400)))
        if kind == field.CPPTYPE_INT64:
            return choose(LONG)
        if kind == field.CPPTYPE_ENUM:
            return choose((0, 1, 2, 3, 99, 2**31 - 1, -1))
        return choose(SIGNED)

    def almost_valid(self) -> inference_pb2.GenerateRequest:
        """A request that runs, but for at most one field."""
        made = message("fox", stopping={"maxTokens": self.random.randrange(1, 20)})
        other = inference_pb2.GenerateRequest()
        self.fill(other, 0.5)
        names = [field.name for field, _ in other.ListFields()]
        if names:
            part, name = inference_pb2.GenerateRequest(), self.random.choice(names)
            part.CopyFrom(other)
            for left_out in set(names) - {name}:
                part.ClearField(left_out)
            made.MergeFrom(part)
        return made

    def mutated(self, body: bytes) -> bytes:
        """The bytes of a message, changed in a few places."""
        raw = bytearray(body)
        for _ in range(self.random.choice((1, 1, 2, 8))):
            place = self.random.randrange(len(raw) + 1)
            match self.random.randrange(6):
                case 0 if raw:
                    raw[place % len(raw)] ^= 1 << self.random.randrange(8)
                case 1:
                    raw[place:place] = self.random.randbytes(self.random.choice((1, 2, 9)))
                case 2:
                    del raw[place : place + self.random.randrange(1, 9)]
                case 3:
                    del raw[place:]
                case 4:
                    raw[place:place] = b"\xff" * 10
                case _:
                    raw += raw[place:][:200]
        return bytes(raw)


def calls(generator: Generator) -> Iterator[tuple[str, bytes]]:
    """Methods and the bytes that they are called with."""
    choose = generator.random.choice
    for number in range(MESSAGES):
        path, (kind, _) = choose(list(METHODS.items()))
        almost = kind is inference_pb2.GenerateRequest and number % 2
        made = generator.almost_valid() if almost else generator.message(kind)
        yield path, made.SerializeToString()
    for number in range(BODIES):
        path, (kind, _) = choose(list(METHODS.items()))
        if number % 3:
            yield path, generator.mutated(generator.message(kind).SerializeToString())
        else:
            yield path, generator.random.randbytes(choose((1, 3, 10, 100, 1000)))


async def outcome(
    live: LiveServer, path: str, body: bytes, timeout: float | None, leaves: bool
) -> tuple[grpc.StatusCode, str | None]:
    """Calls with bytes, and tells how it ended. A client that leaves reads no more than a message."""
    _, streams = METHODS[path]
    with contextlib.suppress(grpc.aio.AioRpcError):
        if not streams:
            call: Any = live.channel.unary_unary(path)(body, timeout=timeout)
            await call
        else:
            call = live.channel.unary_stream(path)(body, timeout=timeout)
            while await call.read() and not leaves and not path.endswith("/WatchLoad"):
                pass
            call.cancel()
    return await call.code(), await call.details()


async def nothing_is_left(live: LiveServer, tasks: int, files: int) -> None:
    """The engine is idle and whole, tasks and connections are gone, and a reply is what it was."""
    await settled(live)
    assert live.engine.load().pages_used == 0
    async with asyncio.timeout(20):
        while len(asyncio.all_tasks()) > tasks or open_files() > files:
            gc.collect()
            await asyncio.sleep(0.02)
    health = await health_stub(live.channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    await a_usual_reply(live)
    await settled(live)


async def a_usual_reply(live: LiveServer) -> None:
    request = message(stopping={"maxTokens": 5}, include={"tokenIds": True}, requestId="usual")
    reply = await live.inference.Complete(request)
    expected, _ = expected_reply(live.executor.inserted[-1], LIMITS)
    assert tuple(reply.choices[0].delta.token_ids) == expected


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


async def test_random_and_mutated_messages(checkpoint):
    generator = Generator(SEED)
    ends: collections.Counter[str] = collections.Counter()
    # Replies that are kept for Resume must be gone when the test looks.
    async with live_server(checkpoint, max_resume_seconds=0.1) as live:
        await a_usual_reply(live)
        tasks, files = len(asyncio.all_tasks()), open_files()
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(path: str, body: bytes, timeout: float | None, leaves: bool) -> None:
            async with gate:
                code, details = await outcome(live, path, body, timeout, leaves)
            assert code in LEGITIMATE, f"{path} {body!r} ended with {code}: {details}"
            ends[code.name] += 1

        async with asyncio.TaskGroup() as group:
            for path, body in calls(generator):
                timeout = generator.random.choice((None, None, None, 0.02))
                leaves = generator.random.random() < 0.2
                group.create_task(one(path, body, timeout, leaves))
        await nothing_is_left(live, tasks, files)
    assert sum(ends.values()) == MESSAGES + BODIES
    # They reach every corner: some run, some are refused, some run out of time.
    assert min(ends["OK"], ends["INVALID_ARGUMENT"], ends["CANCELLED"]) > 100, ends


def frames(generator: Generator) -> bytes:
    """What one connection sends: frames of calls, most of them broken in some way.

    Header blocks are whole or all random: what gRPC does with odd paths, test_hostile_input.py asks.
    """
    sent = b""
    for number in range(generator.random.randrange(6)):
        path, (kind, _) = generator.random.choice(list(METHODS.items()))
        stream = 2 * number + 1
        body = generator.message(kind).SerializeToString()
        data = frame(DATA, END_STREAM, stream, grpc_message(body))
        reset = frame(RST_STREAM, 0, stream, CANCEL.to_bytes(4))
        headers = frame(HEADERS, END_HEADERS, stream, call_headers(path.encode()))
        match generator.random.randrange(6):
            case 0:
                sent += headers + generator.mutated(data)
            case 1:
                sent += headers + data + reset
            case 2:
                sent += headers + reset + data
            case 3:
                sent += headers
            case 4:
                junk = generator.random.randbytes(generator.random.randrange(60))
                sent += frame(generator.random.randrange(12), number, stream, junk)
            case _:
                sent += headers + data
    return sent


async def test_random_bytes_on_the_wire(checkpoint):
    generator = Generator(SEED)
    async with live_server(checkpoint, max_resume_seconds=0.1) as live:
        await a_usual_reply(live)
        tasks, files = len(asyncio.all_tasks()), open_files()
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(hello: bool, raw: bytes, listens: bool) -> None:
            async with gate:
                connection = await RawConnection.open(live.target, hello=hello)
                with contextlib.suppress(ConnectionError, TimeoutError):
                    await connection.send(raw)
                    if listens:
                        async with asyncio.timeout(0.1):
                            await connection.rest()
                connection.close()

        async with asyncio.TaskGroup() as group:
            for number in range(CONNECTIONS):
                hello = number % 4 > 0
                raw = frames(generator) if hello else generator.random.randbytes(number * 10)
                group.create_task(one(hello, raw, generator.random.random() < 0.5))
        await nothing_is_left(live, tasks, files)
