"""Reads what XLA:GPU made of a program: its optimised HLO and its thunk sequence (kernel list)."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator

_ITEM_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "u64": 8, "s64": 8, "pred": 1}
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\w+)\[([\d,]*)\]\S* ([\w\-]+)\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_THUNK = re.compile(r"^( *)\d+: (k\w+) ")
# What moves bytes without computing; a fusion counts by its root.
_MOVES = frozenset({"copy", "transpose", "concatenate", "convert"})
# Thunks that make the host wait when they run outside a CUDA graph.
_HOST_DECIDES = frozenset({"kWhile", "kConditional"})
_HOST_TOUCHES = re.compile(r"^k(Host|Infeed|Outfeed|Recv|Send)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One HLO instruction outside fusions; `kind` is its opcode, or the root's opcode of a fusion."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} {self.dtype}{list(self.dims)}"

    @property
    def size(self) -> int:
        """Bytes of the result."""
        return math.prod(self.dims) * _ITEM_BYTES.get(self.dtype, 4)


@dataclasses.dataclass(frozen=True)
class Thunks:
    """What the host launches for one call."""

    launches: int
    """Thunks at the top level: 1 when the whole call is one CUDA graph."""
    kernels: int
    loops: int
    captured_loops: int
    """Loops that run inside a CUDA graph, with their bounds on the device."""
    host_syncs: int
    """Loops and branches whose bound or predicate the host reads, and host transfers."""


def instructions(hlo: str) -> Iterator[Instruction]:
    """Array-valued instructions outside fused computations."""
    roots = _fusion_roots(hlo)
    fused = False
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            fused = header.group(1) in roots
        elif not fused and (match := _INSTRUCTION.match(line)):
            name, dtype, dims, opcode = match.groups()
            if opcode == "fusion":
                called = re.search(r"calls=%?([\w.\-]+)", line)
                opcode = roots.get(called.group(1), "fusion") if called else "fusion"
            yield Instruction(name, dtype, tuple(int(d) for d in dims.split(",") if d), opcode)


def large_moves(hlo: str, shapes: Iterable[tuple[int, ...]], logits_dim: int) -> list[Instruction]:
    """Copies, transposes, concatenations and conversions of a weight or a cache.

    Args:
      hlo: optimised module text.
      shapes: of the weights and caches to look for, whose dimensions may come in any order. Anything
        from 16 MiB on counts too: merged weights have shapes of their own.
      logits_dim: results with this last dimension are logits.
    """
    wanted = {_key(shape) for shape in shapes}
    return [
        one
        for one in instructions(hlo)
        if one.kind in _MOVES
        and (_key(one.dims) in wanted or one.size >= 16 << 20)
        and one.dims[-1:] != (logits_dim,)
    ]


def written_floats(hlo: str, shapes: Iterable[tuple[int, ...]]) -> list[Instruction]:
    """Floating-point results outside fusions that have one of some shapes, axes in any order."""
    wanted = {_key(shape) for shape in shapes}
    return [
        one
        for one in instructions(hlo)
        if one.dtype in ("bf16", "f16", "f32")
        and one.kind not in ("parameter", "get-tuple-element", "bitcast")
        and _key(one.dims) in wanted
    ]


def dense_expert_products(hlo: str, expert_shapes: Iterable[tuple[int, ...]]) -> int:
    """Fused computations that read all experts' weights without slicing one out."""
    wanted = [re.escape("[" + ",".join(map(str, shape)) + "]") for shape in expert_shapes]
    reads_experts = re.compile(rf"({'|'.join(wanted)})\S* parameter\(")
    count = 0
    for body in _computation_bodies(hlo):
        if reads_experts.search(body) and re.search(r" (dot|convolution|reduce)\(", body):
            count += "dynamic-slice(" not in body
    return count


def read_thunks(sequence: str) -> Thunks:
    """Counts the thunks of `*thunk_sequence_after_thunk_passes.txt`."""
    graph_depth: int | None = None
    launches = kernels = loops = captured = syncs = 0
    for line in sequence.splitlines():
        match = _THUNK.match(line)
        if not match:
            continue
        depth, kind = len(match.group(1)), match.group(2)
        if graph_depth is not None and depth <= graph_depth:
            graph_depth = None
        launches += depth == 0
        kernels += kind in ("kCustomKernel", "kKernel")
        loops += kind == "kWhile"
        captured += kind == "kWhile" and graph_depth is not None
        syncs += graph_depth is None and kind in _HOST_DECIDES
        syncs += bool(_HOST_TOUCHES.match(kind))
        if kind == "kCommandBuffer" and graph_depth is None:
            graph_depth = depth
    return Thunks(launches, kernels, loops, captured, syncs)


def _key(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Same for shapes that differ by a transposition or by axes of length one."""
    return tuple(sorted(dim for dim in shape if dim > 1))


def _fusion_roots(hlo: str) -> dict[str, str]:
    """Opcode of the root of every computation that a fusion calls."""
    called = set(re.findall(r" fusion\(.*calls=%?([\w.\-]+)", hlo))
    roots: dict[str, str] = {}
    current = ""
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            current = header.group(1)
        elif current in called and (root := re.match(r"^\s+ROOT .*?\S+ ([\w\-]+)\(", line)):
            roots[current] = root.group(1)
    return roots


def _computation_bodies(hlo: str) -> Iterator[str]:
    body: list[str] = []
    for line in hlo.splitlines():
        if _COMPUTATION.match(line):
            body = []
        elif line.startswith("}"):
            yield "\n".join(body)
        else:
            body.append(line)
