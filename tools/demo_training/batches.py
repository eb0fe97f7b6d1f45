"""Token arrays on disk and the batches drawn from them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from demo_training.corpus import CHAT, LIBRARY, TESTS, conversations, find_documents, is_held_out
from demo_training.tokenizer import encode, train

TOKENIZER_FILE, STATISTICS_FILE = "tokenizer.json", "corpus.json"
# Library code sets the tone; tests add variety, and conversations teach the chat template.
SHARES = {LIBRARY: 0.70, TESTS: 0.18, CHAT: 0.12}


@dataclasses.dataclass(frozen=True)
class Streams:
    """The encoded corpus, memory-mapped."""

    train: dict[str, np.ndarray]
    held_out: dict[str, np.ndarray]
    statistics: dict[str, dict[str, int]]
    """Per stream: files, bytes and tokens, for training and held out."""


def prepare(directory: Path, vocab_size: int) -> None:
    """Learns the tokenizer and encodes the corpus, unless that was done before.

    Args:
      directory: receives `tokenizer.json`, one array a stream, and last of all the statistics,
        whose presence says that the rest is complete.
      vocab_size: with the added tokens.
    """
    if (directory / STATISTICS_FILE).exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    found = find_documents()
    used = {
        name: [document for document in documents if not is_held_out(document.path)]
        for name, documents in found.items()
    }
    tokenizer = train((document.text for document in used[LIBRARY]), vocab_size)
    tokenizer.save(str(directory / TOKENIZER_FILE))
    used[CHAT] = conversations(used[LIBRARY])
    kept = {
        name: [document for document in documents if is_held_out(document.path)]
        for name, documents in found.items()
    }
    statistics: dict[str, dict[str, int]] = {}
    for part, streams, cut in (("train", used, True), ("held_out", kept, False)):
        for name, documents in streams.items():
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
    held_out = arrays("held_out", (LIBRARY, TESTS))
    return Streams(arrays("train", (LIBRARY, TESTS, CHAT)), held_out, statistics)


def draw(
    streams: dict[str, np.ndarray], seed: int, step: int, rows: int, tokens: int
) -> np.ndarray:
    """The batch of one step: windows at random places of streams chosen by their share.

    A function of its arguments alone, so a resumed run needs no state to go on as if never killed.

    Returns:
      int32 [rows, tokens].
    """
    random = np.random.default_rng((seed, step))
    names = list(streams)
    shares = np.asarray([SHARES[name] for name in names])
    chosen = random.choice(len(names), rows, p=shares / shares.sum())
    windows = []
    for index in chosen:
        stream = streams[names[index]]
        start = int(random.integers(stream.size - tokens + 1))
        windows.append(np.asarray(stream[start : start + tokens], np.int32))
    return np.stack(windows)


def consecutive(stream: np.ndarray, tokens: int, extra: int) -> np.ndarray:
    """A stream in whole windows that overlap by `extra`, int32 [windows, tokens + extra]."""
    count = (stream.size - extra) // tokens
    return np.stack(
        [np.asarray(stream[i * tokens : (i + 1) * tokens + extra], np.int32) for i in range(count)]
    )
