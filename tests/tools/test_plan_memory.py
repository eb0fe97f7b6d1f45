"""The planner's tables and plot, and the arithmetic of the known endpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import qwen3_6
from tools import plan_memory

LAYOUTS = ("--layouts", "bfloat16", "fp8", "nvfp4")


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("config") / "config.json"
    # As in a quantised checkpoint: what it says of itself is not what is planned for.
    file.write_text(json.dumps(qwen3_6.HF_CONFIG | {"quantization_config": {"quant_method": "x"}}))
    return file


def planner(config_file: Path, *arguments: str) -> plan_memory.Planner:
    options = plan_memory.parse_arguments(["--config", str(config_file), *arguments])
    return plan_memory.Planner(options)


def cells(text: str, label: str) -> list[str]:
    """The cells of the row with a label."""
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    (row,) = [row for row in rows if row[0] == label]
    return row[1:]


def test_tables_of_the_real_model(config_file, capsys):
    arguments = ["--config", str(config_file.parent), *LAYOUTS]
    assert plan_memory.main(arguments) == 0
    text = capsys.readouterr().out
    assert cells(text, "in all") == ["66.134 GiB", "34.051 GiB", "21.019 GiB"]
    assert cells(text, "vision, bfloat16: not loaded") == ["0.832 GiB"] * 3
    assert cells(text, "keys and values of one token") == ["20480 B", "10240 B", "40960 B"]
    assert cells(text, "+ of one in the MTP head") == ["2048 B", "1024 B", "4096 B"]
    without = cells(text, "conversations, bfloat16, without speculation")
    with_drafts = cells(text, "conversations, bfloat16, with speculation")
    assert (without, with_drafts) == (["9.26", "15.44", "18.17"], ["8.14", "13.90", "16.24"])
    for column, weights in enumerate((66.134, 34.051, 21.019)):
        left = 121 - 8 - weights - 1.541
        assert float(with_drafts[column]) == pytest.approx(left / 5.569, abs=0.01)


def test_vision_parameters():
    assert plan_memory.vision_parameters(qwen3_6.HF_CONFIG["vision_config"]) == 893_142_496 // 2
    assert plan_memory.vision_parameters(None) == 0


def test_the_known_endpoint(config_file):
    """5.5 conversations without and 4.8 with speculation from one fixed pool."""
    blocks = {
        drafts: plan_memory.block_bytes(planner(config_file).config, 262144, drafts)
        for drafts in (0, 3)
    }
    # 255 blocks of 1056 positions in ten layers; 260 of 1072 in eleven.
    assert blocks == {0: 255 * 10 * 1056 * 2048, 3: 260 * 11 * 1072 * 2048}
    text = plan_memory.pool_table(planner(config_file, "--kv-pool-gib", "28.2"))
    assert cells(text, "one conversation, with speculation") == ["5.848 GiB", "5.569 GiB"]
    assert [row.split()[-2:] for row in text.splitlines() if "such" in row] == [
        ["5.49", "5.57"],
        ["4.82", "5.06"],
    ]
    assert cells(text, "in all") == ["2.3 GiB", "1.573 GiB"]


def test_shorter_conversations_and_less_memory(config_file):
    long = planner(config_file).capacity("nvfp4", "bfloat16", 3)
    short = planner(config_file, "--max-context=32768").capacity("nvfp4", "bfloat16", 3)
    assert short.left == long.left and 7 < short.conversations / long.conversations < 8
    small = planner(config_file, "--memory-gib=24").capacity("bfloat16", "bfloat16", 3)
    assert small.left < 0 and small.conversations == 0


def test_plot(config_file, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "memory.png"
    assert plan_memory.main(["--config", str(config_file), *LAYOUTS, "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
