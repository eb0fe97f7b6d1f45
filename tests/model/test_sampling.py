"""Sampling against plain NumPy, and its distribution on a tiny vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.sampling import CANDIDATES, SamplingSettings, choose, gumbel_noise


def settings(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> SamplingSettings:
    return SamplingSettings(
        temperature=jnp.full((rows,), temperature, jnp.float32),
        top_k=jnp.full((rows,), top_k, jnp.int32),
        top_p=jnp.full((rows,), top_p, jnp.float32),
        min_p=jnp.full((rows,), min_p, jnp.float32),
        seed=jnp.arange(rows, dtype=jnp.uint32),
    )


def allowed(logits, temperature, top_k, top_p, min_p) -> np.ndarray:
    """Probabilities after temperature, min-p, top-k and top-p, by sorting; float64."""
    scaled = logits.astype(np.float64) / temperature
    if min_p:
        scaled[scaled < scaled.max() + np.log(min_p)] = -np.inf
    order = np.argsort(-scaled, kind="stable")
    if top_k:
        order = order[:top_k]
    p = np.exp(scaled[order] - scaled[order].max())
    p /= p.sum()
    p = p[(np.cumsum(p) - p < top_p) | (top_p >= 1)]
    result = np.zeros(len(logits))
    result[order[: len(p)]] = p / p.sum()
    return result


FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.0, 8, 0.9, 0.0),
    (1.5, 3, 1.0, 0.0),
    (1.0, 0, 0.05, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.0, 5, 0.9, 0.05),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), FILTERS)
def test_distribution(temperature, top_k, top_p, min_p):
    """Chi-square over 20,000 seeds on 16 tokens; nothing outside the allowed set appears."""
    logits = np.random.default_rng(0).normal(size=16).astype(np.float32) * 2
    rows = 20_000
    tokens = choose(
        jnp.broadcast_to(jnp.asarray(logits), (rows, 16)),
        settings(rows, temperature, top_k, top_p, min_p),
        jnp.full((rows,), 7, jnp.int32),
    )
    counts = np.bincount(tokens, minlength=16)
    want = allowed(logits, temperature, top_k, top_p, min_p) * rows
    assert not counts[want == 0].any()
    likely = want >= 5
    rest = counts[~likely].sum(), want[~likely].sum()
    statistic = ((counts[likely] - want[likely]) ** 2 / want[likely]).sum()
    if rest[1] > 0:
        statistic += (rest[0] - rest[1]) ** 2 / rest[1]
    degrees = max(likely.sum() + (rest[1] > 0) - 1, 1)
    # p = 0.001 by the Wilson-Hilferty approximation.
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 5, 1.0, 0.0),
        (5.0, 0, 0.95, 0.0),
        (5.0, 300, 0.9, 0.0),
        (1.0, 0, 1.0, 0.0),
        (0.0, 3, 0.5, 0.5),
        (5.0, 0, 1.0, 0.3),
        (5.0, 0, 0.9, 0.3),
        (0.3, 0, 0.99, 0.2),
    ],
)
def test_wide_vocabulary_equals_sorting(temperature, top_k, top_p, min_p):
    """More tokens than candidates: whatever path a row takes, the token is that of the full sort."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(32, 40 * CANDIDATES)).astype(np.float32)
    positions = jnp.arange(32, dtype=jnp.int32)
    rows = settings(32, temperature, top_k, top_p, min_p)
    chosen = np.asarray(choose(jnp.asarray(logits), rows, positions))
    if temperature == 0:
        np.testing.assert_array_equal(chosen, logits.argmax(1))
        return
    ids = jnp.broadcast_to(jnp.arange(logits.shape[1]), logits.shape)
    noise = np.asarray(gumbel_noise(jnp.arange(32, dtype=jnp.uint32), positions, ids))
    for row in range(32):
        kept = allowed(logits[row], temperature, top_k, top_p, min_p) > 0
        noisy = np.where(kept, logits[row] / np.float32(temperature) + noise[row], -np.inf)
        assert chosen[row] == noisy.argmax()


def test_a_row_does_not_depend_on_what_other_rows_need():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(3, 999)), jnp.float32)
    positions = jnp.arange(3, dtype=jnp.int32)
    mixed = SamplingSettings(
        temperature=jnp.asarray([1.0, 4.0, 0.0]),
        top_k=jnp.asarray([5, 0, 0]),
        top_p=jnp.asarray([0.9, 1.0, 1.0]),
        min_p=jnp.asarray([0.0, 0.01, 0.0]),
        seed=jnp.asarray([1, 2, 3], jnp.uint32),
    )
    together = choose(logits, mixed, positions)
    for row in range(3):
        one = jax.tree.map(lambda a, row=row: a[row : row + 1], mixed)
        assert choose(logits[row : row + 1], one, positions[row : row + 1])[0] == together[row]


def test_noise_is_a_function_of_seed_position_and_token():
    ids = jnp.asarray([[3, 9], [9, 3]])
    noise = np.asarray(gumbel_noise(jnp.asarray([1, 1], jnp.uint32), jnp.asarray([5, 5]), ids))
    np.testing.assert_array_equal(noise[0], noise[1, ::-1])
    other = np.asarray(gumbel_noise(jnp.asarray([1, 2], jnp.uint32), jnp.asarray([6, 5]), ids))
    assert len({*noise[0], *other.ravel()}) == 6
