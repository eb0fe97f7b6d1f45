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


def write(directory: Path, report: dict[str, Any]) -> None:
    """Writes `training.json` and `loss.png`.

    Args:
      directory: made if it does not exist.
      report: figures; `history` and `held_out` are drawn.
    """
    directory.mkdir(parents=True, exist_ok=True)
    history, held_out = report["history"], report["held_out"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    steps = [entry["step"] for entry in history]
    for name, label in (("loss", "next token"), ("draft_1", "draft 1"), ("draft_2", "draft 2")):
        left.plot(steps, [entry[name] for entry in history], label=label, linewidth=0.8)
    left.set(xlabel="step", ylabel="nats per token", title="Training loss")
    left.legend()
    at = [entry["step"] for entry in held_out]
    bits = [entry["library"]["bits_per_byte"] for entry in held_out]
    right.plot(at, bits, "k.-", label="bits per byte")
    right.set(xlabel="step", ylabel="bits per byte", title="Held-out library files", ylim=(0, None))
    share = right.twinx()
    for index in range(len(held_out[0]["library"]["acceptance"]) if held_out else 0):
        accepted = [entry["library"]["acceptance"][index] for entry in held_out]
        share.plot(at, accepted, ".--", label=f"draft {index + 1} accepted")
    share.set(ylabel="share of positions", ylim=(0, 1))
    share.legend(loc="lower right")
    fresh = directory / "loss.tmp.png"
    figure.savefig(fresh, dpi=110)
    plt.close(figure)
    fresh.replace(directory / "loss.png")
    text = directory / "training.json.tmp"
    text.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    text.replace(directory / "training.json")
