"""The bytes of a round and of a slot against sums made by hand."""

from __future__ import annotations

import jax
import pytest

import qwen3_6
import tiny
from model import state as state_lib
from model.config import ModelConfig
from model.costs import replay_bytes, round_bytes
from model.weight_layouts import LAYOUTS


def test_replay_inputs_are_what_the_state_holds_more_with_drafts():
    """A slot's state grows by exactly the reported bytes per draft token, KV pages apart."""
    config = tiny.config()

    def recurrent_bytes(draft_length: int) -> int:
        shape = tiny.dataclasses.replace(tiny.SHAPE, slots=1, draft_length=draft_length)
        state = jax.eval_shape(lambda: state_lib.init_state(config, shape, "float32"))
        caches = [cache for cache in state.caches if hasattr(cache, "state_BWPR")]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))

    for draft_length in (1, 3, 4):
        grown = recurrent_bytes(draft_length) - recurrent_bytes(0)
        assert replay_bytes(config, draft_length) == grown


def test_round_bytes():
    """Every expert in use: all weights but embedding and MTP head, and the state twice."""
    config = tiny.config()
    model = tiny.model(config)
    everything = sum(leaf.size for leaf in jax.tree.leaves(model))
    drafting = sum(leaf.size for leaf in jax.tree.leaves(model.mtp))
    table = model.embed_tokens.weight.size
    state = 3 * 4 * 8 * 8 * 4 * 2
    many = round_bytes(config, streams=1000, draft_length=0, item_bytes=4)
    assert many == 4 * (everything - drafting - table) + 1000 * state
    # One token reads two of eight experts.
    unused = (
        4
        * (6 / 8)
        * sum(leaf.size for layer in model.layers for leaf in jax.tree.leaves(layer.mlp.experts))
    )
    one = round_bytes(config, streams=1, draft_length=0, item_bytes=4)
    assert one == 4 * (everything - drafting - table) - unused + state
    assert round_bytes(config, streams=1, draft_length=3, item_bytes=4) > one


def test_round_bytes_of_the_real_model(subtests):
    """The published layouts, as the facts of the real model state them, in GB (decimal)."""
    config = ModelConfig.from_hf(qwen3_6.HF_CONFIG)
    for layout, streams, expected in (("fp8", 1, 3.61), ("nvfp4", 16, 10.9)):
        with subtests.test(layout=layout, streams=streams):
            moved = round_bytes(config, streams, 0, 2, LAYOUTS[layout])
            assert moved / 1e9 == pytest.approx(expected, rel=0.02)
