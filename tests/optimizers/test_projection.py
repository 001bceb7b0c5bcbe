"""Projections: they stay inside, change nothing inside, are optimal, differentiable, and safe with bad input.

References are closed forms, SciPy's constrained solver and NumPy in float64, not the functions under test.
"""

import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from hypothesis import strategies

from optimizers import curves, metrics, project, radius_fraction, straight_fraction

ROWS, SIZE = 32, 3
FAMILIES = {
    'gaussian': (metrics.gaussian_kl, curves.gaussian_geodesic),
    'gaussian reverse': (metrics.reverse(metrics.gaussian_kl), curves.gaussian_geodesic),
    'categorical': (metrics.categorical_kl, curves.categorical_geodesic),
    'full gaussian': (metrics.full_gaussian_kl, curves.linear),
}
families = pytest.mark.parametrize('family', list(FAMILIES))
PROJECT = {name: jax.jit(functools.partial(project, *pair, num_steps=60)) for name, pair in FAMILIES.items()}


@functools.partial(jax.jit, static_argnums=0)
def pull_back(family, x, anchor, radius, cotangent):
    """(point, info, cotangents of x, anchor and radius) of the differentiable projection."""

    def point(*arguments):
        return project(*FAMILIES[family], *arguments, num_steps=60, differentiable=True)

    point, pull, info = jax.vjp(point, x, anchor, radius, has_aux=True)
    return point, info, *pull(cotangent)


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def pairs(family, seed, spread=1.0, dtype: Any = np.float32, rows=ROWS):
    """(x, anchor) of a family, `spread` apart."""
    rng = np.random.default_rng(seed)
    if family.startswith('categorical'):
        anchor = rng.normal(size=(rows, SIZE))
        return (anchor + spread * rng.normal(size=(rows, SIZE))).astype(dtype), anchor.astype(dtype)
    mean, log_std, shift, change = rng.normal(size=(4, rows, SIZE))
    if family == 'full gaussian':
        factors = np.eye(SIZE) + 0.3 * rng.normal(size=(2, rows, SIZE, SIZE))
        first, second = factors @ factors.swapaxes(-1, -2) + 0.1 * np.eye(SIZE)
        x, anchor = (mean + spread * shift, first), (mean, second)
    else:
        x, anchor = (mean + spread * shift, log_std + spread * np.tanh(change)), (mean, log_std)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), (x, anchor))


def run(family, x, anchor, radius):
    """(point, info); radii of one shape and dtype, so that a family is compiled once for each precision."""
    return PROJECT[family](x, anchor, radii(x, radius))


def radii(x, radius):
    return np.broadcast_to(radius, ROWS).astype(jax.tree.leaves(x)[0].dtype)


def pick(rows, *trees):
    """Some rows of each tree."""
    return [jax.tree.map(lambda leaf: np.asarray(leaf)[rows], tree) for tree in trees]


def distance(family, x, anchor):
    """The family's distance by NumPy in float64."""
    x, anchor = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (x, anchor))
    if family.endswith('reverse'):
        x, anchor = anchor, x
    if family.startswith('categorical'):
        log_p, log_q = (each - np.logaddexp.reduce(each, axis=-1, keepdims=True) for each in (x, anchor))
        return np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)
    (mean, spread), (mean0, spread0) = x, anchor
    if family == 'full gaussian':
        inverse = np.linalg.inv(spread0)
        shift = mean - mean0
        scaled = np.einsum('...i,...ij,...j', shift, inverse, shift) + np.trace(inverse @ spread, axis1=-2, axis2=-1) - SIZE
        return 0.5 * (scaled + np.linalg.slogdet(spread0)[1] - np.linalg.slogdet(spread)[1])
    variance, variance0 = np.exp(2 * spread), np.exp(2 * spread0)
    return np.sum(spread0 - spread + (variance + np.square(mean - mean0)) / (2 * variance0) - 0.5, axis=-1)


def equal(ours, theirs):
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(one, other)


def close(ours, theirs, **tolerance):
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, **tolerance)


# ---- the region


@families
@hypothesis.settings(max_examples=15)
@hypothesis.given(seed=strategies.integers(0, 1000), exponent=strategies.floats(-4, 1), spread=strategies.sampled_from([0.1, 1.0, 10.0]))
def test_never_leaves_the_region(family, seed, exponent, spread):
    """By the distance in float64; active points land on the border, and projecting twice changes nothing."""
    radius = 10.0**exponent
    x, anchor = pairs(family, seed, spread)
    point, info = run(family, x, anchor, radius)
    tolerance = max(1e-5, 2e-6 / np.sqrt(radius))  # entries are rounded to 1e-7; their steps have the size of sqrt(radius)
    reached = distance(family, point, anchor)
    assert (reached <= radius * (1 + tolerance)).all(), reached.max() / radius
    fraction, active = np.asarray(info.fraction), np.asarray(info.active)
    assert ((fraction >= 0) & (fraction <= 1)).all()
    assert (fraction[~active] == 1).all()
    assert (reached[active] >= 0.999 * radius).all()
    np.testing.assert_allclose(info.distance, reached, rtol=2 * tolerance, atol=1e-6)
    again, _ = run(family, point, anchor, radius)
    close(again, point, rtol=2e-5, atol=2e-5)


@families
@pytest.mark.parametrize('radius', [1e-4, 1e-2, 1.0])
def test_never_leaves_the_region_in_float64(float64, family, radius):
    x, anchor = pairs(family, 0, 2.0, np.float64)
    point, info = run(family, x, anchor, radius)
    reached = distance(family, point, anchor)
    assert np.asarray(info.active).any()
    assert (reached <= radius * (1 + 1e-10)).all()
    assert (reached[np.asarray(info.active)] >= radius * (1 - 1e-10)).all()


@families
def test_inside_it_is_the_identity(family):
    """Every second row, bit for bit, and so is the pull-back of any cotangent, when differentiable."""
    x, anchor = pairs(family, 1, 0.5)
    odd = np.arange(ROWS) % 2 == 1
    radius = radii(x, distance(family, x, anchor) * np.where(odd, 1.01, 0.5))
    cotangent = pairs(family, 2)[0]
    *differentiated, towards_x, towards_anchor, towards_radius = pull_back(family, x, anchor, radius, cotangent)
    for point, info in (run(family, x, anchor, radius), differentiated):
        np.testing.assert_array_equal(info.active, ~odd)
        np.testing.assert_array_equal(np.asarray(info.fraction)[odd], 1)
        equal(*pick(odd, point, x))
    equal(*pick(odd, towards_x, cotangent))
    assert not any(leaf.any() for leaf in jax.tree.leaves(pick(odd, towards_anchor, towards_radius)))


@families
def test_larger_radius_keeps_more(family):
    x, anchor = pairs(family, 3)
    infos = [run(family, x, anchor, radius)[1] for radius in 10.0 ** np.arange(-9, 2)]
    fractions, distances = (np.stack(each) for each in zip(*((info.fraction, info.distance) for info in infos), strict=True))
    assert (np.diff(fractions, axis=0) >= 0).all()
    assert (np.diff(distances, axis=0) >= -1e-6).all()
    assert (fractions[0] < 1e-3).all()
    assert (fractions[0] < fractions[4]).all()


@families
def test_zero_radius_gives_the_anchor_and_the_anchor_stays(family):
    """To rounding: a step that the distance cannot see is no step."""
    x, anchor = pairs(family, 4)
    point, info = run(family, x, anchor, 0.0)
    close(*(jax.nn.log_softmax(each) if family == 'categorical' else each for each in (point, anchor)), rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(info.fraction, 0, atol=1e-6)
    np.testing.assert_allclose(info.distance, 0, atol=1e-12)
    for radius in (0.0, 1.0) if family != 'full gaussian' else (1e-6, 1.0):
        point, info = run(family, anchor, anchor, radius)
        equal(point, anchor)
        assert not np.asarray(info.active).any()


@families
def test_not_finite_gives_the_anchor_in_its_row_only(family):
    x, anchor = pairs(family, 5)
    others = np.arange(ROWS) != 3
    expected, _ = run(family, x, anchor, 0.1)
    leaves, structure = jax.tree.flatten(x)
    for index in range(len(leaves)):
        for value in (np.nan, np.inf, -np.inf):
            spoilt = [leaf.copy() for leaf in leaves]
            spoilt[index].reshape(ROWS, -1)[3, 1] = value
            bad = jax.tree.unflatten(structure, spoilt)
            *differentiated, towards_x, towards_anchor, towards_radius = pull_back(family, bad, anchor, radii(x, 0.1), x)
            for point, info in (run(family, bad, anchor, 0.1), differentiated):
                equal(*pick(3, point, anchor))
                close(*pick(others, point, expected), rtol=2e-5, atol=1e-6)
                assert (float(info.fraction[3]), float(info.distance[3]), bool(info.active[3])) == (0, 0, True)
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((towards_x, towards_anchor, towards_radius)))
            assert not any(leaf.any() for leaf in jax.tree.leaves(pick(3, towards_x)))


@pytest.mark.parametrize('family', ['gaussian', 'gaussian reverse', 'categorical'])
@pytest.mark.parametrize('size', [1e4, 1e18, 1e30])
def test_huge_but_finite_stays_inside(family, size):
    """Also where squares overflow and the curve is 0 * inf."""
    x, anchor = pairs(family, 6)
    leaves, structure = jax.tree.flatten(x)
    for index in range(len(leaves)):
        for sign in (1, -1):
            away = (sign * size * np.array([1, -1, 1] if family == 'categorical' else [1, 1, 1])).astype(np.float32)
            far = jax.tree.unflatten(structure, [leaf + away * (at == index) for at, leaf in enumerate(leaves)])
            for point, *_ in (run(family, far, anchor, 0.1), pull_back(family, far, anchor, radii(x, 0.1), x)):
                assert (distance(family, point, anchor) <= 0.1 * (1 + 1e-5)).all()


def test_straight_fraction_by_hand():
    """sqrt(1 / 4); inside 1; nothing at radius 0, with a finite slope."""
    np.testing.assert_allclose(straight_fraction(jnp.array([4.0, 1.0, 0.5, 0.0, jnp.inf]), 1.0), [0.5, 1, 1, 1, 0])
    slopes = jax.jit(jax.grad(lambda d: straight_fraction(d, 0.0).sum()))(jnp.array([4.0, 0.0]))
    np.testing.assert_array_equal(slopes, 0)


def test_negative_radius_and_empty_tree_are_refused():
    x, anchor = pairs('gaussian', 0)
    for radius in (-1.0, float('nan')):
        with pytest.raises(ValueError, match=f'radius={radius}'):
            project(metrics.gaussian_kl, curves.gaussian_geodesic, x, anchor, radius)
    for function in (project, radius_fraction):
        with pytest.raises(ValueError, match='no leaves'):
            function(metrics.quadratic({}), curves.linear, {}, {}, 1.0)


def test_a_radius_that_is_no_number_constrains_to_the_anchor():
    """Arrays are not looked at: a NaN or negative one lets nothing through."""
    x, anchor = pairs('gaussian', 0)
    for radius in (np.float32(np.nan), np.float32(-1)):
        equal(run('gaussian', x, anchor, radius)[0], anchor)


# ---- optimality


@pytest.mark.parametrize('radius', [0.01, 0.3])
@pytest.mark.parametrize('family', ['gaussian', 'categorical'])
def test_nearest_point_by_scipy(float64, family, radius):
    """min KL(q || x) with KL(q || anchor) <= radius, by SLSQP over mean and log std, or over logits. It starts off the anchor, where the
    constraint has no slope."""
    x, anchor = pairs(family, 7, 0.7, np.float64)
    point, info = run(family, x, anchor, radius)
    rows = np.flatnonzero(info.active)[:3]
    assert len(rows) == 3
    for row in rows:
        target, origin, found = (pick(slice(row, row + 1), tree)[0] for tree in (x, anchor, point))
        if family == 'gaussian':
            start, unpack = np.concatenate(origin, axis=-1)[0] + 0.05, lambda free: (free[None, :SIZE], free[None, SIZE:])
        else:
            start, unpack = origin[0] + np.array([0.1, -0.1, 0]), lambda free: free[None]
        inside = {'type': 'ineq', 'fun': lambda free, u=unpack, o=origin: radius - distance(family, u(free), o)[0]}
        goal = functools.partial(lambda free, u, o: distance(family, u(free), o)[0], u=unpack, o=target)
        result = scipy.optimize.minimize(goal, start, method='SLSQP', constraints=[inside], options={'ftol': 1e-13, 'maxiter': 500})
        assert inside['fun'](result.x) >= -1e-8
        assert distance(family, found, target)[0] <= result.fun + 1e-8
        best: Any = unpack(result.x)
        close(found, jax.nn.log_softmax(best) if family == 'categorical' else best, atol=1e-4, rtol=0)


def test_equal_covariances_have_a_closed_form(float64):
    """N(m0 + f (m - m0), S) with f = min(1, sqrt(radius / KL))."""
    (mean, _), (mean0, log_std0) = pairs('gaussian', 9, 1.0, np.float64)
    radius = 0.8
    point, info = run('gaussian', (mean, log_std0), (mean0, log_std0), radius)
    kl = 0.5 * np.sum(np.square((mean - mean0) / np.exp(log_std0)), axis=-1)
    expected = np.minimum(1, np.sqrt(radius / kl))
    assert 0 < np.asarray(info.active).sum() < ROWS
    np.testing.assert_allclose(info.fraction, expected, rtol=1e-9)
    close(point, (mean0 + expected[:, None] * (mean - mean0), log_std0), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize('family', ['gaussian', 'categorical'])
def test_progress_towards_the_target(float64, family):
    """KL(q || x) <= KL(anchor || x) - (1 - f) / f KL(q || anchor): with the region active, the last KL is the radius."""
    for seed in range(10):
        x, anchor = pairs(family, seed, 2.0, np.float64)
        point, info = run(family, x, anchor, 0.05)
        fraction = np.asarray(info.fraction)
        gain = distance(family, anchor, x) - distance(family, point, x)
        assert (gain >= (1 - fraction) / fraction * distance(family, point, anchor) - 1e-10).all()
        assert np.asarray(info.active).sum() > ROWS / 2


# ---- gradients


@families
def test_gradients_are_those_of_finite_differences(float64, family):
    """In x, anchor and radius, row by row, in three random directions, active and inactive rows mixed."""
    x, anchor = pairs(family, 18, 0.7, np.float64)
    radius = np.median(distance(family, x, anchor)) * np.linspace(0.5, 1.5, ROWS)
    rng = np.random.default_rng(0)
    for _ in range(3):
        cotangent, *direction = (random_like(rng, tree) for tree in (x, x, anchor, radius))
        _, info, *pulled = pull_back(family, x, anchor, radius, cotangent)
        assert 0 < np.asarray(info.active).sum() < ROWS
        slopes = differences(family, (x, anchor, radius), tuple(direction))
        np.testing.assert_allclose(inner(pulled, direction), inner(slopes, cotangent), rtol=1e-5, atol=1e-6)


def differences(family, arguments, direction):
    """Central difference of the projected point along a direction of the arguments."""
    step = 1e-6
    ends = [run(family, *jax.tree.map(lambda a, b, s=s: a + s * b, arguments, direction))[0] for s in (step, -step)]
    return jax.tree.map(lambda a, b: (np.asarray(a) - np.asarray(b)) / (2 * step), *ends)


def random_like(rng, tree):
    """A random tree; matrices are symmetric."""
    drawn = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), tree)
    return jax.tree.map(lambda leaf: leaf + leaf.swapaxes(-1, -2) if leaf.ndim == 3 else leaf, drawn)


def inner(left, right):
    """Inner product of each row, [ROWS]."""
    products = [np.asarray(a) * np.asarray(b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)]
    return sum(product.reshape(ROWS, -1).sum(-1) for product in products)


@pytest.mark.parametrize('sign', [1, -1])
@pytest.mark.parametrize('family', ['gaussian', 'full gaussian'])
def test_cotangents_keep_their_sign(float64, family, sign):
    """Those of log std and covariance, all positive or all negative, entry by entry against central differences; every row is active."""
    x, anchor = pairs(family, 19, 1.0, np.float64)
    cotangent = jax.tree.map(lambda leaf: np.full_like(leaf, sign), x)
    _, info, (_, pulled), *_ = pull_back(family, x, anchor, radii(x, 0.05), cotangent)
    assert np.asarray(info.active).all()
    arguments = (x, anchor, radii(x, 0.05))
    for entry in np.ndindex(x[1].shape[1:]):
        direction = np.zeros_like(x[1])
        direction[:, *entry] = direction[:, *entry[::-1]] = 1
        everything = ((np.zeros_like(x[0]), direction), *jax.tree.map(np.zeros_like, arguments[1:]))
        slopes = differences(family, arguments, everything)
        np.testing.assert_allclose(inner(pulled, direction), inner(slopes, cotangent), rtol=1e-5, atol=1e-6)


@families
def test_gradients_at_the_border_and_at_the_anchor_are_finite(float64, family):
    """Exactly at the radius it is inactive: the identity. At the anchor and at radius 0, no NaN."""
    x, anchor = pairs(family, 20, 0.5, np.float64)
    ones = jax.tree.map(np.ones_like, x)
    border = np.asarray(jax.jit(FAMILIES[family][0])(x, anchor))
    point, info, *pulled = pull_back(family, x, anchor, border, ones)
    rows = ~np.asarray(info.active)
    assert rows.mean() > 0.7  # two programs may differ in the last bit of a distance
    equal(*pick(rows, pulled[0], ones))
    assert not any(leaf.any() for leaf in jax.tree.leaves(pick(rows, *pulled[1:])))
    close(point, x, rtol=1e-10, atol=1e-12)
    for radius in (border, 0 * border, border * (1 - 1e-12)):
        for start in (x, anchor):
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(pull_back(family, start, anchor, radius, ones)))


def test_no_gradient_unless_asked_for():
    x, anchor = pairs('gaussian', 21)

    def total(*arguments):
        return sum(leaf.sum() for leaf in jax.tree.leaves(PROJECT['gaussian'](*arguments)[0]))

    for leaf in jax.tree.leaves(jax.jit(jax.grad(total, argnums=(0, 1, 2)))(x, anchor, radii(x, 0.1))):
        assert not np.asarray(leaf).any()


# ---- transformations and dtypes


def test_compiled_is_eager_and_vmapped_is_batched_and_scanned():
    x, anchor = pairs('gaussian', 22)
    radius = np.geomspace(0.01, 10, ROWS).astype(np.float32)
    expected = run('gaussian', x, anchor, radius)
    single = functools.partial(project, metrics.gaussian_kl, curves.gaussian_geodesic, num_steps=60)
    close(single(x, anchor, radius), expected, rtol=1e-5, atol=1e-6)
    close(jax.jit(jax.vmap(single))(x, anchor, radius), expected, rtol=1e-5, atol=1e-6)
    scanned = jax.jit(lambda rows: jax.lax.scan(lambda _, row: (None, single(*row)), None, rows)[1])((x, anchor, radius))
    close(scanned, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('differentiable', [False, True])
def test_parameters_of_mixed_dtypes_keep_them(differentiable):
    """1/2 (4 * 2^2 + 2 * 2^2) = 12 is brought to 3: half of the way, exactly representable."""
    anchor = {'half': jnp.zeros(4, jnp.bfloat16), 'single': jnp.ones(2), 'none': None}
    x = {'half': jnp.full(4, 2.0, jnp.bfloat16), 'single': jnp.full(2, 3.0), 'none': None}
    metric = metrics.quadratic({'half': jnp.ones(4), 'single': jnp.ones(2), 'none': None})
    projection = jax.jit(functools.partial(project, metric, curves.linear, differentiable=differentiable))
    for radius, expected in ((3.0, {'half': 1.0, 'single': 2.0}), (100.0, {'half': 2.0, 'single': 3.0})):
        point, info = projection(x, anchor, radius)
        assert jax.tree.map(lambda leaf: leaf.dtype, point) == jax.tree.map(lambda leaf: leaf.dtype, x)
        for name, value in expected.items():
            np.testing.assert_allclose(np.asarray(point[name], np.float32), value, rtol=1e-2)
        assert float(info.distance) <= radius
        assert float(metric(point, anchor)) <= radius
