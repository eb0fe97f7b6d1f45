"""Measures the decode program itself: rounds per second, tokens per second, acceptance, bytes.

Runs the programs on the device without gRPC, on prompts from held-out Python files, with every draft
length in turn and several times over, so that the figures of one table share the machine's mood. Quote
the ratios.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time

from sample_prompts import held_out_functions
from tokenizers import Tokenizer

from model.config import ModelConfig
from model.costs import round_bytes
from model.weight_layouts import WeightLayout, layout_of
from service.engine.executor import JaxExecutor, load_executor
from service.engine.types import Request, SamplingParams

ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclasses.dataclass
class Point:
    """One (streams, draft length): one entry per repeat, but for the totals."""

    streams: int
    draft_length: int
    round_ms: list[float] = dataclasses.field(default_factory=list)
    tokens_per_second: list[float] = dataclasses.field(default_factory=list)
    dispatch_ms: list[float] = dataclasses.field(default_factory=list)
    rounds: int = 0
    """Rounds of running slots, all repeats."""
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=pathlib.Path, default=ROOT / "model" / "demo")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--draft-length", type=int, default=4, help="measure 0 to this (default 4)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds per decode call (default 4)")
    parser.add_argument("--tokens", type=int, default=160, help="tokens per stream (default 160)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    return parser.parse_args()


def measure(executor: JaxExecutor, point: Point, prompts: list[list[int]], options) -> None:
    """One repeat: all streams from prefill to the last token; only decode calls are timed."""
    limits = executor.limits
    pages = [
        list(range(1 + slot * limits.pages_per_slot, 1 + (slot + 1) * limits.pages_per_slot))
        for slot in range(limits.slots)
    ]
    for slot in range(point.streams):
        prompt = prompts[slot % len(prompts)]
        for start in range(0, len(prompt) - 1, limits.prefill_chunk):
            end = min(start + limits.prefill_chunk, len(prompt) - 1)
            executor.prefill(slot, pages[slot], start, prompt[start:end], prompt[end])
        sampling = SamplingParams(temperature=options.temperature, seed=slot)
        request = Request(str(slot), tuple(prompt), options.tokens, sampling)
        executor.insert(slot, request, point.draft_length)
    executor.wait()
    running = set(range(point.streams))
    tokens = calls = 0
    dispatch = 0.0
    begin = time.perf_counter()
    # The figures are taken while all streams run: a call with fewer is none of the point's.
    while len(running) == point.streams:
        before = time.perf_counter()
        call = executor.decode(pages, point.draft_length)
        dispatch += time.perf_counter() - before
        for slot, rounds in enumerate(call.fetch()):
            if slot in running:
                emitted = [len(row) for row in rounds.tokens]
                tokens += sum(emitted)
                point.rounds += sum(count > 0 for count in emitted)
                point.drafted += sum(rounds.drafted)
                point.accepted += sum(rounds.accepted)
                if rounds.finish:
                    running.discard(slot)
        calls += 1
    seconds = time.perf_counter() - begin
    for slot in running:
        executor.release(slot)
    point.tokens += tokens
    point.round_ms.append(1000 * seconds / (calls * limits.rounds_per_call))
    point.tokens_per_second.append(tokens / seconds)
    point.dispatch_ms.append(1000 * dispatch / calls)


def table(points: list[Point], config: ModelConfig, item_bytes: int, layout: WeightLayout) -> str:
    """The figures as text; ratios are to draft length 0 with as many streams."""
    lines = [
        "streams  U   round ms   x U=0   tokens/s   x U=0   tokens/round   accepted   "
        "dispatch ms   MB/round   GB/s"
    ]
    base: dict[int, tuple[float, float]] = {}
    for point in points:
        round_ms = statistics.median(point.round_ms)
        speed = statistics.median(point.tokens_per_second)
        base.setdefault(point.streams, (round_ms, speed))
        moved = round_bytes(config, point.streams, point.draft_length, item_bytes, layout)
        share = f"{point.accepted / point.drafted:8.0%}" if point.drafted else " " * 8
        lines.append(
            f"{point.streams:7d} {point.draft_length:2d} {round_ms:10.2f} "
            f"{round_ms / base[point.streams][0]:7.2f} {speed:10.1f} "
            f"{speed / base[point.streams][1]:7.2f} {point.tokens / point.rounds:14.2f} "
            f"{share:>10} {statistics.median(point.dispatch_ms):13.2f} {moved / 1e6:10.1f} "
            f"{moved / round_ms / 1e6:6.1f}"
        )
    return "\n".join(lines)


def main() -> int:
    """Prints the table."""
    options = parse_arguments()
    tokenizer = Tokenizer.from_file(str(options.checkpoint / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids[-200:] for text in held_out_functions(16)]
    points: list[Point] = []
    hf_config = json.loads((options.checkpoint / "config.json").read_text())
    config, layout = ModelConfig.from_hf(hf_config), layout_of(hf_config, options.dtype)
    item_bytes = {"float32": 4, "bfloat16": 2}[options.dtype]
    for streams in options.streams:
        executor = load_executor(
            options.checkpoint,
            slots=streams,
            max_context=512,
            page_size=64,
            pages=None,
            draft_length=options.draft_length,
            rounds_per_call=options.rounds,
            prefill_chunk=128,
            dtype=options.dtype,
        )
        executor.warm_up()
        row = [Point(streams, length) for length in range(executor.limits.draft_length + 1)]
        for _ in range(options.repeats):
            for point in row:
                measure(executor, point, prompts, options)
        points += row
        print(table(row, config, item_bytes, layout), flush=True)
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(p) for p in points], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
