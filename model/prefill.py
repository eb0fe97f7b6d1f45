"""Prefill: writes one chunk of a prompt into a slot's caches. Emits nothing.

The last prompt token is never prefilled; it is the first input of the decode program, which emits the
first token of the reply like any other. Prefill thus needs no output head, and every token that a
client sees comes from one program.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from model.cache import AttentionCache, DeltaNetCache, LayerCache, Placement, place
from model.decode import token_logits
from model.decoder_layer import DecoderLayer
from model.mtp import shift
from model.state import DecodeShape, DecodeState
from model.transformer import Transformer


def prefill_chunk(
    model: Transformer,
    state: DecodeState,
    slot: jax.Array,
    tokens_T: jax.Array,
    count: jax.Array,
    start: jax.Array,
    next_token: jax.Array,
    page_row_M: jax.Array,
) -> DecodeState:
    """One chunk of one slot; other slots are left as they are.

    Args:
      model: parameters.
      state: donated.
      slot: int32 scalar, not running.
      tokens_T: prompt ids, the first `count` are valid.
      count: int32 scalar, 1 .. T.
      start: absolute position of tokens_T[0]; 0 clears the slot first.
      next_token: the id after the last valid one (the MTP head pairs it with the last hidden state).
      page_row_M: the slot's page table.

    Returns:
      The state with the chunk in all caches.
    """
    state, _ = _chunk(model, state, slot, tokens_T, count, start, next_token, page_row_M)
    return state


def score_chunk(
    model: Transformer,
    state: DecodeState,
    slot: jax.Array,
    tokens_T: jax.Array,
    count: jax.Array,
    start: jax.Array,
    next_token: jax.Array,
    page_row_M: jax.Array,
    *,
    shape: DecodeShape,
) -> tuple[DecodeState, jax.Array]:
    """`prefill_chunk` that also tells how likely the prompt is.

    Returns:
      (state, float32 [T]: log-probability, under the model itself, of the token after each of
      tokens_T; void beyond `count`).
    """
    state, hidden_BTD = _chunk(model, state, slot, tokens_T, count, start, next_token, page_row_M)
    logits_TV = token_logits(model, hidden_BTD, shape)[0]
    next_T = _next_tokens(tokens_T[None], count, next_token)[0]
    chosen_T = jnp.take_along_axis(logits_TV, next_T[:, None], axis=1)[:, 0]
    return state, chosen_T - jax.nn.logsumexp(logits_TV, axis=1)


def _chunk(
    model: Transformer,
    state: DecodeState,
    slot: jax.Array,
    tokens_T: jax.Array,
    count: jax.Array,
    start: jax.Array,
    next_token: jax.Array,
    page_row_M: jax.Array,
) -> tuple[DecodeState, jax.Array]:
    """(state, normed hidden states [1, T, D])."""
    offsets_1T = jnp.arange(tokens_T.shape[0])[None]
    where = place(start + offsets_1T, offsets_1T < count, page_row_M[None], model.config)
    x_BTD = model.embed_tokens(tokens_T[None])
    caches: list[LayerCache] = []
    for layer, cache in zip(model.layers, state.caches, strict=True):
        x_BTD, cache = _layer(layer, x_BTD, where, cache, slot, start == 0)
        caches.append(cache)
    hidden_BTD = model.norm(x_BTD)
    mtp, mtp_cache = model.mtp, state.mtp_cache
    if mtp is not None and mtp_cache is not None:
        next_BT = _next_tokens(tokens_T[None], count, next_token)
        u_BTD = mtp.combine(model.embed_tokens(next_BT), hidden_BTD)
        mtp_cache = mtp.write(u_BTD, where, mtp_cache)
    pending_B = state.pending_B.at[slot].set(0)
    counts = state.counts.clear_prompt(slot, start == 0)
    state = dataclasses.replace(
        state,
        caches=tuple(caches),
        mtp_cache=mtp_cache,
        pending_B=pending_B,
        counts=counts.add_prompt(slot, tokens_T, offsets_1T[0] < count),
    )
    return state, hidden_BTD


def _next_tokens(tokens_BT: jax.Array, count: jax.Array, next_token: jax.Array) -> jax.Array:
    """The token after each valid one: those of the chunk moved left by one, then `next_token`."""
    next_BT = shift(tokens_BT, next_token[None])
    return jnp.where(jnp.arange(tokens_BT.shape[1]) == count - 1, next_token, next_BT)


def _layer(
    layer: DecoderLayer,
    x_BTD: jax.Array,
    where: Placement,
    cache: LayerCache,
    slot: jax.Array,
    fresh: jax.Array,
) -> tuple[jax.Array, LayerCache]:
    normed_BTD = layer.input_layernorm(x_BTD)
    if isinstance(cache, AttentionCache):
        mixed_BTD, cache = layer.self_attn.cached(normed_BTD, where, cache)
    else:
        taps = layer.linear_attn.conv1d.weight.shape[2] - 1
        conv_BXC = _slot_rows(cache.conv_window_BYC, slot, fresh)[:, :taps]
        state_BWPR = _slot_rows(cache.state_BWPR, slot, fresh)
        mixed_BTD, conv_BXC, state_BWPR = layer.linear_attn.prefill(
            normed_BTD, conv_BXC, state_BWPR, where.valid_BT
        )
        cache = _store(cache, slot, conv_BXC, state_BWPR)
    return layer.feed_forward(x_BTD + mixed_BTD, where.valid_BT), cache


def _slot_rows(array: jax.Array, slot: jax.Array, fresh: jax.Array) -> jax.Array:
    row = jax.lax.dynamic_slice_in_dim(array, slot, 1)
    return jnp.where(fresh, jnp.zeros_like(row), row)


def _store(
    cache: DeltaNetCache, slot: jax.Array, conv_BXC: jax.Array, state_BWPR: jax.Array
) -> DeltaNetCache:
    """With no pending tokens the next round's conv inputs are the first rows of the window."""
    window_BYC = jax.lax.dynamic_update_slice(cache.conv_window_BYC, conv_BXC, (slot, 0, 0))
    states_BWPR = jax.lax.dynamic_update_slice_in_dim(cache.state_BWPR, state_BWPR, slot, axis=0)
    return dataclasses.replace(cache, conv_window_BYC=window_BYC, state_BWPR=states_BWPR)
