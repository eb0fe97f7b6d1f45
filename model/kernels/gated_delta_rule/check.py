"""The gated delta rule for the start-up self-test."""

from __future__ import annotations

import numpy as np

from model.kernels.check import CheckSizes, KernelCheck
from model.kernels.gated_delta_rule import chunked, replay

BATCH, KEY_HEADS, VALUE_HEADS = 2, 1, 2
CHUNKED_TOKENS = 70
"""More than one chunk."""
ROUND_TOKENS, ACCEPTED = 4, (3, 1)


def checks(sizes: CheckSizes) -> tuple[KernelCheck, ...]:
    """Prefill's form over more than one chunk, and a decode round after one of mixed acceptance."""
    rng = np.random.default_rng(0)
    prompt = _inputs(rng, CHUNKED_TOKENS, sizes)
    state_BWPR = rng.normal(size=(BATCH, VALUE_HEADS, sizes.key_dim, sizes.value_dim))
    state_BWPR = state_BWPR.astype(np.float32)
    past, new = _inputs(rng, ROUND_TOKENS, sizes), _inputs(rng, ROUND_TOKENS, sizes)
    accepted_BT = np.arange(ROUND_TOKENS) < np.array(ACCEPTED)[:, None]
    past = tuple(
        np.where(accepted_BT.reshape(BATCH, ROUND_TOKENS, *(1,) * (array.ndim - 2)), array, 0)
        for array in past
    )
    _, committed_BWPR = _rule(past, state_BWPR)
    ahead_BTWR, _ = _rule(new, committed_BWPR)
    return (
        KernelCheck(
            "gated_delta_rule.chunked",
            chunked,
            (*prompt, state_BWPR),
            _rule(prompt, state_BWPR),
            np.dtype(np.float32),
            replaceable=True,
        ),
        KernelCheck(
            "gated_delta_rule.replay",
            replay,
            (past[1:], new, state_BWPR, np.int32(max(ACCEPTED))),
            (ahead_BTWR, committed_BWPR),
            np.dtype(np.float32),
            replaceable=True,
            has_products=False,
        ),
    )


def _inputs(rng: np.random.Generator, tokens: int, sizes: CheckSizes) -> tuple[np.ndarray, ...]:
    """q, k, v, gate and beta as the layer makes them."""
    keys = rng.normal(size=(2, BATCH, tokens, KEY_HEADS, sizes.key_dim))
    q, k = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    v = rng.normal(size=(BATCH, tokens, VALUE_HEADS, sizes.value_dim))
    gate = -rng.exponential(0.5, size=(BATCH, tokens, VALUE_HEADS))
    beta = rng.uniform(size=(BATCH, tokens, VALUE_HEADS))
    return tuple(a.astype(np.float32) for a in (q * sizes.key_dim**-0.5, k, v, gate, beta))


def _rule(inputs: tuple[np.ndarray, ...], state_BWPR: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and last state in float64 (`reference.step` says what is computed)."""
    q, k, v, gate, beta = (array.astype(np.float64) for array in inputs)
    q, k = (np.repeat(array, VALUE_HEADS // KEY_HEADS, axis=2) for array in (q, k))
    state = state_BWPR.astype(np.float64)
    out = np.zeros_like(v)
    for t in range(v.shape[1]):
        state = state * np.exp(gate[:, t])[..., None, None]
        held = np.einsum("bwpr,bwp->bwr", state, k[:, t])
        delta = beta[:, t, :, None] * (v[:, t] - held)
        state = state + k[:, t, :, :, None] * delta[:, :, None, :]
        out[:, t] = np.einsum("bwpr,bwp->bwr", state, q[:, t])
    return out, state
