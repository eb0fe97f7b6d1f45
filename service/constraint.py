"""Constraints of requests: checked, compiled, and written into receipts."""

import asyncio
import dataclasses
import struct
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

from service.engine.types import ConstraintFactory
from service.errors import Violation, invalid_argument, told
from service.pb import inference_pb2
from service.text.grammar import (
    MAX_GRAMMAR_BYTES,
    GrammarCompiler,
    GrammarError,
    GrammarKind,
    GrammarSource,
)


@dataclasses.dataclass(frozen=True, slots=True)
class ConstraintSource:
    """A constraint as it was written."""

    kind: GrammarKind
    source: GrammarSource
    field: str
    """Path of the request's field that it comes from."""

    @property
    def texts(self) -> Sequence[str]:
        """What it is written in: one text, for choices several."""
        return (self.source,) if isinstance(self.source, str) else self.source


def constraint_source(constraint: inference_pb2.Constraint) -> ConstraintSource | None:
    """Returns what a message holds; None when it is empty."""
    kind = constraint.WhichOneof("kind")
    if kind is None:
        return None
    field = f"constraint.{kind}"
    if kind == "choices":
        return ConstraintSource("choices", tuple(constraint.choices.texts), field)
    if kind == "grammar":
        return ConstraintSource("lark", constraint.grammar, field)
    source = "" if kind == "json_object" else cast(str, getattr(constraint, kind))
    return ConstraintSource(cast(GrammarKind, kind), source, field)


def check_constraint(message: inference_pb2.GenerateRequest) -> Iterable[Violation]:
    """Checks what needs no compiler."""
    if not message.HasField("constraint"):
        return
    source = constraint_source(message.constraint)
    if source is None:
        limit = "one of json_schema, json_object, regex, choices, grammar"
        yield Violation("constraint", "empty", limit)
        return
    if source.kind == "json_object" and not message.constraint.json_object:
        yield Violation(source.field, "false", "true, or the constraint unset")
    elif source.kind != "json_object" and not all(source.texts):
        yield Violation(source.field, "empty", "a text")
    if source.kind == "choices" and not source.texts:
        yield Violation(source.field, "0 texts", "at least 1 text")
    size = sum(len(text.encode()) for text in source.texts)
    if size > MAX_GRAMMAR_BYTES:
        yield Violation(source.field, f"{size} bytes", f"at most {MAX_GRAMMAR_BYTES} bytes")


def check_ends(
    message: inference_pb2.GenerateRequest, field: str, end_ids: Sequence[int]
) -> Iterable[Violation]:
    """Checks that a constrained reply may end where its constraint wants it to."""
    stopping = message.stopping
    if stopping.ignore_eos:
        yield Violation("stopping.ignore_eos", "true", f"unset beside {field}: it decides the end")
    if stopping.min_tokens:
        limit = f"unset beside {field}: it decides the end"
        yield Violation("stopping.min_tokens", f"{stopping.min_tokens}", limit)
    if not end_ids:
        yield Violation(field, "set", "unset: the checkpoint has no end id")


class Constraints:
    """Compiles the constraints of requests to one checkpoint; the compiler is made when needed."""

    def __init__(self, tokenizer_json: Path, end_ids: Sequence[int]) -> None:
        """Reads nothing yet."""
        self._tokenizer_json = tokenizer_json
        self._end_ids = end_ids
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()

    async def compile(self, source: ConstraintSource, vocab_size: int) -> ConstraintFactory:
        """Compiles a constraint without holding up the event loop.

        Raises:
          ServiceError: INVALID_ARGUMENT, it is none, or cannot be met.
        """
        return await asyncio.to_thread(self._compile, source, vocab_size)

    def _compile(self, source: ConstraintSource, vocab_size: int) -> ConstraintFactory:
        with self._lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self._tokenizer_json, vocab_size, self._end_ids)
            compiler = self._compiler
        try:
            return compiler.compile(source.kind, source.source)
        except GrammarError as error:
            actual, limit = told(" | ".join(source.texts)), f"a constraint that can be met: {error}"
            raise invalid_argument([Violation(source.field, actual, limit)]) from None


def digest_part(constraint: inference_pb2.Constraint) -> bytes:
    """Returns what a constraint adds to the digest of a receipt."""
    kind = constraint.WhichOneof("kind")
    if kind is None:
        return struct.pack(">II", 0, 0)
    source = constraint_source(constraint)
    texts = [] if source is None or kind == "json_object" else [t.encode() for t in source.texts]
    number = constraint.DESCRIPTOR.fields_by_name[kind].number
    sized = (struct.pack(">I", len(text)) + text for text in texts)
    return struct.pack(">II", number, len(texts)) + b"".join(sized)
