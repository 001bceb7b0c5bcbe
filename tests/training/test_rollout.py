"""The action queue on the device and on the host."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from training import rollout, streams
from training.collect import Collector
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
    state, key = agent.init(jax.random.key(0), dummies.HYPER), jax.random.key(7)
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
    """The same starts, keys and dynamics: every entry of every control step agrees, over two calls and several episodes of each slot."""
    agent = dummies.make(line.spec, least_length=1)  # 0 is asked again on the host and idle on the device
    num_members, keys = 2, jax.random.split(jax.random.key(3), 2)
    states = jax.vmap(lambda key: agent.init(key, dummies.HYPER))(keys)

    def reset(key):  # as a collector turns the key of a start into the seed of a host environment
        return line.reset(jax.random.key(jax.random.bits(key, dtype='uint32') & np.uint32(2**31 - 1)))

    env = line._replace(reset=reset)
    started = jax.jit(jax.vmap(lambda state, key: rollout.start(env, agent.policy, state, key, 'env', NUM_ENVS)))(states, keys)
    act = jax.jit(jax.vmap(rollout.rollout(env, agent.policy, 'env', 20, 'explore')))
    collector = Collector(agent.policy, DeviceAsHost(line, num_members * NUM_ENVS), 'env', num_members, NUM_ENVS)
    collector.start(states, keys)
    ends = 0.0
    for _ in range(2):
        started, steps = act(states, started, keys)
        records = collector.collect(states, keys, 20, 'explore')
        assert records.keys() == steps.keys()
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), records, jax.device_get(steps))
        ends += (1 - steps['masks']).sum() + steps['truncations'].sum()
    assert ends > num_members * NUM_ENVS
    assert (np.asarray(steps['valid']) == 0).any()


def test_length_zero_is_asked_again_on_the_host(dummies, line):
    agent = dummies.make(line.spec, fixed_length=0)
    state = jax.tree.map(lambda leaf: leaf[None], agent.init(jax.random.key(0), dummies.HYPER))
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
    states = jax.vmap(lambda key: agent.init(key, dummies.HYPER))(jax.random.split(jax.random.key(0), 2))
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
