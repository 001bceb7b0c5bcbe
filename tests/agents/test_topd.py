"""TOP-D: identities between its forms, what its options do, and that it learns an exact teacher."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import agents
import envs
import training
from envs import lqr
from envs.types import ArraySpec, Spec
from losses.distances import gaussian_kl
from training.rollout import first_timestep

SPEC = Spec(ArraySpec((3,)), ArraySpec((2,)), 100)
SMALL: dict[str, Any] = {'hidden_sizes': (8,), 'teacher_hidden_sizes': (), 'rollout_length': 4, 'num_minibatches': 2}
ANALYTIC: dict[str, Any] = {'estimator': 'analytic', 'proximal': 'none'}


def make(spec=SPEC, **options):
    return agents.make('topd', spec, **{**SMALL, **options})


def start(agent, **hyper):
    return agent.init(jax.random.key(0), {name: jnp.float32(hyper.get(name, value)) for name, value in agent.hyper.items()})


def rollout_of(agent, state, seed=1, num_envs=4, length=4):
    """A rollout of states drawn from a normal, with the student's own actions."""
    observations = jax.random.normal(jax.random.key(seed), (num_envs, length, 3))
    timestep = first_timestep(observations.reshape(-1, 3), (2,))
    plan, _ = agent.policy.plan(state, (), timestep, jax.random.key(seed + 100), 'explore')
    ones = jnp.ones((num_envs, length))
    extras = {'unsquashed': plan.extras['unsquashed'].reshape(num_envs, length, -1)}
    return {'fresh': {'observations': observations, 'extras': extras, 'masks': ones, 'truncations': 0 * ones, 'valid': ones}}


def update(agent, state, batch):
    return jax.jit(agent.phases['train'].update)(state, batch, jnp.int32(0), jax.random.key(9))


def moved(agent, state, batch):
    """New parameters as one vector."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(update(agent, state, batch)[0].params)])


def test_a_mixture_of_the_teacher_alone_is_plain_distillation():
    plain, mixed = make(proximal='none'), make()
    state, batch = start(mixed, teacher_weight=1.0), rollout_of(mixed, start(mixed))
    np.testing.assert_allclose(moved(mixed, state, batch), moved(plain, state, batch), rtol=1e-5, atol=1e-7)


def test_with_one_action_entry_both_credits_agree():
    spec = SPEC._replace(actions=ArraySpec((1,)))
    joint, single = make(spec), make(spec, estimator='per_dimension')
    state = start(joint)
    batch = rollout_of(make(), start(make()))
    batch['fresh']['extras']['unsquashed'] = batch['fresh']['extras']['unsquashed'][..., :1]
    np.testing.assert_allclose(moved(joint, state, batch), moved(single, state, batch), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    'options', [{}, {'proximal': 'none'}, {'estimator': 'per_dimension'}, ANALYTIC, {**ANALYTIC, 'proximal': 'kl_radius'}]
)
def test_student_at_the_teacher_stays(options):
    """Equal distributions: every reward and every KL is 0, so is the gradient (without normalisation, which would divide by the floor)."""
    agent = make(hidden_sizes=(8,), teacher_hidden_sizes=(8,), normalize_advantages=False, **options)
    state = start(agent)
    state = state._replace(teacher=state.params['policy'])
    new, metrics = update(agent, state, rollout_of(agent, state))
    assert float(metrics['grad/norm']) < 1e-6
    assert float(metrics['distill/kl_to_teacher']) < 1e-10
    jax.tree.map(np.testing.assert_array_equal, new.teacher, state.teacher)


def test_gradient_of_sampled_distillation_points_down_the_kl():
    """Over many actions the score-function gradient without a clip is that of KL(student || teacher), at the student itself."""
    agent = make(proximal='none', num_minibatches=1, normalize_advantages=False)
    state = start(agent)
    phase: Any = agent.phases['train']
    batch = rollout_of(agent, state, num_envs=4000, length=4)
    sampled = jax.jit(lambda params: jax.grad(lambda p: phase.loss(p, state, phase.prepare(state, batch, None), None)[0])(params))(
        state.params
    )
    exact_phase: Any = make(**ANALYTIC, num_minibatches=1).phases['train']
    exact = jax.jit(
        lambda params: jax.grad(lambda p: exact_phase.loss(p, state, exact_phase.prepare(state, batch, None), None)[0])(params)
    )(state.params)
    left, right = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (sampled, exact))
    cosine = left @ right / np.linalg.norm(left) / np.linalg.norm(right)
    assert cosine > 0.98, cosine
    np.testing.assert_allclose(np.linalg.norm(left) / np.linalg.norm(right), 1, atol=0.1)


def test_the_radius_holds_in_every_state():
    agent = make(**{**ANALYTIC, 'proximal': 'kl_radius'})
    state = start(agent, kl_budget=0.05)
    phase: Any = agent.phases['train']
    prepared = phase.prepare(state, rollout_of(agent, state), None)
    distances = gaussian_kl(*prepared['rows']['target'], *prepared['rows']['old'])
    assert float(distances.max()) <= 0.05 * 1.0001
    assert float(prepared['seen']['distill/projected']) > 0.5


@pytest.mark.parametrize(
    ('options', 'field', 'value'),
    [
        ({'estimator': 'analytic', 'proximal': 'kl_radius'}, 'kl_budget', 0.01),
        ({'estimator': 'analytic', 'proximal': 'decoupled'}, 'covariance_budget', 1e-4),
        ({'credit': 'discounted'}, 'discount', 0.5),
        ({'estimator': 'per_dimension', 'proximal': 'decoupled'}, 'kl_budget', 0.01),
    ],
)
def test_fields_of_other_options_do_something(options, field, value):
    agent = make(**options)
    state = start(agent)
    state = state._replace(teacher=jax.tree.map(lambda leaf: leaf - 1.5, state.teacher))  # narrower, and elsewhere
    batch = rollout_of(agent, state)
    other = state._replace(hyper={**state.hyper, field: jnp.float32(value)})
    assert np.abs(moved(agent, state, batch) - moved(agent, other, batch)).max() > 1e-6


def test_bounded_actions_are_squashed_by_tanh():
    agent = make(SPEC._replace(actions=ArraySpec((2,), -1, 1)))
    plan, _ = agent.policy.plan(start(agent), (), first_timestep(jnp.ones((5, 3)), (2,)), jax.random.key(0), 'explore')
    np.testing.assert_allclose(plan.actions, np.tanh(plan.extras['unsquashed']), rtol=1e-6)
    free, _ = make().policy.plan(start(make()), (), first_timestep(jnp.ones((5, 3)), (2,)), jax.random.key(0), 'explore')
    np.testing.assert_array_equal(free.actions, free.extras['unsquashed'])


def test_the_evaluation_acts_with_the_mean():
    agent, timestep = make(), first_timestep(jnp.ones((2, 3)), (2,))
    plans = [agent.policy.plan(start(agent), (), timestep, jax.random.key(seed), 'eval')[0].actions for seed in (0, 1)]
    np.testing.assert_array_equal(*plans)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'estimator': 'analytic'}, 'proximal=mixture is no Gaussian'),
        ({'aggregate': True}, 'needs estimator=analytic'),
        ({'teacher_weight': 0.0}, 'outside its range'),
        ({'proximal': 'geometric'}, 'must be one of none'),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_minibatches_must_divide_the_rollout():
    agent = make(num_minibatches=3)
    with pytest.raises(ValueError, match='do not divide into num_minibatches=3'):
        update(agent, start(agent), rollout_of(agent, start(agent)))


@pytest.mark.parametrize('options', [{**ANALYTIC, 'direction': 'forward', 'aggregate': True}, {'estimator': 'per_dimension'}])
def test_it_learns_the_exact_policy(options):
    """60 updates on the double integrator: the KL to the Riccati policy falls to a tenth on the states that the student visits."""
    env = envs.make('lqr/double-integrator')
    gain, covariance, _ = lqr.optimal_policy(1, temperature=1.0)
    agent = agents.make(
        'topd', env.spec, teacher_hidden_sizes=(), rollout_length=8, num_minibatches=8, batch_size=64, learning_rate=1e-2, **options
    )
    layer = {'kernel': jnp.asarray(gain.T, jnp.float32), 'bias': jnp.zeros(1)}
    teacher = {'params': {'MLP_0': {'Dense_0': layer}, 'log_std': jnp.asarray(0.5 * np.log(np.diag(covariance)), jnp.float32)}}
    seen = []
    result = training.fit(
        agent,
        env,
        60,
        (0, 1),
        num_envs=8,
        replay_capacity=480,
        prepare_states=lambda states, team: states._replace(teacher=jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), teacher)),
        control=training.Control(log_interval=1, num_devices=1),
        progress_fn=lambda count, metrics: seen.append(np.asarray(metrics['distill/kl_to_teacher'])),
        announce=lambda line: None,
    )
    assert not result.stopped
    kl = np.asarray(seen)
    assert (kl[-5:].mean(0) < 0.1 * kl[:5].mean(0)).all(), kl
