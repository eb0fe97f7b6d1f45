"""Traces: one span per call, below the caller's; nothing at all unless asked for."""

import asyncio
import concurrent.futures
import contextlib
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from fakes import FakeExecutor
from live_server import LIMITS, failure_of, health_stub, live_server, message, rest_of, until
from service.pb import inference_pb2, model_pb2, tokenizer_pb2
from service.telemetry import telemetry
from service.telemetry.tracing import TracingInterceptor

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
SAMPLED = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"), ("tracestate", "vendor=1"))
NOT_SAMPLED = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-00"),)
ROOT = Path(__file__).resolve().parents[2]
COLLECTOR = "http://127.0.0.1:1"


@pytest.fixture
def spans(monkeypatch) -> InMemorySpanExporter:
    """Where the spans of the test's servers go, which are made with `otlp_endpoint`."""
    exporter = InMemorySpanExporter()

    def interceptor(endpoint, card):
        assert endpoint == COLLECTOR
        return TracingInterceptor(card, SimpleSpanProcessor(exporter))

    monkeypatch.setattr(telemetry, "tracing_interceptor", interceptor)
    return exporter


def traced_server(checkpoint, **settings):
    return live_server(checkpoint, otlp_endpoint=COLLECTOR, **settings)


async def test_a_call_is_a_span_below_the_callers(checkpoint, card, spans):
    async with traced_server(checkpoint) as live:
        request = message(
            "brown fox", requestId="traced", choices=2, stopping={"maxTokens": 9, "ignoreEos": True}
        )
        *_, last = await rest_of(live.inference.Generate(request, metadata=SAMPLED))
    (span,) = spans.get_finished_spans()
    assert span.name == "tandem.v1.InferenceService/Generate"
    assert span.kind is SpanKind.SERVER
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert span.parent is not None and f"{span.parent.span_id:016x}" == PARENT_ID
    assert span.context.trace_state.get("vendor") == "1"
    assert span.status.status_code is StatusCode.UNSET
    attributes = dict(span.attributes or {})
    waited = attributes.pop("gen_ai.response.time_to_first_chunk")
    assert attributes == {
        "rpc.system.name": "grpc",
        "rpc.method": "tandem.v1.InferenceService/Generate",
        "rpc.response.status_code": "OK",
        "tandem.request_id": "traced",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": card.name,
        "gen_ai.usage.input_tokens": last.finished.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": 18,
    }
    (event,) = span.events
    assert event.name == "tandem.first_token"
    times = dict(event.attributes or {})
    assert times.pop("tandem.time_to_first_token_seconds") == waited
    assert 0 <= times.pop("tandem.queue_seconds") <= waited
    assert not times
    assert span.start_time <= event.timestamp <= span.end_time
    assert span.resource.attributes["service.name"] == "tandem"


async def test_spans_of_failures(checkpoint, spans):
    async with traced_server(checkpoint, warm=False) as live:
        await failure_of(live.model.GetModel(model_pb2.GetModelRequest()))
        await live.server.serve(live.executor)
        await failure_of(live.inference.Complete(message(sampling={"temperature": -1})))
    unavailable, invalid = spans.get_finished_spans()
    assert (unavailable.attributes or {})["rpc.response.status_code"] == "UNAVAILABLE"
    assert (unavailable.attributes or {})["error.type"] == "WARMING_UP"
    assert unavailable.status.status_code is StatusCode.ERROR
    assert "gen_ai.request.model" not in (unavailable.attributes or {})
    assert (invalid.attributes or {})["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert invalid.status.status_code is StatusCode.UNSET  # the caller's mistake


async def test_the_span_of_a_call_that_its_client_gives_up(checkpoint, spans):
    executor = FakeExecutor(LIMITS, stepped=True)
    async with traced_server(checkpoint, executor=executor) as live:
        call = live.inference.Generate(message(stopping={"ignoreEos": True}))
        executor.allow(2)
        await call.read()
        await call.read()
        call.cancel()
        await until(spans.get_finished_spans)
        executor.allow(100)
    (span,) = spans.get_finished_spans()
    assert (span.attributes or {})["rpc.response.status_code"] == "CANCELLED"
    assert [event.name for event in span.events] == ["tandem.first_token"]


@pytest.mark.parametrize("metadata", [(), (("traceparent", "00-zz-1-01"),)])
async def test_a_call_without_a_context_begins_a_trace(checkpoint, spans, metadata):
    request = tokenizer_pb2.TokenizeRequest(text="fox")
    async with traced_server(checkpoint) as live:
        for _ in range(2):
            await live.tokenizer.Tokenize(request, metadata=metadata)
    first, second = spans.get_finished_spans()
    assert first.parent is second.parent is None
    assert first.context.trace_id != second.context.trace_id


async def test_callers_decide_what_is_sampled_and_probes_are_not(checkpoint, spans):
    async with traced_server(checkpoint) as live:
        await live.inference.Complete(message(), metadata=NOT_SAMPLED)
        await health_stub(live.channel).Check(health_pb2.HealthCheckRequest(), metadata=SAMPLED)
    assert not spans.get_finished_spans()


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """What an OpenTelemetry collector answers to."""

    def __init__(self) -> None:
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []

    def Export(self, request, context):
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextlib.contextmanager
def collector():
    """Serves on a free port of its own; yields it and what it gets."""
    service = Collector()
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port, service
    finally:
        server.stop(0).wait()


async def test_spans_reach_a_collector_before_the_server_has_drained(checkpoint):
    with collector() as (port, service):
        async with live_server(checkpoint, otlp_endpoint=f"http://127.0.0.1:{port}") as live:
            await live.inference.Complete(message(), metadata=SAMPLED)
        (exported,) = service.requests
    (span,) = exported.resource_spans[0].scope_spans[0].spans
    assert span.trace_id.hex() == TRACE_ID
    assert span.name == "tandem.v1.InferenceService/Complete"


async def test_a_collector_that_is_gone_does_not_hold_the_server_up(checkpoint):
    async with asyncio.timeout(60):
        async with live_server(checkpoint, otlp_endpoint=COLLECTOR) as live:
            response = await live.inference.Complete(message())
    finished = response.choices[0].finished
    assert finished.reason != inference_pb2.FINISH_REASON_UNSPECIFIED


def test_packages_that_are_missing_are_named(card, monkeypatch):
    name = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RuntimeError, match=r"pip install 'tandem-inference\[tracing\]'"):
        telemetry.tracing_interceptor(COLLECTOR, card)


def test_nothing_is_imported_unless_it_is_asked_for():
    script = "import sys, service.server; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0
