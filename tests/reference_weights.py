"""Random models that torch, JAX and NumPy build alike: every tensor follows from its name.

No weights are stored beside the recorded outputs (`tests/golden/`): a tensor is drawn from the raw
64-bit stream of PCG64, which NumPy guarantees never to change, keyed by seed and name. Only exact
products and sums follow, so the bits are the same on every machine.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model import checkpoint
from model.config import ModelConfig
from model.transformer import Transformer

_PREFIX = "model.language_model."


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What it takes to build one random model, and the tokens that it is asked about."""

    name: str
    hf_config: dict[str, Any] = dataclasses.field(hash=False)
    lengths: tuple[int, int]
    """Tokens in the two rows of its batch; the shorter one is padded on the right."""
    gain: float = 0.3
    """Scale of what the layers add to the residual stream, against token embeddings of 0.6."""
    seed: int = 24

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_hf(self.hf_config)

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every parameter, in the order of our module tree, by the name that keys its values."""
        expected = checkpoint.expected_tensors(self.config, jnp.float32)
        return {name.removeprefix(_PREFIX): leaf.shape for name, leaf in expected.items()}

    @property
    def tokens_BT(self) -> np.ndarray:
        """Token ids, int32."""
        draw = self._uniform("tokens", (len(self.lengths), max(self.lengths)))
        return ((draw + 1.0) * 0.5 * self.hf_config["vocab_size"]).astype(np.int32)

    @property
    def valid_BT(self) -> np.ndarray:
        """False for padding."""
        return np.arange(max(self.lengths)) < np.asarray(self.lengths)[:, None]

    def tensor(self, name: str) -> np.ndarray:
        """A parameter in float32; `name` is the hub's without `model.` or `model.language_model.`.

        Norm weights lie around +0.3, those before `mtp.fc` around 0.49 and 0.27, as in the published
        model: they are offsets from one, and a shift that is missing or made twice shows.
        """
        shape = self.shapes[name]
        draw = self._uniform(name, shape)
        if name.endswith("A_log"):
            draw = 3.0 * draw - 1.0  # from a memory of hundreds of tokens to almost none
        elif name.endswith("linear_attn.norm.weight"):
            draw = 1.0 + 0.3 * draw
        elif name.endswith("pre_fc_norm_embedding.weight"):
            draw = 0.49 + 0.2 * draw
        elif name.endswith("pre_fc_norm_hidden.weight"):
            draw = 0.27 + 0.2 * draw
        elif name.endswith("norm.weight"):
            draw = 0.3 + 0.3 * draw
        elif name.endswith("conv1d.weight"):
            draw = 3.0 * draw
        elif not name.endswith(("embed_tokens.weight", "dt_bias")):
            # Standard deviation 1 / sqrt(inputs) for linear maps, [out, in] or [experts, out, in].
            draw = draw * (3.0 / shape[-1]) ** 0.5
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                draw = draw * self.gain
        return draw.astype(np.float32)

    def transformer(self) -> Transformer:
        """Our model, float32."""
        config = self.config
        abstract = jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
        leaves = [jnp.asarray(self.tensor(name)) for name in self.shapes]
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves)

    def fingerprint(self) -> int:
        """Checksum of all weights: tells weights drawn otherwise from a model that went wrong."""
        total = 0
        for name in sorted(self.shapes):
            total = zlib.crc32(self.tensor(name).tobytes(), total)
        return total

    def _uniform(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Float64 in [-1, 1), from seed and name alone."""
        stream = np.random.PCG64([self.seed, zlib.crc32(name.encode())])
        raw = np.asarray(stream.random_raw(int(np.prod(shape)))) >> np.uint64(11)
        return (raw.astype(np.float64) * 2.0**-52 - 1.0).reshape(shape)


def _hf_config(
    layers: str, theta: float, rotating: float, section: tuple[int, int, int], **replaced: Any
) -> dict[str, Any]:
    """A hub config; one letter per layer: d for DeltaNet, a for attention."""
    kinds = {"d": "linear_attention", "a": "full_attention"}
    return {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": len(layers),
        "layer_types": [kinds[letter] for letter in layers],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": rotating,
            "mrope_section": list(section),
            "mrope_interleaved": True,
        },
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "mtp_num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "eos_token_id": None,
    } | replaced


RECIPES = (
    Recipe(
        "value_heads_equal",
        _hf_config("dad", 1e4, 0.5, (2, 1, 1), linear_num_value_heads=2),
        lengths=(75, 63),
    ),
    # Like the published model: order of layers, value heads, rotating quarter, theta.
    Recipe(
        "value_heads_twice",
        _hf_config(
            "ddda",
            1e7,
            0.25,
            (2, 1, 1),
            num_key_value_heads=1,
            head_dim=32,
            linear_value_head_dim=24,
            num_experts=16,
            num_experts_per_tok=4,
        ),
        lengths=(102, 130),
    ),
    Recipe(
        "value_heads_fourfold",
        _hf_config(
            "ad",
            1e4,
            0.75,
            (3, 2, 1),
            vocab_size=101,
            hidden_size=48,
            num_attention_heads=6,
            num_key_value_heads=3,
            linear_num_key_heads=1,
            linear_key_head_dim=12,
            linear_conv_kernel_dim=3,
            num_experts=5,
            num_experts_per_tok=3,
            shared_expert_intermediate_size=40,
            rms_norm_eps=1e-5,
        ),
        lengths=(65, 9),
    ),
    Recipe(
        "attention_only",
        _hf_config(
            "aa",
            1e6,
            1.0,
            (4, 2, 2),
            num_key_value_heads=4,
            num_experts_per_tok=1,
            tie_word_embeddings=True,
        ),
        lengths=(33, 17),
        gain=2.0,
    ),
)
"""Wide enough, and so scaled, that float32 rounding itself stays far below the 1e-4 asked of us."""

BY_NAME = {recipe.name: recipe for recipe in RECIPES}

PUBLISHED_ROTARY = _hf_config("a", 1e7, 0.25, (11, 11, 10), head_dim=256)
"""With the rotary positions of Qwen3.6-35B-A3B: 64 of 256 dimensions, sections 11, 11, 10."""


def axes_positions() -> np.ndarray:
    """Positions [3, 2, 48], int32: text, a 4 x 6 image and text again; and three unlike axes."""
    text = np.arange(12)
    image = np.stack([np.full(24, 12), 12 + np.arange(24) // 6, 12 + np.arange(24) % 6])
    mixed = np.concatenate([np.tile(text, (3, 1)), image, np.tile(18 + text, (3, 1))], axis=1)
    apart = np.stack([np.arange(48), 3 * np.arange(48) + 1000, 262_143 - np.arange(48)])
    return np.stack([mixed, apart], axis=1).astype(np.int32)
