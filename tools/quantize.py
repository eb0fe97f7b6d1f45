"""Makes a quantised hub directory from one in bfloat16, and says how far each matrix is off.

    python tools/quantize.py HUB_DIRECTORY DIRECTORY --format fp8

fp8    as the official FP8 checkpoints: blocks of 128 x 128 share a scale
int8   as compressed-tensors' `int-quantized`: a scale per row
nvfp4  as ModelOpt's mixed precision: experts and head NVFP4, attention and DeltaNet FP8 with a scale
       per matrix, MTP as it was. Only weights are quantised: there are no scales of activations.

Scales are taken from the largest magnitude; nothing is calibrated. One tensor after the other is read.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from byte_progress import ByteProgress

from model.checkpoint_files import (
    INDEX_FILE,
    CheckpointError,
    StoredTensor,
    read_blocks,
    read_index,
    read_json,
)
from model.quantization import (
    QuantizationError,
    QuantizedWeight,
    quantization_error,
    quantize,
)
from model.weight_layouts import LAYOUTS

CONFIG_FILE = "config.json"
ERRORS_FILE = "quantization_errors.json"
FLOATS = ("BF16", "F16", "F32")
FORMATS = ("fp8", "int8", "nvfp4")
FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
ALGORITHMS = {"fp8_tensor": "FP8", "nvfp4": "W4A16_NVFP4"}

Tensors = dict[str, np.ndarray]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=pathlib.Path, help="hub directory, not quantised")
    parser.add_argument("directory", type=pathlib.Path, help="to make")
    parser.add_argument("--format", choices=FORMATS, default="fp8")
    parser.add_argument("--shard-gb", type=float, default=2.0, help="of a file, at most")
    parser.add_argument(
        "--errors", type=pathlib.Path, help=f"where to (default: DIRECTORY/{ERRORS_FILE})"
    )
    options = parser.parse_args(arguments)
    if options.directory.exists() and any(options.directory.iterdir()):
        parser.error(f"{options.directory} is not empty")
    return options


def matrices(name: str, tensor: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The matrices in a stored tensor, by the module's name; fused experts one by one."""
    if not (fused := FUSED.fullmatch(name)):
        yield name.removesuffix(".weight"), tensor
        return
    parts = ("gate_proj", "up_proj") if fused[2] == "gate_up_proj" else ("down_proj",)
    for expert, rows in enumerate(tensor):
        for part, matrix in zip(parts, np.split(rows, len(parts)), strict=True):
            yield f"{fused[1]}.{expert}.{part}", matrix


def tensors_of(module: str, weight: QuantizedWeight) -> Tensors:
    """A quantised matrix as its scheme stores it."""
    codes, scales = np.asarray(weight.codes), np.asarray(weight.scales)
    if weight.format == "int8":
        return {f"{module}.weight": codes, f"{module}.weight_scale": scales}
    if weight.format == "nvfp4":
        return {
            f"{module}.weight": codes,
            f"{module}.weight_scale": scales.view(jnp.float8_e4m3fn),
            f"{module}.weight_scale_2": np.asarray(weight.global_scales).reshape(()),
        }
    codes = codes.view(jnp.float8_e4m3fn)
    if weight.format == "fp8_tensor":
        return {f"{module}.weight": codes, f"{module}.weight_scale": scales.reshape(())}
    return {f"{module}.weight": codes, f"{module}.weight_scale_inv": scales.astype(jnp.bfloat16)}


def quantization_config(format: str, formats: Mapping[str, str], kept: list[str]) -> dict[str, Any]:
    """What `config.json` says: `formats` of the quantised modules, and which ones are not."""
    if format == "fp8":
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": kept,
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        }
    if format == "int8":
        weights = {"num_bits": 8, "strategy": "channel", "symmetric": True, "type": "int"}
        return {
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "format": "int-quantized",
            "ignore": kept,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }
    layers = {
        module: {"quant_algo": ALGORITHMS[one]} | ({"group_size": 16} if one == "nvfp4" else {})
        for module, one in formats.items()
    }
    return {
        "ignore": kept,
        "quant_algo": "MIXED_PRECISION",
        "quant_method": "modelopt",
        "quantized_layers": layers,
    }


class ShardWriter:
    """Writes tensors into files of a bounded size, and at the end their index."""

    def __init__(self, directory: pathlib.Path, limit: int):
        """Makes the directory; `limit` is the bytes of a file, if a tensor has no more."""
        self._directory, self._limit = directory, limit
        self._waiting: Tensors = {}
        self._files: list[list[str]] = []
        self._bytes = self.total = 0
        directory.mkdir(parents=True, exist_ok=True)

    def add(self, tensors: Tensors) -> None:
        """Takes the tensors of one matrix, which stay together."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._waiting and self._bytes + size > self._limit:
            self._write()
        self._waiting |= {name: np.ascontiguousarray(t) for name, t in tensors.items()}
        self._bytes += size
        self.total += size

    def finish(self) -> None:
        """Writes what is left; names the files by their number."""
        self._write()
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._files, 1):
            file = f"model-{number:05}-of-{len(self._files):05}.safetensors"
            self._part(number).rename(self._directory / file)
            weight_map |= dict.fromkeys(names, file)
        table = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
        (self._directory / INDEX_FILE).write_text(json.dumps(table, indent=2) + "\n")

    def _write(self) -> None:
        self._files.append(list(self._waiting))
        part = self._part(len(self._files))
        safetensors.numpy.save_file(self._waiting, part, metadata={"format": "pt"})
        self._waiting, self._bytes = {}, 0

    def _part(self, number: int) -> pathlib.Path:
        return self._directory / f"part-{number}"


def read(index: Mapping[str, StoredTensor], name: str) -> np.ndarray:
    """A whole stored tensor."""
    blocks = [block.data for block in read_blocks(index, [name])]
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def check(source: pathlib.Path, config: Mapping[str, Any], index: Mapping[str, StoredTensor]):
    """Raises CheckpointError when the source is quantised already."""
    others = sorted({one.dtype for one in index.values()} - set(FLOATS))
    if "quantization_config" in config or others:
        raise CheckpointError(f"{source} is quantised already: {', '.join(others) or CONFIG_FILE}")


def convert(options: argparse.Namespace) -> tuple[dict[str, QuantizationError], str]:
    """Writes the directory.

    Returns:
      The errors by matrix, those of all experts of a layer together, and in words what was done.
    """
    config = read_json(options.source / CONFIG_FILE)
    index = read_index(options.source)
    check(options.source, config, index)
    layout = LAYOUTS[options.format]
    writer = ShardWriter(options.directory, round(options.shard_gb * 1e9))
    formats: dict[str, str] = {}
    kept: list[str] = []
    errors: dict[str, QuantizationError] = {}
    progress, done = ByteProgress("quantising"), 0
    total = sum(stored.nbytes for stored in index.values())
    progress(done, total)
    for name, stored in index.items():
        tensor, storage = read(index, name), layout.storage(name)
        done += stored.nbytes
        progress(done, total)
        if storage is None or (storage.format == "nvfp4" and tensor.shape[-1] % 16):
            if name.endswith(".weight") and tensor.ndim == 2:
                kept.append(name.removesuffix(".weight"))
            writer.add({name: tensor})
            continue
        for module, matrix in matrices(name, tensor):
            weight = quantize(matrix, storage.format)
            writer.add(tensors_of(module, weight))
            formats[module] = storage.format
            row = re.sub(r"\.experts\.\d+\.", ".experts.*.", module)
            error = quantization_error(matrix, weight)
            errors[row] = errors.get(row, QuantizationError()) + error
    writer.finish()
    said = quantization_config(options.format, formats, kept)
    text = json.dumps(config | {"quantization_config": said}, indent=2)
    (options.directory / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    for file in options.source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not made_here(file.name):
            shutil.copyfile(file, options.directory / file.name)
    size = f"{total / 1e9:.3f} GB -> {writer.total / 1e9:.3f} GB"
    return errors, f"{options.directory}: {size}; {progress.summary()}"


def made_here(name: str) -> bool:
    """Whether a file of this name is made anew, not copied."""
    return name in (CONFIG_FILE, INDEX_FILE, ERRORS_FILE)


def error_row(error: QuantizationError) -> dict[str, float]:
    """For JSON."""
    return {
        "relative": error.relative,
        "largest": error.largest,
        "bits_per_weight": error.bits_per_weight,
        "weights": error.weights,
    }


def table(errors: Mapping[str, QuantizationError]) -> str:
    """A line per matrix, and one for all."""
    rows = dict(errors) | {"all": sum(errors.values(), QuantizationError())}
    width = max(map(len, rows))
    lines = [f"{'matrix':<{width}}  relative error  largest error  bits per weight"]
    lines += [
        f"{name:<{width}}  {one.relative:>14.5f}  {one.largest:>13.5g}  {one.bits_per_weight:>15.3f}"
        for name, one in rows.items()
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = parse_arguments(arguments)
    try:
        errors, summary = convert(options)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    report = {"format": options.format, "matrices": {n: error_row(e) for n, e in errors.items()}}
    file = options.errors or options.directory / ERRORS_FILE
    file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(table(errors))
    print(summary)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
