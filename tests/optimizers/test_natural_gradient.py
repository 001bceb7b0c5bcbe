"""Conjugate gradients against dense solves; natural gradient steps against closed forms, on a policy, and with bad input."""

import functools
from typing import Any

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse.linalg
from hypothesis import strategies
from jax.flatten_util import ravel_pytree

from losses import distances
from optimizers import conjugate_gradient, natural_gradient


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def positive_definite(seed, size, condition=100.0):
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(size, size)))[0]
    return (basis * np.geomspace(1, condition, size)) @ basis.T, rng.normal(size=size)


@functools.partial(jax.jit, static_argnums=(2, 3))
def solve(matrix, b, num_steps=10, tolerance=1e-10):
    return conjugate_gradient(lambda vector: jnp.matmul(matrix, vector, precision='highest'), b, num_steps=num_steps, tolerance=tolerance)


# ---- conjugate gradients


@pytest.mark.parametrize('size', [1, 2, 7, 20])
def test_n_steps_are_the_dense_solution(float64, size):
    for seed in range(3):
        matrix, b = positive_definite(seed, size, condition=5)
        x, residual = solve(matrix, b, size, 0.0)
        np.testing.assert_allclose(x, np.linalg.solve(matrix, b), rtol=1e-7, atol=1e-9)
        assert residual < 1e-7


def test_iterates_are_scipys(float64):
    """Step by step on an ill-conditioned system, whose n steps no longer suffice."""
    matrix, b = positive_definite(0, 20)
    for steps in (1, 5, 10, 16):
        expected, _ = scipy.sparse.linalg.cg(matrix, b, rtol=0, maxiter=steps)
        np.testing.assert_allclose(solve(matrix, b, steps, 0.0)[0], expected, atol=1e-5)


def test_trees_are_solved_like_their_concatenation(float64):
    matrix, b = positive_definite(3, 7)

    def pack(tree):
        return jnp.concatenate([tree['a'].ravel(), tree['b']])

    def unpack(vector):
        return {'a': vector[:4].reshape(2, 2), 'b': vector[4:], 'none': None}

    x, residual = conjugate_gradient(lambda tree: unpack(matrix @ pack(tree)), unpack(b), num_steps=7, tolerance=0.0)
    np.testing.assert_allclose(pack(x), np.linalg.solve(matrix, b), rtol=1e-7)
    assert x['none'] is None
    assert residual < 1e-7


@hypothesis.settings(max_examples=15)
@hypothesis.given(strategies.integers(0, 10_000))
def test_error_in_the_norm_of_the_matrix_never_grows(seed):
    """And the residual reported is the true one, in float32."""
    matrix, b = positive_definite(seed, 8, condition=10)
    exact = np.linalg.solve(matrix, b)
    errors = []
    for steps in (0, 1, 2, 4, 6, 8):
        x, residual = solve(matrix.astype(np.float32), b.astype(np.float32), steps)
        x = np.asarray(x, np.float64)
        errors.append((x - exact) @ matrix @ (x - exact))
        np.testing.assert_allclose(residual, np.linalg.norm(b - matrix @ x) / np.linalg.norm(b), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(errors[0], exact @ matrix @ exact)
    assert (np.diff(errors) <= 1e-6 * errors[0]).all()
    assert errors[-1] < 1e-6 * errors[0]


def test_it_stops_when_it_is_done():
    """Many more steps than needed change nothing and make no NaN; 0 gives 0."""
    matrix, b = (each.astype(np.float32) for each in positive_definite(4, 5))
    once, _ = solve(matrix, b, 10)
    long, residual = solve(matrix, b, 200)
    np.testing.assert_allclose(long, once, rtol=1e-3, atol=1e-5)
    assert residual < 1e-4
    x, residual = solve(matrix, np.zeros(5, np.float32))
    assert not np.asarray(x).any()
    assert residual == 0


def test_singular_and_indefinite_matrices_are_safe():
    """A solution where there is one; where the curvature is not positive it stays; always finite, also for many steps."""
    rng = np.random.default_rng(0)
    factor = rng.normal(size=(8, 3)).astype(np.float32)
    singular = factor @ factor.T
    inside = singular @ rng.normal(size=8).astype(np.float32)
    x, residual = solve(singular, inside)
    np.testing.assert_allclose(singular @ np.asarray(x), inside, rtol=1e-3, atol=1e-3 * np.abs(inside).max())
    assert residual < 1e-3
    for matrix in (singular, np.zeros((8, 8), np.float32), singular - 2 * np.eye(8, dtype=np.float32), -np.eye(8, dtype=np.float32)):
        for b in (inside, rng.normal(size=8).astype(np.float32)):
            for steps in (10, 200):
                assert all(np.isfinite(each).all() for each in solve(matrix, b, steps))
    assert not np.asarray(solve(-np.eye(8, dtype=np.float32), inside)[0]).any()
    # diag(1, 0), b = (1, 1): along b the curvature is 1, so 2 b; the next direction (0, 2) has none.
    x, _ = solve(np.diag([1.0, 0]).astype(np.float32), np.array([1.0, 1], np.float32))
    np.testing.assert_allclose(x, [2, 2], rtol=1e-6)


def test_solving_vmaps():
    systems = [positive_definite(seed, 6) for seed in range(4)]
    matrices, sides = (np.stack(each).astype(np.float32) for each in zip(*systems, strict=True))
    sides[2] = 0
    batched = jax.vmap(lambda matrix, b: solve(matrix, b))(matrices, sides)
    for row in range(4):
        for one, other in zip(solve(matrices[row], sides[row]), batched, strict=True):
            np.testing.assert_allclose(one, other[row], rtol=1e-3, atol=1e-5)


# ---- natural gradient steps


def quadratic(hessian, centre):
    """(1/2 |x - centre|^2, params -> x -> 1/2 d^T H d with d = x - params)."""

    def distance_of(params):
        return lambda x: 0.5 * jnp.dot(x - params, jnp.matmul(hessian, x - params))

    return lambda x: 0.5 * jnp.sum(jnp.square(x - centre)), distance_of


def step(optimizer, params, value_fn, distance_of, state: Any = None) -> Any:
    """(params after one step, updates, state)."""
    state = optimizer.init(params) if state is None else state
    updates, state = optimizer.update(jax.grad(value_fn)(params), state, params, value_fn=value_fn, distance_fn=distance_of(params))
    return optax.apply_updates(params, updates), updates, state


@pytest.mark.parametrize('damping', [0.0, 0.1])
def test_quadratic_in_closed_form(float64, damping):
    """v = -(H + damping I)^-1 g, scaled to 1/2 v^T H v = radius; the value falls, so the step is taken as far as rounding lets it."""
    hessian, centre = positive_definite(0, 6, condition=10)
    value_fn, distance_of = quadratic(hessian, 100 * centre)
    params = jnp.zeros(6)
    direction = -np.linalg.solve(hessian + damping * np.eye(6), -100 * centre)
    expected = direction * np.sqrt(2 * 0.01 / (direction @ hessian @ direction))
    optimizer = natural_gradient(0.01, cg_steps=6, damping=damping, tolerance=0.0)
    _, updates, state = jax.jit(lambda p: step(optimizer, p, value_fn, distance_of))(params)
    assert bool(state.accepted)
    assert float(state.step_fraction) in (1, 0.8)
    np.testing.assert_allclose(updates, float(state.step_fraction) * expected, rtol=1e-6)
    np.testing.assert_allclose(state.distance, 0.01 * float(state.step_fraction) ** 2, rtol=1e-6)
    assert state.residual < 1e-6


def test_it_backs_off_to_the_first_fraction_that_fits():
    """distance d^2 / 2 + 100 d^4, radius 1/2: the full step is 1; of 0.5^k the first with d^2 / 2 + 100 d^4 <= 1/2 is 1/4 (0.42)."""

    def run(value_fn, **options):
        optimizer = natural_gradient(0.5, damping=0.0, decay=0.5, **options)
        _, updates, state = step(optimizer, jnp.zeros(1), value_fn, lambda _: lambda x: jnp.sum(jnp.square(x) / 2 + 100 * x**4))
        return float(updates[0]), state

    moved, state = run(lambda x: -x.sum())
    np.testing.assert_allclose([moved, state.step_fraction, state.distance], [0.25, 0.25, 0.25**2 / 2 + 100 * 0.25**4], rtol=1e-6)
    # The value has to fall too: -x + 5 x^2 does so below 1/5.
    moved, state = run(lambda x: (-x + 5 * jnp.square(x)).sum())
    np.testing.assert_allclose([moved, state.step_fraction], [0.125, 0.125], rtol=1e-6)
    moved, state = run(lambda x: -x.sum(), backtracks=2)
    assert (moved, bool(state.accepted), float(state.step_fraction), float(state.distance)) == (0, False, 0, 0)


@pytest.mark.parametrize('name', ['constant', 'nan value', 'zero gradient', 'nan gradient', 'infinite distance', 'flat distance', 'saddle'])
def test_without_a_good_step_there_is_none(name):
    value_fn, distance_of = quadratic(jnp.eye(3), jnp.ones(3))
    params, grads = jnp.zeros(3), -jnp.ones(3)
    values = {'constant': lambda x: 0 * x.sum(), 'nan value': lambda x: jnp.nan * x.sum()}
    slopes = {'zero gradient': jnp.zeros(3), 'nan gradient': grads.at[1].set(jnp.nan)}
    away = {
        'infinite distance': lambda x: jnp.where(jnp.any(x != 0), jnp.inf, 0) + jnp.sum(jnp.square(x)),
        'flat distance': lambda x: 0 * x.sum(),
        'saddle': lambda x: -jnp.sum(jnp.square(x)),
    }
    optimizer: Any = natural_gradient(0.1)
    updates, state = optimizer.update(
        slopes.get(name, grads),
        optimizer.init(params),
        params,
        value_fn=values.get(name, value_fn),
        distance_fn=away.get(name, distance_of(params)),
    )
    np.testing.assert_array_equal(updates, 0)
    assert (bool(state.accepted), float(state.distance), float(state.step_fraction), int(state.count)) == (False, 0, 0, 1)


# ---- a Gaussian policy on 128 states

STATES = np.random.default_rng(0).normal(size=(128, 3)).astype(np.float32)
TARGETS = np.tanh(STATES @ np.random.default_rng(1).normal(size=(3, 2))).astype(np.float32)


def policy(params):
    """(mean, log std) [128, 2] each: a linear layer and a common log std."""
    mean = jnp.matmul(STATES.astype(params['kernel'].dtype), params['kernel'], precision='highest') + params['bias'][None]
    return mean, jnp.broadcast_to(params['log_std'][None], mean.shape)


def cost(params):
    """Mean over the states of E |a - target|^2."""
    mean, log_std = policy(params)
    return jnp.mean(jnp.sum(jnp.square(mean - TARGETS) + jnp.exp(2 * log_std), axis=-1))


def mean_kl(params):
    before = jax.lax.stop_gradient(policy(params))
    return lambda moved: jnp.mean(distances.gaussian_kl(*policy(moved), *before))


def start(seed):
    rng = np.random.default_rng(seed)
    shapes = {'kernel': (3, 2), 'bias': (2,), 'log_std': (2,)}
    return {name: jnp.asarray(0.3 * rng.normal(size=shape), jnp.zeros(()).dtype) for name, shape in shapes.items()}


TRPO = natural_gradient(0.01)


@jax.jit
def learn(params):
    """Parameters and states after each of 15 steps, and the values and true distances recomputed."""

    def body(carry, _):
        params, state = carry
        moved, updates, state = step(TRPO, params, cost, mean_kl, state)
        return (moved, state), (updates, state, cost(moved), mean_kl(params)(moved))

    return jax.lax.scan(body, (params, TRPO.init(params)), None, 15)[1]


def test_policy_improves_at_every_step_inside_the_region():
    """Accepted: the true mean KL is at most the radius and the cost strictly lower; most of the radius is used."""
    _, states, costs, kls = learn(start(0))
    assert np.asarray(states.accepted).all()
    assert (np.asarray(kls) <= 0.01 * (1 + 1e-5)).all()
    assert np.mean(kls) > 0.006
    np.testing.assert_allclose(states.distance, kls, rtol=1e-4)
    assert (np.diff([float(cost(start(0))), *np.asarray(costs)]) < 0).all()
    assert costs[-1] < 0.7 * cost(start(0))
    np.testing.assert_array_equal(states.count, np.arange(1, 16))


def test_full_step_has_the_radius_in_the_quadratic_model():
    """1/2 s^T H s with the dense Hessian of the mean KL, for the step divided by the fraction that was kept."""
    params = start(1)
    _, updates, state = jax.jit(lambda p: step(TRPO, p, cost, mean_kl))(params)
    flat, unravel = ravel_pytree(params)
    hessian = np.asarray(jax.jit(jax.hessian(lambda each: mean_kl(params)(unravel(each))))(flat), np.float64)
    full = np.asarray(ravel_pytree(updates)[0], np.float64) / float(state.step_fraction)
    np.testing.assert_allclose(0.5 * full @ hessian @ full, 0.01, rtol=1e-4)


def test_policy_does_not_depend_on_the_coordinates(float64):
    """Without damping and with as many steps as parameters: theta = M phi leads to the same policy. Plain gradients lead elsewhere."""
    params = start(2)
    flat, unravel = ravel_pytree(params)
    turn = np.linalg.qr(np.random.default_rng(6).normal(size=(flat.size, flat.size)))[0]
    matrix = jnp.asarray(positive_definite(5, flat.size, condition=5)[0] @ turn)
    optimizer = natural_gradient(0.01, cg_steps=20, damping=0.0, tolerance=0.0)

    def decoded(phi):
        return unravel(matrix @ phi)

    phi = jnp.linalg.solve(matrix, flat)
    direct, _, state = jax.jit(lambda p: step(optimizer, p, cost, mean_kl))(params)

    def kl_of(phi):
        return lambda other: mean_kl(decoded(phi))(decoded(other))

    other, *_ = jax.jit(lambda p: step(optimizer, p, lambda x: cost(decoded(x)), kl_of))(phi)
    assert bool(state.accepted)
    for one, two, before in zip(policy(direct), policy(decoded(other)), policy(params), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-8)
        assert np.abs(one - before).max() > 1e-2


def test_vmapped_seeds_are_a_loop():
    """Also where line searches end at different fractions."""
    together = jax.vmap(learn)(jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(start, range(4))))
    for seed in range(4):
        alone = learn(start(seed))
        for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            np.testing.assert_allclose(one, np.asarray(other)[seed], rtol=1e-2, atol=2e-4)


# ---- an Optax transform


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32', 'float64'])
def test_updates_and_state_keep_their_dtypes(dtype):
    with jax.enable_x64(dtype == 'float64'):
        params = {'w': jnp.ones(3, dtype), 'none': None}
        optimizer = natural_gradient(lambda count: 0.1 / (count + 1))
        state = optimizer.init(params)

        def distance_of(origin):
            return lambda x: jnp.sum((x['w'] - origin['w']) ** 2)

        shapes = jax.eval_shape(lambda p, s: step(optimizer, p, lambda x: jnp.sum(x['w'] ** 2), distance_of, s), params, state)
        chex.assert_trees_all_equal_shapes_and_dtypes(shapes, (params, params, state))


def test_schedules_and_other_arguments():
    """The second radius is a quarter of the first: half the step. Unknown arguments do not matter."""
    optimizer: Any = natural_gradient(lambda count: 0.5 / 4**count, damping=0.0)
    params, state = jnp.zeros(1), optimizer.init(jnp.zeros(1))
    sizes = []
    functions = {'value_fn': lambda x: -x.sum(), 'distance_fn': lambda x: 0.4999 * jnp.sum(jnp.square(x))}
    for _ in range(2):
        updates, state = optimizer.update(-jnp.ones(1), state, params, **functions, other=1)
        sizes.append(float(updates[0]) / float(state.step_fraction))
    np.testing.assert_allclose(sizes, [1.0001, 0.50005], rtol=1e-5)


def test_bad_settings_are_refused():
    for radius in (-1.0, float('nan')):
        with pytest.raises(ValueError, match=f'radius={radius}'):
            natural_gradient(radius)
    with pytest.raises(ValueError, match='damping=-1'):
        natural_gradient(0.1, damping=-1)
    optimizer: Any = natural_gradient(0.1)
    params = jnp.zeros(2)
    functions: dict[str, Any] = {'value_fn': jnp.sum, 'distance_fn': jnp.sum}
    for missing in functions:
        with pytest.raises(ValueError, match='needs update'):
            optimizer.update(params, optimizer.init(params), params, **{name: f for name, f in functions.items() if name != missing})
    with pytest.raises(ValueError, match='needs update'):
        optimizer.update(params, optimizer.init(params), **functions)
