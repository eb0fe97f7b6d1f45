"""Checkpoints in the hub's layout: `config.json` beside safetensors files.

A parameter's path in the module tree is its tensor's name. Only the output head and the MTP head
stand at the top level; all else has the prefix `model.language_model.`, or `model.` in a checkpoint
that was never multimodal. Routed experts are fused (`experts.gate_up_proj` [E, 2F, D], gate rows
first, `experts.down_proj` [E, D, F]) or one tensor per expert and projection.

Names and shapes are compared before anything is allocated, so that a wrong directory costs a second
and one message, not minutes and one message for each mistake.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx
from jax.typing import DTypeLike

from model.config import ModelConfig
from model.transformer import Transformer

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"

_PREFIX, _TEXT_ONLY_PREFIX = "model.language_model.", "model."
_TOP_LEVEL = ("lm_head.", "mtp.")
_VISION_PREFIX = "model.visual."
_ALWAYS_FLOAT32 = ("A_log", "dt_bias")
_DTYPES = ("BF16", "F16", "F32")
_PER_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(?:gate|up|down)_proj\.weight")


class CheckpointError(ValueError):
    """A directory that cannot be loaded; the message lists all that is wrong with it."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint; `notices` say in words what was left out and what that means."""

    model: Transformer
    notices: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """What a file's header says about one tensor."""

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stored tensor and the part of a parameter that it fills."""

    name: str
    shape: tuple[int, ...]
    part: tuple[int | slice, ...] = ()


def load(directory: pathlib.Path, dtype: DTypeLike) -> Checkpoint:
    """Loads a checkpoint.

    Args:
      directory: `config.json` and safetensors files (bfloat16, float16 or float32; sharded or not).
      dtype: of the parameters in memory; `A_log` and `dt_bias` are float32 whatever this says.

    Returns:
      The model. Without stored MTP tensors `model.mtp` is None, whatever the config promises.

    Raises:
      CheckpointError: listing every missing, surplus and misshapen tensor; nothing was allocated.
      ConfigError: naming every field that cannot be served.
    """
    config = ModelConfig.from_hf(_read_json(directory / CONFIG_FILE))
    index = read_index(directory)
    config, ignored, notices = _reconcile(config, index)
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in index) else _TEXT_ONLY_PREFIX
    abstract = _abstract(config)
    expected = _expected(abstract, dtype, prefix)
    pieces = _pieces(expected, index)
    problems = _compare([p for group in pieces.values() for p in group], index, ignored)
    if problems:
        raise CheckpointError(f"{directory}: " + "; ".join(problems))
    with contextlib.ExitStack() as stack:
        files = {
            # pread and not mmap: page faults on mapped files are slow on unified-memory machines.
            file: stack.enter_context(safetensors.safe_open(file, "numpy", backend="pread"))
            for file in {stored.file for stored in index.values()}
        }
        leaves = [
            _read(pieces[name], leaf, {p.name: files[index[p.name].file] for p in pieces[name]})
            for name, leaf in expected.items()
        ]
    return Checkpoint(jax.tree.unflatten(jax.tree.structure(abstract), leaves), notices)


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
    """Reads the headers of the files that the index names, or without one of all there are.

    Raises:
      CheckpointError: a file is missing or damaged, or two files hold the same tensor.
    """
    if (directory / INDEX_FILE).exists():
        files = sorted(set(_read_json(directory / INDEX_FILE)["weight_map"].values()))
    else:
        files = sorted(path.name for path in directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory}: no *.safetensors file")
    problems: list[str] = []
    index: dict[str, StoredTensor] = {}
    for file in (directory / name for name in files):
        try:
            with safetensors.safe_open(file, "numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 (no mapping)
                    header = opened.get_slice(name)
                    stored = StoredTensor(file, header.get_dtype(), tuple(header.get_shape()))
                    if name in index:
                        problems.append(f"{name} is in {index[name].file.name} and in {file.name}")
                    index[name] = stored
        except (OSError, safetensors.SafetensorError) as error:
            problems.append(f"{file.name} cannot be read ({error})")
    if problems:
        raise CheckpointError(f"{directory}: " + "; ".join(problems))
    return index


def _reconcile(
    config: ModelConfig, index: Mapping[str, StoredTensor]
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
    return config, ignored, tuple(notices)


def _pieces(
    expected: Mapping[str, jax.ShapeDtypeStruct], index: Mapping[str, StoredTensor]
) -> dict[str, list[Piece]]:
    """For every parameter the stored tensors that make it up: one, or some for each expert."""
    split = {match[1] for name in index if (match := _PER_EXPERT.fullmatch(name))}
    pieces: dict[str, list[Piece]] = {}
    for name, leaf in expected.items():
        experts = name.rpartition(".")[0]
        if name in index or experts not in split:
            pieces[name] = [Piece(name, leaf.shape)]
        elif name.endswith(".down_proj"):
            pieces[name] = [
                Piece(f"{experts}.{expert}.down_proj.weight", leaf.shape[1:], (expert,))
                for expert in range(leaf.shape[0])
            ]
        else:
            half = leaf.shape[1] // 2
            pieces[name] = [
                Piece(
                    f"{experts}.{expert}.{part}_proj.weight", (half, leaf.shape[2]), (expert, rows)
                )
                for expert in range(leaf.shape[0])
                for part, rows in (("gate", slice(0, half)), ("up", slice(half, None)))
            ]
    return pieces


def _compare(
    pieces: Iterable[Piece], index: Mapping[str, StoredTensor], ignored: frozenset[str]
) -> list[str]:
    """Lists every tensor that is missing, not asked for, or of a wrong shape or dtype."""
    wanted = {piece.name: piece for piece in pieces}
    problems = [f"missing {name} {wanted[name].shape}" for name in sorted(wanted.keys() - index)]
    problems += [f"surplus {name}" for name in sorted(index.keys() - wanted.keys() - ignored)]
    for name in sorted(wanted.keys() & index):
        stored, shape = index[name], wanted[name].shape
        if stored.shape != shape:
            problems.append(f"{name} has the shape {stored.shape}, expected {shape}")
        if stored.dtype not in _DTYPES:
            problems.append(f"{name} has the dtype {stored.dtype}, served: {', '.join(_DTYPES)}")
    return problems


def _read(pieces: list[Piece], leaf: jax.ShapeDtypeStruct, files: Mapping[str, Any]) -> jax.Array:
    """Reads one parameter, casts it and puts it on the device."""
    if not pieces[0].part:
        [piece] = pieces
        return jnp.asarray(files[piece.name].get_tensor(piece.name).astype(leaf.dtype, copy=False))
    whole = np.empty(leaf.shape, leaf.dtype)
    for piece in pieces:
        whole[piece.part] = files[piece.name].get_tensor(piece.name)
    return jnp.asarray(whole)


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


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None
