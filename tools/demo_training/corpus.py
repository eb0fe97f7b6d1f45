"""What the demo checkpoint learns from: the Python sources of the running interpreter's library."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

LIBRARY, TESTS, PACKAGES, CHAT = "library", "tests", "packages", "chat"

TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
# site-packages is not the standard library; pydoc_data is prose packed into one dictionary.
_OTHER_FOLDERS = frozenset({"site-packages", "pydoc_data"})
_HELD_OUT_PER_THOUSAND = 30
_MOST_DIGITS, _MOST_ESCAPES = 0.12, 0.1
_ESCAPE_BYTES = 4
_FEWEST_LINES, _MOST_LINES = 3, 40


@dataclasses.dataclass(frozen=True)
class Document:
    """A source file, or a chat made from a function in it."""

    path: str
    """Relative to the library's root, with forward slashes; it decides the split."""
    text: str


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of the corpus that is short enough to talk about."""

    path: str
    name: str
    signature: str
    purpose: str
    """First line of its docstring; may be empty."""
    code: str


def find_documents(root: Path | None = None) -> dict[str, list[Document]]:
    """Collects the readable, hand-written sources, in the order of their paths.

    Args:
      root: folder of the library; the running interpreter's by default.

    Returns:
      The documents of the library proper, and those of its tests.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, list[Document]] = {LIBRARY: [], TESTS: []}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _OTHER_FOLDERS.intersection(parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text and not looks_generated(text):
            stream = TESTS if TEST_FOLDERS.intersection(parts) else LIBRARY
            found[stream].append(Document("/".join(parts), text))
    return found


def looks_generated(text: str) -> bool:
    """Whether a source is mostly a table (code pages, Unicode data): there is no Python in it."""
    digits = sum(character.isdigit() for character in text)
    escapes = _ESCAPE_BYTES * (text.count("\\x") + text.count("\\u"))
    return digits > _MOST_DIGITS * len(text) or escapes > _MOST_ESCAPES * len(text)


def is_held_out(path: str) -> bool:
    """Whether a file is kept from training: 3% of all, decided by the path alone.

    The split so stays the same when files come, go or change.
    """
    digest = hashlib.sha256(path.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < _HELD_OUT_PER_THOUSAND


def find_functions(document: Document) -> Iterator[Function]:
    """The short functions and methods of a source; none if it does not parse."""
    try:
        tree = ast.parse(document.text)
    except SyntaxError:
        return
    lines = document.text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        if not _FEWEST_LINES <= node.end_lineno - node.lineno + 1 <= _MOST_LINES:
            continue
        yield Function(
            path=document.path,
            name=node.name,
            signature=f"{node.name}({ast.unparse(node.args)})",
            purpose=(ast.get_docstring(node) or "").strip().split("\n")[0],
            code=textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])),
        )
