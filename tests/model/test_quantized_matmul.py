"""Products with quantised weights: every form and format, alone and in a whole model."""

from __future__ import annotations

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from model.kernels import forms
from model.kernels.quantized_matmul import blocked, quantized_matmul, reference
from model.kernels.routed_experts import reference as every_expert
from model.kernels.routed_experts import routed_experts
from model.quantization import FORMATS, QuantizedWeight, abstract, dequantize, dequantized, quantize
from model.transformer import Transformer
from service.engine.types import Request, SamplingParams

MATRICES = re.compile(
    r"\.(gate_up_proj|down_proj|[qkvo]_proj|in_proj_\w+|out_proj|gate_proj|up_proj|fc|lm_head)\b"
)
DTYPES = (jnp.float32, jnp.bfloat16)


@pytest.fixture
def small_blocks(monkeypatch):
    """Weights of a test are products of many blocks, as the real ones are."""
    monkeypatch.setattr(blocked, "BLOCK_WEIGHTS", 1 << 11)
    monkeypatch.setattr(blocked, "BLOCK_ROWS", 16)


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def quantised(rows: int, columns: int):
    return {name: quantize(weights(rows, columns), name) for name in FORMATS}


values = jax.jit(lambda q: dequantize(q, jnp.float32))


@jax.jit
def products(x, qs):
    return {name: (quantized_matmul(x, q), reference(x, q)) for name, q in qs.items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_definition(small_blocks, dtype):
    """Blocks of 32 rows, within the scales' blocks of 128 and across, and a rest of 10."""
    x = jnp.asarray(weights(2, 3, 64, seed=1), dtype)
    for name, (got, want) in products(x, quantised(170, 64)).items():
        assert got.dtype == jnp.float32 and got.shape == (2, 3, 170)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_do_not_depend_on_its_company(small_blocks, dtype):
    """Nor on its index, nor on the number of rows from two up; not-a-numbers reach nobody."""
    run = jax.jit(lambda x, qs: {name: quantized_matmul(x, q) for name, q in qs.items()})
    qs = quantised(170, 64)
    x = jnp.asarray(weights(64, 64, seed=1), dtype)
    whole = run(x, qs)
    for start, rows in ((0, 2), (5, 4), (31, 16)):
        for name, part in run(x[start : start + rows], qs).items():
            np.testing.assert_array_equal(part, whole[name][start : start + rows], name)
    company = run(jnp.full_like(x, jnp.nan).at[40].set(x[7]), qs)
    for name, rows in company.items():
        np.testing.assert_array_equal(rows[40], whole[name][7], name)


@pytest.mark.parametrize("rows", (4, 64))
def test_never_writes_the_weight_out(rows):
    """Where the form is the definition's, the whole weight is temporary memory."""
    out, width = 16384 + 128, 1024
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    many = {name: abstract((out, width), name) for name in FORMATS}

    def temporary(form, argument):
        analysis = jax.jit(form).lower(x, argument).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    whole = 4 * out * width
    assert temporary(lambda x, q: reference(x, q), many["fp8_block"]) >= whole
    assert temporary(lambda x, qs: [quantized_matmul(x, q) for q in qs.values()], many) < whole / 2


def test_can_be_switched_off(monkeypatch):
    monkeypatch.setattr(blocked, "quantized_matmul", lambda *_: pytest.fail("is on"))
    q = quantize(weights(32, 32), "int8")
    with forms.switched_off(frozenset({"quantized_matmul"})):
        assert quantized_matmul(jnp.ones((2, 32)), q).shape == (2, 32)


def test_routed_experts_dequantise_the_experts_they_use():
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(8)[:2] for _ in range(9)]).astype(np.int32)
    x, shares = jnp.asarray(weights(9, 32)), jnp.asarray(rng.uniform(size=(9, 2)), jnp.float32)
    blocks, every = jax.jit(routed_experts), jax.jit(every_expert)
    up, down = weights(8, 48, 32), weights(8, 32, 24)
    for format in FORMATS:
        quantised = quantize(up, format), quantize(down, format)
        want = every(x, ids, shares, *(values(q) for q in quantised))
        for form in (blocks, every):
            got = form(x, ids, shares, *quantised)
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-4, err_msg=format)


@functools.partial(jax.jit, static_argnums=1)
def quantised_model(model: Transformer, formats: tuple[str, ...]) -> Transformer:
    """The model with quantised matrices, which take the formats by turns."""
    turns = itertools.cycle(formats)

    def replaced(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return quantize(leaf, next(turns)) if MATRICES.search(f".{name}") else leaf

    return jax.tree_util.tree_map_with_path(replaced, model)


@jax.jit
def dense_model(model: Transformer) -> Transformer:
    """The model with what its quantised matrices stand for."""
    return jax.tree.map(
        lambda leaf: dequantized(leaf, jnp.float32),
        model,
        is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight),
    )


@jax.jit
def logits(model: Transformer, tokens_BT: jax.Array) -> jax.Array:
    return model.logits(model(tokens_BT))


# The replies below mix all formats.
@pytest.mark.parametrize("format", ["fp8_block", "nvfp4"])
def test_logits_are_those_of_the_dequantised_model(format):
    attention = tiny.config(layer_types=["full_attention"], mtp_num_hidden_layers=0)
    model = quantised_model(tiny.model(attention), (format,))
    assert isinstance(model.lm_head.weight[...], QuantizedWeight)
    tokens = np.random.default_rng(0).integers(0, 96, (2, 20))
    want = logits(dense_model(model), tokens)
    np.testing.assert_allclose(logits(model, tokens), want, rtol=1e-5, atol=1e-5)


def test_replies_are_those_of_the_dequantised_model_with_drafts_and_without(small_blocks):
    """Prefill in chunks, then decode: all formats in one model, the MTP head's layer too."""
    two_layers = tiny.config(layer_types=["linear_attention", "full_attention"])
    model = quantised_model(tiny.model(two_layers), tuple(FORMATS))
    prompt = tuple(np.random.default_rng(1).integers(1, 96, 50).tolist())
    request = Request("r", prompt, 24, SamplingParams(temperature=0.0), logprobs=True)
    executor = tiny.executor(model, prefill_chunk=32)
    runs = []
    for cap in (3, 0):
        driver = tiny.Driver(executor)
        runs.append((driver.run(request, cap, slot=1), driver.logprobs[1]))
    assert runs[0] == runs[1]
    reply, logprobs = runs[0]
    assert len(reply) == 24
    text = np.array([[*prompt, *reply[:-1]]])
    want = jax.nn.log_softmax(logits(dense_model(model), text)[0, len(prompt) - 1 :])
    assert jnp.argmax(want, axis=-1).tolist() == reply
    np.testing.assert_allclose(logprobs, want[np.arange(24), reply], rtol=1e-4, atol=1e-4)
