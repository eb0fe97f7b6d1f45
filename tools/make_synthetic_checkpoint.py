"""Makes a hub directory like Qwen3.6-35B-A3B's at a tenth of its size, with random weights.

    python tools/make_synthetic_checkpoint.py DIRECTORY --tokenizer HUB_DIRECTORY

Names, layout, dtypes and the number of files per gigabyte are the hub's, vision tower and MTP head
included; there are fewer layers and experts, and they are narrower. It says nothing of sense, and
takes as much memory and time to load and to serve as a real one of that size.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import safetensors.numpy  # noqa: E402
from byte_progress import ByteProgress  # noqa: E402

from model import checkpoint  # noqa: E402
from model.checkpoint_files import DTYPES, INDEX_FILE  # noqa: E402
from model.config import ModelConfig  # noqa: E402
from model.hub_layouts import recipes  # noqa: E402
from model.hub_quantization import schemes_of  # noqa: E402
from model.weight_layouts import LAYOUTS  # noqa: E402

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("generation_config.json", "vocab.json", "merges.txt"),
)
"""Copied where they are."""
INIT_STD = 0.02
QUANTIZATION: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "fp8": {
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        }
    },
    "nvfp4": {
        "quantization_config": {
            "quant_algo": "MIXED_PRECISION",
            "quant_method": "modelopt",
            "quantized_layers": {},
        }
    },
}
"""What `config.json` says of each layout (see `model/weight_layouts.py`)."""

Sizes = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype and shape."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=pathlib.Path, help="to make")
    parser.add_argument(
        "--tokenizer",
        type=pathlib.Path,
        default=ROOT / "model" / "demo",
        help="directory with a tokenizer.json (default: the embedded checkpoint)",
    )
    parser.add_argument("--layout", choices=QUANTIZATION, default="bfloat16")
    parser.add_argument("--layers", type=int, default=12, help="every fourth has full attention")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--width", type=int, default=1024, help="of the model")
    parser.add_argument("--vocabulary", type=int, default=248320, help="rows of embedding and head")
    parser.add_argument("--shard-gb", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def hub_config(options: argparse.Namespace) -> dict[str, Any]:
    """`config.json`: the hub's, with fewer layers and experts and another width."""
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": end_token(options.tokenizer),
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": options.width,
        "initializer_range": INIT_STD,
        "layer_types": [kinds[layer % 4] for layer in range(options.layers)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_experts": options.experts,
        "num_experts_per_tok": 8,
        "num_hidden_layers": options.layers,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "vocab_size": options.vocabulary,
    }
    vision = {
        "depth": 3,
        "hidden_size": 384,
        "in_channels": 3,
        "intermediate_size": 1536,
        "model_type": "qwen3_5_moe",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": options.width,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": vision,
        **QUANTIZATION[options.layout],
    }


def end_token(tokenizer: pathlib.Path) -> int | list[int]:
    """The end ids that the tokenizer's directory names."""
    for name in ("generation_config.json", "config.json"):
        if (tokenizer / name).is_file():
            said = json.loads((tokenizer / name).read_text(encoding="utf-8"))
            ids = said.get("eos_token_id", said.get("text_config", {}).get("eos_token_id"))
            if ids is not None:
                return ids
    return 0


def text_tensors(config: dict[str, Any], layout: str) -> Sizes:
    """What is loaded, as it is stored."""
    expected = checkpoint.expected_tensors(ModelConfig.from_hf(config), jnp.bfloat16)
    schemes = {scheme.format: scheme for scheme in schemes_of(config, {})}
    # Recipes follow what is there: of every matrix that is to be quantised, its first mark.
    there: dict[str, str] = {}
    for name in expected:
        storage = LAYOUTS[layout].storage(name)
        if storage is None:
            there[name] = "BF16"
            continue
        suffix, dtypes = schemes[storage.format].marks[0]
        experts, _, projection = name.rpartition(".")
        module = {
            "gate_up_proj": f"{experts}.0.gate_proj",
            "down_proj": f"{experts}.0.down_proj",
        }.get(projection, experts)
        there[module + suffix] = dtypes[0] if dtypes else "BF16"
    found = recipes(expected, there, tuple(schemes.values()))
    return {
        piece.name: (piece.dtypes[0], piece.shape)
        for recipe in found.values()
        for piece in recipe.pieces
    }


def vision_tensors(vision: dict[str, Any]) -> Sizes:
    """The vision tower, which is not loaded."""
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    merged = width * vision["spatial_merge_size"] ** 2
    patch = (vision["in_channels"], vision["temporal_patch_size"], *[vision["patch_size"]] * 2)
    shapes = {
        "patch_embed.proj": (width, *patch),
        "merger.norm": (width,),
        "merger.linear_fc1": (merged, merged),
        "merger.linear_fc2": (vision["out_hidden_size"], merged),
    }
    for block in range(vision["depth"]):
        shapes |= {
            f"blocks.{block}.norm1": (width,),
            f"blocks.{block}.norm2": (width,),
            f"blocks.{block}.attn.qkv": (3 * width, width),
            f"blocks.{block}.attn.proj": (width, width),
            f"blocks.{block}.mlp.linear_fc1": (inner, width),
            f"blocks.{block}.mlp.linear_fc2": (width, inner),
        }
    tensors: Sizes = {
        "model.visual.pos_embed.weight": ("BF16", (vision["num_position_embeddings"], width))
    }
    for name, shape in shapes.items():
        tensors[f"model.visual.{name}.weight"] = ("BF16", shape)
        tensors[f"model.visual.{name}.bias"] = ("BF16", shape[:1])
    return tensors


def random_tensor(name: str, dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Values of the magnitude that training leaves, so that activations stay finite."""
    rng = np.random.default_rng([seed, *name.encode()])
    if dtype == "U8":
        return rng.integers(0, 256, shape, np.uint8)
    if name.endswith(("weight_scale", "weight_scale_2", "weight_scale_inv")):
        # Of FP8 codes around 100, and of E2M1 codes of about 3 with two scales.
        usual = 1.0 if dtype == "F8_E4M3" else INIT_STD / (3 if "scale_2" in name else 100)
        values = np.full(shape, usual, np.float32)
    elif dtype == "F8_E4M3":
        values = np.clip(100 * rng.standard_normal(shape, np.float32), -448, 448)
    elif name.endswith("A_log"):
        values = np.log(rng.uniform(1, 16, shape))
    elif name.endswith(("dt_bias", "linear_attn.norm.weight")):
        values = np.ones(shape)
    else:
        std = 0.5 if ".conv1d." in name else INIT_STD
        values = rng.standard_normal(shape, np.float32)
        values *= std
    return values.astype(DTYPES[dtype])


def shards(tensors: Sizes, limit: int) -> Iterator[list[str]]:
    """Names of the tensors of each file, in order; files have `limit` bytes at most, if they can."""
    names: list[str] = []
    size = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        if names and size + nbytes > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    yield names


def make(options: argparse.Namespace) -> str:
    """Writes the directory; says in a line what is in it."""
    config = hub_config(options)
    tensors = text_tensors(config, options.layout) | vision_tensors(config["vision_config"])
    sizes = {n: math.prod(shape) * DTYPES[dtype].itemsize for n, (dtype, shape) in tensors.items()}
    options.directory.mkdir(parents=True, exist_ok=True)
    (options.directory / "config.json").write_text(json.dumps(config, indent=4) + "\n")
    for file in TOKENIZER_FILES:
        if (options.tokenizer / file).is_file():
            shutil.copyfile(options.tokenizer / file, options.directory / file)
    groups = list(shards(tensors, round(options.shard_gb * 1e9)))
    weight_map: dict[str, str] = {}
    progress, done, total = ByteProgress("writing"), 0, sum(sizes.values())
    progress(done, total)
    for number, names in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        shard = {name: random_tensor(name, *tensors[name], options.seed) for name in names}
        safetensors.numpy.save_file(shard, options.directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
        done += sum(sizes[name] for name in names)
        progress(done, total)
    table = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (options.directory / INDEX_FILE).write_text(json.dumps(table, indent=2) + "\n")
    return (
        f"{options.directory}: {len(tensors)} tensors in {len(groups)} files; {progress.summary()}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    print(make(parse_arguments(arguments)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
