"""The picture of a load test: memory, slots, tokens per second and latencies over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from load_testing.monitor import Series
from load_testing.tally import Tally

WINDOWS = 60
"""Points of the curves of latencies."""
MB = 1e6


def draw(path: Path, series: Series, tally: Tally, begun_at: float, warm_at: float) -> None:
    """Writes a PNG.

    Raises:
      ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 7), layout="constrained", sharex=True)
    loads_at = np.asarray(series.load_at) - begun_at
    _memory(axes[0, 0], series, begun_at, warm_at)
    _slots(axes[0, 1], loads_at, series)
    axes[1, 0].plot(loads_at, [load.tokens_per_second for load in series.loads], linewidth=0.8)
    axes[1, 0].set(title="Tokens per second", ylim=(0, None))
    _latencies(axes[1, 1], tally, begun_at)
    for axis in axes[1]:
        axis.set_xlabel("seconds")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _memory(axis: Any, series: Series, begun_at: float, warm_at: float) -> None:
    at = np.asarray(series.memory_at) - begun_at
    axis.plot(at, np.asarray(series.memory_bytes) / MB)
    peak = max(series.memory_bytes, default=0) / MB
    axis.axvspan(0, warm_at - begun_at, alpha=0.15, label="warm-up")
    axis.set(title="Resident memory of the server, MB", ylim=(0, 1.15 * max(peak, 1)))
    axis.legend()


def _slots(axis: Any, at: np.ndarray, series: Series) -> None:
    for name in ("running", "prefilling", "waiting"):
        axis.plot(at, [getattr(load, name) for load in series.loads], label=name, linewidth=0.8)
    axis.set(title="Slots and waiting requests", ylim=(0, None))
    pages = axis.twinx()
    pages.plot(at, [load.pages_used for load in series.loads], color="grey", linewidth=0.6)
    pages.set(ylabel="pages held", ylim=(0, None))
    axis.legend()


def _latencies(axis: Any, tally: Tally, begun_at: float) -> None:
    """Percentiles per window, each token counted."""
    at = np.asarray(tally.token_times_at) - begun_at
    milliseconds = 1000 * np.asarray(tally.token_times_s)
    counts = np.asarray(tally.token_counts)
    if not at.size:
        return
    edges = np.linspace(0, at.max(), WINDOWS + 1)
    windows = np.clip(np.digitize(at, edges) - 1, 0, WINDOWS - 1)
    filled = np.unique(windows)
    middles = (edges[filled] + edges[filled + 1]) / 2
    for percentile in (50, 99):
        values = [
            np.percentile(
                np.repeat(milliseconds[windows == window], counts[windows == window]), percentile
            )
            for window in filled
        ]
        axis.plot(middles, values, label=f"p{percentile}")
    axis.set(title="Time per token behind the first, ms", ylim=(0, None))
    axis.legend()
