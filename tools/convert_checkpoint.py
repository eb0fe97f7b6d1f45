"""Makes an Orbax directory from a hub directory: the same tensors bit for bit, with checksums.

    python tools/convert_checkpoint.py HUB_DIRECTORY ORBAX_DIRECTORY

Killed in the middle, the same command goes on. `--checkpoint` of the server takes either directory,
and both have the same fingerprint. Holds one layer in memory.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from byte_progress import ByteProgress

from model import checkpoint_files, checkpoint_orbax
from model.checkpoint_files import CheckpointError
from service.model_card import fingerprint, other_files, weights_fingerprint


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=pathlib.Path, help="hub directory")
    parser.add_argument(
        "target", type=pathlib.Path, help="Orbax directory: new, or to be completed"
    )
    parser.add_argument(
        "--verify", action="store_true", help="then restore everything and compare the checksums"
    )
    return parser.parse_args(arguments)


def convert(source: pathlib.Path, target: pathlib.Path) -> str:
    """Converts, and says in a line what was done.

    Raises:
      CheckpointError: the source is no hub directory, or the target holds something else, or its
        disk is too small.
    """
    if checkpoint_orbax.is_orbax(source):
        raise CheckpointError(f"{source} is an Orbax directory already")
    if target.exists() and any(target.iterdir()) and not checkpoint_orbax.is_orbax(target):
        raise CheckpointError(f"{target} is not empty, and no Orbax directory to be completed")
    index = checkpoint_files.read_index(source)
    require_space(target, sum(stored.nbytes for stored in index.values()))
    progress = ByteProgress("converting")
    done = checkpoint_orbax.convert(
        index, target, weights_fingerprint=weights_fingerprint(source), progress=progress
    )
    for file in other_files(source):
        shutil.copyfile(file, target / file.name)
    return (
        f"{target}: {len(index)} tensors in {done.parts} parts, {done.parts - done.written} of them"
        f" were there already; {progress.summary()}; fingerprint {fingerprint(target)}"
    )


def require_space(target: pathlib.Path, needed: int) -> None:
    """Raises CheckpointError when the disk cannot hold what the target still lacks."""
    disk = next(path for path in (target, *target.absolute().parents) if path.exists())
    free = shutil.disk_usage(disk).free
    there = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    if needed - there > free:
        raise CheckpointError(
            f"{target}: {(needed - there) / 1e9:.1f} GB are to be written, {free / 1e9:.1f} GB are"
            " free"
        )


def verify(target: pathlib.Path) -> str:
    """Restores every tensor and compares its checksum; says in a line how many there are.

    Raises:
      CheckpointError: naming what is missing or damaged.
    """
    index = checkpoint_orbax.read_index(target)
    total = sum(stored.nbytes for stored in index.values())
    progress, done = ByteProgress("verifying"), 0
    progress(done, total)
    for block in checkpoint_orbax.restore_blocks(index, index):
        done += block.data.nbytes
        progress(done, total)
    return f"{target}: {len(index)} tensors are as they were written; {progress.summary()}"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = parse_arguments(arguments)
    try:
        print(convert(options.source, options.target))
        if options.verify:
            print(verify(options.target))
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
