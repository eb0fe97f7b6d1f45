"""How the hub lays out parameters: which stored tensors make up a parameter. No file is touched.

Routed experts are fused (`experts.gate_up_proj` [E, 2F, D], gate rows first, `experts.down_proj`
[E, D, F]) or one tensor per expert and projection. A quantised matrix is several tensors (its scheme,
see `hub_quantization.py`), one set per expert and projection. Which scheme a matrix has is read off
its tensors: the lists of exceptions in config files are not always true.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from model.hub_quantization import Scheme, SchemeTensor
from model.quantization import FORMATS, QuantizedWeight, abstract

FLOATS = ("BF16", "F16", "F32")

_PER_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(?:gate|up|down)_proj\.\w+")
_NEVER_QUANTISED = ("embed_tokens.weight",)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stored tensor and the part of a parameter that it fills."""

    name: str
    shape: tuple[int, ...]
    """As stored; of a scalar, which may be stored with axes of one, ()."""
    part: tuple[int | slice, ...] = ()
    dtypes: tuple[str, ...] = FLOATS
    """What it may be stored in, in the words of safetensors."""
    field: str = ""
    """Of the `QuantizedWeight`; empty: of a plain array."""
    convert: Callable[[np.ndarray], np.ndarray] | None = None
    """From the whole stored tensor to what it fills its part with; None: itself."""


class Recipe(NamedTuple):
    """A parameter, as shapes and dtypes in memory, and the pieces that make it up."""

    target: Any
    pieces: tuple[Piece, ...]


class Matrix(NamedTuple):
    """A stored matrix within a parameter: all of it, or one projection of one expert."""

    module: str
    rows: int
    columns: int
    expert: tuple[int, ...] = ()
    half: int = 0
    halves: int = 1


def recipes(
    expected: Mapping[str, Any], stored: Mapping[str, str], schemes: Sequence[Scheme]
) -> dict[str, Recipe]:
    """For every parameter how it is put together.

    Args:
      expected: parameters by hub name, as shapes and dtypes in memory if they are not quantised.
      stored: dtypes of the stored tensors by name.
      schemes: in which matrices may be quantised.
    """
    split = {match[1] for name in stored if (match := _PER_EXPERT.fullmatch(name))}
    found: dict[str, Recipe] = {}
    for name, leaf in expected.items():
        if name not in stored and name.rpartition(".")[0] in split:
            matrices = list(_of_experts(name, leaf.shape))
        elif name.endswith(".weight") and len(leaf.shape) == 2:
            matrices = [Matrix(name.removesuffix(".weight"), *leaf.shape)]
        else:
            found[name] = Recipe(leaf, (Piece(name, leaf.shape),))
            continue
        scheme = None if name.endswith(_NEVER_QUANTISED) else _scheme(matrices, stored, schemes)
        if scheme:
            found[name] = _quantised(leaf.shape, scheme, matrices)
        else:
            found[name] = Recipe(leaf, tuple(_plain(matrix) for matrix in matrices))
    return found


def _of_experts(name: str, shape: tuple[int, ...]) -> Iterator[Matrix]:
    experts, _, projection = name.rpartition(".")
    count, rows, columns = shape
    if projection == "down_proj":
        for expert in range(count):
            yield Matrix(f"{experts}.{expert}.down_proj", rows, columns, (expert,))
        return
    for expert in range(count):
        for half, part in enumerate(("gate_proj", "up_proj")):
            yield Matrix(f"{experts}.{expert}.{part}", rows // 2, columns, (expert,), half, 2)


def _scheme(
    matrices: list[Matrix], stored: Mapping[str, str], schemes: Sequence[Scheme]
) -> Scheme | None:
    """The scheme of the first matrix that has a tensor of any."""
    for matrix in matrices:
        for scheme in schemes:
            if scheme.has(matrix.module, stored):
                return scheme
    return None


def _plain(matrix: Matrix) -> Piece:
    rows = slice(matrix.half * matrix.rows, (matrix.half + 1) * matrix.rows)
    part = (*matrix.expert, rows) if matrix.halves > 1 else matrix.expert
    return Piece(f"{matrix.module}.weight", (matrix.rows, matrix.columns), part)


def _quantised(shape: tuple[int, ...], scheme: Scheme, matrices: list[Matrix]) -> Recipe:
    first = matrices[0]
    block = scheme.block_of(first.rows, first.columns)
    # A block must not reach from the gate's rows into those of the up projection.
    rows = math.gcd(first.rows, block[0]) if first.halves > 1 else block[0]
    has_global = FORMATS[scheme.format].has_global_scales
    target = abstract(shape, scheme.format, (rows, block[1]), first.halves if has_global else 1)
    pieces = tuple(
        _piece(matrix, tensor, block[0] // rows, target)
        for matrix in matrices
        for tensor in scheme.tensors
    )
    return Recipe(target, pieces)


def _piece(matrix: Matrix, tensor: SchemeTensor, repeat: int, target: QuantizedWeight) -> Piece:
    """A tensor of a matrix; of scales, every row stands for `repeat` rows of the target's."""
    shape = tensor.shape(matrix.rows, matrix.columns)
    whole = getattr(target, tensor.field)
    convert = tensor.convert
    if tensor.field == "global_scales":
        part: tuple[int | slice, ...] = (matrix.half,)
    else:
        count = whole.shape[-2] // matrix.halves
        part = (slice(matrix.half * count, (matrix.half + 1) * count),)
        if repeat > 1 and tensor.field == "scales":
            convert = partial(_repeat_rows, repeat=repeat, count=count)
    return Piece(
        matrix.module + tensor.suffix,
        shape,
        (*matrix.expert, *part),
        tensor.dtypes,
        tensor.field,
        convert,
    )


def _repeat_rows(scales: np.ndarray, repeat: int, count: int) -> np.ndarray:
    return np.repeat(scales, repeat, axis=0)[:count]
