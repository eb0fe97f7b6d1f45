"""How full the server is, as WatchLoad tells it."""

import time
from collections.abc import Callable

from service.engine.engine import Engine
from service.errors import Violation, invalid_argument
from service.pb import model_pb2
from service.translation import duration

DEFAULT_INTERVAL_S = 1.0
MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 3600.0


def watch_interval(request: model_pb2.WatchLoadRequest) -> float:
    """Returns the seconds between two messages.

    Raises:
      ServiceError: INVALID_ARGUMENT.
    """
    if not request.HasField("interval"):
        return DEFAULT_INTERVAL_S
    seconds = request.interval.seconds + request.interval.nanos / 1e9
    if not MIN_INTERVAL_S <= seconds <= MAX_INTERVAL_S:
        limit = f"from {MIN_INTERVAL_S:g} s to {MAX_INTERVAL_S:g} s"
        raise invalid_argument([Violation("interval", f"{seconds:g} s", limit)])
    return seconds


class LoadMeter:
    """Makes the messages of one WatchLoad: rates are those since the message before."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Has no message before; `clock` gives seconds."""
        self._clock = clock
        self._read_at: float | None = None
        self._generated = self._drafted = self._accepted = 0

    def read(self, engine: Engine) -> model_pb2.Load:
        """Returns the load of the engine that serves now."""
        load, counters, now = engine.load(), engine.counters, self._clock()
        message = model_pb2.Load(
            running=load.running,
            prefilling=load.prefilling,
            waiting=load.waiting,
            waiting_tokens=load.waiting_tokens,
            slots=load.slots,
            pages_used=load.pages_used,
            pages=load.pages,
        )
        if self._read_at is not None:
            elapsed = now - self._read_at
            message.tokens_per_second = (counters.generated_tokens - self._generated) / elapsed
            if drafted := counters.drafted - self._drafted:
                message.draft_acceptance = (counters.accepted - self._accepted) / drafted
        if (wait := engine.estimated_wait()) is not None:
            message.estimated_wait_duration.CopyFrom(duration(wait))
        self._read_at = now
        self._generated = counters.generated_tokens
        self._drafted, self._accepted = counters.drafted, counters.accepted
        return message
