"""Loads a checkpoint as the server does and tells size, speed and the most memory that it took.

    python tools/load_checkpoint.py DIRECTORY --dtype bfloat16

On the CPU the parameters are in this process, so the ratio says how much more than they need was
ever held. Exit code 1: more than `--limit` times their size.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import resource
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from byte_progress import ByteProgress

from model import checkpoint
from model.config import ConfigError
from service.memory import resident_bytes


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=pathlib.Path, help="hub or Orbax directory")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--limit", type=float, default=1.2, help="of peak memory over final size")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = parse_arguments(arguments)
    jax.block_until_ready(jnp.zeros(()))  # what JAX itself needs is not the checkpoint's
    before = resident_bytes()
    progress = ByteProgress("loading")
    try:
        loaded = checkpoint.load(options.checkpoint, jnp.dtype(options.dtype), progress)
    except (checkpoint.CheckpointError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 1
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.model))
    for notice in loaded.notices:
        print(notice)
    print(f"read {progress.summary()}")
    print(f"parameters {size / 1e6:.1f} MB, at most {peak / 1e6:.1f} MB held: {peak / size:.3f} x")
    return 0 if peak <= options.limit * size else 1


if __name__ == "__main__":
    raise SystemExit(main())
