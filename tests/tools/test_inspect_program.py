"""The structure of the programs for GPUs that are not here, and the reader of compiler output."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

from tools import program_report

ROOT = pathlib.Path(__file__).resolve().parents[2]
FULL = ROOT.parent / "shared" / "qwen36" / "config.json"
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="the GPU compiler is not installed (extra `inspect`)",
)


def inspect(*arguments: str) -> dict[str, dict]:
    """Runs the tool in a process of its own: it sets the compiler up before JAX starts."""
    command = [sys.executable, "tools/inspect_program.py", "--json", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    return {report["program"]: report for report in json.loads(result.stdout)}


def check_decode(report: dict) -> None:
    """One CUDA graph a call, nothing read by the host, nothing large copied, all state in place."""
    assert report["launches"] == 1
    assert report["host_syncs"] == 0
    assert report["captured_loops"] == report["loops"] > 0
    assert report["large_copies"] == []
    assert report["dense_expert_products"] == 0
    assert report["aliased_bytes"] >= report["state_bytes"]


@needs_compiler
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", ["gb10", "h200"])
def test_decode_call_on_four_layers(target):
    config = FULL if FULL.exists() else ROOT / "model" / "demo"
    report = inspect("--target", target, "--config", str(config), "--layers", "4", "--slots", "4")
    check_decode(report["decode"])
    assert report["decode"]["ptx_targets"] == [{"gb10": "sm_121", "h200": "sm_90a"}[target]]


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not FULL.exists(), reason="the full model's config is not beside the checkout")
def test_decode_call_of_the_full_model_fits_a_gb10():
    report = inspect("--target", "gb10", "--config", str(FULL), "--slots", "16")["decode"]
    check_decode(report)
    assert report["arguments_bytes"] + report["temporary_bytes"] < 121 << 30


def test_the_reader_notices_what_it_looks_for():
    hlo = """HloModule m

%fused_t (p: bf16[2048,2048]) -> bf16[2048,2048] {
  %p = bf16[2048,2048]{1,0} parameter(0)
  ROOT %t = bf16[2048,2048]{1,0} transpose(%p), dimensions={1,0}
}

%dense (p: bf16[8,64,32]) -> f32[8,64] {
  %p = bf16[8,64,32]{2,1,0} parameter(0)
  ROOT %d = f32[8,64]{1,0} dot(%p, %p)
}

%sliced (p: bf16[8,64,32]) -> f32[1,64] {
  %p = bf16[8,64,32]{2,1,0} parameter(0)
  %s = bf16[1,64,32]{2,1,0} dynamic-slice(%p, %i)
  ROOT %d = f32[1,64]{1,0} dot(%s, %s)
}

ENTRY %main (x: bf16[2048,2048]) -> bf16[2048,2048] {
  %x = bf16[2048,2048]{1,0} parameter(0)
  %c = bf16[2048,2048]{1,0} copy(%x)
  %small = bf16[4,2048]{1,0} copy(%x)
  %logits = f32[64,248320]{1,0} copy(%x)
  ROOT %f = bf16[2048,2048]{1,0} fusion(%c), kind=kInput, calls=%fused_t
}
"""
    moves = program_report.large_moves(hlo, [(1, 2048, 2048)], logits_dim=248320)
    assert [(one.name, one.kind) for one in moves] == [("c", "copy"), ("f", "transpose")]
    assert program_report.dense_expert_products(hlo, [(8, 64, 32)]) == 1


def test_the_reader_tells_loops_inside_a_graph_from_loops_outside():
    sequence = """000: kCommandBuffer [source]
    001: kWhile         [prev]
        002: kCustomKernel [prev] a grid
    003: kConditional   [prev]
004: kWhile         [prev=000]
    005: kCommandBuffer [source]
        006: kCustomKernel [prev] b grid
    007: kConditional [prev]
008: kHostSend [prev]
"""
    thunks = program_report.read_thunks(sequence)
    assert thunks == program_report.Thunks(
        launches=3, kernels=2, loops=2, captured_loops=1, host_syncs=3
    )
