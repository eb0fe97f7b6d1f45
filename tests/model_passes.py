"""Our model's passes, opened up: layer by layer, and step by step through the caches.

Models, executors and compiled passes are shared by all test files that ask for the same recipe.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import tiny
from model.attention import Rotary
from model.cache import place
from model.decoder_layer import DecoderLayer
from model.layers import rotary_embedding
from model.transformer import Transformer
from reference_weights import Recipe
from service.engine.executor import JaxExecutor
from service.engine.types import Request


@functools.cache
def transformer(recipe: Recipe) -> Transformer:
    """Our model of a recipe."""
    return recipe.transformer()


@functools.cache
def executor(recipe: Recipe, prefill_chunk: int = 32) -> JaxExecutor:
    """An executor over it; no slot may be left running."""
    return tiny.executor(
        transformer(recipe),
        prefill_chunk=prefill_chunk,
        addressable_tokens=recipe.config.vocab_size,
    )


@jax.jit
def logits(model: Transformer, tokens_BT: jax.Array) -> jax.Array:
    """One pass over whole sequences."""
    return model.logits(model(tokens_BT))


@jax.jit
def draft(model: Transformer, hidden_BTD: jax.Array, next_tokens_BT: jax.Array) -> jax.Array:
    """One whole-sequence pass of the MTP head."""
    return model.draft(hidden_BTD, next_tokens_BT)


def layers(model: Transformer, tokens_BT: np.ndarray) -> dict[str, np.ndarray]:
    """What every part makes of the part before it.

    Returns:
      Per layer i: `i.input`, `i.mixer` (attention or DeltaNet), `i.experts` (chosen ids), `i.mlp`,
      `i.output`; and `hidden`, after the final norm.
    """
    return jax.device_get(_layers(model, jnp.asarray(tokens_BT)))


@jax.jit
def _layers(model: Transformer, tokens_BT: jax.Array) -> dict[str, jax.Array]:
    x_BTD = model.embed_tokens(tokens_BT)
    seen: dict[str, jax.Array] = {}
    for index, layer in enumerate(model.layers):
        parts = layer_parts(layer, x_BTD, text_rotary(model, tokens_BT.shape))
        seen |= {f"{index}.input": x_BTD} | {f"{index}.{name}": a for name, a in parts.items()}
        x_BTD = parts["output"]
    return seen | {"hidden": model.norm(x_BTD)}


@jax.jit
def layer_output(layer: DecoderLayer, x_BTD: jax.Array, rotary: Rotary) -> jax.Array:
    """The layer's own pass."""
    return layer(x_BTD, rotary)


@jax.jit
def layer_parts(layer: DecoderLayer, x_BTD: jax.Array, rotary: Rotary) -> dict[str, jax.Array]:
    """The parts of one layer, on a given input."""
    normed_BTD = layer.input_layernorm(x_BTD)
    if layer.kind == "full_attention":
        mixed_BTD = layer.self_attn(normed_BTD, rotary)
    else:
        mixed_BTD = layer.linear_attn(normed_BTD)
    normed_BTD = layer.post_attention_layernorm(x_BTD + mixed_BTD)
    ids_ZA, _ = layer.mlp.route(normed_BTD.reshape(-1, normed_BTD.shape[-1]))
    return {
        "mixer": mixed_BTD,
        "experts": ids_ZA.reshape(*x_BTD.shape[:2], -1),
        "mlp": (mlp_BTD := layer.mlp(normed_BTD)),
        "output": x_BTD + mixed_BTD + mlp_BTD,
    }


def text_rotary(model: Transformer, shape: tuple[int, ...]) -> Rotary:
    """Rotary angles of text from position 0."""
    positions_BT = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    return rotary_embedding(jnp.broadcast_to(positions_BT, (3, *shape)), model.config)


class CachedPass:
    """Forced tokens through the prefill program, then through `Transformer.decode`.

    The rounds accept all their tokens, so that logits of every position come out of the caches.
    """

    def __init__(self, recipe: Recipe, prefill_chunk: int = 32):
        self.model = transformer(recipe)
        self.executor = executor(recipe, prefill_chunk)

    def logits(self, ids: np.ndarray, prefilled: int, per_round: int, slot: int = 1) -> np.ndarray:
        """Logits [len(ids) - prefilled, V]: all but the first `prefilled` tokens are decoded.

        Args:
          ids: the tokens; the decoded ones must be whole rounds.
          prefilled: how many go through the prefill program.
          per_round: tokens that a decode round takes.
          slot: the slot used; the others stay empty.
        """
        driver = tiny.Driver(self.executor)
        driver.prefill(slot, Request("forced", tuple(ids[: prefilled + 1].tolist()), 1))
        state = self.executor._state
        caches, pending_B = state.caches, state.pending_B
        page_table_BM = np.zeros((len(driver.pages), len(driver.pages[slot])), np.int32)
        page_table_BM[slot] = driver.pages[slot]
        room = self.executor.limits.draft_length + 1
        rows = []
        for start in range(prefilled, len(ids), per_round):
            tokens_BT = np.zeros((page_table_BM.shape[0], room), np.int32)
            tokens_BT[slot, :per_round] = ids[start : start + per_round]
            logits_BTV, caches, pending_B = _round(
                self.model, tokens_BT, start, slot, page_table_BM, caches, pending_B, per_round
            )
            rows.append(np.asarray(logits_BTV[slot, :per_round]))
        return np.concatenate(rows)


@jax.jit
def _round(model, tokens_BT, start, slot, page_table_BM, caches, pending_B, count):
    """One round whose `count` tokens all count: (logits, caches, pending)."""
    here_B1 = jnp.arange(tokens_BT.shape[0])[:, None] == slot
    offsets_T = jnp.arange(tokens_BT.shape[1])
    valid_BT = here_B1 & (offsets_T < count)
    positions_BT = jnp.broadcast_to(start + offsets_T, tokens_BT.shape)
    where = place(positions_BT, valid_BT, page_table_BM, model.config)
    hidden_BTD, caches = model.decode(tokens_BT, where, caches, pending_B)
    return model.logits(hidden_BTD), caches, jnp.where(here_B1[:, 0], count, 0)
