"""Every layout loads to the same bits; everything wrong is said at once, before allocation."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.typing import DTypeLike

import tiny
from model import checkpoint, checkpoint_files
from model.checkpoint import CheckpointError
from model.config import ModelConfig
from service.engine.executor import load_executor

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "qwen36"
EXECUTOR = {
    **{"slots": 1, "max_context": 64, "page_size": 16, "pages": None, "rounds_per_call": 2},
    **{"prefill_chunk": 16, "dtype": "float32"},
}
MULTIMODAL, TEXT_ONLY = "model.language_model.", "model."


def stored(model, prefix=MULTIMODAL, dtype: DTypeLike = np.float32) -> dict[str, np.ndarray]:
    """What a hub directory of the model holds, written down without `checkpoint.save`."""
    tensors = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(model)[0]:
        name = ".".join(str(getattr(key, "name", getattr(key, "idx", None))) for key in path[:-1])
        full = name if name.split(".")[0] in ("mtp", "lm_head") else prefix + name
        tensors[full] = np.asarray(leaf, dtype)
    return tensors


def write(directory: Path, tensors: dict[str, np.ndarray], shards: int = 1, **config) -> Path:
    directory.mkdir(exist_ok=True)
    hf_config = {"text_config": tiny.HF_CONFIG | config, "model_type": "qwen3_5_moe"}
    if any(name.startswith("model.layers") for name in tensors):
        hf_config = tiny.HF_CONFIG | config
    (directory / "config.json").write_text(json.dumps(hf_config))
    if shards == 1:
        safetensors.numpy.save_file(tensors, directory / "model.safetensors")
        return directory
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        safetensors.numpy.save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def per_expert(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    split = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            base = name.removesuffix(".gate_up_proj")
            for expert, rows in enumerate(tensor):
                gate, up = np.split(rows, 2)
                split[f"{base}.{expert}.gate_proj.weight"] = np.ascontiguousarray(gate)
                split[f"{base}.{expert}.up_proj.weight"] = np.ascontiguousarray(up)
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix(".down_proj")
            for expert, down in enumerate(tensor):
                split[f"{base}.{expert}.down_proj.weight"] = np.ascontiguousarray(down)
        else:
            split[name] = tensor
    return split


def header(text: bytes) -> bytes:
    """A safetensors file of nothing but a header."""
    return len(text).to_bytes(8, "little") + text


def tensor_header(dtype: str, count: int, nbytes: int) -> bytes:
    entry = {"dtype": dtype, "shape": [count], "data_offsets": [0, nbytes]}
    return header(json.dumps({"x": entry}).encode())


def vision() -> dict[str, np.ndarray]:
    return {"model.visual.patch_embed.proj.bias": np.zeros(4, np.float32)}


def without(tensors: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}


def assert_same_bits(got, want, dtype=jnp.float32) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(
        jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert a.dtype == (jnp.float32 if "A_log" in name or "dt_bias" in name else dtype), name
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b.astype(a.dtype)), err_msg=name)


@pytest.fixture(scope="module")
def model():
    return tiny.model()


@pytest.fixture(scope="module")
def rounded(model):
    """The model after its weights went through bfloat16."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), model)


@pytest.mark.parametrize("prefix", [MULTIMODAL, TEXT_ONLY])
@pytest.mark.parametrize("nested", [True, False])
def test_the_prefix_follows_the_tensors_not_the_config(tmp_path, model, prefix, nested):
    """Case 46: text only, with a config of either form; there are no preprocessor files."""
    directory = write(tmp_path, stored(model, prefix))
    config = {"text_config": tiny.HF_CONFIG} if nested else tiny.HF_CONFIG
    (directory / "config.json").write_text(json.dumps(config))
    assert_same_bits(checkpoint.load(directory, jnp.float32).model, model)


@pytest.mark.parametrize("prefix", [MULTIMODAL, TEXT_ONLY])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("experts", [dict, per_expert], ids=["fused", "per expert"])
def test_every_layout_loads_to_the_same_bits(tmp_path, model, prefix, shards, experts):
    directory = write(tmp_path, experts(stored(model, prefix)), shards)
    loaded = checkpoint.load(directory, jnp.float32)
    assert_same_bits(loaded.model, model)
    assert loaded.notices == ()


@pytest.mark.parametrize("experts", [dict, per_expert], ids=["fused", "per expert"])
@pytest.mark.parametrize("in_memory", [jnp.float32, jnp.bfloat16])
def test_bfloat16_on_disk(tmp_path, model, rounded, experts, in_memory):
    directory = write(tmp_path, experts(stored(model, dtype=ml_dtypes.bfloat16)))
    assert_same_bits(checkpoint.load(directory, in_memory).model, rounded, in_memory)


@pytest.mark.parametrize("experts", [dict, per_expert], ids=["fused", "per expert"])
def test_blocks_of_any_size_load_to_the_same_bits(tmp_path, model, monkeypatch, experts):
    monkeypatch.setattr(checkpoint_files, "BLOCK_BYTES", 300)
    told: list[tuple[int, int]] = []
    directory = write(tmp_path, experts(stored(model)) | vision())
    loaded = checkpoint.load(directory, jnp.float32, lambda *counts: told.append(counts))
    assert_same_bits(loaded.model, model)
    total = sum(tensor.nbytes for tensor in stored(model).values())
    assert (told[0], told[-1]) == ((0, total), (total, total))
    assert loaded.stored_bytes == total
    assert len(told) > 2 * len(stored(model)), "tensors were not read in blocks"
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_parameters_are_not_held_twice(tmp_path, model):
    """On the CPU what was read is what JAX computes with: nothing is copied."""
    loaded = checkpoint.load(write(tmp_path, stored(model)), jnp.float32).model
    for leaf in jax.tree.leaves(loaded):
        seen_by_numpy = np.asarray(leaf)
        assert seen_by_numpy.ctypes.data == leaf.unsafe_buffer_pointer()
        assert seen_by_numpy.ctypes.data % 64 == 0


def test_each_tensor_may_have_its_own_dtype(tmp_path, model, rounded):
    """Case 42: a head in another dtype than the body."""
    body = without(stored(model, dtype=ml_dtypes.bfloat16), "mtp.")
    head = {name: leaf for name, leaf in stored(model).items() if name.startswith("mtp.")}
    loaded = checkpoint.load(write(tmp_path, body | head), jnp.float32).model
    assert_same_bits(loaded.mtp, model.mtp)
    assert_same_bits(loaded.layers, rounded.layers)


def test_vision_tensors_are_left_alone(tmp_path, model):
    loaded = checkpoint.load(write(tmp_path, stored(model) | vision()), jnp.float32)
    assert_same_bits(loaded.model, model)
    assert loaded.notices == ("1 vision tensors (model.visual.*) are not loaded",)


def test_a_promised_mtp_head_may_be_absent(tmp_path, model):
    """Case 42: it starts, says once that drafting is off, and answers like draft length 0."""
    loaded = checkpoint.load(write(tmp_path, without(stored(model), "mtp.")), jnp.float32)
    assert loaded.model.mtp is None
    assert loaded.model.config.mtp_num_hidden_layers == 0
    [notice] = loaded.notices
    assert "mtp_num_hidden_layers is 1" in notice
    assert "drafting is off" in notice
    assert_same_bits(loaded.model.layers, model.layers)
    served = load_executor(tmp_path, **EXECUTOR, draft_length=2)  # asks for drafts all the same
    assert served.limits.draft_length == 0


def test_half_an_mtp_head_is_an_error(tmp_path, model):
    directory = write(tmp_path, without(stored(model), "mtp.layers.0.self_attn"))
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(directory, jnp.float32)
    missing = [item for item in str(error.value).split("; ") if "missing mtp." in item]
    assert len(missing) == 6


def test_an_mtp_head_that_nobody_promised_is_left_alone(tmp_path, model):
    directory = write(tmp_path, stored(model), mtp_num_hidden_layers=0)
    loaded = checkpoint.load(directory, jnp.float32)
    assert loaded.model.mtp is None
    [notice] = loaded.notices
    assert notice.startswith("19 mtp.* tensors are not loaded")


@pytest.mark.parametrize("with_head", [False, True])
def test_a_tied_head_is_the_embedding(tmp_path, with_head):
    """Case 46."""
    tied = tiny.model(tiny.config(tie_word_embeddings=True))
    tensors = stored(tied)
    assert not any(name.startswith("lm_head") for name in tensors)
    if with_head:
        tensors["lm_head.weight"] = np.ones_like(tensors[MULTIMODAL + "embed_tokens.weight"])
    directory = write(tmp_path, tensors, tie_word_embeddings=True)
    loaded = checkpoint.load(directory, jnp.float32)
    assert loaded.model.lm_head is None
    assert [("lm_head" in notice) for notice in loaded.notices] == [True] * with_head
    hidden = jax.random.normal(jax.random.key(0), (2, 3, 32))
    table = tensors[MULTIMODAL + "embed_tokens.weight"]
    np.testing.assert_allclose(loaded.model.logits(hidden), hidden @ table.T, atol=1e-5)


def test_an_untied_config_without_a_head_is_refused(tmp_path, model):
    """Case 46: not tied in silence."""
    directory = write(tmp_path, without(stored(model), "lm_head"))
    with pytest.raises(CheckpointError, match=r"missing lm_head\.weight \(96, 32\)$"):
        checkpoint.load(directory, jnp.float32)


def test_everything_wrong_is_said_at_once_and_before_allocation(tmp_path, model, monkeypatch):
    tensors = per_expert(stored(model))
    layer = MULTIMODAL + "layers.0."
    del tensors[layer + "mlp.experts.5.up_proj.weight"]
    del tensors[MULTIMODAL + "norm.weight"]
    tensors[layer + "mlp.experts.8.up_proj.weight"] = np.zeros((16, 32), np.float32)
    tensors["lm_head.bias"] = np.zeros(96, np.float32)
    tensors["mtp.fc.weight"] = np.zeros((64, 32), np.float32)
    tensors[layer + "linear_attn.A_log"] = np.zeros(4, np.int32)
    directory = write(tmp_path, tensors, shards=2)

    def no_allocation(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(jax, "device_put", no_allocation)
    monkeypatch.setattr(np, "empty", no_allocation)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(directory, jnp.float32)
    assert str(error.value).removeprefix(f"{directory}: ").split("; ") == [
        f"missing {layer}mlp.experts.5.up_proj.weight (16, 32)",
        f"missing {MULTIMODAL}norm.weight (32,)",
        "surplus lm_head.bias",
        f"surplus {layer}mlp.experts.8.up_proj.weight",
        f"{layer}linear_attn.A_log has the dtype I32, served: BF16, F16, F32",
        "mtp.fc.weight has the shape (64, 32), expected (32, 64)",
    ]


def test_damaged_and_missing_files_are_named(tmp_path, model):
    directory = write(tmp_path, stored(model), shards=3)
    first, second, third = sorted(directory.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-1])
    second.unlink()
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(directory, jnp.float32)
    assert f"{first.name} cannot be read" in str(error.value)
    assert f"{second.name} cannot be read" in str(error.value)
    assert third.name not in str(error.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "it has 0 bytes"),
        (b"\xff" * 8, "its header alone would have"),
        (header(b"{"), "Expecting"),
        (
            header(b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'),
            "x has 4 bytes, expected 8",
        ),
        (header(b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'), "x ends at"),
        (
            header(b'{"x": {"dtype": "F99", "shape": [0], "data_offsets": [0, 0]}}'),
            "x has the dtype F99",
        ),
        (header(b'{"x": {"shape": [0]}}'), "data_offsets"),
        (header(b'{"x": 3}'), "cannot be read"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, model, content, complaint):
    directory = write(tmp_path, stored(model))
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read") as error:
        checkpoint.load(directory, jnp.float32)
    assert complaint in str(error.value)


def test_a_tensor_in_two_files_is_refused(tmp_path, model):
    directory = write(tmp_path, stored(model))
    safetensors.numpy.save_file({"lm_head.weight": np.zeros(1)}, directory / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"in a\.safetensors and in model\.safetensors"):
        checkpoint.load(directory, jnp.float32)


def test_a_directory_without_weights_or_config_is_refused(tmp_path, model):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        checkpoint.load(tmp_path, jnp.float32)
    write(tmp_path, stored(model))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        checkpoint.load(tmp_path, jnp.float32)


def test_a_checkpoint_that_only_says_it_is_quantised(tmp_path, model):
    directory = write(tmp_path, stored(model), quantization_config={"quant_method": "fp8"})
    loaded = checkpoint.load(directory, jnp.float32)
    assert_same_bits(loaded.model, model)
    assert loaded.notices == ("config.json has a quantization_config, and no tensor is quantised",)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("multimodal", [False, True])
def test_save_and_load_give_the_same_bits(tmp_path, model, dtype, multimodal):
    in_dtype = checkpoint.load(write(tmp_path / "given", stored(model)), dtype).model
    hf_config = {"text_config": tiny.HF_CONFIG} if multimodal else tiny.HF_CONFIG
    checkpoint.save(tmp_path / "saved", hf_config, in_dtype, dtype)
    names = checkpoint.read_index(tmp_path / "saved")
    assert (MULTIMODAL + "norm.weight" in names) == multimodal
    loaded = checkpoint.load(tmp_path / "saved", dtype).model
    assert_same_bits(loaded, in_dtype, dtype)
    checkpoint.save(tmp_path / "again", hf_config, loaded, dtype)
    first, second = (
        (tmp_path / folder / "model.safetensors").read_bytes() for folder in ("saved", "again")
    )
    assert first == second


def test_expected_tensors_are_the_stored_ones(model):
    expected = checkpoint.expected_tensors(tiny.config(), jnp.bfloat16)
    assert {name: leaf.shape for name, leaf in expected.items()} == {
        name: tensor.shape for name, tensor in stored(model).items()
    }
    assert expected["lm_head.weight"].dtype == jnp.bfloat16
    assert expected[MULTIMODAL + "layers.0.linear_attn.dt_bias"].dtype == jnp.float32


@pytest.mark.skipif(
    not REFERENCE.is_dir(), reason="the published tensor list is not beside the repo"
)
def test_expected_tensors_are_those_of_the_published_checkpoint():
    published = json.loads((REFERENCE / "tensors_bf16.json").read_text())["tensors"]
    config = ModelConfig.from_hf(json.loads((REFERENCE / "config.json").read_text()))
    expected = checkpoint.expected_tensors(config, jnp.bfloat16)
    assert {name: list(leaf.shape) for name, leaf in expected.items()} == {
        name: tensor["shape"]
        for name, tensor in published.items()
        if not name.startswith("model.visual.")
    }
    assert len(expected) == 1045 - 333
