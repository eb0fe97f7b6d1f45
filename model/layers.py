"""Norms, linear maps and rotary positions.

Conventions of the checkpoint that trip ports:
- RMSNorm weights are stored as an offset from one (`1 + w`); the gated norm inside DeltaNet is not.
- Weights are `[out, in]`. They are used so, untransposed: XLA:CPU then computes a row with the same
  bits whatever the number of rows (from two up), which the equality of replies rests on.
- RoPE turns the first `rotary_dim` dimensions of a head, in halves (not pairs), and its frequencies
  are shared out to three position axes, interleaved.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from model.array_types import Positions3BT, RotaryBTQ
from model.config import ModelConfig
from model.kernels.quantized_matmul import product, quantized_matmul
from model.quantization import QuantizedWeight


class Linear(nnx.Module):
    """`y = x W^T` with `weight` of shape [out, in], quantised or not; sums in float32."""

    def __init__(self, in_features: int, out_features: int, *, std: float, rngs: nnx.Rngs):
        shape = (out_features, in_features)
        self.weight = nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        return linear(x, self.weight[...])


def linear(
    x: Float[Array, "... I"], weight: Float[Array, "O I"] | QuantizedWeight
) -> Float[Array, "... O"]:
    """`x W^T`, summed in float32, in the dtype of `x`."""
    return linear_f32(x, weight).astype(x.dtype)


def linear_f32(
    x: Float[Array, "... I"], weight: Float[Array, "O I"] | QuantizedWeight
) -> Float[Array, "... O"]:
    """`x W^T`, summed and returned in float32."""
    if isinstance(weight, QuantizedWeight):
        return quantized_matmul(x, weight)
    return product(x, weight)


class Embedding(nnx.Module):
    """Token table, `weight` [V, D]."""

    def __init__(self, vocab_size: int, features: int, *, std: float, rngs: nnx.Rngs):
        shape = (vocab_size, features)
        self.weight = nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.weight[...][tokens]


class RMSNorm(nnx.Module):
    """`x / rms(x) * (1 + weight)`, in float32, over the last axis."""

    def __init__(self, features: int, eps: float):
        self.weight = nnx.Param(jnp.zeros((features,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        x_f32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True) + self.eps)
        return (x_f32 * scale * (1.0 + self.weight[...].astype(jnp.float32))).astype(x.dtype)


class GatedRMSNorm(nnx.Module):
    """`x / rms(x) * weight * silu(gate)`, in float32: here the weight is no offset."""

    def __init__(self, features: int, eps: float):
        self.weight = nnx.Param(jnp.ones((features,), jnp.float32))
        self.eps = eps

    def __call__(
        self, x: Float[Array, "... R"], gate: Float[Array, "... R"]
    ) -> Float[Array, "... R"]:
        x_f32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True) + self.eps)
        gated = x_f32 * scale * self.weight[...].astype(jnp.float32)
        return (gated * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)


def rotary_embedding(
    positions_3BT: Positions3BT, config: ModelConfig
) -> tuple[RotaryBTQ, RotaryBTQ]:
    """Cosines and sines of the rotary angles.

    Interleaved multi-axis RoPE (Qwen3-VL, arXiv 2511.21631, section 2): of the Q frequencies, those
    at 1, 4, 7, ... follow the height position, those at 2, 5, 8, ... the width, as many as
    `mrope_section` grants; all others the temporal one. Text has three equal positions, which makes
    it plain RoPE.

    Args:
      positions_3BT: absolute positions on the temporal, height and width axis, int32.
      config: gives the frequencies and the sections.

    Returns:
      Two float32 arrays [B, T, Q].
    """
    half = config.rotary_dim // 2
    # The power in float64, then rounded: as exact as the checkpoint's own code at the far positions.
    period_Q = config.rope_theta ** (np.arange(half) * 2 / config.rotary_dim)
    frequency_Q = 1.0 / period_Q.astype(np.float32)
    axis_Q = np.zeros(half, np.int32)
    for axis in (1, 2):
        axis_Q[axis : 3 * config.mrope_section[axis] : 3] = axis
    angles_3BTQ = positions_3BT[..., None].astype(jnp.float32) * frequency_Q
    angles_BTQ = jnp.where(
        axis_Q == 0, angles_3BTQ[0], jnp.where(axis_Q == 1, angles_3BTQ[1], angles_3BTQ[2])
    )
    return jnp.cos(angles_BTQ), jnp.sin(angles_BTQ)


def rotate(
    x_BTNH: Float[Array, "B T heads H"], rotary: tuple[RotaryBTQ, RotaryBTQ]
) -> Float[Array, "B T heads H"]:
    """Turns the first 2Q dimensions of every head; the rest passes through."""
    cos, sin = (angle[:, :, None, :] for angle in rotary)
    half = cos.shape[-1]
    x_f32 = x_BTNH[..., : 2 * half].astype(jnp.float32)
    first, second = x_f32[..., :half], x_f32[..., half:]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x_BTNH.dtype), x_BTNH[..., 2 * half :]], axis=-1)
