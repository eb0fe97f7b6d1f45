"""Gated DeltaNet: linear attention with a short convolution and the gated delta rule.

Conventions of the checkpoint: `in_proj_qkv` is [q | k | v], contiguous; q and k are L2-normalised,
q scaled by P ** -0.5; gate = -exp(A_log) softplus(a + dt_bias); the recurrence, A_log, dt_bias, gate
and beta are float32; the output norm is gated by silu(z) and its weight is no offset from one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from model.array_types import ConvWindow, Hidden, MaskBT, PerSlotInt, RecurrentState
from model.cache import DeltaNetCache
from model.config import ModelConfig
from model.kernels import gated_delta_rule
from model.layers import GatedRMSNorm, Linear

_L2_EPS = 1e-6


class DepthwiseConv(nnx.Module):
    """Causal depthwise convolution; `weight` is [C, 1, X + 1] as on the hub, newest tap last."""

    def __init__(self, channels: int, taps: int, *, std: float, rngs: nnx.Rngs):
        shape = (channels, 1, taps)
        self.weight = nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))

    def __call__(self, window_BYC: jax.Array, tokens: int) -> jax.Array:
        """[B, X + T, C] -> silu(conv) [B, T, C] in float32: token t sees window rows t .. t + X."""
        weight_CY = self.weight[...][:, 0].astype(jnp.float32)
        y = sum(window_BYC[:, i : i + tokens] * weight_CY[:, i] for i in range(weight_CY.shape[1]))
        return jax.nn.silu(y)


class GatedDeltaNet(nnx.Module):
    """Reference: `Qwen3_5MoeGatedDeltaNet` in transformers."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width, std = config.hidden_size, config.initializer_range
        values = config.linear_num_value_heads
        self.in_proj_qkv = Linear(width, config.conv_dim, std=std, rngs=rngs)
        self.in_proj_z = Linear(width, config.linear_value_dim, std=std, rngs=rngs)
        self.in_proj_a = Linear(width, values, std=std, rngs=rngs)
        self.in_proj_b = Linear(width, values, std=std, rngs=rngs)
        kernel = config.linear_conv_kernel_dim
        self.conv1d = DepthwiseConv(config.conv_dim, kernel, std=kernel**-0.5, rngs=rngs)
        decay = jax.random.uniform(rngs.params(), (values,), jnp.float32, 1.0, 16.0)
        self.A_log = nnx.Param(jnp.log(decay))
        self.dt_bias = nnx.Param(jnp.ones((values,), jnp.float32))
        self.norm = GatedRMSNorm(config.linear_value_head_dim, config.rms_norm_eps)
        self.out_proj = Linear(config.linear_value_dim, width, std=std, rngs=rngs)
        self.key_dim = config.linear_key_dim
        self.key_head_dim = config.linear_key_head_dim
        self.value_head_dim = config.linear_value_head_dim

    def __call__(self, x_BTD: Hidden) -> Hidden:
        """Whole sequences from an empty state, no cache."""
        batch, values = x_BTD.shape[0], self.A_log.shape[0]
        taps = self.conv1d.weight.shape[2] - 1
        conv_BXC = jnp.zeros((batch, taps, self.in_proj_qkv.weight.shape[0]), jnp.float32)
        state_BWPR = jnp.zeros((batch, values, self.key_head_dim, self.value_head_dim), jnp.float32)
        valid_BT = jnp.ones(x_BTD.shape[:2], bool)
        return self.prefill(x_BTD, conv_BXC, state_BWPR, valid_BT)[0]

    def prefill(
        self, x_BTD: Hidden, conv_BXC: ConvWindow, state_BWPR: RecurrentState, valid_BT: MaskBT
    ) -> tuple[Hidden, ConvWindow, RecurrentState]:
        """A chunk of a prompt; masked tokens must come after the valid ones.

        Args:
          x_BTD: normed hidden states.
          conv_BXC: the conv inputs of the X tokens before the chunk.
          state_BWPR: the recurrent state before the chunk.
          valid_BT: masked tokens leave both states alone.

        Returns:
          (output, conv inputs of the last X valid tokens, state after the last valid token).
        """
        tokens = x_BTD.shape[1]
        window_BYC = jnp.concatenate([conv_BXC, self._conv_inputs(x_BTD)], axis=1)
        q, k, v, gate, beta = self._rule_inputs(window_BYC, x_BTD)
        gate, beta = (jnp.where(valid_BT[..., None], array, 0.0) for array in (gate, beta))
        out_BTWR, state_BWPR = gated_delta_rule.chunked(q, k, v, gate, beta, state_BWPR)
        lengths_B = jnp.sum(valid_BT, axis=1)
        conv_BXC = _rows_from(window_BYC, lengths_B, window_BYC.shape[1] - tokens)
        return self._output(out_BTWR, x_BTD), conv_BXC, state_BWPR

    def decode(
        self, x_BTD: Hidden, cache: DeltaNetCache, pending_B: PerSlotInt
    ) -> tuple[Hidden, DeltaNetCache]:
        """The tokens of one decode round, after committing those of the last round.

        Args:
          x_BTD: normed hidden states of this round's tokens, at most as many as the cache has room
            for: a round may have fewer draft tokens than the round before or after it.
          cache: see `DeltaNetCache`.
          pending_B: how many of the last round's tokens were accepted.

        Returns:
          (output, cache with the last round committed and this round's inputs pending).
        """
        room = cache.k_BTJP.shape[1]
        conv_BXC = _rows_from(
            cache.conv_window_BYC, pending_B, cache.conv_window_BYC.shape[1] - room
        )
        window_BYC = jnp.concatenate([conv_BXC, self._conv_inputs(x_BTD)], axis=1)
        new = self._rule_inputs(window_BYC, x_BTD)
        accepted_BT = jnp.arange(room) < pending_B[:, None]
        past = tuple(
            # A rejected token must not touch the state even if it is not finite: mask the inputs.
            jnp.where(accepted_BT.reshape(*accepted_BT.shape, *(1,) * (array.ndim - 2)), array, 0.0)
            for array in (cache.k_BTJP, cache.v_BTWR, cache.gate_BTW, cache.beta_BTW)
        )
        out_BTWR, state_BWPR = gated_delta_rule.replay(
            past, new, cache.state_BWPR, jnp.max(pending_B)
        )
        _, *inputs = new
        # A shorter round leaves the rest of the rows as they are: nothing reads them.
        old = (cache.conv_window_BYC, cache.k_BTJP, cache.v_BTWR, cache.gate_BTW, cache.beta_BTW)
        pending = (
            jnp.concatenate([fresh, rows[:, fresh.shape[1] :]], axis=1)
            for rows, fresh in zip(old, (window_BYC, *inputs), strict=True)
        )
        return self._output(out_BTWR, x_BTD), DeltaNetCache(state_BWPR, *pending)

    def _conv_inputs(self, x_BTD: jax.Array) -> jax.Array:
        return self.in_proj_qkv(x_BTD).astype(jnp.float32)

    def _rule_inputs(self, window_BYC: jax.Array, x_BTD: jax.Array) -> tuple[jax.Array, ...]:
        """Returns q, k, v, gate and beta of the gated delta rule, float32."""
        batch, tokens = x_BTD.shape[:2]
        qkv_BTC = self.conv1d(window_BYC, tokens)
        q, k, v = jnp.split(qkv_BTC, [self.key_dim, 2 * self.key_dim], axis=-1)
        q_BTJP, k_BTJP = (
            _l2_normalise(array.reshape(batch, tokens, -1, self.key_head_dim)) for array in (q, k)
        )
        v_BTWR = v.reshape(batch, tokens, -1, self.value_head_dim)
        a_BTW, b_BTW = (
            proj(x_BTD).astype(jnp.float32) for proj in (self.in_proj_a, self.in_proj_b)
        )
        rate_W = jnp.exp(self.A_log[...].astype(jnp.float32))
        gate_BTW = -rate_W * jax.nn.softplus(a_BTW + self.dt_bias[...].astype(jnp.float32))
        return q_BTJP * self.key_head_dim**-0.5, k_BTJP, v_BTWR, gate_BTW, jax.nn.sigmoid(b_BTW)

    def _output(self, out_BTWR: jax.Array, x_BTD: jax.Array) -> jax.Array:
        z_BTWR = self.in_proj_z(x_BTD).reshape(out_BTWR.shape)
        gated_BTWR = self.norm(out_BTWR, z_BTWR)
        return self.out_proj(gated_BTWR.reshape(*x_BTD.shape[:2], -1))


def _l2_normalise(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _L2_EPS)


def _rows_from(window_BYC: jax.Array, first_B: jax.Array, rows: int) -> jax.Array:
    """`rows` rows of each slot's window, from row `first_B` on."""
    index_BX = first_B[:, None] + jnp.arange(rows)
    return jnp.take_along_axis(window_BYC, index_BX[..., None], axis=1)
