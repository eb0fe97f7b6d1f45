"""The routed experts in a differentiable form with a fixed amount of work.

The served form visits the experts in use in a loop of unknown length, which has no gradient. Here
every expert has room for a fixed number of choices and what overflows is dropped (Switch
Transformer, arXiv 2101.03961, section 2.2). Forward and backward are gathers only: XLA:CPU runs a
scatter of rows on one core.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

_ROUND_TO = 16


class CapacityExperts:
    """A `routed_experts` function; holds what the calls of one trace have to say about balance."""

    def __init__(self, capacity_factor: float):
        """Args: capacity_factor: room per expert, in units of the even share."""
        self.capacity_factor = capacity_factor
        self.balance: list[jax.Array] = []
        """Per call: E * sum_e share_e * mean weight_e, which is 1 when all experts are used alike."""
        self.kept: list[jax.Array] = []
        """Per call: share of the choices that found room."""

    def __call__(
        self,
        x_ZD: jax.Array,
        ids_ZA: jax.Array,
        weights_ZA: jax.Array,
        gate_up_proj_EFD: jax.Array,
        down_proj_EDF: jax.Array,
    ) -> jax.Array:
        """See `model.kernels.routed_experts.reference`."""
        experts, width = gate_up_proj_EFD.shape[0], down_proj_EDF.shape[2]
        even = ids_ZA.size / experts
        room = min(len(ids_ZA), -(-int(self.capacity_factor * even) // _ROUND_TO) * _ROUND_TO)
        slot_ZA, choice_S, kept = assign(ids_ZA, experts, room)
        self.kept.append(kept)
        self._note_balance(ids_ZA, weights_ZA, experts)
        token_S = choice_S // ids_ZA.shape[1]
        x_ERD = spread(x_ZD, token_S, slot_ZA).reshape(experts, room, -1)
        projected_ERF = jnp.einsum("erd,efd->erf", x_ERD, gate_up_proj_EFD)
        hidden_ERF = jax.nn.silu(projected_ERF[..., :width]) * projected_ERF[..., width:]
        y_ERD = jnp.einsum("erf,edf->erd", hidden_ERF, down_proj_EDF)
        return gather_sum(y_ERD.reshape(experts * room, -1), weights_ZA, choice_S, slot_ZA)

    def _note_balance(self, ids_ZA: jax.Array, weights_ZA: jax.Array, experts: int) -> None:
        chosen_ZAE = jax.nn.one_hot(ids_ZA, experts)
        share_E = jnp.mean(chosen_ZAE, axis=(0, 1))
        weight_E = jnp.einsum("zae,za->e", chosen_ZAE, weights_ZA) / len(ids_ZA)
        self.balance.append(experts * jnp.sum(jax.lax.stop_gradient(share_E) * weight_E))


def assign(ids_ZA: jax.Array, experts: int, room: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gives the choices places, first come first served.

    Args:
      ids_ZA: expert of each choice; `experts` for none.
      experts: E.
      room: places per expert.

    Returns:
      (place of each choice in [0, E * room), or E * room if dropped, [Z, A];
       choice of each place in [0, Z * A), or Z * A if empty, [E * room];
       share of the choices that found room).
    """
    ids = ids_ZA.reshape(-1)
    taken = jax.nn.one_hot(ids, experts, dtype=jnp.int32)
    rank = jnp.sum((jnp.cumsum(taken, axis=0) - 1) * taken, axis=1)
    fits = (rank < room) & (ids < experts)
    slot = jnp.where(fits, ids * room + rank, experts * room)
    empty = jnp.full((experts * room,), ids.size, jnp.int32)
    choice_S = empty.at[slot].set(jnp.arange(ids.size, dtype=jnp.int32), mode="drop")
    return slot.reshape(ids_ZA.shape), choice_S, jnp.mean(fits)


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of x; zeros where the index is out of range."""
    return x.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def spread(x_ZD: jax.Array, token_S: jax.Array, slot_ZA: jax.Array) -> jax.Array:
    """Copies each token to the places of its choices, [S, D]."""
    del slot_ZA
    return _rows(x_ZD, token_S)


def _spread_forward(x_ZD: jax.Array, token_S: jax.Array, slot_ZA: jax.Array):
    return spread(x_ZD, token_S, slot_ZA), slot_ZA


def _spread_backward(slot_ZA: jax.Array, grad_SD: jax.Array):
    return sum(_rows(grad_SD, slot_Z) for slot_Z in slot_ZA.T), None, None


spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def gather_sum(
    y_SD: jax.Array, weights_ZA: jax.Array, choice_S: jax.Array, slot_ZA: jax.Array
) -> jax.Array:
    """Weighted sum of each token's places, [Z, D]."""
    del choice_S
    weighted = [
        _rows(y_SD, slot_Z) * weight_Z[:, None]
        for slot_Z, weight_Z in zip(slot_ZA.T, weights_ZA.T, strict=True)
    ]
    return functools.reduce(jnp.add, weighted)


def _gather_sum_forward(
    y_SD: jax.Array, weights_ZA: jax.Array, choice_S: jax.Array, slot_ZA: jax.Array
):
    inputs = (y_SD, weights_ZA, choice_S, slot_ZA)
    return gather_sum(*inputs), inputs


def _gather_sum_backward(inputs: tuple[jax.Array, ...], grad_ZD: jax.Array):
    y_SD, weights_ZA, choice_S, slot_ZA = inputs
    weight_S = _rows(weights_ZA.reshape(-1), choice_S)
    grad_SD = _rows(grad_ZD, choice_S // slot_ZA.shape[1]) * weight_S[:, None]
    products = [jnp.sum(_rows(y_SD, slot_Z) * grad_ZD, axis=1) for slot_Z in slot_ZA.T]
    return grad_SD, jnp.stack(products, axis=1), None, None


gather_sum.defvjp(_gather_sum_forward, _gather_sum_backward)
