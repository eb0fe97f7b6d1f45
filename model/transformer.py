"""The text model: embedding, layers, final norm, output head, MTP head.

The module tree has the hub's names, so a parameter's path is its tensor's name (see `checkpoint.py`).
Modules hold `nnx.Param` only and are immutable pytrees: every method returns what it changes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from model.array_types import Hidden, PerSlotInt, TokensBT
from model.cache import AttentionCache, LayerCache, Placement
from model.config import ModelConfig
from model.decoder_layer import DecoderLayer
from model.layers import Embedding, Linear, RMSNorm, linear_f32, rotary_embedding
from model.moe import RoutedExperts
from model.mtp import MTPHead


class Transformer(nnx.Module):
    """`Qwen3_5MoeForCausalLM` of transformers, with the MTP head that it leaves out."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width, std = config.hidden_size, config.initializer_range
        self.embed_tokens = Embedding(config.vocab_size, width, std=std, rngs=rngs)
        self.layers = nnx.List(
            [DecoderLayer(config, kind, rngs=rngs) for kind in config.layer_types]
        )
        self.norm = RMSNorm(width, config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(width, config.vocab_size, std=std, rngs=rngs)
        self.mtp = MTPHead(config, rngs=rngs) if config.mtp_num_hidden_layers else None
        self.config = config

    def __call__(self, tokens_BT: TokensBT, routed_experts: RoutedExperts | None = None) -> Hidden:
        """Whole sequences without caches; pad on the right (the model is causal).

        Returns:
          Hidden states after the final norm, [B, T, D].
        """
        rotary = self._rotary(tokens_BT)
        x_BTD = self.embed_tokens(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, rotary, routed_experts)
        return self.norm(x_BTD)

    def draft(
        self,
        hidden_BTD: Hidden,
        next_tokens_BT: TokensBT,
        routed_experts: RoutedExperts | None = None,
    ) -> Hidden:
        """Whole-sequence pass of the MTP head.

        Args:
          hidden_BTD: after the final norm, or what `draft` returned (recursion).
          next_tokens_BT: for each row the token that follows it.
          routed_experts: see `kernels/routed_experts`.

        Returns:
          Hidden states whose `logits` predict the token after `next_tokens_BT`.

        Raises:
          ValueError: the model has no MTP head.
        """
        if self.mtp is None:
            raise ValueError("the checkpoint has no MTP head")
        u_BTD = self.mtp.combine(self.embed_tokens(next_tokens_BT), hidden_BTD)
        return self.mtp(u_BTD, self._rotary(next_tokens_BT), routed_experts)

    def logits(self, hidden_BTD: jax.Array) -> jax.Array:
        """Float32 logits [..., V] of hidden states after the final norm (or `mtp.norm`)."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return linear_f32(hidden_BTD, head.weight[...])

    def decode(
        self,
        tokens_BT: TokensBT,
        where: Placement,
        caches: tuple[LayerCache, ...],
        pending_B: PerSlotInt,
    ) -> tuple[Hidden, tuple[LayerCache, ...]]:
        """The tokens of one decode round, all slots; see `GatedDeltaNet.decode` for `pending_B`.

        Returns:
          (hidden states after the final norm, caches).
        """
        x_BTD = self.embed_tokens(tokens_BT)
        new_caches: list[LayerCache] = []
        for layer, cache in zip(self.layers, caches, strict=True):
            normed_BTD = layer.input_layernorm(x_BTD)
            if isinstance(cache, AttentionCache):
                mixed_BTD, cache = layer.self_attn.cached(normed_BTD, where, cache)
            else:
                mixed_BTD, cache = layer.linear_attn.decode(normed_BTD, cache, pending_B)
            x_BTD = layer.feed_forward(x_BTD + mixed_BTD, where.valid_BT)
            new_caches.append(cache)
        return self.norm(x_BTD), tuple(new_caches)

    def _rotary(self, tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        return rotary_embedding(jnp.broadcast_to(positions_BT, (3, *tokens_BT.shape)), self.config)
