"""Predicts the memory that serving a model needs, from its config.json alone: no weights, no GPU.

Prints weights by part, the cost of one conversation, and how many conversations of full length fit
with and without speculation; `--plot` draws it (extra `bench`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from model import memory_plan  # noqa: E402
from model.config import ModelConfig  # noqa: E402
from model.memory_plan import GIB, KV_DTYPES, MTP_HEAD, MemoryPlan, gibibytes  # noqa: E402
from model.state import DecodeShape  # noqa: E402
from model.weight_layouts import LAYOUTS  # noqa: E402


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--config",
        type=pathlib.Path,
        default=ROOT / "model" / "demo",
        help="directory with a config.json, or the file (default: the embedded checkpoint)",
    )
    parser.add_argument("--memory-gib", type=float, default=121.0, help="of the machine")
    parser.add_argument(
        "--host-reserve-gib", type=float, default=8.0, help="left to system and host process"
    )
    parser.add_argument(
        "--kv-pool-gib", type=float, help="a pool of fixed size for conversations, to compare with"
    )
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS)[1:])
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="bfloat16")
    parser.add_argument("--max-context", type=int, help="default: the model's maximum")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--draft-length", type=int, default=3)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--prefill-chunk", type=int, default=512)
    parser.add_argument("--plot", type=pathlib.Path, help="file to draw to, .png or .svg")
    return parser.parse_args(arguments)


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Room for conversations of full length."""

    left: int
    """Bytes that weights, workspace and reserve leave."""
    conversations: float


class Planner:
    """The sums for one config and one set of options."""

    def __init__(self, options: argparse.Namespace):
        """Reads the config and nothing else."""
        file = options.config / "config.json" if options.config.is_dir() else options.config
        hub: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        hub.pop("quantization_config", None)  # the layouts to plan for are options
        self.options = options
        self.config = ModelConfig.from_hf(hub)
        self.vision_weights = vision_parameters(hub.get("vision_config"))
        longest = self.config.max_position_embeddings
        self.context = min(options.max_context or longest, longest)

    def plan(self, layout: str, kv_dtype: str, draft_length: int, slots: int = 1) -> MemoryPlan:
        """A server whose slots are all full."""
        pages = slots * -(-self.context // self.options.page_size)
        shape = DecodeShape(
            slots=slots,
            draft_length=draft_length if self.config.mtp_num_hidden_layers else 0,
            rounds=1,
            max_context=self.context,
            pages=pages,
            page_size=self.options.page_size,
            max_stop_ids=16,
            addressable_tokens=self.config.vocab_size,
        )
        return memory_plan.plan_memory(
            self.config,
            shape,
            layout=LAYOUTS[layout],
            kv_dtype=kv_dtype,
            prefill_chunk=self.options.prefill_chunk,
        )

    def workspace(self, draft_length: int) -> int:
        """Of the programs for all slots."""
        return self.plan("bfloat16", "bfloat16", draft_length, self.options.slots).workspace

    def capacity(self, layout: str, kv_dtype: str, draft_length: int) -> Capacity:
        """What fits beside the weights."""
        one = self.plan(layout, kv_dtype, draft_length)
        usable = (self.options.memory_gib - self.options.host_reserve_gib) * GIB
        left = round(usable) - sum(one.weights.values()) - self.workspace(draft_length)
        return Capacity(left, max(0.0, left / one.state))

    def drafts(self) -> dict[str, int]:
        """The draft lengths to compare."""
        return {"without speculation": 0, "with speculation": self.options.draft_length}


def vision_parameters(vision: dict[str, Any] | None) -> int:
    """Parameters of the vision tower, which is not loaded (biases included)."""
    if not vision:
        return 0
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    patch = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    block = 4 * width * (width + 1) + 2 * width * inner + inner + width + 4 * width
    merged = width * vision["spatial_merge_size"] ** 2
    merger = 2 * width + merged * (merged + 1) + (merged + 1) * vision["out_hidden_size"]
    embedding = (patch + 1) * width + vision["num_position_embeddings"] * width
    return embedding + vision["depth"] * block + merger


def weights_table(planner: Planner) -> str:
    """Weights by part and layout."""
    layouts = planner.options.layouts
    sizes = {name: memory_plan.weight_bytes(planner.config, LAYOUTS[name]) for name in layouts}
    rows = [("weights", layouts)]
    for part in sizes[layouts[0]]:
        rows.append((f"  {part}", [gibibytes(sizes[name][part]) for name in layouts]))
    rows.append(("  in all", [gibibytes(sum(sizes[name].values())) for name in layouts]))
    if planner.vision_weights:
        vision = gibibytes(2 * planner.vision_weights)
        rows.append(("  vision, bfloat16: not loaded", [vision] * len(layouts)))
    return memory_plan.table(rows)


def conversation_table(planner: Planner) -> str:
    """One conversation of full length by the type of keys and values."""
    plans = [planner.plan("bfloat16", kv, planner.options.draft_length) for kv in KV_DTYPES]
    plain = [planner.plan("bfloat16", kv, 0) for kv in KV_DTYPES]
    positions = -(-planner.context // planner.options.page_size) * planner.options.page_size
    title = f"one conversation of {planner.context} tokens, keys and values in"
    rows: list[tuple[str, list[str]]] = [(title, [*KV_DTYPES])]
    for label, sizes in {
        "  keys and values of one token": [f"{plan.kv_cache // positions} B" for plan in plans],
        "  + of one in the MTP head": [f"{plan.mtp_kv_cache // positions} B" for plan in plans],
        "  keys and values": [gibibytes(plan.kv_cache) for plan in plans],
        "  + of the MTP head": [gibibytes(plan.mtp_kv_cache) for plan in plans],
        "  recurrent state, float32": [gibibytes(plan.recurrent_state) for plan in plans],
        "  + inputs to replay": [gibibytes(plan.replay_inputs) for plan in plans],
        "  settings, counts, page table": [gibibytes(plan.request_state) for plan in plans],
        "  without speculation": [gibibytes(plan.state) for plan in plain],
        f"  with {planner.options.draft_length} draft tokens": [gibibytes(p.state) for p in plans],
    }.items():
        rows.append((label, sizes))
    return memory_plan.table(rows)


def capacity_table(planner: Planner) -> str:
    """Conversations that fit, by layout."""
    options = planner.options
    rows = [(f"{options.memory_gib:g} GiB", options.layouts)]
    reserve = gibibytes(round(options.host_reserve_gib * GIB))
    rows.append(("  left to the host", [reserve] * len(options.layouts)))
    workspace = gibibytes(planner.workspace(options.draft_length))
    label = f"  workspace, {options.slots} slots (estimate)"
    rows.append((label, [workspace] * len(options.layouts)))
    for kv_dtype in dict.fromkeys((options.kv_dtype, "float8_e4m3fn")):
        for name, drafts in planner.drafts().items():
            room = [planner.capacity(layout, kv_dtype, drafts) for layout in options.layouts]
            if kv_dtype == options.kv_dtype:
                cells = [gibibytes(one.left) if one.left > 0 else "none" for one in room]
                rows.append((f"  left for conversations, {name}", cells))
            label = f"  conversations, {kv_dtype}, {name}"
            rows.append((label, [f"{one.conversations:.2f}" for one in room]))
    return memory_plan.table(rows)


def pool_table(planner: Planner) -> str:
    """A pool of fixed size, ours beside the accounting of the known endpoint."""
    pool = planner.options.kv_pool_gib * GIB
    rows = [(f"a fixed pool of {planner.options.kv_pool_gib:g} GiB", ["blocks", "Tandem"])]
    for name, drafts in planner.drafts().items():
        blocks = block_bytes(planner.config, planner.context, drafts)
        ours = planner.plan("bfloat16", planner.options.kv_dtype, drafts).state
        rows.append((f"  one conversation, {name}", [gibibytes(blocks), gibibytes(ours)]))
        rows.append(("    such conversations", [f"{pool / blocks:.2f}", f"{pool / ours:.2f}"]))
    drafts = planner.options.draft_length
    head = memory_plan.weight_bytes(planner.config, LAYOUTS["bfloat16"]).get(MTP_HEAD, 0)
    workspace = planner.workspace(drafts) - planner.workspace(0)
    rows.append(("  speculation outside the pool: MTP head", ["", gibibytes(head)]))
    rows.append(("    + workspace (estimate)", ["", gibibytes(workspace)]))
    rows.append(("    in all", ["2.3 GiB", gibibytes(head + workspace)]))
    return memory_plan.table(rows)


def block_bytes(config: ModelConfig, context: int, drafts: int) -> int:
    """One conversation where pages and recurrent states come from one pool of equal blocks.

    So does vLLM: a block of each attention layer must be large enough for one DeltaNet layer's state
    (float32, with the convolution's inputs in bfloat16, one more per draft token); layers form groups
    as large as the number of attention layers; every DeltaNet group holds 2 + drafts blocks.
    """
    attention = config.layer_types.count("full_attention")
    groups = -(-(len(config.layer_types) - attention) // attention)
    conv_rows = config.linear_conv_kernel_dim - 1 + drafts
    state = 4 * config.linear_num_value_heads * config.linear_key_head_dim
    state = state * config.linear_value_head_dim + 2 * conv_rows * config.conv_dim
    token = 2 * 2 * config.num_key_value_heads * config.head_dim
    positions = 16 * -(-state // (16 * token))
    blocks = -(-context // positions) + groups * (2 + drafts)
    return blocks * (attention + bool(drafts)) * positions * token


def main(arguments: list[str] | None = None) -> int:
    """Prints the tables."""
    options = parse_arguments(arguments)
    planner = Planner(options)
    tables = [weights_table, conversation_table, capacity_table]
    if options.kv_pool_gib:
        tables.append(pool_table)
    print("\n\n".join(table(planner) for table in tables))
    print("\n" + "\n".join(f"{name}: {LAYOUTS[name].summary}" for name in options.layouts))
    if options.plot:
        from tools.memory_plot import draw

        draw(planner, options.plot)
        print(f"\n{options.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
