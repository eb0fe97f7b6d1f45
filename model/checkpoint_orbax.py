"""Checkpoints as Orbax directories: the hub's tensors, by the hub's names, bit for bit.

    config.json, tokenizer.json, ...  carried along from the hub directory
    orbax_checkpoint.json             from the start of a conversion: where from, and the parts to come
    weights/PART/                     an Orbax checkpoint of a part of the model: name -> array
    weights/PART.json                 once that is complete: dtype, shape and SHA-256 of every tensor,
                                      size of every file

A part is a layer, or what stands outside of the layers. Orbax completes a part or leaves none, so a
conversion that was killed goes on at the first part without its `PART.json`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from model.checkpoint_files import (
    DTYPES,
    Block,
    CheckpointError,
    StoredTensor,
    read_blocks,
    read_json,
)

MANIFEST_FILE = "orbax_checkpoint.json"
WEIGHTS_DIRECTORY = "weights"
FORMAT = 1
GROUP_BYTES = 64 << 20
"""Of tensors restored by one call: each call reads the metadata of the whole part."""
CHUNK_BYTES = 64 << 20
"""Of an array that Orbax reads at a time."""

_PART = re.compile(r"(?:model\.)?(?:language_model\.)?(layers\.\d+|\w+)\.")
_ABSENT = np.empty(0)
"""What Orbax gives back in silence for an array that it does not have; it stores no such array."""

Progress = Callable[[int, int], None]
"""Called with the bytes that are done and the bytes in all, first of all before anything is done."""


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What `convert` did."""

    parts: int
    written: int
    """Parts that were not there yet."""


def is_orbax(directory: pathlib.Path) -> bool:
    """Whether a directory is a (perhaps incomplete) Orbax checkpoint."""
    return (directory / MANIFEST_FILE).is_file()


def convert(
    index: Mapping[str, StoredTensor],
    directory: pathlib.Path,
    *,
    weights_fingerprint: str,
    progress: Progress | None = None,
) -> Conversion:
    """Writes the parts that a directory lacks; holds one of them in memory.

    Args:
      index: the tensors of a hub directory.
      directory: made if it does not exist; one that an earlier call left incomplete is completed.
      weights_fingerprint: identity of the hub directory's weights, kept for whoever asks the copy.
      progress: hears of every part.

    Raises:
      CheckpointError: the directory belongs to other weights, or a tensor has no elements.
    """
    if empty := [name for name, stored in index.items() if not stored.nbytes]:
        raise CheckpointError(f"Orbax does not store tensors without elements: {', '.join(empty)}")
    parts = _parts(index)
    weights = directory / WEIGHTS_DIRECTORY
    _claim(directory, weights_fingerprint, sorted(parts))
    for leftover in weights.glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(leftover)
    missing = [part for part in parts if _part_problems(weights, part)]
    sizes = {part: sum(index[name].nbytes for name in names) for part, names in parts.items()}
    total = sum(sizes.values())
    done = total - sum(sizes[part] for part in missing)
    if progress:
        progress(done, total)
    for part in missing:
        _write_part(weights, part, parts[part], index)
        done += sizes[part]
        if progress:
            progress(done, total)
    return Conversion(len(parts), len(missing))


def read_index(directory: pathlib.Path) -> dict[str, StoredTensor]:
    """Reads what an Orbax directory holds, and compares its files with what was written.

    Raises:
      CheckpointError: listing every part that is missing and every file that is missing or has
        another size.
    """
    manifest, weights = read_json(directory / MANIFEST_FILE), directory / WEIGHTS_DIRECTORY
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{directory / MANIFEST_FILE}: format is {manifest.get('format')!r}, served: {FORMAT}"
        )
    problems = [problem for part in manifest["parts"] for problem in _part_problems(weights, part)]
    if problems:
        raise CheckpointError(f"{directory}: " + "; ".join(problems))
    index: dict[str, StoredTensor] = {}
    for part in manifest["parts"]:
        for name, tensor in read_json(weights / f"{part}.json")["tensors"].items():
            shape = tuple(tensor["shape"])
            index[name] = StoredTensor(
                weights / part, tensor["dtype"], shape, sha256=tensor["sha256"]
            )
    return index


def restore_blocks(index: Mapping[str, StoredTensor], names: Iterable[str]) -> Iterator[Block]:
    """Restores tensors, each in one block; what differs from what was written is refused.

    Raises:
      CheckpointError: naming the tensor that is missing, damaged, or of another shape or dtype.
    """
    with _checkpointer() as checkpointer:
        for part, group in _groups(index, names):
            tensors = _restore(checkpointer, part, group)
            for name in group:
                data = np.asarray(tensors.pop(name))
                if problem := _difference(index[name], data):
                    raise CheckpointError(f"{part}: {name} {problem}")
                yield Block(name, slice(None) if data.shape else ..., data)
                del data  # or it would be held while the next group is restored
            _give_back_memory()


def _checkpointer() -> ocp.Checkpointer:
    # Weights hardly shrink, and unpacking them would be what a start waits for.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _restore(
    checkpointer: ocp.Checkpointer, part: pathlib.Path, names: list[str]
) -> dict[str, np.ndarray]:
    wanted = ocp.args.PyTreeRestore(
        item=dict.fromkeys(names, _ABSENT),
        restore_args=dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray)),
        partial_restore=True,
    )
    try:
        return checkpointer.restore(part, args=wanted)
    except Exception as error:  # what Orbax raises depends on where the damage is
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
        raise CheckpointError(f"{part}: {listed} cannot be restored ({error})") from error


def _give_back_memory() -> None:
    """Returns freed memory to the system; glibc keeps it, for each of Orbax's threads."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _difference(stored: StoredTensor, data: np.ndarray) -> str:
    """In words; empty when there is none."""
    if not data.size:
        return "is missing"
    if data.shape != stored.shape:
        return f"has the shape {data.shape}, expected {stored.shape}"
    if data.dtype != DTYPES[stored.dtype]:
        return f"has the dtype {data.dtype}, expected {stored.dtype}"
    if _sha256(data) != stored.sha256:
        return "is damaged: its SHA-256 is not that of the tensor that was written"
    return ""


def _parts(index: Mapping[str, StoredTensor]) -> dict[str, list[str]]:
    parts: dict[str, list[str]] = {}
    for name in sorted(index):
        match = _PART.match(name)
        parts.setdefault(match[1] if match else name, []).append(name)
    return parts


def _groups(
    index: Mapping[str, StoredTensor], names: Iterable[str]
) -> Iterator[tuple[pathlib.Path, list[str]]]:
    """Neighbours in the same part, up to `GROUP_BYTES` of them."""
    group: list[str] = []
    size = 0
    for name in names:
        stored = index[name]
        if group and (index[group[0]].file != stored.file or size + stored.nbytes > GROUP_BYTES):
            yield index[group[0]].file, group
            group, size = [], 0
        group.append(name)
        size += stored.nbytes
    if group:
        yield index[group[0]].file, group


def _claim(directory: pathlib.Path, weights_fingerprint: str, parts: list[str]) -> None:
    """Writes the manifest, or compares it with the one that is there."""
    manifest = {"format": FORMAT, "weights_fingerprint": weights_fingerprint, "parts": parts}
    if is_orbax(directory):
        found = read_json(directory / MANIFEST_FILE)
        if found != manifest:
            raise CheckpointError(
                f"{directory}: holds other weights, fingerprint"
                f" {found.get('weights_fingerprint')}; these have {weights_fingerprint}"
            )
    (directory / WEIGHTS_DIRECTORY).mkdir(parents=True, exist_ok=True)
    _write_json(directory / MANIFEST_FILE, manifest)


def _write_part(
    weights: pathlib.Path, part: str, names: list[str], index: Mapping[str, StoredTensor]
) -> None:
    (weights / f"{part}.json").unlink(missing_ok=True)
    tensors = {name: np.empty(index[name].shape, DTYPES[index[name].dtype]) for name in names}
    for block in read_blocks(index, names):
        tensors[block.name][block.rows] = block.data
    chunks = ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
    save = ocp.args.PyTreeSave(tensors, save_args=dict.fromkeys(names, chunks))
    with _checkpointer() as checkpointer:
        checkpointer.save((weights / part).absolute(), args=save, force=True)
    about = {
        "tensors": {
            name: {
                "dtype": index[name].dtype,
                "shape": list(index[name].shape),
                "sha256": _sha256(tensors[name]),
            }
            for name in names
        },
        "files": {
            str(file.relative_to(weights)): file.stat().st_size
            for file in sorted((weights / part).rglob("*"))
            if file.is_file()
        },
    }
    _write_json(weights / f"{part}.json", about)


def _part_problems(weights: pathlib.Path, part: str) -> list[str]:
    """Lists why a part is not as it was written; tensors are not read."""
    if not (weights / f"{part}.json").is_file():
        return [f"{part} is missing: its conversion did not end, run it again"]
    problems: list[str] = []
    for name, size in read_json(weights / f"{part}.json")["files"].items():
        file = weights / name
        if not file.is_file():
            problems.append(f"{WEIGHTS_DIRECTORY}/{name} is missing")
        elif file.stat().st_size != size:
            problems.append(
                f"{WEIGHTS_DIRECTORY}/{name} has {file.stat().st_size} bytes, expected {size}"
            )
    return problems


def _sha256(data: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data).hexdigest()


def _write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Writes all of a file or nothing."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
