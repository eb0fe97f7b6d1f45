"""The training loop: which batch at which step, and what is noted on the way."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from demo_training.batches import draw
from demo_training.objective import EXTRA_TOKENS
from demo_training.state import TrainingState

_NOTE_EVERY = 10


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run's length and the shape of its batches."""

    seed: int
    steps: int
    short: tuple[int, int] = (8, 256)
    """Rows and tokens of most batches."""
    long: tuple[int, int] = (2, 1024)
    """Rows and tokens at the end of the run: short windows are cheaper, long ones teach attention
    the positions that a short window never has."""
    long_share: float = 0.1

    def shape(self, step: int) -> tuple[int, int]:
        """Rows and tokens of the batch at a step."""
        return self.short if step < round(self.steps * (1 - self.long_share)) else self.long


def batch(plan: Plan, streams: dict[str, np.ndarray], step: int) -> np.ndarray:
    """The windows of one step, int32 [rows, tokens + EXTRA_TOKENS]."""
    rows, tokens = plan.shape(step)
    return draw(streams, plan.seed, step, rows, tokens + EXTRA_TOKENS)


def advance(
    state: TrainingState,
    plan: Plan,
    streams: dict[str, np.ndarray],
    train_step: Callable[..., Any],
    after_step: Callable[[TrainingState], None] = lambda state: None,
) -> TrainingState:
    """Trains up to the plan's last step.

    Args:
      state: changed in place as well as returned; its arrays are donated.
      plan: the run.
      streams: the training corpus.
      train_step: from `make_step`.
      after_step: is called after every step.
    """
    history = state.notes.setdefault("history", [])
    state.notes.setdefault("seconds", 0.0)
    window: list[dict[str, float]] = []
    while state.step < plan.steps:
        start = time.perf_counter()
        windows = batch(plan, streams, state.step)
        state.leaves, state.optimiser, figures = train_step(state.leaves, state.optimiser, windows)
        figures = {name: float(value) for name, value in jax.device_get(figures).items()}
        state.step += 1
        state.notes["seconds"] += time.perf_counter() - start
        window.append(figures)
        if state.step % _NOTE_EVERY == 0 or state.step == plan.steps:
            means = {name: round(np.mean([f[name] for f in window]).item(), 5) for name in figures}
            history.append({"step": state.step, **means})
            window = []
        after_step(state)
    return state


def measure_steps(
    plan: Plan, minutes: float, seconds_of: Callable[[tuple[int, int]], float]
) -> int:
    """How many steps fit in a time.

    Args:
      plan: gives the shapes.
      minutes: the budget.
      seconds_of: measures one step with batches of a shape.
    """
    share = plan.long_share
    mean = (1 - share) * seconds_of(plan.short) + share * seconds_of(plan.long)
    return max(1, int(minutes * 60 / mean))
