"""What a decode round must read and write: the floor that speeds are held against."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx

from model.config import ModelConfig
from model.decoder_layer import DecoderLayer
from model.quantization import QuantizedWeight
from model.weight_layouts import WeightLayout, abstract_model


def round_bytes(
    config: ModelConfig,
    streams: int,
    draft_length: int,
    item_bytes: int,
    layout: WeightLayout | None = None,
) -> int:
    """Bytes that one decode round must move; keys, values and activations are left out.

    Every weight in use is read once: dense ones by the verification; of the experts as many distinct
    ones as `streams * (draft_length + 1)` independent tokens would choose, E (1 - (1 - A / E)^tokens);
    per draft token the head's layer with the experts of `streams` tokens, and the output head. The
    recurrent state is read and written once.

    Args:
      config: the model.
      streams: running slots.
      draft_length: draft tokens per round and slot.
      item_bytes: of a weight that is not quantised.
      layout: says which are, and how.
    """
    model = abstract_model(config, layout)
    size = partial(_size, item_bytes=item_bytes)
    head = size(model.embed_tokens if model.lm_head is None else model.lm_head)
    verified = head + size(model.norm)
    for layer in model.layers:
        verified += _used(layer, config, streams * (draft_length + 1), size)
    drafted = 0
    if model.mtp is not None and draft_length:
        drafted = _used(model.mtp.layers[0], config, streams, size) + size(model.mtp.fc) + head
    state_items = (
        config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    )
    recurrent_layers = sum("linear" in kind for kind in config.layer_types)
    state_bytes = 2 * 4 * streams * recurrent_layers * state_items
    return verified + draft_length * drafted + state_bytes


def replay_bytes(config: ModelConfig, draft_length: int) -> int:
    """Bytes per slot that speculation adds to the decode state.

    DeltaNet keeps the inputs of the last round's tokens until it knows which were accepted: per draft
    token and layer k, v, gate, beta and the convolution's inputs, float32. Attention keeps nothing
    more: rejected keys and values are written over.
    """
    per_token = (
        config.linear_key_dim
        + config.linear_value_dim
        + 2 * config.linear_num_value_heads
        + config.conv_dim
    )
    recurrent_layers = sum("linear" in kind for kind in config.layer_types)
    return 4 * recurrent_layers * per_token * draft_length


def _used(
    layer: DecoderLayer, config: ModelConfig, tokens: int, size: Callable[[nnx.Module], int]
) -> int:
    """Bytes of a layer's weights that `tokens` independent tokens make it read."""
    experts = size(layer.mlp.experts)
    missed = (1 - config.num_experts_per_tok / config.num_experts) ** tokens
    return size(layer) - experts + round(experts * (1 - missed))


def _size(tree: nnx.Module, item_bytes: int) -> int:
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))
    return sum(
        leaf.nbytes if isinstance(leaf, QuantizedWeight) else item_bytes * leaf.size
        for leaf in leaves
    )
