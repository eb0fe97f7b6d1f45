"""Attention over pages in page order with an online softmax (Milakov & Gimelshein, arXiv 1805.02867)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from model.array_types import KVPages, PageTable, PositionsBT, Queries
from model.kernels.paged_attention.storage import from_storage

# Below every real score, and finite, so that a fully masked page gives exp(0) * 0 and not NaN.
_MASKED = -1e30


def paged_attention(
    q_BTNH: Queries,
    k_pages: KVPages,
    v_pages: KVPages,
    page_table_BM: PageTable,
    positions_BT: PositionsBT,
    kv_dtype: DTypeLike = jnp.float32,
) -> Queries:
    """`causal_attention` of each query over the positions 0 .. its own, read from its slot's pages.

    Pages are visited in order and a masked page leaves the running sums as they are, bit for bit, so
    a slot's result does not depend on how long its neighbours are. The visits end at the longest
    position in the call, not at the end of the page table.

    Args:
      q_BTNH: rotated queries.
      k_pages: rotated keys, as `storage` keeps them; page 0 is a sink that no valid position maps to.
      v_pages: values.
      page_table_BM: page id of each S positions of a slot.
      positions_BT: absolute positions of the queries; give masked queries a small one.
      kv_dtype: of the stored keys and values.

    Returns:
      Float array like q_BTNH.
    """
    batch, tokens, heads, head_dim = q_BTNH.shape
    kv_heads, page_size = k_pages.shape[1:3]
    rows = tokens * heads // kv_heads
    q_BKYH = q_BTNH.reshape(batch, tokens, kv_heads, -1, head_dim)
    q_BKYH = jnp.moveaxis(q_BKYH, 1, 2).reshape(batch, kv_heads, rows, head_dim)
    last_BY = jnp.repeat(positions_BT, heads // kv_heads, axis=1)

    def visit(page: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top_BKY, weight_BKY, out_BKYH = sums
        page_B = page_table_BM[:, page]
        k_BKSH, v_BKSH = (
            from_storage(pages[page_B], kv_dtype, q_BTNH.dtype) for pages in (k_pages, v_pages)
        )
        scores_BKYS = jnp.einsum(
            "BKYH,BKSH->BKYS", q_BKYH, k_BKSH, preferred_element_type=jnp.float32
        )
        positions_S = page * page_size + jnp.arange(page_size)
        seen_BYS = positions_S <= last_BY[..., None]
        scores_BKYS = jnp.where(seen_BYS[:, None], scores_BKYS * head_dim**-0.5, _MASKED)
        new_top_BKY = jnp.maximum(top_BKY, jnp.max(scores_BKYS, axis=-1))
        shrink_BKY = jnp.exp(top_BKY - new_top_BKY)
        parts_BKYS = jnp.where(
            seen_BYS[:, None], jnp.exp(scores_BKYS - new_top_BKY[..., None]), 0.0
        )
        part_BKYH = jnp.einsum(
            "BKYS,BKSH->BKYH",
            parts_BKYS.astype(v_BKSH.dtype),
            v_BKSH,
            preferred_element_type=jnp.float32,
        )
        weight_BKY = weight_BKY * shrink_BKY + jnp.sum(parts_BKYS, axis=-1)
        return new_top_BKY, weight_BKY, out_BKYH * shrink_BKY[..., None] + part_BKYH

    sums = (
        jnp.full((batch, kv_heads, rows), _MASKED, jnp.float32),
        jnp.zeros((batch, kv_heads, rows), jnp.float32),
        jnp.zeros((batch, kv_heads, rows, head_dim), jnp.float32),
    )
    visits = jnp.max(positions_BT) // page_size + 1
    _, weight_BKY, out_BKYH = jax.lax.fori_loop(0, visits, visit, sums)
    out_BKYH = out_BKYH / weight_BKY[..., None]
    out_BTNH = jnp.moveaxis(out_BKYH.reshape(batch, kv_heads, tokens, -1, head_dim), 2, 1)
    return out_BTNH.reshape(q_BTNH.shape).astype(q_BTNH.dtype)
