"""Adjoint matching of a flow policy to a critic, and the KL between whole denoising paths.

Sources: Adjoint Matching 2409.08861 (memoryless noise, lean adjoint), QAM 2601.14234, TRQAM (lambda inside the noise scale, path KL).
Notation: T flow steps, h = 1/T, t_k = k/T; states are x_0 .. x_{T-1}, `final` is x_T; v is the tuned field, v_b the base field.
A field takes (actions [..., A], times [..., 1]); observations are closed over.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from losses import distances
from losses.flow_matching import Velocity


class Path(NamedTuple):
    """One simulated denoising path per batch row."""

    states: Array  # [T, B, A]
    final: Array  # [B, A]


def flow_times(num_steps: int, dtype=jnp.float32) -> Array:
    """t_k = k / T, [T]."""
    return jnp.arange(num_steps, dtype=dtype) / num_steps


def diffusion_squared(times: Array, step_size: float) -> Array:
    """g_k^2 = 2 (1 - t_k + h) / (t_k + h): the memoryless noise 2 (1 - t) / t, shifted by one step so that it is finite at t = 0."""
    return 2 * (1 - times + step_size) / (times + step_size)


def _column(time: Array, like: Array) -> Array:
    return jnp.full((*like.shape[:-1], 1), time)


def simulate_path(velocity: Velocity, base_velocity: Velocity, noise: Array, step_noises: Array) -> Path:
    """Memoryless SDE of the tuned field: T - 1 noisy steps, then one noiseless Euler step of the base field. No gradient flows through it.

    k < T-1:  x <- x + h (2 v(x, t_k) - x / (t_k + h)) + sqrt(h) g_k eps_k
    k = T-1:  x <- x + h v_b(x, t_k)

    Args:
      velocity: v.
      base_velocity: v_b.
      noise: x_0 from a standard normal, [B, A].
      step_noises: eps_k from standard normals that share nothing with x_0, [T - 1, B, A].
    """
    num_steps = step_noises.shape[0] + 1
    step_size = 1 / num_steps
    times = flow_times(num_steps, noise.dtype)

    def noisy_step(actions, inputs):
        time, step_noise = inputs
        drift = 2 * velocity(actions, _column(time, actions)) - actions / (time + step_size)
        diffusion = jnp.sqrt(diffusion_squared(time, step_size) * step_size)
        return actions + step_size * drift + diffusion * step_noise, actions

    last, states = jax.lax.scan(noisy_step, noise, (times[:-1], step_noises))
    final = last + step_size * base_velocity(last, _column(times[-1], last))
    return jax.lax.stop_gradient(Path(jnp.concatenate([states, last[None]]), final))


def action_gradient(value: Callable[[Array], Array], actions: Array) -> Array:
    """Gradient of value(clip(a, -1, 1)) [B] with respect to a [B, A]. The clip is inside: an entry outside the box has gradient 0."""
    return jax.grad(lambda raw: jnp.sum(value(jnp.clip(raw, -1, 1))))(actions)


def lean_adjoint(base_velocity: Velocity, states: Array, terminal: Array, adjoint_time: str = 'published') -> Array:
    """Costate of the base flow: a_k = a_{k+1} + h J_k^T a_{k+1}, from a_T down to a_0.

    'published': J_k = d/dx [2 v_b(x, t_k + h) - x / (t_k + h)] at x_k, the time that both public repositories use.
    'transpose': J_k = d/dx [2 v_b(x, t_k) - x / (t_k + h)] at x_k and, for the noiseless last step, d/dx v_b(x, t_{T-1}): exactly the
    transpose of `simulate_path` with v = v_b. Its path KL is the more accurate one at small T.

    Args:
      base_velocity: v_b.
      states: x_0 .. x_{T-1}, [T, B, A].
      terminal: a_T, minus the action gradient of the value (times the inverse temperature), [B, A].
      adjoint_time: 'published' or 'transpose'.

    Returns:
      a_0 .. a_{T-1}, [T, B, A].
    """
    num_steps = states.shape[0]
    step_size = 1 / num_steps
    times = flow_times(num_steps, states.dtype)
    shift = step_size if adjoint_time == 'published' else 0.0

    def pull_back(drift, adjoint, state):
        return adjoint + step_size * jax.vjp(drift, state)[1](adjoint)[0]

    def step(adjoint, inputs):
        state, time = inputs

        def drift(actions):
            return 2 * base_velocity(actions, _column(time + shift, actions)) - actions / (time + step_size)

        adjoint = pull_back(drift, adjoint, state)
        return adjoint, adjoint

    if adjoint_time == 'published':
        return jax.lax.scan(step, terminal, (states, times), reverse=True)[1]
    last = pull_back(lambda actions: base_velocity(actions, _column(times[-1], actions)), terminal, states[-1])
    _, adjoints = jax.lax.scan(step, last, (states[:-1], times[:-1]), reverse=True)
    return jnp.concatenate([adjoints, last[None]])


def matching_loss(velocities: Array, base_velocities: Array, adjoints: Array, regularisation: Array | float = 1.0) -> Array:
    """mean_b sum_k |2 (v - v_b) / sigma_k + sigma_k a_k|^2 with sigma_k = g_k / sqrt(lambda).

    QAM has lambda = 1 and scales the adjoint by the inverse temperature; TRQAM leaves the adjoint alone and has lambda in sigma. The two
    are one: L_TRQAM(lambda) = lambda * L_QAM(inverse temperature 1 / lambda).

    Args:
      velocities: v at the states, [T, B, A], with gradient.
      base_velocities: v_b there, [T, B, A].
      adjoints: a_k, [T, B, A].
      regularisation: lambda, [].
    """
    num_steps = velocities.shape[0]
    variance = diffusion_squared(flow_times(num_steps, velocities.dtype), 1 / num_steps)
    sigma = jnp.sqrt(variance / jnp.maximum(regularisation, 1e-8))[:, None, None]
    residuals = 2 * (velocities - base_velocities) / sigma + sigma * adjoints
    return jnp.mean(jnp.sum(jnp.square(residuals), axis=(0, 2)))


def path_kl(velocities: Array, base_velocities: Array) -> Array:
    """KL of the tuned path law to the base path law per batch row, [B]: sum_k (2 h / g_k^2) |v - v_b|^2 (Girsanov; lambda cancels).

    Exact for the T - 1 simulated steps; as published it also counts the last state, where both laws take the same noiseless step.

    Args:
      velocities: v at states drawn from the tuned SDE, [T, B, A].
      base_velocities: v_b there, [T, B, A].
    """
    num_steps = velocities.shape[0]
    variance = diffusion_squared(flow_times(num_steps, velocities.dtype), 1 / num_steps)
    return distances.path_kl(2 * velocities, 2 * base_velocities, variance, 1 / num_steps)  # the drift is 2 v - x / (t + h)


def adjoint_energy(adjoints: Array) -> Array:
    """C = mean_b sum_k h g_k^2 |a_k|^2 for adjoints [T, B, A]. Where the match is exact, path KL = C / (2 lambda^2) (our derivation)."""
    num_steps = adjoints.shape[0]
    weights = diffusion_squared(flow_times(num_steps, adjoints.dtype), 1 / num_steps) / num_steps
    return jnp.mean(jnp.sum(weights[:, None] * jnp.sum(jnp.square(adjoints), axis=-1), axis=0))
