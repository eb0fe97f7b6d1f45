"""Keys and values in bfloat16 and float8: what is stored, and that replies stay exact."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import tiny
from model.cache import SINK_PAGE, init_attention_cache, place
from model.kernels.paged_attention import causal_attention, paged_attention
from model.kernels.paged_attention.storage import from_storage, storage_dtype, to_storage
from service.engine.executor import JaxExecutor
from service.engine.types import Request, SamplingParams

PAGE, KV_HEADS, HEADS, DIM = 8, 2, 4, 16
NUMPY = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}


@pytest.mark.parametrize("kv_dtype", NUMPY)
def test_stored_bits_are_the_rounded_values(kv_dtype):
    x = np.random.default_rng(0).normal(size=(50, 40)).astype(np.float32)
    stored = to_storage(jnp.asarray(x), kv_dtype)
    rounded = x.astype(NUMPY[kv_dtype])
    assert stored.dtype == storage_dtype(kv_dtype)
    assert np.asarray(stored).tobytes() == rounded.tobytes()
    for dtype in ("float32", "bfloat16"):
        back = from_storage(stored, kv_dtype, dtype)
        assert back.dtype == (jnp.float32 if "float32" in (dtype, kv_dtype) else jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(back, np.float32), rounded.astype(np.float32))


def test_float8_holds_its_largest_value_and_not_a_number():
    x = jnp.asarray([1e4, -449.0, 447.0, jnp.inf, -jnp.inf, jnp.nan])
    back = from_storage(to_storage(x, "float8_e4m3fn"), "float8_e4m3fn", jnp.float32)
    np.testing.assert_array_equal(back, [448.0, -448.0, 448.0, np.nan, np.nan, np.nan])


@pytest.mark.parametrize("kv_dtype", NUMPY)
@pytest.mark.parametrize("sick", [np.nan, np.inf])
def test_a_sick_value_is_kept_to_itself(kv_dtype, sick):
    """Zeros under a key that is not a number; the rows beside it are as they were."""
    config = tiny.config()
    cache = init_attention_cache(config, 3, PAGE, kv_dtype)
    positions = jnp.arange(4)[None]
    where = place(positions, positions < 3, jnp.asarray([[2]]), config)
    x = np.ones((1, 4, KV_HEADS, DIM), np.float32)
    values = x.copy()
    values[0, 1, 0, 5] = sick
    cache = cache.write(where, jnp.asarray(x), jnp.asarray(values))
    keys, values = (
        np.asarray(from_storage(pages, kv_dtype, jnp.float32))[2, 0, :4]
        for pages in (cache.k_pages, cache.v_pages)
    )
    assert np.isnan(keys[1]).all() and (values[1] == 0).all()
    assert (keys[[0, 2]] == 1).all() and (values[[0, 2]] == 1).all() and (keys[3] == 0).all()
    assert np.asarray(cache.k_pages)[SINK_PAGE].any() and not np.asarray(cache.k_pages)[1].any()


@pytest.mark.parametrize("kv_dtype", NUMPY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_reads_what_was_rounded(kv_dtype, dtype):
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(1, 20, HEADS, DIM)), dtype)
    k, v = rng.normal(size=(2, 1, 20, KV_HEADS, DIM)).astype(np.float32).astype(NUMPY[kv_dtype])
    table = np.array([[3, 1, 2]], np.int32)
    pages = np.zeros((2, 4, KV_HEADS, PAGE, DIM), NUMPY[kv_dtype])
    for page, start in zip(table[0], (0, 8, 16), strict=True):
        for array, whole in zip(pages, (k, v), strict=True):
            part = whole[0, start : start + PAGE].swapaxes(0, 1)
            array[page, :, : part.shape[1]] = part
    k_pages, v_pages = (jnp.asarray(array.view(storage_dtype(kv_dtype))) for array in pages)
    got = paged_attention(
        q, k_pages, v_pages, jnp.asarray(table), jnp.arange(20)[None], jnp.dtype(kv_dtype)
    )
    want = causal_attention(
        q.astype(jnp.float32), *(jnp.asarray(array.astype(np.float32)) for array in (k, v))
    )
    assert got.dtype == q.dtype
    limit = 2e-6 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=limit)


@functools.cache
def executor(prefill_chunk: int) -> JaxExecutor:
    return JaxExecutor(
        tiny.model(), tiny.SHAPE, prefill_chunk=prefill_chunk, kv_dtype="float8_e4m3fn"
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replies_are_exact_with_float8(temperature):
    """Whatever is drafted, however the prompt is cut, and in any company (cases 1, 9, 18)."""
    sampling = SamplingParams(temperature=temperature, seed=3)
    prompts = [
        tuple(np.random.default_rng(length).integers(1, 96, length).tolist())
        for length in (3, 65, 130)
    ]
    requests = [Request("r", ids, 24, sampling) for ids in prompts]
    whole = tiny.Driver(executor(64))
    want = [whole.run(request, draft_cap=0) for request in requests]
    assert [whole.run(request, draft_cap=3) for request in requests] == want
    for slot, request in enumerate(requests):
        whole.start(slot, request, draft_cap=slot + 1)
    assert list(whole.finish().values())[: len(requests)] == want
    in_chunks = tiny.Driver(executor(16))
    assert [in_chunks.run(request, draft_cap=2) for request in requests] == want
