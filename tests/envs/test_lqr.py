"""The double integrator against the Riccati equation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from envs import lqr


def rollout(env, start, gain, steps):
    """Return of the linear policy `gain` from `start`."""
    state = env.reset(jax.random.key(0))._replace(observation=jnp.asarray(start, jnp.float32))

    def step(state, _):
        state = env.step(state, jnp.asarray(gain, jnp.float32) @ state.observation)
        return state, (state.reward, state.truncation, state.mask)

    return jax.lax.scan(step, state, None, steps)[1]


def test_value_of_the_best_policy():
    """Its return over 400 steps is -x^T P x; other gains do worse."""
    env, start = envs.make('lqr/double-integrator:axes=2,horizon=400'), [0.5, -1.0, 0.3, 0.8]
    gain, _, value = lqr.optimal_policy(2)
    rewards, truncations, masks = rollout(env, start, gain, 400)
    np.testing.assert_allclose(rewards.sum(), -np.asarray(start) @ value @ np.asarray(start), rtol=1e-4)
    assert (np.flatnonzero(truncations) == [399]).all()
    assert (np.asarray(masks) == 1).all()
    for factor in (0.8, 1.2):
        assert float(rollout(env, start, factor * gain, 400)[0].sum()) < float(rewards.sum())


def test_one_step_by_hand():
    """p = 1, v = 2, u = 3: cost 1 + 0.4 + 0.09; then p = 1.2, v = 2.3."""
    env = envs.make('lqr/double-integrator')
    state = env.step(env.reset(jax.random.key(0))._replace(observation=jnp.array([1.0, 2.0])), jnp.array([3.0]))
    np.testing.assert_allclose(state.reward, -1.49, rtol=1e-6)
    np.testing.assert_allclose(state.observation, [1.2, 2.3], rtol=1e-6)


def test_covariance_of_the_entropy_optimum():
    """S is where temperature * entropy - u^T (R + B^T P B) u is largest: perturbing it by a factor lowers that."""
    _, covariance, value = lqr.optimal_policy(1, temperature=0.3)
    problem = lqr.problem(1)
    curvature = (problem.R + problem.B.T @ value @ problem.B).item()

    def objective(variance):
        return 0.3 * 0.5 * np.log(variance) - curvature * variance

    assert objective(covariance.item()) > max(objective(1.1 * covariance.item()), objective(0.9 * covariance.item()))


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('lqr/double', 'did you mean lqr/double-integrator'),
        ('lqr/double-integrator:axes=0', 'axes must be a whole number'),
        ('lqr/double-integrator:axis=1', "no option 'axis'"),
    ],
)
def test_bad_names_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        envs.make(name)
