"""Products with quantised weights, dequantised on the way."""

from __future__ import annotations

from jaxtyping import Array, Float

from model.kernels import forms
from model.kernels.quantized_matmul import blocked
from model.kernels.quantized_matmul.reference import product
from model.kernels.quantized_matmul.reference import quantized_matmul as reference
from model.quantization import QuantizedWeight

__all__ = ["product", "quantized_matmul", "reference"]


def quantized_matmul(x: Float[Array, "... I"], weight: QuantizedWeight) -> Float[Array, "... O"]:
    """See `blocked.quantized_matmul`; `reference` when it is switched off."""
    form = blocked.quantized_matmul if forms.is_on("quantized_matmul") else reference
    return form(x, weight)
