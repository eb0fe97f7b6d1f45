"""The training loop: which batch at which step, and what is noted on the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from demo_training.batches import draw
from demo_training.objective import EXTRA_TOKENS
from demo_training.stages import Stage
from demo_training.state import TrainingState

_NOTE_EVERY = 10


def batch(stage: Stage, seed: int, streams: dict[str, np.ndarray], step: int) -> np.ndarray:
    """The windows of one step, int32 [rows, tokens + EXTRA_TOKENS]."""
    rows, tokens = stage.shape(step)
    return draw(
        streams, stage.shares, (seed, stage.first_batch + step), rows, tokens + EXTRA_TOKENS
    )


def advance(
    state: TrainingState,
    stage: Stage,
    seed: int,
    streams: dict[str, np.ndarray],
    train_step: Callable[..., Any],
    after_step: Callable[[TrainingState], None] = lambda state: None,
) -> TrainingState:
    """Trains up to the stage's last step.

    Args:
      state: changed in place as well as returned; its arrays are donated.
      stage: the run.
      seed: of the batches.
      streams: the training corpus.
      train_step: from `make_step`.
      after_step: is called after every step.
    """
    history = state.notes.setdefault("history", [])
    state.notes.setdefault("seconds", 0.0)
    window: list[dict[str, float]] = []
    while state.step < stage.steps:
        start = time.perf_counter()
        windows = batch(stage, seed, streams, state.step)
        state.leaves, state.optimiser, figures = train_step(state.leaves, state.optimiser, windows)
        figures = {name: float(value) for name, value in jax.device_get(figures).items()}
        state.step += 1
        state.notes["seconds"] += time.perf_counter() - start
        window.append(figures)
        if state.step % _NOTE_EVERY == 0 or state.step == stage.steps:
            means = {name: round(np.mean([f[name] for f in window]).item(), 5) for name in figures}
            history.append({"step": state.step, **means})
            window = []
        after_step(state)
    return state
