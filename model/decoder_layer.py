"""One layer: a mixer (Gated DeltaNet or gated attention), then the mixture of experts."""

from __future__ import annotations

from flax import nnx

from model.array_types import Hidden, MaskBT
from model.attention import GatedAttention, Rotary
from model.config import FULL_ATTENTION, ModelConfig
from model.gated_delta_net import GatedDeltaNet
from model.kernels.routed_experts import routed_experts as blocked_routed_experts
from model.layers import RMSNorm
from model.moe import MoE, RoutedExperts


class DecoderLayer(nnx.Module):
    """Pre-norm residual layer; has `self_attn` or `linear_attn`, as the hub names them."""

    def __init__(self, config: ModelConfig, kind: str, *, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if kind == FULL_ATTENTION:
            self.self_attn = GatedAttention(config, rngs=rngs)
        else:
            self.linear_attn = GatedDeltaNet(config, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config, rngs=rngs)
        self.kind = kind

    def __call__(
        self, x_BTD: Hidden, rotary: Rotary, routed_experts: RoutedExperts | None = None
    ) -> Hidden:
        """Whole sequences, no cache."""
        normed_BTD = self.input_layernorm(x_BTD)
        if self.kind == FULL_ATTENTION:
            x_BTD = x_BTD + self.self_attn(normed_BTD, rotary)
        else:
            x_BTD = x_BTD + self.linear_attn(normed_BTD)
        return self.feed_forward(x_BTD, None, routed_experts)

    def feed_forward(
        self, x_BTD: Hidden, valid_BT: MaskBT | None, routed_experts: RoutedExperts | None = None
    ) -> Hidden:
        """The second half: x + experts(norm(x))."""
        experts = routed_experts or blocked_routed_experts
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD), valid_BT, experts)
