"""The layouts in which weights are published and held: how many bytes a tensor has in each."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from model import checkpoint
from model.config import ModelConfig
from model.quantization import QuantizedWeight, abstract
from model.transformer import Transformer


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
    format: str = ""
    """A key of `quantization.FORMATS`."""

    def size(self, shape: Sequence[int]) -> int:
        """Bytes of an array with its scales."""
        *leading, rows, columns = shape
        blocks = -(-rows // self.block[0]) * -(-columns // self.block[1])
        one = rows * columns * self.item_bits // 8 + blocks * self.scale_bytes + self.matrix_bytes
        return math.prod(leading) * one


_WHOLE = 1 << 30
_BLOCK_FP8 = Storage(8, (128, 128), 2, format="fp8_block")
_FP8 = Storage(8, (_WHOLE, _WHOLE), 4, 4, format="fp8_tensor")
_NVFP4 = Storage(4, (1, 16), 1, 8, format="nvfp4")
_INT8 = Storage(8, (1, _WHOLE), 4, format="int8")
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

    def storage(self, name: str) -> Storage | None:
        """How a tensor is quantised; None if it is not."""
        return next((one for pattern, one in self.rules if re.search(pattern, name)), None)

    def in_memory(
        self, name: str, tensor: jax.ShapeDtypeStruct
    ) -> jax.ShapeDtypeStruct | QuantizedWeight:
        """Shapes and dtypes of what a tensor becomes when it is loaded from this layout."""
        storage = self.storage(name)
        if storage is None:
            return tensor
        if not name.endswith("gate_up_proj"):
            return abstract(tensor.shape, storage.format)
        # Gate and up projection are stored apart, with scales of their own.
        *_, rows, columns = tensor.shape
        half = abstract((rows // 2, columns), storage.format)
        block = (math.gcd(rows // 2, half.block[0]), half.block[1])
        groups = 1 if half.global_scales is None else 2
        return abstract(tensor.shape, storage.format, block, groups)

    def size(self, name: str, tensor: jax.ShapeDtypeStruct) -> int:
        """Bytes of a tensor."""
        storage = self.storage(name)
        return storage.size(tensor.shape) if storage else tensor.size * tensor.dtype.itemsize


LAYOUTS = {
    "float32": WeightLayout("float32", "float32"),
    "bfloat16": WeightLayout("bfloat16, as published", "bfloat16"),
    "fp8": WeightLayout(
        "FP8, official: blocks of 128 x 128, MTP too; embedding, head, routers bfloat16",
        "bfloat16",
        ((f"{_EXPERTS}|{_ALL_DENSE}", _BLOCK_FP8),),
    ),
    "int8": WeightLayout(
        "INT8, compressed-tensors: a scale per row, MTP and head too; embedding, routers bfloat16",
        "bfloat16",
        ((rf"{_EXPERTS}|{_ALL_DENSE}|^lm_head\.", _INT8),),
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


def abstract_model(config: ModelConfig, layout: WeightLayout | None = None) -> Transformer:
    """The model as shapes and dtypes in memory; without a layout in float32."""
    layout = layout or LAYOUTS["float32"]
    leaves = checkpoint.expected_tensors(config, jnp.dtype(layout.dtype))
    abstract_leaves = [layout.in_memory(name, leaf) for name, leaf in leaves.items()]
    treedef = jax.tree.structure(jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    return jax.tree.unflatten(treedef, abstract_leaves)


def layout_of(hf_config: Mapping[str, Any], dtype: str) -> WeightLayout:
    """The layout of a checkpoint, by its parsed config.json; what is not quantised is in `dtype`.

    A method that is not known counts as not quantised: the plan is then too large, never too small.
    """
    text = hf_config.get("text_config", hf_config)
    quantised = hf_config.get("quantization_config") or text.get("quantization_config") or {}
    name = _QUANT_METHODS.get(quantised.get("quant_method", ""), dtype)
    if name == "nvfp4-ct" and quantised.get("format") == "int-quantized":
        name = "int8"
    return dataclasses.replace(LAYOUTS[name], dtype=dtype)
