"""Quantised weights as they lie in memory: codes, scales and how the two make up a matrix.

A weight of shape [..., O, I] (out, in; leading axes are experts) is

    W[o, i] = value(codes[o, i]) * scales[o // rows, i // columns] * global_scales[o // (O / G)]

where `rows` and `columns` are the block that shares a scale. To build one from stored tensors:

    format      codes                      scales                          block
    fp8_block   bits of float8_e4m3fn      float32                         (128, 128)
    fp8_tensor  bits of float8_e4m3fn      float32 [..., 1, 1]             (O, I)
    nvfp4       two of E2M1 in a byte      bits of float8_e4m3fn           (1, 16)
    int8        int8                       float32 [..., O, 1]             (1, I)
    int4        two of 0 .. 15 in a byte   float32, and zero points uint8  (1, group)

`scales` is [..., ceil(O / rows), ceil(I / columns)]. Of two codes in a byte the even column is in the
low nibble. Only nvfp4 has global scales, float32 [..., G], as multipliers (compressed-tensors stores
their inverse), only int4 has zero points: value = code - zero point. What is called "bits" here is
held as uint8: XLA:CPU converts whole buffers of small floats inside loops.

Fused matrices: where gate and up projection have scales of their own, make one weight of both, with
G = 2 global scales, or with the block (F, I) for fp8_tensor. With 128-row blocks and F no multiple of
128, repeat the scales' rows for a block of gcd(F, 128) rows.

Sources: E2M1 and E4M3, OCP Microscaling Formats (MX) v1.0, section 5.3; two-level scales, NVIDIA
ModelOpt (`weight_scale`, `weight_scale_2`) and compressed-tensors (`nvfp4-pack-quantized`); blocks of
128 x 128, DeepSeek-V3 (arXiv 2412.19437, section 3.3.2); groups with zero points, GPTQ (arXiv
2210.17323) and AWQ (arXiv 2306.00978).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from types import EllipsisType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

E4M3_MAX = 448.0
E2M1_MAX = 6.0


class Format(NamedTuple):
    """How the codes of a format are held; the block's columns are 0 for whole rows."""

    block: tuple[int, int]
    """Rows and columns that share a scale; 0: all there are."""
    codes: DTypeLike
    codes_per_byte: int = 1
    scales: DTypeLike = np.float32
    has_global_scales: bool = False
    has_zero_points: bool = False


FORMATS = {
    "fp8_block": Format((128, 128), np.uint8),
    "fp8_tensor": Format((0, 0), np.uint8),
    "nvfp4": Format((1, 16), np.uint8, 2, np.uint8, has_global_scales=True),
    "int8": Format((1, 0), np.int8),
    "int4": Format((1, 128), np.uint8, 2, has_zero_points=True),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A quantised matrix, or a stack of them; see the module for what the fields hold.

    It stands where an array stands, in an `nnx.Param` too. Its fields are arrays (or shapes and dtypes
    of arrays) with the same leading axes, so that `jax.tree.map` can index or stack experts.
    """

    codes: Any
    scales: Any
    global_scales: Any = None
    zero_points: Any = None
    format: str = dataclasses.field(metadata={"static": True}, default="int8")
    block: tuple[int, int] = dataclasses.field(metadata={"static": True}, default=(1, 1))
    """Rows and columns that share a scale."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix that it stands for."""
        *leading, columns = self.codes.shape
        return (*leading, columns * FORMATS[self.format].codes_per_byte)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Weights, not bytes."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Of codes and scales together."""
        return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(self))

    def __getitem__(self, key: EllipsisType) -> QuantizedWeight:
        """Itself: what `nnx.Param` asks of its value."""
        if key is not ...:
            raise TypeError(f"a quantised weight cannot be indexed with {key!r}")
        return self

    def rows(self, start: jax.Array | int, count: int) -> QuantizedWeight:
        """Rows `start` to `start + count` of a single matrix; they must exist."""
        # Not by dynamic_slice: in a loop XLA:GPU makes copies of that which no CUDA graph can hold.
        every = start + jnp.arange(count)

        def per_row(array: jax.Array, rows: int) -> jax.Array:
            return array[every // rows]

        rows, columns = self.block
        shared = None
        if self.global_scales is not None:
            shared = per_row(self.global_scales, self.shape[0] // self.global_scales.shape[0])
        return QuantizedWeight(
            codes=per_row(self.codes, 1),
            scales=per_row(self.scales, rows),
            global_scales=shared,
            zero_points=None if self.zero_points is None else per_row(self.zero_points, rows),
            format=self.format,
            block=(1, columns),
        )


def dequantize(weight: QuantizedWeight, dtype: DTypeLike) -> jax.Array:
    """The matrix [..., O, I] that a quantised weight stands for: the definition.

    Multiplied in float32, then rounded once to `dtype`.
    """
    values = _values(weight.codes, weight.format)
    if weight.zero_points is not None:
        values = values - _spread(weight.zero_points.astype(jnp.float32), weight)
    scales = weight.scales
    if scales.dtype == jnp.uint8:
        scales = e4m3_values(scales)
    if weight.global_scales is not None:
        rows_each = scales.shape[-2] // weight.global_scales.shape[-1]
        scales = scales * jnp.repeat(weight.global_scales, rows_each, axis=-1)[..., None]
    return (values * _spread(scales, weight)).astype(dtype)


def dequantized(weight: jax.Array | QuantizedWeight, dtype: DTypeLike) -> jax.Array:
    """`dequantize`, for a weight that may be none of the kind: that stays as it is."""
    return dequantize(weight, dtype) if isinstance(weight, QuantizedWeight) else weight


def abstract(
    shape: tuple[int, ...], format: str, block: tuple[int, int] | None = None, groups: int = 1
) -> QuantizedWeight:
    """Shapes and dtypes of the arrays of a weight [..., O, I] (`jax.ShapeDtypeStruct`).

    Args:
      shape: of the weight.
      format: a key of `FORMATS`.
      block: rows and columns that share a scale; default: the format's.
      groups: global scales per matrix (G), where the format has them.
    """
    how = FORMATS[format]
    *leading, rows, columns = shape
    if block is None:
        block = (how.block[0] or rows, how.block[1] or columns)
    if columns % how.codes_per_byte or rows % groups:
        raise ValueError(f"a weight of shape {shape} cannot be {format} in {groups} groups")
    blocks = (*leading, -(-rows // block[0]), -(-columns // block[1]))
    codes = (*leading, rows, columns // how.codes_per_byte)
    return QuantizedWeight(
        codes=jax.ShapeDtypeStruct(codes, how.codes),
        scales=jax.ShapeDtypeStruct(blocks, how.scales),
        global_scales=jax.ShapeDtypeStruct((*leading, groups), np.float32)
        if how.has_global_scales
        else None,
        zero_points=jax.ShapeDtypeStruct(blocks, np.uint8) if how.has_zero_points else None,
        format=format,
        block=block,
    )


@functools.partial(jax.jit, static_argnames=("format", "block"))
def quantize(
    weight: ArrayLike, format: str, block: tuple[int, int] | None = None
) -> QuantizedWeight:
    """The nearest quantised weight: scales by the largest magnitude, ties to even.

    Args:
      weight: [..., O, I]; finite.
      format: a key of `FORMATS`.
      block: rows and columns that share a scale; default: the format's.
    """
    w = jnp.asarray(weight, jnp.float32)
    form = abstract(w.shape, format, block)
    largest = _by_block(jnp.abs(w), form.block)
    shared = zeros = None
    if format == "nvfp4":
        shared = _or_one(jnp.max(largest, axis=(-2, -1), keepdims=True) / (E2M1_MAX * E4M3_MAX))
        scales = to_e4m3(largest / (E2M1_MAX * shared))
        divisor = e4m3_values(scales) * shared
        codes = _pack(_to_e2m1(w / _spread(_or_one(divisor), form)))
        shared = shared[..., 0]
    elif format == "int4":
        low = -_by_block(jnp.maximum(-w, 0.0), form.block)
        scales = _or_one((_by_block(jnp.maximum(w, 0.0), form.block) - low) / 15)
        zeros = jnp.round(-low / scales)
        codes = jnp.round(w / _spread(scales, form)) + _spread(zeros, form)
        codes = _pack(jnp.clip(codes, 0, 15).astype(jnp.uint8))
        zeros = zeros.astype(jnp.uint8)
    elif format == "int8":
        scales = _or_one(largest / 127)
        codes = jnp.clip(jnp.round(w / _spread(scales, form)), -127, 127).astype(jnp.int8)
    else:
        scales = _or_one(largest / E4M3_MAX)
        if format == "fp8_block":  # as published checkpoints store them
            scales = scales.astype(jnp.bfloat16).astype(jnp.float32)
        codes = to_e4m3(w / _spread(scales, form))
    return dataclasses.replace(
        form, codes=codes, scales=scales, global_scales=shared, zero_points=zeros
    )


@dataclasses.dataclass(frozen=True)
class QuantizationError:
    """How far a quantised weight is from the one that it was made of."""

    squared_error: float = 0.0
    """Sum over all weights."""
    squared_weights: float = 0.0
    largest: float = 0.0
    """Absolute error."""
    weights: int = 0
    nbytes: int = 0
    """Of codes and scales."""

    @property
    def relative(self) -> float:
        """Root of the squared errors' share in the squared weights."""
        return math.sqrt(self.squared_error / (self.squared_weights or 1.0))

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / max(1, self.weights)

    def __add__(self, other: QuantizationError) -> QuantizationError:
        """Of both together."""
        return QuantizationError(
            self.squared_error + other.squared_error,
            self.squared_weights + other.squared_weights,
            max(self.largest, other.largest),
            self.weights + other.weights,
            self.nbytes + other.nbytes,
        )


def quantization_error(weight: ArrayLike, quantized: QuantizedWeight) -> QuantizationError:
    """Compares a weight with its quantised form."""
    squared_error, squared_weights, largest = map(float, _error_sums(weight, quantized))
    return QuantizationError(
        squared_error, squared_weights, largest, quantized.size, quantized.nbytes
    )


@jax.jit
def _error_sums(weight: ArrayLike, quantized: QuantizedWeight) -> tuple[jax.Array, ...]:
    w = jnp.asarray(weight, jnp.float32)
    off = dequantize(quantized, jnp.float32) - w
    return jnp.sum(jnp.square(off)), jnp.sum(jnp.square(w)), jnp.max(jnp.abs(off))


def e4m3_values(bits: jax.Array) -> jax.Array:
    """Float32 values of the bits of float8_e4m3fn."""
    return jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32)


def to_e4m3(values: jax.Array) -> jax.Array:
    """Bits of float8_e4m3fn, to nearest even; what it cannot hold becomes its largest value."""
    rounded = jnp.clip(values, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
    return jax.lax.bitcast_convert_type(rounded, jnp.uint8)


def _values(codes: jax.Array, format: str) -> jax.Array:
    """Float32 values [..., O, I] of codes, before scales and zero points."""
    if format == "int8":
        return codes.astype(jnp.float32)
    if FORMATS[format].codes_per_byte == 1:
        return e4m3_values(codes)
    pairs = (codes[..., None] >> jnp.array([0, 4], jnp.uint8)) & 15
    nibbles = pairs.reshape(*codes.shape[:-1], 2 * codes.shape[-1]).astype(jnp.int32)
    if format == "int4":
        return nibbles.astype(jnp.float32)
    mantissa, exponent = nibbles & 1, (nibbles >> 1) & 3
    halves = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    return jnp.where(nibbles < 8, 0.5, -0.5) * halves.astype(jnp.float32)


def _to_e2m1(values: jax.Array) -> jax.Array:
    """Nearest E2M1 codes, uint8: of two that are equally near, the one with the even code."""
    magnitude = jnp.abs(values)
    above = (magnitude > middle for middle in (0.25, 1.25, 2.5, 5.0))
    reached = (magnitude >= middle for middle in (0.75, 1.75, 3.5))
    code = sum(step.astype(jnp.uint8) for step in (*above, *reached))
    return code | (jnp.signbit(values).astype(jnp.uint8) << 3)


def _pack(nibbles: jax.Array) -> jax.Array:
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def _spread(per_block: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """One value per block -> one per weight."""
    *_, rows, columns = weight.shape
    per_row = jnp.repeat(per_block, weight.block[0], axis=-2)[..., :rows, :]
    return jnp.repeat(per_row, weight.block[1], axis=-1)[..., :columns]


def _by_block(values: jax.Array, block: tuple[int, int]) -> jax.Array:
    """Largest value of each block; values are not negative."""
    *leading, rows, columns = values.shape
    padding = [(0, 0)] * len(leading) + [(0, -rows % block[0]), (0, -columns % block[1])]
    padded = jnp.pad(values, padding)
    down, across = padded.shape[-2] // block[0], padded.shape[-1] // block[1]
    return padded.reshape(*leading, down, block[0], across, block[1]).max(axis=(-3, -1))


def _or_one(scales: jax.Array) -> jax.Array:
    """One instead of zero: a block of zeros."""
    return jnp.where(scales > 0, scales, 1.0)
