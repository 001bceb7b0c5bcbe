"""The action queue on the device and on the host."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from training import rollout, streams
from training.evaluation import Evaluator, member_scores
from training.host import MAX_REPLANS, Actor, DeviceAsHost

NUM_ENVS, LENGTH = 3, 40


@pytest.fixture(scope='module')
def line():
    return envs.make('probe/line:horizon=10')


@pytest.fixture(scope='module')
def acted(dummies, line):
    """(steps, rollout state) of a rollout with plans of varying length."""
    agent = dummies.make(line.spec)
    state, key = agent.init(jax.random.key(0), {'rate': jnp.float32(0.1)}), jax.random.key(7)
    start = jax.jit(lambda key: rollout.start(line, agent.policy, state, key, 'env', NUM_ENVS))(key)
    after, steps = jax.jit(rollout.rollout(line, agent.policy, 'env', LENGTH, 'explore'))(state, start, key)
    return jax.device_get((start, after, steps))


def test_queue_obeys_lengths_and_never_crosses_an_episode(acted, dummies):
    """Inside a block: the first rows are valid, then none; nothing is valid behind the end of an episode."""
    _, after, steps = acted
    valid = steps['valid'].reshape(NUM_ENVS, -1, dummies.HORIZON)
    assert (np.diff(valid, axis=-1) <= 0).all()
    ends = ((steps['masks'] < 0.5) | (steps['truncations'] > 0.5)).reshape(valid.shape)
    behind = np.cumsum(ends, axis=-1) - ends > 0
    assert not (behind & (valid > 0)).any()
    assert ends.sum() > 2
    np.testing.assert_array_equal(after.episodes, ends.sum(axis=(1, 2)))
    assert len(set(valid.sum(-1).reshape(-1))) >= 4, 'lengths should vary'
    assert (valid.sum(-1) == 0).any(), 'a plan of length 0 leaves its block idle on the device'


def test_observe_is_called_once_per_step_before_plan(acted):
    """The memory counts observations of the episode; a plan stores what it saw: the steps of the episode so far, and the one ahead."""
    _, _, steps = acted
    for env in range(NUM_ENVS):
        in_episode = 0
        for step in range(LENGTH):
            if step % 4 == 0:
                assert steps['extras']['observed'][env, step] == in_episode + 1
            in_episode += steps['valid'][env, step]
            if steps['masks'][env, step] < 0.5 or steps['truncations'][env, step] > 0.5:
                in_episode = 0


def test_transitions_follow_the_dynamics(acted):
    """x' = clip(x + 0.1 a); the next observation is the true one, also where the episode ended and a fresh one began."""
    _, _, steps = acted
    valid = steps['valid'] > 0
    moved = np.clip(steps['observations'] + 0.1 * np.clip(steps['actions'], -1, 1), -1, 1)
    np.testing.assert_allclose(steps['next_observations'][valid], moved[valid], atol=1e-6)
    for env in range(NUM_ENVS):
        rows = np.flatnonzero(valid[env])
        for row, after in itertools.pairwise(rows):
            ended = steps['masks'][env, row] < 0.5 or steps['truncations'][env, row] > 0.5
            same = np.allclose(steps['next_observations'][env, row], steps['observations'][env, after])
            assert same != ended
            assert bool(steps['first'][env, after]) == ended


def test_every_episode_starts_from_its_own_key(acted, line):
    start, after, steps = acted
    for env in range(NUM_ENVS):
        firsts = [np.asarray(start.timestep.observation)[env]]
        firsts += [steps['observations'][env, row] for row in np.flatnonzero((steps['first'][env] > 0) & (steps['valid'][env] > 0))[1:]]
        for episode, observation in enumerate(firsts[: after.episodes[env]]):
            key = streams.reset_key(jax.random.key(7), 'env', env, episode)
            np.testing.assert_allclose(observation, line.reset(key).observation, atol=1e-6)


def test_host_queue_equals_the_device(dummies, line):
    """With fixed plans and the same start, both queues make the same transitions."""
    agent = dummies.make(line.spec, fixed_length=3)
    state, key = agent.init(jax.random.key(0), {'rate': jnp.float32(0.1)}), jax.random.key(3)
    host = DeviceAsHost(line, NUM_ENVS)
    actor = Actor(agent.policy, host, 1, 'explore')
    batched = jax.tree.map(lambda leaf: leaf[None], state)
    seeds = np.arange(NUM_ENVS) + 11
    actor.start(batched, seeds)
    begun = jax.vmap(lambda seed: line.reset(jax.random.key(seed)))(jnp.asarray(seeds))
    started = rollout.start(line, agent.policy, state, key, 'env', NUM_ENVS)
    started = started._replace(
        env=begun, timestep=started.timestep._replace(observation=begun.observation, final_observation=begun.observation)
    )
    _, steps = jax.jit(rollout.rollout(line, agent.policy, 'env', 8, 'explore'))(state, started, key)

    records = []
    for block in range(2):
        keys = streams.action_key(key, 'env', block)
        plan_key = jax.random.fold_in(keys, 0)  # the host folds in the attempt
        device_plan = agent.policy.plan(state, agent.policy.init(state, NUM_ENVS), started.timestep, keys, 'explore')[0]
        host_plan = agent.policy.plan(state, agent.policy.init(state, NUM_ENVS), started.timestep, plan_key, 'explore')[0]
        assert not np.array_equal(device_plan.actions, host_plan.actions)
        records += list(actor.block(batched, jnp.stack([keys]), np.ones(NUM_ENVS, bool), lambda ended: seeds))
    valid = np.stack([record['valid'] for record in records], axis=1)
    np.testing.assert_array_equal(valid, steps['valid'])
    for env in range(NUM_ENVS):  # same dynamics from its own actions
        for record in records:
            moved = np.clip(record['observations'][env] + 0.1 * np.clip(record['actions'][env], -1, 1), -1, 1)
            if record['valid'][env]:
                np.testing.assert_allclose(record['next_observations'][env], moved, atol=1e-6)


def test_length_zero_is_asked_again_on_the_host(dummies, line):
    agent = dummies.make(line.spec, fixed_length=0)
    state = jax.tree.map(lambda leaf: leaf[None], agent.init(jax.random.key(0), {'rate': jnp.float32(0.1)}))
    actor = Actor(agent.policy, DeviceAsHost(line, 2), 1, 'explore')
    actor.start(state, np.array([1, 2]))
    assert list(actor.block(state, jnp.stack([jax.random.key(0)]), np.ones(2, bool), None)) == []
    np.testing.assert_array_equal(actor.memory['planned'], [[MAX_REPLANS, MAX_REPLANS]])


def test_a_rollout_must_fit_the_horizon(dummies, line):
    with pytest.raises(ValueError, match='not a multiple'):
        rollout.rollout(line, dummies.make(line.spec).policy, 'env', 6, 'explore')


@pytest.mark.parametrize('name', ['probe/line:horizon=10', 'probe/host-line:horizon=10'])
def test_evaluation_runs_complete_episodes(dummies, name):
    """Every episode ends; the policy is called ceil(T / H) times; members see the same starts; nothing depends on when it runs."""
    agent = dummies.make(envs.make(name).spec, fixed_length=4)
    states = jax.vmap(lambda key: agent.init(key, {'rate': jnp.float32(0.1)}))(jax.random.split(jax.random.key(0), 2))
    keys = jax.random.split(jax.random.key(1), 2)
    evaluator = Evaluator(agent.policy, name, 2, 5)
    first = evaluator(states, keys, 10)
    assert evaluator.network_calls == 3  # ceil(10 / 4): some episode lasts the whole horizon
    again = evaluator(states, keys, 10)
    assert first is not None
    assert again is not None
    for metric in first:
        np.testing.assert_array_equal(first[metric], again[metric])
    assert first['length'].max() == 10
    assert set(first) == {'return', 'length', 'success'}
    swapped = evaluator(jax.tree.map(lambda leaf: leaf[::-1], states), keys[::-1], 10)
    assert swapped is not None
    np.testing.assert_allclose(swapped['return'], first['return'][::-1], rtol=1e-6)
    assert evaluator(states, keys, 10, stop=lambda: True) is None


def test_a_diverged_member_is_scored_as_worst():
    scores = {
        'success': np.array([[1.0, 1.0], [1.0, 0.0]]),
        'length': np.array([[3.0, 5.0], [4.0, 4.0]]),
        'return': np.array([[-1.0, -2.0], [-7.0, -3.0]]),
    }
    means = member_scores(scores, np.array([True, False]), horizon=20)
    assert {name: values.tolist() for name, values in means.items()} == {'success': [0, 0.5], 'length': [20, 4], 'return': [-7, -5]}
