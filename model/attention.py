"""Gated attention: grouped queries, normed heads, partial rotary positions, a sigmoid output gate.

Conventions of the checkpoint: `q_proj` makes [query | gate] per head, not two halves; q and k are
normed per head before they are rotated; the gate multiplies before `o_proj`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from model.array_types import Hidden, KeysValues, Queries, RotaryBTQ
from model.cache import AttentionCache, Placement
from model.config import ModelConfig
from model.kernels.paged_attention import causal_attention, paged_attention
from model.layers import Linear, RMSNorm, rotate

Rotary = tuple[RotaryBTQ, RotaryBTQ]


class GatedAttention(nnx.Module):
    """Reference: `Qwen3_5MoeAttention` in transformers."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        kv_width = config.num_key_value_heads * head_dim
        std = config.initializer_range
        self.q_proj = Linear(width, 2 * heads * head_dim, std=std, rngs=rngs)
        self.k_proj = Linear(width, kv_width, std=std, rngs=rngs)
        self.v_proj = Linear(width, kv_width, std=std, rngs=rngs)
        self.o_proj = Linear(heads * head_dim, width, std=std, rngs=rngs)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.head_dim = head_dim

    def queries(self, x_BTD: Hidden, rotary: Rotary) -> tuple[Queries, Queries]:
        """Returns rotated queries and the output gate, both [B, T, N, H]."""
        both = self.q_proj(x_BTD).reshape(*x_BTD.shape[:2], -1, 2 * self.head_dim)
        q_BTNH, gate_BTNH = jnp.split(both, 2, axis=-1)
        return rotate(self.q_norm(q_BTNH), rotary), gate_BTNH

    def keys_values(self, x_BTD: Hidden, rotary: Rotary) -> tuple[KeysValues, KeysValues]:
        """Returns rotated keys and values, both [B, T, K, H]."""
        shape = (*x_BTD.shape[:2], -1, self.head_dim)
        k_BTKH, v_BTKH = self.k_proj(x_BTD).reshape(shape), self.v_proj(x_BTD).reshape(shape)
        return rotate(self.k_norm(k_BTKH), rotary), v_BTKH

    def output(self, attended_BTNH: Queries, gate_BTNH: Queries) -> Hidden:
        """Gates the heads and mixes them."""
        gated_BTNH = attended_BTNH * jax.nn.sigmoid(gate_BTNH)
        return self.o_proj(gated_BTNH.reshape(*gated_BTNH.shape[:2], -1))

    def __call__(self, x_BTD: Hidden, rotary: Rotary) -> Hidden:
        """Whole sequences, no cache."""
        q_BTNH, gate_BTNH = self.queries(x_BTD, rotary)
        return self.output(causal_attention(q_BTNH, *self.keys_values(x_BTD, rotary)), gate_BTNH)

    def cached(
        self, x_BTD: Hidden, where: Placement, cache: AttentionCache
    ) -> tuple[Hidden, AttentionCache]:
        """Tokens after those in the cache: writes their keys and values, then attends to all."""
        cache = cache.write(where, *self.keys_values(x_BTD, where.rotary))
        return self.attend(x_BTD, where, cache), cache

    def attend(self, x_BTD: Hidden, where: Placement, cache: AttentionCache) -> Hidden:
        """Attention of tokens whose keys and values are in the cache already."""
        q_BTNH, gate_BTNH = self.queries(x_BTD, where.rotary)
        attended_BTNH = paged_attention(
            q_BTNH,
            cache.k_pages,
            cache.v_pages,
            where.page_table_BM,
            where.positions_BT,
            cache.kv_dtype,
        )
        return self.output(attended_BTNH, gate_BTNH)
