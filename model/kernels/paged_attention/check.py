"""Paged attention for the start-up self-test."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from model.kernels.check import CheckSizes, KernelCheck
from model.kernels.paged_attention import paged_attention
from model.kernels.paged_attention.storage import storage_dtype

KV_HEADS, GROUPS, TOKENS = 2, 2, 4
LENGTHS = (37, 5)


def checks(sizes: CheckSizes) -> tuple[KernelCheck, ...]:
    """The last tokens of two slots of unlike length, their pages in disorder."""
    rng = np.random.default_rng(0)
    per_slot = -(-max(LENGTHS) // sizes.page_size)
    pages = 1 + len(LENGTHS) * per_slot
    table_BM = 1 + rng.permutation(pages - 1).reshape(len(LENGTHS), per_slot).astype(np.int32)
    shape = (pages, KV_HEADS, sizes.page_size, sizes.head_dim)
    keys, values = rng.normal(size=(2, *shape)).astype(sizes.kv_dtype)
    q_BTNH = rng.normal(size=(len(LENGTHS), TOKENS, KV_HEADS * GROUPS, sizes.head_dim))
    q_BTNH = q_BTNH.astype(sizes.dtype)
    positions_BT = np.array(LENGTHS)[:, None] - TOKENS + np.arange(TOKENS)
    positions_BT = positions_BT.astype(np.int32)
    pages = (array.view(storage_dtype(sizes.kv_dtype)) for array in (keys, values))
    arguments = (q_BTNH, *pages, table_BM, positions_BT)

    def run(*arguments: Any) -> tuple[jax.Array]:
        return (paged_attention(*arguments, kv_dtype=sizes.kv_dtype),)

    expected = (_attention(q_BTNH, keys, values, table_BM, positions_BT),)
    return (
        KernelCheck("paged_attention", run, arguments, expected, sizes.dtype, replaceable=False),
    )


def _attention(q_BTNH, keys, values, table_BM, positions_BT) -> np.ndarray:
    """Softmax attention in float64, one query at a time."""
    out_BTNH = np.zeros(q_BTNH.shape)
    for b, t, n in np.ndindex(q_BTNH.shape[:3]):
        count = positions_BT[b, t] + 1
        k, v = (
            np.concatenate(pages[table_BM[b], n // GROUPS].astype(np.float64))[:count]
            for pages in (keys, values)
        )
        scores = k @ q_BTNH[b, t, n].astype(np.float64) * q_BTNH.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max())
        out_BTNH[b, t, n] = weights @ v / weights.sum()
    return out_BTNH
