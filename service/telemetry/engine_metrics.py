"""The metrics that are read from the engine at each scrape: its totals, and how full it is."""

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.engine.counters import EngineCounters
from service.engine.engine import Engine
from service.engine.scheduler import Load
from service.engine.types import FinishReason

PREFIX = "tandem_"
MODEL_LABEL = "model_name"

TOTALS: dict[str, tuple[str, Callable[[EngineCounters], int]]] = {
    "prompt_tokens": (
        "Prompt tokens of requests whose first token came",
        lambda counters: counters.prompt_tokens,
    ),
    "generation_tokens": (
        "Tokens generated for requests that were still read; those that came together with a stop "
        "string, behind it, are counted and not delivered",
        lambda counters: counters.generated_tokens,
    ),
    "requests_aborted": (
        "Requests given up by a client, by id, or because the engine stopped",
        lambda counters: counters.aborted,
    ),
    "requests_expired": (
        "Requests dropped from the waiting queue because their deadline had passed",
        lambda counters: counters.expired,
    ),
    "requests_failed": (
        "Requests lost because the engine failed, or the model's output was not finite",
        lambda counters: (
            counters.failed + counters.dead_ends + counters.finished[FinishReason.NOT_FINITE]
        ),
    ),
    "engine_restarts": ("Engines that replaced a lost one", lambda counters: counters.restarts),
    "spec_decode_num_drafts": (
        "Rounds in which a request emitted tokens; each verifies 0 to draft_length draft tokens",
        lambda counters: counters.rounds,
    ),
    "spec_decode_num_draft_tokens": ("Draft tokens verified", lambda counters: counters.drafted),
    "spec_decode_num_accepted_tokens": (
        "Draft tokens accepted",
        lambda counters: counters.accepted,
    ),
}
"""By the metric's stem: what it counts, and where it is counted."""

GAUGES: dict[str, tuple[str, Callable[[Load], float]]] = {
    "num_requests_running": (
        "Requests that hold a slot: prefilling or decoding",
        lambda load: load.running + load.prefilling,
    ),
    "num_requests_waiting": ("Requests without a slot", lambda load: load.waiting),
    "num_tokens_waiting": ("Prompt tokens of waiting requests", lambda load: load.waiting_tokens),
    "kv_cache_usage_perc": (
        "Share of the pages of the KV caches that are held, in [0, 1]",
        lambda load: load.pages_used / load.pages,
    ),
    "num_slots": ("Slots in all", lambda load: load.slots),
}
"""By the metric's stem: what it shows, and how it is read; all are 0 while there is no engine."""


class EngineCollector(Collector):
    """Reads the engine that serves, on the scraper's thread.

    An engine counts on where the one that it replaces stopped, so totals never go back.
    """

    def __init__(self, model_name: str, engine: Callable[[], Engine | None]) -> None:
        """Reads nothing yet.

        Args:
          model_name: value of the label that every metric has.
          engine: returns the engine that serves now.
        """
        self._model_name = model_name
        self._engine = engine
        self._counters = EngineCounters(0)

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics as they are now."""
        engine = self._engine()
        load = None
        if engine is not None:
            self._counters, load = engine.counters, engine.load()
        for stem, (help_text, count) in TOTALS.items():
            counter = self._counter(stem, help_text)
            counter.add_metric((self._model_name,), count(self._counters))
            yield counter
        ended = self._counter("request_success", "Requests that ended, by why", "finished_reason")
        for reason, requests in self._counters.finished.items():
            if reason is not FinishReason.NOT_FINITE:
                ended.add_metric((self._model_name, reason.name.lower()), requests)
        yield ended
        accepted = self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Rounds that accepted the draft token at a position; the first is 0",
            "position",
        )
        for position, rounds in enumerate(self._counters.accepted_per_position):
            accepted.add_metric((self._model_name, str(position)), rounds)
        yield accepted
        for stem, (help_text, read) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + stem, help_text, labels=(MODEL_LABEL,))
            gauge.add_metric((self._model_name,), 0 if load is None else read(load))
            yield gauge

    def _counter(self, stem: str, help_text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(PREFIX + stem, help_text, labels=(MODEL_LABEL, *labels))
