"""Recorded outputs of transformers (`tools/make_goldens.py`), layer by layer and whole; no torch.

Weights follow from their names (`reference_weights.py`). Logits must agree within 1e-4: the random
models are scaled so that float32 rounding alone moves them by less than 3e-5.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
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

FOLDER = Path(__file__).parent.parent / "golden"
TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0.0)

every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return dict(arrays)


def assert_close(got, want, name: str = "") -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE, err_msg=name)


@every_recipe
def test_weights_and_tokens_are_those_of_the_recording(recipe):
    """If this fails, no other test of this file says anything about the model."""
    about = json.loads(golden(recipe.name)["about"].item())
    assert about["hf_config"] == recipe.hf_config
    assert about["fingerprint"] == recipe.fingerprint()
    np.testing.assert_array_equal(golden(recipe.name)["tokens"], recipe.tokens_BT)


@every_recipe
def test_layers(recipe):
    """Every mixer, every expert choice, every MoE, in the order in which an error would spread."""
    want = golden(recipe.name)
    got = model_passes.layers(transformer(recipe), recipe.tokens_BT)
    assert {f"layers.{name}" for name in got} == {n for n in want if n.startswith("layers.")}
    for name, array in got.items():
        sampled = np.stack([row[at] for row, at in zip(array, want["positions"], strict=True)])
        assert_close(sampled, want[f"layers.{name}"], name)


@every_recipe
def test_whole_model(recipe):
    """Case 23: norm weights around +0.3. Two rows, one padded on the right."""
    logits_BTV = model_passes.logits(transformer(recipe), recipe.tokens_BT)
    assert_close(np.asarray(logits_BTV)[recipe.valid_BT], golden(recipe.name)["logits"])


@every_recipe
def test_prefill_and_decode_rounds(recipe):
    """Chunks of 32, then rounds of one token and of four: the same logits at every position."""
    cached = CachedPass(recipe)
    for row, (ids, length) in enumerate(zip(recipe.tokens_BT, recipe.lengths, strict=True)):
        first = sum(recipe.lengths[:row])
        want = golden(recipe.name)["logits"][first : first + length]
        for per_round, prefilled in ((1, length // 2 + 1), (4, length % 4 + 4)):
            assert_close(cached.logits(ids[:length], prefilled, per_round), want[prefilled:])


@pytest.mark.parametrize(
    ("name", "prefill_chunk"), [(name, 32) for name in BY_NAME] + [("value_heads_twice", 128)]
)
def test_greedy_reply_round_by_round(name, prefill_chunk):
    """Chunked and one-shot prefill; each of 64 recorded tokens is the choice after those before."""
    recipe = BY_NAME[name]
    prompt, reply = recipe.tokens_BT[0, : recipe.lengths[0]], golden(recipe.name)["reply"]
    cached = CachedPass(recipe, prefill_chunk)
    logits_TV = cached.logits(np.concatenate([prompt, reply[:-1]]), len(prompt) - 1, per_round=1)
    assert logits_TV.argmax(-1).tolist() == reply.tolist()


@pytest.mark.parametrize("name", ["value_heads_twice", "value_heads_fourfold"])
def test_greedy_reply(name):
    """The prefill and decode programs as the service runs them, with and without drafts."""
    recipe = BY_NAME[name]
    driver = tiny.Driver(executor(recipe))
    prompt = tuple(recipe.tokens_BT[0, : recipe.lengths[0]].tolist())
    for draft_cap in (0, 3):
        reply = driver.run(Request("r", prompt, 64, GREEDY), draft_cap)
        assert reply == golden(name)["reply"].tolist(), draft_cap


@every_recipe
def test_mtp_head(recipe):
    """Recursion over whole sequences, three deep: hidden states, logits and drafts."""
    want, model = golden(recipe.name), transformer(recipe)
    hidden_BTD = jnp.asarray(model_passes.layers(model, recipe.tokens_BT)["hidden"])
    rows_B1 = np.arange(len(recipe.lengths))[:, None]
    for depth in (1, 2, 3):
        hidden_BTD = model_passes.draft(
            model, hidden_BTD, np.roll(recipe.tokens_BT, -depth, axis=1)
        )
        sampled = hidden_BTD[rows_B1, want["positions"]]
        logits, recorded = model.logits(sampled), want[f"draft.{depth}.logits"]
        assert_close(sampled, want[f"draft.{depth}.hidden"], f"depth {depth}")
        assert_close(logits, recorded, f"depth {depth}")
        np.testing.assert_array_equal(np.argmax(logits, -1), recorded.argmax(-1))


def test_every_parameter_shows():
    """The tolerance is no veil: a change of any tensor by a hundredth goes far beyond it."""
    recipe = BY_NAME["value_heads_fourfold"]
    leaves, treedef = jax.tree.flatten(transformer(recipe))
    next_tokens_BT = np.roll(recipe.tokens_BT, -1, axis=1)
    want = golden(recipe.name)["logits"]
    drafted = model_passes.draft(*hidden_of(transformer(recipe), recipe), next_tokens_BT)
    for index, name in enumerate(recipe.shapes):
        # Not by a factor: the norms of q and k would take it out again.
        change = 0.01 * jnp.roll(leaves[index].reshape(-1), 1).reshape(leaves[index].shape)
        changed = [*leaves[:index], leaves[index] + change, *leaves[index + 1 :]]
        model = jax.tree.unflatten(treedef, changed)
        if name.startswith("mtp."):
            got = model_passes.draft(*hidden_of(model, recipe), next_tokens_BT)
            error = jnp.abs(got - drafted).max()
        else:
            logits_BTV = np.asarray(model_passes.logits(model, recipe.tokens_BT))
            error = np.abs(logits_BTV[recipe.valid_BT] - want).max()
        assert error > 3 * TOLERANCE, name


def hidden_of(model, recipe: Recipe) -> tuple:
    return model, jnp.asarray(model_passes.layers(model, recipe.tokens_BT)["hidden"])


def test_rotary_positions_on_three_axes():
    """Text, an image, and axes that have nothing in common, in the published model's shape.

    A frequency that is rounded otherwise in its last bits turns far positions by more than 1e-6.
    """
    want = golden("rotary")
    positions_3BT = reference_weights.axes_positions()
    np.testing.assert_array_equal(want["positions"], positions_3BT)
    config = ModelConfig.from_hf(reference_weights.PUBLISHED_ROTARY)
    frequency_Q = config.rope_theta ** (-np.arange(0, config.rotary_dim, 2) / config.rotary_dim)
    angle_BTQ = positions_3BT.max(axis=0)[..., None] * frequency_Q
    cos_sin = rotary_embedding(jnp.asarray(positions_3BT), config)
    for got, name in zip(cos_sin, ("cos", "sin"), strict=True):
        error_BTQ = np.abs(np.asarray(got) - want[name])
        assert np.all(error_BTQ <= 1e-6 + 4 * np.finfo(np.float32).eps * angle_BTQ), name
        np.testing.assert_allclose(got[0], want[name][0], rtol=0, atol=1e-5, err_msg=name)
