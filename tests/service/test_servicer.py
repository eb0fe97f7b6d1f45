"""Generation through a real server: what streams, what it adds up to, and what ends it."""

import asyncio

import grpc
import pytest

from fakes import FakeExecutor, fake_logprob
from live_server import LIMITS, live_server, message, rest_of, settled, until
from service.pb import inference_pb2, model_pb2, tokenizer_pb2
from service.translation import fold

TEXT = "The quick brown fox jumps"
ALL = {"tokenIds": True, "drafted": True}


def endless(**settings) -> FakeExecutor:
    """Counts through ids on and on, slowly enough to be interrupted."""
    return FakeExecutor(LIMITS, decode_delay_s=0.02, **settings)


async def events(live, request) -> list[inference_pb2.GenerateResponse]:
    return [event async for event in live.inference.Generate(request)]


def joined(stream: list[inference_pb2.GenerateResponse]) -> inference_pb2.CompleteResponse:
    response = inference_pb2.CompleteResponse()
    for event in stream:
        fold(response, event)
    return response


def without_timing(response: inference_pb2.CompleteResponse) -> inference_pb2.CompleteResponse:
    response.choices[0].finished.usage.ClearField("timing")
    return response


@pytest.fixture
async def live(checkpoint, tokenizer, card):
    script = [*tokenizer.encode(TEXT), *card.end_ids]
    async with live_server(checkpoint, replies={"scripted": script}) as server:
        yield server


async def test_a_stream_is_started_deltas_finished(live, tokenizer, card):
    stream = await events(live, message(requestId="scripted", include=ALL))
    assert [event.sequence for event in stream] == list(range(len(stream)))
    kinds = [event.WhichOneof("kind") for event in stream]
    assert kinds == ["started", *["delta"] * (len(stream) - 2), "finished"]
    started, finished = stream[0].started, stream[-1].finished
    assert started.request_id == "scripted"
    assert (started.model, started.fingerprint) == (card.name, card.fingerprint)
    assert started.prompt_tokens == len(tokenizer.encode("fox"))
    whole = joined(stream)
    assert whole.choices[0].delta.text == TEXT
    assert list(whole.choices[0].delta.token_ids) == [*tokenizer.encode(TEXT), *card.end_ids]
    assert finished.reason == inference_pb2.FINISH_REASON_END_OF_SEQUENCE
    assert finished.stop_token_id == card.end_ids[0]


async def test_usage_equals_what_was_delivered(live):
    for max_tokens in (1, 2, 3, 5, 8, 64):
        request = message(stopping={"maxTokens": max_tokens, "ignoreEos": True}, include=ALL)
        whole = joined(await events(live, request))
        usage, delta = whole.choices[0].finished.usage, whole.choices[0].delta
        assert usage.completion_tokens == len(delta.token_ids) == len(delta.drafted) == max_tokens
        assert whole.choices[0].finished.reason == inference_pb2.FINISH_REASON_MAX_TOKENS
        speculation = usage.speculation
        assert speculation.num_accepted_draft_tokens == sum(delta.drafted)
        histogram = speculation.acceptance_histogram
        assert sum(histogram) == speculation.num_spec_steps
        assert sum(n * count for n, count in enumerate(histogram)) == sum(delta.drafted)
        timing = usage.timing
        assert timing.first_token_duration.ToMicroseconds() > 0
        assert (
            timing.queue_duration.ToMicroseconds()
            <= timing.first_token_duration.ToMicroseconds()
            <= timing.total_duration.ToMicroseconds()
        )


@pytest.mark.parametrize("stopping", [{}, {"stopStrings": ["own fox"]}, {"maxTokens": 3}])
async def test_complete_is_the_fold_of_generate(live, stopping):
    request = message(
        requestId="scripted",
        sampling={"seed": 1},
        include=ALL | {"receipt": True},
        stopping=stopping,
        speculation={"maxDraftTokens": 2},
    )
    streamed = joined(await events(live, request))
    unary = await live.inference.Complete(request)
    assert without_timing(unary) == without_timing(streamed)


async def test_the_seed_in_use_is_told(live):
    whole = await live.inference.Complete(message(stopping={"maxTokens": 1}, sampling={"seed": 0}))
    assert whole.started.seed == 0
    request = message(stopping={"maxTokens": 1})
    seeds = {(await live.inference.Complete(request)).started.seed for _ in range(4)}
    assert len(seeds) > 1


async def test_what_is_not_included_is_not_sent(live):
    request = message(requestId="scripted")
    whole = await live.inference.Complete(request)
    assert whole.choices[0].delta == inference_pb2.Delta(text=TEXT)
    assert whole.choices[0].finished.usage.completion_tokens > 1
    request.include.text = False
    stream = await events(live, request)
    assert [event.WhichOneof("kind") for event in stream] == ["started", "finished"]


async def test_queue_time_is_told_apart_from_the_rest(checkpoint):
    executor = FakeExecutor(LIMITS, decode_delay_s=0.02)
    async with live_server(checkpoint, executor=executor) as live:
        request = message(stopping={"maxTokens": 30, "ignoreEos": True})
        calls = [live.inference.Complete(request) for _ in range(3)]
        timings = [(await call).choices[0].finished.usage.timing for call in calls]
        queued = sorted(timing.queue_duration.ToMicroseconds() for timing in timings)
        assert all(timing.HasField("queue_duration") for timing in timings)
        # Two slots; the third waits for one of them: at least five calls.
        assert queued[1] < queued[2]
        assert queued[2] > 60_000


async def test_cancelled_while_waiting_it_has_no_queue_time(checkpoint):
    async with live_server(checkpoint, executor=endless()) as live:
        running = [live.inference.Generate(message(stopping={"ignoreEos": True})) for _ in "ab"]
        await until(lambda: live.engine.load().running == 2)
        call = live.inference.Complete(message(requestId="mine"))
        await until(lambda: live.engine.load().waiting == 1)
        assert (await live.inference.Cancel(inference_pb2.CancelRequest(request_id="mine"))).found
        timing = (await call).choices[0].finished.usage.timing
        assert timing.HasField("total_duration")
        assert not timing.HasField("queue_duration")
        for other in running:
            other.cancel()


@pytest.mark.parametrize("cap", [0, 1, 2])
async def test_min_tokens_come_before_any_end(live, tokenizer, card, cap):
    """`scripted` ends after its text; ids that are barred give way to the next one."""
    length = len(tokenizer.encode(TEXT))
    for least in (length, length + 1, length + 5):
        request = message(
            requestId="scripted",
            stopping={"minTokens": least, "maxTokens": 60, "stopTokenIds": list(range(350, 353))},
            speculation={"maxDraftTokens": cap},
            include=ALL,
        )
        whole = await live.inference.Complete(request)
        token_ids = list(whole.choices[0].delta.token_ids)
        ends = {*card.end_ids, 350, 351, 352}
        assert not ends & set(token_ids[:least])
        assert len(token_ids) >= least
        if least == length:
            assert token_ids[-1] in card.end_ids
    whole = await live.inference.Complete(
        message(stopping={"minTokens": 5, "maxTokens": 5, "ignoreEos": True})
    )
    assert whole.choices[0].finished.usage.completion_tokens == 5


async def test_stop_strings_are_not_looked_for_in_the_text_of_min_tokens(live, tokenizer):
    token_ids = tokenizer.encode(TEXT)
    stop = {"stopStrings": ["quick", "jumps"]}
    request = message(requestId="scripted", stopping=stop | {"minTokens": 0})
    assert (await live.inference.Complete(request)).choices[0].delta.text == "The "
    least = len(token_ids) - len(tokenizer.encode(" jumps"))
    request = message(requestId="scripted", stopping=stop | {"minTokens": least})
    choice = (await live.inference.Complete(request)).choices[0]
    assert choice.delta.text == "The quick brown fox "
    assert choice.finished.stop_string == "jumps"


async def test_max_draft_tokens_caps_the_rounds(live):
    for cap, drafted in ((0, False), (2, True)):
        request = message(requestId="scripted", speculation={"maxDraftTokens": cap}, include=ALL)
        whole = await live.inference.Complete(request)
        assert any(whole.choices[0].delta.drafted) == drafted
        assert whole.choices[0].finished.usage.HasField("speculation") == drafted
        assert whole.choices[0].delta.text == TEXT


@pytest.mark.parametrize("cap", [0, 1, 2])
async def test_a_stop_string_ends_the_reply_and_is_never_shown(live, tokenizer, cap):
    stopping = {"stopStrings": ["nothing", "own fox"]}
    request = message(
        requestId="scripted",
        stopping=stopping,
        speculation={"maxDraftTokens": cap},
        include=ALL,
    )
    stream = await events(live, request)
    whole = joined(stream)
    assert whole.choices[0].delta.text == "The quick br"
    assert whole.choices[0].finished.reason == inference_pb2.FINISH_REASON_STOP
    assert whole.choices[0].finished.stop_string == "own fox"
    assert whole.choices[0].finished.usage.completion_tokens == len(
        whole.choices[0].delta.token_ids
    )
    assert tokenizer.decode(whole.choices[0].delta.token_ids).startswith("The quick brown fox")
    assert not tokenizer.decode(whole.choices[0].delta.token_ids[:-1]).endswith("own fox")
    await settled(live)


async def test_a_stop_string_that_never_completes_holds_nothing_back(live):
    stopping = {"stopStrings": ["own foxy", "jumps!"]}
    whole = await live.inference.Complete(message(requestId="scripted", stopping=stopping))
    assert whole.choices[0].delta.text == TEXT
    assert whole.choices[0].finished.reason == inference_pb2.FINISH_REASON_END_OF_SEQUENCE


async def test_a_stop_id_is_delivered_without_its_text(live, tokenizer):
    token_ids = tokenizer.encode(TEXT)
    stop_id = token_ids[3]
    shown = token_ids[: token_ids.index(stop_id)]
    request = message(requestId="scripted", stopping={"stopTokenIds": [stop_id]}, include=ALL)
    whole = await live.inference.Complete(request)
    assert whole.choices[0].finished.reason == inference_pb2.FINISH_REASON_STOP
    assert whole.choices[0].finished.stop_token_id == stop_id
    assert tuple(whole.choices[0].delta.token_ids) == (*shown, stop_id)
    assert whole.choices[0].delta.text == tokenizer.decode(shown)


async def test_ignore_eos_goes_on_to_the_budget(live):
    stopping = {"ignoreEos": True, "maxTokens": 50}
    whole = await live.inference.Complete(message(requestId="scripted", stopping=stopping))
    assert whole.choices[0].finished.usage.completion_tokens == 50
    assert whole.choices[0].finished.reason == inference_pb2.FINISH_REASON_MAX_TOKENS


async def test_an_unset_budget_reaches_the_end_of_the_context(live, tokenizer):
    stopping = {"ignoreEos": True}
    whole = await live.inference.Complete(message(stopping=stopping))
    prompt_tokens = len(tokenizer.encode("fox"))
    assert whole.choices[0].finished.reason == inference_pb2.FINISH_REASON_CONTEXT_LENGTH
    assert whole.choices[0].finished.usage.completion_tokens == LIMITS.max_context - prompt_tokens


async def test_a_character_is_never_split(checkpoint, tokenizer):
    text = "👨\u200d👩\u200d👧 漢字 हिन्दी"
    script = {"scripted": tokenizer.encode(text)}
    async with live_server(checkpoint, replies=script) as live:
        stopping = {"maxTokens": len(script["scripted"])}
        stream = await events(live, message(requestId="scripted", stopping=stopping))
        assert joined(stream).choices[0].delta.text == text
        stopping["maxTokens"] = 2  # inside the first character
        whole = await live.inference.Complete(message(requestId="scripted", stopping=stopping))
        assert whole.choices[0].delta.text == tokenizer.decode(script["scripted"][:2]) == "\ufffd"


async def test_a_slow_reader_gets_everything(live):
    call = live.inference.Generate(message(stopping={"ignoreEos": True}, include=ALL))
    whole = inference_pb2.CompleteResponse()
    async for event in call:
        await asyncio.sleep(0.01)
        fold(whole, event)
    assert (
        len(whole.choices[0].delta.token_ids)
        == whole.choices[0].finished.usage.completion_tokens
        > 200
    )


@pytest.mark.parametrize("tokens_first", [0, 1, 4])
async def test_cancelling_the_call_frees_the_slot(checkpoint, tokens_first):
    async with live_server(checkpoint, executor=endless()) as live:
        call = live.inference.Generate(message(include=ALL, stopping={"ignoreEos": True}))
        for _ in range(1 + tokens_first):
            await call.read()
        call.cancel()
        await settled(live)
        assert live.engine.counters.aborted == 1


async def test_cancelling_at_any_time_leaves_nothing_behind(checkpoint):
    async with live_server(checkpoint, executor=FakeExecutor(LIMITS, decode_delay_s=0.002)) as live:
        for n in range(40):
            call = live.inference.Generate(message("fox " * n, stopping={"ignoreEos": True}))
            await asyncio.sleep(n * 0.0007)
            call.cancel()
        await settled(live)
        whole = await live.inference.Complete(message(stopping={"maxTokens": 3}))
        assert whole.choices[0].finished.usage.completion_tokens == 3


async def test_cancelling_a_waiting_call_frees_its_place(checkpoint):
    async with live_server(checkpoint, executor=endless()) as live:
        calls = [live.inference.Generate(message(stopping={"ignoreEos": True})) for _ in range(3)]
        await until(lambda: (live.engine.load().running, live.engine.load().waiting) == (2, 1))
        calls[2].cancel()
        await until(lambda: live.engine.load().waiting == 0)
        assert live.engine.load().running == 2
        for call in calls:
            call.cancel()
        await settled(live)


async def test_losing_the_connection_frees_the_slot(checkpoint):
    async with live_server(checkpoint, executor=endless()) as live:
        async with grpc.aio.insecure_channel(live.target) as channel:
            generate = channel.unary_stream(
                "/tandem.v1.InferenceService/Generate",
                request_serializer=inference_pb2.GenerateRequest.SerializeToString,
                response_deserializer=inference_pb2.GenerateResponse.FromString,
            )
            call = generate(message(stopping={"ignoreEos": True}))
            await call.read()
        await settled(live)


@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_the_deadline_frees_the_slot(checkpoint, method):
    async with live_server(checkpoint, executor=endless()) as live:
        call = getattr(live.inference, method)(message(stopping={"ignoreEos": True}), timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            if method == "Complete":
                await call
            else:
                async for _ in call:
                    pass
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await settled(live)


async def test_cancel_ends_a_stream_with_what_was_generated(checkpoint):
    async with live_server(checkpoint, executor=endless()) as live:
        request = message(requestId="mine", include=ALL, stopping={"ignoreEos": True})
        call = live.inference.Generate(request)
        stream = [await call.read() for _ in range(4)]
        cancel = inference_pb2.CancelRequest(request_id="mine")
        assert (await live.inference.Cancel(cancel)).found
        stream += await rest_of(call)
        whole = joined(stream)
        assert whole.choices[0].finished.reason == inference_pb2.FINISH_REASON_CANCELLED
        assert (
            whole.choices[0].finished.usage.completion_tokens
            == len(whole.choices[0].delta.token_ids)
            > 0
        )
        assert not (await live.inference.Cancel(cancel)).found
        await settled(live)


async def test_cancel_ends_a_unary_call_too(checkpoint):
    async with live_server(checkpoint, executor=endless()) as live:
        call = live.inference.Complete(message(requestId="mine", stopping={"ignoreEos": True}))
        cancel = inference_pb2.CancelRequest(request_id="mine")
        await until(lambda: live.engine.load().running)
        assert (await live.inference.Cancel(cancel)).found
        whole = await call
        assert whole.choices[0].finished.reason == inference_pb2.FINISH_REASON_CANCELLED


async def test_cancel_shows_what_was_held_back(checkpoint, tokenizer):
    script = {"mine": tokenizer.encode("own fo")}
    executor = endless(replies=script, stepped=True)
    executor.allow(1)
    async with live_server(checkpoint, executor=executor) as live:
        request = message("x", requestId="mine", stopping={"stopStrings": ["own fox"]}, include=ALL)
        call = live.inference.Generate(request)
        stream = [await call.read(), await call.read()]
        assert stream[1].delta.text == ""
        assert (await live.inference.Cancel(inference_pb2.CancelRequest(request_id="mine"))).found
        executor.allow(100)
        stream += await rest_of(call)
        assert (
            joined(stream).choices[0].delta.text
            == tokenizer.decode(stream[1].delta.token_ids)
            != ""
        )
        await settled(live)


async def test_tokenize_and_detokenize(live, tokenizer, card):
    text = "漢字 fox<|end|>"
    request = tokenizer_pb2.TokenizeRequest(text=text)
    response = await live.tokenizer.Tokenize(request)
    assert tuple(response.token_ids) == tokenizer.encode(text)
    assert response.token_ids[-1] == card.end_ids[0]
    assert not response.token_bytes
    request.include_token_bytes = True
    spelled = (await live.tokenizer.Tokenize(request)).token_bytes
    assert b"".join(spelled).decode() == text
    back = tokenizer_pb2.DetokenizeRequest(token_ids=response.token_ids)
    assert (await live.tokenizer.Detokenize(back)).text == "漢字 fox"
    back.include_special_tokens = True
    assert (await live.tokenizer.Detokenize(back)).text == text
    empty = await live.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest())
    assert not empty.token_ids


async def test_get_model(live, card):
    model = (await live.model.GetModel(model_pb2.GetModelRequest())).model
    assert (model.name, model.fingerprint) == (card.name, card.fingerprint)
    assert model.context_length == 256
    assert model.vocab_size == 400
    assert (model.slots, model.draft_length, model.page_size) == (2, 2, 4)
    assert (model.pages, model.speculation_bytes_per_slot) == (
        live.engine.limits.pages - 1,
        live.engine.limits.speculation_bytes_per_slot,
    )
    assert list(model.end_token_ids) == list(card.end_ids)
    assert model.limits.max_message_bytes == 64 << 20
    assert model.limits.max_prompt_bytes == 256 * 32
    assert model.limits.max_stop_token_ids == 3
    assert model.limits.max_waiting_requests == 256
    defaults = model.defaults
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.5, 20, 0.75)
    assert (defaults.min_p, defaults.repetition_penalty) == (0, 1)
    assert (defaults.frequency_penalty, defaults.presence_penalty) == (0, 0)
    assert defaults.max_draft_tokens == 2
    assert (model.limits.max_logit_bias, model.limits.max_choices) == (64, 8)


async def test_logprobs_are_aligned_with_tokens_and_absent_unless_asked_for(live):
    asked = message(text=TEXT, stopping={"maxTokens": 9}, include={**ALL, "logprobs": True})
    whole = joined(await events(live, asked)).choices[0].delta
    assert list(whole.logprobs) == [fake_logprob(token) for token in whole.token_ids]
    unary = (await live.inference.Complete(asked)).choices[0].delta
    assert unary.logprobs == whole.logprobs
    silent = message(text=TEXT, stopping={"maxTokens": 9}, include=ALL)
    assert not joined(await events(live, silent)).choices[0].delta.logprobs


async def test_logprobs_end_with_the_token_that_completes_a_stop_string(live):
    request = message(
        text=TEXT,
        requestId="scripted",
        stopping={"stopStrings": ["fox"]},
        include={**ALL, "logprobs": True},
    )
    delta = joined(await events(live, request)).choices[0].delta
    assert len(delta.logprobs) == len(delta.token_ids) > 0
