"""Quantised matrices in the hub's layouts, packed and unpacked by NumPy alone.

Each function gives the tensors of a matrix [O, I] by suffix, and the float32 matrix that they stand
for. Codes and scales are random: every code occurs, and nothing is rounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from model import checkpoint
from model.config import ModelConfig

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
Packed = tuple[dict[str, np.ndarray], np.ndarray]
Packing = Callable[[np.random.Generator, int, int], Packed]


def random_parameters(hf_config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Float32 values of every parameter by hub name; experts are fused."""
    rng = np.random.default_rng(1)
    expected = checkpoint.expected_tensors(ModelConfig.from_hf(hf_config), np.float32)
    return {
        name: 0.2 * rng.standard_normal(leaf.shape, np.float32) for name, leaf in expected.items()
    }


def write_hub_directory(
    directory: Path, tensors: Mapping[str, np.ndarray], hf_config: Mapping[str, Any]
) -> None:
    """Writes one file of weights and a config."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config))
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    safetensors.numpy.save_file(contiguous, directory / "model.safetensors")


def e4m3(bits: np.ndarray) -> np.ndarray:
    """Values of float8_e4m3fn by its definition: one sign, four exponent, three mantissa bits."""
    exponent, mantissa = (bits >> 3 & 15).astype(int), (bits & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    magnitude = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    return np.where(bits & 128, -magnitude, magnitude).astype(np.float32)


def fp8_bits(
    rng: np.random.Generator, shape: tuple[int, ...], positive: bool = False
) -> np.ndarray:
    """Bits of numbers: 127 and 255 are none."""
    bits = rng.integers(0, 127, shape, np.uint8)
    return bits if positive else bits | rng.integers(0, 2, shape, np.uint8) << 7


def as_fp8(bits: np.ndarray) -> np.ndarray:
    return bits.view(ml_dtypes.float8_e4m3fn)


def spread(scales: np.ndarray, rows: int, columns: int, block: tuple[int, int]) -> np.ndarray:
    """One scale per block -> one per element."""
    o, i = np.arange(rows) // block[0], np.arange(columns) // block[1]
    return scales[o][:, i]


def fp8_block(block: tuple[int, int], dtype=ml_dtypes.bfloat16) -> Packing:
    def pack(rng: np.random.Generator, rows: int, columns: int) -> Packed:
        bits = fp8_bits(rng, (rows, columns))
        blocks = (-(-rows // block[0]), -(-columns // block[1]))
        scales = rng.uniform(0.001, 0.003, blocks).astype(dtype)
        matrix = e4m3(bits) * spread(scales.astype(np.float32), rows, columns, block)
        return {".weight": as_fp8(bits), ".weight_scale_inv": scales}, matrix

    return pack


def fp8_tensor(rng: np.random.Generator, rows: int, columns: int) -> Packed:
    bits = fp8_bits(rng, (rows, columns))
    scale = np.float32(rng.uniform(0.001, 0.003))
    tensors = {
        ".weight": as_fp8(bits),
        ".weight_scale": np.array(scale),
        ".input_scale": np.array(1.5, np.float32),
    }
    return tensors, e4m3(bits) * scale


def nibbles(rng: np.random.Generator, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes [O, I], and two of them in a byte, the even column in the low nibble."""
    codes = rng.integers(0, 16, (rows, columns), np.uint8)
    return codes, codes[:, ::2] + 16 * codes[:, 1::2]


def nvfp4(rng: np.random.Generator, rows: int, columns: int) -> tuple[np.ndarray, ...]:
    """Packed codes, scales' bits and the matrix before the second scale, as values and scales."""
    codes, packed = nibbles(rng, rows, columns)
    values = np.where(codes & 8, -E2M1[codes & 7], E2M1[codes & 7])
    bits = fp8_bits(rng, (rows, columns // 16), positive=True) % 64  # at most 1.875
    return packed, bits, values, spread(e4m3(bits), rows, columns, (1, 16))


def modelopt_nvfp4(rng: np.random.Generator, rows: int, columns: int) -> Packed:
    packed, bits, values, scales = nvfp4(rng, rows, columns)
    shared = np.float32(rng.uniform(0.05, 0.2))
    tensors = {
        ".weight": packed,
        ".weight_scale": as_fp8(bits),
        ".weight_scale_2": np.array(shared),
        ".input_scale": np.array(2.0, np.float32),
    }
    return tensors, values * (scales * shared)


def compressed_nvfp4(rng: np.random.Generator, rows: int, columns: int) -> Packed:
    packed, bits, values, scales = nvfp4(rng, rows, columns)
    divisor = np.float32(rng.uniform(5, 20))
    tensors = {
        ".weight_packed": packed,
        ".weight_scale": as_fp8(bits),
        ".weight_global_scale": np.array([divisor]),
        ".input_global_scale": np.array([3.0], np.float32),
    }
    return tensors, values * (scales * (np.float32(1) / divisor))


def compressed_int8(rng: np.random.Generator, rows: int, columns: int) -> Packed:
    codes = rng.integers(-127, 128, (rows, columns), np.int8)
    scales = rng.uniform(0.001, 0.003, (rows, 1)).astype(ml_dtypes.bfloat16)
    return {".weight": codes, ".weight_scale": scales}, codes * scales.astype(np.float32)


def words(codes: np.ndarray, order: list[int]) -> np.ndarray:
    """Eight columns to a 32-bit word: nibble k, lowest first, is column `order[k]`."""
    packed = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for nibble, column in enumerate(order):
        packed |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
    return packed.view(np.int32)


def integers(rng: np.random.Generator, rows: int, columns: int) -> tuple[np.ndarray, ...]:
    """Codes, zero points and scales of groups of 16, and the matrix."""
    codes = rng.integers(0, 16, (rows, columns), np.uint8)
    zeros = rng.integers(1, 16, (rows, columns // 16), np.uint8)
    scales = rng.uniform(0.01, 0.03, zeros.shape).astype(np.float16)
    offset = codes.astype(np.float32) - spread(zeros, rows, columns, (1, 16))
    return codes, zeros, scales, offset * spread(scales.astype(np.float32), rows, columns, (1, 16))


def gptq(rng: np.random.Generator, rows: int, columns: int) -> Packed:
    codes, zeros, scales, matrix = integers(rng, rows, columns)
    tensors = {
        ".qweight": words(codes, list(range(8))).T.copy(),
        ".qzeros": words(zeros.T - np.uint8(1), list(range(8))),
        ".scales": scales.T.copy(),
        ".g_idx": (np.arange(columns) // 16).astype(np.int32),
    }
    return tensors, matrix


def awq(rng: np.random.Generator, rows: int, columns: int) -> Packed:
    codes, zeros, scales, matrix = integers(rng, rows, columns)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        ".qweight": words(codes.T, order),
        ".qzeros": words(zeros.T, order),
        ".scales": scales.T.copy(),
    }
    return tensors, matrix
