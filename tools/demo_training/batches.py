"""Token arrays on disk and the batches drawn from them."""

from __future__ import annotations

import dataclasses
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from demo_training.corpus import (
    CHAT,
    LIBRARY,
    PACKAGES,
    TESTS,
    Document,
    find_documents,
    is_held_out,
)
from demo_training.dialogues import dialogues
from demo_training.packages import find_packages
from demo_training.tokenizer import encode, train

TOKENIZER_FILE, STATISTICS_FILE = "tokenizer.json", "corpus.json"
_SOURCES = (LIBRARY, TESTS, PACKAGES)


@dataclasses.dataclass(frozen=True)
class Streams:
    """The encoded corpus, memory-mapped."""

    train: dict[str, np.ndarray]
    held_out: dict[str, np.ndarray]
    statistics: dict[str, Any]
    """Per stream: files, bytes and tokens, for training and held out; and the packages."""


def prepare(directory: Path, vocab_size: int, tokenizer: Tokenizer | None = None) -> None:
    """Learns the tokenizer and encodes the corpus, unless that was done before.

    Args:
      directory: receives `tokenizer.json`, one array a stream, and last of all the statistics,
        whose presence says that the rest is complete.
      vocab_size: with the added tokens.
      tokenizer: is used instead of learning one.
    """
    if (directory / STATISTICS_FILE).exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    found = find_documents()
    found[PACKAGES], listed = find_packages()
    used = {name: _part(documents, held_out=False) for name, documents in found.items()}
    kept = {name: _part(documents, held_out=True) for name, documents in found.items()}
    if tokenizer is None:
        tokenizer = train((document.text for document in used[LIBRARY]), vocab_size)
    tokenizer.save(str(directory / TOKENIZER_FILE))
    used[CHAT] = dialogues(used[LIBRARY] + used[PACKAGES])
    statistics: dict[str, Any] = {"python": platform.python_version(), "packages": listed}
    for part, streams in (("train", used), ("held_out", kept)):
        for name, documents in streams.items():
            # A chat's prompt ends where a turn does, never inside a word.
            cut = part == "train" and name != CHAT
            tokens = encode(tokenizer, documents, cut=cut)
            np.save(directory / f"{part}_{name}.npy", tokens)
            statistics[f"{part}_{name}"] = {
                "files": len({document.path for document in documents}),
                "bytes": sum(len(document.text.encode("utf-8")) for document in documents),
                "tokens": int(tokens.size),
            }
    complete = directory / (STATISTICS_FILE + ".tmp")
    complete.write_text(json.dumps(statistics, indent=2) + "\n", encoding="utf-8")
    complete.replace(directory / STATISTICS_FILE)


def open_streams(directory: Path) -> Streams:
    """Opens what `prepare` wrote."""

    def arrays(part: str, names: tuple[str, ...]) -> dict[str, np.ndarray]:
        return {name: np.load(directory / f"{part}_{name}.npy", mmap_mode="r") for name in names}

    statistics = json.loads((directory / STATISTICS_FILE).read_text(encoding="utf-8"))
    return Streams(arrays("train", (*_SOURCES, CHAT)), arrays("held_out", _SOURCES), statistics)


def _part(documents: list[Document], *, held_out: bool) -> list[Document]:
    return [document for document in documents if is_held_out(document.path) is held_out]


def draw(
    streams: dict[str, np.ndarray],
    shares: dict[str, float],
    seed: tuple[int, ...],
    rows: int,
    tokens: int,
) -> np.ndarray:
    """A batch: windows at random places of streams chosen by their share.

    A function of its arguments alone, so a resumed run needs no state to go on as if never killed.

    Returns:
      int32 [rows, tokens].
    """
    random = np.random.default_rng(seed)
    chosen = random.choice(list(shares), rows, p=np.asarray([*shares.values()]))
    windows = []
    for name in chosen:
        stream = streams[name]
        start = int(random.integers(stream.size - tokens + 1))
        windows.append(np.asarray(stream[start : start + tokens], np.int32))
    return np.stack(windows)


def consecutive(stream: np.ndarray, tokens: int, extra: int) -> np.ndarray:
    """A stream in whole windows that overlap by `extra`, int32 [windows, tokens + extra]."""
    count = (stream.size - extra) // tokens
    return np.stack(
        [np.asarray(stream[i * tokens : (i + 1) * tokens + extra], np.int32) for i in range(count)]
    )
