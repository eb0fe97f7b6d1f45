"""What is minimised, and what is measured on held-out text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from demo_training.experts import CapacityExperts
from model.transformer import Transformer

# A batch's windows are longer than its inputs by the targets of the model and of the drafts.
TRAINED_DEPTH, MEASURED_DEPTH = 2, 3
EXTRA_TOKENS, EXTRA_MEASURED = TRAINED_DEPTH + 1, MEASURED_DEPTH + 1
# The second draft is fed with the head's own output, as in use, and weighs less: it is worth
# something only where the first was right.
_DRAFT_WEIGHTS = (0.3, 0.1)
# Of the mean over the layers: 0.005 for each.
_BALANCE_WEIGHT = 0.05
_CAPACITY_FACTOR = 1.5
# Drafts are learned from a part of the rows: they cost as much as a third of the model.
_DRAFT_ROWS = 0.5


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Nats per token, [B, T]. The target's logit is selected, not gathered: no scatter backward."""
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, logits_BTV.shape, 2)
    hit_BTV = vocabulary == targets_BT[..., None]
    chosen_BT = jnp.sum(jnp.where(hit_BTV, logits_BTV, 0.0), axis=-1)
    return jax.nn.logsumexp(logits_BTV, axis=-1) - chosen_BT


def training_loss(model: Transformer, windows_BY: jax.Array) -> tuple[jax.Array, dict]:
    """Main loss, weighted draft losses and the routers' balance.

    The drafts' gradient flows into the model too (DeepSeek-V3, arXiv 2412.19437, section 2.2): a
    hidden state that has planned one token further is what the head needs to be right.

    Args:
      model: the parameters.
      windows_BY: int32 token ids, EXTRA_TOKENS longer than the inputs.

    Returns:
      (loss, figures for the log).
    """
    tokens = windows_BY.shape[1] - EXTRA_TOKENS
    experts = CapacityExperts(_CAPACITY_FACTOR)
    hidden_BTD = model(windows_BY[:, :tokens], experts)
    main = jnp.mean(cross_entropy(model.logits(hidden_BTD), windows_BY[:, 1 : tokens + 1]))
    loss, figures = main, {"loss": main}
    rows = max(1, math.ceil(_DRAFT_ROWS * len(windows_BY)))
    hidden_BTD, drafted_BY = hidden_BTD[:rows], windows_BY[:rows]
    for depth, weight in enumerate(_DRAFT_WEIGHTS, start=1):
        hidden_BTD = model.draft(hidden_BTD, drafted_BY[:, depth : tokens + depth], experts)
        targets_BT = drafted_BY[:, depth + 1 : tokens + depth + 1]
        draft = jnp.mean(cross_entropy(model.logits(hidden_BTD), targets_BT))
        loss += weight * draft
        figures[f"draft_{depth}"] = draft
    figures["balance"] = jnp.mean(jnp.stack(experts.balance))
    figures["dropped"] = 1 - jnp.mean(jnp.stack(experts.kept))
    return loss + _BALANCE_WEIGHT * figures["balance"], figures


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Figures over held-out text."""

    tokens: int
    bits_per_token: float
    acceptance: tuple[float, ...]
    """Share of positions where draft 1, 2, 3 is the model's own greedy choice, each by itself."""
    accepted_chain: tuple[float, ...]
    """The same, but counting draft i only where drafts 1 .. i - 1 were right too."""


def measure(model: Transformer, windows_BY: jax.Array) -> dict[str, jax.Array]:
    """Sums over windows that are EXTRA_MEASURED tokens longer than their inputs.

    Everything is teacher-forced: the drafts are fed the text, and draft i at depth i attends to the
    rows of depth i before it. The experts are computed as they are served: nothing is dropped.
    """
    tokens = windows_BY.shape[1] - EXTRA_MEASURED
    hidden_BTD = model(windows_BY[:, : tokens + MEASURED_DEPTH])
    logits_BTV = model.logits(hidden_BTD)
    targets_BT = windows_BY[:, 1 : tokens + 1]
    chosen_BT = jnp.argmax(logits_BTV, axis=-1)
    sums = {"nats": jnp.sum(cross_entropy(logits_BTV[:, :tokens], targets_BT))}
    hidden_BTD, chain_BT = hidden_BTD[:, :tokens], jnp.ones(targets_BT.shape, bool)
    for depth in range(1, MEASURED_DEPTH + 1):
        hidden_BTD = model.draft(hidden_BTD, windows_BY[:, depth : tokens + depth])
        drafted_BT = jnp.argmax(model.logits(hidden_BTD), axis=-1)
        right_BT = drafted_BT == chosen_BT[:, depth : tokens + depth]
        chain_BT &= right_BT
        sums[f"right_{depth}"], sums[f"chain_{depth}"] = jnp.sum(right_BT), jnp.sum(chain_BT)
    return sums


def evaluate(
    measure_windows: Callable[[np.ndarray], dict[str, jax.Array]], windows: np.ndarray, rows: int
) -> HeldOut:
    """Adds up `measure` over windows, `rows` at a time.

    Args:
      measure_windows: the compiled `measure` with the parameters bound.
      windows: int32 [windows, tokens + EXTRA_MEASURED].
      rows: per call; windows that do not fill a call are left out, so that one program serves all.
    """
    windows = windows[: len(windows) // rows * rows] if len(windows) > rows else windows
    totals: dict[str, float] = {}
    for start in range(0, len(windows), rows):
        for name, value in measure_windows(windows[start : start + rows]).items():
            totals[name] = totals.get(name, 0.0) + float(value)
    count = len(windows) * (windows.shape[1] - EXTRA_MEASURED)
    depths = range(1, MEASURED_DEPTH + 1)
    return HeldOut(
        tokens=count,
        bits_per_token=totals["nats"] / math.log(2) / count,
        acceptance=tuple(totals[f"right_{depth}"] / count for depth in depths),
        accepted_chain=tuple(totals[f"chain_{depth}"] / count for depth in depths),
    )
