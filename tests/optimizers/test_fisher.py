"""Fisher estimates against loops over samples, dense matrices, hand values and stored values of kfac-jax; and their forms."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from optimizers import fisher, metrics

COUNT = 11
RNG = np.random.default_rng(0)
BATCH = {'x': RNG.normal(size=(COUNT, 3)).astype(np.float32), 'y': RNG.normal(size=(COUNT, 2)).astype(np.float32)}


class Network(nn.Module):
    """Two dense layers, the last without bias."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, use_bias=False, name='last')(jnp.tanh(nn.Dense(4, name='first')(x)))


NETWORK = Network()
PARAMS = NETWORK.init(jax.random.key(0), jnp.zeros(3))
PARAMS = jax.tree.map(lambda leaf: leaf + 0.1, PARAMS)


def apply(params, x) -> Any:
    return NETWORK.apply(params, x)


def loss(params, sample):
    """-log N(y; network(x), 1), up to a constant."""
    return 0.5 * jnp.sum(jnp.square(apply(params, sample['x']) - sample['y']))


diagonal = jax.jit(lambda params, microbatch: fisher.diagonal(loss, params, BATCH, microbatch=microbatch), static_argnums=1)
low_rank = jax.jit(lambda params, rank: fisher.low_rank(loss, params, BATCH, rank=rank), static_argnums=1)


@pytest.fixture(scope='module')
def gradients():
    """One gradient per sample by a loop, [N, P] in float64."""
    gradient = jax.jit(jax.grad(loss))
    rows = [ravel_pytree(gradient(PARAMS, jax.tree.map(lambda leaf, i=row: leaf[i], BATCH)))[0] for row in range(COUNT)]
    return np.stack(rows).astype(np.float64)


@pytest.fixture(scope='module')
def step():
    """A random step, as a tree and flat."""
    flat, unravel = ravel_pytree(PARAMS)
    drawn = np.random.default_rng(3).normal(size=flat.shape).astype(np.float32)
    return unravel(jnp.asarray(drawn)), drawn.astype(np.float64)


def flat(tree):
    return np.asarray(ravel_pytree(tree)[0], np.float64)


def half_form(matrix, step):
    return 0.5 * step @ matrix @ step


# ---- estimates


@pytest.mark.parametrize('microbatch', [1, 4, 11, 100])
def test_diagonal_is_the_mean_of_squares(gradients, microbatch):
    """11 samples in blocks of 4 leave a remainder of 3. The square of the mean gradient is another number."""
    estimate = diagonal(PARAMS, microbatch)
    assert jax.tree.structure(estimate) == jax.tree.structure(PARAMS)
    np.testing.assert_allclose(flat(estimate), np.square(gradients).mean(0), rtol=1e-5, atol=1e-8)
    assert flat(estimate).sum() > 1.5 * np.square(gradients.mean(0)).sum()


def test_diagonal_of_a_gaussian_by_hand():
    """-log N(x; m, 1) has gradient m - x: samples 1, 2, 6 around m = 0 give (1 + 4 + 36) / 3; the squared mean would be 9."""
    estimate = fisher.diagonal(lambda m, x: 0.5 * jnp.square(m - x), jnp.float32(0), jnp.array([1.0, 2, 6]), microbatch=2)
    np.testing.assert_allclose(estimate, 41 / 3, rtol=1e-6)


@pytest.mark.parametrize('microbatch', [4, 32])
def test_rank_one_by_its_formula(gradients, step, microbatch):
    """c mu mu^T with c = E[(mu^T g)^2] / |mu|^4: along mu it is the Fisher itself."""
    estimate = jax.jit(lambda params: fisher.rank_one(loss, params, BATCH, microbatch=microbatch))(PARAMS)
    mean = gradients.mean(0)
    np.testing.assert_allclose(flat(estimate.direction), mean, rtol=1e-4, atol=1e-6)
    scale = np.square(gradients @ mean).mean() / np.square(mean @ mean)
    np.testing.assert_allclose(estimate.scale, scale, rtol=1e-5)
    np.testing.assert_allclose(mean @ (gradients.T @ gradients / COUNT) @ mean, scale * np.square(mean @ mean), rtol=1e-10)
    np.testing.assert_allclose(metrics.rank_one_form(estimate, step[0]), half_form(scale * np.outer(mean, mean), step[1]), rtol=1e-4)


def test_rank_one_of_collinear_gradients_is_the_top_eigenpair():
    """All gradients a_n u: the Fisher is mean(a^2) u u^T. It does not depend on the scale of the loss, down to 1e-15."""
    direction, sizes = np.array([1.0, -2, 2], np.float32), np.array([1.0, 2, 3, -1], np.float32)
    for scale in (1, 1e-15):
        estimate = jax.jit(lambda s: fisher.rank_one(lambda p, a: s * a * jnp.dot(p, direction), jnp.zeros(3), sizes))(scale)
        unit = np.asarray(estimate.direction, np.float64) / (scale * 1.25)
        np.testing.assert_allclose(unit, direction, rtol=1e-5)
        np.testing.assert_allclose(float(estimate.scale) * 1.25**2, 15 / 4, rtol=1e-5)
    nothing = fisher.rank_one(lambda p, a: a * jnp.dot(p, direction), jnp.zeros(3), np.array([1.0, -1], np.float32))
    assert (float(nothing.scale), np.asarray(nothing.direction).any()) == (0, False)
    assert float(metrics.rank_one_form(nothing, jnp.ones(3))) == 0


@pytest.mark.parametrize('rank', [1, 3, COUNT])
def test_low_rank_is_the_truncated_svd(gradients, step, rank):
    factors = low_rank(PARAMS, rank)
    stacked = np.concatenate([np.asarray(leaf, np.float64).reshape(rank, -1) for leaf in jax.tree.leaves(factors)], axis=1)
    _, values, rows = np.linalg.svd(gradients / np.sqrt(COUNT), full_matrices=False)
    best = (rows[:rank].T * values[:rank] ** 2) @ rows[:rank]
    np.testing.assert_allclose(stacked.T @ stacked, best, atol=1e-5 * values[0] ** 2)
    np.testing.assert_allclose(metrics.low_rank_form(factors, step[0]), half_form(best, step[1]), rtol=1e-4)
    if rank == COUNT:
        np.testing.assert_allclose(best, gradients.T @ gradients / COUNT, atol=1e-9)


# ---- Kronecker factors


def test_kronecker_of_two_layers_is_a_loop_over_samples(step):
    """Inputs (x, 1) and tanh(W x + b), output gradients W2 (o - y) times tanh' and o - y; the form with dense Kronecker products."""
    weights, bias = (np.asarray(PARAMS['params']['first'][name], np.float64) for name in ('kernel', 'bias'))
    last = np.asarray(PARAMS['params']['last']['kernel'], np.float64)
    sums: dict = {'first': [0, 0], 'last': [0, 0]}
    for x, y in zip(BATCH['x'].astype(np.float64), BATCH['y'].astype(np.float64), strict=True):
        hidden = np.tanh(x @ weights + bias)
        outer = hidden @ last - y
        inner = (last @ outer) * (1 - hidden**2)
        for name, a, g in (('first', np.append(x, 1), inner), ('last', hidden, outer)):
            sums[name][0] += np.outer(a, a) / COUNT
            sums[name][1] += np.outer(g, g) / COUNT
    estimate = jax.jit(lambda params: fisher.kronecker(loss, params, BATCH, microbatch=4))(PARAMS)
    assert set(estimate) == set(sums)
    expected = 0.0
    for name, (inputs, outputs) in sums.items():
        np.testing.assert_allclose(estimate[name].inputs, inputs, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(estimate[name].outputs, outputs, rtol=1e-4, atol=1e-6)
        layer = step[0]['params'][name]
        stacked = np.concatenate([layer['kernel'], layer['bias'][None]]) if name == 'first' else np.asarray(layer['kernel'])
        expected += half_form(np.kron(inputs, outputs), stacked.reshape(-1))
    np.testing.assert_allclose(metrics.kronecker_form(estimate, step[0]), expected, rtol=1e-4)


def test_kronecker_of_one_sample_and_one_layer_is_exact():
    """g a^T is the gradient, so the form is 1/2 (gradient^T step)^2. A network that is one bare layer has the path ''."""
    network = nn.Dense(2)
    params = network.init(jax.random.key(1), jnp.zeros(3))
    sample = jax.tree.map(lambda leaf: leaf[:1], BATCH)

    def one_layer(params, sample):
        return 0.5 * jnp.sum(jnp.square(network.apply(params, sample['x']) - sample['y']))

    estimate = jax.jit(lambda params: fisher.kronecker(one_layer, params, sample))(params)
    gradient = flat(jax.jit(jax.grad(one_layer))(params, jax.tree.map(lambda leaf: leaf[0], sample)))
    direction = jax.tree.map(lambda leaf: jnp.asarray(np.random.default_rng(5).normal(size=leaf.shape), jnp.float32), params)
    np.testing.assert_allclose(metrics.kronecker_form(estimate, direction), 0.5 * np.square(gradient @ flat(direction)), rtol=1e-5)


def test_kronecker_factors_are_kfac_jaxs():
    """`DenseTwoKroneckerFactored` blocks of kfac-jax 0.0.8 in mode 'fisher_empirical', float64, stored: 3 - 2 tanh - 2 with biases.

    It divides the output factors once more by the number of samples, here 4, which belongs to its losses' normalisation.
    """

    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = jnp.tanh(nn.Dense(2)(x))
            return nn.Dense(2)(x)

    params = {
        'Dense_0': {'kernel': jnp.array([[0.5, -0.25], [1.0, 0.75], [-0.5, 0.25]]), 'bias': jnp.array([0.1, -0.2])},
        'Dense_1': {'kernel': jnp.array([[0.8, -0.6], [0.4, 1.2]]), 'bias': jnp.array([0.3, -0.1])},
    }
    batch = (
        jnp.array([[1.0, 0.5, -1.0], [0.0, 2.0, 1.0], [-1.0, -0.5, 0.25], [2.0, 1.0, 0.0]]),
        jnp.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.5], [0.5, -0.5]]),
    )

    def squares(params, sample):
        return 0.5 * jnp.sum(jnp.square(Two().apply(params, sample[0]) - sample[1]))

    estimate = jax.jit(lambda params: fisher.kronecker(squares, params, batch))({'params': params})
    theirs = {
        'Dense_0': (
            [[1.5, 0.75, -0.3125, 0.5], [0.75, 1.375, 0.34375, 0.75], [-0.3125, 0.34375, 0.515625, 0.0625], [0.5, 0.75, 0.0625, 1.0]],
            [[0.00894333599044125, -0.011162030918033663], [-0.011162030918033663, 0.08755988518966187]],
        ),
        'Dense_1': (
            [
                [0.8091362668058578, 0.1998399125969738, 0.5104734519964945],
                [0.1998399125969738, 0.25049226986217565, 0.09827264078449437],
                [0.5104734519964945, 0.09827264078449437, 1.0],
            ],
            [[0.16672554423409372, -0.06378674160880397], [-0.06378674160880397, 0.098938563142762]],
        ),
    }
    for name, (inputs, outputs) in theirs.items():
        np.testing.assert_allclose(estimate[name].inputs, inputs, rtol=1e-5)
        np.testing.assert_allclose(estimate[name].outputs, 4 * np.array(outputs), rtol=1e-4)


# ---- Gauss-Newton


def test_gauss_newton_of_a_linear_model_is_the_hessian():
    """1/2 |W x - y|^2 is quadratic, so the two agree whatever y is; for a bent network they do not."""
    params = {'w': jnp.ones((3, 2)), 'b': jnp.zeros(2)}

    def outputs(params, sample):
        return jnp.matmul(sample['x'], params['w'], precision='highest') + params['b']

    ours = jax.jit(lambda p: fisher.gauss_newton(outputs, p, BATCH, microbatch=4))(params)
    start, unravel = ravel_pytree(params)

    def mean_loss(each):
        return jnp.mean(jax.vmap(lambda sample: 0.5 * jnp.sum(jnp.square(outputs(unravel(each), sample) - sample['y'])))(BATCH))

    np.testing.assert_allclose(ours, jax.jit(jax.hessian(mean_loss))(start), rtol=1e-5, atol=1e-6)


def test_gauss_newton_is_the_fisher_of_a_gaussian():
    """E over targets from the model of g g^T, by many draws: E[J^T e e^T J] = J^T J."""
    ours = np.asarray(jax.jit(lambda p: fisher.gauss_newton(lambda p, s: apply(p, s['x']), p, BATCH))(PARAMS))
    draws = 2000
    x = np.repeat(BATCH['x'], draws, axis=0)
    y = np.asarray(apply(PARAMS, x)) + np.random.default_rng(1).normal(size=(COUNT * draws, 2)).astype(np.float32)
    sampled = jax.jit(lambda batch: fisher.diagonal(loss, PARAMS, batch, microbatch=1000))({'x': x, 'y': y})
    np.testing.assert_allclose(flat(sampled), np.diag(ours), rtol=0.06)


# ---- forms


def test_forms_by_hand():
    """Step (1, 2) with: diagonal (3, 4); 2 (1, 1)(1, 1)^T; rows (1, 0) and (1, 1)."""
    step = {'a': jnp.array([1.0]), 'b': jnp.array([2.0])}
    diagonal = {'a': jnp.array([3.0]), 'b': jnp.array([4.0])}
    np.testing.assert_allclose(metrics.diagonal_form(diagonal, step), 0.5 * (3 + 16))
    one = metrics.RankOne({'a': jnp.ones(1), 'b': jnp.ones(1)}, jnp.float32(2))
    np.testing.assert_allclose(metrics.rank_one_form(one, step), 0.5 * 2 * 9)
    rows = {'a': jnp.array([[1.0], [1.0]]), 'b': jnp.array([[0.0], [1.0]])}
    np.testing.assert_allclose(metrics.low_rank_form(rows, step), 0.5 * (1 + 9))
    layer = {'params': {'up': {'kernel': jnp.array([[1.0, 2.0]]), 'bias': jnp.array([3.0, 4.0])}, 'rest': {'kernel': jnp.ones((5, 5))}}}
    # D = (1 2; 3 4), A = diag(1, 2), G = diag(1, 10): <D, A D G> = 1 + 10 * 4 + 2 * 9 + 20 * 16.
    factors = {'up': metrics.Kronecker(jnp.diag(jnp.array([1.0, 2])), jnp.diag(jnp.array([1.0, 10])))}
    np.testing.assert_allclose(metrics.kronecker_form(factors, layer), 0.5 * 379)
    metric = metrics.quadratic(diagonal)
    np.testing.assert_allclose(metric(step, jax.tree.map(jnp.zeros_like, step)), 9.5)
    assert float(metric(step, step)) == 0


def test_forms_agree_with_the_dense_fisher(gradients, step):
    """Full rank is all of it; the diagonal is its diagonal; one direction and few ranks are less than all."""
    dense = gradients.T @ gradients / COUNT
    all_of_it = float(metrics.low_rank_form(low_rank(PARAMS, COUNT), step[0]))
    np.testing.assert_allclose(all_of_it, half_form(dense, step[1]), rtol=1e-5)
    np.testing.assert_allclose(metrics.diagonal_form(diagonal(PARAMS, 11), step[0]), half_form(np.diag(np.diag(dense)), step[1]), rtol=1e-5)
    assert float(metrics.low_rank_form(low_rank(PARAMS, 3), step[0])) < all_of_it


# ---- refused


def test_bad_input_is_refused():
    for batch, message in (
        ({'x': jnp.zeros((0, 3)), 'y': jnp.zeros((0, 2))}, 'samples above 0'),
        ({'x': jnp.zeros((4, 3)), 'y': jnp.zeros((5, 2))}, 'one common number'),
    ):
        for estimate in (fisher.diagonal, fisher.rank_one, fisher.kronecker):
            with pytest.raises(ValueError, match=message):
                estimate(loss, PARAMS, batch)
        with pytest.raises(ValueError, match=message):
            fisher.gauss_newton(lambda p, s: apply(p, s['x']), PARAMS, batch)
        with pytest.raises(ValueError, match=message):
            fisher.low_rank(loss, PARAMS, batch, rank=1)
    with pytest.raises(ValueError, match='microbatch=0'):
        fisher.diagonal(loss, PARAMS, BATCH, microbatch=0)
    for rank in (0, COUNT + 1):
        with pytest.raises(ValueError, match=f'rank={rank}'):
            fisher.low_rank(loss, PARAMS, BATCH, rank=rank)

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(3, name='same')
            return jnp.square(layer(layer(x))).sum()

    def twice(params, sample) -> Any:
        return Twice().apply(params, sample['x'])

    params = Twice().init(jax.random.key(0), jnp.zeros(3))
    with pytest.raises(ValueError, match='same is called twice'):
        fisher.kronecker(twice, params, BATCH)
