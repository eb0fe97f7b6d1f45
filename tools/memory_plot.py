"""The plot of tools/plan_memory.py."""

from __future__ import annotations

import pathlib
from typing import Any

from model.memory_plan import GIB, KV_DTYPES


def draw(planner: Any, file: pathlib.Path) -> None:
    """Draws what fills the memory, by layout of the weights, and what a conversation grows to.

    Args:
      planner: a `plan_memory.Planner`.
      file: .png or .svg.

    Raises:
      ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (filling, growth) = pyplot.subplots(1, 2, figsize=(13, 4.2), width_ratios=(3, 2))
    draw_filling(filling, planner)
    draw_growth(growth, planner)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def draw_filling(axes: Any, planner: Any) -> None:
    """Stacked bars: weights by part, workspace, what is left to conversations, the host's share."""
    options = planner.options
    drafts = options.draft_length
    plans = [planner.plan(layout, options.kv_dtype, drafts) for layout in options.layouts]
    workspace = planner.workspace(drafts)
    room = [planner.capacity(layout, options.kv_dtype, drafts) for layout in options.layouts]
    stacks = {part: [plan.weights[part] for plan in plans] for part in plans[0].weights}
    # What is too small to be seen shares a colour.
    small = [part for part, sizes in stacks.items() if max(sizes) < options.memory_gib * GIB / 100]
    rest = [sum(sizes) for sizes in zip(*(stacks.pop(part) for part in small), strict=True)]
    if small:
        stacks["other weights"] = rest
    stacks["workspace (estimate)"] = [workspace] * len(plans)
    stacks["conversations"] = [max(0, one.left) for one in room]
    stacks["host"] = [round(options.host_reserve_gib * GIB)] * len(plans)
    left = [0.0] * len(plans)
    for name, sizes in stacks.items():
        colour = {"conversations": "#d9ead3", "host": "#dddddd"}.get(name)
        widths = [size / GIB for size in sizes]
        axes.barh(options.layouts, widths, left=left, label=name, color=colour, edgecolor="white")
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, one in enumerate(room):
        end = options.memory_gib - options.host_reserve_gib
        axes.text(end - 1, row, f"{one.conversations:.1f}", ha="right", va="center")
    axes.axvline(options.memory_gib, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("GiB")
    axes.set_title(
        f"{options.memory_gib:g} GiB; number: conversations of {planner.context} tokens,\n"
        f"{drafts} draft tokens, keys and values in {options.kv_dtype}"
    )
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=5)


def draw_growth(axes: Any, planner: Any) -> None:
    """Lines: the memory of one conversation by its length."""
    for kv_dtype in KV_DTYPES:
        for drafts, style in ((0, "--"), (planner.options.draft_length, "-")):
            one = planner.plan("bfloat16", kv_dtype, drafts)
            pages = one.kv_cache + one.mtp_kv_cache
            ends = [(one.state - pages) / GIB, one.state / GIB]
            label = f"{kv_dtype}, {drafts} draft tokens"
            axes.plot([0, planner.context], ends, style, label=label)
    axes.set_xlabel("tokens")
    axes.set_ylabel("GiB")
    axes.set_title("one conversation, by type of keys and values")
    axes.legend(fontsize=8)
