"""Compiles the programs for a device that is not here, and shows what the compiler made of them.

Needs no GPU, no CUDA and no weights: XLA compiles for the target's description (tools/targets/). With
`--target gb10` or `h200` the package's extra `inspect` must be installed. It proves structure (copies,
kernels, CUDA graphs, memory), not speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import re
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
GIB = 1 << 30
MEMORY_GIB = {"gb10": 121.0, "h200": 139.0}
BYTES_PER_SECOND = {"gb10": 232e9}
"""That streaming reads reach; the memory's nominal bandwidth is 273e9."""
SECONDS_PER_KERNEL = 2e-6
"""From one kernel of a CUDA graph to the next: an assumption."""
LARGE_BYTES = 1 << 20
"""Weights and caches from this size on must not be copied."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=("gb10", "h200", "cpu"), default="cpu")
    parser.add_argument(
        "--config",
        type=pathlib.Path,
        default=ROOT / "model" / "demo",
        help="directory with a config.json, or the file (default: the embedded checkpoint)",
    )
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--draft-length", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4, help="rounds per decode call")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--max-context", type=int, help="default: the model's maximum")
    parser.add_argument(
        "--pages",
        type=int,
        help="default: enough for one slot of maximum length and 4096 per other",
    )
    parser.add_argument("--prefill-chunk", type=int, default=512)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--weights",
        choices=("fp8", "int8", "nvfp4", "nvfp4-ct"),
        help="quantised as published (model/weight_layouts.py); default: none is",
    )
    parser.add_argument("--layers", type=int, help="only the first LAYERS layers (quicker)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(arguments)


def inspect(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compiles prefill and decode; returns one report per program."""
    with tempfile.TemporaryDirectory() as dump:
        # Read once, when the first program is compiled: set before JAX starts.
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        return compile_programs(options, pathlib.Path(dump))


def compile_programs(options: argparse.Namespace, dump: pathlib.Path) -> list[dict[str, Any]]:
    """See `inspect`."""
    import jax
    import jax.numpy as jnp

    from model import programs
    from model.config import ModelConfig
    from model.kernels.quantized_matmul.blocked import BLOCK_WEIGHTS
    from model.quantization import QuantizedWeight
    from model.state import DecodeShape, init_inputs, init_state
    from model.weight_layouts import LAYOUTS, abstract_model
    from tools import program_report

    config = ModelConfig.from_hf(read_config(options.config, options.layers))
    context = options.max_context or config.max_position_embeddings
    pages_per_slot = -(-context // options.page_size)
    shape = DecodeShape(
        slots=options.slots,
        draft_length=options.draft_length if config.mtp_num_hidden_layers else 0,
        rounds=options.rounds,
        max_context=context,
        pages=options.pages
        or 1
        + pages_per_slot
        + (options.slots - 1) * min(pages_per_slot, 4096 // options.page_size),
        page_size=options.page_size,
        max_stop_ids=16,
        addressable_tokens=config.vocab_size,
    )
    dtype = jnp.dtype(options.dtype)
    layout = dataclasses.replace(LAYOUTS[options.weights or options.dtype], dtype=options.dtype)
    model = abstract_model(config, layout)
    leaves, treedef = jax.tree.flatten(model)
    sharding = target_sharding(options.target)

    def there(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    def ints(*dims: int) -> Any:
        return there(jax.ShapeDtypeStruct(dims, jnp.int32))

    leaves = there(leaves)
    state = there(jax.eval_shape(lambda: init_state(config, shape, dtype)))
    inputs = there(jax.eval_shape(lambda: init_inputs(shape, config.vocab_size)))
    built = programs.build(treedef, shape, "cpu" if options.target == "cpu" else "gpu")
    scalar, chunk, table = ints(), ints(options.prefill_chunk), ints(pages_per_slot)
    calls = {
        "decode": (leaves, state, inputs, shape.draft_length),
        "prefill": (leaves, state, scalar, chunk, scalar, scalar, scalar, table),
    }
    state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    weights = jax.tree.leaves(model, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))
    quantised = [leaf for leaf in weights if isinstance(leaf, QuantizedWeight)]
    # What is dequantised at a time may be written out.
    quantised_shapes = {leaf.shape for leaf in quantised if leaf.size > BLOCK_WEIGHTS}
    plain = [leaf for leaf in weights if not isinstance(leaf, QuantizedWeight)]
    # Not the replay inputs: every round writes those anew.
    arrays = (*plain, *(getattr(c, "k_pages", None) or c.state_BWPR for c in state.caches))
    shapes = {x.shape for x in arrays if x.size * x.dtype.itemsize >= LARGE_BYTES}
    shapes = (shapes - {leaf.shape for leaf in quantised}) | quantised_shapes
    reports = []
    for name, arguments in calls.items():
        compiled = built[name].lower(*arguments).compile()
        report = report_program(name, compiled, dump, config, options.target, shapes)
        written = program_report.written_floats(compiled.as_text(), quantised_shapes)
        report["dequantised_weights"] = [str(one) for one in written]
        reports.append(report | {"state_bytes": state_bytes})
    reports[0] |= prediction(config, options, layout, reports[0])
    return reports


def prediction(
    config: Any, options: argparse.Namespace, layout: Any, report: dict[str, Any]
) -> dict[str, Any]:
    """How fast a decode round can be at most, by its bytes and its kernels; not measured."""
    import jax.numpy as jnp

    from model.costs import round_bytes

    if options.target not in BYTES_PER_SECOND:
        return {}
    drafts = options.draft_length if config.mtp_num_hidden_layers else 0
    item_bytes = jnp.dtype(options.dtype).itemsize
    moved = round_bytes(config, options.slots, drafts, item_bytes, layout)
    seconds = moved / BYTES_PER_SECOND[options.target]
    seconds += report["kernels"] * SECONDS_PER_KERNEL
    return {
        "round_bytes": moved,
        "predicted_rounds_per_second": round(1 / seconds, 1),
        "predicted_tokens_per_second": [
            round(options.slots * accepted / seconds, 1) for accepted in (1, drafts + 1)
        ],
    }


def target_sharding(target: str) -> Any:
    """Placement on the target device; None for the CPU that is here."""
    if target == "cpu":
        return None
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    description = (ROOT / "tools" / "targets" / f"{target}.cfg").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=description, topology="1x1x1"
    )
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("device",))
    return NamedSharding(mesh, PartitionSpec())


def report_program(
    name: str, compiled: Any, dump: pathlib.Path, config: Any, target: str, shapes: set
) -> dict[str, Any]:
    """What the compiler made of one program."""
    from tools import program_report

    memory = compiled.memory_analysis()
    hlo = compiled.as_text()
    width, hidden = config.hidden_size, config.moe_intermediate_size
    experts = [(config.num_experts, 2 * hidden, width), (config.num_experts, width, hidden)]
    moves = program_report.large_moves(hlo, shapes, config.vocab_size)
    report: dict[str, Any] = {
        "program": name,
        "arguments_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "large_copies": [f"{one.kind} {one.dtype}{list(one.dims)}" for one in moves],
        "dense_expert_products": program_report.dense_expert_products(hlo, experts),
    }
    if target != "cpu":
        (sequence,) = dump.glob(f"*jit_run_{name}.thunk_sequence_after_thunk_passes.txt")
        thunks = program_report.read_thunks(sequence.read_text())
        ptx = {
            target
            for file in dump.glob(f"*jit_run_{name}*.ptx")
            for target in re.findall(r"^\.target (\S+)", file.read_text(), re.MULTILINE)
        }
        report |= {
            "launches": thunks.launches,
            "loops": thunks.loops,
            "captured_loops": thunks.captured_loops,
            "host_syncs": thunks.host_syncs,
            "kernels": thunks.kernels,
            "kernels_per_layer": round(thunks.kernels / config.num_layers, 1),
            "ptx_targets": sorted(ptx),
        }
    return report


def read_config(path: pathlib.Path, layers: int | None) -> dict[str, Any]:
    """The hub config, cut to its first layers when asked."""
    file = path / "config.json" if path.is_dir() else path
    config = json.loads(file.read_text())
    if layers:
        text = config.get("text_config", config)
        text["layer_types"] = text["layer_types"][:layers]
        text["num_hidden_layers"] = layers
    return config


def table(reports: list[dict[str, Any]], target: str) -> str:
    """The reports side by side."""
    rows = [("", [report["program"] for report in reports])]
    labels = {
        "launches": "launches per call (1: one CUDA graph)",
        "loops": "loops",
        "captured_loops": "loops inside the CUDA graph",
        "host_syncs": "host syncs and host transfers inside a call",
        "large_copies": "weight- or cache-sized copies",
        "dequantised_weights": "quantised weights written out whole",
        "dense_expert_products": "products over all experts",
        "kernels": "kernels",
        "kernels_per_layer": "kernels per layer (all kernels / layers)",
        "arguments_bytes": "arguments: weights and state",
        "aliased_bytes": "state updated in place",
        "state_bytes": "state",
        "temporary_bytes": "temporary memory",
        "ptx_targets": "PTX target",
    }
    for key, label in labels.items():
        if key in reports[0]:
            rows.append((label, [show(report[key]) for report in reports]))
    text = "\n".join(
        f"{label:<46}" + "".join(f"{cell:>20}" for cell in cells) for label, cells in rows
    )
    copies = sorted({copy for report in reports for copy in report["large_copies"]})
    text += "".join(f"\n  copy: {copy}" for copy in copies)
    if "round_bytes" in reports[0]:
        low, high = reports[0]["predicted_tokens_per_second"]
        text += (
            f"\npredicted, not measured: {low:.0f} (no draft accepted) to {high:.0f} (all accepted)"
            f" tokens per second; {reports[0]['round_bytes'] / 1e9:.2f} GB a round at"
            f" {BYTES_PER_SECOND[target] / 1e9:.0f} GB/s, {SECONDS_PER_KERNEL * 1e6:.0f} us for each"
            " kernel (kernels in loops counted once; keys and values left out)"
        )
    if target in MEMORY_GIB:
        need = (
            max(report["arguments_bytes"] + report["temporary_bytes"] for report in reports) / GIB
        )
        verdict = "fits in" if need <= MEMORY_GIB[target] else "DOES NOT FIT in"
        text += f"\n{need:.1f} GiB {verdict} the {MEMORY_GIB[target]:.0f} GiB of {target}"
    return text


def show(value: Any) -> str:
    """A cell: sizes in MiB or GiB, lists by their length or content."""
    if isinstance(value, list):
        return ", ".join(value) if value and value[0].startswith("sm_") else str(len(value))
    if isinstance(value, int) and value >= 1 << 20:
        return f"{value / GIB:.2f} GiB" if value >= GIB else f"{value / (1 << 20):.1f} MiB"
    return str(value)


def main() -> int:
    """Prints the table."""
    options = parse_arguments()
    sys.path.insert(0, str(ROOT))
    reports = inspect(options)
    print(json.dumps(reports, indent=1) if options.json else table(reports, options.target))
    return 0


if __name__ == "__main__":
    sys.exit(main())
