"""The model's shape, read from the hub's `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

LINEAR_ATTENTION = "linear_attention"
FULL_ATTENTION = "full_attention"


class ConfigError(ValueError):
    """A config that this model cannot serve; the message names every field at fault."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a `qwen3_5_moe` text model. Field names are the hub's; sizes are counts or widths."""

    vocab_size: int
    """V: rows of the embedding and of the output head (some may name no token)."""
    hidden_size: int
    layer_types: tuple[str, ...]
    """Per layer: "linear_attention" (Gated DeltaNet) or "full_attention"."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    partial_rotary_factor: float
    """Share of the head, from its start, that rotates."""
    mrope_section: tuple[int, int, int]
    """Frequencies driven by the temporal, height and width position; their sum is rotary_dim // 2."""
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    mtp_num_hidden_layers: int
    """1: the checkpoint has an MTP head; 0: it has none."""
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        problems = _shape_problems(self)
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of each attention head that rotate."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def linear_key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """C: channels of the causal convolution, [q | k | v]."""
        return 2 * self.linear_key_dim + self.linear_value_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a hub `config.json`, multimodal (with `text_config`) or text only.

        Args:
          config: the parsed file.

        Returns:
          The typed shape. Vision fields are ignored here.

        Raises:
          ConfigError: naming every field that is missing or has a value this model cannot serve.
        """
        text = config.get("text_config", config)
        problems = _unsupported(config, text)
        rope = text.get("rope_parameters") or {}
        required = [field.name for field in dataclasses.fields(cls) if field.name in _PLAIN_FIELDS]
        problems += [f"{name} is missing" for name in required if text.get(name) is None]
        problems += [
            f"rope_parameters.{name} is missing"
            for name in ("rope_theta", "mrope_section")
            if rope.get(name) is None
        ]
        if text.get("layer_types") is None:
            problems.append("layer_types is missing")
        if problems:
            raise ConfigError("; ".join(problems))
        eos = text.get("eos_token_id")
        rotary_factor = rope.get("partial_rotary_factor", text.get("partial_rotary_factor"))
        return cls(
            **{name: text[name] for name in required},
            layer_types=tuple(text["layer_types"]),
            rope_theta=float(rope["rope_theta"]),
            partial_rotary_factor=float(1.0 if rotary_factor is None else rotary_factor),
            mrope_section=tuple(rope["mrope_section"]),
            mtp_num_hidden_layers=text.get("mtp_num_hidden_layers", 0),
            tie_word_embeddings=bool(
                config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
            ),
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            initializer_range=text.get("initializer_range", 0.02),
        )


_PLAIN_FIELDS = frozenset({
    "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim", "num_experts", "num_experts_per_tok",
    "moe_intermediate_size", "shared_expert_intermediate_size", "rms_norm_eps",
    "max_position_embeddings",
})  # fmt: skip

# What the architecture allows in principle and this model does not compute: field, value served.
_ONLY: tuple[tuple[str, object], ...] = (
    ("hidden_act", "silu"),
    ("attention_bias", False),
    ("attn_output_gate", True),
    ("attention_dropout", 0.0),
    ("mamba_ssm_dtype", "float32"),
    ("mtp_use_dedicated_embeddings", False),
)


def _unsupported(config: Mapping[str, Any], text: Mapping[str, Any]) -> list[str]:
    """Names every field whose value asks for something that is not computed here."""
    problems: list[str] = []
    model_type = text.get("model_type", config.get("model_type"))
    if model_type not in ("qwen3_5_moe", "qwen3_5_moe_text"):
        problems.append(f"model_type is {model_type!r}, served: 'qwen3_5_moe'")
    for name, served in _ONLY:
        value = text.get(name, served)
        if value != served:
            problems.append(f"{name} is {value!r}, served: {served!r}")
    rope = text.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        problems.append(f"rope_parameters.rope_type is {rope['rope_type']!r}, served: 'default'")
    if not rope.get("mrope_interleaved", True):
        problems.append("rope_parameters.mrope_interleaved is False, served: True")
    return problems


def _shape_problems(config: ModelConfig) -> list[str]:
    """Checks that the sizes fit each other."""
    problems: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type == "int" and field.name != "mtp_num_hidden_layers" and value < 1:
            problems.append(f"{field.name} is {value}, must be at least 1")
    if problems:
        return problems
    unknown = sorted(set(config.layer_types) - {LINEAR_ATTENTION, FULL_ATTENTION})
    if unknown or not config.layer_types:
        problems.append(
            f"layer_types has {unknown or 'no entry'}, served: {LINEAR_ATTENTION!r}, {FULL_ATTENTION!r}"
        )
    for whole, part in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if getattr(config, whole) % getattr(config, part):
            problems.append(
                f"{whole} is {getattr(config, whole)}, must be a multiple of {part}"
                f" ({getattr(config, part)})"
            )
    if config.rotary_dim % 2 or not 0 < config.rotary_dim <= config.head_dim:
        problems.append(
            f"partial_rotary_factor {config.partial_rotary_factor} rotates {config.rotary_dim} of"
            f" {config.head_dim} dimensions, must be an even number from 2"
        )
    elif len(config.mrope_section) != 3 or sum(config.mrope_section) != config.rotary_dim // 2:
        problems.append(
            f"mrope_section is {list(config.mrope_section)}, must be three counts with the sum"
            f" {config.rotary_dim // 2}"
        )
    if config.num_experts_per_tok > config.num_experts:
        problems.append(
            f"num_experts_per_tok is {config.num_experts_per_tok}, must be at most num_experts"
            f" ({config.num_experts})"
        )
    if config.linear_conv_kernel_dim < 2:
        problems.append("linear_conv_kernel_dim is 1, must be at least 2")
    if config.mtp_num_hidden_layers not in (0, 1):
        problems.append(f"mtp_num_hidden_layers is {config.mtp_num_hidden_layers}, served: 0 or 1")
    return problems
