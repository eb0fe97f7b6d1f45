"""All that the decode and prefill programs are given and keep: shapes, settings, state, inputs."""

from __future__ import annotations

import dataclasses
import typing

import jax
import jax.numpy as jnp

from model.array_types import PageTable, PerSlotBool, PerSlotInt
from model.cache import AttentionCache, LayerCache, init_attention_cache, init_layer_caches
from model.config import ModelConfig
from model.logits import MAX_LOGIT_BIAS, LogitSettings, TokenCounts, init_counts
from model.sampling import SamplingSettings

NO_LIMIT = 2**30
"""More tokens than any context holds."""


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """Everything about the decode program that is compiled in."""

    slots: int
    """B."""
    draft_length: int
    """U, the most draft tokens per round that the state has room for; 0: without the MTP head."""
    rounds: int
    """O, rounds per decode call."""
    max_context: int
    """Tokens (prompt and reply) that a slot may hold."""
    pages: int
    """Pages of every KV cache, the sink page included."""
    page_size: int
    """S, positions per page."""
    max_stop_ids: int
    """End and stop ids watched per slot."""
    addressable_tokens: int
    """Rows of the output head from this one on name no token and are never chosen."""


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotSettings:
    """What a request asks of its slot; constant while it runs."""

    sampling: SamplingSettings
    logits: LogitSettings
    stop_reasons_BX: jax.Array
    """int32: FINISH_END or FINISH_STOP, what the id at the same index of `logits.stop_ids_BX` means."""
    draft_cap_B: PerSlotInt
    """Most draft tokens per round, 0 .. U."""
    logprobs_B: PerSlotBool
    """Whether log-probabilities of the emitted tokens are wanted."""
    top_logprobs_B: PerSlotInt
    """How many of the likeliest tokens of each position are wanted."""


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """All run-time state. Donated to every call and never read after."""

    caches: tuple[LayerCache, ...]
    mtp_cache: AttentionCache | None
    pending_B: PerSlotInt
    """How many of the last round's tokens were accepted and await the DeltaNet commit."""
    last_token_B: PerSlotInt
    """The newest token: emitted (or the prompt's last), not yet in any cache."""
    position_B: PerSlotInt
    """Absolute position of `last_token_B`; everything before it is in the caches."""
    drafts_BU: jax.Array
    draft_count_B: PerSlotInt
    """How many of `drafts_BU` the next round verifies."""
    running_B: PerSlotBool
    budget_B: PerSlotInt
    """Tokens that the slot may still emit."""
    reasoning_left_B: PerSlotInt
    """Tokens that may still be emitted before the reasoning is ended; NO_LIMIT where it has ended, or
    may be as long as it likes."""
    counts: TokenCounts
    settings: SlotSettings


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CallInputs:
    """What the host says for one decode call."""

    page_table_BM: PageTable
    """Page ids; must cover every position that the call can write for a running slot."""
    rounds_B: PerSlotInt
    """Rounds that the slot takes part in, from the first on; frozen in the others."""
    constrained_B: PerSlotBool
    """Whether `allowed_BTW` counts. Masks follow the tokens before them, so they hold for one round:
    such a slot takes part in one round at most."""
    allowed_BTW: jax.Array
    """uint32 [B, U + 1, ceil(V / 32)]: bit i of word w at position t says whether token 32 w + i may be
    chosen there, the drafts before it being emitted."""


def init_inputs(shape: DecodeShape, vocab_size: int) -> CallInputs:
    """Every running slot in every round, nothing constrained, no pages."""
    words = -(-vocab_size // 32)
    return CallInputs(
        page_table_BM=jnp.zeros((shape.slots, -(-shape.max_context // shape.page_size)), jnp.int32),
        rounds_B=jnp.full((shape.slots,), shape.rounds, jnp.int32),
        constrained_B=jnp.zeros((shape.slots,), bool),
        allowed_BTW=jnp.zeros((shape.slots, shape.draft_length + 1, words), jnp.uint32),
    )


def init_state(config: ModelConfig, shape: DecodeShape, dtype: jax.typing.DTypeLike) -> DecodeState:
    """Empty caches, no slot running. `dtype` is that of keys and values."""
    slots = shape.slots

    def ints(*dims: int) -> jax.Array:
        return jnp.zeros((slots, *dims), jnp.int32)

    def floats(*dims: int) -> jax.Array:
        return jnp.zeros((slots, *dims), jnp.float32)

    sampling = SamplingSettings(
        temperature=floats(),
        top_k=ints(),
        top_p=floats() + 1,
        min_p=floats(),
        seed=jnp.zeros((slots,), jnp.uint32),
    )
    logits = LogitSettings(
        bias_ids_BX=ints(MAX_LOGIT_BIAS) - 1,
        bias_BX=floats(MAX_LOGIT_BIAS),
        repetition_B=floats() + 1,
        frequency_B=floats(),
        presence_B=floats(),
        stop_ids_BX=ints(shape.max_stop_ids) - 1,
        stop_budget_B=ints(),
        reasoning_end_B=ints() - 1,
    )
    return DecodeState(
        caches=init_layer_caches(
            config,
            slots=slots,
            draft_length=shape.draft_length,
            pages=shape.pages,
            page_size=shape.page_size,
            dtype=dtype,
        ),
        mtp_cache=init_attention_cache(config, shape.pages, shape.page_size, dtype)
        if shape.draft_length
        else None,
        pending_B=ints(),
        last_token_B=ints(),
        position_B=ints(),
        drafts_BU=ints(shape.draft_length),
        draft_count_B=ints(),
        running_B=jnp.zeros((slots,), bool),
        budget_B=ints(),
        reasoning_left_B=ints() + NO_LIMIT,
        counts=init_counts(slots, config.vocab_size),
        settings=SlotSettings(
            sampling=sampling,
            logits=logits,
            stop_reasons_BX=ints(shape.max_stop_ids),
            draft_cap_B=ints(),
            logprobs_B=jnp.zeros((slots,), bool),
            top_logprobs_B=ints(),
        ),
    )
