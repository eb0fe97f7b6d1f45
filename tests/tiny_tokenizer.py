"""A byte-level BPE like Qwen's, small enough to train in a test, and a checkpoint around it."""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

END_TOKEN = "<|end|>"
CORPUS = [
    "The quick brown fox jumps over the lazy dog. own foxes, own boxes, brown foxy fox.",
    "def quick(brown): return brown + fox  # jumps over the lazy dog",
    "漢字 漢字 और हिन्दी é e\u0301 naïve café",
] * 4


def train() -> Tokenizer:
    """256 bytes, about 100 merges, control tokens, and an added token with a space in it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=[END_TOKEN, "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    return tokenizer


def write_checkpoint(directory: Path) -> Path:
    """Writes what the service itself reads of a checkpoint: everything but the weights."""
    tokenizer = train()
    tokenizer.save(str(directory / "tokenizer.json"))
    end_id = tokenizer.token_to_id(END_TOKEN)
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [end_id], "temperature": 0.5, "top_k": 20, "top_p": 0.75})
    )
    return directory
