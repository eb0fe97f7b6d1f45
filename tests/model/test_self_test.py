"""Case 80: wrong kernels are found at the start, and do not run."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import pytest

import tiny
from model import programs, self_test
from model.kernels import forms, gated_delta_rule
from model.kernels.gated_delta_rule import pallas_gpu, reference
from model.kernels.paged_attention import check as paged_attention_check
from model.kernels.routed_experts import blocked
from model.self_test import SelfTestError
from model.state import init_inputs, init_state

MODEL = tiny.model()
KERNELS = [
    "gated_delta_rule.chunked",
    "gated_delta_rule.replay",
    "paged_attention",
    "quantized_matmul",
    "routed_experts",
]


def run(strict: bool = False, dtype: str = "float32", kv_dtype: str | None = None):
    return self_test.run(
        tiny.config(), dtype=dtype, kv_dtype=kv_dtype or dtype, page_size=8, strict=strict
    )


@pytest.fixture
def only(monkeypatch):
    """Leaves out the checks of other packages, which cost time."""
    return lambda package: monkeypatch.setattr(self_test, "KERNEL_CHECKS", (package,))


def slightly_wrong(kernel):
    """Right but for one per mille: more than rounding, less than anybody would see in a text."""

    def wrong(*arguments, **options):
        return jax.tree.map(lambda out: out * 1.001, kernel(*arguments, **options))

    return wrong


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_this_device_passes(dtype):
    outcomes = run(strict=True, dtype=dtype)
    assert [outcome.kernel for outcome in outcomes] == KERNELS
    assert all(outcome.passed for outcome in outcomes)
    recurrences = [outcome for outcome in outcomes if "delta" in outcome.kernel]
    assert all(outcome.limit == 1e-4 for outcome in recurrences)  # float32 whatever the weights are


def test_a_wrong_kernel_is_named_and_its_plain_form_tried(monkeypatch, only):
    only(self_test.routed_experts)
    monkeypatch.setattr(blocked, "routed_experts", slightly_wrong(blocked.routed_experts))
    (wrong,) = run()
    assert not wrong.passed and wrong.error == pytest.approx(1e-3, rel=0.01)
    with pytest.raises(
        SelfTestError, match=r"routed_experts is wrong on cpu \(jaxlib 0\.\d+.*at most 0\.0001"
    ):
        run(strict=True)


def test_a_kernel_that_is_not_finite_is_wrong(monkeypatch, only):
    only(self_test.gated_delta_rule)
    right = gated_delta_rule.chunked_form
    monkeypatch.setattr(
        gated_delta_rule,
        "chunked_form",
        lambda *arguments: (right(*arguments)[0], jnp.nan * arguments[-1]),
    )
    assert [outcome.kernel for outcome in run() if not outcome.passed] == [KERNELS[0]]


def test_nothing_stands_in_for_a_wrong_plain_form(monkeypatch, only):
    only(self_test.gated_delta_rule)
    monkeypatch.setattr(reference, "replay", slightly_wrong(reference.replay))
    with pytest.raises(
        SelfTestError, match=r"replay is wrong .*; its plain form is wrong too: 0\.001"
    ):
        run()


def test_paged_attention_has_one_form(monkeypatch, only):
    only(self_test.paged_attention)
    wrong = slightly_wrong(paged_attention_check.paged_attention)
    monkeypatch.setattr(paged_attention_check, "paged_attention", wrong)
    with pytest.raises(SelfTestError, match="paged_attention is wrong"):
        run()


def test_the_gpu_kernel_is_checked_too(monkeypatch, only):
    """What platform_dependent would choose on a GPU, interpreted here."""
    only(self_test.gated_delta_rule)

    def on_gpu(*arguments, cuda, default):
        del default
        return cuda(*arguments, interpret=True)

    monkeypatch.setattr(jax.lax, "platform_dependent", on_gpu)
    assert all(outcome.passed for outcome in run())
    monkeypatch.setattr(pallas_gpu, "replay", slightly_wrong(pallas_gpu.replay))
    assert [outcome.kernel for outcome in run() if not outcome.passed] == [KERNELS[1]]


def test_switched_off_is_for_a_block():
    assert forms.is_on("a")
    with forms.switched_off(frozenset({"a"})):
        assert not forms.is_on("a") and forms.is_on("b")
    assert forms.is_on("a")


def must_not_be_traced(*_, **__):
    raise AssertionError("traced")


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_programs_do_without_what_is_switched_off(monkeypatch, name):
    leaves, treedef = jax.tree.flatten(MODEL)
    state = jax.eval_shape(lambda: init_state(MODEL.config, tiny.SHAPE, "float32"))
    inputs = jax.eval_shape(lambda: init_inputs(tiny.SHAPE, MODEL.config.vocab_size))
    scalar, chunk, table = (jnp.zeros(shape, jnp.int32) for shape in ((), (16,), (16,)))
    calls = {
        "prefill": (leaves, state, scalar, chunk, scalar, scalar, scalar, table),
        "decode": (leaves, state, inputs, 3),
    }
    monkeypatch.setattr(blocked, "routed_experts", must_not_be_traced)
    monkeypatch.setattr(gated_delta_rule, "chunked_form", must_not_be_traced)
    monkeypatch.setattr(jax.lax, "platform_dependent", must_not_be_traced)
    off = frozenset(KERNELS) - {"paged_attention"}
    programs.build(treedef, tiny.SHAPE, "cpu", off)[name].trace(*calls[name])
    with pytest.raises(AssertionError, match="traced"):
        programs.build(treedef, tiny.SHAPE, "cpu")[name].trace(*calls[name])


def test_the_executor_switches_wrong_kernels_off(monkeypatch, only, caplog):
    only(self_test.routed_experts)
    executor = tiny.executor(MODEL)
    built: list[frozenset[str]] = []
    monkeypatch.setattr(programs, "build", lambda *arguments: built.append(arguments[-1]))
    executor.self_test()
    assert not built
    monkeypatch.setattr(blocked, "routed_experts", slightly_wrong(blocked.routed_experts))
    executor.self_test()
    assert built == [frozenset({"routed_experts"})]
    (record,) = (record for record in caplog.records if record.levelno == logging.ERROR)
    assert "self-test: routed_experts is wrong on cpu" in record.getMessage()
    with pytest.raises(SelfTestError):
        executor.self_test(strict=True)
