"""The layouts in which weights are published and held: how many bytes a tensor has in each."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Storage:
    """How matrices [..., out, in] lie in memory."""

    item_bits: int
    block: tuple[int, int]
    """Rows and columns that share a scale."""
    scale_bytes: int
    """Of one block."""
    matrix_bytes: int = 0
    """Of the scales of a whole matrix."""

    def size(self, shape: Sequence[int]) -> int:
        """Bytes of an array with its scales."""
        *leading, rows, columns = shape
        blocks = -(-rows // self.block[0]) * -(-columns // self.block[1])
        one = rows * columns * self.item_bits // 8 + blocks * self.scale_bytes + self.matrix_bytes
        return math.prod(leading) * one


_BLOCK_FP8 = Storage(8, (128, 128), 2)
_FP8 = Storage(8, (1 << 30, 1 << 30), 4, 4)
_NVFP4 = Storage(4, (1, 16), 1, 8)
_ALL_DENSE = r"\.(self_attn|linear_attn|shared_expert)\.(?!in_proj_[ab]\.)\w+_(proj|qkv|z)\.weight$"
_EXPERTS = r"\.experts\."


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """A way to store weights."""

    summary: str
    dtype: str
    """Of what no rule names."""
    rules: tuple[tuple[str, Storage | None], ...] = ()
    """Patterns of tensors' names, the first that matches counts; None: in `dtype`."""

    def size(self, name: str, tensor: jax.ShapeDtypeStruct) -> int:
        """Bytes of a tensor."""
        storage = next((one for pattern, one in self.rules if re.search(pattern, name)), None)
        return storage.size(tensor.shape) if storage else tensor.size * tensor.dtype.itemsize


LAYOUTS = {
    "float32": WeightLayout("float32", "float32"),
    "bfloat16": WeightLayout("bfloat16, as published", "bfloat16"),
    "fp8": WeightLayout(
        "FP8, official: blocks of 128 x 128, MTP too; embedding, head, routers bfloat16",
        "bfloat16",
        ((f"{_EXPERTS}|{_ALL_DENSE}", _BLOCK_FP8),),
    ),
    "nvfp4": WeightLayout(
        "NVFP4, ModelOpt mix: experts and head 4 bits, attention and DeltaNet FP8, MTP bfloat16",
        "bfloat16",
        (("^mtp", None), (rf"{_EXPERTS}|^lm_head\.", _NVFP4), (_ALL_DENSE, _FP8)),
    ),
    "nvfp4-ct": WeightLayout(
        "NVFP4, compressed-tensors: experts and attention 4 bits, DeltaNet, head, MTP bfloat16",
        "bfloat16",
        ((r"^mtp|\.linear_attn\.", None), (f"{_EXPERTS}|{_ALL_DENSE}", _NVFP4)),
    ),
}
"""By name; which matrices are quantised is what the published checkpoints do."""
_QUANT_METHODS = {"fp8": "fp8", "modelopt": "nvfp4", "compressed-tensors": "nvfp4-ct"}


def layout_of(hf_config: Mapping[str, Any], dtype: str) -> WeightLayout:
    """The layout of a checkpoint, by its parsed config.json; what is not quantised is in `dtype`.

    A method that is not known counts as not quantised: the plan is then too large, never too small.
    """
    text = hf_config.get("text_config", hf_config)
    quantised = hf_config.get("quantization_config") or text.get("quantization_config") or {}
    name = _QUANT_METHODS.get(quantised.get("quant_method", ""), dtype)
    return dataclasses.replace(LAYOUTS[name], dtype=dtype)
