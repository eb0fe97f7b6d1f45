"""The choice of a token: a function of (logits, settings, seed, absolute position) and nothing else.

Sampling is Gumbel-max (Gumbel 1954; Maddison et al., arXiv 1411.0030): argmax of logits / temperature
+ noise over the tokens that min-p, top-k and top-p keep, in that order. The noise belongs to (seed,
position, token id), not to a call, a round or a slot. Verification therefore chooses the very token
that would have been chosen without drafts, and a draft made with the same noise agrees with it more
often than a greedy one.
"""

from __future__ import annotations

import dataclasses
import typing

import jax
import jax.numpy as jnp

from model.array_types import Logits, PerSlotFloat, PerSlotInt, Seeds

CANDIDATES = 64
"""Likeliest tokens that are looked at first; only rows that need more pay for the whole vocabulary."""


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingSettings:
    """One entry per row (or slot)."""

    temperature: PerSlotFloat
    """float32; 0 is greedy."""
    top_k: PerSlotInt
    """int32; 0 keeps all."""
    top_p: PerSlotFloat
    """float32 in (0, 1]; 1 keeps all."""
    min_p: PerSlotFloat
    """float32 in [0, 1): keep tokens at least this share as likely as the likeliest; 0 keeps all."""
    seed: Seeds
    """uint32."""


def choose(logits_ZV: Logits, settings: SamplingSettings, positions_Z: PerSlotInt) -> PerSlotInt:
    """The token of each row.

    Args:
      logits_ZV: float32; -inf where a row of the output head names no token.
      settings: per row.
      positions_Z: absolute position that the chosen token will have.

    Returns:
      int32 [Z].
    """
    greedy_Z = _first_argmax(logits_ZV)
    sampling_Z = settings.temperature > 0

    def sampled() -> jax.Array:
        return jnp.where(sampling_Z, _sample(logits_ZV, settings, positions_Z), greedy_Z)

    return jax.lax.cond(jnp.any(sampling_Z), sampled, lambda: greedy_Z)


def gumbel_noise(seeds_Z: jax.Array, positions_Z: jax.Array, ids_ZK: jax.Array) -> jax.Array:
    """Standard Gumbel noise of each (seed, position, token id), float32 [Z, K].

    Two threefry-2x32 blocks (Salmon et al., SC 2011): the seed's key with the position folded in,
    and that key with the token id folded in, whose first word is the uniform draw.
    """

    def row(seed: jax.Array, position: jax.Array, ids_K: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        return jax.vmap(lambda token: jax.random.key_data(jax.random.fold_in(key, token))[0])(ids_K)

    bits_ZK = jax.vmap(row)(seeds_Z, positions_Z, ids_ZK)
    uniform_ZK = ((bits_ZK >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2**-23)
    return -jnp.log(-jnp.log(uniform_ZK))


def _sample(logits_ZV: jax.Array, settings: SamplingSettings, positions_Z: jax.Array) -> jax.Array:
    """Gumbel-max per row, from as few candidates as the row's own filters allow.

    Which candidates a row needs follows from its own logits and settings, so its token does not
    depend on what the other rows need.
    """
    vocab = logits_ZV.shape[1]
    temperature_Z1 = jnp.where(settings.temperature > 0, settings.temperature, 1.0)[:, None]
    scaled_ZV = logits_ZV / temperature_Z1
    least_Z1 = jnp.max(scaled_ZV, axis=-1, keepdims=True) + jnp.log(settings.min_p)[:, None]
    scaled_ZV = jnp.where(scaled_ZV >= least_Z1, scaled_ZV, -jnp.inf)
    log_total_Z = jax.nn.logsumexp(scaled_ZV, axis=-1)

    def among(count: int) -> tuple[jax.Array, jax.Array]:
        """The choice among the `count` likeliest tokens, and whether they hold all that is kept."""
        values_ZK, ids_ZK = jax.lax.top_k(scaled_ZV, count)
        kept_ZK, enough_Z = _keep(values_ZK, log_total_Z, settings)
        noisy_ZK = values_ZK + gumbel_noise(settings.seed, positions_Z, ids_ZK)
        best_Z = _first_argmax(jnp.where(kept_ZK, noisy_ZK, -jnp.inf))
        return jnp.take_along_axis(ids_ZK, best_Z[:, None], axis=1)[:, 0], enough_Z

    def unfiltered() -> jax.Array:
        ids_ZV = jnp.broadcast_to(jnp.arange(vocab), logits_ZV.shape)
        return _first_argmax(scaled_ZV + gumbel_noise(settings.seed, positions_Z, ids_ZV))

    chosen_Z, enough_Z = among(min(CANDIDATES, vocab))
    sampling_Z = settings.temperature > 0
    unfiltered_Z = sampling_Z & (settings.top_k == 0) & (settings.top_p >= 1)
    wide_Z = sampling_Z & ~enough_Z & ~unfiltered_Z
    chosen_Z = jax.lax.cond(
        jnp.any(unfiltered_Z),
        lambda: jnp.where(unfiltered_Z, unfiltered(), chosen_Z),
        lambda: chosen_Z,
    )
    return jax.lax.cond(
        jnp.any(wide_Z), lambda: jnp.where(wide_Z, among(vocab)[0], chosen_Z), lambda: chosen_Z
    )


def _keep(
    values_ZK: jax.Array, log_total_Z: jax.Array, settings: SamplingSettings
) -> tuple[jax.Array, jax.Array]:
    """Which of the K likeliest tokens top-k and then top-p keep, and whether K were enough.

    Tokens that min-p dropped are -inf already; if one is among the K, the K hold all that is left.
    Top-p keeps a token while the probability before it, among those that top-k kept, is under p.
    """
    count = values_ZK.shape[1]
    top_k_Z1, top_p_Z1 = settings.top_k[:, None], settings.top_p[:, None]
    within_ZK = (top_k_Z1 == 0) | (jnp.arange(count) < top_k_Z1)
    log_kept_Z = jax.nn.logsumexp(jnp.where(within_ZK, values_ZK, -jnp.inf), axis=-1)
    log_total_Z = jnp.where(settings.top_k > 0, log_kept_Z, log_total_Z)
    probability_ZK = jnp.where(within_ZK, jnp.exp(values_ZK - log_total_Z[:, None]), 0.0)
    before_ZK = jnp.cumsum(probability_ZK, axis=-1) - probability_ZK
    kept_ZK = within_ZK & ((before_ZK < top_p_Z1) | (top_p_Z1 >= 1))
    reached_Z = (before_ZK[:, -1] + probability_ZK[:, -1] >= settings.top_p) & (settings.top_p < 1)
    ended_Z = jnp.isneginf(values_ZK[:, -1])
    enough_Z = jnp.where(settings.top_k > 0, settings.top_k <= count, reached_Z) | ended_Z
    return kept_ZK, enough_Z


def _first_argmax(x_ZV: jax.Array) -> jax.Array:
    """Argmax over the last axis, lowest index on ties, int32.

    Two plain reductions: XLA:CPU does not vectorise the paired one that `jnp.argmax` becomes.
    """
    index_V = jnp.arange(x_ZV.shape[-1], dtype=jnp.int32)
    top_Z1 = jnp.max(x_ZV, axis=-1, keepdims=True)
    first_Z = jnp.min(jnp.where(x_ZV == top_Z1, index_V, x_ZV.shape[-1]), axis=-1)
    # A row that is not a number everywhere has no maximum; keep the index in range.
    return jnp.minimum(first_Z, x_ZV.shape[-1] - 1)
