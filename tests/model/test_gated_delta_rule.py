"""Chunked == sequential == one token at a time == replayed after any acceptance."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.kernels import gated_delta_rule
from model.kernels.gated_delta_rule import pallas_gpu, reference

BATCH, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 2, 4, 8, 6


def inputs(tokens: int, seed: int = 0, value_dim: int = VALUE_DIM) -> tuple[jax.Array, ...]:
    """Random q, k, v, gate, beta and a state as the layer would produce them."""
    rng = np.random.default_rng(seed)

    def unit(*shape: int) -> np.ndarray:
        x = rng.normal(size=shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q = unit(BATCH, tokens, KEY_HEADS, KEY_DIM) * KEY_DIM**-0.5
    k = unit(BATCH, tokens, KEY_HEADS, KEY_DIM)
    v = rng.normal(size=(BATCH, tokens, VALUE_HEADS, value_dim))
    gate = -rng.exponential(0.5, size=(BATCH, tokens, VALUE_HEADS))
    beta = rng.uniform(size=(BATCH, tokens, VALUE_HEADS))
    state = rng.normal(size=(BATCH, VALUE_HEADS, KEY_DIM, value_dim))
    return tuple(jnp.asarray(array, jnp.float32) for array in (q, k, v, gate, beta, state))


def numpy_rule(q, k, v, gate, beta, state):
    """The recurrence in float64, one head and token at a time."""
    q, k, v, gate, beta, state = (np.asarray(a, np.float64) for a in (q, k, v, gate, beta, state))
    out = np.zeros_like(v)
    state = state.copy()
    for b, t, w in np.ndindex(v.shape[:3]):
        key = k[b, t, w // (VALUE_HEADS // KEY_HEADS)]
        query = q[b, t, w // (VALUE_HEADS // KEY_HEADS)]
        s = state[b, w] * np.exp(gate[b, t, w])
        s = s + np.outer(key, beta[b, t, w] * (v[b, t, w] - s.T @ key))
        out[b, t, w], state[b, w] = s.T @ query, s
    return out, state


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 129, 200])
@pytest.mark.parametrize("form", [gated_delta_rule.sequential, gated_delta_rule.chunked])
def test_equals_definition(form, tokens):
    args = inputs(tokens, seed=tokens)
    out, state = form(*args)
    want_out, want_state = numpy_rule(*args)
    np.testing.assert_allclose(out, want_out, atol=2e-5)
    np.testing.assert_allclose(state, want_state, atol=2e-5)


def test_chunked_with_equal_keys_is_stable():
    """All keys equal and beta 1: the system's inverse grows if it is built by powers."""
    q, k, v, gate, beta, state = inputs(128)
    args = q, jnp.broadcast_to(k[:, :1], k.shape), v, gate * 0, jnp.ones_like(beta), state
    np.testing.assert_allclose(
        gated_delta_rule.chunked(*args)[0], numpy_rule(*args)[0], rtol=1e-4, atol=1e-4
    )


def test_masked_tokens_do_nothing():
    q, k, v, gate, beta, state = inputs(5)
    zero = (k * 0, v * 0, gate * 0, beta * 0)
    _, unchanged = gated_delta_rule.sequential(q, *zero, state)
    np.testing.assert_array_equal(unchanged, state)


@pytest.mark.parametrize("accepted", [(0, 0), (0, 4), (1, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize("tokens", [1, 4])
def test_gpu_kernel_equals_reference(accepted, tokens):
    """In interpret mode: the same recurrence, also when this round has fewer tokens than the last."""
    q, k, v, gate, beta, state = inputs(8, value_dim=8)
    mask = (jnp.arange(4) < jnp.asarray(accepted)[:, None])[..., None]
    past = tuple(
        jnp.where(mask[..., None] if a.ndim == 4 else mask, a[:, :4], 0) for a in (k, v, gate, beta)
    )
    new = tuple(a[:, 4 : 4 + tokens] for a in (q, k, v, gate, beta))
    count = jnp.int32(max(accepted))
    want = reference.replay(past, new, state, count)
    got = pallas_gpu.replay(past, new, state, count, interpret=True)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("accepted", [(0, 4), (1, 2), (4, 1), (3, 3)])
def test_replay_commits_exactly_what_was_accepted(accepted):
    """Bitwise: running ahead, then committing n tokens == feeding n tokens one at a time."""
    q, k, v, gate, beta, state = inputs(8)

    def take(start, stop):
        return tuple(a[:, start:stop] for a in (q, k, v, gate, beta))

    replay = jax.jit(gated_delta_rule.replay)
    first = take(0, 4)
    mask = (jnp.arange(4) < jnp.asarray(accepted)[:, None])[..., None]
    past = tuple(jnp.where(mask[..., None] if a.ndim == 4 else mask, a, 0) for a in first[1:])
    out, committed = replay(past, take(4, 8), state, jnp.int32(max(accepted)))

    def one(state, token, slot):
        """Commits a single token by the same program: replayed as the first of four."""
        past = tuple(jnp.zeros_like(a[:, :4]).at[:, 0].set(a[:, token]) for a in (k, v, gate, beta))
        return replay(past, take(4, 8), state, jnp.int32(1))

    for slot, count in enumerate(accepted):
        expected = state
        for token in range(count):
            _, expected = one(expected, token, slot)
        np.testing.assert_array_equal(committed[slot], expected[slot])
    new_q, new_k, new_v, new_gate, new_beta = take(4, 8)
    want, _ = gated_delta_rule.sequential(new_q, new_k, new_v, new_gate, new_beta, committed)
    np.testing.assert_allclose(out, want, atol=1e-6)
