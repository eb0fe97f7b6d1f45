"""The gated delta rule over whole chunks: matrix products inside a chunk, a scan between chunks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from model.array_types import DeltaGate, DeltaQK, DeltaV, RecurrentState

CHUNK = 64


def chunked(
    q_BTJP: DeltaQK,
    k_BTJP: DeltaQK,
    v_BTWR: DeltaV,
    gate_BTW: DeltaGate,
    beta_BTW: DeltaGate,
    state_BWPR: RecurrentState,
) -> tuple[DeltaV, RecurrentState]:
    """Same function as `reference.sequential` by the WY form (arXiv 2412.06464, section 3.3).

    Within a chunk let G_t be the gates summed up to t. The corrected values D solve the unit lower
    triangular system

        D_t = beta_t (v_t - e^{G_t} S^T k_t - sum_{s<t} e^{G_t - G_s} (k_t . k_s) D_s)

    solved for the v part and the S part at once, before the scan over chunks knows S. Then

        o_t = e^{G_t} S^T q_t + sum_{s<=t} e^{G_t - G_s} (q_t . k_s) D_s
        S  <- e^{G_end} S + sum_s e^{G_end - G_s} k_s D_s^T

    Args:
      q_BTJP: normalised and scaled by P ** -0.5, float32.
      k_BTJP: normalised, float32.
      v_BTWR: float32.
      gate_BTW: log decay, at most 0, float32.
      beta_BTW: in [0, 1], float32.
      state_BWPR: before the first token, float32.

    Returns:
      (out_BTWR, state_BWPR after the last token), float32.
    """
    tokens = q_BTJP.shape[1]
    pad = -tokens % CHUNK
    repeats = v_BTWR.shape[2] // k_BTJP.shape[2]
    q, k = (jnp.repeat(array, repeats, axis=2) for array in (q_BTJP, k_BTJP))

    def split(array: jax.Array) -> jax.Array:
        """[B, T, W, ...] -> [chunks, B, W, CHUNK, ...], zero-padded (a padded token does nothing)."""
        padding = [(0, 0), (0, pad)] + [(0, 0)] * (array.ndim - 2)
        padded = jnp.pad(array, padding)
        parts = padded.reshape(array.shape[0], -1, CHUNK, *array.shape[2:])
        return jnp.moveaxis(parts, (1, 3), (0, 2))

    q, k, v, gate, beta = (split(array) for array in (q, k, v_BTWR, gate_BTW, beta_BTW))
    total = jnp.cumsum(gate, axis=-1)
    earlier = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    # Exponents above the diagonal are positive and may overflow: mask before exp.
    decay = jnp.exp(jnp.where(earlier, total[..., :, None] - total[..., None, :], -jnp.inf))
    overlap = jnp.einsum("nbwtp,nbwsp->nbwts", k * beta[..., None], k) * decay
    system = jnp.where(jnp.tril(earlier, -1), overlap, 0.0) + jnp.eye(CHUNK)
    right = jnp.concatenate([v * beta[..., None], k * (beta * jnp.exp(total))[..., None]], axis=-1)
    inverse = _unit_lower_inverse(system.reshape(-1, CHUNK, CHUNK)).reshape(system.shape)
    solved = inverse @ right
    d_values, d_state = jnp.split(solved, [v.shape[-1]], axis=-1)
    scores = jnp.einsum("nbwtp,nbwsp->nbwts", q, k) * decay
    to_end = jnp.exp(total[..., -1:] - total)

    def body(state_BWPR: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, d_values, d_state, scores, from_start, to_end = chunk
        delta = d_values - jnp.einsum("bwtp,bwpr->bwtr", d_state, state_BWPR)
        out = jnp.einsum("bwtp,bwpr->bwtr", q * from_start[..., None], state_BWPR)
        out = out + jnp.einsum("bwts,bwsr->bwtr", scores, delta)
        state_BWPR = state_BWPR * from_start[..., -1][..., None, None]
        state_BWPR = state_BWPR + jnp.einsum("bwtp,bwtr->bwpr", k * to_end[..., None], delta)
        return state_BWPR, out

    chunks = (q, k, d_values, d_state, scores, jnp.exp(total), to_end)
    state_BWPR, out = jax.lax.scan(body, state_BWPR, chunks)
    out_BTWR = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(
        q.shape[1], tokens + pad, *v_BTWR.shape[2:]
    )
    return out_BTWR[:, :tokens], state_BWPR


def _unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """Inverse of unit lower triangular matrices [batch, n, n], n a power of two.

    By halves:

        [A 0; C B]^-1 = [A^-1 0; -B^-1 C A^-1, B^-1]

    Both halves go through one recursion. Matrix products only: XLA:CPU solves a batch of triangular
    systems one by one, 70 times slower. From 8 rows down the (finite) power series is as exact.
    """
    batch, size, _ = lower.shape
    if size <= 8:
        identity = jnp.eye(size)
        power = identity - lower
        inverse = identity + power
        for _ in range(1, max(1, (size - 1).bit_length())):
            power = power @ power
            inverse = inverse + inverse @ power
        return inverse
    half = size // 2
    # Halves are joined along the batch: XLA:CPU's matrix products abort at rank 8.
    halves = jnp.concatenate([lower[:, :half, :half], lower[:, half:, half:]])
    halves = _unit_lower_inverse(halves)
    top, bottom = halves[:batch], halves[batch:]
    corner = -(bottom @ lower[:, half:, :half] @ top)
    upper = jnp.concatenate([top, jnp.zeros_like(top)], axis=2)
    return jnp.concatenate([upper, jnp.concatenate([corner, bottom], axis=2)], axis=1)
