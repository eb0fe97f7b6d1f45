"""The Orbax form of a checkpoint has the same bits, and says what is wrong when it has not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import hub_packing
import tiny
from model import checkpoint, checkpoint_files, checkpoint_orbax
from model.checkpoint import CheckpointError

ROOT = Path(__file__).parents[2]
LAYER = "model.language_model.layers.1."
PARTS = ["embed_tokens", *(f"layers.{i}" for i in range(4)), "lm_head", "mtp", "norm", "visual"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """A tiny hub directory; what of it is not loaded has the dtypes and shapes that are rare."""
    directory = tmp_path_factory.mktemp("hub")
    tensors = hub_packing.random_parameters(tiny.HF_CONFIG)
    rounded = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    hub_packing.write_hub_directory(directory, rounded, {"text_config": tiny.HF_CONFIG})
    vision = {
        "model.visual.scale": np.array(0.5, np.float32),
        "model.visual.codes": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn),
        "model.visual.nan": np.array([np.nan, -0.0, np.inf], ml_dtypes.bfloat16),
    }
    safetensors.numpy.save_file(vision, directory / "vision.safetensors")
    return directory


def convert(hub: Path, directory: Path, **options) -> checkpoint_orbax.Conversion:
    done = checkpoint_orbax.convert(
        checkpoint_files.read_index(hub), directory, weights_fingerprint="f", **options
    )
    (directory / "config.json").write_bytes((hub / "config.json").read_bytes())
    return done


@pytest.fixture
def orbax(hub, tmp_path) -> Path:
    convert(hub, tmp_path / "orbax")
    return tmp_path / "orbax"


def configure(directory: Path, **fields: object) -> None:
    text = {"text_config": tiny.HF_CONFIG | fields}
    (directory / "config.json").write_text(json.dumps(text))


def contents(index, blocks) -> dict[str, bytes]:
    read = dict.fromkeys(index, b"")
    for block in blocks:
        read[block.name] += block.data.tobytes()
    return read


def leaf_bytes(loaded: checkpoint.Checkpoint) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(loaded.model)]


def test_every_tensor_keeps_its_bits(hub, orbax):
    """Case 77: complete and exact, vision included, which nothing reads yet."""
    stored, restored = checkpoint_files.read_index(hub), checkpoint_orbax.read_index(orbax)
    assert {name: (t.dtype, t.shape) for name, t in stored.items()} == {
        name: (t.dtype, t.shape) for name, t in restored.items()
    }
    assert contents(restored, checkpoint_orbax.restore_blocks(restored, restored)) == contents(
        stored, checkpoint_files.read_blocks(stored, stored)
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_both_forms_load_to_the_same_bits(hub, orbax, dtype):
    told: list[tuple[int, int]] = []
    ours, theirs = (
        checkpoint.load(hub, dtype),
        checkpoint.load(orbax, dtype, lambda *n: told.append(n)),
    )
    assert leaf_bytes(theirs) == leaf_bytes(ours)
    assert (theirs.notices, theirs.stored_bytes) == (ours.notices, ours.stored_bytes)
    assert told[0] == (0, ours.stored_bytes) and told[-1] == (ours.stored_bytes,) * 2


def test_small_groups_restore_the_same(hub, orbax, monkeypatch):
    monkeypatch.setattr(checkpoint_orbax, "GROUP_BYTES", 3000)
    assert leaf_bytes(checkpoint.load(orbax, jnp.float32)) == leaf_bytes(
        checkpoint.load(hub, jnp.float32)
    )


def test_each_part_is_an_ordinary_orbax_checkpoint(hub, orbax):
    tree = ocp.PyTreeCheckpointer().restore(orbax / "weights" / "layers.1")
    loaded = checkpoint.load(hub, jnp.bfloat16).model
    np.testing.assert_array_equal(
        np.asarray(tree[LAYER + "mlp.experts.down_proj"]),
        np.asarray(loaded.layers[1].mlp.experts.down_proj[...]),
    )


def test_restoring_under_another_device_count(hub, orbax):
    """Case 77: nothing of the writer's devices is in the directory."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    command = [sys.executable, "-c", _LOAD_ELSEWHERE, str(hub), str(orbax)]
    run = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    devices, ours, theirs = run.stdout.split()
    assert devices == "3" and ours == theirs


_LOAD_ELSEWHERE = """
import hashlib, pathlib, sys
import jax, jax.numpy as jnp, numpy as np
from model import checkpoint

print(jax.device_count())
for directory in sys.argv[1:]:
    leaves = jax.tree.leaves(checkpoint.load(pathlib.Path(directory), jnp.float32).model)
    print(hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest())
"""


@pytest.mark.parametrize(
    ("layers", "word"),
    [(["linear_attention"] * 5, "missing"), (["linear_attention"] * 3, "surplus")],
)
def test_more_or_fewer_layers_than_the_config_says(orbax, layers, word):
    """Case 77: neither is filled up or left out in silence."""
    configure(orbax, layer_types=layers)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(orbax, jnp.float32)
    last = "4" if word == "missing" else "3"
    assert f"{word} model.language_model.layers.{last}.mlp.gate.weight" in str(error.value)


def test_an_array_that_is_not_as_it_was_written_is_named(orbax):
    """Case 77: another dtype, another shape, other bits, no array at all."""
    part = orbax / "weights" / "layers.1"
    name = LAYER + "mlp.gate.weight"
    tensors = ocp.PyTreeCheckpointer().restore(
        part, restore_args=dict.fromkeys(names_of(part), ocp.RestoreArgs(restore_type=np.ndarray))
    )
    good = tensors[name]
    changed = np.array(good)
    changed[0, 0] += 1
    for replacement, complaint in (
        (good.astype(np.float32), "has the dtype float32, expected BF16"),
        (good[:4], r"has the shape \(4, 32\), expected \(8, 32\)"),
        (changed, "is damaged: its SHA-256"),
        (None, "is missing"),
    ):
        rewrite(
            part,
            {**tensors, name: replacement} if replacement is not None else without(tensors, name),
        )
        with pytest.raises(CheckpointError, match=complaint) as error:
            checkpoint.load(orbax, jnp.float32)
        assert name in str(error.value)


def names_of(part: Path) -> list[str]:
    return list(json.loads(part.with_name(part.name + ".json").read_text())["tensors"])


def without(tensors: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {other: tensor for other, tensor in tensors.items() if other != name}


def rewrite(part: Path, tensors: dict[str, np.ndarray]) -> None:
    """Puts other arrays in a part, and makes its list of files true again."""
    ocp.PyTreeCheckpointer().save(part, tensors, force=True)
    table = part.with_name(part.name + ".json")
    about = json.loads(table.read_text())
    about["files"] = {
        str(file.relative_to(part.parent)): file.stat().st_size
        for file in part.rglob("*")
        if file.is_file()
    }
    table.write_text(json.dumps(about))


def test_all_damaged_files_are_named_before_anything_is_read(orbax, monkeypatch):
    """Case 77: a deleted array file, a short one, and a part that was never made."""
    weights = orbax / "weights"
    deleted = next(file for file in (weights / "layers.0").rglob("d/*"))
    deleted.unlink()
    short = next(file for file in (weights / "mtp").rglob("d/*"))
    short.write_bytes(short.read_bytes()[:-1])
    (weights / "norm.json").unlink()
    monkeypatch.setattr(checkpoint_orbax, "restore_blocks", None)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(orbax, jnp.float32)
    assert str(error.value).removeprefix(f"{orbax}: ").split("; ") == [
        f"weights/{deleted.relative_to(weights)} is missing",
        f"weights/{short.relative_to(weights)} has {short.stat().st_size} bytes,"
        f" expected {short.stat().st_size + 1}",
        "norm is missing: its conversion did not end, run it again",
    ]


def test_a_flipped_bit_is_found(orbax):
    """Whether Orbax notices or only the checksum: nothing of it is served."""
    data = max((orbax / "weights" / "layers.2").rglob("d/*"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"layers\.2"):
        checkpoint.load(orbax, jnp.float32)


def test_an_interrupted_conversion_goes_on(hub, tmp_path):
    class Killed(BaseException):
        pass

    def killed(done: int, total: int) -> None:
        if done > total // 3:
            raise Killed

    with pytest.raises(Killed):
        convert(hub, tmp_path, progress=killed)
    first = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "weights").iterdir()}
    (tmp_path / "weights" / "layers.3.orbax-checkpoint-tmp-1").mkdir()
    assert 0 < len(first) < 2 * len(PARTS)
    done = convert(hub, tmp_path)
    assert (done.parts, done.written) == (len(PARTS), len(PARTS) - len(first) // 2)
    last = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "weights").iterdir()}
    assert sorted(last) == sorted(PARTS + [f"{part}.json" for part in PARTS])
    assert first.items() <= last.items(), "a part was made twice"
    assert convert(hub, tmp_path).written == 0
    assert leaf_bytes(checkpoint.load(tmp_path, jnp.float32)) == leaf_bytes(
        checkpoint.load(hub, jnp.float32)
    )


def test_a_damaged_part_is_made_anew(hub, orbax):
    next((orbax / "weights" / "layers.0").rglob("d/*")).unlink()
    assert convert(hub, orbax).written == 1
    checkpoint.load(orbax, jnp.float32)


def test_another_checkpoint_is_not_mixed_in(hub, orbax):
    with pytest.raises(CheckpointError, match="holds other weights, fingerprint f; these have g"):
        checkpoint_orbax.convert(checkpoint_files.read_index(hub), orbax, weights_fingerprint="g")


def test_a_tensor_without_elements_is_refused_by_name(tmp_path):
    safetensors.numpy.save_file({"a.b": np.zeros((0, 3))}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"without elements: a\.b"):
        convert(tmp_path, tmp_path / "orbax")


def test_a_directory_of_a_later_version_is_refused(orbax):
    manifest = orbax / "orbax_checkpoint.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="format is 2, served: 1"):
        checkpoint.load(orbax, jnp.float32)
