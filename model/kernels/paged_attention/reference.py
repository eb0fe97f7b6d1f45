"""Causal grouped-query attention in one piece: the definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from model.array_types import KeysValues, Queries


def causal_attention(q_BTNH: Queries, k_BTKH: KeysValues, v_BTKH: KeysValues) -> Queries:
    """softmax(q k^T / sqrt(H)) v, query t over keys 0 .. t; query head n uses key head n // G.

    Softmax in float32; the result has the dtype of q.
    """
    groups = q_BTNH.shape[2] // k_BTKH.shape[2]
    q_BTKGH = q_BTNH.reshape(*q_BTNH.shape[:2], -1, groups, q_BTNH.shape[3])
    scores_BKGTS = jnp.einsum(
        "BTKGH,BSKH->BKGTS", q_BTKGH, k_BTKH, preferred_element_type=jnp.float32
    )
    scores_BKGTS = scores_BKGTS * q_BTNH.shape[-1] ** -0.5
    causal_TS = jnp.tril(jnp.ones((q_BTNH.shape[1],) * 2, bool))
    weights_BKGTS = jax.nn.softmax(jnp.where(causal_TS, scores_BKGTS, -jnp.inf), axis=-1)
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS.astype(v_BTKH.dtype), v_BTKH)
    return out_BTKGH.reshape(q_BTNH.shape).astype(q_BTNH.dtype)
