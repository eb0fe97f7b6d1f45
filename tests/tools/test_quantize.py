"""tools/quantize.py: what it writes has the hub's names, and loads to the nearest quantised model."""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from model import checkpoint
from model.checkpoint_files import read_index
from model.quantization import QuantizedWeight, dequantize, quantize
from model.weight_layouts import LAYOUTS
from tools import quantize as tool

CONFIG = tiny.HF_CONFIG | {
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 3,
    "tie_word_embeddings": False,
}
values = jax.jit(lambda weight: dequantize(weight, jnp.float32))
SUFFIXES = {
    "fp8": {".weight": "F8_E4M3", ".weight_scale_inv": "BF16"},
    "int8": {".weight": "I8", ".weight_scale": "F32"},
    "nvfp4": {".weight": "U8", ".weight_scale": "F8_E4M3", ".weight_scale_2": "F32"},
}
EXPERT = "model.language_model.layers.1.mlp.experts.2.up_proj"
HIDDEN = CONFIG["moe_intermediate_size"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A hub directory in bfloat16, with a file that is no weight."""
    directory = tmp_path_factory.mktemp("bf16")
    model = tiny.model(tiny.config(**CONFIG))
    checkpoint.save(directory, {"text_config": CONFIG}, model, jnp.bfloat16)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    """Directories by format, in files of 20 kB."""
    directories = {}
    for format in tool.FORMATS:
        directories[format] = tmp_path_factory.mktemp(format)
        arguments = [str(source), str(directories[format]), "--format", format]
        assert tool.main([*arguments, "--shard-gb", "2e-5"]) == 0
    return directories


def by_name(model) -> dict[str, Any]:
    """Parameters by hub name."""
    is_quantised = lambda leaf: isinstance(leaf, QuantizedWeight)  # noqa: E731
    names = checkpoint.expected_tensors(model.config, jnp.float32)
    return dict(zip(names, jax.tree.leaves(model, is_leaf=is_quantised), strict=True))


@pytest.mark.parametrize("format", tool.FORMATS)
def test_loads_to_what_its_matrices_round_to(source, made, format):
    before = by_name(checkpoint.load(source, jnp.float32).model)
    after = by_name(checkpoint.load(made[format], jnp.float32).model)
    for name, weight in after.items():
        storage = LAYOUTS[format].storage(name)
        assert isinstance(weight, QuantizedWeight) == (storage is not None), name
        want = before[name]
        if storage is None:
            np.testing.assert_array_equal(weight, want, name)
            continue
        assert weight.format == storage.format and weight.shape == want.shape
        halves = jnp.split(want, 2, axis=-2) if name.endswith("gate_up_proj") else [want]
        rounded = [values(quantize(half, storage.format)) for half in halves]
        got = values(weight)
        np.testing.assert_allclose(got, jnp.concatenate(rounded, -2), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("format", tool.FORMATS)
def test_experts_are_apart_in_the_tensors_that_the_hub_has(made, format):
    index = read_index(made[format])
    found = {name.removeprefix(EXPERT): one.dtype for name, one in index.items() if EXPERT in name}
    assert found == SUFFIXES[format]
    assert len({one.file for one in index.values()}) > 1
    assert (made[format] / "tokenizer.json").read_text() == "{}"


def test_fp8_is_the_official_layout(made):
    """Section by section what the official checkpoint quantises, and what it leaves in bfloat16."""
    index = read_index(made["fp8"])
    assert index[f"{EXPERT}.weight"].shape == (HIDDEN, CONFIG["hidden_size"])
    assert index[f"{EXPERT}.weight_scale_inv"].shape == (1, 1)
    scaled = {n.removesuffix("_scale_inv") for n in index if n.endswith("_scale_inv")}
    assert scaled == {name for name, one in index.items() if one.dtype == "F8_E4M3"}
    plain = {name for name in index.keys() - scaled if "scale" not in name}
    left = ("embed_tokens", "lm_head", "mlp.gate", "shared_expert_gate", "in_proj_a", "in_proj_b")
    wanted = r"(norm\w*|conv1d|A_log|dt_bias|mtp\.fc|norm_\w+|" + "|".join(left) + r")(\.weight)?$"
    assert [name for name in plain if not re.search(wanted, name)] == []
    for name in left:
        assert any(name in one for one in plain)
    said = json.loads((made["fp8"] / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "fp8" and said["weight_block_size"] == [128, 128]
    assert "lm_head" in said["modules_to_not_convert"]


def test_modelopt_mix_keeps_the_mtp_head(made):
    index = read_index(made["nvfp4"])
    dtypes = {one.dtype for name, one in index.items() if name.startswith("mtp.")}
    assert dtypes == {"BF16"}
    said = json.loads((made["nvfp4"] / "config.json").read_text())["quantization_config"]
    assert said["quantized_layers"][EXPERT] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    attention = EXPERT.partition("mlp")[0] + "self_attn.q_proj"
    assert said["quantized_layers"][attention] == {"quant_algo": "FP8"}


@pytest.mark.parametrize("format", tool.FORMATS)
def test_says_how_far_every_matrix_is_off(made, format):
    report = json.loads((made[format] / tool.ERRORS_FILE).read_text())
    rows = report["matrices"]
    experts = rows[EXPERT.replace(".2.", ".*.")]
    assert experts["weights"] == 3 * HIDDEN * CONFIG["hidden_size"]
    assert all(0 < row["relative"] < 0.15 and row["largest"] > 0 for row in rows.values())
    assert ("mtp.layers.0.self_attn.q_proj" in rows) == (format != "nvfp4")


def test_what_is_quantised_is_refused(made, tmp_path, capsys):
    assert tool.main([str(made["fp8"]), str(tmp_path / "new")]) == 1
    assert "is quantised already" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tool.main([str(made["fp8"]), str(made["int8"])])
    assert "is not empty" in capsys.readouterr().err
