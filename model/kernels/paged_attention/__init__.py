"""Causal attention over paged keys and values."""

from model.kernels.paged_attention.online import paged_attention
from model.kernels.paged_attention.reference import causal_attention

__all__ = ["causal_attention", "paged_attention"]
