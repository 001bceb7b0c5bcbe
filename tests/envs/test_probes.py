"""The probe environments against values worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs

ONE_STEP = ['constant', 'observation', 'action', 'policy']


def rollout(name, actions, seed=0):
    """States [T + 1] of one episode of fixed actions [T], jitted."""
    env = envs.make(name)

    def body(state, action):
        state = env.step(state, action[None])
        return state, state

    start = env.reset(jax.random.key(seed))
    _, states = jax.lax.scan(body, start, jnp.asarray(actions, jnp.float32))
    return jax.tree.map(lambda first, rest: np.concatenate([np.asarray(first)[None], np.asarray(rest)]), start, states)


def test_start_reports_nothing():
    for name in ['constant', 'delay', 'line']:
        state = rollout(f'probe/{name}', [])
        assert (state.reward[0], state.mask[0], state.truncation[0], state.metrics['success'][0]) == (0, 1, 0, 0)


@pytest.mark.parametrize('name', ONE_STEP)
def test_one_step_probes_end_truly_after_one_step(name):
    states = rollout(f'probe/{name}', [0.3])
    assert states.mask.tolist() == [1, 0]
    assert states.truncation.tolist() == [0, 0]  # horizon 1 as well, but nothing was cut
    assert envs.make(f'probe/{name}').spec.horizon == 1


def test_rewards_by_hand():
    assert rollout('probe/constant', [0.3]).reward[1] == 1
    for seed in range(6):
        states = rollout('probe/observation', [0.3], seed)
        assert states.reward[1] == states.observation[0, 0]
        states = rollout('probe/policy', [0.3], seed)
        # o = 1: 1 - (0.3 - 0.5)^2 = 0.96; o = -1: 1 - (0.3 + 0.5)^2 = 0.36.
        np.testing.assert_allclose(states.reward[1], 0.96 if states.observation[0, 0] > 0 else 0.36, rtol=1e-6)
    np.testing.assert_allclose(rollout('probe/action', [-0.5]).reward[1], 0.0, atol=1e-7)  # 1 - (-0.5 - 0.5)^2
    np.testing.assert_allclose(rollout('probe/action', [0.5]).reward[1], 1.0)


@pytest.mark.parametrize('name', ['observation', 'policy'])
def test_signs_are_fair(name):
    env = envs.make(f'probe/{name}')
    starts = jax.vmap(lambda key: env.reset(key).observation)(jax.random.split(jax.random.key(0), 1000))
    assert set(np.unique(starts)) == {-1.0, 1.0}
    assert abs(np.mean(starts)) < 0.1  # three standard errors


def test_delay_pays_on_the_second_step():
    states = rollout('probe/delay', [0.0, 0.0])
    assert states.observation[:, 0].tolist() == [0, 1, 1]
    assert states.reward.tolist() == [0, 0, 1]
    assert states.mask.tolist() == [1, 1, 0]
    assert states.truncation.tolist() == [0, 0, 0]


def test_infinite_is_cut_and_never_ends():
    states = rollout('probe/infinite:reward=2,horizon=3', np.zeros(3))
    assert states.reward[1:].tolist() == [2, 2, 2]
    assert states.mask.tolist() == [1, 1, 1, 1]
    assert states.truncation.tolist() == [0, 0, 0, 1]


def test_line_ends_truly_or_is_cut():
    right = rollout('probe/line', np.ones(20))
    end = int(np.argmin(right.mask))
    assert right.observation[end, 0] > 0.95 >= right.observation[end - 1, 0]
    assert right.metrics['success'][end] == 1
    assert right.truncation[: end + 1].sum() == 0
    np.testing.assert_allclose(right.reward[1 : end + 1], right.observation[1 : end + 1, 0] - 1, atol=1e-6)  # -|x - 1| left of 1
    still = rollout('probe/line:horizon=5', np.zeros(5))
    assert still.mask.tolist() == [1] * 6
    assert still.truncation.tolist() == [0] * 5 + [1]


def test_line_can_always_be_solved_in_time():
    """From -1, twenty full steps lead to 1."""
    env = envs.make('probe/line')
    starts = jax.vmap(lambda key: env.reset(key).observation)(jax.random.split(jax.random.key(0), 200))
    assert -1 <= starts.min() < -0.9 < -0.1 < starts.max() <= 0


def test_host_line_is_line():
    actions = np.random.default_rng(1).uniform(-0.2, 1, 12).astype(np.float32)
    device = rollout('probe/line:horizon=10', actions[:10])
    host = envs.make('probe/host-line:horizon=10')
    host.reset(np.zeros(1, int), np.ones(1, bool))
    state = host.get_state()
    state['simulation/positions'][:] = device.observation[0]
    host.set_state(state)
    for index, action in enumerate(actions[:10], start=1):
        step = host.step(action.reshape(1, 1), np.ones(1, bool))
        np.testing.assert_allclose(step.observations[0], device.observation[index], atol=1e-6)
        np.testing.assert_allclose(step.rewards[0], device.reward[index], atol=1e-6)
        assert step.masks[0] == device.mask[index]
        assert step.truncations[0] == device.truncation[index]
        if device.mask[index] == 0:
            break


@pytest.mark.parametrize('name', [f'probe/{name}' for name in [*ONE_STEP, 'delay', 'infinite', 'line']])
def test_vmap_and_jit_equal_one_by_one(name):
    env = envs.make(name)
    keys = jax.random.split(jax.random.key(0), 3)
    actions = jnp.array([[-1.0], [0.25], [1.0]])
    together = jax.jit(lambda keys, actions: jax.vmap(env.step)(jax.vmap(env.reset)(keys), actions))(keys, actions)
    for index in range(3):
        alone = env.step(env.reset(keys[index]), actions[index])
        jax.tree.map(lambda a, b, i=index: np.testing.assert_allclose(a, b[i], atol=1e-6), alone, together)
        assert jax.tree.structure(alone) == jax.tree.structure(together)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(together._replace(physics=()))} == {'float32'}
    assert together.observation.shape == (3, *env.spec.observations.shape)
    assert env.on_device
