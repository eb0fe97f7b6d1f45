"""The wire below the messages: sizes, pings, and what no gRPC client would send."""

import asyncio
import contextlib
import struct

import grpc
import pytest
from grpc_health.v1 import health_pb2

from fakes import FakeExecutor
from live_server import LIMITS, failure_of, health_stub, live_server, message, settled
from raw_http2 import (
    ACK,
    CANCEL,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    RawConnection,
    call_headers,
    frame,
    grpc_message,
    header_block,
)
from service.pb import model_pb2, tokenizer_pb2, tokenizer_pb2_grpc

ENDLESS = {"ignoreEos": True}
COMPLETE = b"/tandem.v1.InferenceService/Complete"
TOKENIZE = b"/tandem.v1.TokenizerService/Tokenize"


@pytest.fixture
async def live(checkpoint):
    executor = FakeExecutor(LIMITS, decode_delay_s=0.005)
    async with live_server(checkpoint, executor=executor) as server:
        yield server


async def still_serves(live) -> None:
    """Health is green, and a new client gets its reply."""
    async with grpc.aio.insecure_channel(live.target) as channel:
        health = await health_stub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
    await live.inference.Complete(message(stopping={"maxTokens": 1}))
    await live.model.GetModel(model_pb2.GetModelRequest())


async def test_messages_of_6_mb_and_of_too_much(checkpoint):
    """Case 61: what passes, and what does not with both sizes."""
    text = "fox " * 1_500_000
    options = [("grpc.max_receive_message_length", 64 << 20)]
    async with (
        live_server(checkpoint) as live,
        grpc.aio.insecure_channel(live.target, options=options) as channel,
    ):
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        reply = await stub.Tokenize(tokenizer_pb2.TokenizeRequest(text=text))
        assert len(reply.token_ids) >= 1_500_000
    async with live_server(checkpoint, max_message_bytes=1 << 20) as live:
        request = message(text)
        for compression in (None, grpc.Compression.Gzip):
            failure = await failure_of(live.inference.Complete(request, compression=compression))
            assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            if compression is None:
                assert f"({request.ByteSize()} vs. {1 << 20})" in failure.text
        await live.inference.Complete(message(stopping={"maxTokens": 1}))


async def test_clients_may_ping_as_often_as_they_like(live):
    """Case 61: also without a call. A server with gRPC's own settings ends the connection."""
    plain = grpc.aio.server()
    port = plain.add_insecure_port("127.0.0.1:0")
    await plain.start()

    async def answered(target: str) -> int:
        connection = await RawConnection.open(target)
        pings = 0
        for number in range(30):
            await connection.send(frame(PING, payload=struct.pack(">Q", number)))
            frames = await connection.frames_until(
                lambda got: got.kind == GOAWAY or (got.kind == PING and got.flags == ACK)
            )
            if not frames or frames[-1].kind == GOAWAY:
                break
            pings += 1
        connection.close()
        return pings

    async with asyncio.timeout(20):
        assert await answered(live.target) == 30
        assert await answered(f"127.0.0.1:{port}") < 10
    await plain.stop(0)


GARBAGE = {
    "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": bytes.fromhex("16030100") + bytes(200),
    "random": bytes((n * 97 + 13) % 256 for n in range(5000)),
    "zeros": bytes(5000),
    "almost the preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\rX" + bytes(100),
}


async def test_what_is_no_http2_is_hung_up_on(live, subtests):
    for name, garbage in GARBAGE.items():
        with subtests.test(name):
            async with asyncio.timeout(20):
                connection = await RawConnection.open(live.target, hello=False)
                with contextlib.suppress(ConnectionError):
                    await connection.send(garbage)
                await connection.rest()
                connection.close()
                await still_serves(live)


BAD_FRAMES = {
    "frame larger than allowed": frame(DATA, 0, 1, b"")[3:].join([b"\xff\xff\xff", bytes(100)]),
    "data of no stream": frame(DATA, 0, 7, b"x" * 100),
    "headers of stream 0": frame(HEADERS, END_HEADERS, 0, call_headers(TOKENIZE)),
    "even stream": frame(HEADERS, END_HEADERS, 2, call_headers(TOKENIZE)),
    "broken headers": frame(HEADERS, END_HEADERS, 1, b"\xff" * 50),
    "headers that do not end": frame(HEADERS, 0, 1, b"")
    + frame(CONTINUATION, 0, 1, header_block([(b"a", b"b" * 1000)])) * 100,
    "headers too large": frame(
        HEADERS, END_HEADERS, 1, call_headers(TOKENIZE, *[(b"x", b"y" * 300)] * 50)
    ),
    "settings of 5 bytes": frame(SETTINGS, 0, 0, b"12345"),
    "window of nothing": frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 2**31)),
    "reset of no stream": frame(RST_STREAM, 0, 9, struct.pack(">I", CANCEL)),
    "unknown frames": frame(77, 255, 3, b"?" * 1000) * 10,
    "no path": frame(HEADERS, END_HEADERS, 1, header_block([(b":method", b"POST")])),
    "metadata that is no UTF-8": frame(
        HEADERS, END_HEADERS, 1, call_headers(TOKENIZE, (b"x", b"\xff\xfe"))
    ),
    "authorization that is no UTF-8": frame(
        HEADERS, END_HEADERS, 1, call_headers(TOKENIZE, (b"authorization", b"Bearer \xff"))
    ),
    "deadline of 3 million years": frame(
        HEADERS, END_HEADERS, 1, call_headers(TOKENIZE, (b"grpc-timeout", b"99999999H"))
    ),
}


async def test_frames_that_break_the_rules(live, subtests):
    for name, raw in BAD_FRAMES.items():
        with subtests.test(name):
            async with asyncio.timeout(20):
                connection = await RawConnection.open(live.target)
                with contextlib.suppress(ConnectionError):
                    await connection.send(raw)
                    await connection.send(frame(DATA, END_STREAM, 1, grpc_message(b"")))
                await still_serves(live)
                connection.close()
                await still_serves(live)


@pytest.mark.skipif(
    (1, 84) <= tuple(map(int, grpc.__version__.split(".")[:2])) <= (1, 85),
    reason="grpcio 1.84 and 1.85 end the whole server on such a path",
)
async def test_paths_that_are_no_text(live):
    for path in (b"/tandem.\xff\xfe/x", b"\xc3", b"/tandem.v1\nforged", b"/\0"):
        async with asyncio.timeout(20):
            connection = await RawConnection.open(live.target)
            await connection.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, call_headers(path)))
            await connection.frames_until(lambda got: got.stream == 1)
            connection.close()
            await still_serves(live)


PREFIXES = {
    "nothing": b"",
    "half a prefix": b"\0\0",
    "less than promised": grpc_message(b"abc", size=100),
    "4 GB promised": grpc_message(b"abc", size=2**32 - 1),
    "compressed by nothing": grpc_message(b"abc", compressed=1),
    "compressed in a new way": grpc_message(b"", compressed=9),
    "two messages": grpc_message(b"") * 2,
}


@pytest.mark.parametrize("path", [TOKENIZE, COMPLETE])
async def test_bodies_that_are_no_message(live, path, subtests):
    await still_serves(live)
    tasks = len(asyncio.all_tasks())
    for name, body in PREFIXES.items():
        with subtests.test(name):
            async with asyncio.timeout(20):
                connection = await RawConnection.open(live.target)
                await connection.send(frame(HEADERS, END_HEADERS, 1, call_headers(path)))
                await connection.send(frame(DATA, END_STREAM, 1, body))
                await still_serves(live)
                connection.close()
                while len(asyncio.all_tasks()) > tasks:
                    await asyncio.sleep(0.01)
                await settled(live)


@pytest.mark.parametrize("goodbye", ["reset of the stream", "reset of the connection"])
async def test_a_stream_that_is_reset_frees_its_slot(live, goodbye):
    body = message(stopping=ENDLESS).SerializeToString()
    path = b"/tandem.v1.InferenceService/Generate"
    async with asyncio.timeout(20):
        connection = await RawConnection.open(live.target)
        for stream in range(1, 40, 2):
            await connection.send(frame(HEADERS, END_HEADERS, stream, call_headers(path)))
            await connection.send(frame(DATA, END_STREAM, stream, grpc_message(body)))
        await connection.frames_until(lambda got: got.kind == DATA and got.stream > 0)
        if goodbye == "reset of the stream":
            for stream in range(1, 40, 2):
                await connection.send(frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL)))
        else:
            connection.close()
        await settled(live)
        connection.close()
        await still_serves(live)


async def test_streams_that_are_reset_at_once(live):
    """Thousands of calls that end before they begin (CVE-2023-44487).

    In waves: when more than 1000 calls wait to be looked at, gRPC cancels some, whosever they are.
    """
    await still_serves(live)
    async with asyncio.timeout(60):
        tasks = len(asyncio.all_tasks())
        connection = await RawConnection.open(live.target)
        for first in range(1, 4000, 800):
            for stream in range(first, first + 800, 2):
                await connection.send(
                    frame(HEADERS, END_HEADERS, stream, call_headers(COMPLETE))
                    + frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL))
                )
            await connection.send(frame(PING, payload=bytes(8)))
            frames = await connection.frames_until(
                lambda got: got.kind == GOAWAY or (got.kind == PING and got.flags == ACK)
            )
            assert frames[-1].kind == PING
            await still_serves(live)
        connection.close()
        while len(asyncio.all_tasks()) > tasks:
            await asyncio.sleep(0.01)
        await settled(live)
        await still_serves(live)


async def test_connections_that_say_nothing(live):
    async with asyncio.timeout(20):
        silent = [await RawConnection.open(live.target, hello=False) for _ in range(50)]
        half = [await RawConnection.open(live.target) for _ in range(50)]
        for connection in half:
            await connection.send(frame(HEADERS, END_HEADERS, 1, call_headers(TOKENIZE)))
        await still_serves(live)
        for connection in silent + half:
            connection.close()
        await still_serves(live)
