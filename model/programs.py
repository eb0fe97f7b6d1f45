"""The compiled programs: what is jitted, what is donated, and how the compiler is told to build them.

Parameters cross `jit` as flat leaves (measured with 640 arrays: 2.2 ms a call, 5.6 ms as a module).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from model import decode, prefill, slots
from model.kernels import forms
from model.state import DecodeShape

GPU_COMPILER_OPTIONS: dict[str, Any] = {
    # With WHILE the loops are part of the CUDA graph, so a whole decode call is one launch and no
    # loop bound is read by the host. The default minimum size would leave short bodies out.
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
    ),
    "xla_gpu_graph_min_graph_size": 1,
    # Merging products that share an input concatenates their weights in every round.
    "xla_gpu_dot_merger_threshold_mb": 0,
}


def compiler_options(platform: str) -> dict[str, Any] | None:
    """How XLA is told to compile for a platform, "cpu" or "gpu"."""
    return GPU_COMPILER_OPTIONS if platform == "gpu" else None


def build(
    treedef: Any,
    shape: DecodeShape,
    platform: str,
    switched_off: frozenset[str] = frozenset(),
) -> dict[str, Callable[..., Any]]:
    """All programs by name, jitted and not yet compiled.

    Args:
      treedef: of the flattened `Transformer`.
      shape: what the decode state is made for.
      platform: "cpu" or "gpu", where the programs will run.
      switched_off: kernels to do without, see `kernels.forms`.

    Returns:
      "decode" (leaves, state, inputs, draft_length), one program per draft length; "prefill" and
      "score" (leaves, state, *arguments of `prefill_chunk`); "insert", "release" and
      "set_draft_cap" (state, ...). Each donates the state.
    """
    options = compiler_options(platform)

    def run_decode(leaves: Any, state: Any, inputs: Any, draft_length: int) -> Any:
        model = jax.tree.unflatten(treedef, leaves)
        return decode.decode_rounds(model, state, inputs, shape, draft_length)

    def run_prefill(leaves: Any, state: Any, *arguments: Any) -> Any:
        return prefill.prefill_chunk(jax.tree.unflatten(treedef, leaves), state, *arguments)

    def run_score(leaves: Any, state: Any, *arguments: Any) -> Any:
        model = jax.tree.unflatten(treedef, leaves)
        return prefill.score_chunk(model, state, *arguments, shape=shape)

    def jit(function: Callable[..., Any], state: int, static: tuple[int, ...] = ()) -> Any:
        # jax keeps one cache per function: without an object of its own each executor of the process
        # would count, and keep alive, the programs of all.
        @functools.wraps(function)
        def own(*arguments: Any) -> Any:
            with forms.switched_off(switched_off):
                return function(*arguments)

        return jax.jit(own, donate_argnums=state, static_argnums=static, compiler_options=options)

    return {
        "decode": jit(run_decode, 1, (3,)),
        "prefill": jit(run_prefill, 1),
        "score": jit(run_score, 1),
        "insert": jit(slots.insert, 0),
        "release": jit(slots.release, 0),
        "set_draft_cap": jit(slots.set_draft_cap, 0),
    }
