"""Records what transformers computes, for tests without torch: `python tools/make_goldens.py`.

Writes one file per random model of `tests/reference_weights.py`, and one of rotary positions, into
`tests/golden/`. Weights are not stored: they follow from their names. Needs the extra `parity`.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import reference_weights  # noqa: E402
from reference_weights import Recipe  # noqa: E402

FOLDER = ROOT / "tests" / "golden"
REPLY_TOKENS = 64
DRAFT_DEPTH = 3
SAMPLED_POSITIONS = (0, 1, 2, 3, 4, 7, 8, 31, 32, 63, 64, 65, 100, 127, 128)
MOST_FLOAT32_ERROR = 3e-5
LEAST_LEAD = 1e-3


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Records reference outputs of transformers.")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder, default tests/golden")
    parser.add_argument(
        "--only", choices=sorted(reference_weights.BY_NAME), help="one model instead of all"
    )
    return parser.parse_args()


def sampled_positions(lengths: tuple[int, ...]) -> np.ndarray:
    """Positions of every row that are recorded whole, int32 [rows, positions]."""
    shortest = min(lengths)
    inside = [position for position in SAMPLED_POSITIONS if position < shortest - 1 - DRAFT_DEPTH]
    # The last token, and the last one that all depths of drafting have a true next token for.
    return np.asarray(
        [[*inside, length - 1 - DRAFT_DEPTH, length - 1] for length in lengths], np.int32
    )


def record(recipe: Recipe) -> dict[str, np.ndarray]:
    """Runs the reference on a recipe's batch.

    Args:
      recipe: the model and its tokens.

    Returns:
      The arrays of one golden file, by name.

    Raises:
      SystemExit: the random model is so ill-conditioned that float32 settles nothing.
    """
    import torch
    import transformers

    import torch_reference

    reference = torch_reference.build(recipe)
    tokens_BT, valid_BT, lengths = recipe.tokens_BT, recipe.valid_BT, recipe.lengths
    positions = sampled_positions(lengths)

    def sample(array: np.ndarray) -> np.ndarray:
        return np.stack([row[at] for row, at in zip(array, positions, strict=True)])

    logits_BTV = reference.logits(tokens_BT, lengths)
    layers = reference.layers(tokens_BT)
    reply, lead = reference.greedy(tokens_BT[0, : lengths[0]], REPLY_TOKENS)
    arrays = {
        "tokens": tokens_BT,
        "positions": positions,
        "logits": logits_BTV[valid_BT],
        "reply": np.asarray(reply, np.int32),
    }
    for name, array in layers.items():
        kept = array.astype(np.int8) if name.endswith("experts") else array
        arrays[f"layers.{name}"] = sample(kept)
    hidden_BTD = layers["hidden"]
    for depth in range(1, DRAFT_DEPTH + 1):
        next_tokens_BT = np.roll(tokens_BT, -depth, axis=1)
        hidden_BTD, draft_logits_BTV = reference.draft(hidden_BTD, next_tokens_BT)
        arrays[f"draft.{depth}.hidden"] = sample(hidden_BTD)
        arrays[f"draft.{depth}.logits"] = sample(draft_logits_BTV)
    # Last: this changes the reference in place.
    reference.model.double()
    exact_BTV = reference.logits(tokens_BT, lengths)
    float32_error = float(np.abs(exact_BTV - logits_BTV)[valid_BT].max())
    if float32_error > MOST_FLOAT32_ERROR or lead < LEAST_LEAD:
        raise SystemExit(
            f"{recipe.name}: float32 moves the logits by {float32_error:.1e} (at most"
            f" {MOST_FLOAT32_ERROR:.0e}) and the greedy reply leads by {lead:.1e} (at least"
            f" {LEAST_LEAD:.0e}): choose another seed"
        )
    about = {
        "hf_config": recipe.hf_config,
        "lengths": lengths,
        "seed": recipe.seed,
        "gain": recipe.gain,
        "fingerprint": recipe.fingerprint(),
        "float32_error": float32_error,
        "least_lead": lead,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return {"about": np.asarray(json.dumps(about)), **arrays}


def record_rotary() -> dict[str, np.ndarray]:
    """Rotary angles at positions that differ on all three axes, of the published model's shape."""
    import torch_reference

    positions_3BT = reference_weights.axes_positions()
    cos, sin = torch_reference.rotary(reference_weights.PUBLISHED_ROTARY, positions_3BT)
    return {"positions": positions_3BT, "cos": cos, "sin": sin}


def main() -> None:
    """Writes the files and says how large they are."""
    arguments = parse_arguments()
    arguments.output.mkdir(parents=True, exist_ok=True)
    files = {}
    for recipe in reference_weights.RECIPES:
        if arguments.only in (None, recipe.name):
            files[recipe.name] = record(recipe)
    if arguments.only is None:
        files["rotary"] = record_rotary()
    for name, arrays in files.items():
        path = arguments.output / f"{name}.npz"
        np.savez_compressed(path, **arrays)
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
