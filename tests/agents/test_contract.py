"""What every agent promises: pure functions, stable shapes, seeds and settings under vmap, fields that do something."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    'topd': {'hidden_sizes': (8,), 'teacher_hidden_sizes': (8,), 'rollout_length': CHUNK, 'num_minibatches': 2, 'batch_size': BATCH},
    'topd_flow': {
        'hidden_sizes': (8,),
        'teacher_hidden_sizes': (8,),
        'horizon_length': CHUNK,
        'flow_steps': 3,
        'rollout_length': CHUNK,
        'num_minibatches': 2,
    },
    'trqam': {**FLOW, 'critic_hidden_sizes': (8,), 'num_critics': 2},
}
ON_POLICY = ('topd', 'topd_flow')
NAMES = sorted(SIZES)


def batch_for(name, seed=0, rows=BATCH, action_size=2):
    """What the agent's update takes; on-policy 4 environments x 2 steps = 8 states, as rows for the others."""
    random = np.random.default_rng(seed)
    lead = (rows,) if name == 'template' else (rows // CHUNK, CHUNK) if name in ON_POLICY else (rows, CHUNK)
    batch = {
        'observations': random.normal(size=(*lead, 3)),
        'next_observations': random.normal(size=(*lead, 3)),
        'actions': random.uniform(-1, 1, (*lead, action_size)),
        'rewards': random.normal(size=lead),
        'masks': np.ones(lead),
        'truncations': np.zeros(lead),
        'valid': np.ones(lead),
    }
    if name in ON_POLICY:
        batch['extras'] = {'unsquashed': random.normal(size=(*lead, action_size))}
    return {'fresh' if name in ON_POLICY else 'data': jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), batch)}


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
def test_shapes_of_the_start(built, name):
    """First and last layers: observations 3; chunks of 2 actions of 2 entries; one flow time; two critics with one value."""
    agent, init, _ = built[name]
    state = init(jax.random.key(0), hyper_of(agent))
    size = CHUNK * 2
    expected = {'policy': ((3, 8), (8, 2)), 'base': ((3 + size + 1, 8), (8, size)), 'critic': ((2, 3 + size, 8), (2, 8, 1))}
    expected['tuned'] = expected['base']
    for tree in (state.params, getattr(state, 'target_params', {})):
        for network, params in tree.items():
            kernels = [leaf.shape for path, leaf in jax.tree.leaves_with_path(params) if 'kernel' in jax.tree_util.keystr(path)]
            assert tuple(kernels) == expected[network]
    assert {key: float(value) for key, value in state.hyper.items()} == pytest.approx(dict(agent.hyper))


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


@pytest.mark.parametrize('name', NAMES)
def test_jit_is_eager(built, name):
    agent, init, update = built[name]
    state = init(jax.random.key(0), hyper_of(agent))
    arguments = (state, batch_for(name), 0, jax.random.key(1))
    compiled, metrics = update(*arguments)
    with jax.disable_jit():
        eager, eager_metrics = agent.phases['train'].update(*arguments)
    close(metrics, eager_metrics)
    close(compiled.opt_state, eager.opt_state)  # the gradients, to rounding
    close(compiled, eager, atol=2.1 * agent.hyper['learning_rate'])  # see above: Adam's first step is a sign


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
    'ratio_clip': 1e-3,
}
# Fields that need other options to show; tests/agents/test_topd.py has them.
IDLE = {'topd': {'kl_budget', 'covariance_budget', 'discount'}}


@pytest.mark.parametrize('name', NAMES)
def test_every_sweepable_field_does_something(built, name):
    """One vmapped program: the first and last members have the defaults, each other one changed field; after two updates all of them, but
    not the last, differ from member 0."""
    agent, _, _ = built[name]
    fields = sorted(set(agent.hyper) - IDLE.get(name, set()))
    members = len(fields) + 2
    rows = {key: np.full(members, value, np.float32) for key, value in agent.hyper.items()}
    for member, key in enumerate(fields, start=1):
        rows[key][member] = CHANGED.get(key, agent.hyper[key] * 1.5)
    if 'kl_clip' in rows:  # the clip binds only above budget * clip, and the initial fields are far apart: all members get a tiny budget
        rows['kl_budget'] = np.where(np.arange(members) == 1 + fields.index('kl_budget'), 2e-3, 1e-3).astype(np.float32)

    def train(hyper):
        state = agent.init(jax.random.key(0), hyper)
        for step in range(2):
            state, metrics = agent.phases['train'].update(state, batch_for(name, step), step, jax.random.key(step + 1))
        return {'state': state._replace(hyper={}), 'metrics': metrics}

    results = jax.jit(jax.vmap(train))({key: jnp.asarray(value) for key, value in rows.items()})
    for member, key in enumerate([*fields, 'no field'], start=1):
        same = jax.tree.map(lambda leaf, m=member: bool((np.asarray(leaf[m]) == np.asarray(leaf[0])).all()), results)
        assert all(jax.tree.leaves(same)) == (key == 'no field'), f'{key} changes the wrong thing'


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
    'estimator': 'per_dimension',
    'proximal': 'none',
    'credit': 'mean_future',
    'direction': 'forward',
    'rollout_length': 4,
    'num_epochs': 2,
    'num_minibatches': 4,
    'teacher_hidden_sizes': (4,),
}
ANALYTIC = {'estimator': 'analytic', 'proximal': 'none'}
# Fields that show beside these options only.
BESIDE = {'topd': {'direction': ANALYTIC, 'aggregate': ANALYTIC, 'batch_size': {**ANALYTIC, 'aggregate': True}}}


def zeros_for(name, agent):
    """A batch of zeros in the sizes that the needs of the agent ask for."""
    lead = {'rollout': lambda need: (BATCH // CHUNK, need.length), 'transitions': lambda need: (need.batch_size,)}
    example = next(iter(batch_for(name).values()))
    dims = 1 if name == 'template' else 2

    def zeros(need):
        shape = lead.get(need.kind, lambda need: (need.batch_size, need.length))(need)
        return jax.tree.map(lambda leaf: jnp.zeros((*shape, *leaf.shape[dims:])), example)

    return {key: zeros(need) for key, need in agent.phases['train'].needs.items()}


@pytest.mark.parametrize('name', NAMES)
def test_every_static_field_changes_the_program(name):
    @functools.cache
    def program(**changed):
        agent = agents.make(name, SPEC, **{**SIZES[name], **changed})
        batch = zeros_for(name, agent)

        def run(key):
            state = agent.init(key, hyper_of(agent))
            state, metrics = agent.phases['train'].update(state, batch, 0, key)
            timestep = first_timestep(jnp.zeros((2, 3)), (2,))
            return metrics, [
                agent.policy.plan(state, (), timestep, key, mode)[0] for mode in ('eval', 'base_best' if 'qam' in name else 'eval')
            ]

        return str(jax.make_jaxpr(run)(jax.random.key(0)))

    assert program.__wrapped__() == program()  # no addresses in the text
    for field in dataclasses.fields(agents.module(name).Config):
        if not field.metadata['sweep']:
            default = getattr(agents.config(name, **SIZES[name]), field.name)
            other = not default if isinstance(default, bool) else OTHER[field.name]
            beside = BESIDE.get(name, {}).get(field.name, {})
            assert program(**{**beside, field.name: other}) != program(**beside), f'{field.name} changes nothing'


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


def test_trqam_is_qam_at_its_inverse_temperature(built):
    """Equal networks, batch and key: matching loss at lambda = 3 * dual is lambda times QAM's at 1 / lambda; path KL ignores lambda."""
    seen = []
    qam, qam_init, qam_update = built['qam']
    trqam, trqam_init, trqam_update = built['trqam']
    for dual in (0.2, 1.0, 5.0):
        tilted = qam_init(jax.random.key(0), hyper_of(qam, inverse_temperature=1 / (3 * dual)))
        bounded = trqam_init(jax.random.key(0), hyper_of(trqam, dual_init=dual))
        _, one = qam_update(tilted, batch_for('qam'), 0, jax.random.key(1))
        _, other = trqam_update(bounded, batch_for('qam'), 0, jax.random.key(1))
        np.testing.assert_allclose(float(other['actor/matching_loss']), 3 * dual * float(one['actor/matching_loss']), rtol=1e-5)
        seen += [float(one['actor/path_kl']), float(other['actor/path_kl'])]
    np.testing.assert_allclose(seen, seen[0], rtol=1e-6)


def test_clip_is_for_all_networks_or_for_each(built):
    """Adam's first moment is a tenth of the clipped gradients: norm 0.1 * 1e-3 together, or 0.1 * 1e-3 in each of three networks."""
    agent, init, update = built['qam']
    each = agents.make('qam', SPEC, **SIZES['qam'], clip='per_net')
    state = init(jax.random.key(0), hyper_of(agent, max_grad_norm=1e-3))
    for step, expected_all, expected_each in ((update, 1e-4, None), (jax.jit(each.phases['train'].update), np.sqrt(3) * 1e-4, 1e-4)):
        new, _ = step(state, batch_for('qam'), 0, jax.random.key(1))
        norms = [float(optax.tree.norm(moment)) for moment in new.opt_state[0].mu.values()]
        np.testing.assert_allclose(np.linalg.norm(norms), expected_all, rtol=1e-5)
        if expected_each:
            np.testing.assert_allclose(norms, expected_each, rtol=1e-5)


def test_modes_of_the_policy(helper):
    """'base' integrates target base, 'eval' with best_of_n = 3 the critic's favourite of tuned, 'base_best' its favourite of the base."""
    reference = helper('agents/reference.py')
    agent = agents.make('qam', SPEC, **SIZES['qam'], best_of_n=3, base_candidates=4)
    state = agent.init(jax.random.key(0), hyper_of(agent))
    state = state._replace(target_params=jax.tree.map(lambda leaf: leaf * 1.3, state.target_params))  # not the parameters
    observations = jax.random.normal(jax.random.key(1), (5, 3))
    for mode, candidates, flow in (
        ('base', 1, state.target_params['base']),
        ('base_best', 4, state.target_params['base']),
        ('eval', 3, state.params['tuned']),
        ('explore', 3, state.params['tuned']),
    ):
        plan, _ = agent.policy.plan(state, (), first_timestep(observations, (2,)), jax.random.key(2), mode)
        noises = jax.random.normal(jax.random.key(2), (candidates, 5, CHUNK * 2))
        with jax.numpy_rank_promotion('allow'):
            draws, values = [], []
            for actions in noises:
                for k in range(3):
                    actions = actions + reference.velocity(flow, observations, actions, k / 3) / 3
                draws.append(np.clip(actions, -1, 1))
                values.append(np.asarray(reference.critic(state.params['critic'], observations, draws[-1])).mean(0))
        expected = np.stack(draws)[np.argmax(values, 0), np.arange(5)]
        np.testing.assert_allclose(plan.actions.reshape(5, -1), expected, rtol=1e-4, atol=1e-5, err_msg=mode)
        np.testing.assert_array_equal(plan.length, CHUNK)


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
    """Rows that are not valid give critic and clone no gradient; a true terminal removes the bootstrap."""
    agent, init, _ = built['qam']
    state = init(jax.random.key(0), hyper_of(agent))
    phase = agent.phases['train']
    prepare = jax.jit(phase.prepare)

    @jax.jit
    def gradients(batch):
        batches = phase.prepare(state, batch, jax.random.key(1))
        return jax.grad(phase.loss, has_aux=True)(state.params, state, batches, jax.random.key(2))[0]

    batch = batch_for('qam')
    batch['data']['valid'] = batch['data']['valid'].at[3:, -1].set(0)
    before = gradients(batch)
    for part, row in (('actions', 5), ('rewards', 6), ('actions', 1), ('rewards', 2)):
        changed = {'data': {**batch['data'], part: batch['data'][part].at[row].add(0.3)}}
        after = gradients(changed)
        for network in ('critic', 'base'):
            same = all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), before[network], after[network])))
            assert same == (row >= 3 or (network == 'base' and part == 'rewards')), (part, row, network)

    batch = batch_for('qam')
    batch['data']['masks'] = batch['data']['masks'].at[:, 1].set(0)
    rewards = batch['data']['rewards']
    expected = rewards[:, 0] + 0.99 * rewards[:, 1]
    np.testing.assert_allclose(prepare(state, batch, jax.random.key(1))['targets']['td'], expected, rtol=1e-5)
    assert (np.abs(prepare(state, batch_for('qam'), jax.random.key(1))['targets']['td'] - expected) > 1e-4).all()


@pytest.mark.parametrize('name', NAMES)
def test_no_key_is_used_twice(name):
    agent = agents.make(name, SPEC, **SIZES[name])
    with jax.debug_key_reuse(True):
        state = agent.init(jax.random.key(0), hyper_of(agent))
        state, _ = jax.jit(agent.phases['train'].update)(state, batch_for(name), 0, jax.random.key(1))
        agent.policy.plan(state, (), first_timestep(jnp.zeros((2, 3)), (2,)), jax.random.key(2), 'eval')


def test_one_action_entry_and_one_row():
    spec = SPEC._replace(actions=ArraySpec((1,), -1, 1))
    agent = agents.make('trqam', spec, **{**SIZES['trqam'], 'horizon_length': 1})
    state = agent.init(jax.random.key(0), hyper_of(agent))
    batch = jax.tree.map(lambda leaf: leaf[:, :1], batch_for('trqam', rows=1, action_size=1))
    _, metrics = jax.jit(agent.phases['train'].update)(state, batch, 0, jax.random.key(1))
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


@pytest.mark.parametrize(('name', 'modes'), [('bc_flow', 'eval, explore'), ('trqam', 'base_best')])
def test_an_unknown_mode_is_refused(built, name, modes):
    agent, init, _ = built[name]
    with pytest.raises(ValueError, match=modes):
        agent.policy.plan(init(jax.random.key(0), hyper_of(agent)), (), first_timestep(jnp.zeros((2, 3)), (2,)), jax.random.key(0), 'bst')


def test_wrong_agent_is_refused():
    with pytest.raises(ValueError, match='did you mean trqam'):
        agents.make('trqm', SPEC)
