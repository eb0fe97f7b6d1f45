"""All that a server tells of itself, put together from its settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from service.config import ServerConfig
from service.engine.engine import Engine
from service.model_card import ModelCard
from service.telemetry.metrics import MetricsEndpoint, ServerMetrics
from service.telemetry.orca import OrcaInterceptor

if TYPE_CHECKING:
    from service.telemetry.tracing import TracingInterceptor

EXPORT_TIMEOUT_S = 5.0
"""How long a collector of traces may take, which is also what one that is gone costs at the end."""


class Telemetry:
    """Metrics, traces and load reports of one server."""

    def __init__(
        self, config: ServerConfig, card: ModelCard, engine: Callable[[], Engine | None]
    ) -> None:
        """Prepares what the settings ask for; nothing listens yet.

        Args:
          config: of the server.
          card: of the served model.
          engine: returns the engine that serves now; called on any thread.

        Raises:
          RuntimeError: traces are asked for, and OpenTelemetry is not installed.
        """
        self._config = config
        self._endpoint: MetricsEndpoint | None = None
        self.metrics = ServerMetrics(card, engine)
        self.load_reports = OrcaInterceptor(engine)
        """Interceptor, to be inside of those that refuse calls."""
        endpoint = config.otlp_endpoint
        self.tracing = None if endpoint is None else tracing_interceptor(endpoint, card)
        """Interceptor, to be outside of all others; None when there are no traces."""
        self.observers = (self.metrics,) if self.tracing is None else (self.metrics, self.tracing)
        """Of calls, and of replies."""

    @property
    def metrics_port(self) -> int | None:
        """Where metrics are; None while they are nowhere."""
        return None if self._endpoint is None else self._endpoint.port

    def listen(self) -> None:
        """Starts to answer scrapes, if the settings ask for it.

        Raises:
          OSError: the port is taken; names it.
        """
        if self._config.metrics_port is not None:
            host = self._config.metrics_host or self._config.host
            self._endpoint = MetricsEndpoint(
                self.metrics.registry, host.strip("[]"), self._config.metrics_port
            )

    async def close(self) -> None:
        """Stops to answer scrapes, and sends the traces that have not been sent. May be called again."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await asyncio.to_thread(endpoint.close)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


def tracing_interceptor(endpoint: str, card: ModelCard) -> TracingInterceptor:
    """Returns what makes traces and sends them to a collector.

    Raises:
      RuntimeError: OpenTelemetry is not installed; says how to.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from service.telemetry.tracing import TracingInterceptor
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"otlp_endpoint is {endpoint}, and traces need packages that are not installed "
            f"({error.name}): pip install 'tandem-inference[tracing]'"
        ) from error
    exporter = OTLPSpanExporter(endpoint, timeout=EXPORT_TIMEOUT_S)
    return TracingInterceptor(card, BatchSpanProcessor(exporter))
