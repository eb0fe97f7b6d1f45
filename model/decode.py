"""The fused decode program: draft, verify, accept and commit in one XLA program. Read this first.

`decode_rounds` scans over O rounds. In one round every running slot
  1. verifies: the model runs on [last token | draft tokens], T = U + 1 of them;
  2. chooses: at each position the token that the model itself would emit there (`sampling.choose`);
  3. accepts drafts while they equal the choice; the first that differs is replaced by the choice:

         drafts   a b c          choices  a b x y        emitted  a b x
         accepted 1 1 0

  4. commits: positions advance by what was emitted. Rejected keys and values are written over by the
     next round; DeltaNet commits the accepted inputs when the next round begins (`DeltaNetCache`);
  5. drafts: the MTP head reads the true hidden states of what was emitted, then recurses.

The emitted token is the model's own choice at every position, so drafting changes the speed and
nothing else. Stop ids, token budget and context limit end a slot inside the program; a slot that is
not running is frozen: its rows are masked, write to the sink page and route to no expert.
"""

from __future__ import annotations

import dataclasses
import typing

import jax
import jax.numpy as jnp

from model.array_types import PageTable, PerSlotBool, PerSlotInt
from model.cache import (
    AttentionCache,
    LayerCache,
    init_attention_cache,
    init_layer_caches,
    place,
)
from model.config import ModelConfig
from model.logits import MAX_LOGIT_BIAS, LogitSettings, TokenCounts, adjust, init_counts
from model.sampling import SamplingSettings, choose
from model.transformer import Transformer

FINISH_NONE, FINISH_END, FINISH_STOP, FINISH_MAX_TOKENS, FINISH_CONTEXT = range(5)


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
    counts: TokenCounts
    settings: SlotSettings


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
        counts=init_counts(slots, config.vocab_size),
        settings=SlotSettings(
            sampling=sampling,
            logits=logits,
            stop_reasons_BX=ints(shape.max_stop_ids),
            draft_cap_B=ints(),
            logprobs_B=jnp.zeros((slots,), bool),
        ),
    )


def decode_rounds(
    model: Transformer,
    state: DecodeState,
    page_table_BM: PageTable,
    shape: DecodeShape,
    draft_length: int,
) -> tuple[DecodeState, jax.Array]:
    """One decode call: O rounds over all slots.

    Args:
      model: parameters.
      state: donated.
      page_table_BM: page ids; must cover every position the call can write for a running slot.
      shape: what is compiled in.
      draft_length: draft tokens per round in this program, 0 .. U. Programs of different draft
        lengths may follow each other on one state; strict mode uses one.

    Returns:
      (state, packed int32 [O, B, 2 (U + 1) + 4]): per round and slot U + 1 token ids (-1 where none
      was emitted); the bits of their float32 log-probabilities (of the model itself: before bias,
      penalties and temperature; zero unless asked for); then how many tokens were emitted, draft
      tokens verified, draft tokens accepted, and the FINISH_* that ended the slot in this round.
    """

    def round_(state: DecodeState, _: None) -> tuple[DecodeState, jax.Array]:
        return _decode_round(model, state, page_table_BM, shape, draft_length)

    return jax.lax.scan(round_, state, None, length=shape.rounds)


def _decode_round(
    model: Transformer,
    state: DecodeState,
    page_table_BM: jax.Array,
    shape: DecodeShape,
    draft_length: int,
) -> tuple[DecodeState, jax.Array]:
    offsets_T = jnp.arange(draft_length + 1)
    drafts_BU = state.drafts_BU[:, :draft_length]
    draft_count_B = jnp.minimum(state.draft_count_B, draft_length)

    # 1. Verify.
    tokens_BT = jnp.concatenate([state.last_token_B[:, None], drafts_BU], axis=1)
    positions_BT = state.position_B[:, None] + offsets_T
    valid_BT = state.running_B[:, None] & (offsets_T <= draft_count_B[:, None])
    where = place(positions_BT, valid_BT, page_table_BM, model.config)
    hidden_BTD, caches = model.decode(tokens_BT, where, state.caches, state.pending_B)

    # 2. Choose, 3. accept.
    # Position t counts the drafts up to its own input as emitted.
    seen_TU = jnp.arange(draft_length) < offsets_T[:, None]
    drafts_BTU = jnp.where(seen_TU & valid_BT[:, 1:][:, None], drafts_BU[:, None], -1)
    logits_BTV = _logits(model, hidden_BTD, shape)
    chosen_BT = _choose(state, logits_BTV, positions_BT + 1, drafts_BTU)
    logprobs_BT = _logprobs(logits_BTV, chosen_BT, state)
    agrees_BU = (drafts_BU == chosen_BT[:, :-1]) & valid_BT[:, 1:]
    accepted_B = jnp.sum(jnp.cumprod(agrees_BU, axis=1, dtype=jnp.int32), axis=1)
    emitted_B, finish_B = _emit(chosen_BT, accepted_B + 1, state, shape)
    emitted_BT = offsets_T < emitted_B[:, None]

    # 4. Commit.
    newest_B1 = jnp.maximum(emitted_B - 1, 0)[:, None]
    newest_token_B = jnp.take_along_axis(chosen_BT, newest_B1, axis=1)[:, 0]
    running_B = state.running_B & (finish_B == FINISH_NONE)
    counts = (emitted_B, draft_count_B, jnp.minimum(accepted_B, emitted_B), finish_B)
    packed_BY = _pack(chosen_BT, logprobs_BT, emitted_BT, counts, shape)
    state = dataclasses.replace(
        state,
        caches=caches,
        pending_B=emitted_B,
        last_token_B=jnp.where(state.running_B, newest_token_B, state.last_token_B),
        position_B=state.position_B + emitted_B,
        running_B=running_B,
        budget_B=state.budget_B - emitted_B,
        counts=state.counts.add_reply(chosen_BT, emitted_BT),
    )

    # 5. Draft.
    if shape.draft_length:
        state = _draft(
            model, state, hidden_BTD, chosen_BT, emitted_BT, page_table_BM, shape, draft_length
        )
    return state, packed_BY


def _logits(model: Transformer, hidden_BTD: jax.Array, shape: DecodeShape) -> jax.Array:
    """The model's own logits [B, T, V]; -inf where a row of the output head names no token."""
    batch, tokens, width = hidden_BTD.shape
    logits_ZV = model.logits(hidden_BTD.reshape(batch * tokens, width))
    if shape.addressable_tokens < logits_ZV.shape[1]:
        named_V = jnp.arange(logits_ZV.shape[1]) < shape.addressable_tokens
        logits_ZV = jnp.where(named_V, logits_ZV, -jnp.inf)
    return logits_ZV.reshape(batch, tokens, -1)


def _choose(
    state: DecodeState, logits_BTV: jax.Array, positions_BT: jax.Array, drafts_BTU: jax.Array
) -> jax.Array:
    """The token of each position, [B, T].

    Args:
      state: gives settings, and counts and budget that go with `state.position_B`.
      logits_BTV: the model's own.
      positions_BT: absolute positions of the tokens to choose.
      drafts_BTU: draft tokens to count as emitted, see `logits.adjust`.
    """
    batch, tokens = positions_BT.shape
    budget_BT = state.budget_B[:, None] - (positions_BT - 1 - state.position_B[:, None])
    logits_BTV = adjust(logits_BTV, state.settings.logits, state.counts, drafts_BTU, budget_BT)
    per_row = jax.tree.map(lambda per_slot: jnp.repeat(per_slot, tokens), state.settings.sampling)
    logits_ZV = logits_BTV.reshape(batch * tokens, -1)
    return choose(logits_ZV, per_row, positions_BT.reshape(-1)).reshape(batch, tokens)


def _logprobs(logits_BTV: jax.Array, chosen_BT: jax.Array, state: DecodeState) -> jax.Array:
    """Log-probabilities of the chosen tokens, [B, T]; zeros when no slot wants them."""

    def compute() -> jax.Array:
        chosen_BT1 = jnp.take_along_axis(logits_BTV, chosen_BT[..., None], axis=2)
        return chosen_BT1[..., 0] - jax.nn.logsumexp(logits_BTV, axis=2)

    wanted = jnp.any(state.settings.logprobs_B & state.running_B)
    return jax.lax.cond(wanted, compute, lambda: jnp.zeros(chosen_BT.shape, jnp.float32))


def _emit(
    chosen_BT: jax.Array, available_B: jax.Array, state: DecodeState, shape: DecodeShape
) -> tuple[jax.Array, jax.Array]:
    """How many of the available tokens are emitted, and what ends the slot with the last of them.

    A stop id ends the slot where it stands, even if budget or context end at the same token.
    """
    is_stop_BTX = chosen_BT[:, :, None] == state.settings.logits.stop_ids_BX[:, None, :]
    reason_BT = jnp.max(
        jnp.where(is_stop_BTX, state.settings.stop_reasons_BX[:, None, :], 0), axis=2
    )
    stops_BT = reason_BT > 0
    until_stop_B = jnp.where(
        jnp.any(stops_BT, axis=1), jnp.argmax(stops_BT, axis=1) + 1, chosen_BT.shape[1] + 1
    )
    room_B = shape.max_context - 1 - state.position_B
    limit_B = jnp.minimum(state.budget_B, room_B)
    emitted_B = jnp.minimum(jnp.minimum(available_B, until_stop_B), limit_B)
    last_B1 = jnp.maximum(emitted_B - 1, 0)[:, None]
    finish_B = jnp.where(
        emitted_B == until_stop_B,
        jnp.take_along_axis(reason_BT, last_B1, axis=1)[:, 0],
        jnp.where(
            emitted_B == state.budget_B,
            FINISH_MAX_TOKENS,
            jnp.where(emitted_B == room_B, FINISH_CONTEXT, FINISH_NONE),
        ),
    )
    frozen_B = ~state.running_B
    return jnp.where(frozen_B, 0, emitted_B), jnp.where(frozen_B, FINISH_NONE, finish_B)


def _pack(
    chosen_BT: jax.Array,
    logprobs_BT: jax.Array,
    emitted_BT: jax.Array,
    counts: tuple[jax.Array, ...],
    shape: DecodeShape,
) -> jax.Array:
    """One int32 row per slot: one device-to-host copy takes it all. See `decode_rounds`."""

    def widened(values_BT: jax.Array, filler: int) -> jax.Array:
        unused = shape.draft_length + 1 - values_BT.shape[1]
        values_BT = jnp.where(emitted_BT, values_BT, filler)
        return jnp.pad(values_BT, ((0, 0), (0, unused)), constant_values=filler)

    bits_BT = jax.lax.bitcast_convert_type(logprobs_BT, jnp.int32)
    emitted_B, drafted_B, accepted_B, finish_B = counts
    drafted_B = jnp.where(emitted_B > 0, drafted_B, 0)
    counts_B4 = jnp.stack([emitted_B, drafted_B, accepted_B, finish_B], axis=1)
    columns = [widened(chosen_BT, -1), widened(bits_BT, 0), counts_B4]
    return jnp.concatenate(columns, axis=1).astype(jnp.int32)


def _draft(
    model: Transformer,
    state: DecodeState,
    hidden_BTD: jax.Array,
    chosen_BT: jax.Array,
    emitted_BT: jax.Array,
    page_table_BM: jax.Array,
    shape: DecodeShape,
    draft_length: int,
) -> DecodeState:
    """Proposes tokens after the newest one. `state` is already past this round's commit.

    Without draft tokens (`draft_length` 0) the head's cache is kept up all the same, so that drafting
    can begin at any later call.
    """
    mtp, mtp_cache, config = model.mtp, state.mtp_cache, model.config
    assert mtp is not None and mtp_cache is not None, "draft_length needs an MTP head"
    room_B = shape.max_context - 1 - state.position_B
    cap_B = jnp.minimum(state.settings.draft_cap_B, draft_length)
    count_B = jnp.minimum(cap_B, jnp.minimum(state.budget_B, room_B) - 1)
    count_B = jnp.where(state.running_B, jnp.maximum(count_B, 0), 0)

    # Row t of the head pairs hidden state t with the token after it; rows emitted now become context.
    emitted_B = jnp.sum(emitted_BT, axis=1)
    first_B = state.position_B - emitted_B
    row_positions_BT = first_B[:, None] + jnp.arange(chosen_BT.shape[1])
    where = place(row_positions_BT, emitted_BT & state.running_B[:, None], page_table_BM, config)
    u_BTD = mtp.combine(model.embed_tokens(chosen_BT), hidden_BTD)
    cache = mtp.write(u_BTD, where, mtp_cache)
    newest_B11 = jnp.maximum(emitted_B - 1, 0)[:, None, None]
    hidden_B1D = jnp.take_along_axis(hidden_BTD, newest_B11, axis=1)

    def draft_one(carry: tuple, index: jax.Array) -> tuple[tuple, None]:
        token_B1, hidden_B1D, drafts_BU, cache = carry
        positions_B1 = (state.position_B - 1 + index)[:, None]
        wanted_B1 = (index < count_B)[:, None]
        where = place(positions_B1, wanted_B1, page_table_BM, config)
        u_B1D = mtp.combine(model.embed_tokens(token_B1), hidden_B1D)
        # The first row is in the cache already; writing it again keeps the steps alike.
        cache = mtp.write(u_B1D, where, cache)
        hidden_B1D = mtp.attend(u_B1D, where, cache, wanted_B1)
        logits_B1V = _logits(model, hidden_B1D, shape)
        token_B1 = _choose(state, logits_B1V, positions_B1 + 2, drafts_BU[:, None])
        drafts_BU = jax.lax.dynamic_update_slice(drafts_BU, token_B1, (0, index))
        return (token_B1, hidden_B1D, drafts_BU, cache), None

    first = (state.last_token_B[:, None], hidden_B1D, jnp.full_like(state.drafts_BU, -1), cache)
    (_, _, drafts_BU, cache), _ = jax.lax.scan(draft_one, first, jnp.arange(draft_length))
    return dataclasses.replace(state, mtp_cache=cache, drafts_BU=drafts_BU, draft_count_B=count_B)
