"""What is done to logits before a token is chosen: bias, penalties, bars.

Every position of a round is treated as if the draft tokens before it were accepted, so a reply does
not depend on how its tokens were grouped into rounds. Order: logit bias, repetition penalty, frequency
and presence penalty, then end and stop ids are barred until `min_tokens` are emitted, reasoning that
is long enough is ended, and what a constraint does not allow is barred.
"""

from __future__ import annotations

import dataclasses
import typing

import jax
import jax.numpy as jnp

from model.array_types import PerSlotFloat, PerSlotInt

MAX_LOGIT_BIAS = 64
"""Biased tokens per request."""


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitSettings:
    """What a request asks to be done to its logits; one entry per slot. X ids, unused ones -1."""

    bias_ids_BX: jax.Array
    bias_BX: jax.Array
    repetition_B: PerSlotFloat
    """Divides positive and multiplies negative logits of tokens in prompt or reply; 1 is off."""
    frequency_B: PerSlotFloat
    """Subtracted per occurrence in the reply; 0 is off."""
    presence_B: PerSlotFloat
    """Subtracted once for tokens in the reply; 0 is off."""
    stop_ids_BX: jax.Array
    """End and stop ids."""
    stop_budget_B: PerSlotInt
    """max_tokens - min_tokens: a stop id is barred while more than this may still be emitted."""
    reasoning_end_B: PerSlotInt
    """The id that ends the reasoning, -1 where there is none."""


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """Which tokens a slot has seen."""

    in_reply_BV: jax.Array
    """int32 occurrences in the reply."""
    in_prompt_BV: jax.Array
    """bool."""

    def add_reply(self, tokens_BT: jax.Array, emitted_BT: jax.Array) -> TokenCounts:
        """Counts emitted tokens."""
        vocab = self.in_reply_BV.shape[1]
        slots_B1 = jnp.arange(tokens_BT.shape[0])[:, None]
        at = (slots_B1, jnp.where(emitted_BT, tokens_BT, vocab))
        return dataclasses.replace(self, in_reply_BV=self.in_reply_BV.at[at].add(1, mode="drop"))

    def add_prompt(self, slot: jax.Array, tokens_T: jax.Array, valid_T: jax.Array) -> TokenCounts:
        """Marks prompt tokens of one slot."""
        ids_T = jnp.where(valid_T, tokens_T, self.in_prompt_BV.shape[1])
        in_prompt_BV = self.in_prompt_BV.at[slot, ids_T].set(True, mode="drop")
        return dataclasses.replace(self, in_prompt_BV=in_prompt_BV)

    def clear_reply(self, slot: jax.Array) -> TokenCounts:
        """Forgets the reply of one slot."""
        return dataclasses.replace(self, in_reply_BV=self.in_reply_BV.at[slot].set(0))

    def clear_prompt(self, slot: jax.Array, when: jax.Array) -> TokenCounts:
        """Forgets the prompt of one slot where `when` holds."""
        kept_V = self.in_prompt_BV[slot] & ~when
        return dataclasses.replace(self, in_prompt_BV=self.in_prompt_BV.at[slot].set(kept_V))


def init_counts(slots: int, vocab_size: int) -> TokenCounts:
    """No token seen."""
    return TokenCounts(
        in_reply_BV=jnp.zeros((slots, vocab_size), jnp.int32),
        in_prompt_BV=jnp.zeros((slots, vocab_size), bool),
    )


def adjust(
    logits_BTV: jax.Array,
    settings: LogitSettings,
    counts: TokenCounts,
    drafts_BTU: jax.Array,
    budget_BT: jax.Array,
) -> jax.Array:
    """Logits after bias, penalties and the bar on early ends.

    Args:
      logits_BTV: float32.
      settings: per slot.
      counts: tokens seen, without this round's drafts.
      drafts_BTU: draft tokens that position t must count as emitted; -1 where there is none.
      budget_BT: tokens the slot may still emit, the one at position t included.

    Returns:
      Float32 [B, T, V]. What no running request asks for costs nothing.
    """
    batch, tokens, vocab = logits_BTV.shape
    slots_B11 = jnp.arange(batch)[:, None, None]
    rows_1T1 = jnp.arange(tokens)[None, :, None]

    def biased(logits_BTV: jax.Array) -> jax.Array:
        ids_BX = jnp.where(settings.bias_ids_BX < 0, vocab, settings.bias_ids_BX)
        at = (slots_B11, rows_1T1, ids_BX[:, None, :])
        return logits_BTV.at[at].add(settings.bias_BX[:, None, :], mode="drop")

    def penalised(logits_BTV: jax.Array) -> jax.Array:
        base_BTV = _penalise(
            logits_BTV, counts.in_reply_BV[:, None], counts.in_prompt_BV[:, None], settings
        )
        # Drafts change few entries: recompute those from the logits before the penalty.
        ids_BTU = jnp.maximum(drafts_BTU, 0)
        same_BTUU = (ids_BTU[..., None] == ids_BTU[..., None, :]) & (drafts_BTU >= 0)[..., None, :]
        reply_BTU = counts.in_reply_BV[slots_B11, ids_BTU] + jnp.sum(same_BTUU, axis=-1)
        prompt_BTU = counts.in_prompt_BV[slots_B11, ids_BTU]
        raw_BTU = jnp.take_along_axis(logits_BTV, ids_BTU, axis=2)
        values_BTU = _penalise(raw_BTU, reply_BTU, prompt_BTU, settings)
        at = (slots_B11, rows_1T1, jnp.where(drafts_BTU < 0, vocab, ids_BTU))
        return base_BTV.at[at].set(values_BTU, mode="drop")

    def barred(logits_BTV: jax.Array) -> jax.Array:
        early_BT1 = (budget_BT > settings.stop_budget_B[:, None])[..., None]
        ids_BTX = jnp.where(
            early_BT1 & (settings.stop_ids_BX >= 0)[:, None], settings.stop_ids_BX[:, None], vocab
        )
        return logits_BTV.at[slots_B11, rows_1T1, ids_BTX].set(-jnp.inf, mode="drop")

    penalties = (
        (settings.repetition_B != 1) | (settings.frequency_B != 0) | (settings.presence_B != 0)
    )
    for wanted, change in (
        (jnp.any(settings.bias_ids_BX >= 0), biased),
        (jnp.any(penalties), penalised),
        (jnp.any(budget_BT > settings.stop_budget_B[:, None]), barred),
    ):
        logits_BTV = jax.lax.cond(wanted, change, lambda unchanged: unchanged, logits_BTV)
    return logits_BTV


def end_reasoning(
    logits_BTV: jax.Array,
    settings: LogitSettings,
    drafts_BTU: jax.Array,
    left_BT: jax.Array,
) -> jax.Array:
    """Leaves only the id that ends the reasoning where no more of it may be emitted.

    Args:
      logits_BTV: float32.
      settings: per slot.
      drafts_BTU: see `adjust`; the end among them ends the reasoning as well.
      left_BT: tokens of reasoning that may still be emitted, the one at position t included.
    """
    end_B11 = settings.reasoning_end_B[:, None, None]
    ended_BT = jnp.any(drafts_BTU == end_B11, axis=2)
    forced_BT = (settings.reasoning_end_B >= 0)[:, None] & (left_BT <= 0) & ~ended_BT

    def forced() -> jax.Array:
        is_end_B1V = jnp.arange(logits_BTV.shape[2]) == end_B11
        only_end_BTV = jnp.where(is_end_B1V, logits_BTV, -jnp.inf)
        return jnp.where(forced_BT[..., None], only_end_BTV, logits_BTV)

    return jax.lax.cond(jnp.any(forced_BT), forced, lambda: logits_BTV)


def constrain(logits_BTV: jax.Array, constrained_B: jax.Array, allowed_BTW: jax.Array) -> jax.Array:
    """Bars the tokens whose bits are not set in the slots that are constrained.

    Args:
      logits_BTV: float32.
      constrained_B: bool.
      allowed_BTW: uint32; bit i of word w is token 32 w + i.
    """

    def masked() -> jax.Array:
        bits_BTW = (allowed_BTW[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        allowed_BTV = bits_BTW.reshape(*allowed_BTW.shape[:2], -1)[..., : logits_BTV.shape[2]] > 0
        return jnp.where(allowed_BTV | ~constrained_B[:, None, None], logits_BTV, -jnp.inf)

    return jax.lax.cond(jnp.any(constrained_B), masked, lambda: logits_BTV)


def likeliest(logits_BTV: jax.Array, count: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """The largest logits of each position in falling order, the lower id first on ties.

    One pass over the logits for each, so none costs nothing. Not `lax.top_k`: XLA:GPU sorts the whole
    vocabulary for it, and takes the decode call out of its CUDA graph to do so.

    Args:
      logits_BTV: float32.
      count: int32 scalar, how many are wanted, 0 .. most.
      most: how many there is room for.

    Returns:
      (int32 ids [B, T, most], their logits); zeros beyond `count`.
    """
    ids_V = jnp.arange(logits_BTV.shape[2], dtype=jnp.int32)

    def next_(n: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        value_BT1, id_BT1, ids_BTN, values_BTN = found
        behind_BTV = (logits_BTV < value_BT1) | ((logits_BTV == value_BT1) & (ids_V > id_BT1))
        rest_BTV = jnp.where(behind_BTV, logits_BTV, -jnp.inf)
        value_BT1 = jnp.max(rest_BTV, axis=2, keepdims=True)
        is_it_BTV = behind_BTV & (rest_BTV == value_BT1)
        # Where fewer tokens have a name than are wanted, the last is told again.
        last = logits_BTV.shape[2] - 1
        id_BT1 = jnp.min(jnp.where(is_it_BTV, ids_V, last), axis=2, keepdims=True)
        at = (0, 0, n)
        return (
            value_BT1,
            id_BT1,
            jax.lax.dynamic_update_slice(ids_BTN, id_BT1, at),
            jax.lax.dynamic_update_slice(values_BTN, value_BT1, at),
        )

    shape_BT = logits_BTV.shape[:2]
    found = (
        jnp.full((*shape_BT, 1), jnp.inf),
        jnp.full((*shape_BT, 1), -1, jnp.int32),
        jnp.zeros((*shape_BT, most), jnp.int32),
        jnp.zeros((*shape_BT, most), jnp.float32),
    )
    *_, ids_BTN, values_BTN = jax.lax.fori_loop(0, count, next_, found)
    return ids_BTN, values_BTN


def _penalise(
    logits: jax.Array, in_reply: jax.Array, in_prompt: jax.Array, settings: LogitSettings
) -> jax.Array:
    """Repetition (arXiv 1909.05858, section 4.1), then frequency and presence (OpenAI's API)."""
    repetition, frequency, presence = (
        array[:, None, None]
        for array in (settings.repetition_B, settings.frequency_B, settings.presence_B)
    )
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where((in_reply > 0) | in_prompt, scaled, logits)
    return logits - frequency * in_reply - presence * (in_reply > 0)
