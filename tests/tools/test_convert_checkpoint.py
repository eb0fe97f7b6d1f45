"""The tools around checkpoints: convert, make one of the real one's kind, load and measure."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import convert_checkpoint
import load_checkpoint
import make_synthetic_checkpoint as synthetic
from byte_progress import ByteProgress

import hub_packing
import tiny
from model import checkpoint, checkpoint_orbax
from model.config import ModelConfig
from model.quantization import QuantizedWeight
from service import model_card
from service.config import DEMO_CHECKPOINT
from service.engine.executor import load_executor

ROOT = Path(__file__).parents[2]
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# Runs the command, and dies by SIGKILL when a third of the bytes is converted.
KILLED = """
import os, signal, sys
sys.path.insert(0, "tools")
import convert_checkpoint
from byte_progress import ByteProgress

class Deadly(ByteProgress):
    def __call__(self, done, total):
        if 3 * done > total:
            os.kill(os.getpid(), signal.SIGKILL)

convert_checkpoint.ByteProgress = Deadly
convert_checkpoint.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("hub")
    tensors = hub_packing.random_parameters(tiny.HF_CONFIG)
    hub_packing.write_hub_directory(directory, tensors, {"text_config": tiny.HF_CONFIG})
    for name in COMPANIONS:
        (directory / name).write_bytes((DEMO_CHECKPOINT / name).read_bytes())
    (directory / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    return directory


def convert(*arguments: Path | str) -> int:
    return convert_checkpoint.main([str(argument) for argument in arguments])


def leaf_bytes(directory: Path) -> list[bytes]:
    model = checkpoint.load(directory, jnp.float32).model
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(model)]


def test_both_forms_are_the_same_checkpoint(hub, tmp_path, capsys):
    """Case 77: restored complete and exact; tokenizer, templates and configs are carried along."""
    target = tmp_path / "orbax"
    assert convert(hub, target, "--verify") == 0
    assert model_card.fingerprint(target) == model_card.fingerprint(hub)
    assert model_card.fingerprint(hub) in capsys.readouterr().out
    for file in model_card.other_files(hub):
        assert (target / file.name).read_bytes() == file.read_bytes()
    assert {file.name for file in model_card.other_files(hub)} >= set(COMPANIONS)
    assert leaf_bytes(target) == leaf_bytes(hub)
    (target / "generation_config.json").write_text('{"eos_token_id": [3]}')
    assert model_card.fingerprint(target) != model_card.fingerprint(hub)


def test_the_fingerprint_sees_the_weights(hub, tmp_path):
    for file in hub.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert model_card.fingerprint(tmp_path) == model_card.fingerprint(hub)
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert model_card.fingerprint(tmp_path) != model_card.fingerprint(hub)


def test_killed_in_the_middle_the_same_command_goes_on(hub, tmp_path, capsys):
    target = tmp_path / "orbax"
    arguments = [sys.executable, "-c", KILLED, str(hub), str(target)]
    killed = subprocess.run(arguments, cwd=ROOT, capture_output=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    ready = sorted((target / "weights").glob("*.json"))
    assert ready
    assert load_checkpoint.main([str(target)]) == 1, "incomplete, and served"
    assert convert(hub, target) == 0
    assert f"8 parts, {len(ready)} of them were there already" in capsys.readouterr().out
    assert leaf_bytes(target) == leaf_bytes(hub)


def test_what_cannot_be_converted_is_said(hub, tmp_path, capsys, monkeypatch):
    assert convert(tmp_path, tmp_path / "orbax") == 1
    assert "no *.safetensors file" in capsys.readouterr().err
    (tmp_path / "precious.txt").write_text("")
    assert convert(hub, tmp_path) == 1
    assert "is not empty, and no Orbax directory" in capsys.readouterr().err
    target = tmp_path / "orbax"
    monkeypatch.setattr(
        convert_checkpoint.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})
    )
    assert convert(hub, target) == 1
    assert "are to be written, 0.0 GB are free" in capsys.readouterr().err
    monkeypatch.undo()
    assert convert(hub, target) == 0
    assert convert(target, tmp_path / "again") == 1
    assert "is an Orbax directory already" in capsys.readouterr().err


def test_verification_finds_damage(hub, tmp_path, capsys):
    assert convert(hub, tmp_path) == 0
    data = max((tmp_path / "weights" / "mtp").rglob("d/*"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert convert(hub, tmp_path, "--verify") == 1
    assert "mtp" in capsys.readouterr().err


def test_the_executor_takes_either_form(hub, tmp_path):
    assert convert(hub, tmp_path) == 0
    options = {"slots": 1, "max_context": 64, "page_size": 16, "pages": None, "draft_length": 1}
    built = load_executor(tmp_path, **options, rounds_per_call=1, prefill_chunk=16, dtype="float32")
    assert built.limits.draft_length == 1


def make(directory: Path, *arguments: str) -> None:
    small = ["--layers=4", "--experts=8", "--width=64", "--vocabulary=5000", "--shard-gb=0.01"]
    assert synthetic.main([str(directory), *small, *arguments]) == 0


@pytest.mark.parametrize("layout", ["bfloat16", "fp8", "nvfp4"])
def test_a_synthetic_checkpoint_loads(tmp_path, capsys, layout):
    make(tmp_path, f"--layout={layout}")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert load_checkpoint.main([str(tmp_path), "--limit=100"]) == 0
    told = capsys.readouterr().out
    assert "45 vision tensors (model.visual.*) are not loaded" in told
    assert " MB held: " in told
    model = checkpoint.load(tmp_path, jnp.bfloat16).model
    experts = model.layers[0].mlp.experts.down_proj[...]
    assert isinstance(experts, QuantizedWeight) == (layout != "bfloat16")
    assert model.mtp
    mtp = model.mtp.layers[0].mlp.experts.down_proj[...]
    assert isinstance(mtp, QuantizedWeight) == (layout == "fp8")


def test_a_synthetic_checkpoint_has_the_names_of_the_real_one(tmp_path):
    options = synthetic.parse_arguments([str(tmp_path), "--layers=40", "--experts=256"])
    config = synthetic.hub_config(options)
    assert ModelConfig.from_hf(config).num_layers == 40
    vision = synthetic.vision_tensors(config["vision_config"] | {"depth": 27})
    assert len(vision) == 333  # of the published 1,045


def test_too_much_memory_is_an_exit_code(hub, capsys, monkeypatch):
    # The peak of this process was reached by other tests.
    monkeypatch.setattr(load_checkpoint, "resident_bytes", lambda: 0)
    assert load_checkpoint.main([str(hub), "--limit=0.0001"]) == 1
    assert capsys.readouterr().out.strip().endswith(" x")


def test_progress_counts_what_it_did_itself(capsys):
    progress = ByteProgress("working")
    progress(400, 1000)
    progress(1000, 1000)
    assert progress.summary().startswith("0.0 MB in ")
    progress = ByteProgress("working")
    for done in (10**9, 2 * 10**9, 3 * 10**9):
        progress(done, 3 * 10**9)
    assert progress.summary().startswith("2000.0 MB in ")
    assert capsys.readouterr().err == ""


def test_parts_are_complete(hub, tmp_path):
    """The list of parts is fixed at the start: one that is lost later is missed."""
    assert convert(hub, tmp_path) == 0
    manifest = json.loads((tmp_path / checkpoint_orbax.MANIFEST_FILE).read_text())
    assert len(manifest["parts"]) == 8
    assert model_card.ORBAX_MANIFEST == checkpoint_orbax.MANIFEST_FILE
