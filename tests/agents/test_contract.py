"""What every agent promises: pure functions, stable shapes, seeds and settings under vmap, fields that do something."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import agents
from envs.types import ArraySpec, Spec, Statistics
from training.rollout import first_timestep

BATCH, CHUNK, MEMBERS = 8, 2, 3
STATISTICS = Statistics(np.array([0.5, -0.2, 0.0]), np.array([2.0, 0.5, 1.0]), np.zeros(3), np.ones(3))
SPEC = Spec(ArraySpec((3,)), ArraySpec((2,), -1, 1), 100, STATISTICS)
FLOW = {'hidden_sizes': (8,), 'horizon_length': CHUNK, 'flow_steps': 3, 'batch_size': BATCH}
SIZES = {
    'template': {'hidden_sizes': (8,), 'batch_size': BATCH},
    'bc_flow': FLOW,
    'qam': {**FLOW, 'critic_hidden_sizes': (8,), 'num_critics': 2},
    'trqam': {**FLOW, 'critic_hidden_sizes': (8,), 'num_critics': 2},
}
NAMES = sorted(SIZES)


def batch_for(name, seed=0, rows=BATCH, action_size=2):
    random = np.random.default_rng(seed)
    lead = (rows,) if name == 'template' else (rows, CHUNK)
    batch = {
        'observations': random.normal(size=(*lead, 3)),
        'next_observations': random.normal(size=(*lead, 3)),
        'actions': random.uniform(-1, 1, (*lead, action_size)),
        'rewards': random.normal(size=lead),
        'masks': np.ones(lead),
        'truncations': np.zeros(lead),
        'valid': np.ones(lead),
    }
    return {'data': jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), batch)}


def hyper_of(agent, **changed):
    return {key: jnp.float32(changed.get(key, value)) for key, value in agent.hyper.items()}


@pytest.fixture(scope='module')
def built():
    """name -> (agent, jitted init, jitted update)."""
    made = {}
    for name in NAMES:
        agent = agents.make(name, SPEC, **SIZES[name])
        made[name] = (agent, jax.jit(agent.init), jax.jit(agent.phases['train'].update))
    return made


def close(a, b, rtol=2e-4, atol=2e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol, atol=atol), a, b)


def test_the_registry_knows_them():
    assert agents.names() == NAMES


@pytest.mark.parametrize('name', NAMES)
def test_update_keeps_shapes_and_changes_parameters(built, name):
    agent, init, update = built[name]
    state = init(jax.random.key(0), hyper_of(agent))
    new, metrics = update(state, batch_for(name), 0, jax.random.key(1))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), new) == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    assert all(value.shape == () and value.dtype == jnp.float32 for value in metrics.values())
    assert all(np.isfinite(float(value)) for value in metrics.values())
    for network in state.params:
        assert any(
            (np.asarray(a) != np.asarray(b)).any()
            for a, b in zip(jax.tree.leaves(new.params[network]), jax.tree.leaves(state.params[network]), strict=True)
        )


@pytest.mark.parametrize('name', NAMES)
def test_seeds_under_vmap_and_in_a_scan_are_the_loop(built, name):
    agent, init, update = built[name]
    keys = jax.random.split(jax.random.key(0), MEMBERS)
    update_keys = jax.vmap(lambda key: jax.random.split(key, 2))(jax.random.split(jax.random.key(1), MEMBERS))
    batch = batch_for(name)

    def train(key, update_keys):
        return jax.lax.scan(
            lambda state, key: agent.phases['train'].update(state, batch, 0, key), agent.init(key, hyper_of(agent)), update_keys
        )

    states, metrics = jax.jit(jax.vmap(train))(keys, update_keys)
    for member in range(MEMBERS):
        state = init(keys[member], hyper_of(agent))
        for key in update_keys[member]:
            state, last = update(state, batch, 0, key)
        close(jax.tree.map(lambda leaf, m=member: leaf[m, -1], metrics), last)
        # Adam turns rounding of a tiny gradient into a step of the learning rate: parameters agree up to two such steps
        close(jax.tree.map(lambda leaf, m=member: leaf[m], states.params), state.params, atol=2.1 * agent.hyper['learning_rate'])


def test_jit_is_eager(built):
    agent, init, update = built['template']
    state = init(jax.random.key(0), hyper_of(agent))
    close(
        update(state, batch_for('template'), 0, jax.random.key(1)),
        agent.phases['train'].update(state, batch_for('template'), 0, jax.random.key(1)),
    )


# Values under which each field must show: bounds that bind, a clip that is exceeded.
CHANGED = {
    'max_grad_norm': 1e-3,
    'discount': 0.5,
    'tau': 0.3,
    'pessimism': 2.0,
    'dual_min': 2.0,
    'dual_max': 0.5,
    'kl_clip': 1.0,
    'kl_budget': 1e-3,
}


@pytest.mark.parametrize('name', NAMES)
def test_every_sweepable_field_does_something(built, name):
    """One vmapped program: member 0 has the defaults, each other member one changed field; after two updates all differ from member 0."""
    agent, _, _ = built[name]
    fields = sorted(agent.hyper)
    rows = {key: np.full(len(fields) + 1, value, np.float32) for key, value in agent.hyper.items()}
    for member, key in enumerate(fields, start=1):
        rows[key][member] = CHANGED.get(key, agent.hyper[key] * 1.5)
    if 'kl_clip' in rows:  # the clip binds only above budget * clip, and the initial fields are far apart: all members get a tiny budget
        rows['kl_budget'] = np.where(np.arange(len(fields) + 1) == 1 + fields.index('kl_budget'), 2e-3, 1e-3).astype(np.float32)

    def train(hyper):
        state = agent.init(jax.random.key(0), hyper)
        for step in range(2):
            state, metrics = agent.phases['train'].update(state, batch_for(name, step), step, jax.random.key(step + 1))
        return {'state': state._replace(hyper={}), 'metrics': metrics}

    results = jax.jit(jax.vmap(train))({key: jnp.asarray(value) for key, value in rows.items()})
    for member, key in enumerate(fields, start=1):
        same = jax.tree.map(lambda leaf, m=member: bool((np.asarray(leaf[m]) == np.asarray(leaf[0])).all()), results)
        assert not all(jax.tree.leaves(same)), f'{key} changes nothing'


# For each static field a value that must give another program.
OTHER = {
    'batch_size': 4,
    'horizon_length': 3,
    'flow_steps': 5,
    'hidden_sizes': (4,),
    'critic_hidden_sizes': (4,),
    'num_critics': 3,
    'best_of_n': 2,
    'base_candidates': 3,
    'observation_octaves': 1,
    'adjoint_time': 'transpose',
    'clip': 'per_net',
    'dual_space': 'log',
}


@pytest.mark.parametrize('name', NAMES)
def test_every_static_field_changes_the_program(name):
    def program(**changed):
        agent = agents.make(name, SPEC, **{**SIZES[name], **changed})
        needs = agent.phases['train'].needs['data']
        chunk = needs.length
        batch = {
            'data': {
                k: jnp.zeros((needs.batch_size, chunk, *v.shape[2:]) if name != 'template' else (needs.batch_size, *v.shape[1:]))
                for k, v in batch_for(name)['data'].items()
            }
        }

        def run(key):
            state = agent.init(key, hyper_of(agent))
            state, metrics = agent.phases['train'].update(state, batch, 0, key)
            timestep = first_timestep(jnp.zeros((2, 3)), (2,))
            return metrics, [
                agent.policy.plan(state, (), timestep, key, mode)[0] for mode in ('eval', 'base_best' if 'qam' in name else 'eval')
            ]

        return str(jax.make_jaxpr(run)(jax.random.key(0)))

    plain = program()
    for field in dataclasses.fields(agents.module(name).Config):
        if not field.metadata['sweep']:
            default = getattr(agents.config(name, **SIZES[name]), field.name)
            other = not default if isinstance(default, bool) else OTHER[field.name]
            assert program(**{field.name: other}) != plain, f'{field.name} changes nothing'


@pytest.mark.parametrize('name', ['qam', 'trqam'])
def test_starting_from_the_clone(built, name):
    clone_agent, clone_init, _ = built['bc_flow']
    agent, init, update = built[name]
    clone = clone_init(jax.random.key(5), hyper_of(clone_agent))
    state = agent.adopt['bc'](init(jax.random.key(0), hyper_of(agent)), clone)
    timestep = first_timestep(jax.random.normal(jax.random.key(1), (4, 3)), (2,))
    plans = [
        owner.policy.plan(s, (), timestep, jax.random.key(2), 'eval')[0].actions for owner, s in ((agent, state), (clone_agent, clone))
    ]
    np.testing.assert_array_equal(plans[0], plans[1])
    assert plans[0].shape == (4, CHUNK, 2)
    _, metrics = update(state, batch_for(name), 0, jax.random.key(1))
    assert float(metrics['actor/path_kl']) < 1e-10  # v and v_b come from equal parameters; batching may round them differently


def test_frozen_base_stays():
    agent = agents.make('trqam', SPEC, **SIZES['trqam'], freeze_base=True)
    state = agent.init(jax.random.key(0), hyper_of(agent))
    new, metrics = jax.jit(agent.phases['train'].update)(state, batch_for('trqam'), 0, jax.random.key(1))
    assert set(state.params) == {'critic', 'tuned'}
    assert float(metrics['actor/clone_loss']) == 0
    jax.tree.map(np.testing.assert_array_equal, new.target_params['base'], state.target_params['base'])


def test_targets_follow_the_new_parameters(built):
    agent, init, update = built['qam']
    stale = agents.make('qam', SPEC, **SIZES['qam'], stale_targets=True)
    state = init(jax.random.key(0), hyper_of(agent))
    new, _ = update(state, batch_for('qam'), 0, jax.random.key(1))
    old, _ = jax.jit(stale.phases['train'].update)(state, batch_for('qam'), 0, jax.random.key(1))
    tau = agent.hyper['tau']
    for network in ('critic', 'base'):
        expected = jax.tree.map(lambda t, p: t * (1 - tau) + p * tau, state.target_params[network], new.params[network])
        close(new.target_params[network], expected, rtol=1e-6, atol=1e-7)
        close(old.target_params[network], state.target_params[network], rtol=1e-6, atol=1e-7)  # they start equal: nothing to follow


def test_a_wrapper_rebuilds_the_update(built):
    """With weight 0 and a transform that does nothing it is the plain agent; a transform that returns zeros stops the parameters."""
    agent, init, update = built['bc_flow']
    phase = agent.phases['train']
    state, batch = init(jax.random.key(0), hyper_of(agent)), batch_for('bc_flow')

    def with_penalty(params, state, batches, key):
        value, metrics = phase.loss(params, state, batches, key)
        return value + 0 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)), metrics

    plain, _ = update(state, batch, 0, jax.random.key(1))
    same, _ = jax.jit(phase.build(with_penalty, lambda updates, state: (updates, state)))(state, batch, 0, jax.random.key(1))
    close(same, plain, rtol=1e-6, atol=1e-7)

    def stop(updates, state):
        return jax.tree.map(jnp.zeros_like, updates), state._replace(aux={'stopped': jnp.float32(1)})

    stopped, _ = jax.jit(phase.build(phase.loss, stop))(state, batch, 0, jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, stopped.params, state.params)
    assert float(stopped.aux['stopped']) == 1


def test_invalid_rows_and_terminals(built):
    """Rows that are not valid give no critic or clone loss; a true terminal removes the bootstrap."""
    agent, init, _ = built['qam']
    state = init(jax.random.key(0), hyper_of(agent))
    phase = agent.phases['train']
    batch = batch_for('qam')
    batch['data']['valid'] = batch['data']['valid'].at[:, -1].set(0)
    _, metrics = phase.loss(state.params, state, phase.prepare(state, batch, jax.random.key(1)), jax.random.key(2))
    assert float(metrics['critic/loss']) == 0
    assert float(metrics['actor/clone_loss']) == 0
    batch = batch_for('qam')
    batch['data']['masks'] = batch['data']['masks'].at[:, 1].set(0)
    targets = phase.prepare(state, batch, jax.random.key(1))['targets']['td']
    rewards = batch['data']['rewards']
    np.testing.assert_allclose(targets, rewards[:, 0] + 0.99 * rewards[:, 1], rtol=1e-5)


@pytest.mark.parametrize('name', NAMES)
def test_no_key_is_used_twice(name):
    agent = agents.make(name, SPEC, **SIZES[name])
    with jax.debug_key_reuse(True):
        state = agent.init(jax.random.key(0), hyper_of(agent))
        state, _ = jax.jit(agent.phases['train'].update)(state, batch_for(name), 0, jax.random.key(1))
        agent.policy.plan(state, (), first_timestep(jnp.zeros((2, 3)), (2,)), jax.random.key(2), 'eval')


def test_one_action_entry_and_one_row():
    spec = SPEC._replace(actions=ArraySpec((1,), -1, 1))
    agent = agents.make('trqam', spec, **{**SIZES['trqam'], 'horizon_length': CHUNK})
    state = agent.init(jax.random.key(0), hyper_of(agent))
    _, metrics = jax.jit(agent.phases['train'].update)(state, batch_for('trqam', rows=1, action_size=1), 0, jax.random.key(1))
    assert np.isfinite(float(metrics['grad/norm']))


@pytest.mark.parametrize(
    ('overrides', 'message'),
    [
        ({'lr': 1e-3}, 'did you mean learning_rate'),
        ({'num_qs': 2}, 'did you mean num_critics'),
        ({'kl_budgt': 1.0}, 'did you mean kl_budget'),
        ({'kl_budget': -1.0}, r'outside its range \[1e-06, inf\]'),
        ({'learning_rate': float('nan')}, 'outside its range'),
        ({'batch_size': 0}, 'outside its range'),
        ({'batch_size': 1.5}, 'must be of type int'),
        ({'clip': 'both'}, 'one of joint, per_net'),
        ({'hidden_sizes': (64, 0)}, 'outside its range'),
        ({'hidden_sizes': [64]}, 'must be of type tuple'),
        ({'flow_steps': True}, 'must be of type int'),
    ],
)
def test_wrong_fields_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        agents.make('trqam', SPEC, **overrides)


def test_an_unknown_mode_is_refused(built):
    agent, init, _ = built['trqam']
    with pytest.raises(ValueError, match='base_best'):
        agent.policy.plan(init(jax.random.key(0), hyper_of(agent)), (), first_timestep(jnp.zeros((2, 3)), (2,)), jax.random.key(0), 'bst')


def test_wrong_agent_is_refused():
    with pytest.raises(ValueError, match='did you mean trqam'):
        agents.make('trqm', SPEC)
