"""A progress bar with bytes per second, where somebody watches."""

from __future__ import annotations

import sys
import time
from typing import Any


class ByteProgress:
    """Called with the bytes done and the bytes in all; a bar (tqdm) on a terminal, else silent."""

    def __init__(self, what: str) -> None:
        """The clock starts."""
        self._what = what
        self._began_at = time.monotonic()
        self._bar: Any = None
        self._found: int | None = None
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        """Moves the bar; what the first call finds done does not count for the speed."""
        if self._found is None:
            self._found = self._done = done
        if self._bar is None and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, desc=self._what, unit="B", unit_scale=True)
        if self._bar is not None:
            self._bar.update(done - self._done)
        self._done = done

    def summary(self) -> str:
        """Closes the bar; bytes, seconds and bytes per second in words."""
        if self._bar is not None:
            self._bar.close()
        seconds = time.monotonic() - self._began_at
        count = self._done - (self._found or 0)
        rate = count / max(seconds, 1e-6)
        return f"{count / 1e6:.1f} MB in {seconds:.1f} s, {rate / 1e6:.1f} MB/s"
