"""What must be float32 whatever the parameters are, and formulas that ports get subtly wrong."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import numpy_reference
import tiny
from model import checkpoint, decode
from model import state as state_lib
from model.cache import DeltaNetCache, init_delta_net_cache
from model.gated_delta_net import GatedDeltaNet
from model.kernels import routed_experts as kernel
from model.layers import GatedRMSNorm, RMSNorm
from model.moe import MoE
from reference_weights import BY_NAME

RECIPE = BY_NAME["value_heads_twice"]
BFLOAT16 = ml_dtypes.bfloat16
MARKS = (100, 500, 1000, 2000)


@pytest.fixture(scope="module")
def bfloat16_model(tmp_path_factory):
    """Written in float32, loaded as the service loads it."""
    directory = tmp_path_factory.mktemp("checkpoint")
    checkpoint.save(directory, RECIPE.hf_config, RECIPE.transformer(), jnp.float32)
    return checkpoint.load(directory, jnp.bfloat16).model


def replaced(module, **values):
    """The module with other values in the parameters whose path ends so (dots as in hub names)."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(module)
    names = [
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        for path, _ in leaves
    ]
    assert set(values) <= set(names)
    return jax.tree.unflatten(
        treedef,
        [
            jnp.asarray(values.get(name, leaf), leaf.dtype)
            for name, (_, leaf) in zip(names, leaves, strict=True)
        ],
    )


class TestFloat32Recurrence:
    """Case 30, in a model whose parameters are bfloat16."""

    def test_parameters(self, bfloat16_model):
        for path, leaf in jax.tree_util.tree_flatten_with_path(bfloat16_model)[0]:
            name = jax.tree_util.keystr(path)
            kept = "A_log" in name or "dt_bias" in name
            assert leaf.dtype == (jnp.float32 if kept else jnp.bfloat16), name

    def test_state_through_the_decode_program(self, bfloat16_model):
        """Keys and values are bfloat16, the rest stays float32 from call to call."""
        shape = dataclasses.replace(tiny.SHAPE, addressable_tokens=96)
        state = jax.eval_shape(
            lambda: state_lib.init_state(bfloat16_model.config, shape, jnp.bfloat16)
        )
        inputs = state_lib.init_inputs(shape, bfloat16_model.config.vocab_size)
        run = functools.partial(decode.decode_rounds, shape=shape, draft_length=3)
        after = jax.eval_shape(run, bfloat16_model, state, inputs)[0]
        assert jax.tree.map(lambda a: a.dtype, after) == jax.tree.map(lambda a: a.dtype, state)
        for cache in after.caches:
            wanted = jnp.float32 if isinstance(cache, DeltaNetCache) else jnp.uint16
            assert {leaf.dtype for leaf in jax.tree.leaves(cache)} == {jnp.dtype(wanted)}
            assert isinstance(cache, DeltaNetCache) or cache.kv_dtype == jnp.bfloat16

    def test_error_does_not_grow_with_length(self, bfloat16_model):
        """2,000 tokens in rounds of two against float64, with hardly any decay to forget by."""
        inputs, states = decoded(bfloat16_model.layers[0].linear_attn)
        want = numpy_reference.delta_rule(*inputs)
        rounded = numpy_reference.delta_rule(*inputs, dtype=BFLOAT16)
        error = {mark: relative(states[mark], want[mark - 1]) for mark in MARKS}
        in_bfloat16 = {mark: relative(rounded[mark - 1], want[mark - 1]) for mark in MARKS}
        print("relative error of the state", error, "were it bfloat16", in_bfloat16)
        assert error[2000] <= 2 * error[100]
        assert max(error.values()) < 1e-6 < 1e-3 < min(in_bfloat16.values())

    def test_gate_and_beta_are_not_rounded(self, bfloat16_model):
        """Computed from bfloat16 activations, yet with the digits of float32."""
        (*_, gate, beta), _ = decoded(bfloat16_model.layers[0].linear_attn)
        for array in (gate, beta):
            assert np.mean(array == array.astype(BFLOAT16).astype(np.float32)) < 0.05


def decoded(layer: GatedDeltaNet) -> tuple[list[np.ndarray], dict[int, np.ndarray]]:
    """Runs 2,000 tokens and a round more through decode rounds of two tokens.

    Returns:
      (k, v, gate and beta of every token, and the committed states after so many tokens).
    """
    config, tokens = RECIPE.config, 2
    layer = replaced(layer, A_log=np.full(config.linear_num_value_heads, -9.0))
    rounds = MARKS[-1] // tokens + 1
    x_OTD = jax.random.normal(jax.random.key(0), (rounds, tokens, config.hidden_size))

    @jax.jit
    def run(layer, x_OTD):
        def one_round(carry, x_TD):
            cache, pending_B = carry
            _, cache = layer.decode(x_TD[None].astype(jnp.bfloat16), cache, pending_B)
            inputs = (cache.k_BTJP, cache.v_BTWR, cache.gate_BTW, cache.beta_BTW)
            return (cache, jnp.full_like(pending_B, tokens)), (inputs, cache.state_BWPR)

        start = (init_delta_net_cache(config, 1, tokens), jnp.zeros((1,), jnp.int32))
        return jax.lax.scan(one_round, start, x_OTD)[1]

    inputs, states_OBWPR = jax.device_get(run(layer, x_OTD))
    by_token = [array[:, 0].reshape(-1, *array.shape[3:])[: MARKS[-1]] for array in inputs]
    # The state of a round is that before its own tokens.
    return by_token, {mark: states_OBWPR[mark // tokens, 0] for mark in MARKS}


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


class TestRouter:
    """Case 47."""

    @staticmethod
    def moe(gate_ED: np.ndarray, dtype) -> MoE:
        built = jax.tree.map(lambda leaf: leaf.astype(dtype), transformer_moe())
        return replaced(built, **{"gate.weight": gate_ED})

    @pytest.mark.parametrize("batch", [1, 7, 64])
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_close_logits_and_ties(self, batch, dtype):
        """Experts 9 and 12 are 1.2e-4 apart where the last is chosen: equal in bfloat16."""
        gate_ED = np.zeros((16, 64), np.float32)
        gate_ED[[2, 4, 14], 0] = (3, 5, 4)
        gate_ED[[9, 12], 0] = 1
        gate_ED[12, 1] = 2.0**-7
        x_ZD = np.zeros((64, 64), np.float32)
        x_ZD[:, 0], x_ZD[:, 1] = 1, 2.0**-6
        x_ZD[1::3, 1] *= -1  # now 9 is ahead
        x_ZD[2::3] = 0  # all sixteen tie
        ids_ZA, weights_ZA = self.moe(gate_ED, dtype).route(jnp.asarray(x_ZD[:batch], dtype))
        wanted = [[4, 14, 2, 12], [4, 14, 2, 9], [0, 1, 2, 3]]
        assert ids_ZA.tolist() == [wanted[row % 3] for row in range(batch)]
        assert weights_ZA.dtype == jnp.float32
        np.testing.assert_allclose(weights_ZA[2::3], 0.25)

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_random_rows_choose_as_float32_does(self, dtype):
        rng = np.random.default_rng(0)
        gate_ED = rng.normal(size=(16, 64)).astype(dtype).astype(np.float32)
        x_ZD = rng.normal(size=(512, 64)).astype(dtype).astype(np.float32)
        ids_ZA, weights_ZA = self.moe(gate_ED, dtype).route(jnp.asarray(x_ZD, dtype))
        for row, x_D in enumerate(x_ZD.astype(np.float64)):
            want_ids, want_weights = numpy_reference.top_experts(gate_ED @ x_D, 4)
            assert ids_ZA[row].tolist() == want_ids.tolist()
            np.testing.assert_allclose(weights_ZA[row], want_weights, rtol=1e-5)


class TestMixture:
    """Case 49, for both implementations of the routed experts."""

    both = pytest.mark.parametrize(
        "experts", [kernel.routed_experts, kernel.reference], ids=["blocked", "reference"]
    )

    @both
    def test_equals_the_formula(self, experts):
        """Weights of the chosen experts have the sum 1; the shared expert has a gate of its own."""
        x_BTD = jax.random.normal(jax.random.key(1), (2, 9, 64))
        got = np.asarray(transformer_moe()(x_BTD, None, experts)).reshape(-1, 64)
        weights = {
            name: RECIPE.tensor(name).astype(np.float64)
            for name in RECIPE.shapes
            if name.startswith("layers.0.mlp.")
        }
        for x_D, got_D in zip(np.asarray(x_BTD, np.float64).reshape(-1, 64), got, strict=True):
            want_D = numpy_reference.moe(x_D, weights, "layers.0.mlp.", 4)
            np.testing.assert_allclose(got_D, want_D, rtol=0, atol=1e-5)

    @both
    def test_a_zero_gate_lets_half_of_the_shared_expert_through(self, experts):
        x_BTD = jax.random.normal(jax.random.key(2), (1, 5, 64))
        built = transformer_moe()
        down = np.zeros(built.experts.down_proj.shape, np.float32)
        shared_only = replaced(
            built, **{"experts.down_proj": down, "shared_expert_gate.weight": np.zeros((1, 64))}
        )
        half = 0.5 * built.shared_expert(x_BTD)
        np.testing.assert_allclose(shared_only(x_BTD, None, experts), half, rtol=0, atol=1e-7)

    @both
    def test_equal_experts_act_as_one(self, experts):
        """Renormalised weights cancel when all experts are the same, whatever the router says."""
        x_BTD = jax.random.normal(jax.random.key(3), (1, 6, 64))
        built = transformer_moe()
        gate_up, down = (
            np.broadcast_to(np.asarray(param[...])[:1], param.shape)
            for param in (built.experts.gate_up_proj, built.experts.down_proj)
        )
        same = replaced(built, **{"experts.gate_up_proj": gate_up, "experts.down_proj": down})
        routed_BTD = same(x_BTD, None, experts) - shared_part(built, x_BTD)
        gate_FD, up_FD = np.split(gate_up[0], 2)
        for x_D, got_D in zip(np.asarray(x_BTD[0]), np.asarray(routed_BTD[0]), strict=True):
            want_D = numpy_reference.feed_forward(x_D, gate_FD, up_FD, down[0])
            np.testing.assert_allclose(got_D, want_D, rtol=0, atol=1e-5)


def transformer_moe() -> MoE:
    """The mixture of the first layer: 16 experts, 4 per token."""
    return RECIPE.transformer().layers[0].mlp


def shared_part(built: MoE, x_BTD: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(built.shared_expert_gate(x_BTD)) * built.shared_expert(x_BTD)


class TestNormOffset:
    """Case 23: stored as offset from one, shifted once, when used and not when loaded."""

    @pytest.mark.parametrize("around", [0.3, 0.49, 0.27, 0.0])
    def test_one_is_added_in_float32(self, around):
        """In bfloat16 parameters too: 1 + w has no room there for the digits of a small w."""
        rng = np.random.default_rng(0)
        weight = (around + 0.01 * rng.normal(size=64)).astype(BFLOAT16)
        x = rng.normal(size=(5, 64)).astype(np.float32)
        norm = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), RMSNorm(64, 1e-6))
        got = replaced(norm, weight=weight)(jnp.asarray(x))
        want = numpy_reference.rms_norm(x.astype(np.float64), weight.astype(np.float64), 1e-6)
        np.testing.assert_allclose(got, want, rtol=1e-5)

    def test_the_gated_norm_has_no_offset(self):
        rng = np.random.default_rng(1)
        weight, x, gate = (rng.normal(size=(n, 24)).astype(np.float32) for n in (1, 5, 5))
        got = replaced(GatedRMSNorm(24, 1e-6), weight=weight[0])(jnp.asarray(x), jnp.asarray(gate))
        plain = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight
        np.testing.assert_allclose(got, plain * numpy_reference.silu(gate), rtol=1e-5, atol=1e-6)

    def test_saving_and_loading_twice_shifts_nothing(self, tmp_path):
        stored = {name: RECIPE.tensor(name) for name in RECIPE.shapes if "norm" in name}
        built = RECIPE.transformer()
        for turn in ("once", "twice"):
            checkpoint.save(tmp_path / turn, RECIPE.hf_config, built, jnp.float32)
            built = checkpoint.load(tmp_path / turn, jnp.float32).model
            leaves = dict(zip(RECIPE.shapes, jax.tree.leaves(built), strict=True))
            for name, array in stored.items():
                np.testing.assert_array_equal(leaves[name], array, err_msg=f"{name} {turn}")
