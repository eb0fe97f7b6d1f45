"""The installed packages that the demo learns from: all under licences that permit it."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from demo_training.corpus import TEST_FOLDERS, Document, looks_generated

# Each is pinned in pyproject.toml (extras `dev` and `train` included) and is under an MIT, BSD,
# Apache or PSF licence.
PACKAGES = (
    *("beartype", "flax", "grpcio", "jax", "jaxtyping", "jinja2", "matplotlib", "numpy"),
    *("opentelemetry-sdk", "optax", "orbax-checkpoint", "prometheus-client", "pydantic", "pytest"),
    *("pytest-asyncio", "pytest-xdist", "safetensors", "tokenizers", "trustme"),
)
_MOST_BYTES = 200_000


def find_packages() -> tuple[list[Document], list[dict[str, Any]]]:
    """Collects the packages' sources without their tests.

    Returns:
      The documents, in the order of packages and paths, and of each package its name, version,
      licence as its metadata states it, files and bytes.

    Raises:
      importlib.metadata.PackageNotFoundError: one is not installed.
    """
    documents: list[Document] = []
    listed: list[dict[str, Any]] = []
    for name in PACKAGES:
        distribution = importlib.metadata.distribution(name)
        found = [
            document
            for file in sorted(distribution.files or [], key=str)
            if file.suffix == ".py" and not _left_out(file.parts)
            if (document := _read(distribution, file)) is not None
        ]
        documents += found
        listed.append(
            {
                "name": name,
                "version": distribution.version,
                "licence": _licence(distribution),
                "files": len(found),
                "bytes": sum(len(document.text.encode("utf-8")) for document in found),
            }
        )
    return documents, listed


def _left_out(parts: tuple[str, ...]) -> bool:
    """Tests, sources that protoc made, and what lies outside site-packages."""
    return (
        bool(TEST_FOLDERS.intersection(parts))
        or parts[0] == ".."
        or parts[-1].startswith("test_")
        or parts[-1].endswith(("_pb2.py", "_pb2_grpc.py"))
    )


def _read(
    distribution: importlib.metadata.Distribution, file: importlib.metadata.PackagePath
) -> Document | None:
    try:
        text = Path(str(distribution.locate_file(file))).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if not text or len(text) > _MOST_BYTES or looks_generated(text):
        return None
    return Document(file.as_posix(), text)


def _licence(distribution: importlib.metadata.Distribution) -> str:
    metadata = distribution.metadata
    if "License-Expression" in metadata:
        return metadata["License-Expression"]
    classifiers = [
        entry.split(" :: ")[-1]
        for entry in metadata.get_all("Classifier") or []
        if entry.startswith("License :: OSI Approved ::")
    ]
    return ", ".join(classifiers) or metadata["License"]
