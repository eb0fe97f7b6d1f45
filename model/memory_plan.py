"""What serving needs in device memory, from the config and the options alone: nothing is loaded.

Weights and state have the shapes of the very functions that make them, so they are exact. Only the
workspace of the compiled programs is an estimate.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from model import checkpoint
from model.cache import AttentionCache, DeltaNetCache
from model.config import LINEAR_ATTENTION, ModelConfig
from model.costs import replay_bytes
from model.state import DecodeShape, init_inputs, init_state
from model.weight_layouts import WeightLayout

GIB, MIB = 1 << 30, 1 << 20
MTP_HEAD = "MTP head"
KV_DTYPES: tuple[str, ...] = ("bfloat16", "float8_e4m3fn", "float32")
"""Of keys and values."""
PARTS = (
    (MTP_HEAD, r"^mtp\."),
    ("norms", r"norm\.weight$"),
    ("routed experts", r"\.experts\."),
    ("shared experts", r"\.shared_expert\."),
    ("routers", r"\.mlp\."),
    ("attention", r"\.self_attn\."),
    ("DeltaNet", r"\.linear_attn\."),
    ("output head", r"^lm_head\."),
    ("embedding", r"\.embed_tokens\."),
)
"""Parts of the model by the tensors' names; the first pattern that matches counts."""


class DoesNotFitError(ValueError):
    """More memory is needed than there is; the message has the plan as a table."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the device by purpose."""

    weights: Mapping[str, int]
    """By part, see `PARTS`."""
    kv_cache: int
    """Keys and values of the layers, all pages."""
    mtp_kv_cache: int
    """The same of the MTP head."""
    recurrent_state: int
    """DeltaNet states and convolution inputs of all slots."""
    replay_inputs: int
    """What DeltaNet keeps of draft tokens until they are accepted, all slots."""
    request_state: int
    """Settings, token counts, masks and page tables of all slots."""
    workspace: int
    """Temporary memory of the largest program: an estimate."""

    @property
    def total(self) -> int:
        return sum(size for _, size in self.rows())

    @property
    def state(self) -> int:
        """All but weights and workspace."""
        return self.total - sum(self.weights.values()) - self.workspace

    def summary(self) -> str:
        """The plan in a line."""
        parts = {
            "weights": sum(self.weights.values()),
            "state": self.state,
            "workspace (estimate)": self.workspace,
        }
        listed = ", ".join(f"{name} {gibibytes(size)}" for name, size in parts.items())
        return f"{gibibytes(self.total)} ({listed})"

    def rows(self) -> list[tuple[str, int]]:
        """Every item with its bytes."""
        rows = [(f"weights: {part}", size) for part, size in self.weights.items()]
        names = [field.name for field in dataclasses.fields(self)][1:]
        return rows + [(name.replace("_", " "), getattr(self, name)) for name in names]


def plan_memory(
    config: ModelConfig,
    shape: DecodeShape,
    *,
    layout: WeightLayout,
    kv_dtype: DTypeLike,
    prefill_chunk: int,
) -> MemoryPlan:
    """Adds up what a server of this shape holds.

    Args:
      config: the model.
      shape: what the decode program is compiled for; without drafts the MTP head is not counted.
      layout: of the weights.
      kv_dtype: of keys and values.
      prefill_chunk: tokens per prefill call.
    """
    state = jax.eval_shape(lambda: init_state(config, shape, kv_dtype))
    inputs = jax.eval_shape(lambda: init_inputs(shape, config.vocab_size))
    kv_cache = _bytes([c for c in state.caches if isinstance(c, AttentionCache)])
    mtp_kv_cache = _bytes(state.mtp_cache)
    delta_net = _bytes([c for c in state.caches if isinstance(c, DeltaNetCache)])
    replay_inputs = shape.slots * replay_bytes(config, shape.draft_length)
    weights = weight_bytes(config, layout)
    if not shape.draft_length:
        weights.pop(MTP_HEAD, None)
    return MemoryPlan(
        weights=weights,
        kv_cache=kv_cache,
        mtp_kv_cache=mtp_kv_cache,
        recurrent_state=delta_net - replay_inputs,
        replay_inputs=replay_inputs,
        request_state=_bytes((state, inputs)) - kv_cache - mtp_kv_cache - delta_net,
        workspace=workspace_bytes(config, shape, prefill_chunk),
    )


def weight_bytes(config: ModelConfig, layout: WeightLayout) -> dict[str, int]:
    """Bytes of the weights by part, in the order of `PARTS` from the end."""
    # One layer of each kind stands for all of it: tracing forty takes seconds.
    kinds = tuple(dict.fromkeys(config.layer_types))
    counts = collections.Counter(config.layer_types)
    sizes = dict.fromkeys((part for part, _ in reversed(PARTS)), 0)
    sample = dataclasses.replace(config, layer_types=kinds)
    for name, tensor in _tensors(sample, layout.dtype).items():
        part = next(part for part, pattern in PARTS if re.search(pattern, name))
        index = re.match(r"model\.language_model\.layers\.(\d+)\.", name)
        copies = counts[kinds[int(index[1])]] if index else 1
        sizes[part] += copies * layout.size(name, tensor)
    return {part: size for part, size in sizes.items() if size}


def workspace_bytes(config: ModelConfig, shape: DecodeShape, prefill_chunk: int) -> int:
    """Estimates the temporary memory of the largest program.

    The factors are read off the programs that XLA makes for a GB10 (`tools/inspect_program.py`,
    Qwen3.6-35B-A3B in bfloat16, 4 to 40 layers, 4 to 64 slots, chunks of 128 and 512). Decode holds
    six rows of logits per token that it verifies; a scored chunk one per token; prefill holds float32
    activations of every DeltaNet layer, which XLA does not share between layers, and the chosen
    experts' outputs.
    """
    logits = 4 * config.vocab_size
    decode = 6.2 * logits * shape.slots * (shape.draft_length + 1)
    delta_net = 6.4 * 4 * config.linear_value_dim * config.layer_types.count(LINEAR_ATTENTION)
    experts = 1.3 * 4 * config.num_experts_per_tok * config.hidden_size
    return round(max(decode, prefill_chunk * max(logits, delta_net + experts)))


def fit(
    config: ModelConfig,
    shape: DecodeShape,
    usable: int | None,
    *,
    all_pages: bool = False,
    **options: Any,
) -> tuple[DecodeShape, MemoryPlan]:
    """Gives up pages until the plan fits, down to those of one conversation of full length.

    Args:
      config: the model.
      shape: with as many pages as one would like.
      usable: bytes; None: all that are needed.
      all_pages: give up none.
      **options: of `plan_memory`.

    Returns:
      The shape with the pages that fit, and its plan.

    Raises:
      DoesNotFitError: not even those fit.
    """
    plan = plan_memory(config, shape, **options)
    if usable is None:
        return shape, plan
    excess = plan.total - usable
    if excess > 0 and not all_pages:
        page = (plan.kv_cache + plan.mtp_kv_cache) // shape.pages
        least = 1 + -(-shape.max_context // shape.page_size)
        pages = max(min(least, shape.pages), shape.pages - -(-excess // max(page, 1)))
        shape = dataclasses.replace(shape, pages=pages)
        plan = plan_memory(config, shape, **options)
    require(plan, usable)
    return shape, plan


def require(plan: MemoryPlan, usable: int) -> None:
    """Raises DoesNotFitError, with the plan, when it needs more bytes than may be used."""
    if plan.total > usable:
        rows = [(name, [gibibytes(size)]) for name, size in plan.rows()]
        rows += [("needed", [gibibytes(plan.total)]), ("may be used", [gibibytes(usable)])]
        raise DoesNotFitError(
            f"{gibibytes(plan.total)} are needed, {gibibytes(usable)} may be used\n{table(rows)}"
        )


def gibibytes(size: int) -> str:
    """Spells bytes in GiB, small ones in MiB."""
    return f"{size / GIB:.3f} GiB" if abs(size) >= GIB / 10 else f"{size / MIB:.1f} MiB"


def table(rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Sets rows of a label and cells in columns."""
    rows = list(rows)
    label = max(len(name) for name, _ in rows)
    width = max(len(cell) for _, cells in rows for cell in cells)
    return "\n".join(
        f"{name:<{label}}" + "".join(f"  {cell:>{width}}" for cell in cells) for name, cells in rows
    )


@functools.cache
def _tensors(config: ModelConfig, dtype: str) -> Mapping[str, jax.ShapeDtypeStruct]:
    return checkpoint.expected_tensors(config, dtype)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
