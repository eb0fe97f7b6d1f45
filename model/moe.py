"""Mixture of experts: softmax router, top-k, routed experts and one gated shared expert."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from model.array_types import ExpertIds, ExpertWeights, Hidden, MaskBT
from model.config import ModelConfig
from model.kernels.routed_experts import routed_experts as blocked_routed_experts
from model.layers import Linear

RoutedExperts = Callable[..., jax.Array]
"""(x_ZD, ids_ZA, weights_ZA, gate_up_proj_EFD, down_proj_EDF) -> y_ZD, as in kernels/routed_experts."""


class Experts(nnx.Module):
    """Routed experts' weights: `gate_up_proj` [E, 2F, D], gate rows first; `down_proj` [E, D, F]."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        experts, width, hidden = (
            config.num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
        )
        std = config.initializer_range
        up, down = (experts, 2 * hidden, width), (experts, width, hidden)
        self.gate_up_proj = nnx.Param(std * jax.random.normal(rngs.params(), up, jnp.float32))
        self.down_proj = nnx.Param(std * jax.random.normal(rngs.params(), down, jnp.float32))


class SharedExpert(nnx.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width, hidden = config.hidden_size, config.shared_expert_intermediate_size
        std = config.initializer_range
        self.gate_proj = Linear(width, hidden, std=std, rngs=rngs)
        self.up_proj = Linear(width, hidden, std=std, rngs=rngs)
        self.down_proj = Linear(hidden, width, std=std, rngs=rngs)

    def __call__(self, x_BTD: Hidden) -> Hidden:
        return self.down_proj(jax.nn.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class MoE(nnx.Module):
    """Reference: `Qwen3_5MoeSparseMoeBlock` in transformers."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        std = config.initializer_range
        self.gate = Linear(config.hidden_size, config.num_experts, std=std, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)
        self.shared_expert = SharedExpert(config, rngs=rngs)
        self.shared_expert_gate = Linear(config.hidden_size, 1, std=std, rngs=rngs)
        self.top_k = config.num_experts_per_tok

    def route(self, x_ZD: jax.Array) -> tuple[ExpertIds, ExpertWeights]:
        """The likeliest experts of each token, in float32; ties go to the lowest id.

        Weights are renormalised over the chosen ones (always, in this family).
        """
        logits_ZE = self.gate(x_ZD.astype(jnp.float32))
        weights_ZA, ids_ZA = jax.lax.top_k(jax.nn.softmax(logits_ZE, axis=-1), self.top_k)
        return ids_ZA, weights_ZA / jnp.sum(weights_ZA, axis=-1, keepdims=True)

    def __call__(
        self,
        x_BTD: Hidden,
        valid_BT: MaskBT | None = None,
        routed_experts: RoutedExperts = blocked_routed_experts,
    ) -> Hidden:
        """Masked tokens choose no expert, so they cost no weight traffic; their output is void."""
        x_ZD = x_BTD.reshape(-1, x_BTD.shape[-1])
        ids_ZA, weights_ZA = self.route(x_ZD)
        if valid_BT is not None:
            ids_ZA = jnp.where(valid_BT.reshape(-1, 1), ids_ZA, self.gate.weight.shape[0])
        experts = self.experts
        routed_ZD = routed_experts(
            x_ZD, ids_ZA, weights_ZA, experts.gate_up_proj[...], experts.down_proj[...]
        )
        shared_BTD = self.shared_expert(x_BTD) * jax.nn.sigmoid(self.shared_expert_gate(x_BTD))
        return routed_ZD.reshape(x_BTD.shape) + shared_BTD
