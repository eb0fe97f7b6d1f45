"""The gated delta rule one token at a time: the definition, and its use in decode rounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from model.array_types import DeltaGate, DeltaQK, DeltaV, RecurrentState


def step(
    state_BWPR: jax.Array,
    q_BJP: jax.Array,
    k_BJP: jax.Array,
    v_BWR: jax.Array,
    gate_BW: jax.Array,
    beta_BW: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One token: decay the state, correct what it holds under `k` towards `v`, read it with `q`.

        S <- exp(gate) S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q

    A zero gate, k, v and beta leave S as it is. Value head w uses key head w // (W // J).

    S is read once, for `k` and `q` together, before it is changed: o follows from the two readings.
    One product is also what XLA:CPU does well; sums over products it wrote out, 45 times slower.

    Returns:
      (state_BWPR, out_BWR), float32.
    """
    repeats = v_BWR.shape[1] // k_BJP.shape[1]
    q_BWP, k_BWP = (jnp.repeat(x_BJP, repeats, axis=1) for x_BJP in (q_BJP, k_BJP))
    decay_BW1 = jnp.exp(gate_BW)[..., None]
    both_BW2P = jnp.stack([k_BWP, q_BWP], axis=2)
    held_BW2R = decay_BW1[..., None] * jnp.einsum("bwcp,bwpr->bwcr", both_BW2P, state_BWPR)
    delta_BWR = (v_BWR - held_BW2R[:, :, 0]) * beta_BW[..., None]
    out_BWR = held_BW2R[:, :, 1] + jnp.sum(k_BWP * q_BWP, axis=2, keepdims=True) * delta_BWR
    state_BWPR = decay_BW1[..., None] * state_BWPR + k_BWP[..., None] * delta_BWR[:, :, None, :]
    return state_BWPR, out_BWR


def sequential(
    q_BTJP: DeltaQK,
    k_BTJP: DeltaQK,
    v_BTWR: DeltaV,
    gate_BTW: DeltaGate,
    beta_BTW: DeltaGate,
    state_BWPR: RecurrentState,
) -> tuple[DeltaV, RecurrentState]:
    """Runs `step` over T tokens. All arrays float32; q and k normalised, q scaled by P ** -0.5.

    Returns:
      (out_BTWR, state_BWPR after the last token).
    """

    def body(state_BWPR: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        return step(state_BWPR, *token)

    inputs = (q_BTJP, k_BTJP, v_BTWR, gate_BTW, beta_BTW)
    by_token = tuple(jnp.moveaxis(array, 1, 0) for array in inputs)
    state_BWPR, out_TBWR = jax.lax.scan(body, state_BWPR, by_token)
    return jnp.moveaxis(out_TBWR, 0, 1), state_BWPR


def replay(
    past: tuple[jax.Array, ...],
    new: tuple[jax.Array, ...],
    state_BWPR: RecurrentState,
    past_tokens: jax.Array,
) -> tuple[DeltaV, RecurrentState]:
    """Commits the tokens of the last round, then runs ahead through those of this round.

    Both phases go through one loop body, so a token's effect on the state has the same bits whether
    it is run ahead, committed later, or fed alone. The state that ran ahead is dropped: nothing
    rejected is ever committed, and no snapshot is kept.

    Args:
      past: (k, v, gate, beta) of the last round, zeroed where they were not accepted;
        [B, Tp, J, P], [B, Tp, W, R], [B, Tp, W] twice.
      new: (q, k, v, gate, beta) of this round's T tokens, T at most Tp.
      state_BWPR: committed before the last round.
      past_tokens: int32 scalar, how many past tokens any slot accepted: the others are skipped.

    Returns:
      (out_BTWR for the new tokens, state_BWPR after the past tokens), float32.
    """
    q_BTJP, *new_without_q = new
    tokens, room = q_BTJP.shape[1], past[0].shape[1]

    def join(before: jax.Array, now: jax.Array) -> jax.Array:
        """[Tp + T, B, ...]: the past tokens, then the new ones."""
        return jnp.moveaxis(jnp.concatenate([before, now], axis=1), 1, 0)

    no_query = jnp.zeros((q_BTJP.shape[0], room, *q_BTJP.shape[2:]), q_BTJP.dtype)
    sequence = (join(no_query, q_BTJP), *map(join, past, new_without_q))
    out_TBWR = jnp.zeros((room + tokens, *new_without_q[1][:, 0].shape), jnp.float32)

    def one_token(index: jax.Array, carry: tuple, first: jax.Array) -> tuple:
        state_BWPR, out_TBWR = carry
        token = [jax.lax.dynamic_index_in_dim(a, first + index, keepdims=False) for a in sequence]
        state_BWPR, out_BWR = step(state_BWPR, *token)
        out_TBWR = jax.lax.dynamic_update_index_in_dim(out_TBWR, out_BWR, first + index, axis=0)
        return state_BWPR, out_TBWR

    def phase(index: jax.Array, carry: tuple) -> tuple:
        state_BWPR, committed_BWPR, out_TBWR = carry
        count = jnp.where(index == 0, past_tokens, tokens)
        state_BWPR, out_TBWR = jax.lax.fori_loop(
            0, count, lambda i, c: one_token(i, c, index * room), (state_BWPR, out_TBWR)
        )
        committed_BWPR = jnp.where(index == 0, state_BWPR, committed_BWPR)
        return state_BWPR, committed_BWPR, out_TBWR

    carry = (state_BWPR, state_BWPR, out_TBWR)
    _, committed_BWPR, out_TBWR = jax.lax.fori_loop(0, 2, phase, carry)
    return jnp.moveaxis(out_TBWR[room:], 0, 1), committed_BWPR
