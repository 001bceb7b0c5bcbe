"""Projected dual ascent on the multiplier of a budget constraint 'measured <= budget'.

Source: TRQAM's dual update of lambda (D_hat clipped at a multiple of the budget, EMA, projected gradient step).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class DualState(NamedTuple):
    """The multiplier and what it has seen."""

    multiplier: Array  # float32 []
    average: Array  # float32 [], moving average of the clipped measurements, starts at 0
    count: Array  # int32 [], measurements so far


def init_dual(multiplier: Array) -> DualState:
    """A multiplier [] and an empty average."""
    return DualState(jnp.asarray(multiplier, jnp.float32), jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))


def _average(state: DualState, measured: Array, decay: Array, bias_correction: bool) -> tuple[DualState, Array]:
    count = state.count + 1
    average = decay * state.average + (1 - decay) * measured
    estimate = average / (1 - decay**count) if bias_correction else average
    return state._replace(average=average, count=count), estimate


def update_dual(
    state: DualState,
    measured: Array,
    budget: Array,
    *,
    step_size: Array,
    decay: Array,
    clip: Array,
    minimum: Array,
    maximum: Array,
    space: str = 'linear',
    bias_correction: bool = False,
) -> tuple[DualState, dict[str, Array]]:
    """One projected step of the multiplier.

    'linear' (published): multiplier <- project(multiplier + step_size * (average - budget)).
    'log' (ours, free of the budget's scale): log multiplier <- project(log multiplier + step_size * (average / budget - 1)).

    With no bias correction (as published) the average starts at 0, so the multiplier always falls during the first steps; because the
    measurement is clipped at `clip * budget`, it rises by at most step_size * budget * (clip - 1) per step.

    Args:
      state: multiplier and average.
      measured: the constrained quantity, [], >= 0.
      budget: its bound, [], > 0.
      step_size: of the multiplier.
      decay: of the average, in [0, 1); 0 uses the last measurement alone.
      clip: multiples of the budget at which one measurement is cut off, > 1.
      minimum, maximum: the interval that the multiplier is projected to; minimum > 0 in 'log' space.
      space: 'linear' or 'log'.
      bias_correction: divide the average by 1 - decay^count.

    Returns:
      (state, {'clipped', 'average'}).
    """
    clipped = jnp.minimum(measured, clip * budget)
    state, estimate = _average(state, clipped, decay, bias_correction)
    if space == 'log':
        moved = state.multiplier * jnp.exp(step_size * (estimate / budget - 1))
    else:
        moved = state.multiplier + step_size * (estimate - budget)
    return state._replace(multiplier=jnp.clip(moved, minimum, maximum)), {'clipped': clipped, 'average': estimate}
