"""Loss values and one whole update of QAM and TRQAM against tests/agents/reference.py, with the same noises and parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import agents
from envs.types import ArraySpec, Spec

BATCH, CHUNK, STEPS, ACTIONS = 6, 2, 4, 2
SPEC = Spec(ArraySpec((3,)), ArraySpec((ACTIONS,), -1, 1), 100)
SIZES = {'hidden_sizes': (16, 16), 'critic_hidden_sizes': (16, 16), 'horizon_length': CHUNK, 'flow_steps': STEPS, 'batch_size': BATCH}


def inputs(seed):
    random = np.random.default_rng(seed)
    batch = {
        'observations': random.normal(size=(BATCH, CHUNK, 3)),
        'next_observations': random.normal(size=(BATCH, CHUNK, 3)),
        'actions': random.uniform(-1, 1, (BATCH, CHUNK, ACTIONS)),
        'rewards': random.normal(size=(BATCH, CHUNK)),
        'masks': np.array([[1, 1], [1, 0], [0, 1], [1, 1], [1, 1], [1, 1.0]]),
        'valid': np.array([[1, 1], [1, 1], [1, 1], [1, 0], [1, 1], [1, 1.0]]),
    }
    size = CHUNK * ACTIONS
    noises = {
        'next_actions': random.normal(size=(1, BATCH, size)),
        'clone': random.normal(size=(BATCH, size)),
        'times': random.uniform(size=(BATCH, 1)),
        'path': random.normal(size=(BATCH, size)),
        'path_steps': random.normal(size=(STEPS - 1, BATCH, size)),
    }
    return batch, noises


def with_moments(opt_state, random):
    """Adam in the middle of a run. From zero moments its step is only the sign of the gradient, blind to every factor."""
    adam, *rest = opt_state
    mu = jax.tree.map(lambda leaf: jnp.asarray(0.01 * random.normal(size=leaf.shape), jnp.float32), adam.mu)
    nu = jax.tree.map(lambda leaf: jnp.asarray(random.uniform(1e-5, 1e-3, leaf.shape), jnp.float32), adam.nu)
    return (adam._replace(count=jnp.int32(3), mu=mu, nu=nu), *rest)


def doubled(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), tree)


@pytest.mark.parametrize(('name', 'num_critics'), [('qam', 2), ('trqam', 10)])
def test_one_update_equals_the_reference(helper, name, num_critics):
    reference = helper('agents/reference.py')
    agent = agents.make(name, SPEC, num_critics=num_critics, **SIZES)
    state = agent.init(jax.random.key(3), {key: jnp.float32(value) for key, value in agent.hyper.items()})
    # targets that differ from the parameters, so that a mix-up shows
    state = state._replace(target_params=jax.tree.map(lambda leaf: leaf * 1.1 + 0.01, state.target_params))
    state = state._replace(opt_state=with_moments(state.opt_state, np.random.default_rng(1)))
    if name == 'trqam':
        state = state._replace(temperature=state.temperature._replace(multiplier=jnp.float32(0.7), average=jnp.float32(0.4)))
    batch, noises = inputs(seed=num_critics)
    single = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), {'data': batch, 'noises': noises})
    new, metrics = jax.jit(agent.phases['train'].update)(state, single, 0, jax.random.key(0))

    hyper = {key: float(value) for key, value in agent.hyper.items()}
    scale, regularisation = (hyper['inverse_temperature'], 1.0) if name == 'qam' else (1.0, 3 * 0.7)
    setting = {**hyper, 'flow_steps': STEPS, 'horizon_length': CHUNK, 'adjoint_scale': scale, 'lambda': regularisation}
    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        adam = state.opt_state[0]
        arguments = doubled((state.params, state.target_params, (3, adam.mu, adam.nu), batch, noises))
        expected, targets, mu, terms = jax.device_get(jax.jit(lambda *args: reference.update(*args, setting))(*arguments))
    named = {
        'critic': 'critic/loss',
        'clone': 'actor/clone_loss',
        'matching': 'actor/matching_loss',
        'kl': 'actor/path_kl',
        'norm': 'grad/norm',
    }
    for term, metric in named.items():
        np.testing.assert_allclose(float(metrics[metric]), float(terms[term]), rtol=2e-5, err_msg=term)
    assert terms['norm'] > 2  # so that the clip binds
    pairs = {'moments': (new.opt_state[0].mu, mu), 'params': (new.params, expected), 'targets': (new.target_params, targets)}
    for what, (ours, theirs) in pairs.items():
        for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(np.asarray(one), other, rtol=2e-6, atol=5e-7, err_msg=what)  # a step of Adam is about 3e-4
    if name == 'trqam':
        kl, budget = float(terms['kl']), hyper['kl_budget']
        average = 0.9 * 0.4 + 0.1 * min(kl, 2 * budget)
        np.testing.assert_allclose(float(new.temperature.multiplier), 0.7 + 0.01 * (average - budget), rtol=1e-6)
        np.testing.assert_allclose(float(metrics['dual/kl_average']), average, rtol=1e-5)
