"""The gated delta rule: the recurrence inside Gated DeltaNet (Yang et al., arXiv 2412.06464, eq. 10).

`sequential` is the definition, `chunked` the form for whole prompts, `replay` the form for decode
rounds. They compute the same function; the tests hold them against each other.
"""

from __future__ import annotations

import jax

from model.array_types import DeltaGate, DeltaQK, DeltaV, RecurrentState
from model.kernels import forms
from model.kernels.gated_delta_rule import pallas_gpu, reference
from model.kernels.gated_delta_rule.chunked import chunked as chunked_form
from model.kernels.gated_delta_rule.reference import sequential

__all__ = ["chunked", "replay", "sequential"]


def chunked(
    q_BTJP: DeltaQK,
    k_BTJP: DeltaQK,
    v_BTWR: DeltaV,
    gate_BTW: DeltaGate,
    beta_BTW: DeltaGate,
    state_BWPR: RecurrentState,
) -> tuple[DeltaV, RecurrentState]:
    """See `chunked.chunked`; `sequential` when it is switched off."""
    form = chunked_form if forms.is_on("gated_delta_rule.chunked") else sequential
    return form(q_BTJP, k_BTJP, v_BTWR, gate_BTW, beta_BTW, state_BWPR)


def replay(
    past: tuple[jax.Array, ...],
    new: tuple[jax.Array, ...],
    state_BWPR: RecurrentState,
    past_tokens: jax.Array,
) -> tuple[DeltaV, RecurrentState]:
    """`reference.replay`, by the GPU kernel when the program is compiled for a CUDA device."""
    if not forms.is_on("gated_delta_rule.replay"):
        return reference.replay(past, new, state_BWPR, past_tokens)
    return jax.lax.platform_dependent(
        past,
        new,
        state_BWPR,
        past_tokens,
        cuda=pallas_gpu.replay,
        default=reference.replay,
    )
