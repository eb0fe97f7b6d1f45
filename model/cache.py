"""What a slot remembers between calls: pages of keys and values, and recurrent state.

All of it is a pytree of frozen dataclasses that is passed in, returned and donated, never kept.
"""

from __future__ import annotations

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np

from model.array_types import (
    ConvWindow,
    DeltaGate,
    DeltaQK,
    DeltaV,
    KVPages,
    MaskBT,
    PageTable,
    PositionsBT,
    RecurrentState,
    RotaryBTQ,
)
from model.config import FULL_ATTENTION, ModelConfig
from model.kernels.paged_attention.storage import storage_dtype, to_storage
from model.layers import rotary_embedding

SINK_PAGE = 0
"""Takes what masked positions write; no page table entry of a real position names it."""


# Fields are for readers: the shape checker of the tests must not see pytrees rebuilt with other leaves.
@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionCache:
    """Keys and values of one attention layer, shared by all slots through their page tables.

    Heads come before positions: the order in which attention reads them. In any other XLA:GPU
    transposes the whole cache at the start and end of every decode call.
    """

    k_pages: KVPages
    v_pages: KVPages
    kv_dtype: np.dtype = dataclasses.field(metadata={"static": True})
    """Of the values whose bits the pages hold, see `kernels/paged_attention/storage.py`."""

    def write(self, where: Placement, k_BTKH: jax.Array, v_BTKH: jax.Array) -> AttentionCache:
        """Stores one key and value per valid position; masked ones go to the sink page.

        Rejected draft tokens need no removal: the next round writes over their positions.

        A value that is not finite is stored as zeros under a key that is not a number. Whoever attends
        to it gets no number; for everybody else, whose weight for it is 0, 0 times it is 0: a sick row
        reaches neither the rows before it nor whoever gets its page next.
        """
        finite_BTK1 = jnp.all(jnp.isfinite(v_BTKH), axis=-1, keepdims=True)
        k_BTKH = jnp.where(finite_BTK1, k_BTKH, jnp.nan)
        v_BTKH = jnp.where(finite_BTK1, v_BTKH, 0.0)
        page_size = self.k_pages.shape[2]
        index_BT = where.positions_BT // page_size
        page_BT = jnp.take_along_axis(where.page_table_BM, index_BT, axis=1, mode="clip")
        page_BT = jnp.where(where.valid_BT, page_BT, SINK_PAGE)
        at = (page_BT, slice(None), where.positions_BT % page_size)
        return AttentionCache(
            k_pages=self.k_pages.at[at].set(to_storage(k_BTKH, self.kv_dtype)),
            v_pages=self.v_pages.at[at].set(to_storage(v_BTKH, self.kv_dtype)),
            kv_dtype=self.kv_dtype,
        )


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaNetCache:
    """One Gated DeltaNet layer: the committed state, and the inputs of the last round.

    Of the last round's tokens only those accepted count; how many is `DecodeState.pending_B`. They
    are replayed into `state_BWPR` when the next round begins. Memory for speculation is thus the
    inputs (k, v, gate, beta and T more rows of the conv window), not snapshots of the state.
    """

    state_BWPR: RecurrentState
    """float32, after every token but the pending ones."""
    conv_window_BYC: ConvWindow
    """Conv inputs: the X tokens before the last round, then the T tokens of the last round."""
    k_BTJP: DeltaQK
    v_BTWR: DeltaV
    gate_BTW: DeltaGate
    beta_BTW: DeltaGate


LayerCache = AttentionCache | DeltaNetCache


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the tokens of one call sit: the same for every layer."""

    positions_BT: PositionsBT
    """Absolute positions, int32."""
    valid_BT: MaskBT
    """False for padding, frozen slots and unused draft tokens."""
    page_table_BM: PageTable
    rotary: tuple[RotaryBTQ, RotaryBTQ]


def place(
    positions_BT: PositionsBT, valid_BT: MaskBT, page_table_BM: PageTable, config: ModelConfig
) -> Placement:
    """Placement of text tokens (one position on all three axes). Masked positions read as 0."""
    positions_BT = jnp.where(valid_BT, positions_BT, 0)
    rotary = rotary_embedding(jnp.broadcast_to(positions_BT, (3, *positions_BT.shape)), config)
    return Placement(positions_BT, valid_BT, page_table_BM, rotary)


def init_attention_cache(
    config: ModelConfig, pages: int, page_size: int, dtype: jax.typing.DTypeLike
) -> AttentionCache:
    """Zeroed pages, the sink page included."""
    shape = (pages, config.num_key_value_heads, page_size, config.head_dim)
    stored = storage_dtype(dtype)
    return AttentionCache(jnp.zeros(shape, stored), jnp.zeros(shape, stored), jnp.dtype(dtype))


def init_delta_net_cache(config: ModelConfig, slots: int, tokens: int) -> DeltaNetCache:
    """Zeroed state for decode rounds of `tokens` = U + 1; float32 throughout."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    taps = config.linear_conv_kernel_dim - 1

    def zeros(*shape: int) -> jax.Array:
        return jnp.zeros((slots, *shape), jnp.float32)

    return DeltaNetCache(
        state_BWPR=zeros(values, key_dim, value_dim),
        conv_window_BYC=zeros(taps + tokens, config.conv_dim),
        k_BTJP=zeros(tokens, keys, key_dim),
        v_BTWR=zeros(tokens, values, value_dim),
        gate_BTW=zeros(tokens, values),
        beta_BTW=zeros(tokens, values),
    )


def init_layer_caches(
    config: ModelConfig,
    *,
    slots: int,
    draft_length: int,
    pages: int,
    page_size: int,
    dtype: jax.typing.DTypeLike,
) -> tuple[LayerCache, ...]:
    """One cache per layer. `dtype` is that of keys and values; recurrent state is float32."""
    return tuple(
        init_attention_cache(config, pages, page_size, dtype)
        if kind == FULL_ATTENTION
        else init_delta_net_cache(config, slots, draft_length + 1)
        for kind in config.layer_types
    )
