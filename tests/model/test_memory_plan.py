"""The memory plan against the arrays it predicts, and against the known figures of the real model."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import qwen3_6
import tiny
from model import checkpoint, memory_plan
from model.config import ModelConfig
from model.memory_plan import GIB, MTP_HEAD
from model.state import DecodeShape, init_inputs, init_state
from model.weight_layouts import LAYOUTS, layout_of
from service.config import DEMO_CHECKPOINT

REAL = ModelConfig.from_hf(qwen3_6.HF_CONFIG)
VISION_BYTES = 893_142_496
LONGEST = DecodeShape(
    slots=1,
    draft_length=3,
    rounds=4,
    max_context=262144,
    pages=16384,
    page_size=16,
    max_stop_ids=16,
    addressable_tokens=248077,
)


def plan(config: ModelConfig, shape: DecodeShape, layout: str = "bfloat16", kv: str = "bfloat16"):
    return memory_plan.plan_memory(
        config, shape, layout=LAYOUTS[layout], kv_dtype=kv, prefill_chunk=512
    )


def held(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_those_of_a_loaded_checkpoint(dtype):
    loaded = checkpoint.load(DEMO_CHECKPOINT, jnp.dtype(dtype)).model
    parts = memory_plan.weight_bytes(loaded.config, LAYOUTS[dtype])
    assert sum(parts.values()) == held(loaded)
    assert parts[MTP_HEAD] == held(loaded.mtp)
    assert parts["embedding"] == held(loaded.embed_tokens)
    assert parts["routed experts"] == sum(held(layer.mlp.experts) for layer in loaded.layers)


@pytest.mark.parametrize("layers", [["linear_attention"] * 3, ["full_attention"], None])
def test_weights_of_any_mix_of_layers(layers):
    config = tiny.config(**({"layer_types": layers} if layers else {}), tie_word_embeddings=True)
    parts = memory_plan.weight_bytes(config, LAYOUTS["float32"])
    assert sum(parts.values()) == held(tiny.model(config))
    assert "output head" not in parts


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("draft_length", [0, 1, 3])
def test_state_is_what_the_programs_are_given(kv_dtype, draft_length):
    config, shape = tiny.config(), dataclasses.replace(tiny.SHAPE, draft_length=draft_length)
    planned = plan(config, shape, kv=kv_dtype)
    state = init_state(config, shape, kv_dtype)
    assert planned.state == held(state) + held(init_inputs(shape, config.vocab_size))
    assert planned.mtp_kv_cache == held(state.mtp_cache)
    assert (MTP_HEAD in planned.weights) == (draft_length > 0)
    assert (planned.replay_inputs > 0) == (draft_length > 0)


def test_parameters_of_the_real_model():
    """Stored, A_log and dt_bias have two bytes; in memory four."""
    parts = memory_plan.weight_bytes(REAL, LAYOUTS["bfloat16"])
    in_float32 = 2 * 30 * 64
    assert sum(parts.values()) + VISION_BYTES - in_float32 == 71_903_645_408
    assert parts[MTP_HEAD] == 2 * 844_640_768
    millions = {
        "embedding": 508.56,
        "output head": 508.56,
        "routed experts": 32212.25,
        "shared experts": 125.83,
        "routers": 21.05,
        "attention": 272.63,
        "DeltaNet": 1006.63 + 4.92,
        "norms": 0.17,
    }
    for part, count in millions.items():
        assert parts[part] / 2e6 == pytest.approx(count, abs=0.006), part


@pytest.mark.parametrize(
    ("layout", "gigabytes", "mtp_gib"),
    [
        ("bfloat16", 71.904, 1.573),
        ("fp8", 37.455, 0.795),
        ("nvfp4", 23.46, 1.573),
        ("nvfp4-ct", 25.03, 1.573),
    ],
)
def test_sizes_of_the_published_layouts(layout, gigabytes, mtp_gib):
    parts = memory_plan.weight_bytes(REAL, LAYOUTS[layout])
    stored = sum(parts.values()) + VISION_BYTES
    assert stored / 1e9 == pytest.approx(gigabytes, abs=0.005)
    assert parts[MTP_HEAD] / GIB == pytest.approx(mtp_gib, abs=0.001)


@pytest.mark.parametrize(
    ("method", "layout"),
    [("fp8", "fp8"), ("modelopt", "nvfp4"), ("compressed-tensors", "nvfp4-ct")],
)
def test_the_layout_is_read_from_the_config(method, layout):
    quantised = {"quantization_config": {"quant_method": method}}
    assert layout_of(quantised, "bfloat16") == LAYOUTS[layout]
    nested = {"text_config": quantised}
    in_float32 = layout_of(nested, "float32")
    assert in_float32.rules == LAYOUTS[layout].rules and in_float32.dtype == "float32"
    assert layout_of(qwen3_6.HF_CONFIG, "bfloat16") == LAYOUTS["bfloat16"]
    unknown = {"quantization_config": {"quant_method": "other"}}
    assert layout_of(unknown, "float32") == LAYOUTS["float32"]


@pytest.mark.parametrize(
    ("kv_dtype", "per_token"), [("bfloat16", 20480), ("float8_e4m3fn", 10240), ("float32", 40960)]
)
def test_a_conversation_of_the_real_model(kv_dtype, per_token):
    one = plan(REAL, LONGEST, kv=kv_dtype)
    assert one.kv_cache == 262144 * per_token
    assert one.mtp_kv_cache == 262144 * per_token // 10
    # 60 MiB of states; three rows of convolution inputs and one token's inputs, in float32.
    assert one.recurrent_state == 60 * 2**20 + 30 * 4 * (4 * 8192 + 2048 + 4096 + 2 * 32)
    assert one.replay_inputs == 3 * 30 * 4 * (8192 + 2048 + 4096 + 2 * 32)


def test_workspace_is_near_what_the_compiler_allocates():
    """MiB of temporary memory that XLA planned for a GB10, by program and shape."""
    real = dataclasses.replace(LONGEST, slots=16)
    four, eight = (
        dataclasses.replace(REAL, layer_types=REAL.layer_types[:count]) for count in (4, 8)
    )
    for config, slots, drafts, chunk, mebibytes in [
        (four, 16, 3, 512, 487.0),  # a scored chunk
        (four, 16, 3, 128, 369.1),  # decode
        (four, 64, 3, 512, 1473.4),
        (four, 4, 0, 2, 24.0),
        (eight, 16, 3, 512, 487.0),
        (REAL, 16, 3, 512, 1566.0),  # prefill
    ]:
        shape = dataclasses.replace(real, slots=slots, draft_length=drafts)
        estimate = memory_plan.workspace_bytes(config, shape, chunk) / memory_plan.MIB
        assert estimate == pytest.approx(mebibytes, rel=0.04), (slots, drafts, chunk)


def test_pages_are_given_up_until_the_plan_fits():
    wanted = dataclasses.replace(LONGEST, slots=16, pages=1 + 16 * 16384)
    options = {"layout": LAYOUTS["bfloat16"], "kv_dtype": "bfloat16", "prefill_chunk": 512}
    shape, fitted = memory_plan.fit(REAL, wanted, 113 * GIB, **options)
    page = (fitted.kv_cache + fitted.mtp_kv_cache) // shape.pages
    assert 113 * GIB - page < fitted.total <= 113 * GIB
    shape, _ = memory_plan.fit(REAL, wanted, 1000 * GIB, **options)
    assert shape == wanted
    with pytest.raises(memory_plan.DoesNotFitError) as error:
        memory_plan.fit(REAL, wanted, 64 * GIB, **options)
    lines = str(error.value).splitlines()
    assert lines[0] == "74.280 GiB are needed, 64.000 GiB may be used"
    assert [line.split()[-2:] for line in lines if "routed experts" in line] == [["60.000", "GiB"]]
    assert "kv cache" in str(error.value)
