"""The routed experts of a mixture-of-experts layer."""

from __future__ import annotations

from model.array_types import DownWeights, ExpertIds, ExpertWeights, GateUpWeights, HiddenRows
from model.kernels import forms
from model.kernels.routed_experts import blocked
from model.kernels.routed_experts.reference import routed_experts as reference

__all__ = ["reference", "routed_experts"]


def routed_experts(
    x_ZD: HiddenRows,
    ids_ZA: ExpertIds,
    weights_ZA: ExpertWeights,
    gate_up_proj_EFD: GateUpWeights,
    down_proj_EDF: DownWeights,
) -> HiddenRows:
    """See `blocked.routed_experts`; `reference` when it is switched off."""
    form = blocked.routed_experts if forms.is_on("routed_experts") else reference
    return form(x_ZD, ids_ZA, weights_ZA, gate_up_proj_EFD, down_proj_EDF)
