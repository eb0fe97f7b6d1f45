"""The waiting queue as clients meet it: full, in turn, in time, and nothing sent before admission."""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf import duration_pb2

from fakes import FakeExecutor, small_limits
from live_server import LIMITS, LiveServer, failure_of, live_server, message, rest_of, until
from service.engine import stream as stream_module
from service.pb import inference_pb2, inference_pb2_grpc
from service.validation import check_duration, first_token_deadline

ENDLESS = {"ignoreEos": True}
SHORT = {"ignoreEos": True, "maxTokens": 4}
RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": "tandem.v1.InferenceService"}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.01s",
                "maxBackoff": "0.01s",
                "backoffMultiplier": 1,
                "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
            },
        }
    ]
}


@contextlib.asynccontextmanager
async def stalled_server(checkpoint, slots: int = 1, **config) -> AsyncIterator[LiveServer]:
    """A server whose device stands still until it is allowed on."""
    limits = dataclasses.replace(LIMITS, slots=slots)
    executor = FakeExecutor(limits, stepped=True)
    async with live_server(checkpoint, executor=executor, **config) as live:
        try:
            yield live
        finally:
            executor.allow(100_000)


@contextlib.asynccontextmanager
async def busy_server(checkpoint, **config) -> AsyncIterator[LiveServer]:
    """A server whose only slot is held until `free_the_slot`."""
    async with stalled_server(checkpoint, **config) as live:
        running = generate(live, requestId="running", stopping=ENDLESS)
        await until(lambda: live.engine.load().running == 1)
        yield live
        running.cancel()


def generate(live: LiveServer, **fields):
    return live.inference.Generate(message(**fields))


def free_the_slot(live: LiveServer) -> None:
    """Lets the device go on, to the end of all requests."""
    live.executor.allow(100_000)


def expect_holds(live: LiveServer, seconds: float) -> None:
    """Makes the engine expect that requests hold their slots for so long."""
    estimates = live.engine._loop._estimates
    for ticket in (-1, -2, -3, -4):
        estimates.admitted([ticket], 0.0)
        estimates.ended(ticket, seconds)


def reason(failure) -> str:
    return failure.details["ErrorInfo"].reason


@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_fifty_at_once_fill_the_queue_and_no_more(checkpoint, method: str):
    async with stalled_server(checkpoint, slots=2, max_waiting_requests=8) as live:
        submit, taken, most = live.engine.submit_choices, 0, 0

        def watched(choices):
            nonlocal taken, most
            streams = submit(choices)
            taken += 1
            most = max(most, live.engine.load().waiting)
            return streams

        live.engine.submit_choices = watched
        call = getattr(live.inference, method)
        calls = [call(message(requestId=f"r{i}", stopping=SHORT)) for i in range(50)]
        await until(lambda: sum(call.done() for call in calls) + taken == 50)
        # The device has not finished anything: who is refused was not kept waiting for it.
        assert live.executor.calls("fetch")[1:] == []
        refused = [call for call in calls if call.done()]
        for call in refused:
            failure = await failure_of(call)
            assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert reason(failure) == "QUEUE_FULL"
            delay_s = failure.details["RetryInfo"].retry_delay.ToMilliseconds() / 1000
            assert 0.1 <= delay_s <= 30
            assert failure.trailers["grpc-retry-pushback-ms"] == f"{delay_s * 1000:.0f}"
            assert failure.details["QuotaFailure"].violations[0].subject == "waiting_requests"
        served = [call for call in calls if call not in refused]
        assert 8 <= len(served) == taken <= 10
        assert most == 8
        free_the_slot(live)
        for call in served:
            if method == "Generate":
                assert (await rest_of(call))[-1].WhichOneof("kind") == "finished"
            else:
                assert (await call).choices[0].finished.usage.completion_tokens == 4
        await until(lambda: live.engine.load().waiting == 0)
        response = await live.inference.Complete(message(stopping=SHORT))
        assert response.choices[0].finished.usage.completion_tokens == 4


async def test_headers_come_with_the_slot_and_not_before(checkpoint):
    async with busy_server(checkpoint) as live:
        call = generate(live, stopping=SHORT)
        headers = asyncio.create_task(call.initial_metadata())
        await until(lambda: live.engine.load().waiting == 1)
        done, _ = await asyncio.wait([headers], timeout=0.05)
        assert not done
        free_the_slot(live)
        await headers
        assert (await rest_of(call))[0].WhichOneof("kind") == "started"


async def test_a_client_that_retries_gets_in_once_there_is_room(checkpoint):
    options = (("grpc.service_config", json.dumps(RETRIES)), ("grpc.enable_retries", 1))
    async with (
        busy_server(checkpoint, max_waiting_requests=1) as live,
        grpc.aio.insecure_channel(live.target, options=options) as channel,
    ):
        waiting = generate(live, stopping=SHORT)
        await until(lambda: live.engine.load().waiting == 1)
        expect_holds(live, 0.01)  # so that the hint is the shortest there is
        submit, attempts = live.engine.submit_choices, 0

        def counted(choices):
            nonlocal attempts
            attempts += 1
            return submit(choices)

        live.engine.submit_choices = counted
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(message(stopping=SHORT))
        await until(lambda: attempts == 1)
        waiting.cancel()
        await until(lambda: attempts == 2)
        await until(lambda: live.engine.load().waiting == 1)
        free_the_slot(live)
        stream = await rest_of(call)
        assert [event.sequence for event in stream] == list(range(len(stream)))
        assert stream[-1].finished.usage.completion_tokens == 4


async def test_a_call_that_waits_can_still_be_retried_when_it_is_dropped(checkpoint):
    """Refused late: even then the client has seen nothing but a status."""
    async with busy_server(checkpoint) as live:
        deadline = time.monotonic() + 0.5
        call = generate(live, firstTokenDeadline="0.5s")
        headers = asyncio.create_task(call.initial_metadata())
        await until(lambda: live.engine.load().waiting == 1)
        await until(lambda: time.monotonic() > deadline)
        assert not headers.done()
        while not call.done():
            live.executor.allow(1)
            await asyncio.sleep(0.01)
        failure = await failure_of(call)
        assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert reason(failure) == "DEADLINE_PASSED"
        facts = failure.details["ErrorInfo"].metadata
        assert "0.000s" < facts["deadline"] <= facts["waited"]
        assert facts["deadline"] <= "0.500s"
        assert failure.text.startswith("first_token_deadline: the first token was wanted within 0.")
        assert not await headers
        assert live.engine.load().waiting == 0
        assert live.engine.load().running == 1


@pytest.mark.parametrize("method", ["Generate", "Complete"])
@pytest.mark.parametrize("timeout", [None, 20])
async def test_what_cannot_begin_in_time_is_refused_at_once(checkpoint, method, timeout):
    """By its own deadline, or by that of the call."""
    async with busy_server(checkpoint) as live:
        expect_holds(live, 1000.0)
        fields = {"firstTokenDeadline": "20s"} if timeout is None else {}
        call = getattr(live.inference, method)(message(**fields), timeout=timeout)
        failure = await failure_of(call)
        assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert reason(failure) == "DEADLINE_TOO_SHORT"
        facts = failure.details["ErrorInfo"].metadata
        assert facts["estimated_wait"] == "1000.000s"
        assert 0 < float(facts["deadline"].removesuffix("s")) < 21  # gRPC rounds up
        assert "it is expected in 1000.00 s" in failure.text
        assert live.engine.load().waiting == 0
        patient = getattr(live.inference, method)(message(stopping=SHORT), timeout=5000)
        await until(lambda: live.engine.load().waiting == 1)
        patient.cancel()
        await until(lambda: live.engine.load().waiting == 0)


async def test_a_reply_that_has_begun_is_left_alone(checkpoint):
    async with live_server(checkpoint, executor=FakeExecutor(LIMITS, decode_delay_s=0.02)) as live:
        stream = await rest_of(generate(live, firstTokenDeadline="0.2s", stopping=ENDLESS))
        assert stream[-1].finished.reason == inference_pb2.FINISH_REASON_CONTEXT_LENGTH
        assert stream[-1].finished.usage.timing.total_duration.ToMilliseconds() > 200


async def test_a_higher_class_is_served_first_and_a_lower_one_in_the_end(checkpoint):
    async with busy_server(checkpoint) as live:
        calls = []
        classes = ["LOW", "NORMAL", *["HIGH"] * 6, "UNSPECIFIED"]
        for number, name in enumerate(classes):
            calls.append(
                generate(
                    live,
                    requestId=f"{name}{number}",
                    priority=f"PRIORITY_{name}",
                    stopping={"maxTokens": 1},
                )
            )
            await until(lambda number=number: live.engine.load().waiting == number + 1)
        free_the_slot(live)
        for call in calls:
            await rest_of(call)
        order = [entry[2] for entry in live.executor.calls("insert")]
        first = ["running", "HIGH2", "HIGH3", "HIGH4", "HIGH5", "LOW0", "NORMAL1"]
        assert order == [*first, "HIGH6", "HIGH7", "UNSPECIFIED8"]


async def test_who_asks_is_told_its_place_until_it_starts(checkpoint, monkeypatch):
    monkeypatch.setattr(stream_module, "QUEUE_INTERVAL_S", 0.001)
    async with busy_server(checkpoint) as live:
        before = generate(live, requestId="before", stopping=SHORT)
        await until(lambda: live.engine.load().waiting == 1)
        call = generate(live, include={"queue": True}, stopping=SHORT)
        first = await call.read()
        assert first.queued == inference_pb2.Queued(position=1)
        expect_holds(live, 8.0)
        before.cancel()
        second = await call.read()
        assert second.queued.position == 0
        assert second.queued.estimated_wait_duration.ToMilliseconds() == 8000
        free_the_slot(live)
        stream = [first, second, *await rest_of(call)]
        assert [event.sequence for event in stream] == list(range(len(stream)))
        kinds = [event.WhichOneof("kind") for event in stream]
        assert kinds[:3] == ["queued", "queued", "started"]
        assert "queued" not in kinds[3:]


async def test_who_waits_can_be_cancelled_by_its_id_and_by_its_call(checkpoint):
    async with busy_server(checkpoint) as live:
        by_id, by_call = generate(live, requestId="mine"), generate(live)
        await until(lambda: live.engine.load().waiting == 2)
        by_call.cancel()
        await until(lambda: live.engine.load().waiting == 1)
        assert (await live.inference.Cancel(inference_pb2.CancelRequest(request_id="mine"))).found
        stream = await rest_of(by_id)
        assert [event.WhichOneof("kind") for event in stream] == ["started", "finished"]
        assert stream[-1].finished.reason == inference_pb2.FINISH_REASON_CANCELLED
        assert live.engine.load().waiting == 0


async def test_a_huge_prompt_freezes_nobody_and_is_not_starved(checkpoint):
    """Two running streams, a prompt of almost the whole context, and short requests on and on."""
    limits = small_limits(vocab_size=400, max_context=512, pages=1 + 4 * 128)
    executor = FakeExecutor(limits, accepts=(0,), decode_delay_s=0.002)
    async with live_server(checkpoint, executor=executor) as live:
        running = [generate(live, requestId=f"running{i}", stopping=ENDLESS) for i in range(2)]
        for call in running:
            await call.read()
        huge = generate(
            live,
            requestId="huge",
            tokens={"ids": [7] * 405},  # 50 full chunks and a half
            stopping=SHORT,
        )
        finished = asyncio.create_task(rest_of(huge))
        served = 0
        while not finished.done():
            short = generate(live, requestId=f"short{served}", stopping={"maxTokens": 1})
            assert (await rest_of(short))[-1].WhichOneof("kind") == "finished"
            served += 1
        assert (await finished)[-1].finished.usage.completion_tokens == 4
        inserted = [entry[2] for entry in executor.calls("insert")]
        assert inserted.index("short0") < inserted.index("huge")
        assert served > 1
        log = [entry[0] for entry in executor.log if entry[0] in ("prefill", "decode", "wait")]
        begun = log.index("decode")
        pairs = list(zip(log[begun:], log[begun + 1 :], strict=False))
        assert ("prefill", "prefill") not in pairs  # each chunk is followed by a decode call
        for call in running:
            call.cancel()


@pytest.mark.parametrize(
    ("seconds", "nanos", "accepted"),
    [
        (0, 1, True),
        (315_576_000_000, 999_999_999, True),
        (0, 0, False),
        (-1, 0, False),
        (0, -1, False),
        (1, -1, False),
        (1, 1_000_000_000, False),
        (315_576_000_001, 0, False),
    ],
)
def test_a_deadline_is_a_time_span_above_0(seconds: int, nanos: int, accepted: bool):
    span = duration_pb2.Duration(seconds=seconds, nanos=nanos)
    violations = list(check_duration("first_token_deadline", span))
    assert [violation.field for violation in violations] == ["first_token_deadline"] * (
        not accepted
    )


async def test_bad_fields_are_named_together(checkpoint):
    request = message(firstTokenDeadline="-1.5s")
    request.priority = 7  # type: ignore[assignment]
    async with live_server(checkpoint) as live:
        failure = await failure_of(live.inference.Generate(request))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.text == (
        "priority is 7, must be one of LOW, NORMAL, HIGH (1, 2, 3); first_token_deadline is "
        "-1 s -500000000 ns, must be above 0, with seconds at most 315576000000 and nanos in "
        "[0, 999999999]"
    )


def test_the_earlier_deadline_counts():
    own = message(firstTokenDeadline="2.5s")
    assert first_token_deadline(own, 100.0, None) == 102.5
    assert first_token_deadline(own, 100.0, 1.5) == 101.5
    assert first_token_deadline(own, 100.0, 3.5) == 102.5
    assert first_token_deadline(message(), 100.0, 3.5) == 103.5
    assert first_token_deadline(message(), 100.0, None) is None
