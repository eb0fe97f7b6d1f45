"""Several choices of one prompt: each is the reply to a request of its own; all or none are taken."""

import grpc
import pytest

from fakes import FakeExecutor
from live_server import LIMITS, failure_of, live_server, message, rest_of, settled, until
from service.pb import inference_pb2
from service.sampling import choice_seed
from service.translation import fold

ALL = {"tokenIds": True, "drafted": True}


@pytest.fixture
async def live(checkpoint):
    async with live_server(checkpoint, executor=FakeExecutor(LIMITS, seeded=True)) as server:
        yield server


def plain(choice: inference_pb2.Choice) -> inference_pb2.Choice:
    """What does not depend on which choice it is, nor on the rounds that it took."""
    choice.delta.index = choice.finished.index = 0
    choice.delta.ClearField("drafted")
    for field in ("timing", "speculation"):
        choice.finished.usage.ClearField(field)
    return choice


async def test_each_choice_equals_a_request_with_its_seed(live):
    """Five choices on two slots, among them stop strings, stop ids and lengths."""
    fields = {"include": ALL | {"receipt": True}, "stopping": {"maxTokens": 40, "minTokens": 3}}
    whole = await live.inference.Complete(message(choices=5, sampling={"seed": 7}, **fields))
    assert whole.started.seed == 7
    assert [choice.finished.index for choice in whole.choices] == [*range(5)]
    assert [choice.delta.index for choice in whole.choices] == [*range(5)]
    assert len({tuple(choice.delta.token_ids) for choice in whole.choices}) == 5
    for index, choice in enumerate(whole.choices):
        seed = {"seed": choice_seed(7, index)}
        alone = await live.inference.Complete(message(sampling=seed, **fields))
        assert plain(choice) == plain(alone.choices[0])
        assert choice.finished.receipt.sampling.seed == choice_seed(7, index)


async def test_a_stream_of_choices(live):
    request = message(choices=3, include=ALL, stopping={"maxTokens": 20}, sampling={"seed": 3})
    stream = await rest_of(live.inference.Generate(request))
    assert [event.sequence for event in stream] == list(range(len(stream)))
    kinds = [event.WhichOneof("kind") for event in stream]
    assert kinds[0] == "started"
    assert (kinds.count("started"), kinds.count("finished")) == (1, 3)
    ended = set()
    for event in stream[1:]:
        part = event.delta if event.HasField("delta") else event.finished
        assert part.index not in ended, "a piece behind the end of its choice"
        if event.HasField("finished"):
            ended.add(part.index)
    assert ended == {0, 1, 2}
    folded = inference_pb2.CompleteResponse()
    for event in stream:
        fold(folded, event)
    unary = await live.inference.Complete(request)
    assert [*map(plain, folded.choices)] == [*map(plain, unary.choices)]
    usages = [choice.finished.usage for choice in folded.choices]
    delivered = [len(choice.delta.token_ids) for choice in folded.choices]
    assert [usage.completion_tokens for usage in usages] == delivered
    assert len({usage.prompt_tokens for usage in usages}) == 1


async def test_a_choice_that_meets_its_stop_string_leaves_the_others_alone(live, tokenizer):
    request = message(choices=3, sampling={"seed": 5}, stopping={"maxTokens": 30}, include=ALL)
    free = await live.inference.Complete(request)
    texts = [choice.delta.text for choice in free.choices]
    stop = next(c for c in texts[1] if c not in texts[0] and c not in texts[2])
    request.stopping.stop_strings.append(stop)
    whole = await live.inference.Complete(request)
    reasons = [choice.finished.reason for choice in whole.choices]
    assert reasons[1] == inference_pb2.FINISH_REASON_STOP
    assert whole.choices[1].delta.text == texts[1].partition(stop)[0]
    for index in (0, 2):
        assert plain(whole.choices[index]) == plain(free.choices[index])
    await settled(live)


async def test_cancel_ends_all_choices(checkpoint):
    executor = FakeExecutor(LIMITS, decode_delay_s=0.02, seeded=True)
    async with live_server(checkpoint, executor=executor) as live:
        request = message(
            requestId="mine", choices=4, include=ALL, stopping={"ignoreEos": True, "maxTokens": 99}
        )
        call = live.inference.Generate(request)
        stream = [await call.read() for _ in range(4)]
        cancel = inference_pb2.CancelRequest(request_id="mine")
        assert (await live.inference.Cancel(cancel)).found
        stream += await rest_of(call)
        whole = inference_pb2.CompleteResponse()
        for event in stream:
            fold(whole, event)
        assert [choice.finished.reason for choice in whole.choices] == [
            inference_pb2.FINISH_REASON_CANCELLED
        ] * 4
        for choice in whole.choices:
            assert choice.finished.usage.completion_tokens == len(choice.delta.token_ids)
        assert not (await live.inference.Cancel(cancel)).found
        assert live.engine.counters.aborted == 4
        await settled(live)


async def test_closing_the_call_frees_the_slots_of_all_choices(checkpoint):
    executor = FakeExecutor(LIMITS, decode_delay_s=0.02)
    async with live_server(checkpoint, executor=executor) as live:
        call = live.inference.Generate(message(choices=4, stopping={"ignoreEos": True}))
        await call.read()
        call.cancel()
        await settled(live)


async def test_all_choices_are_admitted_or_none(checkpoint):
    executor = FakeExecutor(LIMITS, decode_delay_s=0.02)
    async with live_server(checkpoint, executor=executor, max_waiting_requests=4) as live:
        running = live.inference.Generate(message(choices=2, stopping={"ignoreEos": True}))
        for _ in range(3):
            await running.read()
        waiting = live.inference.Generate(message(choices=2, stopping={"ignoreEos": True}))
        await until(lambda: live.engine.load().waiting == 2)
        failure = await failure_of(live.inference.Generate(message(choices=3)))
        assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        text = "the waiting queue is full: 5 waiting requests; at most 4; retry in 1 s"
        assert failure.text == text
        assert live.engine.load().waiting == 2
        failure = await failure_of(live.inference.Generate(message(choices=5)))
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.text == "choices is 5, must be at most 4"
        assert live.engine.load().waiting == 2
        for call in (running, waiting):
            call.cancel()


async def test_an_engine_that_fails_fails_the_call_of_all_choices(checkpoint):
    executor = FakeExecutor(LIMITS, fail_on=("decode", 3))
    async with live_server(checkpoint, executor=executor) as live:
        request = message(choices=3, stopping={"ignoreEos": True})
        failure = await failure_of(live.inference.Generate(request))
        assert failure.code is grpc.StatusCode.INTERNAL
