"""The ball around parameters: never left, whatever comes before it in the chain, and a well-behaved Optax transform."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from optimizers import TrustRegionState, metrics, project_to_trust_region, set_anchor

RADIUS = 0.05
PARAMS = {'layer': {'kernel': jnp.linspace(-1, 1, 12).reshape(4, 3), 'bias': jnp.array([0.5, -2.0, 0.0])}, 'scale': jnp.float32(3)}


def random_like(seed, tree=PARAMS, positive=False):
    """A tree of normal numbers, or of their squares."""
    rng = np.random.default_rng(seed)
    drawn = jax.tree.map(lambda leaf: rng.normal(size=np.shape(leaf)).astype(np.float32), tree)
    return jax.tree.map(np.square, drawn) if positive else drawn


PRECISION = random_like(1, positive=True)


def distance(params, anchor=PARAMS, precision=PRECISION) -> Any:
    """1/2 sum p d^2 by NumPy in float64; stacked parameters give one number each."""
    total = 0.0
    for one, origin, weight in zip(*map(jax.tree.leaves, (params, anchor, precision)), strict=True):
        one, origin, weight = (np.asarray(each, np.float64) for each in (one, origin, weight))
        total = total + 0.5 * np.sum((weight * np.square(one - origin)).reshape(*one.shape[: one.ndim - origin.ndim], -1), axis=-1)
    return total


def train(optimizer, params, steps=300) -> Any:
    """Parameters and states after each of `steps` noisy steps that pull everything to 5."""

    def step(carry, key):
        params, state = carry
        noise = optax.tree.random_like(key, params, jax.random.normal)
        grads = jax.tree.map(lambda leaf, n: (leaf - 5 + 3 * n).astype(leaf.dtype), params, noise)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), (params, state[-1] if type(state) is tuple else state)

    start = (params, optimizer.init(params))
    return jax.jit(lambda start: jax.lax.scan(step, start, jax.random.split(jax.random.key(0), steps))[1])(start)


def one_update(optimizer, updates, params: Any = PARAMS, state: Any = None) -> Any:
    """(params after one update, state)."""
    state = optimizer.init(params) if state is None else state
    updates, state = jax.jit(optimizer.update)(updates, state, params)
    return optax.apply_updates(params, updates), state


def equal(ours, theirs, **tolerance):
    tolerance = tolerance or {'rtol': 0, 'atol': 0}
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), np.asarray(other, np.float64), **tolerance)


# ---- the ball


@pytest.mark.parametrize('first', [optax.adam(0.1), optax.sgd(1e3, momentum=0.9)], ids=['adam', 'sgd'])
def test_parameters_never_leave_the_ball(first):
    """300 steps; most of them end on the border, and the state says where."""
    params, states = train(optax.chain(first, project_to_trust_region(RADIUS, precision=PRECISION)), PARAMS)
    reached = distance(params)
    assert (reached <= RADIUS * (1 + 1e-5)).all()
    assert np.mean(reached > 0.999 * RADIUS) > 0.5
    np.testing.assert_allclose(states.distance, reached, rtol=1e-4)
    fractions = np.asarray(states.fraction)
    assert ((fractions > 0) & (fractions <= 1)).all()
    np.testing.assert_array_equal(states.count, np.arange(1, 301))


def test_short_floats_keep_their_dtype_and_stay_in_the_ball():
    """Entries around an anchor of 0 in bfloat16 are rounded to 2^-9 each, and so is the update before: 1% of the radius."""
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.bfloat16), PARAMS)
    moved, states = train(optax.chain(optax.sgd(0.1), project_to_trust_region(RADIUS, precision=PRECISION)), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(moved)} == {jnp.dtype(jnp.bfloat16)}
    reached = distance(moved, params)
    assert (reached <= 1.01 * RADIUS).all()
    assert np.mean(reached > 0.98 * RADIUS) > 0.5
    assert states.distance.dtype == states.fraction.dtype == jnp.float32


def test_inside_updates_pass_bit_for_bit():
    updates = jax.tree.map(lambda leaf: 1e-3 * leaf, random_like(2))
    optimizer = project_to_trust_region(RADIUS, precision=PRECISION)
    update: Any = jax.jit(optimizer.update)
    passed, state = update(updates, optimizer.init(PARAMS), PARAMS)
    equal(passed, updates)
    assert float(state.fraction) == 1
    params, _ = one_update(optax.chain(optax.adam(0.1), project_to_trust_region(jnp.inf)), updates)
    equal(params, one_update(optax.adam(0.1), updates)[0])


def test_border_by_hand():
    """precision 2, anchor (1, 1), target (4, 5): distance 9 + 16 = 25, so with radius 1 a fifth of (3, 4) is kept. Then it turns back."""
    optimizer = project_to_trust_region(1.0, precision=2.0)
    params, state = one_update(optimizer, {'w': jnp.array([3.0, 4.0])}, {'w': jnp.ones(2)})
    np.testing.assert_allclose(params['w'], [1.6, 1.8], rtol=1e-6)
    np.testing.assert_allclose([state.distance, state.fraction], [1, 0.2], rtol=1e-6)
    params, state = one_update(optimizer, {'w': jnp.array([-0.6, -0.8])}, params, state)
    np.testing.assert_allclose([*params['w'], state.distance, state.fraction], [1, 1, 0, 1], atol=1e-6)


def test_zero_radius_returns_to_the_anchor():
    """Also from outside."""
    optimizer = project_to_trust_region(0.0)
    params, state = one_update(optimizer, random_like(3), random_like(4), optimizer.init(PARAMS))
    equal(params, PARAMS, rtol=1e-6, atol=1e-6)
    assert float(state.fraction) == 0
    assert float(state.distance) == 0


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf, 1e30])
def test_not_finite_update_is_none(bad):
    """1e30 is finite, but its square is not. The next update is an ordinary one."""
    optimizer = project_to_trust_region(RADIUS, precision=PRECISION)
    params, state = one_update(optimizer, random_like(5))
    spoilt = random_like(6)
    spoilt['layer']['bias'][1] = bad
    same, after = one_update(optimizer, spoilt, params, state)
    equal(same, params)
    assert (float(after.fraction), float(after.distance), int(after.count)) == (0, float(state.distance), 2)
    equal(one_update(optimizer, random_like(7), same, after)[0], one_update(optimizer, random_like(7), params, state)[0])


def test_masked_leaves_are_free():
    """Under False an update passes, whatever it is, and does not count; a mask may end above the leaves."""
    updates = random_like(8)
    optimizer = project_to_trust_region(RADIUS, precision=PRECISION, mask={'layer': True, 'scale': False})
    params, state = one_update(optimizer, {**updates, 'scale': np.float32(100)})
    assert float(params['scale']) == 103
    kept = {'layer': params['layer']}
    np.testing.assert_allclose(distance(kept, {'layer': PARAMS['layer']}, {'layer': PRECISION['layer']}), RADIUS, rtol=1e-5)
    np.testing.assert_allclose(state.distance, RADIUS, rtol=1e-5)
    deep = {'layer': {'kernel': True, 'bias': True}, 'scale': False}
    equal(one_update(project_to_trust_region(RADIUS, precision=PRECISION, mask=deep), updates)[0]['layer'], params['layer'])
    unprotected = {**PRECISION, 'scale': np.float32(0)}
    shrunk, state = one_update(project_to_trust_region(RADIUS, precision=unprotected), {**updates, 'scale': np.float32(100)})
    np.testing.assert_allclose(shrunk['scale'], 3 + 100 * state.fraction, rtol=1e-5)  # precision 0 and no mask: along with the others


def test_none_and_empty_leaves():
    params = {'a': None, 'b': jnp.zeros((0, 3)), 'c': jnp.zeros(2), 'd': {}}
    for optimizer in (project_to_trust_region(0.1), project_to_trust_region(0.1, mask={'a': True, 'b': True, 'c': True, 'd': False})):
        moved, state = one_update(optimizer, {**params, 'c': jnp.ones(2)}, params)
        np.testing.assert_allclose(moved['c'], np.sqrt(0.1), rtol=1e-6)
        assert moved['a'] is None
        assert moved['b'].shape == (0, 3)
        np.testing.assert_allclose(state.distance, 0.1, rtol=1e-6)
    moved, state = one_update(project_to_trust_region(0.1), {}, {})
    assert moved == {}
    assert float(state.distance) == 0


def test_schedule_of_radii():
    """At update t = 0, 1, 2 the radius is 4, 1, 1/4: distances on the border halve."""
    optimizer = project_to_trust_region(lambda count: 4.0 * 0.25**count)
    params, state = {'w': jnp.zeros(2)}, optimizer.init({'w': jnp.zeros(2)})
    for expected in (4, 1, 0.25):
        params, state = one_update(optimizer, {'w': jnp.array([30.0, 40.0])}, params, state)
        np.testing.assert_allclose(distance(params, {'w': np.zeros(2)}, {'w': np.ones(2)}), expected, rtol=1e-6)


def test_other_forms_hold_their_ball():
    """d^T F d / 2 with the dense matrices: two factors, one direction, and a Kronecker product for kernel and bias."""
    rng = np.random.default_rng(0)
    params = {'params': {'dense': {'kernel': jnp.zeros((3, 2)), 'bias': jnp.zeros(2)}}}
    factors = random_like(1, jax.tree.map(lambda leaf: np.zeros((2, *leaf.shape)), params))
    direction = metrics.RankOne(random_like(2, params), jnp.float32(3))
    inputs, outputs = (root @ root.T for root in (rng.normal(size=(4, 4)), rng.normal(size=(2, 2))))
    kronecker = {'dense': metrics.Kronecker(jnp.float32(inputs), jnp.float32(outputs))}

    def flat(tree):
        layer = tree['params']['dense']
        return np.concatenate([np.asarray(layer['kernel']), np.asarray(layer['bias'])[..., None, :]], axis=-2).reshape(
            *layer['bias'].shape[:-1], 8
        )

    dense = {
        'low rank': (factors, metrics.low_rank_form, flat(factors).T @ flat(factors)),
        'rank one': (direction, metrics.rank_one_form, 3 * np.outer(flat(direction.direction), flat(direction.direction))),
        'kronecker': (kronecker, metrics.kronecker_form, np.kron(inputs, outputs)),
    }
    for name, (precision, form, matrix) in dense.items():
        optimizer = optax.chain(optax.sgd(0.1), project_to_trust_region(RADIUS, precision=precision, form=form))
        moved, states = train(optimizer, params, 100)
        steps = flat(moved).astype(np.float64)
        reached = 0.5 * np.einsum('ti,ij,tj->t', steps, matrix, steps)
        assert (reached <= RADIUS * (1 + 1e-4)).all(), name
        assert reached.max() > 0.99 * RADIUS, name
        np.testing.assert_allclose(states.distance, reached, rtol=1e-3, atol=1e-6, err_msg=name)


# ---- moving the region


def test_anchoring_at_the_latest_parameters():
    """Online EWC: precision 1/2 * 2 + 3 = 4, anchored where the task ended."""
    optimizer = project_to_trust_region(1.0, precision=2.0)
    params, state = one_update(optimizer, {'w': jnp.array([3.0, 4.0])}, {'w': jnp.ones(2)})
    state = set_anchor(state, params, {'w': jnp.full(2, 3.0)}, decay=0.5)
    np.testing.assert_array_equal(state.precision['w'], [4, 4])
    np.testing.assert_array_equal(state.anchor['w'], params['w'])
    assert float(state.distance) == 0
    moved, _ = one_update(optimizer, {'w': jnp.array([3.0, 4.0])}, params, state)
    np.testing.assert_allclose(2 * np.sum(np.square(moved['w'] - params['w'])), 1, rtol=1e-5)


def test_exact_merge_is_the_sum_of_the_tasks():
    """Of three tasks' forms, up to a constant: differences between points agree with the explicit sum. Precision may be 0."""
    anchors, precisions = [random_like(seed) for seed in (1, 2, 3)], [random_like(seed, positive=True) for seed in (4, 5, 6)]
    for precision in precisions:
        precision['layer']['bias'][:2] = 0
    precisions[2]['layer']['bias'][0] = 1
    state: Any = project_to_trust_region(1.0, precision=precisions[0]).init(anchors[0])
    for anchor, precision in zip(anchors[1:], precisions[1:], strict=True):
        state = set_anchor(state, anchor, precision, merge='exact')
        np.testing.assert_allclose(state.distance, distance(anchor, state.anchor, state.precision), rtol=1e-5)
    points = [random_like(seed) for seed in range(10, 20)]
    merged = np.array([distance(point, state.anchor, state.precision) for point in points])
    explicit = np.array([sum(map(lambda a, f, x=point: distance(x, a, f), anchors, precisions)) for point in points])
    np.testing.assert_allclose(merged - merged[0], explicit - explicit[0], rtol=1e-4, atol=1e-4)
    assert float(state.anchor['layer']['bias'][1]) == anchors[2]['layer']['bias'][1]  # no task minds: where the last one ended
    with pytest.raises(ValueError, match='latest or exact'):
        set_anchor(state, anchors[0], precisions[0], merge='mean')


def test_first_precision_may_be_zero():
    """0 constrains nothing until the first task ends."""
    optimizer = project_to_trust_region(RADIUS, precision=0.0)
    params, state = one_update(optimizer, random_like(3))
    equal(params, jax.tree.map(jnp.add, PARAMS, random_like(3)))
    state = set_anchor(state, params, PRECISION)
    moved, _ = one_update(optimizer, random_like(4), params, state)
    np.testing.assert_allclose(distance(moved, params), RADIUS, rtol=1e-5)


# ---- an Optax transform


def test_radius_may_be_injected_and_precision_an_array():
    """`form` is callable and `precision` a number, so both are static for `inject_hyperparams`."""
    injected = optax.inject_hyperparams(project_to_trust_region, static_args=('precision', 'form', 'mask'))(radius=RADIUS)
    plain = project_to_trust_region(RADIUS)
    params, state = one_update(injected, random_like(3))
    equal(params, one_update(plain, random_like(3))[0], rtol=1e-6)
    state.hyperparams['radius'] = jnp.float32(4 * RADIUS)
    larger, state = one_update(injected, random_like(3), params, state)
    np.testing.assert_allclose(distance(larger, PARAMS, jax.tree.map(np.ones_like, PRECISION)), 4 * RADIUS, rtol=1e-5)
    expected, _ = one_update(project_to_trust_region(RADIUS / 2), random_like(3))
    for two in (2, np.float32(2), jnp.float32(2)):
        equal(one_update(project_to_trust_region(RADIUS, precision=two), random_like(3))[0], expected, rtol=1e-6)


def test_other_arguments_are_ignored_and_missing_parameters_refused():
    optimizer = optax.chain(optax.adam(0.1), project_to_trust_region(RADIUS))
    updates, state = random_like(3), optimizer.init(PARAMS)
    update = jax.jit(optimizer.update)
    equal(update(updates, state, PARAMS, value=jnp.ones(()), unknown=1), update(updates, state, PARAMS))
    with pytest.raises(ValueError, match='needs the parameters'):
        optimizer.update(PARAMS, optimizer.init(PARAMS))
    for radius in (-0.1, float('nan')):
        with pytest.raises(ValueError, match=f'radius={radius}'):
            project_to_trust_region(radius)


def test_compiled_once_and_equal_to_eager():
    optimizer = project_to_trust_region(RADIUS, precision=PRECISION)
    update = jax.jit(chex.assert_max_traces(optimizer.update, 1))
    state, eager_state = optimizer.init(PARAMS), optimizer.init(PARAMS)
    params, eager_params = PARAMS, PARAMS
    for seed in range(3):
        updates, state = update(random_like(seed), state, params)
        params = optax.apply_updates(params, updates)
        updates, eager_state = optimizer.update(random_like(seed), eager_state, eager_params)
        eager_params = optax.apply_updates(eager_params, updates)
    equal((params, state), (eager_params, eager_state), rtol=1e-5, atol=1e-6)


def test_vmapped_seeds_and_radii_are_a_loop():
    """A sweep of radii in one program, each with its own updates."""
    radii, updates = jnp.array([0.0, 0.05, 100.0]), [random_like(seed) for seed in range(3)]

    def run(radius, updates):
        optimizer = project_to_trust_region(radius, precision=PRECISION)
        moved, state = optimizer.update(updates, optimizer.init(PARAMS), PARAMS)
        return optax.apply_updates(PARAMS, moved), state

    swept = jax.jit(jax.vmap(run))(radii, jax.tree.map(lambda *leaves: np.stack(leaves), *updates))
    looped = [jax.jit(run)(radius, each) for radius, each in zip(radii, updates, strict=True)]
    equal(swept, jax.tree.map(lambda *leaves: np.stack(leaves), *looped), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float32', 'float64'])
def test_state_keeps_structure_shapes_and_dtypes(dtype):
    """Both branches of a cond must agree, for numbers and for schedules of radii."""
    with jax.enable_x64(dtype == 'float64'):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), PARAMS)
        for radius in (RADIUS, lambda count: 0.1 / (count + 1)):
            optimizer = project_to_trust_region(radius, precision=PRECISION)
            state = optimizer.init(params)
            shapes = jax.eval_shape(optimizer.update, params, state, params)
            chex.assert_trees_all_equal_shapes_and_dtypes(shapes, (params, state))
            jax.eval_shape(lambda p, s, o=optimizer: jax.lax.cond(s.count > 0, lambda: o.update(p, s, p), lambda: (p, s)), params, state)
            anchored = jax.eval_shape(lambda p, s: set_anchor(s, p, s.precision, merge='exact'), params, state)
            chex.assert_trees_all_equal_shapes_and_dtypes(anchored, state)


def test_buffers_may_be_donated():
    """Parameters, state and the precision that was given are three different buffers."""
    precision = jax.tree.map(jnp.array, PRECISION)
    optimizer = project_to_trust_region(RADIUS, precision=precision)

    def step(params, state, updates):
        updates, state = optimizer.update(updates, state, params)
        return optax.apply_updates(params, updates), state

    for init in (optimizer.init, jax.jit(optimizer.init)):
        params = jax.tree.map(jnp.array, PARAMS)
        expected = step(params, optimizer.init(params), random_like(1))
        moved = jax.jit(step, donate_argnums=(0, 1))(params, init(params), random_like(1))
        equal(moved, expected, rtol=1e-6, atol=1e-7)
        state = set_anchor(moved[1], moved[0], precision)
        moved = jax.jit(step, donate_argnums=(0, 1))(moved[0], state, random_like(2))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((precision, moved)))


def test_gradient_accumulation_and_partial_updates():
    """`MultiSteps` withholds three of four updates; `masked` hides leaves; `map_params` finds the parts shaped like parameters."""
    every_fourth = optax.MultiSteps(optax.chain(optax.sgd(1.0), project_to_trust_region(RADIUS)), 4)
    state, update = every_fourth.init(PARAMS), jax.jit(every_fourth.update)
    for count in range(4):
        updates, state = update(random_like(count), state, PARAMS)
        assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(updates)) == (count == 3)
    masked = optax.masked(project_to_trust_region(RADIUS), {'layer': True, 'scale': False})
    params, _ = one_update(masked, random_like(8))
    free = project_to_trust_region(RADIUS, mask={'layer': True, 'scale': False})
    equal(params, one_update(free, random_like(8))[0], rtol=1e-6)
    for optimizer in (project_to_trust_region(RADIUS), project_to_trust_region(RADIUS, precision=2.0)):
        state: Any = optimizer.init(PARAMS)
        doubled: Any = optax.tree.map_params(optimizer, lambda leaf: 2 * leaf, state)
        equal((doubled.anchor, doubled.precision), jax.tree.map(lambda leaf: 2 * leaf, (state.anchor, state.precision)))
        assert (float(doubled.fraction), int(doubled.count)) == (1, 0)


def test_state_survives_storage(tmp_path):
    """Flattened and unflattened, and through Orbax."""
    _, state = one_update(project_to_trust_region(RADIUS, precision=PRECISION), random_like(3))
    leaves, structure = jax.tree.flatten(state)
    assert isinstance(jax.tree.unflatten(structure, leaves), TrustRegionState)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / 'state', state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / 'state', jax.tree.map(jnp.zeros_like, state))
    assert isinstance(restored, TrustRegionState)
    chex.assert_trees_all_equal(restored, state)
