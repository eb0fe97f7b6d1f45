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

    Returns:
      (state_BWPR, out_BWR), float32.
    """
    repeats = v_BWR.shape[1] // k_BJP.shape[1]
    q_BWP1 = jnp.repeat(q_BJP, repeats, axis=1)[..., None]
    k_BWP1 = jnp.repeat(k_BJP, repeats, axis=1)[..., None]
    state_BWPR = state_BWPR * jnp.exp(gate_BW)[..., None, None]
    held_BWR = jnp.sum(state_BWPR * k_BWP1, axis=2)
    delta_BWR = (v_BWR - held_BWR) * beta_BW[..., None]
    state_BWPR = state_BWPR + k_BWP1 * delta_BWR[:, :, None, :]
    return state_BWPR, jnp.sum(state_BWPR * q_BWP1, axis=2)


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
    past: tuple[jax.Array, ...], new: tuple[jax.Array, ...], state_BWPR: RecurrentState
) -> tuple[DeltaV, RecurrentState]:
    """Commits the tokens of the last round, then runs ahead through those of this round.

    Both phases go through one loop body, so a token's effect on the state has the same bits whether
    it is run ahead, committed later, or fed alone. The state that ran ahead is dropped: nothing
    rejected is ever committed, and no snapshot is kept.

    Args:
      past: (k, v, gate, beta) of the last round, zeroed where they were not accepted;
        [B, T, J, P], [B, T, W, R], [B, T, W] twice.
      new: (q, k, v, gate, beta) of this round's tokens, same T.
      state_BWPR: committed before the last round.

    Returns:
      (out_BTWR for the new tokens, state_BWPR after the past tokens), float32.
    """
    q_BTJP, *new_without_q = new
    phases = tuple(
        jnp.stack([before, now])
        for before, now in zip((q_BTJP, *past), (q_BTJP, *new_without_q), strict=True)
    )

    def phase(state_BWPR: jax.Array, inputs: tuple) -> tuple[jax.Array, tuple]:
        q, k, v, gate, beta = inputs
        out_BTWR, state_BWPR = sequential(q, k, v, gate, beta, state_BWPR)
        return state_BWPR, (out_BTWR, state_BWPR)

    _, (out_2BTWR, state_2BWPR) = jax.lax.scan(phase, state_BWPR, phases)
    return out_2BTWR[1], state_2BWPR[0]
