"""Quantised weights: the codes that are stored, and what they stand for, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from model.quantization import FORMATS, abstract, dequantize, quantization_error, quantize

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
RELATIVE_ERROR = {"fp8_block": 0.03, "fp8_tensor": 0.03, "nvfp4": 0.11, "int8": 0.01, "int4": 0.11}


values = jax.jit(lambda q: dequantize(q, jnp.float32))


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def by_hand(q) -> np.ndarray:
    """W[o, i], one weight after the other, in float64."""
    out = np.zeros(q.shape)
    rows, columns = q.block
    codes, scales, shared, zeros = map(
        np.asarray, (q.codes, q.scales, q.global_scales, q.zero_points)
    )
    if scales.dtype == np.uint8:
        scales = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    for index in np.ndindex(q.shape):
        *expert, o, i = index
        block = (*expert, o // rows, i // columns)
        if q.format in ("nvfp4", "int4"):
            byte = int(codes[(*expert, o, i // 2)])
            code = byte & 15 if i % 2 == 0 else byte >> 4
            if q.format == "nvfp4":
                value = E2M1[code & 7] * (-1 if code & 8 else 1)
                value *= shared[(*expert, o // (q.shape[-2] // shared.shape[-1]))]
            else:
                value = code - int(zeros[block])
        elif q.format == "int8":
            value = int(codes[index])
        else:
            value = float(codes[index].view(ml_dtypes.float8_e4m3fn))
        out[index] = value * float(scales[block])
    return out


@pytest.mark.parametrize("format", FORMATS)
def test_means_what_the_formats_say(format):
    shape = (2, 130, 160)
    q = quantize(weights(*shape), format)
    assert q.shape == shape and q.ndim == len(shape)
    np.testing.assert_allclose(values(q), by_hand(q), rtol=1e-6, atol=0)


@pytest.mark.parametrize("format", FORMATS)
def test_abstract_is_what_quantize_makes(format):
    made = quantize(weights(2, 130, 160), format)
    form = abstract((2, 130, 160), format)
    assert jax.tree.structure(made) == jax.tree.structure(form)
    for array, want in zip(jax.tree.leaves(made), jax.tree.leaves(form), strict=True):
        assert (array.shape, array.dtype) == (want.shape, want.dtype)


@pytest.mark.parametrize("format", FORMATS)
def test_is_near_and_as_small_as_it_says(format):
    w = weights(256, 512)
    error = quantization_error(w, quantize(w, format))
    assert 0 < error.relative < RELATIVE_ERROR[format]
    assert error.largest < 1
    bits = {"nvfp4": 4.5, "int4": 4.3125}.get(format, 8)
    assert error.bits_per_weight == pytest.approx(bits, abs=0.1)


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_quantised_quantises_to_itself(format):
    once = values(quantize(weights(64, 256), format))
    again = values(quantize(once, format))
    np.testing.assert_allclose(again, once, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_stay_zeros(format):
    w = weights(128, 128)
    w[:, :64] = 0
    assert not np.any(values(quantize(w, format))[:, :64])
    assert not np.any(values(quantize(np.zeros((4, 128)), format)))


def test_ties_go_to_even():
    """A block whose largest value is 6 and a global scale of 1 / 448: values are E2M1 steps."""
    halves = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -5.0, 0.3, 2.4], "f4")
    row = np.concatenate([halves, [6, 0, 0, 0]]).astype(np.float32)
    got = np.asarray(values(quantize(row[None], "nvfp4")))[0, : len(halves)]
    np.testing.assert_array_equal(got, halves.astype(ml_dtypes.float4_e2m1fn).astype(np.float32))
    row = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, 127.0]], np.float32)
    np.testing.assert_array_equal(quantize(row, "int8").codes, [[0, 2, 2, 0, -2, 127]])


def test_even_columns_are_in_the_low_nibble():
    q = quantize(np.array([[6.0, -1.0] + [0] * 14], np.float32), "nvfp4")
    assert q.codes[0, 0] == 7 | (2 | 8) << 4


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_rows(format):
    """Across the blocks of the scales, from an even and an odd row."""
    q = quantize(weights(300, 64), format)
    whole = np.asarray(values(q))
    part_of = jax.jit(lambda q, start: dequantize(q.rows(start, 130), jnp.float32))
    for start in (0, 101):
        part = part_of(q, start)
        np.testing.assert_array_equal(part, whole[start : start + 130])


def test_fused_matrices_keep_their_own_scales():
    """Gate and up projections: two global scales, and blocks of the gcd of 128 and their rows."""
    gate, up = weights(48, 32), 100 * weights(48, 32, seed=1)
    parts = [quantize(w, "nvfp4") for w in (gate, up)]
    both = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)
    assert both.global_scales.shape == (2,)
    want = np.concatenate([values(part) for part in parts])
    np.testing.assert_array_equal(values(both), want)
    np.testing.assert_array_equal(values(both.rows(40, 20)), want[40:60])
