"""What a run leaves for people to look at: figures, a loss curve, and samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from tokenizers import Tokenizer

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from demo_training.stages import STAGES

PROMPTS = (
    "def ",
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self",
    "<|im_start|>user\nWrite the Python function is_empty(self).<|im_end|>\n<|im_start|>assistant\n",
)
_SAMPLE_WINDOW = 160


def continue_prompts(
    choose: Callable[[np.ndarray, np.ndarray], np.ndarray], tokenizer: Tokenizer, tokens: int
) -> list[dict[str, str]]:
    """Greedy continuations of a few prompts, without caches (a fixed window, computed anew).

    Args:
      choose: (int32 [prompts, window], index of the last token [prompts]) -> likeliest next token.
      tokenizer: the demo's.
      tokens: how many to add.
    """
    encoded = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    rows = np.zeros((len(PROMPTS), _SAMPLE_WINDOW), np.int32)
    lengths = np.asarray([len(ids) for ids in encoded])
    for row, ids in zip(rows, encoded, strict=True):
        row[: len(ids)] = ids
    for _ in range(min(tokens, _SAMPLE_WINDOW - int(lengths.max()))):
        rows[np.arange(len(rows)), lengths] = choose(rows, lengths - 1)
        lengths += 1
    texts = [
        tokenizer.decode(row[len(ids) : length].tolist(), skip_special_tokens=False)
        for row, ids, length in zip(rows, encoded, lengths, strict=True)
    ]
    return [{"prompt": p, "continuation": text} for p, text in zip(PROMPTS, texts, strict=True)]


def write(
    directory: Path, stage: dict[str, Any], config: dict[str, Any], corpus: dict[str, Any]
) -> None:
    """Writes the figures of a stage: `training.json`, `data.json` and `loss.png`.

    Other stages that `training.json` tells of stay there, in the order of the recipe.

    Args:
      directory: made if it does not exist.
      stage: figures; `history` and `held_out` are drawn.
      config: the model's.
      corpus: what was learned from.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "training.json"
    told = json.loads(path.read_text(encoding="utf-8"))["stages"] if path.exists() else {}
    told[stage["stage"]["name"]] = stage
    stages = {each.name: told[each.name] for each in STAGES if each.name in told}
    _draw(directory / "loss.png", list(stages.values()))
    _write_json(path, {"stages": stages, "config": config})
    _write_json(directory / "data.json", corpus)


def _draw(path: Path, stages: list[dict[str, Any]]) -> None:
    """Loss and held-out figures of the stages, one after the other."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    share = right.twinx()
    left.set(xlabel="step", ylabel="nats per token", title="Training loss")
    right.set(xlabel="step", ylabel="bits per byte", title="Held-out library files")
    share.set(ylabel="share of positions", ylim=(0, 1))
    first = 0
    for stage in stages:
        history, held_out = stage["history"], stage["held_out"]
        steps = [first + entry["step"] for entry in history]
        for colour, name in enumerate(("loss", "draft_1", "draft_2", "draft_3")):
            if name in history[0]:
                values = [entry[name] for entry in history]
                left.plot(steps, values, f"C{colour}", label=name, linewidth=0.8)
        at = [first + entry["step"] for entry in held_out]
        bits = [entry["library"]["bits_per_byte"] for entry in held_out]
        right.plot(at, bits, "k.-", label="bits per byte")
        for index in range(len(held_out[0]["library"]["acceptance"]) if held_out else 0):
            accepted = [entry["library"]["acceptance"][index] for entry in held_out]
            share.plot(at, accepted, f"C{index}.--", label=f"draft {index + 1} accepted")
        first += stage["steps_done"]
        for axes in (left, right):
            axes.axvline(first, color="0.8", linewidth=0.8)
    right.set_ylim(0, None)
    for axes in (left, share):
        handles, labels = axes.get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True))
        axes.legend(named.values(), named.keys(), loc="lower left")
    fresh = path.with_name("loss.tmp.png")
    figure.savefig(fresh, dpi=110)
    plt.close(figure)
    fresh.replace(path)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)
