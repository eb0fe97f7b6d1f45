"""The start-up self-test: every kernel against NumPy, on the device that will run it.

Compilers have been seen to make code for new GPUs that is deterministic and wrong by large factors.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jaxlib.version
import numpy as np

from model.config import ModelConfig
from model.kernels import forms
from model.kernels.check import CheckSizes, KernelCheck
from model.kernels.gated_delta_rule.check import checks as gated_delta_rule
from model.kernels.paged_attention.check import checks as paged_attention
from model.kernels.quantized_matmul.check import checks as quantized_matmul
from model.kernels.routed_experts.check import checks as routed_experts
from model.programs import compiler_options

KERNEL_CHECKS = (gated_delta_rule, paged_attention, quantized_matmul, routed_experts)
"""One function per kernel package."""
LARGEST = 256
"""Of the sizes that are not a head's: the real ones would take seconds."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
TF32_TOLERANCE = 5e-3
"""Of float32 matrix products on a GPU, which rounds their inputs to 10 bits."""


class SelfTestError(RuntimeError):
    """Kernels compute wrong results on this device, and nothing can stand in for them."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How far one kernel was off: largest difference over largest expected value."""

    kernel: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit

    def __str__(self) -> str:
        device, version = jax.devices()[0].device_kind, jaxlib.version.__version__
        return (
            f"{self.kernel} is wrong on {device} (jaxlib {version}): relative error"
            f" {self.error:.2g}, at most {self.limit:g}"
        )


def run(
    config: ModelConfig, *, dtype: str, kv_dtype: str, page_size: int, strict: bool
) -> list[Outcome]:
    """Runs every check.

    Args:
      config: gives the sizes of heads.
      dtype: of weights and activations.
      kv_dtype: of keys and values.
      page_size: of the KV cache.
      strict: let nothing stand in.

    Returns:
      An outcome per kernel. Those that did not pass must be switched off (`forms.switched_off`):
      their plain forms passed.

    Raises:
      SelfTestError: naming device, jaxlib and every kernel that must not be used.
    """
    sizes = CheckSizes(
        dtype=np.dtype(dtype),
        kv_dtype=np.dtype(kv_dtype),
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        head_dim=config.head_dim,
        width=min(config.hidden_size, LARGEST),
        hidden=min(config.moe_intermediate_size, LARGEST),
        experts=min(config.num_experts, 8),
        choices=min(config.num_experts_per_tok, 4),
        page_size=page_size,
    )
    outcomes: list[Outcome] = []
    problems: list[str] = []
    for check in (check for checks in KERNEL_CHECKS for check in checks(sizes)):
        outcome = _outcome(check)
        outcomes.append(outcome)
        if outcome.passed:
            continue
        if strict or not check.replaceable:
            problems.append(str(outcome))
            continue
        with forms.switched_off(frozenset({check.kernel})):
            plain = _outcome(check)
        if not plain.passed:
            problems.append(f"{outcome}; its plain form is wrong too: {plain.error:.2g}")
    if problems:
        raise SelfTestError("; ".join(problems))
    return outcomes


def _outcome(check: KernelCheck) -> Outcome:
    def traced(*arguments: Any) -> tuple[Any, ...]:  # of its own, so that jax does not know it yet
        return check.run(*arguments)

    platform = jax.default_backend()
    limit = TOLERANCE[check.dtype.name]
    if platform != "cpu" and check.has_products:
        limit = max(limit, TF32_TOLERANCE)
    results = jax.jit(traced, compiler_options=compiler_options(platform))(*check.arguments)
    errors = [
        np.max(np.abs(np.asarray(got, np.float64) - want)) / np.max(np.abs(want))
        for got, want in zip(results, check.expected, strict=True)
    ]
    error = float(np.max(errors))  # not a number if one is, unlike max
    return Outcome(check.kernel, error if np.isfinite(error) else np.inf, limit)
