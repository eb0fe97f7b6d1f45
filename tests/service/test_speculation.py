"""The control surface of drafting: the default draft cap changes under way, replies never do."""

import asyncio
import itertools

import grpc
import pytest

from fakes import FakeExecutor
from live_server import LIMITS, failure_of, live_server, message, rest_of
from service.pb import inference_pb2, model_pb2
from service.translation import fold

ALL = {"tokenIds": True, "drafted": True}


async def update(live, cap: int | None) -> int:
    request = model_pb2.UpdateSpeculationRequest(max_draft_tokens=cap)
    return (await live.model.UpdateSpeculation(request)).max_draft_tokens


async def default_of(live) -> int:
    response = await live.model.GetModel(model_pb2.GetModelRequest())
    return response.model.defaults.max_draft_tokens


async def test_the_default_is_told_and_changed(checkpoint):
    async with live_server(checkpoint) as live:
        assert await default_of(live) == 2
        for cap in (0, 1, 2):
            assert await update(live, cap) == cap
            assert await default_of(live) == cap
        for cap, told in ((3, "3"), (2**32 - 1, "4294967295"), (None, "not set")):
            request = model_pb2.UpdateSpeculationRequest(max_draft_tokens=cap)
            failure = await failure_of(live.model.UpdateSpeculation(request))
            assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
            assert failure.text == f"max_draft_tokens is {told}, must be in [0, 2]"
        assert await default_of(live) == 2


async def test_before_the_model_is_warm(checkpoint):
    async with live_server(checkpoint, warm=False) as live:
        request = model_pb2.UpdateSpeculationRequest(max_draft_tokens=0)
        failure = await failure_of(live.model.UpdateSpeculation(request))
        assert failure.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("adaptive", [False, True])
async def test_running_requests_follow_unless_they_name_a_cap(checkpoint, adaptive):
    executor = FakeExecutor(LIMITS, accepts=(2,), stepped=True)
    settings = {"executor": executor, "adaptive_drafts": adaptive}
    async with live_server(checkpoint, **settings) as live:
        stopping = {"ignoreEos": True, "maxTokens": 200}
        fields = {"include": ALL, "stopping": stopping}
        free = live.inference.Generate(message(**fields))
        assert (await free.read()).HasField("started")
        fixed = live.inference.Generate(message(speculation={"maxDraftTokens": 1}, **fields))
        async with asyncio.timeout(10):
            while live.engine.load().running < 2 or len(executor.calls("fetch")) < 5:
                executor.allow(1)
                await asyncio.sleep(0.01)
        await update(live, 0)
        calls_before = len(executor.draft_lengths)
        executor.allow(10_000)
        replies = []
        for call in (free, fixed):
            whole = inference_pb2.CompleteResponse()
            for event in await rest_of(call):
                fold(whole, event)
            replies.append(whole.choices[0])
        assert list(replies[0].delta.token_ids) == list(replies[1].delta.token_ids)
        drafted = list(replies[0].delta.drafted)
        assert any(drafted[:10])
        assert not any(drafted[-30:])
        assert any(list(replies[1].delta.drafted)[-5:])
        # The program follows the caps: while both run, it drafts for the request that names one.
        assert max(executor.draft_lengths[:calls_before]) == 2
        assert set(executor.draft_lengths[calls_before + 2 :]) <= {0, 1}


def scripts(tokenizer) -> dict[str, list[int]]:
    text = "The quick brown fox jumps over the lazy dog"
    return {f"r{n}": [*tokenizer.encode(text), 0][n:] for n in range(6)}


async def replies_of(live) -> list[tuple]:
    calls = [
        live.inference.Complete(
            message(
                requestId=f"r{n}",
                include=ALL | {"receipt": True},
                sampling={"seed": n},
                stopping={"maxTokens": 10 + 40 * (n % 3), "stopStrings": ["lazy"][: n % 2]},
                speculation={"maxDraftTokens": 1} if n == 3 else {},
            )
        )
        for n in range(6)
    ]
    choices = [(await call).choices[0] for call in calls]
    return [
        (
            choice.delta.text,
            tuple(choice.delta.token_ids),
            choice.finished.reason,
            choice.finished.receipt.digest,
        )
        for choice in choices
    ]


@pytest.mark.parametrize("accepts", [(0,), (2,), (2, 0, 0, 1, 0)])
async def test_replies_are_equal_whatever_decides_the_draft_length(checkpoint, tokenizer, accepts):
    found = []
    for adaptive, strict in itertools.product((True, False), repeat=2):
        executor = FakeExecutor(LIMITS, replies=scripts(tokenizer), accepts=accepts)
        async with live_server(
            checkpoint, executor=executor, adaptive_drafts=adaptive, strict=strict
        ) as live:
            found.append(await replies_of(live))
            if strict:
                assert set(executor.draft_lengths) == {LIMITS.draft_length}
            await update(live, 0)
            found.append(await replies_of(live))
    assert all(replies == found[0] for replies in found)
