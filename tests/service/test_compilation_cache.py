"""A second start takes its programs from the compilation cache, and answers the same bits."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import jax.numpy as jnp
import pytest

import tiny
import tiny_tokenizer
from live_server import message
from model import checkpoint as checkpoint_lib
from service.pb import inference_pb2, inference_pb2_grpc

pytestmark = pytest.mark.slow  # compiles the programs of a server

ROOT = Path(__file__).resolve().parents[2]
SHAPE = ["--slots=2", "--max-context=64", "--draft-length=1", "--rounds-per-call=2"]
PROMPT = {"ids": [5, 17, 5, 17, 80, 3]}
REQUESTS = [
    message(
        tokens=PROMPT,
        sampling=sampling,
        stopping={"maxTokens": 24, "ignoreEos": True},
        include={"tokenIds": True, "logprobs": True},
    )
    for sampling in ({"temperature": 0}, {"temperature": 1, "seed": 7})
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """A checkpoint with everything in it."""
    directory = tmp_path_factory.mktemp("weights")
    tiny_tokenizer.write_checkpoint(directory)
    hf_config = {**tiny.HF_CONFIG, "vocab_size": 384}
    model = tiny.model(tiny.config(vocab_size=384))
    checkpoint_lib.save(directory, hf_config, model, jnp.float32)
    return directory


@contextlib.contextmanager
def server(weights: Path, *arguments: str) -> Iterator[tuple[grpc.Channel, list[str]]]:
    """A server of its own process once it is ready, and what its log says at the end."""
    command = [sys.executable, "-m", "service", "--port=0", f"--checkpoint={weights}", *SHAPE]
    log: list[str] = []
    with subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            assert process.stdout is not None
            target = process.stdout.readline().split()[-1]
            assert process.stdout.readline() == "tandem ready\n"
            with grpc.insecure_channel(target) as channel:
                yield channel, log
        finally:
            process.terminate()
            log += process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 0


def replies(channel: grpc.Channel) -> list[inference_pb2.Delta]:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    return [stub.Complete(request).choices[0].delta for request in REQUESTS]


def programs(log: list[str]) -> list[str]:
    """How each program came, as the log says."""
    told = [re.search(r"program \d+ of \d+, .*: (.*) \(", line) for line in log]
    return [match[1] for match in told if match]


def test_a_second_start_compiles_nothing_and_answers_the_same_bits(weights, tmp_path):
    cache = f"--compilation-cache={tmp_path / 'xla'}"
    with server(weights, cache) as (channel, cold_log):
        cold = replies(channel)
    with server(weights, cache) as (channel, warm_log):
        warm = replies(channel)
    assert all(len(reply.token_ids) == len(reply.logprobs) == 24 for reply in cold)
    assert warm == cold
    assert len(programs(cold_log)) == len(programs(warm_log)) == 9
    assert set(programs(cold_log)) == {"compiled"}
    assert set(programs(warm_log)) == {"from the compilation cache"}
    for told in (
        r"memory planned: ",
        r"self-test: (\d+) of \1 kernels",
        r"GiB planned; after warm-up",
    ):
        assert sum(bool(re.search(told, line)) for line in cold_log) == 1, told
    for entry in (tmp_path / "xla").iterdir():  # as a server leaves it that died while it wrote
        entry.write_bytes(entry.read_bytes()[:100])
    with server(weights, cache) as (channel, broken_log):
        assert replies(channel) == cold
    assert set(programs(broken_log)) == {"compiled"}
    assert any("Error reading persistent compilation cache entry" in line for line in broken_log)
