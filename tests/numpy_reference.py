"""The parts of the architecture in plain NumPy and float64, as the papers and the hub define them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import DTypeLike


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """The weight is an offset from one."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * (1.0 + weight)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def top_experts(logits_E: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest experts of one token, lowest id first among equals; weights with the sum 1."""
    probabilities_E = softmax(logits_E)
    ids_A = np.argsort(-probabilities_E, kind="stable")[:count]
    return ids_A, probabilities_E[ids_A] / probabilities_E[ids_A].sum()


def feed_forward(x_D: np.ndarray, gate_FD, up_FD, down_DF) -> np.ndarray:
    """One expert on one token."""
    return down_DF @ (silu(gate_FD @ x_D) * (up_FD @ x_D))


def moe(x_D: np.ndarray, weights: Mapping[str, np.ndarray], prefix: str, count: int) -> np.ndarray:
    """One token through router, routed experts and the gated shared expert.

    Args:
      x_D: after the norm.
      weights: float64, by hub name.
      prefix: up to and with `mlp.`.
      count: experts per token.
    """
    gate_up_EFD = weights[prefix + "experts.gate_up_proj"]
    width = gate_up_EFD.shape[1] // 2
    y_D = np.zeros_like(x_D)
    chosen = top_experts(weights[prefix + "gate.weight"] @ x_D, count)
    for expert, weight in zip(*chosen, strict=True):
        gate_FD, up_FD = gate_up_EFD[expert, :width], gate_up_EFD[expert, width:]
        down_DF = weights[prefix + "experts.down_proj"][expert]
        y_D += weight * feed_forward(x_D, gate_FD, up_FD, down_DF)
    shared = [
        weights[f"{prefix}shared_expert.{part}_proj.weight"] for part in ("gate", "up", "down")
    ]
    openness = sigmoid(weights[prefix + "shared_expert_gate.weight"] @ x_D)
    return y_D + openness * feed_forward(x_D, *shared)


def delta_rule(k, v, gate, beta, dtype: DTypeLike = np.float64) -> np.ndarray:
    """States [T, W, P, R] after each token, kept in `dtype`, from an empty one.

    Args:
      k: [T, J, P]; value head w uses key head w // (W // J).
      v: [T, W, R].
      gate: [T, W], log decay.
      beta: [T, W].
      dtype: of the state between tokens; all sums are float64.
    """
    repeats = v.shape[1] // k.shape[1]
    k, v, gate, beta = (np.asarray(array, np.float64) for array in (k, v, gate, beta))
    state_WPR = np.zeros((v.shape[1], k.shape[2], v.shape[2]))
    states = []
    for k_JP, v_WR, gate_W, beta_W in zip(k, v, gate, beta, strict=True):
        k_WP = np.repeat(k_JP, repeats, axis=0)
        state_WPR = state_WPR * np.exp(gate_W)[:, None, None]
        held_WR = np.einsum("wpr,wp->wr", state_WPR, k_WP)
        delta_WR = beta_W[:, None] * (v_WR - held_WR)
        state_WPR = state_WPR + k_WP[:, :, None] * delta_WR[:, None, :]
        state_WPR = state_WPR.astype(dtype).astype(np.float64)
        states.append(state_WPR)
    return np.stack(states)
