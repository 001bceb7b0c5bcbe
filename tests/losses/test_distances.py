"""Distances and spectra against distrax, SciPy, stored values of POT, hand values, finite differences and simulated paths."""

import functools

import distrax
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.stats
from hypothesis import strategies
from jax import test_util

from losses import distances, spectrum

A = np.array([[2.0, 0.5, 0], [0.5, 1, 0.25], [0, 0.25, 0.5]])
B = np.array([[1.0, -0.25, 0.5], [-0.25, 1.5, 0], [0.5, 0, 2]])
bures = jax.jit(distances.bures_wasserstein_squared)
bures_gradients = jax.jit(jax.grad(lambda a, b: jnp.sum(distances.bures_wasserstein_squared(a, b)), argnums=(0, 1)))
gaussian_kl, full_gaussian_kl = jax.jit(distances.gaussian_kl), jax.jit(distances.full_gaussian_kl)
categorical_kl = jax.jit(distances.categorical_kl)
effective_rank = jax.jit(spectrum.effective_rank)


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def covariances(seed, count, size, rank=None):
    """Random covariances [count, size, size]; of full rank with eigenvalues >= 0.1 unless a lower rank is asked for."""
    factor = np.random.default_rng(seed).normal(size=(count, size, rank or size))
    return factor @ factor.swapaxes(-1, -2) + (0 if rank else 0.1) * np.eye(size)


# ---- Kullback-Leibler divergences


def test_kl_by_hand():
    """N(1, 2^2) to N(0, 1): -log 2 + (4 + 1) / 2 - 1/2; the other way round: log 2 + (1 + 1) / 8 - 1/2. (1/2, 1/2) to (1/4, 3/4)."""
    one, zero, two = jnp.ones(1), jnp.zeros(1), jnp.log(jnp.full(1, 2.0))
    np.testing.assert_allclose(gaussian_kl(one, two, zero, zero), 2 - np.log(2), rtol=1e-6)
    np.testing.assert_allclose(gaussian_kl(zero, zero, one, two), np.log(2) - 0.25, rtol=1e-6)
    np.testing.assert_allclose(full_gaussian_kl(one, jnp.full((1, 1), 4.0), zero, jnp.eye(1)), 2 - np.log(2), rtol=1e-6)
    half, quarters = jnp.zeros(2), jnp.log(jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(categorical_kl(half, quarters), 0.5 * np.log(2) + 0.5 * np.log(2 / 3), rtol=1e-6)


def test_kl_is_distraxs(float64):
    rng = np.random.default_rng(0)
    mean, mean0, log_std, log_std0 = rng.normal(size=(4, 50, 3))
    first, second = covariances(1, 50, 3), covariances(2, 50, 3)
    logits, logits0 = 3 * rng.normal(size=(2, 50, 6))
    with jax.numpy_rank_promotion('allow'):
        diagonal = [distrax.MultivariateNormalDiag(m, np.exp(s)) for m, s in ((mean, log_std), (mean0, log_std0))]
        full = [distrax.MultivariateNormalFullCovariance(m, c) for m, c in ((mean, first), (mean0, second))]
        classes = [distrax.Categorical(each) for each in (logits, logits0)]
        theirs = [pair[0].kl_divergence(pair[1]) for pair in (diagonal, full, classes)]
    ours = gaussian_kl(mean, log_std, mean0, log_std0), full_gaussian_kl(mean, first, mean0, second), categorical_kl(logits, logits0)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == jnp.float64
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-13)


@hypothesis.settings(max_examples=30)
@hypothesis.given(strategies.integers(0, 1000), strategies.floats(-8, 0))
def test_kl_of_neighbours_is_accurate_and_never_negative(seed, exponent):
    """In float32, down to distances where 1 + distance is 1: within 2e-4 of float64 from 1e-5 on, and >= 0 always."""
    rng = np.random.default_rng(seed)
    size = 10.0**exponent
    mean, log_std, logits = rng.normal(size=(3, 8, 4)).astype(np.float32)
    moved = [(each + size * rng.normal(size=(8, 4))).astype(np.float32) for each in (log_std, logits)]
    factor = np.tril(rng.normal(size=(8, 4, 4))) * 0.3 + np.eye(4)
    first = (factor @ factor.swapaxes(-1, -2)).astype(np.float32)
    scale = 1 + size * rng.normal(size=(8, 4))
    second = (scale[:, :, None] * first.astype(np.float64) * scale[:, None, :]).astype(np.float32)
    for kl, arguments in (
        (gaussian_kl, (mean, log_std, mean, moved[0])),
        (categorical_kl, (logits, moved[1])),
        (full_gaussian_kl, (mean, second, mean, first)),
    ):
        value = np.asarray(kl(*arguments))
        assert (value >= 0).all()
        with jax.enable_x64(True):
            exact = np.asarray(kl(*(each.astype(np.float64) for each in arguments)))
        # Covariances store their inverse less exactly than logarithms do.
        np.testing.assert_allclose(value, exact, rtol=2e-4, atol=2e-6 if kl is full_gaussian_kl else 2e-9)


def test_kl_to_itself_is_zero():
    rng = np.random.default_rng(3)
    mean, log_std, logits = rng.normal(size=(3, 20, 5)).astype(np.float32)
    covariance = covariances(4, 20, 5).astype(np.float32)
    assert not np.asarray(gaussian_kl(mean, log_std, mean, log_std)).any()
    assert not np.asarray(categorical_kl(logits, logits)).any()
    np.testing.assert_allclose(full_gaussian_kl(mean, covariance, mean, covariance), 0, atol=1e-9)


def test_kl_of_impossible_things():
    """A singular Gaussian and a class that only the second argument forbids are infinitely far; one that both forbid does not count."""
    full_slopes = jax.jit(jax.grad(distances.full_gaussian_kl, argnums=(1, 3)))
    slopes = jax.jit(jax.grad(distances.categorical_kl, argnums=(0, 1)))(jnp.array([0.0, 0.0, -jnp.inf]), jnp.zeros(3))
    zero, singular = jnp.zeros(2), jnp.diag(jnp.array([1.0, 0.0]))
    for pair in ((singular, jnp.eye(2)), (jnp.eye(2), singular), (-jnp.eye(2), jnp.eye(2))):
        assert full_gaussian_kl(zero, pair[0], zero, pair[1]) == np.inf
        np.testing.assert_array_equal(full_slopes(zero, pair[0], zero, pair[1]), 0)
    two, three = jnp.array([0.0, 0.0, -jnp.inf]), jnp.zeros(3)
    assert categorical_kl(three, two) == np.inf
    np.testing.assert_allclose([categorical_kl(two, three), categorical_kl(two, two)], [np.log(1.5), 0], rtol=1e-6)
    # d KL / d logits0 is q - p.
    np.testing.assert_allclose(slopes, [[0, 0, 0], [-1 / 6, -1 / 6, 1 / 3]], rtol=1e-5, atol=1e-7)
    sure = jnp.array([0.0, -200.0, -90.0])  # probabilities below the smallest float
    np.testing.assert_allclose(categorical_kl(sure, three), np.log(3), rtol=1e-6)
    np.testing.assert_allclose(categorical_kl(three, sure), 290 / 3 - np.log(3), rtol=1e-6)


def test_gradients_of_kl(float64):
    rng = np.random.default_rng(5)
    gaussian, logits = rng.normal(size=(4, 6, 3)), rng.normal(size=(2, 6, 4))
    near = logits[0] + 1e-3 * rng.normal(size=(6, 4))
    check = functools.partial(test_util.check_grads, order=1, modes=['rev'])
    check(gaussian_kl, tuple(gaussian), rtol=1e-6)
    check(categorical_kl, tuple(logits), rtol=1e-6)
    check(categorical_kl, (logits[0], near), atol=1e-8, rtol=1e-5)

    @jax.jit
    def symmetric(mean, root, mean0, root0):
        return distances.full_gaussian_kl(mean, root @ root.swapaxes(-1, -2), mean0, root0 @ root0.swapaxes(-1, -2))

    roots = [np.linalg.cholesky(covariances(seed, 6, 3)) for seed in (6, 7)]
    check(symmetric, (gaussian[0], roots[0], gaussian[1], roots[1]), rtol=1e-5)


# ---- covariances


def test_frobenius_by_hand():
    """(1, 2; 2, 0) against 0: 1 + 4 + 4."""
    np.testing.assert_allclose(distances.frobenius_squared(jnp.array([[1.0, 2], [2, 0]]), jnp.zeros((2, 2))), 9)


def test_bures_of_commuting_matrices(float64):
    """sum (sqrt a - sqrt b)^2 of the eigenvalues in a common basis."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(20, 4, 4)))[0]
    first, second = rng.uniform(0, 3, (2, 20, 4))
    pair = [(basis * each[:, None, :]) @ basis.swapaxes(-1, -2) for each in (first, second)]
    np.testing.assert_allclose(bures(*pair), np.square(np.sqrt(first) - np.sqrt(second)).sum(-1), rtol=1e-10, atol=1e-12)


def test_bures_is_scipys_and_symmetric(float64):
    first, second = covariances(1, 20, 4), covariances(2, 20, 4)

    def by_scipy(a, b):
        root = scipy.linalg.sqrtm(b)
        return np.trace(a + b - 2 * scipy.linalg.sqrtm(root @ a @ root)).real

    np.testing.assert_allclose(bures(first, second), [by_scipy(a, b) for a, b in zip(first, second, strict=True)], rtol=1e-10)
    np.testing.assert_allclose(bures(first, second), bures(second, first), rtol=1e-12)
    np.testing.assert_allclose(bures(first, first), 0, atol=1e-12)


def test_bures_is_pots(float64):
    """Squares of `ot.gaussian.bures_wasserstein_distance` and the map of `bures_wasserstein_mapping`, POT 0.9.7, stored."""
    np.testing.assert_allclose(bures(A, B), 1.0937877938437939, rtol=1e-10)
    np.testing.assert_allclose(bures(A, np.diag([1.0, 4, 9])), 6.681932373394263, rtol=1e-10)
    optimal_map = [[0.7550555, -0.3107376, 0.29621193], [-0.3107376, 1.38339341, -0.33898868], [0.29621193, -0.33898868, 2.07966727]]
    np.testing.assert_allclose(np.eye(3) - bures_gradients(A, B)[0], optimal_map, atol=1e-8)


def test_bures_of_rank_one(float64):
    """v v^T to B: |v|^2 + tr B - 2 (v^T B v)^1/2, and w w^T to v v^T: |v|^2 + |w|^2 - 2 |v^T w|."""
    v, w = np.array([1.0, 2, -1]), np.array([0.5, 0, 2])
    np.testing.assert_allclose(bures(np.outer(v, v), B), 6 + np.trace(B) - 2 * np.sqrt(v @ B @ v), rtol=1e-7)
    np.testing.assert_allclose(bures(np.outer(w, w), np.outer(v, v)), 6 + 4.25 - 2 * 1.5, rtol=1e-7)
    np.testing.assert_allclose(bures(np.zeros((3, 3)), B), np.trace(B), rtol=1e-12)


def slope(first, second, direction, which):
    """Central difference of the squared distance along a symmetric direction of one argument."""
    step = 1e-5
    moved = [[each + sign * step * direction if index == which else each for index, each in enumerate((first, second))] for sign in (1, -1)]
    return (bures(*moved[0]) - bures(*moved[1])) / (2 * step)


def test_gradient_of_bures_is_that_of_finite_differences(float64):
    """Regular, equal, and where the other covariance has lost its rank."""
    rng = np.random.default_rng(3)
    regular, other, thin = covariances(4, 10, 4), covariances(5, 10, 4), covariances(6, 10, 4, rank=2)
    for first, second, sides in ((regular, other, (0, 1)), (regular, regular, (0, 1)), (thin, regular, (1,)), (regular, thin, (0,))):
        for side in sides:
            direction = rng.normal(size=(10, 4, 4))
            direction = direction + direction.swapaxes(-1, -2)
            expected = np.sum(bures_gradients(first, second)[side] * direction, axis=(-1, -2))
            np.testing.assert_allclose(slope(first, second, direction, side), expected, rtol=1e-5, atol=1e-7)
    test_util.check_grads(bures, (regular, other), order=1, modes=['rev'], rtol=1e-5)


def test_gradient_of_bures_inside_a_lost_rank(float64):
    """A = Q a Q^T with a [2, 2]: inside its range its gradient is that of a to Q^T B Q, and outside it pulls outwards."""
    thin, regular = covariances(6, 10, 4, rank=2), covariances(4, 10, 4)
    basis = np.linalg.eigh(thin)[1]
    inside, outside = basis[:, :, 2:], basis[:, :, :2]
    pull = bures_gradients(thin, regular)[0]
    small = [inside.swapaxes(-1, -2) @ each @ inside for each in (thin, regular)]
    np.testing.assert_allclose(inside.swapaxes(-1, -2) @ pull @ inside, bures_gradients(*small)[0], rtol=1e-6, atol=1e-8)
    assert (np.trace(outside.swapaxes(-1, -2) @ pull @ outside, axis1=-2, axis2=-1) < -10).all()


@pytest.mark.parametrize('name', ['equal', 'isotropic', 'rank one', 'zeros', 'ill-conditioned'])
def test_bures_in_float32(name):
    """Where roots by eigenvectors give NaN, gradients are finite; the distance to itself is rounding."""
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(5, 5)))[0]
    first = {
        'equal': covariances(1, 1, 5)[0],
        'isotropic': np.eye(5),
        'rank one': np.outer(basis[0], basis[0]),
        'zeros': np.zeros((5, 5)),
        'ill-conditioned': (basis * 10.0 ** -np.arange(0, 10, 2)) @ basis.T,
    }[name].astype(np.float32)
    np.testing.assert_allclose(bures(first, first), 0, atol=2e-6 * max(np.trace(first), 1))
    for second in (first, np.eye(5, dtype=np.float32)):
        for pair in ((first, second), (second, first)):
            gradients = bures_gradients(*pair)
            assert np.isfinite(gradients).all()
            np.testing.assert_allclose(gradients, np.swapaxes(gradients, -1, -2), atol=1e-6 * (1 + np.abs(gradients).max()))
    with jax.enable_x64(True):
        exact = bures(first.astype(np.float64), np.eye(5))
    np.testing.assert_allclose(bures(first, np.eye(5, dtype=np.float32)), exact, rtol=2e-4)


def test_bures_gradient_scales_with_the_cotangent_and_vmaps():
    first, second = covariances(8, 3, 4).astype(np.float32), covariances(9, 3, 4).astype(np.float32)
    weights = jnp.array([2.0, -1.0, 0.0])
    weighted = jax.jit(lambda a, b: jax.vjp(distances.bures_wasserstein_squared, a, b)[1](weights))(first, second)
    one_by_one = jax.jit(jax.vmap(jax.grad(distances.bures_wasserstein_squared, argnums=(0, 1))))(first, second)
    for batched, single in zip(weighted, one_by_one, strict=True):
        np.testing.assert_allclose(batched, single * weights[:, None, None], rtol=1e-4, atol=1e-6)


def test_effective_rank_by_hand():
    """Eigenvalues (3, 1): shares 3/4 and 1/4, exp(3/4 log 4/3 + 1/4 log 4)."""
    expected = np.exp(0.75 * np.log(4 / 3) + 0.25 * np.log(4))
    turned = np.array([[2.0, 1], [1, 2]], np.float32)
    for scale in (1, 1e-6, 1e6):
        np.testing.assert_allclose(effective_rank(scale * turned), expected, rtol=1e-5)
    assert [round(float(effective_rank(each)), 5) for each in (jnp.eye(2), jnp.ones((2, 2)), jnp.zeros((2, 2)))] == [2, 1, 1]
    assert effective_rank(jnp.diag(jnp.array([1.0, -1e-7]))) == 1
    ranks = effective_rank(covariances(0, 50, 4).astype(np.float32))
    assert ranks.shape == (50,)
    assert ((ranks >= 1) & (ranks <= 4 + 1e-5)).all()


def test_gradient_of_effective_rank():
    """At its largest value the gradient is 0; it is finite where an eigenvalue is 0."""
    gradient = jax.jit(jax.grad(spectrum.effective_rank))
    np.testing.assert_allclose(gradient(jnp.eye(3)), 0, atol=1e-6)
    assert np.isfinite(gradient(jnp.diag(jnp.array([2.0, 1.0, 0.0])))).all()


# ---- paths


def test_path_kl_by_hand():
    """h = 0.5, g^2 = (1, 2), differences (3, 4) and (2, 0): 0.5 * 25 / 2 + 0.5 * 4 / 4 = 6.75."""
    drift = jnp.array([[[3.0, 4.0]], [[2.0, 0.0]]])
    np.testing.assert_allclose(distances.path_kl(drift, jnp.zeros_like(drift), jnp.array([1.0, 2.0]), 0.5), [6.75])


def test_path_kl_is_the_log_ratio_of_simulated_paths():
    """Both path densities, evaluated step by step by SciPy on paths of the first law, within four standard errors; 4% apart would fail."""
    rng = np.random.default_rng(0)
    count, size, step, diffusion = 40_000, 2, 0.25, np.array([0.5, 1.0, 1.5, 2.0])
    drifts = [lambda x, k: 0.8 - x, lambda x, k: np.sin(x) * k]
    state, log_ratio, seen = rng.normal(size=(count, size)), np.zeros(count), []
    for k, squared in enumerate(diffusion):
        values = [drift(state, k) for drift in drifts]
        seen.append(values)
        scale = np.sqrt(step * squared)
        following = state + step * values[0] + scale * rng.normal(size=(count, size))
        densities = [scipy.stats.norm.logpdf(following, state + step * value, scale).sum(-1) for value in values]
        log_ratio += densities[0] - densities[1]
        state = following
    drift, drift0 = np.moveaxis(np.asarray(seen, np.float32), 1, 0)
    estimate = np.asarray(distances.path_kl(drift, drift0, jnp.asarray(diffusion, jnp.float32), step))
    assert estimate.shape == (count,)
    standard_error = np.std(log_ratio - estimate) / np.sqrt(count)
    assert abs(log_ratio.mean() - estimate.mean()) < 4 * standard_error
    assert standard_error < 0.01 * estimate.mean()
