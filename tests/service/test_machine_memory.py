"""Case 79: one budget for the device and the host; what cannot fit is refused before it is loaded."""

import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import qwen3_6
import tiny
from model import checkpoint as checkpoint_lib
from model.memory_plan import DoesNotFitError
from service import memory
from service.engine.executor import JaxExecutor, load_executor
from service.memory import GIB, Machine

SPARK = Machine(total=121 * GIB, available=115 * GIB, gpu="NVIDIA GB10")
SHAPE: dict[str, Any] = {
    "slots": 2,
    "max_context": 256,
    "page_size": 16,
    "pages": None,
    "draft_length": 3,
    "rounds_per_call": 2,
    "prefill_chunk": 16,
    "dtype": "float32",
}


def executor(checkpoint: Path, **settings: Any) -> JaxExecutor:
    return load_executor(checkpoint, **{**SHAPE, **settings})


def machine(root: Path, files: dict[str, str], **environment: str) -> Machine | None:
    """What is read from a made-up system: 16 GiB, of which 12 are available, and these files."""
    meminfo = f"MemTotal: {16 << 20} kB\nMemFree: 5 kB\nMemAvailable: {12 << 20} kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return memory.read_machine(environment, root)


def group(path: str, limit: int | str, used: int, cached: int = 0) -> dict[str, str]:
    """A control group, version 2."""
    top = f"sys/fs/cgroup/{path}"
    return {
        f"{top}/memory.max": f"{limit}\n",
        f"{top}/memory.current": f"{used}\n",
        f"{top}/memory.stat": f"anon 1\ninactive_file {cached}\n",
    }


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        pytest.param({}, 16, 12, id="no groups"),
        pytest.param(
            {"proc/self/cgroup": "0::/a/b\n", **group("a/b", "max", GIB)}, 16, 12, id="no limit"
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a/b\n",
                **group("a", 8 * GIB, 3 * GIB, cached=GIB),
                **group("a/b", 10 * GIB, GIB),
            },
            *(8, 6),
            id="the parent's limit is lower",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/docker/1f\n", **group("", 4 * GIB, GIB)},
            *(4, 3),
            id="the path is the host's",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "3:cpu:/\n4:memory:/x\n0::/\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{2 * GIB}",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{GIB}",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
            },
            *(2, 1),
            id="version 1",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/\n", **group("", GIB, 2 * GIB)}, 1, 0, id="over the limit"
        ),
    ],
)
def test_what_is_available(tmp_path, files, total, available):
    assert machine(tmp_path, files) == Machine(total * GIB, available * GIB)


def test_the_gpu(tmp_path):
    information = "Model: \t\t NVIDIA GB10 \nIRQ:   1\n"
    files = {"proc/driver/nvidia/gpus/0000:01/information": information}
    assert machine(tmp_path, files) == Machine(16 * GIB, 12 * GIB, "NVIDIA GB10")
    assert machine(tmp_path, files, JAX_PLATFORMS="cpu") == Machine(16 * GIB, 12 * GIB)
    assert memory.read_machine({}, tmp_path / "nowhere") is None


def test_this_process():
    here = memory.read_machine({"JAX_PLATFORMS": "cpu"})
    assert here is not None and 0 < here.available <= here.total
    assert 1 << 20 < memory.resident_bytes() < here.total


def test_the_host_keeps_a_reserve():
    assert memory.usable_bytes(SPARK, None) == 107 * GIB
    assert memory.usable_bytes(Machine(20 * GIB, 10 * GIB), None) == 8 * GIB
    assert memory.usable_bytes(Machine(20 * GIB, GIB), None) == 0
    assert memory.usable_bytes(SPARK, 100.5) == 100.5 * GIB
    with pytest.raises(ValueError, match=r"memory_gib is 116, must be at most 115.0: of 121.0 GiB"):
        memory.usable_bytes(SPARK, 116)


def test_a_gpu_with_memory_of_its_own_is_asked_itself():
    own = Machine(total=64 * GIB, available=32 * GIB, gpu="NVIDIA H200")
    assert memory.usable_bytes(own, None) is None
    assert memory.usable_bytes(own, 100) == 100 * GIB


@pytest.mark.parametrize(
    ("gpu", "usable", "environment", "added"),
    [
        ("NVIDIA GB10", 60.5 * GIB, {}, {"FRACTION": "0.5000", "PREALLOCATE": "false"}),
        ("NVIDIA GB10", 60.5 * GIB, {"PREALLOCATE": "true"}, {"FRACTION": "0.5000"}),
        ("NVIDIA GB10", 60.5 * GIB, {"FRACTION": ".3"}, {"PREALLOCATE": "false"}),
        ("NVIDIA GB10", 60.5 * GIB, {"OLD_FRACTION": ".3"}, {"PREALLOCATE": "false"}),
        ("NVIDIA H200", None, {}, {"FRACTION": "0.9000"}),
        (None, 60 * GIB, {}, {}),
    ],
)
def test_the_pool_of_jax(gpu, usable, environment, added):
    given = {getattr(memory, name): value for name, value in environment.items()}
    process = dict(given)
    memory.limit_jax(dataclasses.replace(SPARK, gpu=gpu), usable, process)
    assert process == given | {getattr(memory, name): value for name, value in added.items()}


@pytest.mark.parametrize(
    ("peak", "level", "words"),
    [
        (
            2 * GIB,
            "INFO",
            "1.000 GiB planned; after warm-up 2.000 GiB at most on the device, +1.000",
        ),
        (6 * GIB, "WARNING", "5.000 GiB may be used"),
        (None, "INFO", "after warm-up 7.000 GiB more in this process"),
    ],
)
def test_the_plan_is_held_against_reality(caplog, peak, level, words):
    caplog.set_level(logging.INFO)
    memory.compare(GIB, peak, 7 * GIB, 5 * GIB)
    (record,) = caplog.records
    assert record.levelname == level and words in record.getMessage()


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("weights")
    checkpoint_lib.save(directory, tiny.HF_CONFIG, tiny.model(), jnp.float32)
    return directory


def test_what_cannot_fit_is_refused_before_it_is_loaded(tmp_path):
    """There is nothing but the config: weights would be missed later."""
    (tmp_path / "config.json").write_text(json.dumps(qwen3_6.HF_CONFIG))
    with pytest.raises(DoesNotFitError) as error:
        executor(tmp_path, max_context=None, dtype="bfloat16", usable_bytes=60 * GIB)
    text = str(error.value)
    assert "GiB are needed, 60.000 GiB may be used" in text.splitlines()[0]
    assert {"weights: routed experts", "kv cache", "workspace"} <= {
        line.split("  ")[0] for line in text.splitlines()
    }


def test_pages_are_as_many_as_fit(weights, caplog):
    whole = executor(weights)
    assert whole.limits.pages == 1 + 2 * 16
    page = 2 * 2 * 16 * 2 * 16 * 4  # two layers, keys and values, 16 positions, 2 heads of 16
    usable = whole.planned_bytes - 2 * page
    assert executor(weights, usable_bytes=usable).limits.pages == whole.limits.pages - 2
    assert "memory: 30 of the 32 pages that the slots could fill" in caplog.text
    with pytest.raises(DoesNotFitError):
        executor(weights, pages=32, usable_bytes=usable)


def test_without_drafts_the_mtp_head_is_not_kept(weights):
    assert executor(weights, draft_length=0).planned_bytes < executor(weights).planned_bytes


def test_a_server_that_cannot_fit_ends(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(qwen3_6.HF_CONFIG))
    (tmp_path / "tokenizer.json").write_bytes(
        (Path(checkpoint_lib.__file__).parent / "demo" / "tokenizer.json").read_bytes()
    )
    command = [sys.executable, "-m", "service", "--port=0", f"--checkpoint={tmp_path}"]
    run = subprocess.run(
        [*command, "--dtype=bfloat16", "--memory-gib=0.5"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 1
    assert "GiB are needed, 0.500 GiB may be used" in run.stderr
    assert "weights: routed experts  60.000 GiB" in run.stderr
    assert "checkpoint read" not in run.stderr
