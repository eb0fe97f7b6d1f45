"""Settings of every test run; they are made before the first import of jax or of `model`."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Servers that tests start leave the user's own cache alone.
os.environ["TANDEM_COMPILATION_CACHE"] = "none"

from hypothesis import settings
from jaxtyping import install_import_hook

# Shapes and dtypes in the signatures of `model` are checked in tests only: they cost time.
install_import_hook("model", "beartype.beartype")

# The same examples in every run: a failure that only sometimes shows helps nobody. Compiling takes
# longer than any deadline for one example.
settings.register_profile("tandem", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("tandem")
