"""What is minimised, and what is measured on held-out text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from demo_training.experts import CapacityExperts
from demo_training.stages import Stage
from model.transformer import Transformer

# A batch's windows are longer than its inputs by the last target.
EXTRA_TOKENS = 1
MEASURED_DEPTH = 4
EXTRA_MEASURED = MEASURED_DEPTH + 1
# Of the mean over the layers: 0.005 for each.
_BALANCE_WEIGHT = 0.05
_CAPACITY_FACTOR = 1.5


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Nats per token, [B, T]. The target's logit is selected, not gathered: no scatter backward."""
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, logits_BTV.shape, 2)
    hit_BTV = vocabulary == targets_BT[..., None]
    chosen_BT = jnp.sum(jnp.where(hit_BTV, logits_BTV, 0.0), axis=-1)
    return jax.nn.logsumexp(logits_BTV, axis=-1) - chosen_BT


def distance(logits_BTV: jax.Array, wanted_BTV: jax.Array) -> jax.Array:
    """Cross entropy of one distribution under another, both given by logits: nats, [B, T]."""
    expected_BT = jnp.sum(jax.nn.softmax(wanted_BTV) * logits_BTV, axis=-1)
    return jax.nn.logsumexp(logits_BTV, axis=-1) - expected_BT


def training_loss(
    model: Transformer, windows_BY: jax.Array, stage: Stage
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Main loss, weighted draft losses and the routers' balance.

    The drafts' gradient flows into the model too (DeepSeek-V3, arXiv 2412.19437, section 2.2), unless
    it is frozen: a hidden state that has planned one token further is what the head needs to be
    right.

    Args:
      model: the parameters.
      windows_BY: int32 token ids, EXTRA_TOKENS longer than the inputs.
      stage: says what is learned.

    Returns:
      (loss, figures for the log).
    """
    inputs_BT, targets_BT = windows_BY[:, :-1], windows_BY[:, 1:]
    experts = CapacityExperts(_CAPACITY_FACTOR)
    hidden_BTD = model(inputs_BT, experts)
    logits_BTV = model.logits(hidden_BTD)
    main = jnp.mean(cross_entropy(logits_BTV, targets_BT))
    figures = {"loss": main}
    rows = max(1, math.ceil(stage.draft_rows * len(windows_BY)))
    drafts = _draft_losses(
        model, hidden_BTD[:rows], logits_BTV[:rows], windows_BY[:rows], stage, experts
    )
    loss = jnp.zeros(()) if stage.drafts_only else main
    for depth, (weight, draft) in enumerate(zip(stage.draft_weights, drafts, strict=True), start=1):
        loss += weight * draft
        figures[f"draft_{depth}"] = draft
    figures["balance"] = jnp.mean(jnp.stack(experts.balance))
    figures["dropped"] = 1 - jnp.mean(jnp.stack(experts.kept))
    return loss + _BALANCE_WEIGHT * figures["balance"], figures


def _draft_losses(
    model: Transformer,
    hidden_BTD: jax.Array,
    logits_BTV: jax.Array,
    windows_BY: jax.Array,
    stage: Stage,
    experts: CapacityExperts,
) -> list[jax.Array]:
    """Nats per token of draft 1, 2, ...; draft i is made at all places but the last i."""
    losses: list[jax.Array] = []
    wanted_BTV = jax.lax.stop_gradient(logits_BTV)
    for depth in range(1, len(stage.draft_weights) + 1):
        hidden_BTD = model.draft(hidden_BTD[:, :-1], windows_BY[:, depth:-1], experts)
        drafted_BTV = model.logits(hidden_BTD)
        nats_BT = (
            distance(drafted_BTV, wanted_BTV[:, depth:])
            if stage.distils
            else cross_entropy(drafted_BTV, windows_BY[:, depth + 1 :])
        )
        losses.append(jnp.mean(nats_BT))
    return losses


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Figures over held-out text."""

    tokens: int
    bits_per_token: float
    acceptance: tuple[float, ...]
    """Share of positions where draft 1, 2, 3, 4 is the model's own greedy choice, each by itself."""
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
