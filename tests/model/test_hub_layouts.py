"""Every quantised layout of the hub loads to the matrices that it stands for, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import hub_packing as packing
import qwen3_6
import tiny
from model import checkpoint, checkpoint_files, checkpoint_orbax
from model.checkpoint import CheckpointError
from model.config import ConfigError, ModelConfig
from model.hub_layouts import recipes
from model.hub_quantization import schemes_of
from model.quantization import QuantizedWeight, dequantize

CONFIG = tiny.HF_CONFIG | {"layer_types": ["linear_attention", "full_attention"]}
EXPERTS = r"\.experts\."
SHARED = r"\.shared_expert\."
ATTENTION = r"\.self_attn\.[qkvo]_proj\."
DELTA_NET = r"\.linear_attn\.(in_proj_qkv|in_proj_z|out_proj)\."
DENSE = f"{ATTENTION}|{DELTA_NET}|{SHARED}"
NVFP4_GROUP = {"weights": {"num_bits": 4, "group_size": 16}}


class Layout(NamedTuple):
    """`rules`: patterns of matrices' names with how they are packed; the first that matches counts."""

    quantization_config: dict[str, Any]
    rules: list[tuple[str, packing.Packing | None]]
    unused: int = 0
    """Kinds of tensors that are left alone."""


def fp8(block: tuple[int, int], dtype: Any = ml_dtypes.bfloat16) -> Layout:
    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    rule = (f"{EXPERTS}|{DENSE}", packing.fp8_block(block, dtype))
    return Layout(said | {"activation_scheme": "dynamic"}, [rule])


LAYOUTS = {
    "fp8": fp8((16, 16)),
    "fp8, blocks larger than an expert": fp8((128, 128), np.float32),
    "fp8, blocks that end within an expert": fp8((24, 16)),
    "fp8, a scale per tensor": Layout({"quant_method": "fp8"}, [(DENSE, packing.fp8_tensor)], 1),
    "modelopt": Layout(
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.language_model.layers.1.self_attn.q_proj": {"quant_algo": "FP8"},
                "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
            },
        },
        [
            (r"^mtp\.", None),
            (f"{EXPERTS}|{SHARED}|^lm_head", packing.modelopt_nvfp4),
            (DENSE, packing.fp8_tensor),
        ],
        1,
    ),
    "compressed-tensors": Layout(
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": NVFP4_GROUP},
        },
        [
            (r"^mtp\.", None),
            (f"{EXPERTS}|{ATTENTION}|{SHARED}", packing.compressed_nvfp4),
        ],
        1,
    ),
    "compressed-tensors, int8": Layout(
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "channel"}}},
        },
        [(f"{EXPERTS}|{DENSE}", packing.compressed_int8)],
    ),
    "gptq": Layout(
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False},
        [(r"^mtp\.", None), (f"{EXPERTS}|{DENSE}", packing.gptq)],
        1,
    ),
    "awq": Layout(
        {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True},
        [(r"^mtp\.", None), (f"{EXPERTS}|{DENSE}", packing.awq)],
    ),
}


class Written(NamedTuple):
    directory: Path
    tensors: dict[str, np.ndarray]
    values: dict[str, np.ndarray]
    """What each parameter stands for, by name, float32."""
    quantised: set[str]
    """Stored matrices that a rule packed."""


def write(directory: Path, layout: Layout, *leave_out: str, **replace: Any) -> Written:
    """A hub directory in a layout: experts apart, everything that no rule names in bfloat16."""
    rng = np.random.default_rng(0)
    quantised: set[str] = set()
    tensors: dict[str, np.ndarray] = {}
    values: dict[str, np.ndarray] = {}

    def matrix(module: str, plain: np.ndarray) -> np.ndarray:
        name = module + ".weight"
        pack = next((pack for rule, pack in layout.rules if re.search(rule, name)), None)
        if pack is None:
            tensors[name] = plain.astype(ml_dtypes.bfloat16)
            return tensors[name].astype(np.float32)
        quantised.add(name)
        packed, whole = pack(rng, *plain.shape)
        tensors.update({module + suffix: tensor for suffix, tensor in packed.items()})
        return whole

    for name, plain in packing.random_parameters(CONFIG).items():
        experts, _, kind = name.rpartition(".")
        if kind == "down_proj":
            values[name] = np.stack(
                [matrix(f"{experts}.{e}.down_proj", plain[e]) for e in range(len(plain))]
            )
        elif kind == "gate_up_proj":
            halves = [
                [
                    matrix(f"{experts}.{e}.{part}_proj", half)
                    for part, half in zip(("gate", "up"), np.split(plain[e], 2), strict=True)
                ]
                for e in range(len(plain))
            ]
            values[name] = np.stack([np.concatenate(pair) for pair in halves])
        elif plain.ndim == 2:
            values[name] = matrix(name.removesuffix(".weight"), plain)
        else:
            tensors[name] = plain.astype(ml_dtypes.bfloat16)
            values[name] = tensors[name].astype(np.float32)
    kept = {n: tensor for n, tensor in (tensors | replace).items() if n not in leave_out}
    config = {"text_config": CONFIG, "quantization_config": layout.quantization_config}
    packing.write_hub_directory(directory, kept, config)
    return Written(directory, kept, values, quantised)


def dequantized(model):
    """The model with float32 matrices, and their values by name."""
    is_quantised = lambda leaf: isinstance(leaf, QuantizedWeight)  # noqa: E731
    leaves, treedef = jax.tree.flatten(model, is_leaf=is_quantised)
    float32 = jax.jit(lambda leaf: dequantize(leaf, jnp.float32))
    plain = [float32(leaf) if is_quantised(leaf) else leaf for leaf in leaves]
    return jax.tree.unflatten(treedef, plain), leaves, plain


@pytest.mark.parametrize("name", LAYOUTS)
def test_matrices_are_what_their_tensors_stand_for(tmp_path, name):
    """Case 42: the MTP head may be stored otherwise than the body."""
    layout = LAYOUTS[name]
    written = write(tmp_path, layout)
    loaded = checkpoint.load(written.directory, jnp.float32)
    _, leaves, plain = dequantized(loaded.model)
    for (parameter, want), leaf, got in zip(written.values.items(), leaves, plain, strict=True):
        np.testing.assert_array_equal(np.asarray(got), want, err_msg=parameter)
        first = parameter.replace(".gate_up_proj", ".0.up_proj.weight")
        first = first.replace("experts.down_proj", "experts.0.down_proj.weight")
        assert isinstance(leaf, QuantizedWeight) == (first in written.quantised), parameter
    assert len(loaded.notices) == layout.unused


@pytest.mark.parametrize("name", ["fp8", "modelopt", "compressed-tensors"])
def test_logits_are_those_of_the_dequantised_model(tmp_path, name):
    model = checkpoint.load(write(tmp_path, LAYOUTS[name]).directory, jnp.float32).model
    logits = jax.jit(lambda m, tokens: m.logits(m(tokens)))
    tokens = jnp.arange(6)[None] * 7 % 96
    np.testing.assert_allclose(
        logits(model, tokens), logits(dequantized(model)[0], tokens), rtol=1e-4, atol=1e-4
    )


def test_a_quantised_checkpoint_survives_orbax(tmp_path):
    """Case 77: packed bytes and small floats too keep their bits."""
    written = write(tmp_path / "hub", LAYOUTS["modelopt"])
    target = tmp_path / "orbax"
    index = checkpoint_files.read_index(written.directory)
    checkpoint_orbax.convert(index, target, weights_fingerprint="")
    (target / "config.json").write_bytes((written.directory / "config.json").read_bytes())
    ours, theirs = (checkpoint.load(d, jnp.bfloat16).model for d in (written.directory, target))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    attention = "model.language_model.layers.1.self_attn"
    expert = "model.language_model.layers.0.mlp.experts.3"
    replace = {
        f"{attention}.q_proj.weight_scale_inv": np.zeros((3, 2), np.float32),
        f"{expert}.up_proj.weight": np.zeros((16, 32), np.uint8),
        f"{attention}.k_proj.bias": np.zeros(4, np.float32),
    }
    missing = (f"{expert}.gate_proj.weight_scale_inv", f"{attention}.v_proj.weight")
    written = write(tmp_path, LAYOUTS["fp8"], *missing, **replace)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(written.directory, jnp.float32)
    assert str(error.value).removeprefix(f"{tmp_path}: ").split("; ") == [
        f"missing {expert}.gate_proj.weight_scale_inv (1, 2)",
        f"missing {attention}.v_proj.weight (32, 32)",
        f"surplus {attention}.k_proj.bias",
        f"{expert}.up_proj.weight has the dtype U8, served: F8_E4M3",
        f"{attention}.q_proj.weight_scale_inv has the shape (3, 2), expected (8, 2)",
    ]


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method is 'bitsandbytes', served: 'fp8', 'modelopt'",
        ),
        ({}, "quant_method is None"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2', served: 'e4m3'"),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            r"weight_block_size is \[128\], must be",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "MXFP8"},
            "quant_algo is 'MXFP8', served: 'FP8', 'NVFP4'",
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"lm_head": {"quant_algo": "INT4_AWQ"}},
            },
            r"quantized_layers\.lm_head\.quant_algo is 'INT4_AWQ'",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
            r"group_size is 32, served: 16",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24"},
            "format is 'marlin-24', served: 'nvfp4-pack-quantized', 'int-quantized'",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"format": "float-quantized"}},
            },
            r"config_groups\.g\.format is 'float-quantized'",
        ),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "bits is 8, served: 4"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "desc_act is True, served: False"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": -1},
            "group_size is -1, must be 2 or more",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(said, complaint):
    said = said or {"bits": 4}
    for config in ({"quantization_config": said}, {"text_config": {"quantization_config": said}}):
        with pytest.raises(ConfigError, match=rf"quantization_config\.{complaint}"):
            schemes_of(config, {})


def test_modelopt_may_say_it_in_a_file_of_its_own(tmp_path):
    written = write(tmp_path, LAYOUTS["modelopt"])
    said = LAYOUTS["modelopt"].quantization_config
    (tmp_path / "config.json").write_text(json.dumps({"text_config": CONFIG}))
    apart = {"producer": {"name": "modelopt"}, "quantization": said}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(apart))
    model = checkpoint.load(written.directory, jnp.float32).model
    assert model.lm_head and isinstance(model.lm_head.weight[...], QuantizedWeight)


def test_the_published_fp8_checkpoint_has_as_many_tensors():
    """Qwen3.6-35B-A3B-FP8: 64,196 tensors, of which 1,560 are the MTP head's and 333 vision."""
    config = ModelConfig.from_hf(qwen3_6.HF_CONFIG)
    period = 4  # three layers of DeltaNet, one of attention; ten times
    short = dataclasses.replace(config, layer_types=config.layer_types[:period])
    expected = checkpoint.expected_tensors(short, jnp.bfloat16)
    stored = {
        name.removesuffix(".weight") + ".weight_scale_inv": "BF16"
        for name in expected
        if re.search(DENSE, name)
    }
    for name, leaf in expected.items():
        if name.endswith(".down_proj"):
            base = name.removesuffix(".down_proj")
            for expert in range(leaf.shape[0]):
                for part in ("gate", "up", "down"):
                    stored[f"{base}.{expert}.{part}_proj.weight_scale_inv"] = "BF16"
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = recipes(expected, stored, schemes_of({"quantization_config": said}, {}))
    names = [piece.name for recipe in found.values() for piece in recipe.pieces]
    mtp = sum(name.startswith("mtp.") for name in names)
    outside = len({"model.language_model.embed_tokens.weight", "lm_head.weight"} | {"norm"})
    assert mtp == 1560
    assert len(names) - mtp == (64196 - 1560 - 333 - outside) // 10 + outside
