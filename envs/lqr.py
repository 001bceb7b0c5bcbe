"""Linear dynamics with a quadratic cost, whose best policy and value are known exactly.

lqr/double-integrator   `axes` (1) point masses side by side: p' = p + v / 10, v' = v + u / 10, observation [p..., v...], action u without
                        bounds, reward -(|p|^2 + |v|^2 / 10 + |u|^2 / 100), starts uniform in [-1, 1]; cut after `horizon` (50) steps.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from envs import registry
from envs.types import ArraySpec, DeviceEnv, EnvState, Spec

_TIME_STEP = 0.1


class Problem(NamedTuple):
    """x' = A x + B u, cost x^T Q x + u^T R u per step; float64."""

    A: np.ndarray  # [O, O]
    B: np.ndarray  # [O, A]
    Q: np.ndarray  # [O, O]
    R: np.ndarray  # [A, A]


def problem(axes: int = 1) -> Problem:
    """The matrices of `lqr/double-integrator`."""
    eye, zero = np.eye(axes), np.zeros((axes, axes))
    return Problem(
        A=np.block([[eye, _TIME_STEP * eye], [zero, eye]]),
        B=np.concatenate([zero, _TIME_STEP * eye]),
        Q=np.block([[eye, zero], [zero, 0.1 * eye]]),
        R=0.01 * eye,
    )


def optimal_policy(axes: int = 1, temperature: float = 0.01) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The policy that maximises return + temperature * entropy over an infinite horizon: N(K x, S), exactly Gaussian.

    Returns:
      (K [A, O], S [A, A], P [O, O] with value -x^T P x up to a constant): K = -(R + B^T P B)^-1 B^T P A, S = temperature / 2 *
      (R + B^T P B)^-1, P from the discrete algebraic Riccati equation.
    """
    import scipy.linalg

    A, B, Q, R = problem(axes)
    P = scipy.linalg.solve_discrete_are(A, B, Q, R)
    curvature = R + B.T @ P @ B
    return -np.linalg.solve(curvature, B.T @ P @ A), 0.5 * temperature * np.linalg.inv(curvature), P


def names() -> tuple[str, ...]:
    return ('double-integrator',)


def canonical(identifier: str) -> str:
    if identifier not in names():
        raise registry.unknown('environment', f'lqr/{identifier}', [f'lqr/{name}' for name in names()])
    return identifier


def is_on_device(identifier: str) -> bool:
    del identifier
    return True


def make(identifier: str, num_envs: int, options: Mapping[str, Any]) -> DeviceEnv:
    """See `envs.make`. `identifier` is canonical."""
    del num_envs
    registry.check_no_options(f'lqr/{identifier}', options, ('axes', 'horizon'))
    return _double_integrator(**options)


def _double_integrator(axes: int = 1, horizon: int = 50) -> DeviceEnv:
    import jax
    import jax.numpy as jnp

    for name, value in (('axes', axes), ('horizon', horizon)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f'{name} must be a whole number of at least 1, not {value!r}')
    A, B, Q, R = (jnp.asarray(matrix, jnp.float32) for matrix in problem(axes))

    def state(count: Any, observation: Any, reward: Any) -> EnvState:
        truncation = jnp.asarray(count >= horizon, jnp.float32)
        return EnvState(count, observation, reward, jnp.ones(()), truncation, {})

    def reset(key: Any) -> EnvState:
        return state(jnp.zeros((), jnp.int32), jax.random.uniform(key, (2 * axes,), minval=-1), jnp.zeros(()))

    def step(previous: EnvState, action: Any) -> EnvState:
        x, u = previous.observation, jnp.asarray(action, jnp.float32)
        cost = x @ Q @ x + u @ R @ u
        return state(previous.physics + 1, A @ x + B @ u, -cost)

    return DeviceEnv(Spec(ArraySpec((2 * axes,)), ArraySpec((axes,)), horizon), reset, step)
