"""The one case with a closed form: base N(m, s^2 I), value Q(a) = c . a, exact fields.

D(t) = (1-t)^2 + t^2 s^2; v_b(x, t) = m + (t s^2 - (1-t)) (x - t m) / D(t); the tilted law is N(m + s^2 c / lambda, s^2 I), so path KL =
end-point KL = s^2 |c|^2 / (2 lambda^2), and a budget eps gives lambda* = s |c| / sqrt(2 eps).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from losses import adjoint_matching as am
from losses.flow_matching import integrate_flow
from optimizers import projected_dual_ascent

MEAN, STD, SLOPE = np.array([0.3, -0.2], np.float32), 0.5, np.array([0.6, -0.8], np.float32)  # m, s, c with |c| = 1
EXACT = STD**2 / 2  # path KL at lambda = 1: 0.125


def base_velocity(actions, times):
    variance = (1 - times) ** 2 + times**2 * STD**2
    mean = jnp.broadcast_to(MEAN, actions.shape)
    return mean + (actions - times * mean) * (times * STD**2 - (1 - times)) / variance


def adjoints(num_steps, adjoint_time):
    """For linear fields the adjoint does not depend on the state: any states will do."""
    gradient = am.action_gradient(lambda actions: jnp.sum(actions * SLOPE[None], axis=-1), jnp.zeros((1, 2)))
    return am.lean_adjoint(base_velocity, jnp.zeros((num_steps, 1, 2)), -gradient, adjoint_time)


def matched(num_steps, adjoint_time, regularisation):
    """Minimiser of the matching loss: v - v_b = -(g^2 / (2 lambda)) a_k, [T, 1, 2]."""
    variance = am.diffusion_squared(am.flow_times(num_steps), 1 / num_steps)[:, None, None]
    return -variance / (2 * regularisation) * adjoints(num_steps, adjoint_time)


def kl(num_steps, adjoint_time, regularisation=1.0):
    shift = matched(num_steps, adjoint_time, regularisation)
    return float(am.path_kl(shift, jnp.zeros_like(shift))[0])


def tuned_velocity(num_steps, adjoint_time, regularisation=1.0):
    shift = matched(num_steps, adjoint_time, regularisation)[:, 0]

    def velocity(actions, times):
        index = jnp.round(times[..., 0] * num_steps).astype(jnp.int32)
        return base_velocity(actions, times) + shift[index]

    return velocity


@pytest.mark.parametrize(('adjoint_time', 'tolerance'), [('published', 0.06), ('transpose', 0.02)])
def test_path_kl_of_the_exact_match(adjoint_time, tolerance):
    for regularisation in (1.0, 2.5):
        assert abs(kl(200, adjoint_time, regularisation) / (EXACT / regularisation**2) - 1) < tolerance


@pytest.mark.parametrize('adjoint_time', ['published', 'transpose'])
def test_mean_shift_within_three_percent(adjoint_time):
    """The flow that acts and the SDE that trains both move the mean by s^2 c / lambda; affine maps move it as they move noise 0."""
    regularisation, zero = 2.5, jnp.zeros((1, 2))
    expected = STD**2 * SLOPE / regularisation
    tuned = tuned_velocity(200, adjoint_time, regularisation)
    flow = integrate_flow(tuned, zero, 200) - integrate_flow(base_velocity, zero, 200)
    sde, base = (am.simulate_path(field, base_velocity, zero, jnp.zeros((199, 1, 2))).final for field in (tuned, base_velocity))
    for shift in (flow, sde - base):
        assert np.linalg.norm(np.asarray(shift)[0] - expected) < 0.03 * np.linalg.norm(expected)
    for mean in (integrate_flow(base_velocity, zero, 200), base):
        np.testing.assert_allclose(np.asarray(mean)[0], MEAN, rtol=0.02)


@pytest.mark.parametrize('adjoint_time', ['published', 'transpose'])
def test_error_is_first_order_in_the_step(adjoint_time):
    steps = np.array([50, 100, 200, 400])
    errors = [abs(kl(int(n), adjoint_time) - EXACT) for n in steps]
    order = -np.polyfit(np.log(steps), np.log(errors), 1)[0]
    assert 0.8 < order < 1.2


def test_known_values_at_small_t():
    """T = 10, s = 0.5: 0.183 for the published adjoint, 0.106 for its transpose (an independent numpy recursion)."""
    assert abs(kl(10, 'published') - 0.1825) < 1e-3
    assert abs(kl(10, 'transpose') - 0.1056) < 1e-3


def test_matching_loss_is_minimal_at_the_closed_form():
    num_steps, regularisation = 20, 0.7
    base = jnp.zeros((num_steps, 1, 2))
    adjoint = adjoints(num_steps, 'published')

    def loss(shift):
        return am.matching_loss(shift, base, adjoint, regularisation)

    minimiser = matched(num_steps, 'published', regularisation)
    assert float(loss(minimiser)) < 1e-9 < 1e-3 < float(loss(1.1 * minimiser))
    np.testing.assert_allclose(np.asarray(jax.grad(loss)(minimiser)), 0, atol=1e-4)


def test_lambda_of_trqam_is_the_inverse_temperature_of_qam():
    """L_TRQAM(lambda) = lambda * L_QAM(inverse temperature 1 / lambda), term by term."""
    keys = jax.random.split(jax.random.key(0), 3)
    tuned, base, adjoint = (jax.random.normal(key, (10, 7, 3)) for key in keys)
    for regularisation in (0.03, 0.5, 3.0, 30.0):
        trqam = am.matching_loss(tuned, base, adjoint, regularisation)
        qam = am.matching_loss(tuned, base, adjoint / regularisation)
        np.testing.assert_allclose(float(trqam), regularisation * float(qam), rtol=2e-6)


def test_least_squares_on_paths_finds_the_closed_form():
    """A field v_b + b_k, linear in its parameters b [T, 2]: the quadratic matching loss on simulated paths is solved by one Newton step,
    and the minimiser, found without the formula, has the path KL that the formula promises."""
    num_steps, regularisation, rows = 20, 0.7, 16
    keys = jax.random.split(jax.random.key(4), 2)
    noises = jax.random.normal(keys[0], (rows, 2)), jax.random.normal(keys[1], (num_steps - 1, rows, 2))
    path = am.simulate_path(base_velocity, base_velocity, *noises)
    terminal = jnp.broadcast_to(-SLOPE, (rows, 2))
    adjoint = am.lean_adjoint(base_velocity, path.states, terminal, 'published')
    times = jnp.broadcast_to(am.flow_times(num_steps)[:, None, None], (num_steps, rows, 1))
    base = base_velocity(path.states, times)

    def loss(shift):
        return am.matching_loss(base + shift[:, None], base, adjoint, regularisation)

    start = jnp.zeros((num_steps, 2))
    size = start.size
    hessian = jax.hessian(loss)(start).reshape(size, size)
    found = start - jnp.linalg.solve(hessian, jax.grad(loss)(start).reshape(size)).reshape(start.shape)
    np.testing.assert_allclose(np.asarray(found), np.asarray(matched(num_steps, 'published', regularisation))[:, 0], rtol=1e-3, atol=1e-5)
    measured = am.path_kl(base + found[:, None], base)
    np.testing.assert_allclose(np.asarray(measured), kl(num_steps, 'published', regularisation), rtol=1e-3)


def test_clone_has_zero_kl():
    velocities = jax.random.normal(jax.random.key(0), (10, 4, 2))
    assert (np.asarray(am.path_kl(velocities, velocities)) == 0).all()


def test_energy_law():
    """KL(lambda) = C / (2 lambda^2) for the exact match."""
    energy = float(am.adjoint_energy(adjoints(30, 'published')))
    for regularisation in (0.5, 2.0):
        np.testing.assert_allclose(kl(30, 'published', regularisation), energy / (2 * regularisation**2), rtol=1e-5)


def test_outside_the_box_nothing_is_pulled():
    actions = jnp.array([[0.5, 1.5], [-2.0, -0.2]])
    gradient = np.asarray(am.action_gradient(lambda a: jnp.sum(3 * a, axis=-1), actions))
    np.testing.assert_array_equal(gradient, [[3, 0], [0, 3]])
    adjoint = am.lean_adjoint(lambda a, t: -a, jnp.zeros((5, 2, 2)), -jnp.asarray(gradient))
    assert (np.asarray(adjoint)[:, [0, 1], [1, 0]] == 0).all()
    assert (np.asarray(adjoint)[:, [0, 1], [0, 1]] != 0).all()


@pytest.mark.parametrize('space', ['linear', 'log'])
def test_dual_loop_finds_the_budget(space):
    budget, num_steps = jnp.float32(0.5), 200
    adjoint = adjoints(num_steps, 'published')
    variance = am.diffusion_squared(am.flow_times(num_steps), 1 / num_steps)[:, None, None]
    ascent = projected_dual_ascent(budget, 0.01, decay=0.9, clip=2.0, minimum=0.001, maximum=100.0, space=space)

    def body(dual, _):
        shift = -variance / (2 * dual.multiplier) * adjoint  # the match for the present lambda
        measured = am.path_kl(shift, jnp.zeros_like(shift))[0]
        return ascent.update(dual, measured)[0], measured

    dual, measured = jax.lax.scan(body, ascent.init(1), None, 5000)
    assert abs(float(measured[-1]) / budget - 1) < 0.05
    assert abs(float(dual.multiplier) / (STD / np.sqrt(2 * budget)) - 1) < 0.05


def test_simulated_path_has_the_law_of_the_base():
    """Memoryless SDE with v = v_b at T = 100: end point N(m, s^2) within Monte Carlo error and the bias of the step."""
    rows, num_steps = 20_000, 100
    first, rest = jax.random.split(jax.random.key(1))
    path = am.simulate_path(
        base_velocity, base_velocity, jax.random.normal(first, (rows, 2)), jax.random.normal(rest, (num_steps - 1, rows, 2))
    )
    assert path.states.shape == (num_steps, rows, 2)
    final = np.asarray(path.final)
    np.testing.assert_allclose(final.mean(0), MEAN, atol=4 * STD / np.sqrt(rows) + 0.005)  # Monte Carlo + 1.5% from the steps
    np.testing.assert_allclose(final.std(0) / STD, 1, atol=0.03)  # 1.2% from the steps, 0.5% Monte Carlo


def test_transpose_adjoint_is_the_transpose_of_the_simulation():
    """d(cost of x_T)/d x_k by automatic differentiation of the noiseless simulation equals the transpose adjoint, for a nonlinear field."""
    num_steps, weights = 6, jnp.array([0.3, -1.2])
    step_size = 1 / num_steps

    def field(actions, times):
        return jnp.sin(2 * actions[..., ::-1]) * (1 + times)

    noises = jax.random.normal(jax.random.key(2), (num_steps - 1, 3, 2))
    path = am.simulate_path(field, field, jax.random.normal(jax.random.key(3), (3, 2)), noises)

    def cost(state, k):
        for index in range(k, num_steps):
            times = jnp.full((3, 1), index / num_steps)
            if index < num_steps - 1:
                variance = am.diffusion_squared(jnp.float32(index / num_steps), step_size)
                drift = 2 * field(state, times) - state / (index / num_steps + step_size)
                state = state + step_size * drift + jnp.sqrt(step_size * variance) * noises[index]
            else:
                state = state + step_size * field(state, times)
        return jnp.sum(state * weights[None])

    expected = jnp.stack([jax.grad(cost)(path.states[k], k) for k in range(num_steps)])
    terminal = jnp.broadcast_to(weights[None], (3, 2))
    np.testing.assert_allclose(
        np.asarray(am.lean_adjoint(field, path.states, terminal, 'transpose')), np.asarray(expected), rtol=1e-4, atol=1e-5
    )
