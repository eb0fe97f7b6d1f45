"""ORCA load reports: how full the server is, for load balancers, in the trailers of calls.

gRPC's own balancers (weighted round robin) weigh servers by `rps_fractional`, `eps` and
`application_utilization`; gateways read the named metrics, which have the names of /metrics.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from service.engine.engine import Engine
from service.errors import from_exception
from service.interceptors import (
    GENERATING_METHODS,
    Behaviour,
    Context,
    Continuation,
    Handler,
    with_behaviour,
)
from service.telemetry.engine_metrics import GAUGES

TRAILER = "endpoint-load-metrics-bin"
NAMED_METRICS = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
ERRORS = frozenset(
    {
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
    }
)
"""Codes with which a server that fails at once, and so looks idle, would attract more calls."""
RATE_WINDOW_S = 10.0


def orca_load_report() -> Any:
    """Returns the class of xds.data.orca.v3.OrcaLoadReport with the fields that are sent.

    The package that has the whole of it (xds-protos) overwrites files of others
    (googleapis-common-protos, opentelemetry-proto) with older ones. A pool of its own keeps this
    class apart from theirs.
    """
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="xds/data/orca/v3/orca_load_report.proto",
        package="xds.data.orca.v3",
        syntax="proto3",
    )
    report = file.message_type.add(name="OrcaLoadReport")
    for name, number in (("rps_fractional", 6), ("eps", 7), ("application_utilization", 9)):
        report.field.add(
            name=name, number=number, type=field.TYPE_DOUBLE, label=field.LABEL_OPTIONAL
        )
    report.field.add(
        name="named_metrics",
        number=8,
        type=field.TYPE_MESSAGE,
        type_name=".xds.data.orca.v3.OrcaLoadReport.NamedMetricsEntry",
        label=field.LABEL_REPEATED,
    )
    entry = report.nested_type.add(name="NamedMetricsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=field.TYPE_DOUBLE, label=field.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName("xds.data.orca.v3.OrcaLoadReport")
    )


OrcaLoadReport = orca_load_report()


class Rate:
    """Events per second; what lies back more than about `RATE_WINDOW_S` hardly counts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Starts at 0; `clock` gives seconds."""
        self._clock = clock
        self._rate = 0.0
        self._at = clock()

    def count(self) -> None:
        """Counts an event that happens now."""
        self._rate = self.now() + 1 / RATE_WINDOW_S

    def now(self) -> float:
        """Returns the rate."""
        now = self._clock()
        self._rate *= math.exp((self._at - now) / RATE_WINDOW_S)
        self._at = now
        return self._rate


class OrcaInterceptor(grpc.aio.ServerInterceptor):
    """Adds a report to the trailers of each call that generates, also when it fails."""

    def __init__(
        self, engine: Callable[[], Engine | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Has seen no calls.

        Args:
          engine: returns the engine that serves now.
          clock: seconds.
        """
        self._engine = engine
        self._calls = Rate(clock)
        self._errors = Rate(clock)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method not in GENERATING_METHODS:
            return handler
        return with_behaviour(handler, self._reporting)

    def _reporting(self, behaviour: Behaviour) -> Behaviour:
        async def reported(request: Any, context: Context) -> Any:
            try:
                return await behaviour(request, context)
            except Exception as error:
                if from_exception(error, "").code in ERRORS:
                    self._errors.count()
                raise
            finally:
                self._calls.count()
                trailers = (*context.trailing_metadata(), (TRAILER, self.report()))
                context.set_trailing_metadata(trailers)

        return reported

    def report(self) -> bytes:
        """Returns the report as it is now, serialised."""
        report = OrcaLoadReport(rps_fractional=self._calls.now(), eps=self._errors.now())
        if (engine := self._engine()) is not None:
            load = engine.load()
            # Above 1 when requests wait: the balancers take it so.
            busy = load.running + load.prefilling + load.waiting
            report.application_utilization = busy / load.slots
            for stem in NAMED_METRICS:
                report.named_metrics[stem] = GAUGES[stem][1](load)
        return report.SerializeToString()
