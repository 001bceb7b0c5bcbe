"""Multipliers that hold a measured quantity to a budget: projected dual ascent (TRQAM) and the multiplicative rule of PPO's penalty.

A multiplier is no optimizer, since it never sees a gradient, but has the same shape: a pair (init, update) of pure functions. Like an
optimizer it is rebuilt from `state.hyper` wherever it is used, so its settings may be swept under vmap.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from optimizers.projection import check_radius


class DualState(NamedTuple):
    """The multiplier and what it has seen."""

    multiplier: Array  # float32 []
    average: Array  # float32 [], moving average of the clipped measurements, starts at 0
    count: Array  # int32 [], measurements so far


class Dual(NamedTuple):
    """A rule for a multiplier."""

    init: Callable[[Any], DualState]  # first multiplier [] -> state
    update: Callable[[DualState, Array], tuple[DualState, dict[str, Array]]]  # (state, measured []) -> (state, {'clipped', 'average'})


def _init(multiplier: Any) -> DualState:
    return DualState(jnp.asarray(multiplier, jnp.float32), jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))


def projected_dual_ascent(
    radius: Any,
    step_size: Any,
    *,
    decay: Any = 0.0,
    clip: Any = None,
    minimum: Any = 0.0,
    maximum: Any = jnp.inf,
    space: str = 'linear',
    bias_correction: bool = False,
) -> Dual:
    """Projected ascent on the multiplier of 'measured <= radius'.

    'linear' (published): multiplier <- project(multiplier + step_size * (average - radius)).
    'log' (ours, free of the radius's scale): log multiplier <- project(log multiplier + step_size * (average / radius - 1)).

    With no bias correction (as published) the average starts at 0, so the multiplier always falls during the first steps; because the
    measurement is clipped at `clip * radius`, it rises by at most step_size * radius * (clip - 1) per step. A NaN counts as no measurement.

    Args:
      radius: the budget, > 0. This and all the following may be numbers or arrays [].
      step_size: of the multiplier.
      decay: of the average, in [0, 1); 0 uses the last measurement alone.
      clip: multiples of the radius at which one measurement is cut off, > 1; None: never, so that one infinite one leads to `maximum`.
      minimum, maximum: the interval that the multiplier is projected to; minimum > 0 in 'log' space.
      space: 'linear' or 'log'.
      bias_correction: divide the average by 1 - decay^count.

    Raises:
      ValueError: a negative radius, or an unknown space.

    Source: TRQAM's update of lambda (D_hat clipped at a multiple of the budget, EMA, projected gradient step).
    """
    check_radius(radius)
    if space not in ('linear', 'log'):
        raise ValueError(f'space={space!r} must be linear or log')

    def update(state: DualState, measured: Array) -> tuple[DualState, dict[str, Array]]:
        clipped = measured if clip is None else jnp.minimum(measured, clip * radius)
        count = state.count + 1
        average = decay * state.average + (1 - decay) * clipped
        estimate = average / (1 - decay**count) if bias_correction else average
        if space == 'log':
            moved = state.multiplier * jnp.exp(step_size * (estimate / radius - 1))
        else:
            moved = state.multiplier + step_size * (estimate - radius)
        following = DualState(jnp.clip(moved, minimum, maximum), average, count)
        # Also an infinite average, which would never come down again: the multiplier takes it in, the average does not.
        following = following._replace(average=jnp.where(jnp.isfinite(average), average, state.average))
        return optax.tree.where(jnp.isnan(measured), state, following), {'clipped': clipped, 'average': estimate}

    return Dual(_init, update)


def adaptive_penalty(radius: Any, *, factor: Any = 2.0, tolerance: Any = 1.5, minimum: Any = 1e-8, maximum: Any = 1e8) -> Dual:
    """Multiplies the multiplier by `factor` where measured > tolerance * radius, divides it where measured < radius / tolerance.

    Args:
      radius: the aim, > 0.
      factor, tolerance: > 1.
      minimum, maximum: of the multiplier.

    Raises:
      ValueError: a negative radius.

    Source: Schulman et al. 2017 (PPO), section 4.
    """
    check_radius(radius)

    def update(state: DualState, measured: Array) -> tuple[DualState, dict[str, Array]]:
        change = jnp.where(measured > tolerance * radius, factor, jnp.where(measured < radius / tolerance, 1 / factor, 1.0))
        moved = jnp.clip(state.multiplier * change, minimum, maximum)
        following = DualState(moved, jnp.where(jnp.isfinite(measured), measured, state.average), state.count + 1)
        return optax.tree.where(jnp.isnan(measured), state, following), {'clipped': measured, 'average': measured}

    return Dual(_init, update)


def lagrangian(state: DualState, distance: Array) -> Array:
    """multiplier * distance, with no gradient into the multiplier: what a loss adds for the constraint."""
    return jax.lax.stop_gradient(state.multiplier) * distance
