"""The training loop: riders, counters, members, devices, divergence."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import agents
import envs
import training
from agents.types import Stage
from envs.types import ArraySpec, Spec
from training import loop, members, streams

SPEC = Spec(ArraySpec((1,)), ArraySpec((1,), -1, 1), 20)
TINY = {'hidden_sizes': (8,), 'batch_size': 8, 'horizon_length': 2, 'flow_steps': 2}
QUIET: dict[str, Any] = {'announce': lambda message: None}


@pytest.fixture(scope='module')
def clone():
    return agents.make('bc_flow', SPEC, **TINY)


def train(agent, dataset, updates=12, seeds=(0, 1), **control):
    return training.fit(
        agent, dataset, updates, seeds, control=training.Control(**{'log_interval': 12, 'num_devices': 1, **control}), **QUIET
    )


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.fixture(scope='module')
def trained(clone, dataset):
    return train(clone, dataset).state


@pytest.mark.parametrize('size', [1, 5])
def test_updates_per_call_change_no_bit(clone, dataset, trained, size):
    assert equal(train(clone, dataset, updates_per_call=size).state, trained)


def test_evaluating_changes_no_bit(clone, dataset, trained):
    result = training.fit(
        clone,
        dataset,
        12,
        (0, 1),
        eval_env='probe/line:horizon=4',
        control=training.Control(log_interval=12, num_devices=1, eval_episodes=2, eval_interval=4),
        **QUIET,
    )
    assert equal(result.state, trained)
    assert set(result.summary['eval']) == {'eval/return', 'eval/length', 'eval/success'}


def test_a_seed_alone_is_the_seed_in_company(clone, dataset, trained):
    alone = train(clone, dataset, seeds=(1,)).state
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b[1], rtol=1e-4, atol=1e-5), alone.params, trained.params)
    assert not np.array_equal(jax.tree.leaves(trained.params)[0][0], jax.tree.leaves(trained.params)[0][1])


def test_two_devices_are_one(clone, dataset, trained):
    assert jax.local_device_count() == 2
    shared = train(clone, dataset, num_devices=2).state
    assert len(jax.tree.leaves(shared.params)[0].sharding.device_set) == 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), shared.params, trained.params)


def test_a_grid_member_is_a_run_of_its_own(clone, dataset):
    grid = training.fit(clone, dataset, 4, (0, 1), grid={'learning_rate': (1e-3, 1e-2)}, control=training.Control(num_devices=1), **QUIET)
    assert grid.members.settings == ['learning_rate=0.001'] * 2 + ['learning_rate=0.01'] * 2
    single = training.fit(
        agents.make('bc_flow', SPEC, **TINY, learning_rate=1e-2), dataset, 4, (1,), control=training.Control(num_devices=1), **QUIET
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[3], b[0], rtol=1e-4, atol=1e-5), grid.state.params, single.state.params)
    with pytest.raises(ValueError, match='cannot be swept'):
        members.over_grid(clone, (0,), {'batch_size': (1, 2)})


def test_callers_keep_their_arrays(clone, dataset, trained):
    """Donation never reaches what came from outside: training twice on the same device arrays works."""
    on_device = jax.tree.map(jnp.asarray, dataset)
    assert equal(train(clone, on_device).state, trained)
    assert equal(train(clone, on_device).state, trained)


def online(dummies, stages, seeds=(0, 1), **kwargs):
    env = envs.make('probe/line:horizon=10')
    agent = dummies.make(env.spec)
    rows = []
    result = training.fit(
        agent,
        sources={'env': env, 'other': env},
        num_envs=2,
        replay_capacity=64,
        stages=stages,
        seeds=seeds,
        progress_fn=lambda update, metrics: rows.append((update, jax.tree.map(np.asarray, metrics))),
        control=training.Control(log_interval=1, num_devices=1, updates_per_call=1),
        **QUIET,
        **kwargs,
    )
    return result, dict(rows)


@pytest.fixture(scope='module')
def two_stages(dummies):
    return online(
        dummies, [Stage('collect', 1), Stage('train', 5, {'collect': 3, 'refit': 2}), Stage('train', 4, {'collect': 3, 'refit': 2})]
    )


def test_riders_run_before_the_update_when_due(two_stages):
    """`step` is local to its stage: 0..4, then 0..3; collect at steps 0 and 3, refit at 0, 2 and 4."""
    result, rows = two_stages
    steps = [rows[update]['step'][0] for update in range(2, 11)]
    assert steps == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    collected = [bool(np.isfinite(rows[update]['collect/valid'][0])) for update in range(2, 11)]
    assert collected == [step % 3 == 0 for step in (0, 1, 2, 3, 4, 0, 1, 2, 3)]
    refitted = [bool(np.isfinite(rows[update]['refit/valid'][0])) for update in range(2, 11)]
    assert refitted == [step % 2 == 0 for step in (0, 1, 2, 3, 4, 0, 1, 2, 3)]
    assert result.state.params['updates'].tolist() == [9, 9]
    assert result.state.params['refits'].tolist() == [5, 5]


def test_what_was_acted_is_counted_and_stored(two_stages):
    result, rows = two_stages
    fresh = sum(rows[update]['fresh/valid'] for update in range(2, 11))
    other = sum(np.nan_to_num(rows[update].get('collect/valid', np.zeros(2))) for update in range(1, 11))
    np.testing.assert_array_equal(result.summary['num_env_steps'], np.asarray(fresh + other))
    assert all(rows[update]['fresh/log_prob'][0] == rows[update]['fresh/valid'][0] for update in range(2, 11))
    assert all(rows[update]['target/valid'][0] == 16 for update in range(2, 11))


def test_a_second_stage_draws_new_numbers(two_stages):
    _, rows = two_stages
    first, second = ([rows[update]['fresh/valid'].tolist() for update in span] for span in (range(2, 6), range(7, 11)))
    assert first != second


def test_the_branch_of_a_rider_stays_a_branch(dummies):
    """Under vmap a batched predicate would run both sides and select: the jaxpr must hold `cond` on an unbatched scalar."""
    env = envs.make('probe/line:horizon=10')
    agent = dummies.make(env.spec)
    sources = loop.Sources({}, {'env': env, 'other': env}, 2)
    stage = Stage('train', 4, {'collect': 3})
    team = members.over_grid(agent, (0, 1, 2))
    states, keys = members.init_states(agent, team), members.seed_keys(team)
    needs = loop.needs_of(agent, [stage])
    carry = jax.vmap(lambda state, key: loop.init_carry(agent, sources, needs, 64, state, key))(states, keys)
    jaxpr = jax.make_jaxpr(loop.make_call(agent, stage, sources))(carry, keys, {}, jnp.int32(0), jnp.int32(0), jnp.int32(4))
    predicates = [eqn.invars[0].aval.shape for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == 'cond']
    assert () in predicates
    assert all(shape == () for shape in predicates)


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, 'jaxpr') or hasattr(leaf, 'eqns')):
            if hasattr(inner, 'jaxpr'):
                yield from equations(inner.jaxpr)
            elif hasattr(inner, 'eqns'):
                yield from equations(inner)


def test_non_finite_updates_are_skipped_and_a_diverged_member_frozen(dummies, monkeypatch):
    """The second setting makes NaN in every update after its third: it is frozen after MAX_SKIPPED of them; the first one goes on.

    The rider, whose updates are always finite, runs in between and does not clear its name.
    """
    monkeypatch.setattr(loop, 'MAX_SKIPPED', 3)
    result, rows = online(dummies, [Stage('train', 10, {'refit': 1})], seeds=(0,), grid={'nan_at': (-1, 3)})
    assert result.state.params['updates'].tolist() == [10, 3]
    assert result.state.params['refits'].tolist() == [10, 6]  # frozen, too, from the 7th on: updates 4, 5, 6 were skipped, then it diverged
    assert result.summary['skipped_updates'] == [0, 7]
    assert result.summary['diverged'] == [False, True]
    assert np.isfinite(np.asarray(result.state.params['weight'])).all()
    assert [rows[update]['health/diverged'].tolist() for update in (5, 6, 10)] == [[False, False], [False, True], [False, True]]


def test_what_is_infinite_by_intention_is_no_failure():
    """A budget without limit stays infinite and the update counts; a number that becomes infinite or NaN is a failure."""
    healthy = loop.Health(jnp.int32(0), jnp.int32(1), jnp.zeros((), bool))
    old = {'budget': jnp.float32(jnp.inf), 'weight': jnp.float32(1), 'count': jnp.int32(0)}
    for weight, skipped, in_a_row in ((2.0, 0, 0), (jnp.inf, 1, 2), (jnp.nan, 1, 2)):
        new = {**old, 'weight': jnp.float32(weight), 'count': jnp.int32(1)}
        state, health = loop._guarded(new, old, healthy, rider=False)
        assert (int(health.skipped), int(health.in_a_row), int(state['count'])) == (skipped, in_a_row, 1 - skipped)
        assert loop._guarded(new, old, healthy, rider=True)[1].in_a_row == 1


def test_members_that_make_no_sense_are_refused(clone):
    for seeds, grid, message in (
        ((), None, 'each once'),
        ((1, 1), None, 'each once'),
        ((-1,), None, 'must lie in'),
        ((2**32,), None, 'must lie in'),
        ((0,), {'learning_rate': ()}, 'given once'),
        ((0,), {'learning_rate': (0.1, 0.1)}, 'given once'),
        ((0,), {'learning_rate': (0.1, 0.1 + 1e-9)}, 'first 6 digits'),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            members.over_grid(clone, seeds, grid)
        assert '\n' not in str(caught.value)
    team = members.over_grid(clone, (2, 0), {'learning_rate': (0.1, 0.2)})
    assert team.seeds.tolist() == [2, 0, 2, 0]
    np.testing.assert_allclose(team.hyper['learning_rate'], [0.1, 0.1, 0.2, 0.2])
    for member, seed in enumerate(team.seeds):
        expected = jax.random.key_data(jax.random.key(int(seed)))
        np.testing.assert_array_equal(jax.random.key_data(members.seed_keys(team))[member], expected)


def test_missing_sources_are_named(clone, dummies):
    with pytest.raises(ValueError, match="needs the source 'data'"):
        training.fit(clone, None, 1, **QUIET)
    with pytest.raises(ValueError, match="no phase 'pretrain'"):
        training.fit(clone, None, stages=[Stage('pretrain', 1)], **QUIET)
    agent = dummies.make(SPEC)
    with pytest.raises(ValueError, match='not an environment'):
        loop.check(agent, [Stage('train', 1)], loop.Sources({'env': None}, {'other': envs.make('probe/line')}))


def test_every_key_of_a_run_is_another():
    seed = jax.random.key(3)
    keys = [streams.update_key(seed, phase, n) for phase in ('train', 'refit') for n in range(3)]
    keys += [streams.data_key(seed, phase, need, n) for phase in ('train', 'refit') for need in ('data', 'other') for n in range(3)]
    keys += [streams.action_key(seed, source, n) for source in ('env', 'other') for n in range(3)]
    keys += [streams.reset_key(seed, source, slot, n) for source in ('env', 'other') for slot in range(3) for n in range(3)]
    keys += [streams.eval_key(seed, n, mode, block) for mode in ('eval', 'base') for n in range(3) for block in range(3)]
    keys += [streams.stream(seed, streams.INIT), seed]
    assert len({tuple(np.asarray(jax.random.key_data(key)).tolist()) for key in keys}) == len(keys)


def test_names_fold_in_the_same_everywhere():
    """By SHA-256, not by Python's salted hash; the start seed is pinned so that start states never change unnoticed."""
    import hashlib

    number = int.from_bytes(hashlib.sha256(b'train').digest()[:4], 'big')
    expected = jax.random.fold_in(jax.random.key(0), number)
    assert (jax.random.key_data(streams.named(jax.random.key(0), 'train')) == jax.random.key_data(expected)).all()
    assert streams.start_seed(0) == 1282483033
