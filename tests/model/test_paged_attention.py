"""Paged attention with an online softmax == attention in one piece."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from model.kernels.paged_attention import causal_attention, paged_attention

PAGE, KV_HEADS, HEADS, DIM = 8, 2, 4, 16


def paged(length: int, seed: int = 0, pages_of_neighbour: int = 0):
    """Random q, k, v of one slot, with k and v scattered over shuffled pages (page 0: the sink)."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(1, length, HEADS, DIM)).astype(np.float32)
    k, v = rng.normal(size=(2, 1, length, KV_HEADS, DIM)).astype(np.float32)
    count = -(-length // PAGE)
    pool = 1 + count + pages_of_neighbour
    table = 1 + rng.permutation(count)
    k_pages = rng.normal(size=(pool, KV_HEADS, PAGE, DIM)).astype(np.float32)
    v_pages = k_pages[::-1].copy()
    for position in range(length):
        k_pages[table[position // PAGE], :, position % PAGE] = k[0, position]
        v_pages[table[position // PAGE], :, position % PAGE] = v[0, position]
    return q, k, v, k_pages, v_pages, table


@pytest.mark.parametrize("length", [1, 7, 8, 9, 40])
def test_equals_reference(length):
    q, k, v, k_pages, v_pages, table = paged(length)
    arrays = (jnp.asarray(array) for array in (q, k_pages, v_pages, table[None]))
    got = paged_attention(*arrays, positions_BT=jnp.arange(length)[None])
    want = causal_attention(*map(jnp.asarray, (q, k, v)))
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_bits_do_not_depend_on_a_longer_neighbour():
    """A neighbour with more pages makes the loop visit masked pages: they must leave no trace."""
    q, _, _, k_pages, v_pages, table = paged(12, pages_of_neighbour=6)
    table_BM = np.zeros((2, 8), np.int32)
    table_BM[0, : len(table)] = table
    table_BM[1] = 1 + np.arange(8) % (len(k_pages) - 1)
    q_BTNH = jnp.asarray(np.concatenate([q[:, -2:], q[:, :2]]))

    def run(neighbour_position: int):
        positions = jnp.asarray([[10, 11], [neighbour_position, neighbour_position + 1]])
        args = (jnp.asarray(array) for array in (k_pages, v_pages, table_BM))
        return np.asarray(paged_attention(q_BTNH, *args, positions_BT=positions))

    np.testing.assert_array_equal(run(3)[0], run(62)[0])
