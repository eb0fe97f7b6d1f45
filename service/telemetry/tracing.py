"""OpenTelemetry traces: one server span per call, whose parent is the caller's (W3C context).

OpenTelemetry is an optional extra: this module is imported when traces are asked for, never else.
"""

import contextvars
import dataclasses
from typing import Any

import grpc
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service.interceptors import (
    GENERATING_METHODS,
    OWN_PREFIX,
    Behaviour,
    Context,
    Continuation,
    Handler,
    current_request_id,
    with_behaviour,
)
from service.model_card import ModelCard
from service.telemetry.logs import current_trace_id
from service.telemetry.metrics import installed_version

SERVER_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""Codes that make a span an error; the others are the caller's doing."""


@dataclasses.dataclass(slots=True)
class CallSpan:
    """The span of one call, and what its choices have told so far."""

    span: Span
    begun: bool = False
    """A choice has its first token."""
    output_tokens: int = 0


current_span: contextvars.ContextVar[CallSpan | None] = contextvars.ContextVar(
    "current_span", default=None
)
"""Of the call in whose context the code runs; each call runs in a context of its own."""


def recording() -> CallSpan | None:
    """Returns the current span; None when there is none, it is not sampled, or it has ended."""
    call = current_span.get()
    return call if call is not None and call.span.is_recording() else None


class TracingInterceptor(grpc.aio.ServerInterceptor):
    """Makes the spans of our own services' calls; to be the outermost interceptor.

    It observes replies (`service/reply.py`) and calls (`service/interceptors.py`).
    """

    def __init__(self, card: ModelCard, processor: SpanProcessor) -> None:
        """Makes spans.

        Args:
          card: of the served model.
          processor: what ended spans are given to.
        """
        version = installed_version()
        resource = Resource.create({SERVICE_NAME: "tandem", SERVICE_VERSION: version})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(processor)
        self._provider: TracerProvider | None = provider
        self._tracer = provider.get_tracer("tandem", version)
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = card.name

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(OWN_PREFIX):
            return handler

        def wrap(behaviour: Behaviour) -> Behaviour:
            async def traced(request: Any, context: Context) -> Any:
                span = self._start(method, context)
                current_span.set(CallSpan(span))
                current_trace_id.set(f"{span.get_span_context().trace_id:032x}")
                try:
                    return await behaviour(request, context)
                finally:
                    span.end()

            return traced

        return with_behaviour(handler, wrap)

    def _start(self, method: str, context: Context) -> Span:
        name = method.removeprefix("/")
        attributes = {"rpc.system.name": "grpc", "rpc.method": name}
        if method in GENERATING_METHODS:
            attributes["gen_ai.operation.name"] = "text_completion"
            attributes["gen_ai.request.model"] = self._model_name
        carrier = {key: str(value) for key, value in context.invocation_metadata() or ()}
        return self._tracer.start_span(
            name,
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes=attributes,
        )

    def call_ended(self, method: str, code: grpc.StatusCode, reason: str, seconds: float) -> None:
        """See `CallObserver`."""
        if (call := recording()) is None:
            return
        call.span.set_attribute("rpc.response.status_code", code.name)
        if request_id := current_request_id.get():
            call.span.set_attribute("tandem.request_id", request_id)
        if code in SERVER_FAULTS:
            call.span.set_status(Status(StatusCode.ERROR, reason))
            call.span.set_attribute("error.type", reason or code.name)

    def first_token(self, queued: float | None, waited: float) -> None:
        """See `ReplyObserver`; the first choice of a call stands for all."""
        if (call := recording()) is None or call.begun:
            return
        call.begun = True
        call.span.set_attribute("gen_ai.response.time_to_first_chunk", waited)
        times = {"tandem.time_to_first_token_seconds": waited}
        if queued is not None:
            times["tandem.queue_seconds"] = queued
        call.span.add_event("tandem.first_token", times)

    def delivered(self, tokens: int, since_last: float) -> None:
        """See `ReplyObserver`; too many to be told."""

    def finished(
        self, prompt_tokens: int, completion_tokens: int, first_token: float | None, total: float
    ) -> None:
        """See `ReplyObserver`."""
        if (call := recording()) is None:
            return
        call.output_tokens += completion_tokens
        call.span.set_attribute("gen_ai.usage.input_tokens", prompt_tokens)
        call.span.set_attribute("gen_ai.usage.output_tokens", call.output_tokens)

    def close(self) -> None:
        """Gives what has ended to the processor and waits for it; on any thread, and again."""
        provider, self._provider = self._provider, None
        if provider is not None:
            provider.shutdown()
