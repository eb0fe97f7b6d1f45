"""What the layout forbids, as functions from a source tree to a list of complaints.

`test_architecture.py` holds the real tree to it, and made-up trees to show that each rule can fail.
Code is parsed, never imported.
"""

from __future__ import annotations

import ast
import dataclasses
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("model", "service")
FILE_LIMIT = 600
FUNCTION_LIMIT = 100

_MODEL_FORBIDDEN = ("service", "grpc", "asyncio", "threading", "logging")
_FILE_MODULES = ("io", "mmap", "orbax", "os", "pathlib", "safetensors", "shutil", "tempfile")
_FILE_USERS = ("model.checkpoint", "model.checkpoint_files", "model.checkpoint_orbax")
_DEVICE_OWNER = "service.engine.executor"
_DEVICE_MODULES = ("jax", "jaxlib", "flax")
_PB_USERS = frozenset(
    f"service.{name}"
    for name in (
        *("servicer", "server", "reflection", "translation", "validation"),
        *("reply", "reply_stream", "resume", "receipt", "sampling", "telemetry.load"),
        *("chat_request", "chats", "chat_reply", "constraint"),
    )
)
_PURE_POLICY = frozenset(
    f"service.engine.{name}"
    for name in ("scheduler", "slots", "pages", "waiting", "estimates", "draft_policy")
)
_POLICY_MAY_IMPORT = _PURE_POLICY | {"service.engine.types"}
_NAMELESS_FILES = ("utils.py", "util.py", "helpers.py", "helper.py", "misc.py", "common.py")


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported name: `import a.b` has no name, `from a.b import c` has the name c."""

    module: str
    name: str | None
    line: int
    alias: str
    for_types_only: bool


@dataclasses.dataclass(frozen=True)
class Source:
    """One parsed file; `module` is its dotted name from the root of the tree."""

    path: str
    module: str
    lines: int
    tree: ast.Module
    imports: tuple[Import, ...]


def read_tree(root: Path, folders: tuple[str, ...]) -> list[Source]:
    """Parses every Python file in the folders, generated ones (`service/pb`) left out."""
    sources: list[Source] = []
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        relative = path.relative_to(root)
        if relative.parts[:2] == ("service", "pb"):
            continue
        parts = relative.with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        text = path.read_text()
        tree = ast.parse(text)
        imports = tuple(_imports(tree, module if is_package else module.rpartition(".")[0]))
        sources.append(Source(str(relative), module, len(text.splitlines()), tree, imports))
    return sources


def model_is_pure(sources: list[Source]) -> list[str]:
    """`model` knows nothing of the host's side, and only its checkpoint modules touch files."""
    complaints: list[str] = []
    for source in _inside(sources, "model"):
        for item in source.imports:
            if _top(item) in _MODEL_FORBIDDEN:
                complaints.append(f"{_at(source, item.line)} imports {item.module}")
            if _top(item) in _FILE_MODULES and source.module not in _FILE_USERS:
                complaints.append(f"{_at(source, item.line)} touches files through {item.module}")
        if source.module not in _FILE_USERS:
            complaints += [
                f"{_at(source, node.lineno)} opens a file"
                for node in ast.walk(source.tree)
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "open"
            ]
    return complaints


def only_the_executor_owns_the_device(sources: list[Source]) -> list[str]:
    """In `service` one module imports jax or anything inside `model`."""
    complaints: list[str] = []
    modules = {source.module for source in sources}
    for source in _inside(sources, "service"):
        if source.module == _DEVICE_OWNER:
            continue
        for item in source.imports:
            target = _target(item, modules)
            if _top(item) in _DEVICE_MODULES or target.startswith("model."):
                complaints.append(f"{_at(source, item.line)} imports {target}")
    return complaints


def stubs_stay_at_the_edge(sources: list[Source]) -> list[str]:
    """Generated messages are seen by the modules that speak gRPC, and go no deeper."""
    return [
        f"{_at(source, item.line)} imports service.pb"
        for source in _inside(sources, "service")
        if source.module not in _PB_USERS
        for item in source.imports
        if f"{item.module}.{item.name}.".startswith("service.pb.")
    ]


def policy_is_standard_library(sources: list[Source]) -> list[str]:
    """What decides in the engine can be tested and read without anything else."""
    modules = {source.module for source in sources}
    return [
        f"{_at(source, item.line)} imports {_target(item, modules)}"
        for source in sources
        if source.module in _PURE_POLICY
        for item in source.imports
        if _target(item, modules) not in _POLICY_MAY_IMPORT
        and _top(item) not in sys.stdlib_module_names
    ]


def no_cycles(sources: list[Source]) -> list[str]:
    """Imports form no cycle; those for type checkers only are not counted."""
    modules = {source.module for source in sources}
    graph = {
        source.module: {
            _target(item, modules) for item in source.imports if not item.for_types_only
        }
        & modules - {source.module}
        for source in sources
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [f"import cycle: {' -> '.join(reversed(error.args[1]))}"]
    return []


def private_names_stay_home(sources: list[Source]) -> list[str]:
    """An underscore name is used in the file that defines it, tests included."""
    complaints: list[str] = []
    for source in sources:
        ours = [item for item in source.imports if _top(item) in PACKAGES]
        complaints += [
            f"{_at(source, item.line)} imports {item.module}.{item.name}"
            for item in ours
            if _private(item.name or "") or any(map(_private, item.module.split(".")))
        ]
        aliases = {item.alias for item in ours}
        complaints += [
            f"{_at(source, node.lineno)} uses {ast.unparse(node)}"
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Attribute)
            and _private(node.attr)
            and ast.unparse(node.value) in aliases
        ]
    return complaints


def names_and_sizes(sources: list[Source]) -> list[str]:
    """Files have telling names; files and functions can be read in one go."""
    complaints: list[str] = []
    for source in sources:
        name = source.path.rpartition("/")[2]
        if name in _NAMELESS_FILES:
            complaints.append(f"{source.path} says nothing by its name")
        if source.path.startswith("tests/") and name == "__init__.py":
            complaints.append(f"{source.path} makes a package that shadows model or service")
        if source.lines > FILE_LIMIT:
            complaints.append(f"{source.path} has {source.lines} lines, limit {FILE_LIMIT}")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LIMIT:
                    where = f"{_at(source, node.lineno)} {node.name}"
                    complaints.append(f"{where} has {lines} lines, limit {FUNCTION_LIMIT}")
    return complaints


def map_is_true(root: Path, sources: list[Source], page: str = "ARCHITECTURE.md") -> list[str]:
    """Every path on the map exists, and every module of the product is on it.

    A folder on the map stands for the files in it, except `model/` and `service/` themselves.
    """
    text = (root / page).read_text()
    tops = "|".join((*PACKAGES, "proto", "tests", "tools", r"\.ci"))
    paths = set(re.findall(rf"(?<![\w/.-])(?:{tops})/[\w./-]*\w/?|[A-Z]\w+\.md", text))
    complaints = [
        f"{page} names {path}: no such file" for path in paths if not (root / path).exists()
    ]
    folders = tuple(path.rstrip("/") + "/" for path in paths if (root / path).is_dir())
    for source in _inside(sources, *PACKAGES):
        if source.path.endswith("__init__.py") or source.path in paths:
            continue
        if not source.path.startswith(folders):
            complaints.append(f"{page} leaves out {source.path}")
    return sorted(complaints)


def _inside(sources: list[Source], *packages: str) -> list[Source]:
    return [source for source in sources if source.module.partition(".")[0] in packages]


def _imports(tree: ast.Module, package: str) -> Iterator[Import]:
    """Imports anywhere in a file; `package` resolves relative ones."""
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        types_only = id(node) in guarded
        if isinstance(node, ast.Import):
            for name in node.names:
                alias = name.asname or name.name
                yield Import(name.name, None, node.lineno, alias, types_only)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            module = ".".join([*base, node.module or ""]).rstrip(".")
            for name in node.names:
                alias = name.asname or name.name
                yield Import(
                    module if node.level else node.module or "",
                    name.name,
                    node.lineno,
                    alias,
                    types_only,
                )


def _target(item: Import, modules: set[str]) -> str:
    """The module an import reaches: `from a import b` may mean the module a.b."""
    whole = f"{item.module}.{item.name}"
    return whole if whole in modules else item.module


def _top(item: Import) -> str:
    return item.module.partition(".")[0]


def _at(source: Source, line: int) -> str:
    return f"{source.path}:{line}"


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
