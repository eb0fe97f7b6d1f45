"""The routed experts for the start-up self-test."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from model.kernels.check import CheckSizes, KernelCheck
from model.kernels.routed_experts import routed_experts

TOKENS = 7


def checks(sizes: CheckSizes) -> tuple[KernelCheck, ...]:
    """A few tokens; the last is masked and chooses no expert."""
    rng = np.random.default_rng(0)
    ids_ZA = np.stack([rng.permutation(sizes.experts)[: sizes.choices] for _ in range(TOKENS)])
    ids_ZA[-1] = sizes.experts
    weights_ZA = rng.uniform(0.1, 1, size=ids_ZA.shape).astype(np.float32)
    x_ZD = rng.normal(size=(TOKENS, sizes.width)).astype(sizes.dtype)
    up = rng.normal(size=(sizes.experts, 2 * sizes.hidden, sizes.width)) * sizes.width**-0.5
    down = rng.normal(size=(sizes.experts, sizes.width, sizes.hidden)) * sizes.hidden**-0.5
    matrices = (up.astype(sizes.dtype), down.astype(sizes.dtype))
    arguments = (x_ZD, ids_ZA.astype(np.int32), weights_ZA, *matrices)

    def run(*arguments: Any) -> tuple[jax.Array]:
        return (routed_experts(*arguments),)

    expected = (_experts(*arguments),)
    return (KernelCheck("routed_experts", run, arguments, expected, sizes.dtype, replaceable=True),)


def _experts(x_ZD, ids_ZA, weights_ZA, gate_up_proj_EFD, down_proj_EDF) -> np.ndarray:
    """The weighted sum over the chosen experts in float64."""
    y_ZD = np.zeros(x_ZD.shape)
    for z, a in np.ndindex(ids_ZA.shape):
        expert = ids_ZA[z, a]
        if expert < len(down_proj_EDF):
            both = gate_up_proj_EFD[expert].astype(np.float64) @ x_ZD[z].astype(np.float64)
            gate, up = np.split(both, 2)
            hidden = gate / (1 + np.exp(-gate)) * up
            y_ZD[z] += weights_ZA[z, a] * (down_proj_EDF[expert].astype(np.float64) @ hidden)
    return y_ZD
