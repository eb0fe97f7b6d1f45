"""Trains the embedded demo checkpoint: `python tools/train_demo.py`.

A small model of the served architecture learns Python from the standard library of the running
interpreter and from installed packages, then chats with tools, and at last its draft head learns to
agree with it. These are the stages of `demo_training/stages.py`, which says how long each is.

Without arguments all stages run, one after the other, each in a folder of its own under
build/demo; the last leaves the checkpoint in its export/, the figures and the loss curve in
docs/demo. It may be killed at any time: the same command goes on from the last save. --from and
--stage make a part of the recipe: the demo's second version was made of its first by the stages
chat and drafts, with `--from model/demo --stage chat drafts`.

--steps may change while a stage runs, as long as its learning rate has not begun to fall. The same
seed, weights and final number of steps give the same weights.
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
from demo_training.loop import advance
from demo_training.memory import keep_freed_memory
from demo_training.stages import STAGES, Stage
from demo_training.state import TrainingState
from tqdm import tqdm

from model import checkpoint
from model.config import ModelConfig
from model.transformer import Transformer

STATE_FILE, RESULT = "state.npz", "export"
# With the padding rows of the head: 4096.
VOCAB_SIZE = 4096 - hub.UNNAMED_TOKENS
# Four more than are measured make 1024.
MEASURED_ROWS, MEASURED_TOKENS = 4, 1020
# Of each stream, on the way and at the end of a stage; tools/measure_demo.py measures all.
FEW_WINDOWS, MORE_WINDOWS = 8, 32
SAMPLE_TOKENS = 96


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = [stage.name for stage in STAGES]
    add("--stage", nargs="+", choices=names, default=names, help="in their order [all]")
    add("--from", dest="start", type=Path, help="checkpoint to go on from, with its tokenizer")
    add("--steps", type=int, nargs="+", help="of each stage, instead of the recipe's")
    add("--output", type=Path, default=Path("build/demo"), help="work folder [%(default)s]")
    add("--report", type=Path, default=Path("docs/demo"), help="figures and plot [%(default)s]")
    add("--seed", type=int, default=0, help="of weights and batches [%(default)s]")
    add("--save-minutes", type=float, default=5.0, help="between saves [%(default)s]")
    arguments = parser.parse_args()
    if arguments.steps and len(arguments.steps) != len(arguments.stage):
        parser.error("--steps takes one number for each stage")
    return arguments


class Run:
    """One stage and its folder."""

    def __init__(self, arguments: argparse.Namespace, stage: Stage, start: Path | None):
        self.seed, self.save_minutes = arguments.seed, arguments.save_minutes
        self.stage, self.start_from = stage, start
        self.output, self.report = arguments.output / stage.name, arguments.report
        self.output.mkdir(parents=True, exist_ok=True)
        corpus = arguments.output / "corpus"
        print(f"{stage.name}: tokenizer and token arrays", file=sys.stderr)
        given = tokenizer.load(start / batches.TOKENIZER_FILE) if start else None
        batches.prepare(corpus, VOCAB_SIZE, given)
        self.streams = batches.open_streams(corpus)
        self.tokenizer = tokenizer.load(corpus / batches.TOKENIZER_FILE)
        self.hf_config = hub.model_config(self.tokenizer)
        self.model = self._first_model()
        self.treedef = jax.tree.structure(self.model)
        self.held_out = {
            name: batches.consecutive(stream, MEASURED_TOKENS, objective.EXTRA_MEASURED)
            for name, stream in self.streams.held_out.items()
        }
        self.saved = time.monotonic()
        self._measure = jax.jit(lambda leaves, y: objective.measure(self.unflatten(leaves), y))
        self._choose = jax.jit(self._likeliest)

    def unflatten(self, leaves: list[jax.Array]) -> Transformer:
        """The model around its leaves."""
        return jax.tree.unflatten(self.treedef, leaves)

    def begin(self) -> TrainingState:
        """Goes on from the saved state, or makes a fresh one.

        Raises:
          SystemExit: what was saved belongs to another run.
        """
        path, stage = self.output / STATE_FILE, self.stage
        # Copies: the step donates its arguments.
        leaves = [jnp.copy(leaf) for leaf in jax.tree.leaves(self.model)]
        optimiser = state.make_optimiser(self.model, stage).init(leaves)
        fresh = TrainingState(leaves, optimiser, 0, {"seed": self.seed, "steps": stage.steps})
        if not path.exists():
            return fresh
        loaded = state.load(path, fresh)
        seed, steps = loaded.notes["seed"], loaded.notes["steps"]
        latest = min(stage.decay_start, dataclasses.replace(stage, steps=steps).decay_start)
        if seed != self.seed or (steps != stage.steps and loaded.step > latest):
            raise SystemExit(
                f"{path} is at step {loaded.step} of a run with --seed {seed} and {steps} steps:"
                f" give the same, or another --output"
            )
        loaded.notes["steps"] = stage.steps
        return loaded

    def train(self) -> Path:
        """Trains to the end, saving and exporting on the way; returns the checkpoint's folder."""
        current = self.begin()
        total = self.stage.steps
        if current.step == total:
            return self.output / RESULT
        train_step = state.make_step(self.model, self.stage)
        print(f"steps: {total}, done: {current.step}", file=sys.stderr)
        bar = tqdm(
            total=total,
            initial=current.step,
            unit="step",
            mininterval=0.5 if sys.stderr.isatty() else 60,
        )

        def after_step(current: TrainingState) -> None:
            bar.update(1)
            history = current.notes["history"]
            if history:
                bar.set_postfix(loss=f"{history[-1]['loss']:.3f}", refresh=False)
            if time.monotonic() - self.saved > self.save_minutes * 60:
                self.save(current, windows=FEW_WINDOWS)

        with bar:
            advance(current, self.stage, self.seed, self.streams.train, train_step, after_step)
        self.save(current, windows=MORE_WINDOWS)
        return self.output / RESULT

    def save(self, current: TrainingState, windows: int) -> None:
        """Saves the state, then exports, measures and reports it."""
        state.save(self.output / STATE_FILE, current)
        hub.export(
            self.output / RESULT, self.hf_config, self.unflatten(current.leaves), self.tokenizer
        )
        measured = {name: self._held_out(current, name, windows) for name in self.held_out}
        held_out = current.notes.setdefault("held_out", [])
        held_out.append({"step": current.step, **measured})
        counted = [self.stage.shape(step) for step in range(current.step)]
        tokens = sum(rows * length for rows, length in counted)
        figures = {
            "from": None if self.start_from is None else self.start_from.as_posix(),
            "seed": self.seed,
            "stage": dataclasses.asdict(self.stage),
            "steps_done": current.step,
            "tokens_seen": tokens,
            "seconds": round(current.notes["seconds"], 1),
            "tokens_per_second": round(tokens / current.notes["seconds"], 1),
            "parameters": sum(leaf.size for leaf in current.leaves),
            "held_out": held_out,
            "samples": self._samples(current),
            "history": current.notes["history"],
        }
        report.write(self.report, figures, self.hf_config, self.streams.statistics)
        self.saved = time.monotonic()

    def _first_model(self) -> Transformer:
        if self.start_from is None:
            return state.initial_model(ModelConfig.from_hf(self.hf_config), self.seed)
        return checkpoint.load(self.start_from, jnp.float32).model

    def _held_out(self, current: TrainingState, name: str, count: int) -> dict[str, Any]:
        windows = self.held_out[name]
        windows = windows[:: -(-len(windows) // count)]
        figures = objective.evaluate(
            lambda y: self._measure(current.leaves, y), windows, MEASURED_ROWS
        )
        # Bytes of the whole stream: close for a sample of it.
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


def main() -> None:
    """Runs the stages."""
    arguments = parse_arguments()
    stages = [stage for stage in STAGES if stage.name in arguments.stage]
    if arguments.steps:
        stages = [
            dataclasses.replace(stage, steps=steps)
            for stage, steps in zip(stages, arguments.steps, strict=True)
        ]
    start = arguments.start
    for stage in stages:
        start = Run(arguments, stage, start).train()


if __name__ == "__main__":
    keep_freed_memory()
    main()
