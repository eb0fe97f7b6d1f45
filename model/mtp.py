"""The multi-token-prediction (MTP) head (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    u_t  = fc [norm_e(embed(x_{t+1})) | norm_h(h_t)]        embedding first; h_t after the final norm
    h'_t = norm(attention layer with experts (u_t))         its own KV cache; logits(h'_t) -> x_{t+2}

Recursion feeds h' (after `norm`) and the drafted token back, one position on. Embedding and output
head are the main model's. Row t sits at position t. Text cannot show a mistake in here, since every
draft is verified; only the acceptance can.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from model.array_types import Hidden, MaskBT
from model.attention import GatedAttention, Rotary
from model.cache import AttentionCache, Placement
from model.config import FULL_ATTENTION, ModelConfig
from model.decoder_layer import DecoderLayer
from model.layers import Linear, RMSNorm
from model.moe import RoutedExperts


class MTPHead(nnx.Module):
    """One full-attention layer over [token embedding | hidden state]."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = Linear(2 * width, width, std=config.initializer_range, rngs=rngs)
        self.pre_fc_norm_embedding = RMSNorm(width, eps)
        self.pre_fc_norm_hidden = RMSNorm(width, eps)
        self.layers = nnx.List([DecoderLayer(config, FULL_ATTENTION, rngs=rngs)])
        self.norm = RMSNorm(width, eps)

    def combine(self, embedded_BTD: Hidden, hidden_BTD: Hidden) -> Hidden:
        """u: the layer's input from the next token's embedding and this token's hidden state."""
        both = [self.pre_fc_norm_embedding(embedded_BTD), self.pre_fc_norm_hidden(hidden_BTD)]
        return self.fc(jnp.concatenate(both, axis=-1))

    def __call__(
        self, u_BTD: Hidden, rotary: Rotary, routed_experts: RoutedExperts | None = None
    ) -> Hidden:
        """Whole sequences, no cache: h' for every row of `combine`."""
        return self.norm(self.layers[0](u_BTD, rotary, routed_experts))

    def write(self, u_BTD: Hidden, where: Placement, cache: AttentionCache) -> AttentionCache:
        """Puts the keys and values of verified rows in the cache.

        The head has one layer, so nothing else of those rows is ever needed: not their attention,
        not their experts. Only the row that drafts goes through `attend`.
        """
        layer = self.layers[0]
        return cache.write(
            where, *self._attention.keys_values(layer.input_layernorm(u_BTD), where.rotary)
        )

    def attend(
        self, u_BTD: Hidden, where: Placement, cache: AttentionCache, valid_BT: MaskBT
    ) -> Hidden:
        """Computes h' of rows whose keys and values are in the cache."""
        layer = self.layers[0]
        x_BTD = u_BTD + self._attention.attend(layer.input_layernorm(u_BTD), where, cache)
        return self.norm(layer.feed_forward(x_BTD, valid_BT))

    @property
    def _attention(self) -> GatedAttention:
        return self.layers[0].self_attn


def shift(tokens_BT: jax.Array, next_token_B: jax.Array) -> jax.Array:
    """The token after each token of a row: tokens moved left by one, then `next_token_B`."""
    return jnp.concatenate([tokens_BT[:, 1:], next_token_B[:, None]], axis=1)
