"""Measures checkpoints of the demo on files that it did not learn from.

`python tools/measure_demo.py model/demo` prints, per checkpoint, bits per byte, how often the drafts
agree with the model on the text, how many are accepted by the decode program while it writes, and
how many of its tool calls are as they should be. --json keeps it all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from demo_training import batches, objective, tokenizer
from demo_training.corpus import LIBRARY, PACKAGES, TESTS, Document, find_documents, is_held_out
from demo_training.decoding import MOST_DRAFTS, Decoding
from demo_training.dialogues import dialogues
from demo_training.packages import find_packages
from sample_prompts import held_out_functions
from tokenizers import Tokenizer

from model import checkpoint

ROWS, TOKENS = 4, 1020
PROMPTS, REPLY_TOKENS, TEMPERATURES = 32, 128, (0.0, 0.6, 1.0)
CALLS, CALL_TOKENS = 48, 160
ASSISTANT, END_OF_TURN = "<|im_start|>assistant\n", "<|im_end|>"


def held_out_documents() -> dict[str, list[Document]]:
    """By stream."""
    found = find_documents()
    sources = {
        LIBRARY: found[LIBRARY],
        TESTS: found[TESTS],
        PACKAGES: find_packages()[0],
    }
    return {
        name: [document for document in documents if is_held_out(document.path)]
        for name, documents in sources.items()
    }


def of_text(
    path: Path, documents: dict[str, list[Document]], codec: Tokenizer, share: int
) -> dict[str, dict[str, Any]]:
    """Bits per byte and agreement of the drafts, fed with the text; one window in `share`."""
    model = checkpoint.load(path, jnp.float32).model
    measure = jax.jit(objective.measure)
    measured: dict[str, dict[str, Any]] = {}
    for name, entries in documents.items():
        stream = tokenizer.encode(codec, entries, cut=False)
        windows = batches.consecutive(stream, TOKENS, objective.EXTRA_MEASURED)[::share]
        figures = objective.evaluate(lambda y: measure(model, y), windows, ROWS)
        size = sum(len(document.text.encode("utf-8")) for document in entries)
        measured[name] = {
            "bits_per_byte": round(figures.bits_per_token * len(stream) / size, 4),
            **dataclasses.asdict(figures),
        }
        print(path, name, measured[name], flush=True)
    return measured


def of_replies(decoding: Decoding, codec: Tokenizer) -> dict[str, list[dict[str, object]]]:
    """Acceptance by temperature and draft length, while functions are written to their end."""
    prompts = [codec.encode(text).ids for text in held_out_functions(PROMPTS)]
    measured: dict[str, list[dict[str, object]]] = {}
    for temperature in TEMPERATURES:
        for draft_length in range(1, MOST_DRAFTS + 1):
            _, seen = decoding.replies(prompts, REPLY_TOKENS, draft_length, temperature)
            figures = seen.figures(draft_length)
            measured.setdefault(str(temperature), []).append(figures)
            print("temperature", temperature, figures, flush=True)
    return measured


def of_calls(decoding: Decoding, codec: Tokenizer, documents: list[Document]) -> dict[str, Any]:
    """Greedy tool calls, compared with those that the requests ask for, character by character."""
    wanted: list[tuple[str, str]] = []
    for chat in dialogues(documents):
        prompt, found, rest = chat.text.partition(ASSISTANT)
        if rest.startswith("<tool_call>"):
            wanted.append((prompt + found, rest.split(END_OF_TURN)[0]))
    wanted = wanted[:: max(1, len(wanted) // CALLS)][:CALLS]
    prompts = [codec.encode(prompt).ids for prompt, _ in wanted]
    [end] = codec.encode(END_OF_TURN).ids
    replies, seen = decoding.replies(prompts, CALL_TOKENS, 3, end_ids=(end,))
    texts = [codec.decode(reply, skip_special_tokens=False) for reply in replies]
    texts = [text.removesuffix(END_OF_TURN) for text in texts]
    names = sum(
        text.split("\n")[:2] == call.split("\n")[:2]
        for text, (_, call) in zip(texts, wanted, strict=True)
    )
    exact = sum(text == call for text, (_, call) in zip(texts, wanted, strict=True))
    print("calls", len(wanted), "right tool", names, "exact", exact, seen.figures(3), flush=True)
    samples = [
        {"wanted": call, "reply": text}
        for text, (_, call) in zip(texts[:8], wanted[:8], strict=True)
    ]
    return {
        "calls": len(wanted),
        "right_tool": names,
        "exact": exact,
        "drafting": seen.figures(3),
        "samples": samples,
    }


def main() -> None:
    """Measures what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="+")
    parser.add_argument(
        "--share", type=int, default=1, help="use one window of text in so many [1]"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    documents = held_out_documents()
    measured: dict[str, Any] = {}
    for path in arguments.checkpoint:
        print(path, file=sys.stderr)
        codec = tokenizer.load(path / batches.TOKENIZER_FILE)
        decoding = Decoding(path, codec.get_vocab_size())
        measured[path.as_posix()] = {
            "replies": of_replies(decoding, codec),
            "calls": of_calls(decoding, codec, documents[LIBRARY] + documents[PACKAGES]),
            "text": of_text(path, documents, codec, arguments.share),
        }
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
