"""Settings of every test run; they are made before the first import of jax or of `model`."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A run compiles each program once, whichever of its processes need it, and leaves nothing behind.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.mkdtemp(prefix="tandem-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
# Servers that tests start leave the user's own cache alone.
os.environ["TANDEM_COMPILATION_CACHE"] = "none"

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

# Shapes and dtypes in the signatures of `model` are checked in tests only: they cost time.
install_import_hook("model", "beartype.beartype")

# The same examples in every run: a failure that only sometimes shows helps nobody. Compiling takes
# longer than any deadline for one example.
settings.register_profile("tandem", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("tandem")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What compiles begins first, so that no worker is left with a long file at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, "service" in item.path.parts))
