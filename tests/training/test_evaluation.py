"""Evaluation: where episodes start, who steps them, and a policy that never acts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from agents.types import Stage
from training import loop, streams
from training.evaluation import Evaluator
from training.host import DeviceAsHost

HOST = 'probe/host-line:horizon=10'


def made(dummies, length):
    agent = dummies.make(envs.make(HOST).spec, fixed_length=length)
    states = jax.vmap(lambda key: agent.init(key, dummies.HYPER))(jax.random.split(jax.random.key(0), 2))
    return agent, states, jax.random.split(jax.random.key(1), 2)


def test_worker_processes_change_nothing(dummies):
    agent, states, keys = made(dummies, 4)
    alone = Evaluator(agent.policy, HOST, 2, 3)
    shared = Evaluator(agent.policy, HOST, 2, 3, num_workers=2)
    try:
        scores, others = alone(states, keys, 5), shared(states, keys, 5)
    finally:
        shared.close()
    assert scores is not None
    assert others is not None
    assert scores.keys() == others.keys()
    for name, values in scores.items():
        np.testing.assert_array_equal(values, others[name])


class Recorder(DeviceAsHost):
    """Remembers the seeds of its starts."""

    def __init__(self, env, num_envs):
        super().__init__(env, num_envs)
        self.seeds = []

    def reset(self, seeds, where):
        assert where.all(), 'an evaluation starts each episode once'
        self.seeds.append(np.asarray(seeds).tolist())
        return super().reset(seeds, where)


def test_all_members_and_times_start_alike(dummies):
    """Episode n starts from start_seed(n) for member 0 and 1, before and after training."""
    agent, states, keys = made(dummies, 4)
    recorder = Recorder(envs.make('probe/line:horizon=10'), 2 * 3)
    evaluator = Evaluator(agent.policy, '', 2, 3, env=recorder)
    evaluator(states, keys, 0)
    evaluator(states, keys, 100)
    expected = [streams.start_seed(episode) for episode in range(3)]
    assert recorder.seeds == [expected * 2] * 2


def test_actions_depend_on_the_update_and_the_mode(dummies):
    agent, states, keys = made(dummies, 4)
    evaluator = Evaluator(agent.policy, HOST, 2, 3)
    returns = [evaluator(states, keys, counter, mode) for counter, mode in ((0, 'eval'), (1, 'eval'), (0, 'explore'))]
    values = [tuple(scores['return'].reshape(-1)) for scores in returns if scores is not None]
    assert len(set(values)) == 3


def test_a_policy_that_never_acts_is_an_error_not_a_hang(dummies):
    agent, states, keys = made(dummies, 0)
    with pytest.raises(ValueError, match='planned no action 8 times in a row'):
        Evaluator(agent.policy, HOST, 2, 1)(states, keys, 0, stop=Patience(20))


class Patience:
    """Stops an evaluation that goes on for ever."""

    def __init__(self, blocks):
        self.left = blocks

    def __call__(self):
        self.left -= 1
        return self.left < 0


def test_success_counts_if_it_ever_was(dummies):
    """Straight to the goal: x starts in [-1, 0] and gains 0.1 per step, so at most 20 of 40 steps are needed and success is 1."""
    agent, states, keys = made(dummies, 4)

    def plan(state, memory, timestep, key, mode):
        planned, memory = agent.policy.plan(state, memory, timestep, key, mode)
        return planned._replace(actions=jnp.ones_like(planned.actions)), memory

    policy = agent.policy._replace(plan=plan)
    scores = Evaluator(policy, 'probe/host-line:horizon=40', 2, 3)(states, keys, 0)
    assert scores is not None
    assert (scores['success'] == 1).all()
    starts = [np.random.default_rng(streams.start_seed(episode)).uniform(-1, 0) for episode in range(3)]
    expected = [int(np.floor((0.95 - start) / 0.1)) + 1 for start in starts]  # steps until x > 0.95
    np.testing.assert_array_equal(scores['length'], [expected] * 2)


def test_a_mode_that_the_policy_lacks_is_refused_before_a_step(dummies):
    """By the evaluator, by a rollout's need, and by fit before it opens a folder; a policy says itself which modes it has."""
    agent, states, keys = made(dummies, 4)
    recorder = Recorder(envs.make('probe/line:horizon=10'), 2 * 3)
    evaluator = Evaluator(agent.policy, '', 2, 3, env=recorder)
    with pytest.raises(ValueError, match='choose eval, explore'):
        evaluator(states, keys, 0, 'bogus')
    acts = agent.phases['train'].needs['fresh']._replace(mode='bogus')
    phase = agent.phases['train']._replace(needs={'fresh': acts})
    line = envs.make('probe/line')
    with pytest.raises(ValueError, match='choose eval, explore'):
        loop.check(agent._replace(phases={'train': phase}), [Stage('train', 1)], loop.Sources({}, {'env': line}))
    own = Evaluator(agent.policy._replace(modes=('eval', 'bogus')), '', 2, 3, env=recorder)
    assert recorder.seeds == []
    assert own(states, keys, 0, 'bogus') is not None
