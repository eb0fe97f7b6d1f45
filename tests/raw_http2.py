"""Just enough HTTP/2 to send what no gRPC client would: frames by hand, headers uncompressed."""

from __future__ import annotations

import asyncio
import dataclasses
import struct
from collections.abc import Callable, Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
CONTINUATION = 9
ACK = END_STREAM = 1
END_HEADERS = 4
CANCEL = 8
"""Error code of RST_STREAM."""


@dataclasses.dataclass(frozen=True)
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    head = struct.pack(">I", len(payload))[1:]
    return head + struct.pack(">BBI", kind, flags, stream) + payload


def length(size: int) -> bytes:
    """An HPACK integer behind a prefix of 7 bits."""
    if size < 127:
        return bytes([size])
    digits, size = [127], size - 127
    while size >= 128:
        digits.append(size % 128 + 128)
        size //= 128
    return bytes([*digits, size])


def header_block(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Literals that enter no table."""
    return b"".join(
        b"\0" + length(len(name)) + name + length(len(value)) + value for name, value in headers
    )


def call_headers(path: bytes, *more: tuple[bytes, bytes]) -> bytes:
    return header_block(
        [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path),
            (b":authority", b"test"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            *more,
        ]
    )


def grpc_message(body: bytes, *, compressed: int = 0, size: int | None = None) -> bytes:
    """A message behind its prefix; `size` lies about its length."""
    return struct.pack(">BI", compressed, len(body) if size is None else size) + body


class RawConnection:
    """A TCP connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, target: str, *, hello: bool = True) -> RawConnection:
        """Connects; says what a client of HTTP/2 says first, unless told otherwise."""
        host, port = target.split(":")
        connection = cls(*await asyncio.open_connection(host, int(port)))
        if hello:
            await connection.send(PREFACE + frame(SETTINGS))
        return connection

    async def send(self, raw: bytes) -> None:
        self._writer.write(raw)
        await self._writer.drain()

    async def frames_until(self, enough: Callable[[Frame], bool]) -> list[Frame]:
        """Reads frames up to one that is enough, or to the end of the connection."""
        frames: list[Frame] = []
        try:
            while not frames or not enough(frames[-1]):
                head = await self._reader.readexactly(9)
                kind, flags, stream = struct.unpack(">BBI", head[3:])
                payload = await self._reader.readexactly(int.from_bytes(head[:3]))
                frames.append(Frame(kind, flags, stream, payload))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        return frames

    async def rest(self) -> list[Frame]:
        """Reads until the server closes the connection."""
        return await self.frames_until(lambda _: False)

    def close(self) -> None:
        """Ends the connection at once, with a TCP reset if something is unread."""
        self._writer.transport.abort()
