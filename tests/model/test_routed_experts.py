"""Routed experts in blocks == every expert over every token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.kernels.routed_experts import reference, routed_experts

WIDTH, HIDDEN = 12, 10


def inputs(tokens: int, experts: int, choices: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(experts)[:choices] for _ in range(tokens)]).astype(np.int32)
    arrays = (
        rng.normal(size=(tokens, WIDTH)),
        rng.uniform(size=(tokens, choices)),
        rng.normal(size=(experts, 2 * HIDDEN, WIDTH)),
        rng.normal(size=(experts, WIDTH, HIDDEN)),
    )
    x, weights, gate_up, down = (jnp.asarray(array, jnp.float32) for array in arrays)
    return x, jnp.asarray(ids), weights, gate_up, down


@pytest.mark.parametrize(
    ("tokens", "experts", "choices"), [(1, 4, 2), (2, 8, 2), (7, 8, 3), (64, 8, 2), (130, 4, 4)]
)
def test_equals_reference(tokens, experts, choices):
    args = inputs(tokens, experts, choices)
    np.testing.assert_allclose(routed_experts(*args), reference(*args), rtol=2e-5, atol=2e-5)


def test_all_tokens_on_one_expert_and_none():
    x, ids, weights, gate_up, down = inputs(9, 8, 2)
    for fixed in (7, 0, 8):  # 8 is one past the last expert: it chooses none
        args = x, jnp.full_like(ids, fixed), weights, gate_up, down
        np.testing.assert_allclose(routed_experts(*args), reference(*args), rtol=2e-5, atol=2e-5)
    assert not np.any(routed_experts(x, jnp.full_like(ids, 8), weights, gate_up, down))


def test_bits_of_a_token_do_not_depend_on_its_company():
    """Nor does a neighbour that is not finite reach it."""
    x, ids, weights, gate_up, down = inputs(16, 8, 2)
    run = jax.jit(routed_experts)
    alone_ids = jnp.full_like(ids, 8).at[5].set(ids[5])
    alone = run(x, alone_ids, weights, gate_up, down)[5]
    company = run(x.at[6:].set(jnp.nan), ids, weights, gate_up, down)[5]
    np.testing.assert_array_equal(alone, company)
