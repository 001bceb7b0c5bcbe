"""Projections of full and of decoupled Gaussians: against SciPy, the diagonal projection, published closed forms and finite differences."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
import scipy.optimize

from optimizers import curves, metrics, project, project_decoupled, project_full_gaussian

ROWS, SIZE = 32, 3
KINDS = ['kl', 'wasserstein', 'frobenius']
FULL = jax.jit(project_full_gaussian)
DECOUPLED = {kind: jax.jit(functools.partial(project_decoupled, kind=kind)) for kind in KINDS}


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@functools.partial(jax.jit, static_argnums=0)
def pull_back(kind, x, anchor, radii, cotangent):
    """Cotangents of x and anchor."""
    return jax.vjp(lambda x, anchor: project_decoupled(x, anchor, radii[0], radii[1], kind)[0], x, anchor)[1](cotangent)


def diagonal(seed, dtype: Any = np.float32):
    """((mean, log std), the anchor's)."""
    mean, log_std, shift, change = np.random.default_rng(seed).normal(size=(4, ROWS, SIZE))
    return jax.tree.map(lambda leaf: leaf.astype(dtype), ((mean + 0.7 * shift, log_std + 0.7 * np.tanh(change)), (mean, log_std)))


def full(seed, dtype: Any = np.float32):
    """((mean, covariance), the anchor's)."""
    rng = np.random.default_rng(seed)
    means, factors = rng.normal(size=(2, ROWS, SIZE)), np.eye(SIZE) + 0.3 * rng.normal(size=(2, ROWS, SIZE, SIZE))
    covariances = factors @ factors.swapaxes(-1, -2) + 0.1 * np.eye(SIZE)
    return [(mean.astype(dtype), covariance.astype(dtype)) for mean, covariance in zip(means, covariances, strict=True)]


def kl(x, anchor):
    """KL(x || anchor) for full covariances by NumPy in float64."""
    (mean, covariance), (mean0, covariance0) = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (x, anchor))
    inverse, shift = np.linalg.inv(covariance0), mean - mean0
    scaled = np.einsum('...i,...ij,...j', shift, inverse, shift) + np.trace(inverse @ covariance, axis1=-2, axis2=-1) - SIZE
    return 0.5 * (scaled + np.linalg.slogdet(covariance0)[1] - np.linalg.slogdet(covariance)[1])


def pick(rows, *trees):
    return [jax.tree.map(lambda leaf: np.asarray(leaf)[rows], tree) for tree in trees]


def close(ours, theirs, **tolerance):
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, **tolerance)


def equal(ours, theirs):
    close(ours, theirs, rtol=0, atol=0)


# ---- full covariances


def test_diagonal_covariances_give_the_diagonal_projection(float64):
    x, anchor = diagonal(11, np.float64)
    matrices = [(mean, np.exp(2 * log_std)[..., None] * np.eye(SIZE)) for mean, log_std in (x, anchor)]
    point, info = FULL(*matrices, 0.3)
    expected, expected_info = jax.jit(functools.partial(project, metrics.gaussian_kl, curves.gaussian_geodesic))(x, anchor, 0.3)
    close(point, (expected[0], np.exp(2 * np.asarray(expected[1]))[..., None] * np.eye(SIZE)), rtol=1e-8, atol=1e-8)
    close(info, expected_info, rtol=1e-8)


@pytest.mark.parametrize('radius', [0.02, 0.5])
def test_nearest_full_gaussian_by_scipy(float64, radius):
    """min KL(q || x) with KL(q || anchor) <= radius, by SLSQP over the mean and the Cholesky factor, whose diagonal is a logarithm."""
    x, anchor = full(12, np.float64)
    point, info = FULL(x, anchor, radius)
    active = np.asarray(info.active)
    np.testing.assert_allclose(kl(point, anchor)[active], radius, rtol=1e-9)
    below = np.tril_indices(SIZE, -1)

    def unpack(free):
        factor = np.diag(np.exp(free[SIZE : 2 * SIZE]))
        factor[below] = free[2 * SIZE :]
        return free[:SIZE], factor @ factor.T

    for row in np.flatnonzero(active)[:3]:
        target, origin, found = pick(row, x, anchor, point)
        factor = np.linalg.cholesky(origin[1])
        start = np.concatenate([origin[0], np.log(np.diag(factor)), factor[below]]) + 0.02  # the constraint has no slope at the anchor
        inside = {'type': 'ineq', 'fun': lambda free, o=origin: radius - kl(unpack(free), o)}
        goal = functools.partial(lambda free, o: kl(unpack(free), o), o=target)
        result = scipy.optimize.minimize(goal, start, method='SLSQP', constraints=[inside], options={'ftol': 1e-13, 'maxiter': 500})
        assert inside['fun'](result.x) >= -1e-8
        assert kl(found, target) <= result.fun + 1e-8
        close(found, unpack(result.x), rtol=0, atol=1e-4)


def test_in_float32_it_stays_inside_and_is_the_identity_there():
    x, anchor = full(13)
    for radius in (1e-3, 0.1, 10.0):
        point, info = FULL(x, anchor, radius)
        active = np.asarray(info.active)
        assert (kl(point, anchor) <= radius * (1 + 1e-5) + 1e-6).all()
        equal(*pick(~active, point, x))
        np.testing.assert_allclose(point[1], np.swapaxes(point[1], -1, -2), atol=1e-6)
    assert active.sum() < ROWS / 2
    close(FULL(x, anchor, 0.0)[0], anchor, rtol=2e-6, atol=2e-6)


def test_singular_covariances():
    """Rows: 0 x is indefinite, 1 x is not finite, 2 the anchor is singular: the anchor. 3 x is flat: a limit inside. 4 is fine."""
    x, anchor = full(14)
    x[1][0], x[1][1, 0, 0], x[1][3] = np.diag([1, 1, -1]), np.nan, np.diag([1, 1, 1e-12])
    anchor[1][2] = np.diag([1, 0, 1])
    point, info = FULL(x, anchor, 0.1)
    equal(*pick(slice(3), point, anchor))
    np.testing.assert_array_equal(np.asarray(info.fraction)[:3], 0)
    assert np.asarray(info.active)[:4].all()
    assert (kl(*pick(slice(3, 5), point, anchor)) <= 0.1 + 1e-5).all()
    assert 0 < info.fraction[4] < 1


# ---- decoupled projections


def otto(kind, x, anchor, mean_radius, covariance_radius):
    """The formulas of Otto et al. 2021: multipliers omega and eta of the two constraints."""
    (mean, std), (mean0, std0) = ((mean, np.exp(log_std)) for mean, log_std in (x, anchor))
    scaled = np.square(mean - mean0) / (1 if kind == 'frobenius' else np.square(std0))
    omega = np.maximum(np.sqrt((0.5 if kind == 'kl' else 1) * scaled.sum(-1) / mean_radius) - 1, 0)[:, None]
    mean = (mean + omega * mean0) / (1 + omega)
    if kind == 'wasserstein':
        eta = np.maximum(np.sqrt(np.square((std - std0) / std0).sum(-1) / covariance_radius) - 1, 0)[:, None]
        return mean, np.log((std + eta * std0) / (1 + eta))
    if kind == 'frobenius':
        eta = np.maximum(np.sqrt(np.square(std**2 - std0**2).sum(-1) / covariance_radius) - 1, 0)[:, None]
        return mean, 0.5 * np.log((std**2 + eta * std0**2) / (1 + eta))

    def variance(eta, row):
        return (1 + eta) / (eta / std0[row] ** 2 + 1 / std[row] ** 2)

    def excess(eta, row):
        ratio = variance(eta, row) / std0[row] ** 2
        return 0.5 * np.sum(ratio - 1 - np.log(ratio)) - covariance_radius

    etas = [scipy.optimize.brentq(excess, 0, 1e6, args=(row,), xtol=1e-14) if excess(0, row) > 0 else 0 for row in range(ROWS)]
    return mean, np.stack([0.5 * np.log(variance(eta, row)) for row, eta in enumerate(etas)])


@pytest.mark.parametrize('kind', KINDS)
def test_decoupled_projections_are_ottos(float64, kind):
    x, anchor = diagonal(15, np.float64)
    for radii in ((0.3, 0.1), (0.01, 1e-3), (1e6, 1e6)):
        point, info = DECOUPLED[kind](x, anchor, *radii)
        close(point, otto(kind, x, anchor, *radii), rtol=1e-7, atol=1e-8)
        assert (np.asarray(info.distance) <= radii[1] * (1 + 1e-10)).all()
        assert np.asarray(info.active).any() == (radii[1] < 1)
    equal(point, x)
    close(DECOUPLED[kind](x, anchor, 0.0, 0.0)[0], anchor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize('kind', KINDS)
def test_gradients_of_decoupled_projections(float64, kind):
    """By central differences in x and anchor, with cotangents of one sign and of both; the identity inside; no NaN at radius 0."""
    x, anchor = diagonal(16, np.float64)
    everywhere = DECOUPLED[kind](x, anchor, 1e6, 1e6)[1].distance
    radii = (0.4, np.median(everywhere))
    rng = np.random.default_rng(0)
    ones = jax.tree.map(np.ones_like, x)
    for cotangent in (ones, jax.tree.map(np.negative, ones), jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), x)):
        direction = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), (x, anchor))
        ends = [DECOUPLED[kind](*jax.tree.map(lambda a, b, s=s: a + s * 1e-5 * b, (x, anchor), direction), *radii)[0] for s in (1, -1)]
        slopes = jax.tree.map(lambda a, b: (np.asarray(a) - np.asarray(b)) / 2e-5, *ends)
        pulled = pull_back(kind, x, anchor, radii, cotangent)
        np.testing.assert_allclose(inner(pulled, direction), inner(slopes, cotangent), rtol=1e-4, atol=1e-5)
    equal(pull_back(kind, x, anchor, (1e6, 1e6), ones), (ones, jax.tree.map(np.zeros_like, x)))
    close(pull_back(kind, x, anchor, (0.0, 0.0), ones)[0], jax.tree.map(np.zeros_like, x), rtol=0, atol=1e-3)


def inner(left, right):
    """Inner product of each row, [ROWS]."""
    return sum((np.asarray(a) * np.asarray(b)).sum(-1) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True))


@pytest.mark.parametrize('kind', KINDS)
def test_decoupled_projections_of_bad_input_are_the_anchor(kind):
    """Row 3 only. A log std of 1000 is finite, but its variance is not; the KL does not need it."""
    others = np.arange(ROWS) != 3
    expected, _ = DECOUPLED[kind](*diagonal(17), 0.1, 0.1)
    for leaf, value in ((0, np.nan), (0, np.inf), (1, np.nan), (1, np.inf), (1, 1000.0)):
        x, anchor = diagonal(17)
        x[leaf][3, 1] = value
        point, info = DECOUPLED[kind](x, anchor, 0.1, 0.1)
        close(*pick(others, point, expected), rtol=1e-6, atol=1e-7)
        assert bool(info.active[3])
        assert float(info.distance[3]) <= 0.1
        if kind == 'kl' and value == 1000:
            assert np.isfinite(pick(3, point)[0]).all()
        else:
            equal(*pick(3, point, anchor))
            assert (float(info.fraction[3]), float(info.distance[3])) == (0, 0)


def test_bad_settings_are_refused():
    x, anchor = diagonal(0)
    for radius in (-1.0, float('nan')):
        for radii in ((1.0, radius), (radius, 1.0)):
            with pytest.raises(ValueError, match=f'radius={radius}'):
                project_decoupled(x, anchor, *radii)
        with pytest.raises(ValueError, match=f'radius={radius}'):
            project_full_gaussian(x, anchor, radius)
    with pytest.raises(ValueError, match="kind='cubic'"):
        project_decoupled(x, anchor, 1.0, 1.0, 'cubic')
