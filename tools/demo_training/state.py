"""Parameters, optimiser and the training step, and their file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from demo_training.objective import training_loss
from demo_training.stages import Stage
from model.config import ModelConfig
from model.transformer import Transformer

_CLIP_NORM = 1.0
# Mamba's range for the time step of a recurrent layer (arXiv 2312.00752, section 3.6).
_TIME_STEPS = (1e-3, 0.1)


@dataclasses.dataclass
class TrainingState:
    """All that a run needs to go on."""

    leaves: list[jax.Array]
    optimiser: Any
    step: int
    """Steps done."""
    notes: dict[str, Any]
    """What the run was started with, its history, and the time it took."""


def initial_model(config: ModelConfig, seed: int) -> Transformer:
    """Fresh parameters. Recurrent layers remember for 10 to 1,000 tokens, not for one.

    (The modules start as transformers' do, with a decay that is meant to be overwritten.)
    """
    model = Transformer(config, rngs=nnx.Rngs(seed))
    paths, treedef = jax.tree_util.tree_flatten_with_path(model)
    low, high = np.log(_TIME_STEPS)
    leaves = []
    for index, (path, leaf) in enumerate(paths):
        if "dt_bias" in jax.tree_util.keystr(path):
            key = jax.random.fold_in(jax.random.key(seed), index)
            steps = jnp.exp(jax.random.uniform(key, leaf.shape, jnp.float32, low, high))
            leaf = steps + jnp.log(-jnp.expm1(-steps))  # the inverse of softplus
        leaves.append(leaf)
    return jax.tree.unflatten(treedef, leaves)


def trained(model: Transformer, stage: Stage) -> list[bool]:
    """Which leaves a stage changes."""
    paths, _ = jax.tree_util.tree_flatten_with_path(model)
    return [not stage.drafts_only or ".mtp" in jax.tree_util.keystr(path) for path, _ in paths]


def make_optimiser(model: Transformer, stage: Stage) -> optax.GradientTransformation:
    """AdamW over a list of leaves: warm-up, a constant rate, linear decay to zero; clipped gradients.

    A constant rate and not a cosine (arXiv 2405.18392 finds them equal): up to the start of the decay
    a run does not depend on its length, which may so be changed when the machine is faster or slower
    than it was expected to be.
    """
    rising = optax.linear_schedule(0.0, stage.peak_rate, min(stage.warmup_steps, stage.steps))
    falling = optax.linear_schedule(stage.peak_rate, 0.0, max(1, stage.steps - stage.decay_start))
    rate = optax.join_schedules([rising, falling], [stage.decay_start])

    # What is frozen has no gradient, so Adam leaves it alone; only decay would change it.
    decays = [
        leaf.ndim >= 2 and change
        for leaf, change in zip(jax.tree.leaves(model), trained(model, stage), strict=True)
    ]
    return optax.chain(
        optax.clip_by_global_norm(_CLIP_NORM),
        optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1, mask=decays),
    )


def make_step(model: Transformer, stage: Stage) -> Callable[..., Any]:
    """Compiles the step: (leaves, optimiser state, windows) -> (both anew, figures); donates both."""
    treedef, optimiser = jax.tree.structure(model), make_optimiser(model, stage)
    changes = trained(model, stage)

    def step(leaves: list[jax.Array], state: Any, windows_BY: jax.Array) -> Any:
        def loss(leaves: list[jax.Array]) -> tuple[jax.Array, dict]:
            leaves = [
                leaf if change else jax.lax.stop_gradient(leaf)
                for leaf, change in zip(leaves, changes, strict=True)
            ]
            return training_loss(jax.tree.unflatten(treedef, leaves), windows_BY, stage)

        (_, figures), gradients = jax.value_and_grad(loss, has_aux=True)(leaves)
        figures["gradient_norm"] = optax.tree.norm(gradients)
        updates, state = optimiser.update(gradients, state, leaves)
        return optax.apply_updates(leaves, updates), state, figures

    return jax.jit(step, donate_argnums=(0, 1))


def save(path: Path, state: TrainingState) -> None:
    """Writes beside the file and renames: whenever it is killed, a whole file is there."""
    arrays = jax.tree.leaves((state.leaves, state.optimiser))
    notes = json.dumps({"step": state.step, **state.notes})
    fresh = path.with_name(path.name + ".tmp")
    with fresh.open("wb") as file:
        named: dict[str, Any] = {f"leaf_{i}": np.asarray(array) for i, array in enumerate(arrays)}
        np.savez(file, notes=np.asarray(notes), **named)
    fresh.replace(path)


def load(path: Path, like: TrainingState) -> TrainingState:
    """Reads what `save` wrote.

    Args:
      path: the file.
      like: a state of the same run, for the structure.
    """
    _, treedef = jax.tree.flatten((like.leaves, like.optimiser))
    with np.load(path) as file:
        notes = json.loads(str(file["notes"]))
        arrays = [jnp.asarray(file[f"leaf_{index}"]) for index in range(treedef.num_leaves)]
    leaves, optimiser = jax.tree.unflatten(treedef, arrays)
    return TrainingState(leaves, optimiser, notes.pop("step"), notes)
