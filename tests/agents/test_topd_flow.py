"""Distillation of flows: the budget on paths holds exactly, and the student reaches the teacher."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import agents
import envs
import training
from envs.types import ArraySpec, Spec

SPEC = Spec(ArraySpec((3,)), ArraySpec((2,), -1, 1), 100)
SMALL: dict[str, Any] = {'hidden_sizes': (8,), 'teacher_hidden_sizes': (8,), 'flow_steps': 4, 'rollout_length': 4, 'num_minibatches': 2}
ONES = jnp.ones((4, 4))
BATCH = {'fresh': {'observations': jax.random.normal(jax.random.key(1), (4, 4, 3)), 'valid': ONES}}


@pytest.fixture(scope='module', params=[False, True], ids=['batch', 'state'])
def agent(request):
    return agents.make('topd_flow', SPEC, **SMALL, per_state=request.param)


def start(agent, **hyper):
    return agent.init(jax.random.key(0), {name: jnp.float32(hyper.get(name, value)) for name, value in agent.hyper.items()})


def test_the_budget_of_paths_is_exact(agent):
    """KL(old || target) on the old paths is beta^2 KL(old || teacher): the budget where it binds, the teacher itself where not."""
    for budget in (0.05, 1e6):
        seen = agent.phases['train'].prepare(start(agent, kl_budget=budget), BATCH, jax.random.key(2))['seen']
        wanted = min(budget, float(seen['distill/kl_to_teacher']))
        assert float(seen['distill/kl_to_teacher']) > 0.05
        np.testing.assert_allclose(float(seen['distill/kl_to_target']), wanted, rtol=1e-4)


def test_student_at_the_teacher_stays(agent):
    state = start(agent)
    state = state._replace(teacher=state.params['base'])
    new, metrics = jax.jit(agent.phases['train'].update)(state, BATCH, jnp.int32(0), jax.random.key(9))
    assert float(metrics['distill/kl_to_teacher']) < 1e-8
    assert float(metrics['grad/norm']) < 1e-3
    jax.tree.map(np.testing.assert_array_equal, new.teacher, state.teacher)


def test_loss_without_a_budget_is_the_path_kl(agent):
    """Before the first step the loss on all rows is KL(old || teacher) on the old paths."""
    state, phase = start(agent, kl_budget=1e6), agent.phases['train']
    prepared = phase.prepare(state, BATCH, jax.random.key(2))
    value, _ = phase.loss(state.params, state, prepared, None)
    np.testing.assert_allclose(float(value), float(prepared['seen']['distill/kl_to_teacher']), rtol=1e-5)


def test_rows_that_are_not_valid_count_for_nothing(agent):
    """Other observations in the rows of the last environment change neither the metrics nor the gradient."""
    state, update = start(agent, kl_budget=0.05), jax.jit(agent.phases['train'].update)
    valid = ONES.at[3].set(0)
    observations = BATCH['fresh']['observations']
    results = [
        update(state, {'fresh': {'observations': each, 'valid': valid}}, jnp.int32(0), jax.random.key(9))
        for each in (observations, observations.at[3].add(2.0))
    ]
    for name in ('distill/kl_to_teacher', 'distill/kl_to_target', 'distill/loss', 'grad/norm'):
        np.testing.assert_allclose(float(results[0][1][name]), float(results[1][1][name]), rtol=1e-5, err_msg=name)


def test_it_learns():
    """80 updates: the path KL to a teacher with other and larger weights falls to a tenth, and no target lies outside the budget."""
    env = envs.make('probe/line')
    agent = agents.make('topd_flow', env.spec, **{**SMALL, 'hidden_sizes': (16,), 'num_minibatches': 8, 'learning_rate': 1e-2})
    seen = []
    training.fit(
        agent,
        env,
        80,
        (0, 1),
        num_envs=8,
        prepare_states=lambda states, team: states._replace(teacher=jax.tree.map(lambda leaf: 2 * leaf, states.teacher)),
        control=training.Control(log_interval=1, num_devices=1),
        progress_fn=lambda count, metrics: seen.append({name: np.asarray(value) for name, value in metrics.items()}),
        announce=lambda line: None,
    )
    kl = np.stack([row['distill/kl_to_teacher'] for row in seen])
    assert (kl[-5:].mean(0) < 0.1 * kl[:5].mean(0)).all(), kl
    assert max(row['distill/kl_to_target'].max() for row in seen) <= 1.0001
