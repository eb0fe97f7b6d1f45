"""Small programs on the decode state: put a request in a slot, take it out, change its draft cap."""

from __future__ import annotations

import dataclasses
import typing

import jax
import jax.numpy as jnp

from model.cache import DeltaNetCache
from model.state import DecodeState, SlotSettings


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Insertion:
    """A request as the device sees it: scalars, and settings without the slot axis."""

    last_token: jax.Array
    """The prompt's last id."""
    position: jax.Array
    """Its position: prompt length - 1."""
    budget: jax.Array
    reasoning_left: jax.Array
    """See `DecodeState.reasoning_left_B`."""
    settings: SlotSettings
    """One entry of every array of the slots' settings."""


def insert(state: DecodeState, slot: jax.Array, new: Insertion) -> DecodeState:
    """Makes `slot` run. Its prompt but for the last token must be prefilled.

    A prompt of one token was never prefilled, so nothing has cleared the slot: position 0 does.
    """
    first = new.position == 0

    def cleared(array: jax.Array) -> jax.Array:
        return array.at[slot].set(jnp.where(first, jnp.zeros_like(array[0]), array[slot]))

    caches = tuple(
        dataclasses.replace(
            cache,
            state_BWPR=cleared(cache.state_BWPR),
            conv_window_BYC=cleared(cache.conv_window_BYC),
        )
        if isinstance(cache, DeltaNetCache)
        else cache
        for cache in state.caches
    )
    counts = state.counts.clear_prompt(slot, first).clear_reply(slot)
    counts = counts.add_prompt(slot, new.last_token[None], jnp.ones((1,), bool))
    return dataclasses.replace(
        state,
        caches=caches,
        pending_B=state.pending_B.at[slot].set(0),
        last_token_B=state.last_token_B.at[slot].set(new.last_token),
        position_B=state.position_B.at[slot].set(new.position),
        # The head has seen no hidden state of the last prompt token yet: the first round drafts none.
        draft_count_B=state.draft_count_B.at[slot].set(0),
        running_B=state.running_B.at[slot].set(True),
        budget_B=state.budget_B.at[slot].set(new.budget),
        reasoning_left_B=state.reasoning_left_B.at[slot].set(new.reasoning_left),
        counts=counts,
        settings=jax.tree.map(lambda old, one: old.at[slot].set(one), state.settings, new.settings),
    )


def release(state: DecodeState, slot: jax.Array) -> DecodeState:
    """Freezes a slot: an abort."""
    return dataclasses.replace(
        state,
        running_B=state.running_B.at[slot].set(False),
        pending_B=state.pending_B.at[slot].set(0),
    )


def set_draft_cap(state: DecodeState, slot: jax.Array, draft_cap: jax.Array) -> DecodeState:
    """Takes effect with the drafts made in the next round; those made already are still verified."""
    draft_cap_B = state.settings.draft_cap_B.at[slot].set(draft_cap)
    settings = dataclasses.replace(state.settings, draft_cap_B=draft_cap_B)
    return dataclasses.replace(state, settings=settings)
