"""From what was seen to a verdict, as data and as a table."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from load_testing.monitor import Series
from load_testing.tally import End, Tally
from load_testing.workload import Behaviour

PERCENTILES = (50, 90, 99)
FEWEST_READINGS = 8
"""Readings of memory below which its growth is not judged."""
MB = 1e6


@dataclasses.dataclass(frozen=True)
class MemoryBound:
    """How much memory may grow between the first and the last quarter after warm-up."""

    megabytes: float
    percent: float


def percentiles(values: Sequence[float], weights: Sequence[int] | None = None) -> dict[str, float]:
    """Returns the percentiles and the maximum; a value of weight n counts n times."""
    if not values:
        return {}
    samples = np.asarray(values)
    if weights is not None:
        samples = np.repeat(samples, np.asarray(weights))
    found = {f"p{p}": float(np.percentile(samples, p)) for p in PERCENTILES}
    return {**found, "max": float(samples.max())}


def memory_growth(
    series: Series, warm_at: float, end_at: float, bound: MemoryBound
) -> tuple[dict[str, float], list[str]]:
    """Compares the first quarter after warm-up with the last; returns figures and problems."""
    after = [
        size
        for at, size in zip(series.memory_at, series.memory_bytes, strict=True)
        if warm_at <= at <= end_at
    ]
    if len(after) < FEWEST_READINGS:
        return {}, []
    quarter = len(after) // 4
    begin, end = statistics.median(after[:quarter]), statistics.median(after[-quarter:])
    growth = end - begin
    figures = {
        "begin_mb": begin / MB,
        "end_mb": end / MB,
        "growth_mb": growth / MB,
        "growth_percent": 100 * growth / begin,
        "peak_mb": max(after) / MB,
        "bound_mb": bound.megabytes,
        "bound_percent": bound.percent,
    }
    problems = []
    if growth / MB > bound.megabytes or figures["growth_percent"] > bound.percent:
        problems.append(
            f"memory grew by {growth / MB:.1f} MB ({figures['growth_percent']:.1f}%) after warm-up,"
            f" from {begin / MB:.0f} MB; at most {bound.megabytes:g} MB and {bound.percent:g}%"
        )
    return figures, problems


def summarise(tally: Tally, seconds: float) -> dict[str, Any]:
    """Returns what the clients saw in `seconds`, as data."""
    behaviours = {
        behaviour.value: {
            end.value: tally.ends[behaviour, end] for end in End if tally.ends[behaviour, end]
        }
        for behaviour in Behaviour
    }
    return {
        "seconds": seconds,
        "calls": tally.calls,
        "calls_per_second": tally.calls / seconds,
        "ends": {end.value: tally.total(end) for end in End},
        "behaviours": {name: ends for name, ends in behaviours.items() if ends},
        "statuses": {
            f"{code} {reason or '(noticed by the client)'}": count
            for (code, reason), count in sorted(tally.statuses.items())
        },
        "finish_reasons": dict(tally.finish_reasons),
        "tokens": tally.tokens,
        "tokens_per_second": tally.tokens / seconds,
        "first_token_s": percentiles(tally.first_tokens_s),
        "inter_token_s": percentiles(tally.token_times_s, tally.token_counts),
        "replies_asked_for_again": {"compared": tally.compared, "differing": tally.differing},
    }


def markdown(summary: Mapping[str, Any], picture: str | None) -> str:
    """Returns the report for people; `picture` is the name of its image."""
    verdict = "passed" if not summary["problems"] else f"{summary['problem_count']} problems"
    lines = [f"# Load test: {verdict}", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in _rows(summary)]
    lines += ["", "## How calls ended, by what their clients did", ""]
    ends = [end.value for end in End]
    lines += ["| | " + " | ".join(ends) + " |", "| --- |" + " ---: |" * len(ends)]
    for name, counts in summary["behaviours"].items():
        lines.append(f"| {name} | " + " | ".join(f"{counts.get(end, 0)}" for end in ends) + " |")
    lines += ["", "## Statuses other than OK", "", "| code and reason | calls |", "| --- | ---: |"]
    lines += [f"| {name} | {count} |" for name, count in summary["statuses"].items()]
    if summary["problems"]:
        lines += ["", "## Problems", "", *(f"- {problem}" for problem in summary["problems"])]
    if picture is not None:
        lines += ["", f"![memory, slots, tokens and latencies over time]({picture})"]
    return "\n".join([*lines, ""])


def _rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    ends, again = summary["ends"], summary["replies_asked_for_again"]
    rows = [
        ("server", summary["server"]),
        ("load", summary["load"]),
        ("duration", f"{summary['seconds']:.0f} s"),
        ("calls", f"{summary['calls']} ({summary['calls_per_second']:.1f} per second)"),
        ("ended", ", ".join(f"{count} {name}" for name, count in ends.items())),
        ("tokens", f"{summary['tokens']} ({summary['tokens_per_second']:.1f} per second)"),
        ("time to first token", milliseconds(summary["first_token_s"])),
        ("time per token behind it", milliseconds(summary["inter_token_s"])),
        (
            "replies asked for again",
            f"{again['compared']}, of which {again['differing']} had other tokens",
        ),
    ]
    if memory := summary["memory"]:
        rows.append(
            (
                "memory after warm-up",
                f"{memory['begin_mb']:.0f} MB at the beginning, {memory['end_mb']:.0f} MB at the end "
                f"({memory['growth_percent']:+.2f}%; at most {memory['bound_percent']:g}% and "
                f"{memory['bound_mb']:g} MB), peak {memory['peak_mb']:.0f} MB",
            )
        )
    held = summary["held"] or f"nothing, after {summary['settle_s']:.1f} s"
    rows.append(("held after the last call", held))
    if drain := summary["drain"]:
        rows.append(
            (
                "SIGTERM under load",
                f"{drain['finished']} of {drain['accepted']} accepted streams came whole, "
                f"{drain['refused']} later calls were refused; {summary['integrity']}",
            )
        )
    return rows


def milliseconds(figures: Mapping[str, float]) -> str:
    """Returns percentiles in words."""
    return ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in figures.items()) or "-"
