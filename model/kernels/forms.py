"""Which kernels run: one that fails the start-up self-test is replaced by its plain form.

What is switched off is read when a program is traced (`programs.build` says what), never when it runs.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_off: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("off", default=frozenset())


@contextlib.contextmanager
def switched_off(kernels: frozenset[str]) -> Iterator[None]:
    """What is traced in the block does without these kernels."""
    token = _off.set(kernels)
    try:
        yield
    finally:
        _off.reset(token)


def is_on(kernel: str) -> bool:
    """Whether what is traced now may use a kernel."""
    return kernel not in _off.get()
