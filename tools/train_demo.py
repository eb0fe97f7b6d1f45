"""Trains the embedded demo checkpoint: `python tools/train_demo.py`.

A small model of the served architecture learns Python from the standard library of the running
interpreter. Without arguments it makes the full run of 85 minutes on two cores and leaves the
checkpoint in build/demo/export, the figures and the loss curve in docs/demo. It may be killed at
any time: the same command goes on from the last save.

--minutes decides the number of steps once, by timing a few; --steps gives it instead, and may give
another number when a run goes on, as long as the learning rate has not begun to fall (which it does
over the last 30% of the steps). The same seed and final number of steps give the same weights.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from demo_training import batches, hub, objective, report, state, tokenizer
from demo_training.loop import Plan, advance, batch, measure_steps
from demo_training.memory import keep_freed_memory
from demo_training.state import TrainingState
from tqdm import tqdm

from model.config import ModelConfig
from model.transformer import Transformer

STATE_FILE = "state.npz"
# With the padding rows of the head: 4096.
VOCAB_SIZE = 4096 - hub.UNNAMED_TOKENS
# Three more than are measured make 1024.
MEASURED_ROWS, MEASURED_TOKENS, QUICK_WINDOWS = 4, 1021, 8
SAMPLE_TOKENS = 96


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("build/demo"), help="work folder [%(default)s]")
    add("--report", type=Path, default=Path("docs/demo"), help="figures and plot [%(default)s]")
    add("--minutes", type=float, default=85.0, help="length of the run [%(default)s]")
    add("--steps", type=int, help="length of the run, instead of --minutes")
    add("--seed", type=int, default=0, help="of weights and batches [%(default)s]")
    add("--save-minutes", type=float, default=5.0, help="between saves [%(default)s]")
    return parser.parse_args()


class Run:
    """One run and its folder."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        corpus = arguments.output / "corpus"
        print("corpus: tokenizer and token arrays", file=sys.stderr)
        batches.prepare(corpus, VOCAB_SIZE)
        self.streams = batches.open_streams(corpus)
        self.tokenizer = tokenizer.load(corpus / batches.TOKENIZER_FILE)
        self.hf_config = hub.model_config(self.tokenizer)
        self.model = state.initial_model(ModelConfig.from_hf(self.hf_config), arguments.seed)
        self.treedef = jax.tree.structure(self.model)
        self.held_out = {
            name: objective_windows(stream) for name, stream in self.streams.held_out.items()
        }
        self.saved = time.monotonic()
        self._measure = jax.jit(lambda leaves, y: objective.measure(self.unflatten(leaves), y))
        self._choose = jax.jit(self._likeliest)

    def unflatten(self, leaves: list[jax.Array]) -> Transformer:
        """The model around its leaves."""
        return jax.tree.unflatten(self.treedef, leaves)

    def start(self) -> tuple[TrainingState, Plan]:
        """Goes on from the saved state, or makes a fresh one and plans its length.

        Raises:
          SystemExit: what was saved belongs to another run.
        """
        path = self.arguments.output / STATE_FILE
        seed, steps = self.arguments.seed, self.arguments.steps
        fresh = self._fresh(1)
        if path.exists():
            loaded = state.load(path, fresh)
            plan = Plan(loaded.notes["seed"], loaded.notes["steps"])
            steps = steps or plan.steps
            latest = min(state.decay_start(steps), state.decay_start(plan.steps))
            if plan.seed != seed or (steps != plan.steps and loaded.step > latest):
                raise SystemExit(
                    f"{path} is at step {loaded.step} of a run with --seed {plan.seed} --steps"
                    f" {plan.steps}: give the same, or another --output"
                )
            loaded.notes["steps"] = steps
            return loaded, Plan(seed, steps)
        if steps is None:
            steps = measure_steps(Plan(seed, 1), self.arguments.minutes, self._seconds_of_step)
        fresh = self._fresh(steps)
        fresh.notes.update(seed=seed, steps=steps)
        return fresh, Plan(seed, steps)

    def train(self) -> None:
        """Trains to the end, saving and exporting on the way."""
        current, plan = self.start()
        optimiser = state.make_optimiser(plan.steps)
        train_step = state.make_step(self.treedef, optimiser)
        print(f"steps: {plan.steps}, done: {current.step}", file=sys.stderr)
        bar = tqdm(
            total=plan.steps,
            initial=current.step,
            unit="step",
            mininterval=0.5 if sys.stderr.isatty() else 60,
        )

        def after_step(current: TrainingState) -> None:
            bar.update(1)
            history = current.notes["history"]
            if history:
                bar.set_postfix(loss=f"{history[-1]['loss']:.3f}", refresh=False)
            if time.monotonic() - self.saved > self.arguments.save_minutes * 60:
                self.save(current, plan, windows=QUICK_WINDOWS)

        with bar:
            advance(current, plan, self.streams.train, train_step, after_step)
        self.save(current, plan, windows=None)

    def save(self, current: TrainingState, plan: Plan, windows: int | None) -> None:
        """Saves the state, then exports, measures and reports it; all windows at the end."""
        output = self.arguments.output
        state.save(output / STATE_FILE, current)
        hub.export(
            output / "export", self.hf_config, self.unflatten(current.leaves), self.tokenizer
        )
        measured = {name: self._held_out(current, name, windows) for name in self.held_out}
        held_out = current.notes.setdefault("held_out", [])
        held_out.append({"step": current.step, **measured})
        counted = [plan.shape(step) for step in range(current.step)]
        tokens = sum(rows * length for rows, length in counted)
        report.write(
            self.arguments.report,
            {
                "seed": plan.seed,
                "steps": plan.steps,
                "steps_done": current.step,
                "tokens_seen": tokens,
                "seconds": round(current.notes["seconds"], 1),
                "tokens_per_second": round(tokens / current.notes["seconds"], 1),
                "parameters": sum(leaf.size for leaf in current.leaves),
                "corpus": self.streams.statistics,
                "config": self.hf_config,
                "held_out": held_out,
                "samples": self._samples(current),
                "history": current.notes["history"],
            },
        )
        self.saved = time.monotonic()

    def _fresh(self, steps: int) -> TrainingState:
        # Copies: the step donates its arguments.
        leaves = [jnp.copy(leaf) for leaf in jax.tree.leaves(self.model)]
        return TrainingState(leaves, state.make_optimiser(steps).init(leaves), 0, {})

    def _seconds_of_step(self, shape: tuple[int, int]) -> float:
        trial, plan = self._fresh(10), Plan(0, 10, short=shape, long_share=0.0)
        train_step = state.make_step(self.treedef, state.make_optimiser(10))
        seconds = []
        for step in range(6):
            start = time.perf_counter()
            windows = batch(plan, self.streams.train, step)
            *both, figures = train_step(trial.leaves, trial.optimiser, windows)
            trial.leaves, trial.optimiser = both
            jax.block_until_ready(figures)
            seconds.append(time.perf_counter() - start)
        print(f"step of {shape[0]} x {shape[1]}: {seconds[1:]}", file=sys.stderr)
        return float(np.median(seconds[1:]))

    def _held_out(self, current: TrainingState, name: str, count: int | None) -> dict[str, Any]:
        windows = self.held_out[name]
        if count is not None:
            windows = windows[:: -(-len(windows) // count)]
        figures = objective.evaluate(
            lambda y: self._measure(current.leaves, y), windows, MEASURED_ROWS
        )
        # Of the whole stream: exact for all windows, close for a sample of them.
        part = self.streams.statistics[f"held_out_{name}"]
        bits_per_byte = figures.bits_per_token * part["tokens"] / part["bytes"]
        return {"bits_per_byte": bits_per_byte, **dataclasses.asdict(figures)}

    def _samples(self, current: TrainingState) -> list[dict[str, str]]:
        return report.continue_prompts(
            lambda rows, last: np.asarray(self._choose(current.leaves, rows, last)),
            self.tokenizer,
            SAMPLE_TOKENS,
        )

    def _likeliest(self, leaves: list[jax.Array], rows: jax.Array, last: jax.Array) -> jax.Array:
        model = self.unflatten(leaves)
        hidden_BD = model(rows)[jnp.arange(len(rows)), last]
        named = self.tokenizer.get_vocab_size()
        return jnp.argmax(model.logits(hidden_BD)[:, :named], axis=-1)


def objective_windows(stream: np.ndarray) -> np.ndarray:
    """Held-out windows for `objective.evaluate`."""
    return batches.consecutive(stream, MEASURED_TOKENS, objective.EXTRA_MEASURED)


if __name__ == "__main__":
    keep_freed_memory()
    Run(parse_arguments()).train()
