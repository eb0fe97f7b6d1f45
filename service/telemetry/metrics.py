"""Prometheus metrics: what the engine counted, how long replies took, how calls ended.

Names have the stems that dashboards of other engines use, so that these port by search and replace.
A request here is a choice of a call, as in `EngineCounters`; all times are in seconds.
"""

import importlib.metadata
import logging
from collections.abc import Callable

import grpc
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)

from service.engine.engine import Engine
from service.interceptors import GENERATING_METHODS
from service.model_card import ModelCard
from service.telemetry.engine_metrics import MODEL_LABEL, PREFIX, EngineCollector

logger = logging.getLogger(__name__)

REJECTIONS = frozenset(
    {
        *("WARMING_UP", "DRAINING", "QUEUE_FULL", "DEADLINE_TOO_SHORT"),
        *("RATE_LIMITED", "TOO_MANY_CALLS"),
    }
)
"""Reasons (ErrorInfo.reason) with which calls that generate are refused before they begin."""

WAITS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
    *(10, 20, 40, 80, 160, 320, 640, 1280),
)
TOKEN_TIMES_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04),
    *(0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5),
)
TOKENS = tuple(float(2**power) for power in range(19))
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token", WAITS_S),
    "request_queue_time_seconds": (
        "From arrival to the slot, of requests that got a first token",
        WAITS_S,
    ),
    "request_prefill_time_seconds": ("From the slot to the first token", WAITS_S),
    "inter_token_latency_seconds": (
        "Time between two deliveries to a request, divided by the tokens of the later one and "
        "observed once for each of them; the tokens of the first delivery are not in it",
        TOKEN_TIMES_S,
    ),
    "request_time_per_output_token_seconds": (
        "From the first token to the end, divided by the tokens behind the first, of requests that "
        "ended with more than one token",
        TOKEN_TIMES_S,
    ),
    "request_decode_time_seconds": (
        "From the first token to the end, of requests that ended with a token",
        WAITS_S,
    ),
    "e2e_request_latency_seconds": ("From arrival to the end, of requests that ended", WAITS_S),
    "request_prompt_tokens": ("Prompt tokens of requests that ended", TOKENS),
    "request_generation_tokens": ("Tokens delivered to requests that ended", TOKENS),
}
"""By stem: what is observed, and the bounds of the buckets. A request ends with its Finished, also
when it was cancelled by id, but not when its call broke."""


def installed_version() -> str:
    """Returns the version of the distribution; "unknown" when a checkout runs uninstalled."""
    try:
        return importlib.metadata.version("tandem-inference")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


class ServerMetrics:
    """The metrics of one server, in a registry of their own.

    It observes replies (`service/reply.py`) and calls (`service/interceptors.py`).
    """

    def __init__(self, card: ModelCard, engine: Callable[[], Engine | None]) -> None:
        """Registers everything.

        Args:
          card: of the served model.
          engine: returns the engine that serves now; called on threads of the HTTP server.
        """
        disable_created_metrics()  # a time series more for each, which nobody plots
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._model_name = card.name
        self.registry.register(EngineCollector(card.name, engine))
        self._histograms = {
            stem: Histogram(
                PREFIX + stem, help_text, (MODEL_LABEL,), buckets=bounds, registry=self.registry
            ).labels(card.name)
            for stem, (help_text, bounds) in HISTOGRAMS.items()
        }
        self._calls = self._counter("grpc_calls", "Calls that ended", "method", "code")
        self._call_seconds = Histogram(
            PREFIX + "grpc_call_duration_seconds",
            "How long calls took",
            ("method",),
            buckets=WAITS_S,
            registry=self.registry,
        )
        self._rejections = self._counter(
            "admission_rejections", "Calls refused before they began", MODEL_LABEL, "reason"
        )
        build_labels = {
            "version": installed_version(),
            MODEL_LABEL: card.name,
            "fingerprint": card.fingerprint,
        }
        Gauge(
            PREFIX + "build_info",
            "Always 1: its labels say what is served, and by which version",
            tuple(build_labels),
            registry=self.registry,
        ).labels(**build_labels).set(1)

    def first_token(self, queued: float | None, waited: float) -> None:
        """See `ReplyObserver`."""
        self._observe("time_to_first_token_seconds", waited)
        if queued is not None:
            self._observe("request_queue_time_seconds", queued)
            self._observe("request_prefill_time_seconds", waited - queued)

    def delivered(self, tokens: int, since_last: float) -> None:
        """See `ReplyObserver`."""
        for _ in range(tokens):
            self._observe("inter_token_latency_seconds", since_last / tokens)

    def finished(
        self, prompt_tokens: int, completion_tokens: int, first_token: float | None, total: float
    ) -> None:
        """See `ReplyObserver`."""
        self._observe("request_prompt_tokens", prompt_tokens)
        self._observe("request_generation_tokens", completion_tokens)
        self._observe("e2e_request_latency_seconds", total)
        if first_token is None:
            return
        decoded = total - first_token
        self._observe("request_decode_time_seconds", decoded)
        if completion_tokens > 1:
            per_token = decoded / (completion_tokens - 1)
            self._observe("request_time_per_output_token_seconds", per_token)

    def call_ended(self, method: str, code: grpc.StatusCode, reason: str, seconds: float) -> None:
        """See `CallObserver`."""
        self._calls.labels(method, code.name).inc()
        self._call_seconds.labels(method).observe(seconds)
        if reason in REJECTIONS and method in GENERATING_METHODS:
            self._rejections.labels(self._model_name, reason).inc()

    def _observe(self, stem: str, value: float) -> None:
        self._histograms[stem].observe(value)

    def _counter(self, stem: str, help_text: str, *labels: str) -> Counter:
        return Counter(PREFIX + stem, help_text, labels, registry=self.registry)


class MetricsEndpoint:
    """Answers scrapes over HTTP, on threads of its own."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Listens.

        Args:
          registry: what to show.
          host: address to listen on.
          port: 0 takes any free one.

        Raises:
          OSError: it cannot listen there; names host, port and why.
        """
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise OSError(f"metrics_port {host}:{port}: {error.strerror}") from error
        self.port = self._server.server_port
        logger.info("metrics on http://%s:%d/metrics", host, self.port)

    def close(self) -> None:
        """Stops listening; takes up to half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
