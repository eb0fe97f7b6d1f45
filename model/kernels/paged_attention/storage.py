"""How keys and values lie in their pages: rounded to a type of 4, 2 or 1 bytes, kept as bits.

Types below 4 bytes are kept as unsigned integers: XLA:CPU converts a whole bfloat16 buffer to float32
and back on every update, and the bits of an integer buffer are left alone on every platform.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

_BITS = {2: jnp.uint16, 1: jnp.uint8}


def storage_dtype(kv_dtype: DTypeLike) -> np.dtype:
    """Type of the pages of keys and values of a type."""
    return np.dtype(_BITS.get(jnp.dtype(kv_dtype).itemsize, kv_dtype))


def to_storage(x: jax.Array, kv_dtype: DTypeLike) -> jax.Array:
    """Rounds values; what float8 cannot hold becomes its largest value, not-a-numbers stay."""
    if jnp.dtype(kv_dtype).itemsize == 1:
        largest = float(jnp.finfo(kv_dtype).max)
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), jnp.nan)
    rounded, bits = x.astype(kv_dtype), storage_dtype(kv_dtype)
    return rounded if rounded.dtype == bits else jax.lax.bitcast_convert_type(rounded, bits)


def from_storage(stored: jax.Array, kv_dtype: DTypeLike, dtype: DTypeLike) -> jax.Array:
    """Values as they were rounded, in `dtype` or in their own type if that is wider."""
    values = stored
    if stored.dtype != kv_dtype:
        values = jax.lax.bitcast_convert_type(stored, kv_dtype)
    narrow = values.dtype.itemsize < jnp.dtype(dtype).itemsize
    return values.astype(dtype) if narrow else values
