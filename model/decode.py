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

import jax
import jax.numpy as jnp

from model.cache import place
from model.logits import adjust, constrain, end_reasoning, likeliest
from model.sampling import choose
from model.state import NO_LIMIT, CallInputs, DecodeShape, DecodeState, SlotSettings
from model.transformer import Transformer

MAX_TOP_LOGPROBS = 20
"""Likeliest tokens told per position, when a request asks for any."""

FINISH_NONE, FINISH_END, FINISH_STOP, FINISH_MAX_TOKENS, FINISH_CONTEXT, FINISH_NOT_FINITE = range(
    6
)


def decode_rounds(
    model: Transformer,
    state: DecodeState,
    inputs: CallInputs,
    shape: DecodeShape,
    draft_length: int,
) -> tuple[DecodeState, tuple[jax.Array, jax.Array]]:
    """One decode call: O rounds over all slots.

    Args:
      model: parameters.
      state: donated.
      inputs: see `CallInputs`.
      shape: what is compiled in.
      draft_length: draft tokens per round in this program, 0 .. U. Programs of different draft
        lengths may follow each other on one state; strict mode uses one.

    Returns:
      (state, (packed int32 [O, B, 3 U + 7], top int32 [O, B, U + 1, 2 N])). `packed` holds per round and
      slot U + 1 token ids (-1 where none was emitted); the bits of their float32 log-probabilities (of
      the model itself: before bias, penalties and temperature; zero unless asked for); U draft tokens
      for the slot's next round; then how many tokens were emitted, draft tokens verified, draft
      tokens accepted, the FINISH_* that ended the slot in this round, and how many of the next draft
      tokens count. `top` holds the N = MAX_TOP_LOGPROBS likeliest ids of each position and the bits of
      their log-probabilities; zero unless asked for.
    """

    def round_(state: DecodeState, index: jax.Array) -> tuple[DecodeState, tuple]:
        active_B = state.running_B & (index < inputs.rounds_B)
        return _decode_round(model, state, inputs, active_B, shape, draft_length)

    return jax.lax.scan(round_, state, jnp.arange(shape.rounds))


def _decode_round(
    model: Transformer,
    state: DecodeState,
    inputs: CallInputs,
    active_B: jax.Array,
    shape: DecodeShape,
    draft_length: int,
) -> tuple[DecodeState, tuple[jax.Array, jax.Array]]:
    offsets_T = jnp.arange(draft_length + 1)
    drafts_BU = state.drafts_BU[:, :draft_length]
    draft_count_B = jnp.minimum(state.draft_count_B, draft_length)

    # 1. Verify.
    tokens_BT = jnp.concatenate([state.last_token_B[:, None], drafts_BU], axis=1)
    positions_BT = state.position_B[:, None] + offsets_T
    valid_BT = active_B[:, None] & (offsets_T <= draft_count_B[:, None])
    where = place(positions_BT, valid_BT, inputs.page_table_BM, model.config)
    hidden_BTD, caches = model.decode(tokens_BT, where, state.caches, state.pending_B)

    # 2. Choose, 3. accept.
    # Position t counts the drafts up to its own input as emitted.
    seen_TU = jnp.arange(draft_length) < offsets_T[:, None]
    drafts_BTU = jnp.where(seen_TU & valid_BT[:, 1:][:, None], drafts_BU[:, None], -1)
    logits_BTV = token_logits(model, hidden_BTD, shape)
    allowed = (inputs.constrained_B, inputs.allowed_BTW[:, : draft_length + 1])
    chosen_BT = _choose(state, logits_BTV, positions_BT + 1, drafts_BTU, allowed)
    logprobs_BT, top_BTN = _logprobs(logits_BTV, chosen_BT, state.settings, active_B)
    agrees_BU = (drafts_BU == chosen_BT[:, :-1]) & valid_BT[:, 1:]
    accepted_B = jnp.sum(jnp.cumprod(agrees_BU, axis=1, dtype=jnp.int32), axis=1)
    finite_BT = jnp.isfinite(jnp.max(logits_BTV, axis=2))
    emitted_B, finish_B = _emit(chosen_BT, finite_BT, accepted_B + 1, state, active_B, shape)
    emitted_BT = offsets_T < emitted_B[:, None]

    # 4. Commit.
    newest_B1 = jnp.maximum(emitted_B - 1, 0)[:, None]
    newest_token_B = jnp.take_along_axis(chosen_BT, newest_B1, axis=1)[:, 0]
    verified_B = jnp.where(emitted_B > 0, draft_count_B, 0)
    counts = (emitted_B, verified_B, jnp.minimum(accepted_B, emitted_B), finish_B)
    state = dataclasses.replace(
        state,
        caches=caches,
        # A slot that sits a round out has committed what was pending all the same.
        pending_B=emitted_B,
        last_token_B=jnp.where(active_B, newest_token_B, state.last_token_B),
        position_B=state.position_B + emitted_B,
        running_B=state.running_B & (finish_B == FINISH_NONE),
        budget_B=state.budget_B - emitted_B,
        reasoning_left_B=_reasoning_left(state, chosen_BT, emitted_BT),
        counts=state.counts.add_reply(chosen_BT, emitted_BT),
    )

    # 5. Draft.
    if shape.draft_length:
        state = _draft(
            model,
            state,
            hidden_BTD,
            chosen_BT,
            emitted_BT,
            active_B,
            inputs.page_table_BM,
            shape,
            draft_length,
        )
    return state, _pack(chosen_BT, logprobs_BT, top_BTN, emitted_BT, counts, state, shape)


def token_logits(model: Transformer, hidden_BTD: jax.Array, shape: DecodeShape) -> jax.Array:
    """The model's own logits [B, T, V]; -inf where a row of the output head names no token."""
    batch, tokens, width = hidden_BTD.shape
    logits_ZV = model.logits(hidden_BTD.reshape(batch * tokens, width))
    if shape.addressable_tokens < logits_ZV.shape[1]:
        named_V = jnp.arange(logits_ZV.shape[1]) < shape.addressable_tokens
        logits_ZV = jnp.where(named_V, logits_ZV, -jnp.inf)
    return logits_ZV.reshape(batch, tokens, -1)


def _choose(
    state: DecodeState,
    logits_BTV: jax.Array,
    positions_BT: jax.Array,
    drafts_BTU: jax.Array,
    allowed: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """The token of each position, [B, T].

    Args:
      state: gives settings, and counts and budget that go with `state.position_B`.
      logits_BTV: the model's own.
      positions_BT: absolute positions of the tokens to choose.
      drafts_BTU: draft tokens to count as emitted, see `logits.adjust`.
      allowed: (constrained_B, allowed_BTW) of `CallInputs`; None: nothing is constrained.
    """
    batch, tokens = positions_BT.shape
    ahead_BT = positions_BT - 1 - state.position_B[:, None]
    budget_BT = state.budget_B[:, None] - ahead_BT
    reasoning_left_BT = state.reasoning_left_B[:, None] - ahead_BT
    settings = state.settings.logits
    logits_BTV = adjust(logits_BTV, settings, state.counts, drafts_BTU, budget_BT)
    logits_BTV = end_reasoning(logits_BTV, settings, drafts_BTU, reasoning_left_BT)
    if allowed is not None:
        logits_BTV = constrain(logits_BTV, *allowed)
    per_row = jax.tree.map(lambda per_slot: jnp.repeat(per_slot, tokens), state.settings.sampling)
    logits_ZV = logits_BTV.reshape(batch * tokens, -1)
    return choose(logits_ZV, per_row, positions_BT.reshape(-1)).reshape(batch, tokens)


def _reasoning_left(state: DecodeState, chosen_BT: jax.Array, emitted_BT: jax.Array) -> jax.Array:
    """`DecodeState.reasoning_left_B` after a round."""
    end_B1 = state.settings.logits.reasoning_end_B[:, None]
    ended_B = jnp.any(emitted_BT & (chosen_BT == end_B1), axis=1)
    left_B = state.reasoning_left_B - jnp.sum(emitted_BT, axis=1)
    return jnp.where(ended_B | (state.reasoning_left_B == NO_LIMIT), NO_LIMIT, left_B)


def _logprobs(
    logits_BTV: jax.Array, chosen_BT: jax.Array, settings: SlotSettings, active_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of the chosen tokens [B, T], and of the likeliest tokens [B, T, 2 N].

    Zeros when no slot wants them. The second holds N ids, then the bits of N float32.
    """
    count = jnp.max(jnp.where(active_B, settings.top_logprobs_B, 0))
    wanted = jnp.any(settings.logprobs_B & active_B) | (count > 0)
    total_BT = jax.lax.cond(
        wanted,
        lambda: jax.nn.logsumexp(logits_BTV, axis=2),
        lambda: jnp.zeros(chosen_BT.shape, jnp.float32),
    )
    chosen_BT1 = jnp.take_along_axis(logits_BTV, chosen_BT[..., None], axis=2)
    logprobs_BT = jnp.where(wanted, chosen_BT1[..., 0] - total_BT, 0.0)
    ids_BTN, values_BTN = likeliest(logits_BTV, count, MAX_TOP_LOGPROBS)
    bits_BTN = jax.lax.bitcast_convert_type(values_BTN - total_BT[..., None], jnp.int32)
    return logprobs_BT, jnp.concatenate([ids_BTN, bits_BTN], axis=2)


def _emit(
    chosen_BT: jax.Array,
    finite_BT: jax.Array,
    available_B: jax.Array,
    state: DecodeState,
    active_B: jax.Array,
    shape: DecodeShape,
) -> tuple[jax.Array, jax.Array]:
    """How many of the available tokens are emitted, and what ends the slot with the last of them.

    A stop id ends the slot where it stands, even if budget or context end at the same token. A choice
    among logits that are not finite is none: it is not emitted, and ends the slot.
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
    wanted_B = jnp.minimum(jnp.minimum(available_B, until_stop_B), limit_B)
    emitted_B = jnp.minimum(
        wanted_B, jnp.sum(jnp.cumprod(finite_BT, axis=1, dtype=jnp.int32), axis=1)
    )
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
    finish_B = jnp.where(emitted_B < wanted_B, FINISH_NOT_FINITE, finish_B)
    return jnp.where(active_B, emitted_B, 0), jnp.where(active_B, finish_B, FINISH_NONE)


def _pack(
    chosen_BT: jax.Array,
    logprobs_BT: jax.Array,
    top_BTN: jax.Array,
    emitted_BT: jax.Array,
    counts: tuple[jax.Array, ...],
    state: DecodeState,
    shape: DecodeShape,
) -> tuple[jax.Array, jax.Array]:
    """What `decode_rounds` returns of a round; `state` is the one after it."""
    unused = shape.draft_length + 1 - chosen_BT.shape[1]

    def widened(values_BT: jax.Array, filler: int) -> jax.Array:
        values_BT = jnp.where(emitted_BT, values_BT, filler)
        return jnp.pad(values_BT, ((0, 0), (0, unused)), constant_values=filler)

    bits_BT = jax.lax.bitcast_convert_type(logprobs_BT, jnp.int32)
    counts_B5 = jnp.stack([*counts, state.draft_count_B], axis=1)
    columns = [widened(chosen_BT, -1), widened(bits_BT, 0), state.drafts_BU, counts_B5]
    top_BTN = jnp.pad(top_BTN, ((0, 0), (0, unused), (0, 0)))
    return jnp.concatenate(columns, axis=1).astype(jnp.int32), top_BTN


def _draft(
    model: Transformer,
    state: DecodeState,
    hidden_BTD: jax.Array,
    chosen_BT: jax.Array,
    emitted_BT: jax.Array,
    active_B: jax.Array,
    page_table_BM: jax.Array,
    shape: DecodeShape,
    draft_length: int,
) -> DecodeState:
    """Proposes tokens after the newest one. `state` is already past this round's commit.

    A slot that sits the round out keeps the proposals that it has.

    Without draft tokens (`draft_length` 0) the head's cache is kept up all the same, so that drafting
    can begin at any later call.
    """
    mtp, mtp_cache, config = model.mtp, state.mtp_cache, model.config
    assert mtp is not None and mtp_cache is not None, "draft_length needs an MTP head"
    room_B = shape.max_context - 1 - state.position_B
    cap_B = jnp.minimum(state.settings.draft_cap_B, draft_length)
    count_B = jnp.minimum(cap_B, jnp.minimum(state.budget_B, room_B) - 1)
    drafting_B = state.running_B & active_B
    count_B = jnp.where(drafting_B, jnp.maximum(count_B, 0), 0)

    # Row t of the head pairs hidden state t with the token after it; rows emitted now become context.
    emitted_B = jnp.sum(emitted_BT, axis=1)
    first_B = state.position_B - emitted_B
    row_positions_BT = first_B[:, None] + jnp.arange(chosen_BT.shape[1])
    where = place(row_positions_BT, emitted_BT & drafting_B[:, None], page_table_BM, config)
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
        logits_B1V = token_logits(model, hidden_B1D, shape)
        token_B1 = _choose(state, logits_B1V, positions_B1 + 2, drafts_BU[:, None])
        drafts_BU = jax.lax.dynamic_update_slice(drafts_BU, token_B1, (0, index))
        return (token_B1, hidden_B1D, drafts_BU, cache), None

    first = (state.last_token_B[:, None], hidden_B1D, jnp.full_like(state.drafts_BU, -1), cache)
    (_, _, drafts_BU, cache), _ = jax.lax.scan(draft_one, first, jnp.arange(draft_length))
    waiting_B = state.running_B & ~active_B
    return dataclasses.replace(
        state,
        mtp_cache=cache,
        drafts_BU=jnp.where(waiting_B[:, None], state.drafts_BU, drafts_BU),
        draft_count_B=jnp.where(waiting_B, state.draft_count_B, count_B),
    )
