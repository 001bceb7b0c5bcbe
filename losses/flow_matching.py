"""Flow policies: noise at flow time 0, action at flow time 1 (Lipman et al. 2210.02747; as used in FQL 2502.02538 and QAM 2601.14234)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

Velocity = Callable[[Array, Array], Array]  # (actions [..., A], times [..., 1]) -> [..., A]; observations are closed over


def flow_matching_loss(velocity: Velocity, actions: Array, noises: Array, times: Array, valid: Array) -> Array:
    """mean_b valid_b * mean_i (v(x_t, t) - (x_1 - x_0))_i^2 with x_t = (1 - t) x_0 + t x_1, the straight path.

    Args:
      velocity: the field to train.
      actions: x_1, [B, A].
      noises: x_0 from a standard normal, [B, A].
      times: t from [0, 1], [B, 1].
      valid: 0 or 1, [B]; the mean still divides by B, as published.
    """
    interpolated = (1 - times) * noises + times * actions
    errors = velocity(interpolated, times) - (actions - noises)
    return jnp.mean(valid * jnp.mean(jnp.square(errors), axis=-1))


def integrate_flow(velocity: Velocity, noises: Array, num_steps: int) -> Array:
    """Explicit Euler from noise [..., A] to action [..., A]; the caller clips the end point, never the path."""

    def euler_step(actions, time):
        times = jnp.full((*actions.shape[:-1], 1), time)
        return actions + velocity(actions, times) / num_steps, None

    actions, _ = jax.lax.scan(euler_step, noises, jnp.arange(num_steps, dtype=noises.dtype) / num_steps)
    return actions
