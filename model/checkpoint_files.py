"""Tensors in safetensors files, read in blocks: a tensor never has to be in memory twice.

A file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and range
of bytes of every tensor) and the bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from types import EllipsisType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
BLOCK_BYTES = 16 << 20

DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "F8_E4M3": jnp.float8_e4m3fn,
        "F8_E5M2": jnp.float8_e5m2,
        "I16": np.int16,
        "F16": np.float16,
        "BF16": jnp.bfloat16,
        "I32": np.int32,
        "F32": np.float32,
        "I64": np.int64,
        "F64": np.float64,
    }.items()
}
"""NumPy's dtype by the name of the format."""


class CheckpointError(ValueError):
    """A directory that cannot be loaded; the message lists all that is wrong with it."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """What is known of a stored tensor without reading it."""

    file: pathlib.Path
    """Where it is: a safetensors file, or the Orbax checkpoint of a part of the model."""
    dtype: str
    """A key of `DTYPES`."""
    shape: tuple[int, ...]
    offset: int = 0
    """Of its first byte, in a safetensors file."""
    sha256: str = ""
    """Of its bytes; empty where nobody keeps it."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Block(NamedTuple):
    """Some rows of a stored tensor (of a scalar: all of it)."""

    name: str
    rows: slice | EllipsisType
    data: np.ndarray


def read_index(directory: pathlib.Path) -> dict[str, StoredTensor]:
    """Reads the headers of the files that the index names, or without one of all there are.

    Raises:
      CheckpointError: a file is missing or damaged, or two files hold the same tensor.
    """
    if (directory / INDEX_FILE).exists():
        files = sorted(set(read_json(directory / INDEX_FILE)["weight_map"].values()))
    else:
        files = sorted(path.name for path in directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory}: no *.safetensors file")
    problems: list[str] = []
    index: dict[str, StoredTensor] = {}
    for file in (directory / name for name in files):
        try:
            tensors = _read_header(file)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{file.name} cannot be read ({error})")
            continue
        problems += [
            f"{name} is in {index[name].file.name} and in {file.name}"
            for name in tensors.keys() & index
        ]
        index |= tensors
    if problems:
        raise CheckpointError(f"{directory}: " + "; ".join(problems))
    return index


def read_blocks(index: Mapping[str, StoredTensor], names: Iterable[str]) -> Iterator[Block]:
    """Reads tensors from first to last row, as they are stored.

    What the system keeps of the files in memory is given back at once: where the GPU shares that
    memory, nothing else would make room for it.
    """
    for name in names:
        stored = index[name]
        dtype = DTYPES[stored.dtype]
        rows, *inner = stored.shape or (1,)
        row_bytes = math.prod(inner) * dtype.itemsize
        step = max(1, BLOCK_BYTES // max(1, row_bytes))
        # Unbuffered: a page fault for every page of a mapped file is slow on unified memory.
        with stored.file.open("rb", buffering=0) as file:
            file.seek(stored.offset)
            for start in range(0, rows, step):
                data = np.empty((min(step, rows - start), *inner), dtype)
                _fill(file, data)
                if not stored.shape:
                    yield Block(name, ..., data.reshape(()))
                else:
                    yield Block(name, slice(start, start + len(data)), data)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(
                    file.fileno(), stored.offset, stored.nbytes, os.POSIX_FADV_DONTNEED
                )


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object; raises CheckpointError, with the path, when there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def _read_header(file: pathlib.Path) -> dict[str, StoredTensor]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"it has {size} bytes, its header alone would have {length}")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensor = StoredTensor(file, entry["dtype"], tuple(entry["shape"]), 8 + length + begin)
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} has the dtype {tensor.dtype}, known: {', '.join(DTYPES)}")
        if tensor.nbytes != end - begin:
            raise ValueError(f"{name} has {end - begin} bytes, expected {tensor.nbytes}")
        if tensor.offset + tensor.nbytes > size:
            raise ValueError(f"it has {size} bytes, {name} ends at {tensor.offset + tensor.nbytes}")
        tensors[name] = tensor
    return tensors


def _fill(file: Any, data: np.ndarray) -> None:
    """Reads as many bytes as the array has: one call may bring fewer."""
    view = data.reshape(-1).view(np.uint8).data
    while view:
        count = file.readinto(view)
        if not count:
            raise CheckpointError(f"{file.name} ends before its last tensor")
        view = view[count:]
