"""Products with quantised weights for the start-up self-test."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model.kernels.check import CheckSizes, KernelCheck
from model.kernels.quantized_matmul import quantized_matmul
from model.quantization import QuantizedWeight

TOKENS = 4
ROWS, COLUMNS = 256, 512
BLOCKED_ROWS, BLOCKED_COLUMNS = 2176, 4096
"""Two blocks of rows and a rest."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])

Known = tuple[QuantizedWeight, np.ndarray]
"""A weight, and what it stands for."""


def checks(sizes: CheckSizes) -> tuple[KernelCheck, ...]:
    """A product in each way to hold codes: float8, pairs of E2M1, integers, pairs with zero points."""
    rng = np.random.default_rng(0)
    known = (_fp8(rng), _nvfp4(rng), _int8(rng), _int4(rng))
    xs, weights, expected = [], [], []
    for weight, values in known:
        x = rng.normal(size=(TOKENS, weight.shape[1])).astype(sizes.dtype)
        rounded = values.astype(np.float32).astype(sizes.dtype)
        weights.append(weight)
        xs.append(x)
        expected.append(x.astype(np.float64) @ rounded.astype(np.float64).T)

    def run(xs: Any, weights: Any) -> tuple[jax.Array, ...]:
        return tuple(quantized_matmul(x, weight) for x, weight in zip(xs, weights, strict=True))

    return (
        KernelCheck(
            "quantized_matmul",
            run,
            (tuple(xs), tuple(weights)),
            tuple(expected),
            sizes.dtype,
            replaceable=True,
        ),
    )


def _fp8(rng: np.random.Generator) -> Known:
    bits, values = _random_e4m3(rng, (BLOCKED_ROWS, BLOCKED_COLUMNS))
    scales = _random_scales(rng, (BLOCKED_ROWS // 128, BLOCKED_COLUMNS // 128))
    weight = QuantizedWeight(bits, scales, format="fp8_block", block=(128, 128))
    return weight, values * np.repeat(np.repeat(scales, 128, 0), 128, 1)


def _nvfp4(rng: np.random.Generator) -> Known:
    codes, packed = _random_pairs(rng)
    bits, scales = _random_e4m3(rng, (ROWS, COLUMNS // 16))
    shared = _random_scales(rng, (2,))
    weight = QuantizedWeight(packed, bits, shared, format="nvfp4", block=(1, 16))
    scales = scales * np.repeat(shared, ROWS // 2)[:, None]
    return weight, E2M1[codes] * np.repeat(scales, 16, 1)


def _int8(rng: np.random.Generator) -> Known:
    codes = rng.integers(-127, 128, (ROWS, COLUMNS)).astype(np.int8)
    scales = _random_scales(rng, (ROWS, 1))
    return QuantizedWeight(codes, scales, format="int8", block=(1, COLUMNS)), codes * scales


def _int4(rng: np.random.Generator) -> Known:
    codes, packed = _random_pairs(rng)
    scales = _random_scales(rng, (ROWS, COLUMNS // 128))
    zeros = rng.integers(0, 16, scales.shape).astype(np.uint8)
    weight = QuantizedWeight(packed, scales, None, zeros, format="int4", block=(1, 128))
    zeros, scales = (np.repeat(array.astype(np.float64), 128, 1) for array in (zeros, scales))
    return weight, (codes - zeros) * scales


def _random_e4m3(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Bits and values; no not-a-numbers."""
    bits = rng.integers(0, 127, shape, np.uint8) | (rng.integers(0, 2, shape, np.uint8) << 7)
    return bits, bits.view(jnp.float8_e4m3fn).astype(np.float32)


def _random_pairs(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Codes of 4 bits, and two of them in a byte."""
    codes = rng.integers(0, 16, (ROWS, COLUMNS)).astype(np.uint8)
    return codes, codes[:, 0::2] | (codes[:, 1::2] << 4)


def _random_scales(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(0.5, 2, shape).astype(np.float32)
