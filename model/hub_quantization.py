"""How the hub stores quantised matrices: the tensors of each scheme, and which config means which.

    quant_method        tensors of a matrix [O, I], beside what only activations need
    fp8                 weight F8_E4M3 [O, I], weight_scale_inv [O / 128, I / 128] (a multiplier)
    modelopt, FP8       weight F8_E4M3 [O, I], weight_scale, a scalar
    modelopt, NVFP4     weight U8 [O, I / 2], weight_scale F8_E4M3 [O, I / 16], weight_scale_2, a scalar
    compressed-tensors  nvfp4-pack-quantized: weight_packed U8 [O, I / 2], weight_scale F8_E4M3
                        [O, I / 16], weight_global_scale, a scalar that divides
                        int-quantized: weight I8 [O, I], weight_scale [O, 1]
    gptq                qweight I32 [I / 8, O], qzeros I32 [I / g, O / 8], scales [I / g, O], g_idx [I]
    awq                 qweight I32 [I, O / 8], qzeros I32 [I / g, O / 8], scales [I / g, O]

Formats as read by vLLM 0.33 (`model_executor/layers/quantization/`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from model.config import ConfigError

Convert = Callable[[np.ndarray], np.ndarray]
MODELOPT_ALGORITHMS = ("FP8", "NVFP4", "W4A16_NVFP4")
COMPRESSED_FORMATS = ("nvfp4-pack-quantized", "int-quantized")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble k of a word, lowest first, is this column of its eight."""

UNUSED = {
    ".input_scale": "activations are not quantised",
    ".input_global_scale": "activations are not quantised",
    ".k_scale": "keys are quantised without it, if at all",
    ".v_scale": "values are quantised without it, if at all",
    ".g_idx": "groups are neighbours, as desc_act says",
}
"""Suffixes of tensors that lie beside quantised matrices and that nothing reads, and why."""

_F8, _FLOATS = ("F8_E4M3",), ("BF16", "F16", "F32")


class SchemeTensor(NamedTuple):
    """One of the tensors that a matrix is stored in."""

    field: str
    """Of the `QuantizedWeight`."""
    suffix: str
    dtypes: tuple[str, ...]
    shape: Callable[[int, int], tuple[int, ...]] = lambda rows, columns: (rows, columns)
    """From rows and columns of the matrix."""
    convert: Convert | None = None
    """See `hub_layouts.Piece`."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How a quantised matrix is stored."""

    format: str
    """A key of `quantization.FORMATS`."""
    block: tuple[int, int]
    """Rows and columns that share a scale; 0: all there are."""
    tensors: tuple[SchemeTensor, ...]
    marks: tuple[tuple[str, tuple[str, ...]], ...]
    """Suffixes with dtypes (none: any) of which one says that a matrix is stored so."""

    def has(self, module: str, stored: Mapping[str, str]) -> bool:
        """Whether a matrix is stored so; `stored` are dtypes by name."""
        found = ((stored.get(module + suffix), dtypes) for suffix, dtypes in self.marks)
        return any(dtype is not None and dtype in (dtypes or (dtype,)) for dtype, dtypes in found)

    def block_of(self, rows: int, columns: int) -> tuple[int, int]:
        """The block of a matrix."""
        return self.block[0] or rows, self.block[1] or columns


def schemes_of(hf_config: Mapping[str, Any], apart: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """The schemes in which a checkpoint may hold matrices; none where it is not quantised.

    Args:
      hf_config: the parsed `config.json`.
      apart: the parsed `hf_quant_config.json`, where ModelOpt says it too; empty without.

    Raises:
      ConfigError: naming the field, its value and what is served.
    """
    text = hf_config.get("text_config", hf_config)
    said = hf_config.get("quantization_config") or text.get("quantization_config")
    said = said or ({"quant_method": "modelopt", **apart} if apart else None)
    if not said:
        return ()
    readers = {
        "fp8": _fp8,
        **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mixed"), _modelopt),
        "compressed-tensors": _compressed_tensors,
        "gptq": _gptq,
        "awq": _awq,
    }
    _require("quant_method", said.get("quant_method"), tuple(readers))
    return readers[said["quant_method"]](said)


def _require(field: str, value: Any, served: tuple[Any, ...]) -> None:
    if value not in served:
        listed = ", ".join(repr(one) for one in served)
        raise ConfigError(f"quantization_config.{field} is {value!r}, served: {listed}")


def _fp8(said: Mapping[str, Any]) -> tuple[Scheme, ...]:
    _require("fmt", said.get("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"))
    block = said.get("weight_block_size")
    if block is None:
        return (_fp8_tensor(),)
    if len(block) != 2 or not all(isinstance(side, int) and side > 0 for side in block):
        raise ConfigError(
            f"quantization_config.weight_block_size is {block!r}, must be two positive integers"
        )
    rows, columns = block
    scales = SchemeTensor(
        "scales", ".weight_scale_inv", _FLOATS, lambda o, i: (-(-o // rows), -(-i // columns))
    )
    return (
        Scheme(
            "fp8_block",
            (rows, columns),
            (SchemeTensor("codes", ".weight", _F8), scales),
            ((".weight_scale_inv", ()), (".weight", _F8)),
        ),
    )


def _modelopt(said: Mapping[str, Any]) -> tuple[Scheme, ...]:
    said = said.get("quantization") or said
    algorithm = said.get("quant_algo")
    _require("quant_algo", algorithm, (*MODELOPT_ALGORITHMS, "MIXED_PRECISION"))
    layers = said.get("quantized_layers") or {}
    for name, layer in layers.items():
        _require(
            f"quantized_layers.{name}.quant_algo", layer.get("quant_algo"), MODELOPT_ALGORITHMS
        )
    for field, where in (
        ("", said),
        *((f"quantized_layers.{name}.", layers[name]) for name in layers),
    ):
        if "NVFP4" in str(where.get("quant_algo")):
            _require(f"{field}group_size", where.get("group_size", 16), (16,))
    return (
        _nvfp4(".weight", ".weight_scale_2", None),
        _fp8_tensor(),
    )


def _compressed_tensors(said: Mapping[str, Any]) -> tuple[Scheme, ...]:
    groups = said.get("config_groups") or {}
    formats = {name: group.get("format") or said.get("format") for name, group in groups.items()}
    for name, format in formats.items():
        _require(f"config_groups.{name}.format", format, COMPRESSED_FORMATS)
        weights = groups[name].get("weights") or {}
        if format == "nvfp4-pack-quantized":
            _require(
                f"config_groups.{name}.weights.group_size", weights.get("group_size", 16), (16,)
            )
        else:
            _require(f"config_groups.{name}.weights.num_bits", weights.get("num_bits", 8), (8,))
            _require(
                f"config_groups.{name}.weights.strategy", weights.get("strategy"), ("channel",)
            )
    if not formats:
        _require("format", said.get("format"), COMPRESSED_FORMATS)
    used = set(formats.values()) or {said["format"]}
    schemes = {
        "nvfp4-pack-quantized": _nvfp4(".weight_packed", ".weight_global_scale", _reciprocal),
        "int-quantized": Scheme(
            "int8",
            (1, 0),
            (
                SchemeTensor("codes", ".weight", ("I8",)),
                SchemeTensor("scales", ".weight_scale", _FLOATS, lambda o, i: (o, 1)),
            ),
            ((".weight", ("I8",)),),
        ),
    }
    return tuple(scheme for format, scheme in schemes.items() if format in used)


def _gptq(said: Mapping[str, Any]) -> tuple[Scheme, ...]:
    _require("bits", said.get("bits"), (4,))
    _require("desc_act", said.get("desc_act", False), (False,))
    # The first version of the format stores zero points less one.
    offset = {"gptq": 1, "gptq_v2": 0}
    version = said.get("checkpoint_format", "gptq")
    _require("checkpoint_format", version, tuple(offset))
    group = _group_size(said)
    return (
        Scheme(
            "int4",
            (1, group),
            (
                SchemeTensor("codes", ".qweight", ("I32",), lambda o, i: (i // 8, o), _gptq_codes),
                *_integer_scales(group, partial(_gptq_zeros, offset=offset[version])),
            ),
            ((".qweight", ()),),
        ),
    )


def _awq(said: Mapping[str, Any]) -> tuple[Scheme, ...]:
    _require("bits", said.get("bits"), (4,))
    _require("version", str(said.get("version", "gemm")).lower(), ("gemm",))
    _require("zero_point", said.get("zero_point", True), (True,))
    group = _group_size(said)
    return (
        Scheme(
            "int4",
            (1, group),
            (
                SchemeTensor("codes", ".qweight", ("I32",), lambda o, i: (i, o // 8), _awq_codes),
                *_integer_scales(group, _awq_zeros),
            ),
            ((".qweight", ()),),
        ),
    )


def _group_size(said: Mapping[str, Any]) -> int:
    group = said.get("group_size")
    if not isinstance(group, int) or group < 2:
        raise ConfigError(f"quantization_config.group_size is {group!r}, must be 2 or more")
    return group


def _fp8_tensor() -> Scheme:
    return Scheme(
        "fp8_tensor",
        (0, 0),
        (
            SchemeTensor("codes", ".weight", _F8),
            SchemeTensor("scales", ".weight_scale", _FLOATS, lambda o, i: ()),
        ),
        ((".weight", _F8), (".weight_scale", _FLOATS)),
    )


def _nvfp4(codes: str, shared: str, convert: Convert | None) -> Scheme:
    return Scheme(
        "nvfp4",
        (1, 16),
        (
            SchemeTensor("codes", codes, ("U8",), lambda o, i: (o, i // 2)),
            SchemeTensor("scales", ".weight_scale", _F8, lambda o, i: (o, i // 16)),
            SchemeTensor("global_scales", shared, ("F32",), lambda o, i: (), convert),
        ),
        ((codes, ("U8",)), (shared, ()), (".weight_scale", _F8)),
    )


def _integer_scales(group: int, zeros: Convert) -> tuple[SchemeTensor, SchemeTensor]:
    return (
        SchemeTensor("scales", ".scales", _FLOATS, lambda o, i: (-(-i // group), o), np.transpose),
        SchemeTensor(
            "zero_points", ".qzeros", ("I32",), lambda o, i: (-(-i // group), o // 8), zeros
        ),
    )


def _reciprocal(divisor: np.ndarray) -> np.ndarray:
    return np.asarray(np.float32(1) / divisor)


def _nibbles(words: np.ndarray) -> np.ndarray:
    """Words [R, N] of 32 bits -> their nibbles [R, 8 N], lowest first."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    return (
        ((words.view(np.uint32)[..., None] >> shifts) & 15).astype(np.uint8).reshape(len(words), -1)
    )


def _pairs(codes: np.ndarray) -> np.ndarray:
    """Two columns of codes in a byte, the even one in the low nibble."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _gptq_codes(words: np.ndarray) -> np.ndarray:
    # A word holds eight neighbours of a row of the matrix, in the order of the bytes in memory.
    return np.ascontiguousarray(words.T, "<i4").view(np.uint8)


def _gptq_zeros(words: np.ndarray, offset: int) -> np.ndarray:
    return _nibbles(words).T + np.uint8(offset)


def _awq_columns(words: np.ndarray) -> np.ndarray:
    """Words [R, N] -> values [R, 8 N] in the order of the columns."""
    columns = np.empty((len(words), words.shape[1], 8), np.uint8)
    columns[..., AWQ_ORDER] = _nibbles(words).reshape(columns.shape)
    return columns.reshape(len(words), -1)


def _awq_codes(words: np.ndarray) -> np.ndarray:
    return _pairs(_awq_columns(words).T)


def _awq_zeros(words: np.ndarray) -> np.ndarray:
    return _awq_columns(words).T
