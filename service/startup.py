"""What a start goes through, stage by stage: one line each, with the seconds that it took."""

import logging
import time
from collections.abc import Callable

PROGRESS_SECONDS = 5.0
"""Between two lines about a stage that is not over yet."""

logger = logging.getLogger(__name__)


class StartupLog:
    """Times the stages of one start, which follow each other."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """The first stage begins; `clock` gives seconds."""
        self._clock = clock
        self._began_at = self._stage_began_at = clock()
        self._told_at, self._told_bytes = self._began_at, 0
        self._programs_s = 0.0
        self._programs = self._cached = 0

    def stage(self, what: str, read_bytes: int = 0) -> float:
        """Tells that a stage is over, and what it has brought; returns its seconds."""
        now = self._clock()
        seconds, self._stage_began_at = now - self._stage_began_at, now
        self._told_at, self._told_bytes = now, 0
        rate = f", {rate_of(read_bytes, seconds)}" if read_bytes else ""
        logger.info("start-up: %s (%.1f s%s)", what, seconds, rate)
        return seconds

    def progress(self, done: int, total: int) -> None:
        """Tells every few seconds how much of the stage's bytes have been read, and how fast.

        Args:
          done: bytes.
          total: bytes in all; once they are done, `stage` is what tells it.
        """
        now = self._clock()
        seconds = now - self._told_at
        if seconds < PROGRESS_SECONDS or done == total:
            return
        logger.info(
            "start-up: %s of %s read, %d %%, %s",
            megabytes(done),
            megabytes(total),
            100 * done // total,
            rate_of(done - self._told_bytes, seconds),
        )
        self._told_at, self._told_bytes = now, done

    def program(self, name: str, number: int, count: int, *, cached: bool) -> None:
        """Tells that a program has run for the first time.

        Args:
          name: the program.
          number: of this program, from 1.
          count: programs in all.
          cached: it came from the compilation cache as a whole.
        """
        how = "from the compilation cache" if cached else "compiled"
        self._programs += 1
        self._cached += cached
        self._programs_s += self.stage(f"program {number} of {count}, {name}: {how}")

    def ready(self) -> None:
        """Tells that requests are taken, and sums up."""
        logger.info(
            "start-up: ready after %.1f s; %d programs took %.1f s, %d of them were compiled and %d"
            " came from the compilation cache",
            self._clock() - self._began_at,
            self._programs,
            self._programs_s,
            self._programs - self._cached,
            self._cached,
        )


def megabytes(count: int) -> str:
    """Spells a number of bytes in MB of 10^6 bytes."""
    return f"{count / 1e6:.1f} MB"


def rate_of(count: int, seconds: float) -> str:
    """Spells bytes per second."""
    return f"{megabytes(round(count / max(seconds, 1e-6)))}/s"
