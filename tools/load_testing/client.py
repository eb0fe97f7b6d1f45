"""Makes the call of one case, behaves as the case says, and checks all that comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc

from load_testing.failures import failure_of, is_expected
from load_testing.stream_check import StreamCheck
from load_testing.tally import End, Outcome, Tally
from load_testing.workload import Behaviour, Case
from service.pb import inference_pb2, inference_pb2_grpc

MAX_MESSAGE_BYTES = 64 << 20
LIMIT_S = 300.0
"""A call that takes longer hangs."""
OPTIONS = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.enable_retries", 0))
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
"""What is not read stays with the server, and not in buffers on the way."""


class LoadClient:
    """All clients of a load test: slow readers have a connection of their own."""

    def __init__(self, target: str, tally: Tally) -> None:
        """Connects to `host:port` when the first call is made; counts on `tally`."""
        self._channels = [
            grpc.aio.insecure_channel(target, OPTIONS),
            grpc.aio.insecure_channel(target, (*OPTIONS, *SMALL_WINDOW)),
        ]
        stubs: list[Any] = [inference_pb2_grpc.InferenceServiceStub(c) for c in self._channels]
        self.stub, self._slow = stubs
        self._tally = tally

    async def close(self) -> None:
        """Closes the connections."""
        for channel in self._channels:
            await channel.close()

    async def run(self, case: Case, arrived_at: float) -> End:
        """Makes one call, counts how it ended, and returns that."""
        check = StreamCheck(case.choices)
        run = _Run(self._slow if case.behaviour is Behaviour.SLOW else self.stub, case, check)
        if case.behaviour is Behaviour.READ:
            run.on_tokens = _Stopwatch(self._tally, arrived_at).tokens
        outcome = await run.outcome()
        self._tally.add(outcome)
        return outcome.end


class _Stopwatch:
    """Times the tokens of one call."""

    def __init__(self, tally: Tally, arrived_at: float) -> None:
        self._tally = tally
        self._arrived_at = arrived_at
        self._last_at: dict[int, float] = {}  # by choice

    def tokens(self, index: int, count: int) -> None:
        """Takes the time of tokens that came now for a choice."""
        now = time.monotonic()
        if not self._last_at:
            self._tally.first_tokens_s.append(now - self._arrived_at)
        if index in self._last_at:
            self._tally.delivery(now, now - self._last_at[index], count)
        self._last_at[index] = now


class _Run:
    """One call, or several where it breaks."""

    def __init__(self, stub: Any, case: Case, check: StreamCheck) -> None:
        self._stub = stub
        self._case = case
        self._check = check
        self._cancelled = False
        self.on_tokens: Callable[[int, int], None] | None = None

    async def outcome(self) -> Outcome:
        """Goes through the call."""
        case, check = self._case, self._check
        try:
            if case.behaviour is Behaviour.RESUME:
                await self._resume()
            else:
                await self._generate()
        except grpc.aio.AioRpcError as error:
            failure = failure_of(error)
            if not is_expected(case, failure) or check.problem:
                return self._unexpected(check.problem or str(failure), failure)
            passed = failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
            return Outcome(case, End.DEADLINE if passed else End.REFUSED, failure, "", check.tokens)
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            if check.problem:
                return self._unexpected(check.problem)
            return Outcome(case, End.CANCELLED, tokens=check.tokens)
        check.check_end()
        if case.behaviour is Behaviour.BAD:
            return self._unexpected("was served")
        if check.problem:
            return self._unexpected(check.problem)
        name = inference_pb2.FinishReason.Name
        return Outcome(
            case,
            End.CANCELLED if check.cancelled else End.COMPLETED,
            tokens=check.tokens,
            finish_reasons=tuple(
                name(finished.reason).removeprefix("FINISH_REASON_")
                for finished in check.finished.values()
            ),
            digest=b"" if check.cancelled else check.digest(),
        )

    def _unexpected(self, problem: str, failure: Any = None) -> Outcome:
        return Outcome(self._case, End.UNEXPECTED, failure, problem, self._check.tokens)

    async def _generate(self) -> None:
        case = self._case
        call = self._stub.Generate(case.request, timeout=case.timeout_s or LIMIT_S)
        if case.behaviour is not Behaviour.CANCEL:
            await self._read(call)
            return
        cancelling = asyncio.create_task(self._cancel_later(call))
        try:
            await self._read(call)
        finally:
            cancelling.cancel()
            await asyncio.wait({cancelling})
        if not cancelling.cancelled():
            cancelling.result()  # Cancel may have failed

    async def _cancel_later(self, call: Any) -> None:
        await asyncio.sleep(self._case.cancel_after_s)
        if self._case.cancel_by_id:
            request_id = self._case.request.request_id
            await self._stub.Cancel(inference_pb2.CancelRequest(request_id=request_id))
        else:
            self._cancelled = True
            call.cancel()

    async def _resume(self) -> None:
        request_id, check = self._case.request.request_id, self._check
        call = self._stub.Generate(self._case.request, timeout=LIMIT_S)
        for messages in self._case.breaks:
            if await self._read(call, messages):
                return
            call.cancel()
            await asyncio.sleep(self._case.break_s)
            resume = inference_pb2.ResumeRequest(
                request_id=request_id, after_sequence=check.last_sequence
            )
            call = self._stub.Resume(resume, timeout=LIMIT_S)
        await self._read(call)

    async def _read(self, call: Any, most: int | None = None) -> bool:
        """Reads messages, at most so many; returns whether the stream has ended."""
        read = 0
        while read != most:
            if self._case.pauses_s:
                await asyncio.sleep(self._case.pauses_s)
            message = await call.read()
            if not message:  # EOF is false, messages are true
                return True
            self._check.take(message)
            if self.on_tokens is not None and (count := len(message.delta.token_ids)):
                self.on_tokens(message.delta.index, count)
            read += 1
        return False
