"""Streams that break and go on: exactly, within a window, and never at the cost of others."""

import asyncio
import contextlib

import grpc
import pytest

from fakes import FakeExecutor
from live_server import LIMITS, failure_of, live_server, message, rest_of, settled, until
from service.engine.types import FinishReason
from service.pb import inference_pb2

ALL = {"tokenIds": True, "drafted": True, "logprobs": True, "receipt": True}


def slow(**settings) -> FakeExecutor:
    return FakeExecutor(LIMITS, decode_delay_s=0.01, **settings)


def resumable(**fields) -> inference_pb2.GenerateRequest:
    defaults = {"requestId": "mine", "include": ALL, "resumeWindow": "30s", "sampling": {"seed": 1}}
    return message(**{**defaults, **fields})


def resume(live, after: int | None = None, request_id: str = "mine"):
    return live.inference.Resume(
        inference_pb2.ResumeRequest(request_id=request_id, after_sequence=after)
    )


def comparable(stream) -> list[bytes]:
    """What must be equal: everything but times, and how tokens are grouped into messages."""
    whole: dict[int, inference_pb2.Delta] = {}
    rest: list[bytes] = []
    for event in stream:
        event = inference_pb2.GenerateResponse.FromString(event.SerializeToString())
        if event.HasField("delta"):
            delta = whole.setdefault(event.delta.index, inference_pb2.Delta())
            delta.text += event.delta.text
            delta.token_ids.extend(event.delta.token_ids)
            delta.drafted.extend(event.delta.drafted)
            delta.logprobs.extend(event.delta.logprobs)
        else:
            event.ClearField("sequence")
            event.finished.usage.ClearField("timing")
            rest.append(event.SerializeToString())
    return [*sorted(rest), *(whole[index].SerializeToString() for index in sorted(whole))]


async def unbroken(live, **fields) -> list[bytes]:
    request = resumable(**fields)
    request.ClearField("resume_window")
    return comparable([event async for event in live.inference.Generate(request)])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stopping": {"maxTokens": 40, "ignoreEos": True}},
        {"choices": 3, "stopping": {"maxTokens": 30, "ignoreEos": True}},
    ],
    ids=["to its end", "40 tokens", "three choices"],
)
async def test_broken_anywhere_the_pieces_are_the_whole(checkpoint, fields):
    # Adaptive drafts follow the clock: they would change how many rounds the same tokens take.
    async with live_server(checkpoint, executor=slow(), adaptive_drafts=False) as live:
        want = await unbroken(live, **fields)
        for breaks in range(1, 6):
            stream: list[inference_pb2.GenerateResponse] = []
            call = live.inference.Generate(resumable(**fields))
            for number in range(breaks):
                for _ in range(1 + number % 3):
                    if event := await call.read():
                        stream.append(event)
                call.cancel()
                call = resume(live, stream[-1].sequence)
            stream += await rest_of(call)
            assert [event.sequence for event in stream] == list(range(len(stream)))
            assert comparable(stream) == want
            cancel = inference_pb2.CancelRequest(request_id="mine")
            assert (await live.inference.Cancel(cancel)).found  # kept until now
            await settled(live)


async def test_what_was_sent_is_repeated_from_any_sequence_number_on(checkpoint):
    async with live_server(checkpoint, executor=slow()) as live:
        stream = [event async for event in live.inference.Generate(resumable())]
        for after in (None, 0, 1, len(stream) - 2, len(stream) - 1):
            again = await rest_of(resume(live, after))
            assert again == stream[0 if after is None else after + 1 :]


async def test_generation_goes_on_while_nobody_reads(checkpoint):
    async with live_server(checkpoint, executor=slow()) as live:
        call = live.inference.Generate(resumable(stopping={"maxTokens": 60, "ignoreEos": True}))
        await call.read()
        call.cancel()
        await until(lambda: live.engine.counters.finished[FinishReason.MAX_TOKENS] == 1)
        await settled(live)  # the slot is free although nobody has read the reply
        rest = await rest_of(resume(live, 0))
        assert sum(len(event.delta.token_ids) for event in rest) == 60
        # Tokens that wait for a stream merge into one message.
        assert [event.WhichOneof("kind") for event in rest[-2:]] == ["delta", "finished"]
        assert len(rest[-2].delta.token_ids) > 2 * LIMITS.tokens_per_call


async def test_the_window_closes(checkpoint):
    async with live_server(checkpoint, executor=slow()) as live:
        window = {"resumeWindow": "0.1s", "stopping": {"ignoreEos": True}}
        call = live.inference.Generate(resumable(**window))
        await call.read()
        call.cancel()
        await until(lambda: live.engine.counters.aborted == 1)
        await settled(live)
        failure = await failure_of(resume(live, 0))
        assert failure.code is grpc.StatusCode.NOT_FOUND
        assert failure.details["ErrorInfo"].reason == "RESUME_UNKNOWN"
        assert failure.details["ResourceInfo"].resource_name == "mine"
        again = live.inference.Generate(resumable(**window))  # the id is free again
        assert (await again.read()).started.request_id == "mine"
        again.cancel()


async def test_a_call_that_still_hangs_is_ended_by_the_next(checkpoint):
    async with live_server(checkpoint, executor=slow()) as live:
        request = resumable(stopping={"maxTokens": 80, "ignoreEos": True})
        old = live.inference.Generate(request)
        stream = [await old.read() for _ in range(3)]
        new = resume(live, stream[-1].sequence)
        stream += await rest_of(new)
        assert sum(len(event.delta.token_ids) for event in stream) == 80
        failure = await failure_of(old)
        assert failure.code is grpc.StatusCode.ABORTED
        assert failure.details["ErrorInfo"].reason == "RESUMED_ELSEWHERE"


async def test_a_request_that_waits_can_be_left_and_resumed(checkpoint):
    async with live_server(checkpoint, executor=slow()) as live:
        others = [live.inference.Generate(message(stopping={"ignoreEos": True})) for _ in "ab"]
        await until(lambda: live.engine.load().running == 2)
        call = live.inference.Generate(resumable(include={**ALL, "queue": True}))
        first = await call.read()
        assert first.queued.position == 0
        call.cancel()
        await asyncio.sleep(0.05)
        assert live.engine.load().waiting == 1
        again = resume(live, first.sequence)
        for other in others:
            other.cancel()
        kinds = [event.WhichOneof("kind") for event in await rest_of(again)]
        while kinds[0] == "queued":
            del kinds[0]
        assert kinds[0] == "started"
        assert kinds[-1] == "finished"


async def test_cancel_ends_what_is_kept(checkpoint):
    async with live_server(checkpoint, executor=slow()) as live:
        call = live.inference.Generate(resumable(stopping={"ignoreEos": True}))
        await call.read()
        call.cancel()
        await asyncio.sleep(0.05)
        duplicate = await failure_of(live.inference.Generate(resumable()))
        assert duplicate.code is grpc.StatusCode.ALREADY_EXISTS
        cancel = inference_pb2.CancelRequest(request_id="mine")
        assert (await live.inference.Cancel(cancel)).found
        await settled(live)
        assert not (await live.inference.Cancel(cancel)).found
        assert (await failure_of(resume(live))).code is grpc.StatusCode.NOT_FOUND


async def test_a_reply_that_failed_fails_again_in_the_same_way(checkpoint):
    executor = slow(fail_on=("decode", 4))
    async with live_server(checkpoint, executor=executor, engine_restarts=1) as live:
        request = resumable(stopping={"ignoreEos": True})
        first = await failure_of(live.inference.Generate(request))
        assert first.code is grpc.StatusCode.INTERNAL
        assert (await failure_of(resume(live))).text == first.text


async def test_beyond_the_memory_bound_the_oldest_messages_are_given_up(checkpoint):
    async with live_server(checkpoint, executor=slow(), max_resume_bytes=600) as live:
        request = resumable(stopping={"maxTokens": 60, "ignoreEos": True})
        stream = [event async for event in live.inference.Generate(request)]
        failure = await failure_of(resume(live, 0))
        assert failure.code is grpc.StatusCode.OUT_OF_RANGE
        info = failure.details["ErrorInfo"]
        assert info.reason == "RESUME_OUT_OF_RANGE"
        assert info.metadata["field"] == "after_sequence"
        assert info.metadata["actual"] == "0"
        assert await rest_of(resume(live, len(stream) - 2)) == stream[-1:]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"resumeWindow": "61s"}, "resume_window is 61 s, must be at most 60 s"),
        ({"resumeWindow": "0s"}, "resume_window is 0 s 0 ns, must be above 0"),
        ({"resumeWindow": "-1s"}, "resume_window is -1 s 0 ns, must be above 0"),
    ],
)
async def test_windows_that_are_none_are_refused(checkpoint, fields, text):
    async with live_server(checkpoint) as live:
        failure = await failure_of(live.inference.Generate(resumable(**fields)))
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.text.startswith(text)


async def test_what_only_a_stream_can_do_is_refused_for_complete(checkpoint):
    async with live_server(checkpoint) as live:
        request = resumable(include={"queue": True})
        failure = await failure_of(live.inference.Complete(request))
        fields = [v.field for v in failure.details["BadRequest"].field_violations]
        assert fields == ["resume_window", "include.queue"]


@pytest.mark.parametrize("after", [7, 2**32 - 1])
async def test_numbers_that_were_never_sent_are_refused(checkpoint, after):
    async with live_server(checkpoint, executor=slow()) as live:
        stream = [event async for event in live.inference.Generate(resumable())]
        if after < len(stream):
            after += len(stream)
        failure = await failure_of(resume(live, after))
        assert failure.code is grpc.StatusCode.OUT_OF_RANGE
        assert f"after_sequence is {after}" in failure.text


async def test_draining_does_not_wait_for_replies_that_nobody_reads(checkpoint):
    async with live_server(checkpoint, executor=slow()) as live:
        call = live.inference.Generate(resumable(stopping={"ignoreEos": True}))
        await call.read()
        call.cancel()
        await asyncio.sleep(0.05)
        async with asyncio.timeout(5):
            with contextlib.suppress(grpc.aio.AioRpcError):
                await live.server.drain(60)
