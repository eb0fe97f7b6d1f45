"""The routed experts, each over every token: the definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from model.array_types import DownWeights, ExpertIds, ExpertWeights, GateUpWeights, HiddenRows
from model.quantization import dequantized


def routed_experts(
    x_ZD: HiddenRows,
    ids_ZA: ExpertIds,
    weights_ZA: ExpertWeights,
    gate_up_proj_EFD: GateUpWeights,
    down_proj_EDF: DownWeights,
) -> HiddenRows:
    """sum_a weights[z, a] * down[e] (silu(gate[e] x[z]) * up[e] x[z]) with e = ids[z, a].

    Args:
      x_ZD: tokens.
      ids_ZA: expert of each choice; E (one past the last) chooses none.
      weights_ZA: float32.
      gate_up_proj_EFD: [E, 2F, D], gate rows first, quantised or not.
      down_proj_EDF: [E, D, F], quantised or not.

    Returns:
      [Z, D] in the dtype of x.
    """
    gate_up_proj_EFD = dequantized(gate_up_proj_EFD, x_ZD.dtype)
    down_proj_EDF = dequantized(down_proj_EDF, x_ZD.dtype)
    experts, width, _ = gate_up_proj_EFD.shape
    projected = jnp.einsum("zd,efd->zef", x_ZD, gate_up_proj_EFD)
    hidden = jax.nn.silu(projected[..., : width // 2]) * projected[..., width // 2 :]
    y_ZED = jnp.einsum("zef,edf->zed", hidden, down_proj_EDF).astype(jnp.float32)
    chosen_ZE = jnp.sum(
        jax.nn.one_hot(ids_ZA, experts, dtype=jnp.float32) * weights_ZA[..., None], axis=1
    )
    return jnp.einsum("zed,ze->zd", y_ZED, chosen_ZE).astype(x_ZD.dtype)
