"""Case 6: the MTP head drafts what a plain NumPy head drafts.

Text cannot show a mistake in the head, since every draft is verified; so the drafts themselves are
compared, and heads with the known mistakes (order of the two inputs, hidden state before the final
norm, recursion before `mtp.norm`, token not shifted) must stand out.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import model_passes
import tiny
from model_passes import executor, transformer
from numpy_reference import moe, rms_norm, sigmoid, softmax
from reference_weights import BY_NAME, RECIPES, Recipe
from service.engine.types import Request, SamplingParams

RECIPE = BY_NAME["value_heads_twice"]
PROMPT_TOKENS = 40
REPLY_TOKENS = 48
# How many of the drafts are replaced by right ones before each call; the rest are made wrong.
RIGHT_DRAFTS = (3, 0, 2, 1, 3, 3, 1, 0)


class NumpyHead:
    """float64, one row at a time; rows before the newest are its keys and values."""

    def __init__(self, recipe: Recipe, *, hidden_first: bool = False, late_norm: bool = False):
        self.config = recipe.config
        head = "embed_tokens" if recipe.config.tie_word_embeddings else "lm_head"
        self.weights = {
            name: recipe.tensor(name).astype(np.float64)
            for name in recipe.shapes
            if name.startswith(("mtp.", "embed_tokens.", head))
        }
        self.output_head_VD = self.weights[f"{head}.weight"]
        self.hidden_first, self.late_norm = hidden_first, late_norm
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def row(self, token: int, hidden_D: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One more row: the next token and this hidden state.

        Returns:
          (hidden state to feed back, logits of the token after `token`).
        """
        embedded_D = self.norm(self.weights["embed_tokens.weight"][token], "pre_fc_norm_embedding")
        both = [embedded_D, self.norm(hidden_D, "pre_fc_norm_hidden")]
        u_D = self.weights["mtp.fc.weight"] @ np.concatenate(
            both[::-1] if self.hidden_first else both
        )
        x_D = u_D + self.attention(self.norm(u_D, "layers.0.input_layernorm"))
        normed_D = self.norm(x_D, "layers.0.post_attention_layernorm")
        experts = self.config.num_experts_per_tok
        y_D = x_D + moe(normed_D, self.weights, "mtp.layers.0.mlp.", experts)
        after_D = self.norm(y_D, "norm")
        return (y_D if self.late_norm else after_D), self.output_head_VD @ after_D

    def attention(self, x_D: np.ndarray) -> np.ndarray:
        size, position = self.config.head_dim, len(self.keys)
        both_NH = self.heads("q_proj", x_D, 2 * size)
        q_NH = self.rotate(self.norm(both_NH[:, :size], "layers.0.self_attn.q_norm"), position)
        k_KH = self.norm(self.heads("k_proj", x_D, size), "layers.0.self_attn.k_norm")
        self.keys.append(self.rotate(k_KH, position))
        self.values.append(self.heads("v_proj", x_D, size))
        k_SKH, v_SKH = np.stack(self.keys), np.stack(self.values)
        out = []
        for head, q_H in enumerate(q_NH):
            kv = head // (q_NH.shape[0] // k_KH.shape[0])
            weights_S = softmax(k_SKH[:, kv] @ q_H / np.sqrt(size))
            out.append(weights_S @ v_SKH[:, kv] * sigmoid(both_NH[head, size:]))
        return self.weights["mtp.layers.0.self_attn.o_proj.weight"] @ np.concatenate(out)

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        half = self.config.rotary_dim // 2
        angle_Q = position * self.config.rope_theta ** (-np.arange(half) / half)
        first, second, rest = np.split(x, [half, 2 * half], axis=-1)
        cos, sin = np.cos(angle_Q), np.sin(angle_Q)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def heads(self, name: str, x_D: np.ndarray, size: int) -> np.ndarray:
        return (self.weights[f"mtp.layers.0.self_attn.{name}.weight"] @ x_D).reshape(-1, size)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x, self.weights[f"mtp.{name}.weight"], self.config.rms_norm_eps)

    def drafts(self, hidden_TD: np.ndarray, tokens: list[int], count: int) -> list[int]:
        """Draft tokens after `tokens`, whose last one the model has not seen yet.

        Args:
          hidden_TD: of all tokens but the last.
          tokens: the sequence so far; rows made before are kept.
          count: how many to draft.
        """
        result = (hidden_TD[-1], np.zeros(0))
        for at in range(len(self.keys), len(hidden_TD)):
            result = self.row(tokens[at + 1], hidden_TD[at])
        verified, drafts = len(self.keys), []
        for _ in range(count):
            drafts.append(int(result[1].argmax()))
            result = self.row(drafts[-1], result[0])
        del self.keys[verified:], self.values[verified:]
        return drafts


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_whole_sequences(recipe):
    """Recursion three deep over given tokens: hidden states, logits, drafts of every row."""
    model, tokens_T = transformer(recipe), recipe.tokens_BT[0, : recipe.lengths[0]]
    tokens_BT, length = recipe.tokens_BT, recipe.lengths[0]
    hidden_BTD = jnp.asarray(model_passes.layers(model, tokens_BT)["hidden"])
    want_TD = np.asarray(hidden_BTD[0], np.float64)
    for depth in (1, 2, 3):
        hidden_BTD = model_passes.draft(model, hidden_BTD, np.roll(tokens_BT, -depth, axis=1))
        head = NumpyHead(recipe)
        rows = [head.row(tokens_T[at + depth], want_TD[at]) for at in range(length - depth)]
        want_TD, want_TV = (np.stack(arrays) for arrays in zip(*rows, strict=True))
        got_TD = hidden_BTD[0, : length - depth]
        np.testing.assert_allclose(got_TD, want_TD, rtol=0, atol=1e-4)
        got_TV = np.asarray(model.logits(got_TD))
        np.testing.assert_allclose(got_TV, want_TV, rtol=0, atol=1e-4)
        np.testing.assert_array_equal(got_TV.argmax(-1), want_TV.argmax(-1))


@dataclasses.dataclass(frozen=True)
class Drafted:
    """What the decode program did for one request: its tokens, and its drafts after each call."""

    tokens: tuple[int, ...]
    calls: tuple[tuple[int, tuple[int, ...]], ...]
    """(length of the sequence, the drafts after it)."""
    accepted: tuple[int, ...]


@functools.cache
def drafted(draft_cap: int) -> Drafted:
    """A greedy request in the shared executor, whose drafts are meddled with before each call.

    The prompt is prefilled in two chunks. Right drafts make rounds of several tokens, wrong ones
    leave rows in the head's cache that must be written over.
    """
    driver = tiny.Driver(executor(RECIPE))
    prompt = tuple(RECIPE.tokens_BT[0, :PROMPT_TOKENS].tolist())
    request = Request("r", prompt, REPLY_TOKENS, SamplingParams(temperature=0.0))
    reply = driver.run(request, 0)
    padded = np.asarray(reply + [0] * 4, np.int32)
    calls, accepted = [], []
    driver.start(0, request, draft_cap)
    while 0 in driver.active:
        done, state = len(driver.replies[0]), driver.executor._state
        right = RIGHT_DRAFTS[len(calls) % len(RIGHT_DRAFTS)]
        meddled = (padded[done : done + 3] + (np.arange(3) >= right)) % RECIPE.config.vocab_size
        drafts_BU = state.drafts_BU.at[0].set(meddled)
        driver.executor._state = dataclasses.replace(state, drafts_BU=drafts_BU)
        driver.step()
        state, rounds = driver.executor._state, driver.rounds[0][-1]
        accepted += rounds.accepted
        count = int(state.draft_count_B[0])
        length = PROMPT_TOKENS + len(driver.replies[0])
        left = REPLY_TOKENS - len(driver.replies[0])
        assert count == max(0, min(draft_cap, left - 1))
        calls.append((length, tuple(state.drafts_BU[0, :count].tolist())))
    assert driver.replies[0] == reply
    return Drafted((*prompt, *reply), tuple(calls), tuple(accepted))


@functools.cache
def hidden_states(draft_cap: int, *, final_norm: bool = True) -> np.ndarray:
    """True hidden states of prompt and reply, from the pass over the whole sequence."""
    tokens_BT = np.tile(np.asarray(drafted(draft_cap).tokens, np.int32), (2, 1))
    seen = model_passes.layers(transformer(RECIPE), tokens_BT)
    last = f"{RECIPE.config.num_layers - 1}.output"
    return seen["hidden" if final_norm else last][0].astype(np.float64)


def agreement(head: NumpyHead, hidden_TD: np.ndarray, run: Drafted, shift: int = 0) -> float:
    """Share of the program's drafts that the NumPy head drafts too, at the same place."""
    tokens, same = [*([0] * shift), *run.tokens], []
    for length, drafts in run.calls:
        want = head.drafts(hidden_TD[: length - 1], tokens[:length], len(drafts))
        same += [ours == theirs for ours, theirs in zip(drafts, want, strict=True)]
    return float(np.mean(same))


@pytest.mark.parametrize("draft_cap", [1, 2, 3])
def test_decode_program(draft_cap):
    """After every call, the drafts are those of the NumPy head on the true hidden states."""
    run = drafted(draft_cap)
    assert set(range(draft_cap + 1)) <= set(run.accepted), "rounds of every length took part"
    assert agreement(NumpyHead(RECIPE), hidden_states(draft_cap), run) == 1.0


def test_the_comparison_notices_swapped_inputs():
    head = NumpyHead(RECIPE, hidden_first=True)
    assert agreement(head, hidden_states(3), drafted(3)) < 0.2


def test_the_comparison_notices_the_hidden_state_before_the_final_norm():
    assert agreement(NumpyHead(RECIPE), hidden_states(3, final_norm=False), drafted(3)) < 0.9


def test_the_comparison_notices_recursion_before_the_head_norm():
    """Only drafts after the first can tell."""
    head = NumpyHead(RECIPE, late_norm=True)
    assert agreement(head, hidden_states(3), drafted(3)) < 0.9
    assert agreement(NumpyHead(RECIPE, late_norm=True), hidden_states(1), drafted(1)) == 1.0


def test_the_comparison_notices_a_token_that_is_not_shifted():
    assert agreement(NumpyHead(RECIPE), hidden_states(3), drafted(3), shift=1) < 0.2
