"""A product with a quantised weight: the definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from model.quantization import QuantizedWeight, dequantize


def quantized_matmul(x: Float[Array, "... I"], weight: QuantizedWeight) -> Float[Array, "... O"]:
    """`x W^T`, summed and returned in float32; W is dequantised to the dtype of `x`."""
    return product(x, dequantize(weight, x.dtype))


def product(x: Float[Array, "... I"], weight: Float[Array, "O I"]) -> Float[Array, "... O"]:
    """`x W^T`, summed and returned in float32."""
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, contract, preferred_element_type=jnp.float32)
