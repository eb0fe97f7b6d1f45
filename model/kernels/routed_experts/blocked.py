"""The routed experts in blocks of tokens that share an expert: plain XLA, any platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from model.array_types import DownWeights, ExpertIds, ExpertWeights, GateUpWeights, HiddenRows
from model.layers import linear


def routed_experts(
    x_ZD: HiddenRows,
    ids_ZA: ExpertIds,
    weights_ZA: ExpertWeights,
    gate_up_proj_EFD: GateUpWeights,
    down_proj_EDF: DownWeights,
) -> HiddenRows:
    """Same function as `reference.routed_experts`, reading only the experts that are chosen.

    The (token, choice) pairs are sorted by expert and cut into blocks of one expert each; the loop
    runs over the blocks that exist. A block's last rows may belong to the next expert: they are
    computed in vain and written over by the next block, which keeps the shape fixed without a mask.
    A token's choices are added in top-k order, so its bits do not depend on the other tokens.

    Not differentiable (the number of blocks is data).
    """
    experts = gate_up_proj_EFD.shape[0]
    tokens, choices = ids_ZA.shape
    pairs = tokens * choices
    block = _block_rows(pairs, experts)
    ids = ids_ZA.reshape(pairs)
    order = jnp.argsort(ids, stable=True)
    # A block may run past the last pair: pad so that its rows exist.
    x_sorted = x_ZD[jnp.pad(order // choices, (0, block))]

    sizes_E = jnp.sum(ids[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    starts_E = jnp.cumsum(sizes_E) - sizes_E
    blocks_E = (sizes_E + block - 1) // block
    ends_E = jnp.cumsum(blocks_E)

    def run_block(index: jax.Array, y: jax.Array) -> jax.Array:
        expert = jnp.sum(ends_E <= index)
        start = starts_E[expert] + block * (index - (ends_E[expert] - blocks_E[expert]))
        x = jax.lax.dynamic_slice_in_dim(x_sorted, start, block)
        gate_up, down = jax.tree.map(  # of quantised weights codes and scales
            lambda array: jax.lax.dynamic_index_in_dim(array, expert, keepdims=False),
            (gate_up_proj_EFD, down_proj_EDF),
        )
        gate, up = jnp.split(linear(x, gate_up), 2, axis=-1)
        rows = linear(jax.nn.silu(gate) * up, down).astype(jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(y, rows, start, axis=0)

    y = jnp.zeros((pairs + block, x_ZD.shape[1]), jnp.float32)
    y = jax.lax.fori_loop(0, ends_E[-1], run_block, y)
    y_ZAD = y[jnp.argsort(order)].reshape(tokens, choices, -1)
    y_ZAD = jnp.where((ids_ZA < experts)[..., None], y_ZAD * weights_ZA[..., None], 0.0)
    total = y_ZAD[:, 0]
    for choice in range(1, choices):
        total = total + y_ZAD[:, choice]
    return total.astype(x_ZD.dtype)


def _block_rows(pairs: int, experts: int) -> int:
    """Rows of a block: about the mean load of an expert, a power of two from 2 (never one row)."""
    mean = -(-pairs // experts)
    return min(64, max(2, 1 << (mean - 1).bit_length()))
