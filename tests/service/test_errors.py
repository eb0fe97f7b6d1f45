"""Failures through a real server: code, sentence, details, trailers, and what they leave behind."""

import grpc
import pytest

from fakes import FakeExecutor
from live_server import LIMITS, failure_of, live_server, message, rest_of, until
from service.errors import from_exception
from service.pb import inference_pb2, model_pb2, tokenizer_pb2

ENDLESS = {"ignoreEos": True}


@pytest.fixture
async def live(checkpoint):
    async with live_server(checkpoint) as server:
        yield server


def info(failure) -> tuple[str, str]:
    detail = failure.details["ErrorInfo"]
    return detail.domain, detail.reason


@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_bad_fields(live, method):
    bad = message(sampling={"temperature": 3, "topP": 0}, stopping={"maxTokens": 0})
    failure = await failure_of(getattr(live.inference, method)(bad))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.text == (
        "sampling.temperature is 3, must be in [0, 2]; sampling.top_p is 0, must be in (0, 1]; "
        "stopping.max_tokens is 0, must be at least 1"
    )
    assert set(failure.details) == {"ErrorInfo", "BadRequest"}
    assert info(failure) == ("tandem", "INVALID_FIELD")
    assert dict(failure.details["ErrorInfo"].metadata) == {
        "field": "sampling.temperature",
        "actual": "3",
        "limit": "in [0, 2]",
    }
    fields = [item.field for item in failure.details["BadRequest"].field_violations]
    assert fields == ["sampling.temperature", "sampling.top_p", "stopping.max_tokens"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"text": ""}, "text is 0 tokens, must be at least 1 token"),
        (
            {"text": "\0" * 300},
            "text is 300 tokens, must be at most 255 tokens (context less one)",
        ),
        ({"text": "x" * 2_000_000}, "text is 2000000 bytes, must be at most 8192 bytes"),
        ({"tokens": {"ids": [1, 2, 400]}}, "tokens.ids[2] is 400, must be in [0, 400)"),
    ],
)
async def test_bad_prompts_beside_a_running_stream(live, fields, text):
    running = live.inference.Generate(message(stopping=ENDLESS))
    await running.read()
    failure = await failure_of(live.inference.Generate(message(**fields)))
    assert (failure.code, failure.text) == (grpc.StatusCode.INVALID_ARGUMENT, text)
    *_, last = await rest_of(running)
    assert last.finished.reason == inference_pb2.FINISH_REASON_CONTEXT_LENGTH


async def test_bad_tokenizer_requests(live):
    failure = await failure_of(
        live.tokenizer.Detokenize(tokenizer_pb2.DetokenizeRequest(token_ids=[1, 399, 2**32 - 1]))
    )
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.text == (
        "token_ids[1] is 399, must be an id of the vocabulary; "
        "token_ids[2] is 4294967295, must be an id of the vocabulary"
    )
    text = "x" * ((8 << 20) + 1)
    failure = await failure_of(live.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text=text)))
    assert failure.text == "text is 8388609 bytes, must be at most 8388608 bytes"


async def test_cancel_needs_an_id(live):
    failure = await failure_of(live.inference.Cancel(inference_pb2.CancelRequest()))
    assert failure.text == "request_id is empty, must be the id of a request"
    unknown = inference_pb2.CancelRequest(request_id="unknown")
    assert not (await live.inference.Cancel(unknown)).found


async def test_an_id_that_is_running(checkpoint):
    executor = FakeExecutor(LIMITS, decode_delay_s=0.02)
    async with live_server(checkpoint, executor=executor) as live:
        running = live.inference.Generate(message(requestId="mine", stopping=ENDLESS))
        await running.read()
        failure = await failure_of(live.inference.Generate(message(requestId="mine")))
        assert failure.code is grpc.StatusCode.ALREADY_EXISTS
        assert failure.text == "request_id mine is running; it may be used again afterwards"
        assert info(failure) == ("tandem", "REQUEST_ID_RUNNING")
        running.cancel()


async def test_a_full_queue(checkpoint):
    executor = FakeExecutor(LIMITS, decode_delay_s=0.02)
    async with live_server(checkpoint, executor=executor, max_waiting_requests=1) as live:
        running = []
        for _ in range(2):  # one after the other: only one may wait
            running.append(live.inference.Generate(message(stopping=ENDLESS)))
            await running[-1].read()
        waiting = live.inference.Generate(message(stopping=ENDLESS))
        await until(lambda: live.engine.load().waiting == 1)
        failure = await failure_of(live.inference.Generate(message()))
        assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        text = "the waiting queue is full: 2 waiting requests; at most 1; retry in 1 s"
        assert failure.text == text
        assert info(failure) == ("tandem", "QUEUE_FULL")
        assert failure.details["RetryInfo"].retry_delay.ToSeconds() == 1
        (violation,) = failure.details["QuotaFailure"].violations
        assert violation.subject == "waiting_requests"
        assert violation.description == "2 waiting requests; at most 1"
        assert failure.trailers["grpc-retry-pushback-ms"] == "1000"
        for call in (*running, waiting):
            call.cancel()


async def test_before_the_model_is_warm(checkpoint):
    async with live_server(checkpoint, warm=False) as live:
        for call in (
            live.inference.Generate(message()),
            live.inference.Complete(message()),
            live.model.GetModel(model_pb2.GetModelRequest()),
        ):
            failure = await failure_of(call)
            assert failure.code is grpc.StatusCode.UNAVAILABLE
            assert failure.text == "the model is being loaded and compiled"
            assert info(failure) == ("tandem", "WARMING_UP")
            assert failure.details["RetryInfo"].retry_delay.ToSeconds() == 1
            assert failure.trailers["grpc-retry-pushback-ms"] == "1000"
        assert (await live.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text="x"))).token_ids
        assert not (await live.inference.Cancel(inference_pb2.CancelRequest(request_id="x"))).found


async def test_an_engine_that_fails(checkpoint, caplog):
    executor = FakeExecutor(LIMITS, fail_on=("decode", 3))
    async with live_server(checkpoint, executor=executor, engine_restarts=0) as live:
        request = message(requestId="mine", stopping=ENDLESS)
        failure = await failure_of(live.inference.Generate(request))
        assert failure.code is grpc.StatusCode.INTERNAL
        assert failure.text == "internal error in request mine; the server's log says more"
        assert failure.details["RequestInfo"].request_id == "mine"
        assert "scripted failure" not in failure.text
        assert "scripted failure of decode" in caplog.text
        failure = await failure_of(live.inference.Generate(request))
        assert failure.code is grpc.StatusCode.UNAVAILABLE
        assert info(failure) == ("tandem", "ENGINE_UNAVAILABLE")


async def test_a_bug_is_internal_and_tells_no_trace(live, monkeypatch, caplog):
    def broken(_):
        raise KeyError("secret")

    monkeypatch.setattr(live.engine, "submit_choices", broken)
    failure = await failure_of(live.inference.Complete(message(requestId="mine")))
    assert failure.code is grpc.StatusCode.INTERNAL
    assert "secret" not in f"{failure}"
    assert "KeyError: 'secret'" in caplog.text


async def test_one_log_line_per_call(live, caplog):
    caplog.set_level("INFO", logger="service.interceptors")
    await live.inference.Complete(message(requestId="good", stopping={"maxTokens": 1}))
    await failure_of(live.inference.Complete(message("", requestId="bad")))
    lines = [
        record.getMessage() for record in caplog.records if record.name.startswith("service.i")
    ]
    assert len(lines) == 2
    assert lines[0].startswith("/tandem.v1.InferenceService/Complete request_id=good ms=")
    assert lines[0].endswith(" OK")
    assert lines[1].endswith(" INVALID_ARGUMENT text is 0 tokens, must be at least 1 token")


def test_an_unknown_exception_has_no_details_of_its_own():
    failure = from_exception(ZeroDivisionError("x"), "")
    assert failure.message == "internal error in request (no id); the server's log says more"
