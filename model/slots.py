"""Small programs on the decode state: put a request in a slot, take it out, change its draft cap."""

from __future__ import annotations

import dataclasses
import typing

import jax
import jax.numpy as jnp

from model.decode import DecodeState, SlotSettings
from model.sampling import SamplingSettings


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
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seed: jax.Array
    stop_ids_X: jax.Array
    stop_reasons_X: jax.Array
    draft_cap: jax.Array


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
        if hasattr(cache, "state_BWPR")
        else cache
        for cache in state.caches
    )
    old = state.settings
    sampling = SamplingSettings(
        temperature=old.sampling.temperature.at[slot].set(new.temperature),
        top_k=old.sampling.top_k.at[slot].set(new.top_k),
        top_p=old.sampling.top_p.at[slot].set(new.top_p),
        seed=old.sampling.seed.at[slot].set(new.seed),
    )
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
        settings=SlotSettings(
            sampling=sampling,
            stop_ids_BX=old.stop_ids_BX.at[slot].set(new.stop_ids_X),
            stop_reasons_BX=old.stop_reasons_BX.at[slot].set(new.stop_reasons_X),
            draft_cap_B=old.draft_cap_B.at[slot].set(new.draft_cap),
        ),
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
