"""The replayed gated delta rule as one GPU kernel (Pallas, Triton route: what sm_121 takes)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from model.array_types import DeltaV, RecurrentState

VALUE_TILE = 32
"""Columns of the state per program: [P, 32] float32 stay in registers (32 per thread at P = 128)."""


def replay(
    past: tuple[jax.Array, ...],
    new: tuple[jax.Array, ...],
    state_BWPR: RecurrentState,
    past_tokens: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[DeltaV, RecurrentState]:
    """Same function as `reference.replay`.

    One program per slot, value head and tile of state columns. The state is read once, kept in
    registers through the past and the new tokens, and written once, in between: reading and writing
    it is all the memory traffic that a round needs, whatever the draft length.

    Args:
      past: see `reference.replay`.
      new: see `reference.replay`.
      state_BWPR: P a power of two, R a multiple of `VALUE_TILE` or a power of two below it.
      past_tokens: see `reference.replay`; per slot the masked tokens beyond do nothing.
      interpret: run without a GPU.
    """
    q_BTJP, k_BTJP, v_BTWR, gate_BTW, beta_BTW = new
    batch, heads, key_dim, value_dim = state_BWPR.shape
    tile = min(VALUE_TILE, value_dim)
    repeats = heads // k_BTJP.shape[2]

    def per_head(array: jax.Array) -> pl.BlockSpec:
        """All tokens of one slot and key head."""
        return pl.BlockSpec(
            (None, array.shape[1], None, array.shape[3]), lambda b, w, r: (b, 0, w // repeats, 0)
        )

    def per_tile(array: jax.Array) -> pl.BlockSpec:
        """All tokens of one slot, value head and tile."""
        return pl.BlockSpec((None, array.shape[1], None, tile), lambda b, w, r: (b, 0, w, r))

    def scalars(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, array.shape[1], None), lambda b, w, r: (b, 0, w))

    state_spec = pl.BlockSpec((None, None, key_dim, tile), lambda b, w, r: (b, w, 0, r))
    past_k, past_v, past_gate, past_beta = past
    call = pl.pallas_call(
        functools.partial(_kernel, room=past_k.shape[1], tokens=q_BTJP.shape[1]),
        grid=(batch, heads, value_dim // tile),
        in_specs=[
            pl.BlockSpec((1,), lambda b, w, r: (0,)),
            per_head(past_k), per_tile(past_v), scalars(past_gate), scalars(past_beta),
            per_head(q_BTJP), per_head(k_BTJP), per_tile(v_BTWR), scalars(gate_BTW),
            scalars(beta_BTW), state_spec,
        ],
        out_specs=[per_tile(v_BTWR), state_spec],
        out_shape=[
            jax.ShapeDtypeStruct(v_BTWR.shape, jnp.float32),
            jax.ShapeDtypeStruct(state_BWPR.shape, jnp.float32),
        ],
        input_output_aliases={10: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=f"gated_delta_replay_{key_dim}x{tile}",
    )  # fmt: skip
    out_BTWR, committed_BWPR = call(past_tokens[None], *past, *new, state_BWPR)
    return out_BTWR, committed_BWPR


def _kernel(
    past_tokens_ref: Any,
    past_k_ref: Any,
    past_v_ref: Any,
    past_gate_ref: Any,
    past_beta_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    gate_ref: Any,
    beta_ref: Any,
    state_ref: Any,
    out_ref: Any,
    committed_ref: Any,
    *,
    room: int,
    tokens: int,
) -> None:
    """`reference.step` on one [P, tile] piece of the state, token after token."""

    def step(state: jax.Array, k: jax.Array, v: jax.Array, gate: jax.Array, beta: jax.Array):
        state = state * jnp.exp(gate)
        held = jnp.sum(state * k[:, None], axis=0)
        return state + k[:, None] * ((v - held) * beta)[None, :]

    def commit(index: jax.Array, state: jax.Array) -> jax.Array:
        return step(
            state, past_k_ref[index], past_v_ref[index], past_gate_ref[index], past_beta_ref[index]
        )

    past_tokens = jnp.minimum(past_tokens_ref[0], room)
    state = jax.lax.fori_loop(0, past_tokens, commit, state_ref[...])
    committed_ref[...] = state

    def run_ahead(index: jax.Array, state: jax.Array) -> jax.Array:
        state = step(state, k_ref[index], v_ref[index], gate_ref[index], beta_ref[index])
        out_ref[index] = jnp.sum(state * q_ref[index][:, None], axis=0)
        return state

    jax.lax.fori_loop(0, tokens, run_ahead, state)
