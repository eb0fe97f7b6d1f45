"""/metrics: every figure is what was delivered, refused or lost."""

import asyncio
import dataclasses
import logging
import urllib.error
import urllib.request

import grpc
import pytest
from prometheus_client import CollectorRegistry

from fakes import FakeExecutor
from live_server import LIMITS, failure_of, live_server, message, rest_of, settled, until
from scraping import scrape
from service.pb import model_pb2
from service.telemetry.metrics import MetricsEndpoint, ServerMetrics

END = 0
"""Id of the end token of the tests' checkpoint."""
GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "num_tokens_waiting",
    "kv_cache_usage_perc",
)


def greedy(max_tokens: int, **fields):
    stopping = {"maxTokens": max_tokens, "ignoreEos": True}
    return message(stopping=stopping, include={"tokenIds": True}, **fields)


def token_ids(events) -> list[int]:
    return [token for event in events for token in event.delta.token_ids]


@pytest.mark.parametrize("draft_length", [1, 2, 3])
async def test_metrics_equal_what_was_delivered(checkpoint, draft_length):
    limits = dataclasses.replace(LIMITS, draft_length=draft_length)
    executor = FakeExecutor(limits, accepts=(3, 0, 1, 2))
    budgets = [budget for budget in (1, 2, 3, 5, 8, 64) for _ in range(12)]
    async with live_server(checkpoint, executor=executor, metrics_port=0) as live:
        before = await scrape(live)
        replies = await asyncio.gather(
            *(rest_of(live.inference.Generate(greedy(budget))) for budget in budgets)
        )
        await settled(live)
        after = await scrape(live)

    def grown(stem: str, **labels: str) -> float:
        return after(stem, **labels) - before(stem, **labels)

    usages = [reply[-1].finished.usage for reply in replies]
    assert [len(token_ids(reply)) for reply in replies] == budgets
    assert [usage.completion_tokens for usage in usages] == budgets
    requests, tokens = len(budgets), sum(budgets)
    assert grown("generation_tokens_total") == tokens
    assert grown("prompt_tokens_total") == sum(usage.prompt_tokens for usage in usages)
    assert grown("request_success_total") == requests
    assert grown("request_success_total", finished_reason="max_tokens") == requests
    assert grown("time_to_first_token_seconds_count") == requests
    assert grown("request_queue_time_seconds_count") == requests
    assert grown("request_prefill_time_seconds_count") == requests
    assert grown("request_decode_time_seconds_count") == requests
    assert grown("e2e_request_latency_seconds_count") == requests
    assert grown("request_generation_tokens_count") == requests
    assert grown("request_generation_tokens_sum") == tokens
    assert grown("request_generation_tokens_bucket", le="4.0") == 36
    assert grown("request_prompt_tokens_sum") == grown("prompt_tokens_total")
    assert grown("request_time_per_output_token_seconds_count") == requests - 12
    parts = [grown(f"request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
    assert sum(parts) == pytest.approx(grown("e2e_request_latency_seconds_sum"))
    calls = {"method": "/tandem.v1.InferenceService/Generate"}
    assert grown("grpc_calls_total", code="OK", **calls) == requests
    assert grown("grpc_call_duration_seconds_count", **calls) == requests

    speculations = [usage.speculation for usage in usages]
    drafted = sum(speculation.num_draft_tokens for speculation in speculations)
    accepted = sum(speculation.num_accepted_draft_tokens for speculation in speculations)
    assert grown("spec_decode_num_draft_tokens_total") == drafted
    assert grown("spec_decode_num_accepted_tokens_total") == accepted > 0
    assert grown("spec_decode_num_drafts_total") == tokens - accepted
    for position in range(draft_length):
        reached = sum(sum(each.acceptance_histogram[position + 1 :]) for each in speculations)
        name = "spec_decode_num_accepted_tokens_per_pos_total"
        assert grown(name, position=str(position)) == reached
    assert not any(after(stem) for stem in GAUGES)
    assert after("num_slots") == 2


async def test_tokens_behind_the_end_token_are_not_counted(checkpoint):
    """A round that verifies five drafts, the third of which is the end token, commits three."""
    limits = dataclasses.replace(LIMITS, draft_length=5)
    replies = {"one": [11, 12, 13, END, 14, 15, 16]}
    executor = FakeExecutor(limits, replies=replies, accepts=(5,))
    async with live_server(checkpoint, executor=executor, metrics_port=0) as live:
        request = message(requestId="one", include={"tokenIds": True})
        events = await rest_of(live.inference.Generate(request))
        await settled(live)
        now = await scrape(live)
    assert token_ids(events) == [11, 12, 13, END]
    assert now("generation_tokens_total") == now("request_generation_tokens_sum") == 4
    assert now("request_success_total", finished_reason="end_of_sequence") == 1
    assert now("spec_decode_num_drafts_total") == 2
    assert now("spec_decode_num_draft_tokens_total") == 5
    assert now("spec_decode_num_accepted_tokens_total") == 3
    reached = [
        now("spec_decode_num_accepted_tokens_per_pos_total", position=str(position))
        for position in range(5)
    ]
    assert reached == [1, 1, 1, 0, 0]


async def test_inter_token_latency_counts_tokens_behind_the_first_delivery(checkpoint):
    executor = FakeExecutor(LIMITS, stepped=True)
    async with live_server(checkpoint, executor=executor, metrics_port=0) as live:
        call = live.inference.Generate(greedy(40))
        executor.allow(1)
        events = [await call.read(), await call.read()]
        first = len(token_ids(events))
        executor.allow(100)
        events += await rest_of(call)
        now = await scrape(live)
    assert 0 < first < 40
    assert now("inter_token_latency_seconds_count") == 40 - first
    decode = now("request_decode_time_seconds_sum")
    assert now("inter_token_latency_seconds_sum") == pytest.approx(decode, abs=0.1)


def test_inter_token_latency_is_shared_among_the_tokens_of_a_delivery(card):
    metrics = ServerMetrics(card, lambda: None)
    metrics.delivered(4, 0.6)
    metrics.delivered(1, 0.004)
    value = metrics.registry.get_sample_value
    labels = {"model_name": card.name}
    assert value("tandem_inter_token_latency_seconds_count", labels) == 5
    assert value("tandem_inter_token_latency_seconds_sum", labels) == pytest.approx(0.604)
    buckets = {bound: value("tandem_inter_token_latency_seconds_bucket", labels | {"le": bound})
               for bound in ("0.003", "0.005", "0.1", "0.15")}  # fmt: skip
    assert buckets == {"0.003": 0, "0.005": 1, "0.1": 1, "0.15": 5}


async def test_a_request_that_is_given_up(checkpoint):
    """Before its first token it leaves no time behind, after it only that of the first token."""
    executor = FakeExecutor(LIMITS, stepped=True)
    async with live_server(checkpoint, executor=executor, metrics_port=0) as live:
        call = live.inference.Generate(greedy(100))
        await until(lambda: live.engine.load().running == 1)
        now = await scrape(live)
        assert now("num_requests_running") == 1
        assert now("kv_cache_usage_perc") > 0
        call.cancel()
        await until(lambda: live.engine.counters.aborted == 1)
        executor.allow(2)
        await settled(live)
        now = await scrape(live)
        assert now("requests_aborted_total") == 1
        assert now("time_to_first_token_seconds_count") == 0
        assert now("grpc_calls_total", code="CANCELLED") == 1

        call = live.inference.Generate(greedy(100))
        executor.allow(2)
        await call.read()
        await call.read()
        call.cancel()
        executor.allow(100)
        await until(lambda: live.engine.counters.aborted == 2)
        await settled(live)
        now = await scrape(live)
    assert now("time_to_first_token_seconds_count") == 1
    assert now("e2e_request_latency_seconds_count") == 0
    assert now("request_success_total") == 0
    assert now("grpc_calls_total", code="CANCELLED") == 2
    assert not any(now(stem) for stem in GAUGES)


async def test_refused_calls(checkpoint):
    executor = FakeExecutor(dataclasses.replace(LIMITS, slots=1), stepped=True)
    settings = {"max_waiting_requests": 1, "metrics_port": 0, "warm": False}
    async with live_server(checkpoint, executor=executor, **settings) as live:
        await failure_of(live.inference.Generate(greedy(1)))
        await failure_of(live.model.GetModel(model_pb2.GetModelRequest()))
        await live.server.serve(executor)
        running = live.inference.Generate(greedy(1))
        await until(lambda: live.engine.load().running == 1)
        waiting = live.inference.Generate(greedy(1))
        await until(lambda: live.engine.load().waiting == 1)
        now = await scrape(live)
        assert now("num_requests_waiting") == now("num_tokens_waiting") == 1
        full = await failure_of(live.inference.Complete(greedy(1)))
        assert full.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        wrong = message(sampling={"temperature": 9})
        await failure_of(live.inference.Complete(wrong))
        executor.allow(100)
        await rest_of(running)
        await rest_of(waiting)
        await settled(live)
        now = await scrape(live)
    assert now("admission_rejections_total") == 2
    assert now("admission_rejections_total", reason="WARMING_UP") == 1
    assert now("admission_rejections_total", reason="QUEUE_FULL") == 1
    complete = {"method": "/tandem.v1.InferenceService/Complete"}
    assert now("grpc_calls_total", code="RESOURCE_EXHAUSTED", **complete) == 1
    assert now("grpc_calls_total", code="INVALID_ARGUMENT", **complete) == 1
    assert now("grpc_calls_total", code="UNAVAILABLE") == 2
    assert now("time_to_first_token_seconds_count") == 2


async def test_totals_outlive_an_engine(checkpoint):
    executor = FakeExecutor(LIMITS, fail_on=("decode", 6))
    async with live_server(checkpoint, executor=executor, metrics_port=0) as live:
        await rest_of(live.inference.Generate(greedy(3)))
        lost = live.engine
        failure = await failure_of(live.inference.Generate(greedy(200)))
        assert failure.code is grpc.StatusCode.INTERNAL
        await until(lambda: live.engine is not lost)
        generated = lost.counters.generated_tokens
        await rest_of(live.inference.Generate(greedy(5)))
        await settled(live)
        now = await scrape(live)
    assert now("generation_tokens_total") == generated + 5
    assert now("request_success_total") == 2
    assert now("requests_failed_total") == now("engine_restarts_total") == 1
    assert now("time_to_first_token_seconds_count") == 3
    assert not any(now(stem) for stem in GAUGES)


async def test_before_there_is_an_engine(checkpoint, card):
    async with live_server(checkpoint, warm=False, metrics_port=0) as live:
        now = await scrape(live)
    assert now("generation_tokens_total") == now("num_slots") == 0
    assert not any(now(stem) for stem in GAUGES)
    assert now("build_info", model_name=card.name, fingerprint=card.fingerprint) == 1
    assert {"process_resident_memory_bytes", "python_info"} <= now.names


async def test_the_port_is_told_and_closes_with_the_server(checkpoint, caplog):
    caplog.set_level(logging.INFO, "service")
    async with live_server(checkpoint, metrics_port=0) as live:
        url = f"http://127.0.0.1:{live.server.metrics_port}/metrics"
        assert f"metrics on {url}" in caplog.messages
        await scrape(live)
    assert live.server.metrics_port is None
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(urllib.request.urlopen, url)


async def test_no_port_unless_it_is_asked_for(checkpoint):
    async with live_server(checkpoint) as live:
        assert live.server.metrics_port is None


async def test_a_port_in_use_is_an_error(checkpoint):
    endpoint = MetricsEndpoint(CollectorRegistry(), "127.0.0.1", 0)
    try:
        with pytest.raises(OSError, match=f"metrics_port 127.0.0.1:{endpoint.port}: .*in use"):
            async with live_server(checkpoint, metrics_port=endpoint.port):
                pass
    finally:
        endpoint.close()
