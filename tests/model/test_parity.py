"""The same as the goldens, live against transformers (extra `parity`), at every position.

Each part gets the reference's own input, so that an error shows in the part that makes it.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import model_passes
import reference_weights
import tiny
from model.config import ModelConfig
from model.layers import rotary_embedding
from model_passes import CachedPass, executor, transformer
from reference_weights import BY_NAME, RECIPES, Recipe
from service.engine.types import Request, SamplingParams

pytest.importorskip("torch", reason="needs torch: pip install -e .[parity]")
pytest.importorskip("transformers", reason="needs transformers: pip install -e .[parity]")

import torch_reference

TOLERANCE = 1e-4
PART_TOLERANCE = 2e-5
REPLY_TOKENS = 64
# Another seed than the recorded one: other weights and tokens.
OTHERS = tuple(dataclasses.replace(recipe, seed=20) for recipe in RECIPES)

both_seeds = pytest.mark.parametrize(
    "recipe", RECIPES + OTHERS, ids=lambda recipe: f"{recipe.name}-{recipe.seed}"
)
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


@functools.cache
def reference(recipe: Recipe) -> torch_reference.Reference:
    return torch_reference.build(recipe)


def assert_close(got, want, tolerance: float = TOLERANCE, name: str = "") -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance, err_msg=name)


@every_recipe
def test_parts(recipe):
    """DeltaNet, attention, expert choice, MoE and layer output, each on the reference's input."""
    want = reference(recipe).layers(recipe.tokens_BT)
    model = transformer(recipe)
    rotary = model_passes.text_rotary(model, recipe.tokens_BT.shape)
    for index, layer in enumerate(model.layers):
        x_BTD = jnp.asarray(want[f"{index}.input"])
        got = model_passes.layer_parts(layer, x_BTD, rotary)
        np.testing.assert_array_equal(got.pop("experts"), want[f"{index}.experts"])
        for name, array in got.items():
            assert_close(array, want[f"{index}.{name}"], PART_TOLERANCE, f"{index}.{name}")
        output = model_passes.layer_output(layer, x_BTD, rotary)
        assert_close(output, want[f"{index}.output"], PART_TOLERANCE, f"{index}")


@both_seeds
def test_whole_model_in_a_padded_batch(recipe):
    want = reference(recipe).logits(recipe.tokens_BT, recipe.lengths)
    got = model_passes.logits(transformer(recipe), recipe.tokens_BT)
    assert_close(np.asarray(got)[recipe.valid_BT], want[recipe.valid_BT])


@every_recipe
def test_step_by_step(recipe):
    """Our caches against the reference's own cache, token by token, from the middle of a row."""
    ids = recipe.tokens_BT[0, : recipe.lengths[0]]
    middle = len(ids) // 2 + 1
    want = reference(recipe).step_by_step(ids[:middle], ids[middle:])
    cached = CachedPass(recipe)
    assert_close(cached.logits(ids, middle, per_round=1), want[middle:])


@pytest.mark.parametrize("name", ["value_heads_twice"])
def test_greedy_reply(name):
    """64 tokens of the decode program, at the least and the greatest draft length."""
    recipe = BY_NAME[name]
    prompt = recipe.tokens_BT[1, : recipe.lengths[1]]
    want, _ = reference(recipe).greedy(prompt, REPLY_TOKENS)
    driver = tiny.Driver(executor(recipe))
    request = Request("r", tuple(prompt.tolist()), REPLY_TOKENS, SamplingParams(temperature=0.0))
    for draft_cap in (0, 3):
        assert driver.run(request, draft_cap) == want, draft_cap


@every_recipe
def test_greedy_reply_round_by_round(recipe):
    prompt = recipe.tokens_BT[0, : recipe.lengths[0]]
    reply, _ = reference(recipe).greedy(prompt, REPLY_TOKENS)
    cached = CachedPass(recipe)
    logits_TV = cached.logits(np.concatenate([prompt, reply[:-1]]), len(prompt) - 1, per_round=1)
    assert logits_TV.argmax(-1).tolist() == reply


@every_recipe
def test_mtp_head(recipe):
    """Three deep; each depth on the reference's own hidden states. Case 6: equal drafts."""
    model, tokens_BT = transformer(recipe), recipe.tokens_BT
    hidden_BTD = reference(recipe).layers(tokens_BT)["hidden"]
    for depth in (1, 2, 3):
        next_tokens_BT = np.roll(tokens_BT, -depth, axis=1)
        got = model_passes.draft(model, jnp.asarray(hidden_BTD), next_tokens_BT)
        hidden_BTD, want_BTV = reference(recipe).draft(hidden_BTD, next_tokens_BT)
        assert_close(got, hidden_BTD, PART_TOLERANCE, f"depth {depth}")
        got_BTV = model.logits(got)
        assert_close(got_BTV, want_BTV, TOLERANCE, f"depth {depth}")
        np.testing.assert_array_equal(np.argmax(got_BTV, -1), want_BTV.argmax(-1))


@pytest.mark.parametrize("recipe", [*RECIPES, None], ids=lambda r: r.name if r else "published")
def test_rotary_positions_on_three_axes(recipe):
    hf_config = recipe.hf_config if recipe else reference_weights.PUBLISHED_ROTARY
    # Far positions: see the golden test.
    positions_3BT = reference_weights.axes_positions()[:, :1]
    want = torch_reference.rotary(hf_config, positions_3BT)
    got = rotary_embedding(jnp.asarray(positions_3BT), ModelConfig.from_hf(hf_config))
    for ours, theirs in zip(got, want, strict=True):
        assert_close(ours, theirs, 1e-5)
