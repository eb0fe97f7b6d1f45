"""Facts about a checkpoint directory that the service needs before, and beside, the weights."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

WEIGHT_FILES = "*.safetensors"
ORBAX_MANIFEST = "orbax_checkpoint.json"
WEIGHT_TABLES = ("model.safetensors.index.json", ORBAX_MANIFEST)
"""Files that say where the weights are: their identity is that of the weights."""
WHOLE_FILE_BYTES = 64 << 20
SAMPLE_BYTES = 1 << 20
SAMPLES = 64


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What an unset sampling field means; these values stand for a checkpoint that says nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class ModelCard:
    """Name, identity, end ids and defaults of a checkpoint."""

    name: str
    fingerprint: str
    end_ids: tuple[int, ...]
    defaults: GenerationDefaults

    @classmethod
    def from_directory(cls, checkpoint: Path) -> "ModelCard":
        """Reads `config.json` and, when there is one, `generation_config.json`.

        End ids are those of generation_config.json where it has any: config.json of Qwen3.6 lists
        only one of its two.
        """
        config = read_json(checkpoint / "config.json")
        generation_path = checkpoint / "generation_config.json"
        generation = read_json(generation_path) if generation_path.is_file() else {}
        text_config = cast("dict[str, Any]", config.get("text_config") or {})
        named: list[Any] = [
            source.get("eos_token_id") for source in (generation, config, text_config)
        ]
        end_ids: Any = next((ids for ids in named if ids is not None), ())
        return cls(
            name=checkpoint.resolve().name,
            fingerprint=fingerprint(checkpoint),
            end_ids=(end_ids,) if isinstance(end_ids, int) else tuple(end_ids),
            defaults=generation_defaults(generation),
        )


def generation_defaults(generation: dict[str, Any]) -> GenerationDefaults:
    """Reads the sampling defaults of a generation_config; `do_sample: false` means greedy."""
    silent = GenerationDefaults()

    def said(field: str) -> float:
        value = generation.get(field)  # the hub writes null for what is not set
        return getattr(silent, field) if value is None else float(value)

    return GenerationDefaults(
        temperature=0.0 if generation.get("do_sample") is False else said("temperature"),
        top_k=int(said("top_k")),
        top_p=said("top_p"),
        min_p=said("min_p"),
        repetition_penalty=said("repetition_penalty"),
        frequency_penalty=said("frequency_penalty"),
        presence_penalty=said("presence_penalty"),
    )


def fingerprint(checkpoint: Path) -> str:
    """Returns the identity of a checkpoint, the same for a hub directory and its Orbax form.

    A SHA-256 over the identity of the weights and over names and contents of all other files.
    """
    return digest_of(other_files(checkpoint), weights_fingerprint(checkpoint))


def weights_fingerprint(checkpoint: Path) -> str:
    """Returns the identity of the weights alone.

    An Orbax directory keeps that of the hub directory that it was made from; loading it proves that
    its tensors are those that were written.
    """
    if (checkpoint / ORBAX_MANIFEST).is_file():
        return read_json(checkpoint / ORBAX_MANIFEST)["weights_fingerprint"]
    return digest_of(sorted(checkpoint.glob(WEIGHT_FILES)))


def other_files(checkpoint: Path) -> list[Path]:
    """Returns the files around the weights: config, tokenizer, templates, and whatever else."""
    return sorted(
        path
        for path in checkpoint.iterdir()
        if path.is_file() and not (path.match(WEIGHT_FILES) or path.name in WEIGHT_TABLES)
    )


def digest_of(files: Iterable[Path], salt: str = "") -> str:
    """Returns a SHA-256 over the salt and over names, sizes and contents of files.

    Of a file above 64 MiB, 64 evenly spaced samples of 1 MiB are read (first and last included), so
    that 70 GB of weights do not delay the start by minutes.
    """
    digest = hashlib.sha256(salt.encode())
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= WHOLE_FILE_BYTES:
                digest.update(file.read())
                continue
            for sample in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file."""
    return json.loads(path.read_text(encoding="utf-8"))
