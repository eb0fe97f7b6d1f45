"""SIGTERM while streams run: those that were taken must end as if nothing had happened."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import grpc

from load_testing.failures import failure_of, is_refused_by_drain
from load_testing.own_server import OwnServer
from load_testing.stream_check import StreamCheck
from service.pb import inference_pb2

BEGUN_TOGETHER = 4


@dataclasses.dataclass
class DrainReport:
    """What became of the calls."""

    accepted: int = 0
    """Streams that had begun when the signal was sent."""
    finished: int = 0
    """Those of them that came whole."""
    refused: int = 0
    """Calls after the signal that were refused as they must be."""
    problems: list[str] = dataclasses.field(default_factory=list)


async def drain_under_load(
    server: OwnServer,
    inference: Any,
    streams: int,
    reply_tokens: int,
) -> DrainReport:
    """Sends SIGTERM while `streams` replies of `reply_tokens` tokens run, and goes on calling.

    Returns when the server has ended; how is for `OwnServer.problems_at_end`.
    """
    report = DrainReport()
    request = inference_pb2.GenerateRequest(
        text="def main():",
        sampling={"temperature": 0.8, "seed": 1},
        stopping={"max_tokens": reply_tokens, "ignore_eos": True},
        include={"token_ids": True},
    )
    calls: list[Any] = []
    checks = [StreamCheck(1) for _ in range(streams)]

    async def begin(call: Any, check: StreamCheck) -> None:
        while not check.tokens:
            check.take(await call.read())

    # Not all at once: the waiting queue may be shorter than that.
    for first in range(0, streams, BEGUN_TOGETHER):
        batch = checks[first : first + BEGUN_TOGETHER]
        calls += [inference.Generate(request) for _ in batch]
        await asyncio.gather(*map(begin, calls[first:], batch))
    report.accepted = len(calls)
    server.process.terminate()
    refusing = asyncio.create_task(_be_refused(inference, server, report))

    async def finish(call: Any, check: StreamCheck) -> None:
        try:
            while message := await call.read():  # EOF is false
                check.take(message)
            check.check_end()
        except grpc.aio.AioRpcError as error:
            report.problems.append(f"an accepted stream was lost: {failure_of(error)}")
            return
        if check.problem:
            report.problems.append(f"an accepted stream is not whole: {check.problem}")
        else:
            report.finished += 1

    await asyncio.gather(*map(finish, calls, checks))
    await asyncio.to_thread(server.process.wait)
    await refusing
    if not report.refused:
        report.problems.append("no call was refused while the server drained")
    return report


async def _be_refused(inference: Any, server: OwnServer, report: DrainReport) -> None:
    """Calls on until the server is gone. Calls that it still took must end well."""
    request = inference_pb2.GenerateRequest(text="x", stopping={"max_tokens": 1})
    while server.process.poll() is None:
        try:
            await inference.Complete(request)
        except grpc.aio.AioRpcError as error:
            failure = failure_of(error)
            if is_refused_by_drain(failure):
                report.refused += 1
            else:
                report.problems.append(f"a call was refused in another way: {failure}")
        await asyncio.sleep(0.05)
