"""A product with a quantised weight, some of its rows after the other: plain XLA, any platform."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from model.kernels.quantized_matmul import reference
from model.quantization import QuantizedWeight

BLOCK_WEIGHTS = 1 << 22
"""That are dequantised at a time: in bfloat16 a third of a GB10's second-level cache."""
BLOCK_ROWS = 128
"""Blocks have a multiple of this many rows."""


def quantized_matmul(x: Float[Array, "... I"], weight: QuantizedWeight) -> Float[Array, "... O"]:
    """Same function as `reference.quantized_matmul`, never holding more than a block of W.

    XLA fuses dequantising into a product of one row only; for more it would write W out whole. The
    number of blocks is fixed, so the loop costs no host sync. A row of the result has the same bits
    whatever the other rows and, from two up, their number.
    """
    rows, columns = weight.shape
    block = max(BLOCK_ROWS, BLOCK_WEIGHTS // columns // BLOCK_ROWS * BLOCK_ROWS)
    blocks, rest = divmod(rows, block)
    if blocks + bool(rest) <= 1:
        return reference.quantized_matmul(x, weight)

    if math.prod(x.shape[:-1]) == 1:  # a single row's columns are contiguous: see below
        return quantized_matmul(jnp.broadcast_to(x, (2, *x.shape)), weight)[0]

    # Written to columns of the result: rows of stacked results would be copies that XLA:GPU cannot
    # take into a CUDA graph, nor the loops around them.
    def run_block(start: jax.Array | int, count: int, y: jax.Array) -> jax.Array:
        part = reference.quantized_matmul(x, weight.rows(start, count))
        return jax.lax.dynamic_update_slice_in_dim(y, part, start, axis=-1)

    y = jnp.zeros((*x.shape[:-1], rows), jnp.float32)
    y = jax.lax.fori_loop(0, blocks, lambda i, y: run_block(i * block, block, y), y)
    return run_block(blocks * block, rest, y) if rest else y
