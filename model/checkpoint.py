"""Checkpoints: `config.json` beside safetensors files, as on the hub, or the Orbax form of that.

A parameter's path in the module tree is its tensor's name. Only the output head and the MTP head
stand at the top level; all else has the prefix `model.language_model.`, or `model.` in a checkpoint
that was never multimodal. `hub_layouts.py` knows how experts and quantised matrices are laid out.

Names and shapes are compared before anything is allocated, so that a wrong directory costs a second
and one message, not minutes and one message for each mistake. Then one parameter after the other is
read, straight into its final place: beyond the model itself no more is held than a block of a file,
and where the device has memory of its own, one parameter.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx
from jax.typing import DTypeLike

from model import checkpoint_files, checkpoint_orbax
from model.checkpoint_files import (
    DTYPES,
    WEIGHTS_FILE,
    Block,
    CheckpointError,
    StoredTensor,
    read_json,
)
from model.checkpoint_orbax import Progress
from model.config import ModelConfig
from model.hub_layouts import Piece, Recipe, recipes
from model.hub_quantization import UNUSED, schemes_of
from model.quantization import QuantizedWeight
from model.transformer import Transformer

CONFIG_FILE = "config.json"
QUANTIZATION_FILE = "hf_quant_config.json"

_PREFIX, _TEXT_ONLY_PREFIX = "model.language_model.", "model."
_TOP_LEVEL = ("lm_head.", "mtp.")
_VISION_PREFIX = "model.visual."
_ALWAYS_FLOAT32 = ("A_log", "dt_bias")
_ALIGNMENT = 64
"""In bytes, from which XLA takes an array of NumPy's over as it is, where memory is shared."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint."""

    model: Transformer
    notices: tuple[str, ...]
    """In words: what was left out, and what that means."""
    stored_bytes: int
    """Read from files."""


def load(directory: pathlib.Path, dtype: DTypeLike, progress: Progress | None = None) -> Checkpoint:
    """Loads a checkpoint.

    Args:
      directory: `config.json` and safetensors files (bfloat16, float16 or float32, or quantised as
        `hub_quantization` lists it; sharded or not), or an Orbax directory made from such a one.
      dtype: in memory, of the parameters that are not quantised; `A_log` and `dt_bias` are float32
        whatever this says.
      progress: hears of every block: bytes read, and bytes to read in all.

    Returns:
      The model. Without stored MTP tensors `model.mtp` is None, whatever the config promises.

    Raises:
      CheckpointError: listing every missing, surplus and misshapen tensor, before anything was
        allocated; or an Orbax directory whose bytes are not those that were written.
      ConfigError: naming every field that cannot be served.
    """
    hf_config, apart = read_json(directory / CONFIG_FILE), directory / QUANTIZATION_FILE
    config = ModelConfig.from_hf(hf_config)
    schemes = schemes_of(hf_config, read_json(apart) if apart.is_file() else {})
    index = read_index(directory)
    config, ignored, notices = _reconcile(config, index, bool(schemes))
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in index) else _TEXT_ONLY_PREFIX
    abstract = _abstract(config)
    expected = _expected(abstract, dtype, prefix)
    dtypes = {name: tensor.dtype for name, tensor in index.items()}
    wanted = recipes(expected, dtypes, schemes)
    every = [piece for recipe in wanted.values() for piece in recipe.pieces]
    problems = _compare(every, index, ignored)
    if problems:
        raise CheckpointError(f"{directory}: " + "; ".join(problems))
    read = (
        checkpoint_orbax.restore_blocks
        if checkpoint_orbax.is_orbax(directory)
        else checkpoint_files.read_blocks
    )
    if schemes and not any(isinstance(one.target, QuantizedWeight) for one in wanted.values()):
        notices += ("config.json has a quantization_config, and no tensor is quantised",)
    total = sum(index[piece.name].nbytes for piece in every)
    blocks = _watched(read(index, [piece.name for piece in every]), total, progress)
    leaves = [_assemble(recipe, blocks) for recipe in wanted.values()]
    model = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
    return Checkpoint(model, notices, total)


def save(
    directory: pathlib.Path, hf_config: Mapping[str, Any], model: Transformer, dtype: DTypeLike
) -> None:
    """Writes one safetensors file and `config.json`; `load` gives the same bits back.

    Args:
      directory: made if it does not exist.
      hf_config: the hub's `config.json` as a mapping; with `text_config` the names get the prefix
        of a multimodal checkpoint.
      model: the parameters.
      dtype: to store; `A_log` and `dt_bias` are stored in float32.
    """
    prefix = _PREFIX if "text_config" in hf_config else _TEXT_ONLY_PREFIX
    tensors = {
        name: np.asarray(leaf, _dtype_of(name, dtype))
        for name, leaf in _named_leaves(model, prefix).items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    # The metadata is what the hub's own loaders insist on.
    safetensors.numpy.save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    (directory / CONFIG_FILE).write_text(json.dumps(hf_config, indent=2) + "\n", encoding="utf-8")


def expected_tensors(config: ModelConfig, dtype: DTypeLike) -> dict[str, jax.ShapeDtypeStruct]:
    """Hub name, shape and dtype in memory of every parameter, without making one."""
    return _expected(_abstract(config), dtype, _PREFIX)


def read_index(directory: pathlib.Path) -> dict[str, StoredTensor]:
    """Reads what is stored, by hub name, without reading a tensor.

    Raises:
      CheckpointError: listing all files that are missing or damaged.
    """
    if checkpoint_orbax.is_orbax(directory):
        return checkpoint_orbax.read_index(directory)
    return checkpoint_files.read_index(directory)


def _reconcile(
    config: ModelConfig, index: Mapping[str, StoredTensor], quantised: bool
) -> tuple[ModelConfig, frozenset[str], tuple[str, ...]]:
    """Settles what config and files say differently, where one reading is plainly meant.

    Returns:
      The config as loaded, the names of stored tensors to leave alone, and what to tell a person.
    """
    notices: list[str] = []
    vision, mtp, head = (
        frozenset(name for name in index if name.startswith(prefix))
        for prefix in (_VISION_PREFIX, "mtp.", "lm_head.")
    )
    ignored = vision
    if vision:
        notices.append(f"{len(vision)} vision tensors ({_VISION_PREFIX}*) are not loaded")
    if config.mtp_num_hidden_layers and not mtp:
        config = dataclasses.replace(config, mtp_num_hidden_layers=0)
        notices.append(
            "config.json promises an MTP head (mtp_num_hidden_layers is 1) and there is no mtp.*"
            " tensor: drafting is off"
        )
    elif mtp and not config.mtp_num_hidden_layers:
        ignored |= mtp
        notices.append(
            f"{len(mtp)} mtp.* tensors are not loaded, since config.json promises no MTP head"
            " (mtp_num_hidden_layers is 0): drafting is off"
        )
    if config.tie_word_embeddings and head:
        ignored |= head
        notices.append("lm_head.* is not loaded, since config.json ties it to the embedding")
    for suffix, why in UNUSED.items() if quantised else ():
        if unused := frozenset(name for name in index if name.endswith(suffix)) - ignored:
            ignored |= unused
            notices.append(f"{len(unused)} tensors (*{suffix}) are not loaded: {why}")
    return config, ignored, tuple(notices)


def _compare(
    every: Iterable[Piece], index: Mapping[str, StoredTensor], ignored: frozenset[str]
) -> list[str]:
    """Lists every tensor that is missing, not asked for, or of a wrong shape or dtype."""
    wanted = {piece.name: piece for piece in every}
    problems = [f"missing {name} {wanted[name].shape}" for name in sorted(wanted.keys() - index)]
    problems += [f"surplus {name}" for name in sorted(index.keys() - wanted.keys() - ignored)]
    for name in sorted(wanted.keys() & index):
        stored, shape, dtypes = index[name], wanted[name].shape, wanted[name].dtypes
        if stored.shape != shape and (shape or stored.nbytes != DTYPES[stored.dtype].itemsize):
            problems.append(f"{name} has the shape {stored.shape}, expected {shape}")
        if stored.dtype not in dtypes:
            problems.append(f"{name} has the dtype {stored.dtype}, served: {', '.join(dtypes)}")
    return problems


def _watched(blocks: Iterator[Block], total: int, progress: Progress | None) -> Iterator[Block]:
    """Tells of every block."""
    done = 0
    if progress:
        progress(done, total)
    for block in blocks:
        done += block.data.nbytes
        if progress:
            progress(done, total)
        yield block
        del block  # or it would be held while the next one is read


def _assemble(recipe: Recipe, blocks: Iterator[Block]) -> jax.Array | QuantizedWeight:
    """Puts together one parameter from the blocks that come next, and puts it on the device."""
    target, leaves = recipe.target, dict[str, np.ndarray]()
    if isinstance(target, QuantizedWeight):
        fields = {field.name: getattr(target, field.name) for field in dataclasses.fields(target)}
        leaves = {
            name: _empty(leaf)
            for name, leaf in fields.items()
            if isinstance(leaf, jax.ShapeDtypeStruct)
        }
    else:
        leaves[""] = _empty(target)
    for piece in recipe.pieces:
        _place(piece, leaves[piece.field][(*piece.part, ...)], blocks)
    on_device = jax.block_until_ready(jax.device_put(leaves))
    if isinstance(target, QuantizedWeight):
        return dataclasses.replace(target, **on_device)
    return on_device[""]


def _place(piece: Piece, view: np.ndarray, blocks: Iterator[Block]) -> None:
    """Fills a part of a parameter with the blocks of one tensor."""
    left = math.prod(piece.shape)
    whole: list[np.ndarray] = []
    while left:
        block = next(blocks)
        left -= block.data.size
        data = block.data
        if view.dtype == np.uint8 and data.dtype.itemsize == 1:
            data = data.view(np.uint8)  # what is held as bits
        if piece.convert or not piece.shape:
            whole.append(data)
        else:
            view[block.rows] = data
    if whole:
        joined = np.concatenate(whole) if piece.shape else whole[0].reshape(())
        view[...] = piece.convert(joined) if piece.convert else joined


def _empty(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    size = math.prod(leaf.shape) * leaf.dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(leaf.dtype).reshape(leaf.shape)


def _abstract(config: ModelConfig) -> Transformer:
    return jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))


def _expected(
    abstract: Transformer, dtype: DTypeLike, prefix: str
) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, _dtype_of(name, dtype))
        for name, leaf in _named_leaves(abstract, prefix).items()
    }


def _named_leaves(model: Transformer, prefix: str) -> dict[str, Any]:
    """Leaves in the order of the tree, by hub name."""
    paths, _ = jax.tree_util.tree_flatten_with_path(model)
    named: dict[str, Any] = {}
    for path, leaf in paths:
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        named[name if name.startswith(_TOP_LEVEL) else prefix + name] = leaf
    return named


def _dtype_of(name: str, dtype: DTypeLike) -> np.dtype:
    return np.dtype(jnp.float32 if name.endswith(_ALWAYS_FLOAT32) else dtype)
