"""The routed experts of a mixture-of-experts layer."""

from model.kernels.routed_experts.blocked import routed_experts
from model.kernels.routed_experts.reference import routed_experts as reference

__all__ = ["reference", "routed_experts"]
