"""What a kernel package brings to the start-up self-test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class KernelCheck:
    """One operation on small inputs, and what it must give."""

    kernel: str
    """As `forms.is_on` knows it."""
    run: Callable[..., tuple[Any, ...]]
    """The function that the programs call, with a tuple as its result."""
    arguments: tuple[Any, ...]
    """NumPy arrays."""
    expected: tuple[np.ndarray, ...]
    """The results, computed with NumPy in float64 from the same inputs."""
    dtype: np.dtype
    """In which the kernel computes."""
    replaceable: bool
    """Whether another form stands in when the kernel is switched off."""
    has_products: bool = True
    """Whether there are matrix products, whose float32 inputs a GPU rounds to TF32."""


@dataclasses.dataclass(frozen=True)
class CheckSizes:
    """What the inputs of the checks look like: the model's own head sizes, little of all else."""

    dtype: np.dtype
    """Of weights and activations."""
    kv_dtype: np.dtype
    key_dim: int
    value_dim: int
    head_dim: int
    width: int
    hidden: int
    experts: int
    choices: int
    page_size: int
