"""Anchors: closed forms, gates and floors by hand, no gradient, bad input, vmap and scan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optimizers import anchors

TREE = {'w': jnp.arange(6.0).reshape(2, 3), 'b': jnp.array([1.0, -1.0]), 'none': None}


def follow(anchor, first, values):
    """States after each of the values [T, ...]."""

    def body(state, value):
        state = anchor.update(state, value)
        return state, state

    return jax.jit(lambda first, values: jax.lax.scan(body, anchor.init(first), values)[1])(first, values)


def covariance(*eigenvalues, angle=0.5):
    """A 2 x 2 covariance, not diagonal."""
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return jnp.asarray((turn * np.array(eigenvalues)) @ turn.T, jnp.float32)


RULES = {
    'fixed': anchors.fixed(),
    'snapshot': anchors.snapshot(2),
    'ema': anchors.ema(0.9),
    'leak': anchors.ema(0.9, leak=0.2),
    'gate': anchors.shrink_gate(anchors.ema(0.9)),
    'floor': anchors.spectral_floor(anchors.ema(0.9), 0.1),
    'both': anchors.spectral_floor(anchors.shrink_gate(anchors.ema(0.9, leak=0.2)), 0.1),
}
rules = pytest.mark.parametrize('name', list(RULES))


def test_ema_in_closed_form():
    """d^t first + (1 - d) sum_k d^(t - k) x_k."""
    values = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    states = follow(anchors.ema(0.8), jnp.ones(3), values)
    expected = [0.8**t + 0.2 * sum(0.8 ** (t - k) * values[k - 1] for k in range(1, t + 1)) for t in range(1, 21)]
    np.testing.assert_allclose(states.value, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(states.count, np.arange(1, 21))
    np.testing.assert_array_equal(follow(anchors.ema(1.0), jnp.ones(3), values).value, 1)
    np.testing.assert_array_equal(follow(anchors.ema(0.0), jnp.ones(3), values).value, values)


def test_leak_holds_a_part_of_the_first_value():
    """One step by hand: 0.9 * 2 + 0.1 (0.8 * 12 + 0.2 * 2) = 2.8. At rest on x = 12: 0.8 * 12 + 0.2 * 2 = 10; without a leak it is 12."""
    values = jnp.full(200, 12.0)
    leaky = follow(anchors.ema(0.9, leak=0.2), jnp.float32(2), values).value
    np.testing.assert_allclose([leaky[0], leaky[-1]], [2.8, 10], rtol=1e-5)
    np.testing.assert_allclose(follow(anchors.ema(0.9), jnp.float32(2), values).value[-1], 12, rtol=1e-5)
    np.testing.assert_allclose(follow(anchors.ema(0.9, leak=1.0), jnp.float32(2), values).value, 2)


def test_snapshot_jumps_and_fixed_stays():
    values = jnp.arange(1.0, 8.0)
    np.testing.assert_array_equal(follow(anchors.snapshot(3), jnp.float32(0), values).value, [0, 0, 3, 3, 3, 6, 6])
    np.testing.assert_array_equal(follow(anchors.snapshot(1), jnp.float32(0), values).value, values)
    np.testing.assert_array_equal(follow(anchors.fixed(), jnp.float32(9), values).value, 9)


def test_gate_lets_nothing_shrink():
    """Larger and rounder passes; smaller, or larger but flatter, does not; each matrix of a batch is judged alone."""
    gate = anchors.shrink_gate(anchors.ema(0.5))
    update = jax.jit(gate.update)
    start = covariance(2, 1)
    for target, passes in ((covariance(3, 3), True), (covariance(2, 0.5), False), (covariance(9, 1), False), (covariance(1, 1), False)):
        moved = update(gate.init(start), target)
        np.testing.assert_allclose(moved.value, 0.5 * (start + target) if passes else start, rtol=1e-6)
        assert int(moved.count) == 1
    batch = jnp.stack([covariance(3, 3), covariance(2, 0.5)])
    moved = update(gate.init(jnp.stack([start, start])), batch).value
    np.testing.assert_allclose(moved, jnp.stack([0.5 * (start + batch[0]), start]), rtol=1e-6)


def test_floor_lifts_small_eigenvalues_only():
    """(2, 0.01) -> (2, 0.1) along the same axes, from the start on; what lies above passes bit for bit."""
    floor = anchors.spectral_floor(anchors.ema(0.0), 0.1)
    np.testing.assert_allclose(floor.init(covariance(2, 0.01)).value, covariance(2, 0.1), atol=1e-6)
    state = floor.init(covariance(1, 1))
    np.testing.assert_array_equal(floor.update(state, covariance(2, 0.2)).value, covariance(2, 0.2))
    np.testing.assert_allclose(floor.update(state, covariance(3, -1.0)).value, covariance(3, 0.1), atol=1e-6)
    np.testing.assert_allclose(floor.update(state, jnp.zeros((2, 2))).value, 0.1 * np.eye(2), atol=1e-7)


@pytest.mark.parametrize('name', ['ema', 'leak', 'gate', 'floor', 'both'])
def test_covariances_stay_symmetric_and_definite(name):
    """A thousand covariances of four samples in five dimensions: eigenvalues >= 0 but for rounding, >= the floor where there is one."""
    samples = np.random.default_rng(0).normal(size=(1000, 4, 5)).astype(np.float32)
    values = np.asarray(follow(RULES[name], jnp.eye(5), samples.swapaxes(-1, -2) @ samples / 4).value)
    np.testing.assert_allclose(values, values.swapaxes(-1, -2), atol=1e-6)
    assert np.linalg.eigvalsh(values.astype(np.float64)).min() >= (0.1 if name in ('floor', 'both') else 0) - 1e-6


@rules
def test_no_gradient_enters_an_anchor(name):
    rule = RULES[name]

    def total(first, x):
        state = rule.update(rule.init(first), x)
        return sum(leaf.sum() for leaf in jax.tree.leaves((state.value, rule.update(state, 2 * x).value)))

    for slope in jax.jit(jax.grad(total, argnums=(0, 1)))(covariance(1, 1), covariance(2, 2)):
        np.testing.assert_array_equal(slope, 0)


@rules
@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_not_finite_values_are_passed_over(name, bad):
    """The anchor stays, the update counts, and the next one is an ordinary one."""
    rule = RULES[name]
    state = rule.init(covariance(1, 1))
    kept = rule.update(state, covariance(2, 2).at[0, 1].set(bad))
    np.testing.assert_array_equal(kept.value, state.value)
    assert int(kept.count) == 1
    assert np.isfinite(rule.update(kept, covariance(3, 3)).value).all()
    assert np.any(rule.update(kept, covariance(3, 3)).value != state.value) == (name != 'fixed')


@pytest.mark.parametrize('name', ['fixed', 'snapshot', 'ema', 'leak'])
def test_trees_keep_structure_and_dtypes(name):
    """Parameters of several dtypes, with None; the state holds copies, so what it was given may be donated."""
    tree = {**TREE, 'half': jnp.ones(2, jnp.bfloat16)}
    rule = RULES[name]
    state = rule.init(tree)
    shapes = jax.eval_shape(rule.update, state, tree)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes) == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    given = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}
    held = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    assert not given & set(held)
    assert len(held) == len(set(held))
    moved = jax.jit(rule.update, donate_argnums=0)(state, jax.tree.map(lambda leaf: 2 * leaf, tree))
    assert np.isfinite(np.asarray(moved.value['half'], np.float32)).all()


@rules
def test_vmapped_and_scanned_are_a_loop(name):
    """Also where a gate decides differently for different rows."""
    rule = RULES[name]
    rng = np.random.default_rng(1)
    factors = rng.normal(size=(6, 3, 2, 2)).astype(np.float32)
    values = factors @ factors.swapaxes(-1, -2)
    first = jnp.stack([covariance(1, 1), covariance(2, 0.5), covariance(0.1, 0.1)])
    together = jax.vmap(lambda start, row: follow(rule, start, row).value, in_axes=(0, 1))(first, values)
    update = jax.jit(rule.update)
    for row in range(3):
        state = rule.init(first[row])
        for step in range(6):
            state = update(state, values[step, row])
            np.testing.assert_allclose(together[row, step], state.value, rtol=1e-4, atol=1e-5)


def test_rates_may_be_swept():
    """decay and leak as arrays under vmap equal numbers."""
    values = jnp.linspace(0, 1, 5)
    swept = jax.vmap(lambda decay, leak: follow(anchors.ema(decay, leak), jnp.float32(3), values).value)(
        jnp.array([0.5, 0.9]), jnp.array([0.0, 0.3])
    )
    for row, (decay, leak) in enumerate(((0.5, 0.0), (0.9, 0.3))):
        np.testing.assert_allclose(swept[row], follow(anchors.ema(decay, leak), jnp.float32(3), values).value, rtol=1e-6)


def test_bad_settings_are_refused():
    for call, message in (
        (lambda: anchors.snapshot(0), 'every=0'),
        (lambda: anchors.ema(1.5), 'decay=1.5'),
        (lambda: anchors.ema(float('nan')), 'decay=nan'),
        (lambda: anchors.ema(0.5, leak=-0.1), 'leak=-0.1'),
        (lambda: anchors.spectral_floor(anchors.fixed(), -1.0), 'floor=-1'),
    ):
        with pytest.raises(ValueError, match=message):
            call()
