"""Multipliers: hand values, bounds, fixed points, a synthetic plant, and bad measurements."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optimizers import adaptive_penalty, lagrangian, projected_dual_ascent

RATES: dict[str, Any] = {'decay': 0.9, 'clip': 2.0, 'minimum': 0.01, 'maximum': 100.0}


def step(multiplier, measured, radius=1.0, **options):
    ascent = projected_dual_ascent(radius, 0.01, **{**RATES, **options})
    return ascent.update(ascent.init(multiplier), jnp.float32(measured))


def test_linear_dual_by_hand():
    """Measured 10 is cut at 2 * 1; average 0.1 * 2 = 0.2; 1 + 0.01 * (0.2 - 1) = 0.992: it falls although the budget is broken."""
    dual, seen = step(1, 10)
    np.testing.assert_allclose([float(dual.multiplier), float(seen['clipped']), float(seen['average'])], [0.992, 2, 0.2], rtol=1e-6)


def test_bias_correction_sees_the_violation_at_once():
    """0.2 / (1 - 0.9) = 2: 1 + 0.01 * (2 - 1) = 1.01."""
    dual, seen = step(1, 10, bias_correction=True)
    np.testing.assert_allclose([float(dual.multiplier), float(seen['average'])], [1.01, 2], rtol=1e-5)


def test_log_dual_by_hand_and_free_of_scale():
    """exp(0.01 * (0.2 / 1 - 1)) = exp(-0.008), and the same for a budget and measurement 1000 times larger."""
    for scale in (1.0, 1000.0):
        dual, _ = step(1, 10 * scale, scale, space='log')
        np.testing.assert_allclose(float(dual.multiplier), np.exp(-0.008), rtol=1e-6)


def test_projection_at_both_ends():
    low, _ = step(0.012, 0)
    high, _ = step(99.999, 9, decay=0.0)
    np.testing.assert_allclose([float(low.multiplier), float(high.multiplier)], [0.01, 100])


def run(dual, measurements, start=1.0):
    """Multipliers after each measurement."""

    def body(state, measured):
        state, _ = dual.update(state, measured)
        return state, state

    return jax.lax.scan(body, dual.init(start), jnp.asarray(measurements, jnp.float32))[1]


@pytest.mark.parametrize('space', ['linear', 'log'])
def test_always_in_its_interval_and_finite(space):
    rng = np.random.default_rng(0)
    measured = np.concatenate([rng.uniform(0, 50, 500), [np.nan, np.inf, np.nan], np.zeros(20_000)])
    states = run(projected_dual_ascent(1.0, 0.1, **RATES, space=space), measured)
    multipliers = np.asarray(states.multiplier)
    assert multipliers.min() >= 0.01
    assert multipliers.max() <= 100
    assert np.isfinite(np.asarray(states.average)).all()
    np.testing.assert_allclose(multipliers[-1], 0.01, rtol=1e-6)  # and it comes down again
    assert multipliers[500] == multipliers[499]  # NaN is no measurement
    assert int(states.count[-1]) == len(measured) - 2


def test_rises_above_and_falls_below_and_rests_at_the_radius():
    ascent = projected_dual_ascent(0.5, 0.1)
    for measured, sign in ((0.7, 1), (0.3, -1), (0.5, 0)):
        moved = float(ascent.update(ascent.init(2.0), jnp.float32(measured))[0].multiplier) - 2
        assert np.sign(moved) == sign, measured


def test_one_outlier_moves_it_by_the_stated_amount():
    """Average at the radius 1 already; one outlier of any size adds (1 - 0.9) (2 - 1) to it, so 0.01 * 0.1 * 1 to the multiplier."""
    ascent = projected_dual_ascent(1.0, 0.01, **RATES)
    state = ascent.init(1.0)._replace(average=jnp.float32(1))
    for outlier in (3.0, 1e30, np.inf):
        np.testing.assert_allclose(float(ascent.update(state, jnp.float32(outlier))[0].multiplier) - 1, 0.001, rtol=1e-3)


@pytest.mark.parametrize('dual', [projected_dual_ascent(0.5, 0.05), projected_dual_ascent(0.5, 0.05, decay=0.9, space='log', minimum=1e-3)])
def test_plant_reaches_the_radius(dual):
    """measured = 2 / multiplier is at the radius 0.5 for a multiplier of 4."""

    def body(state, _):
        measured = 2 / jnp.maximum(state.multiplier, 1e-3)
        return dual.update(state, measured)[0], measured

    state, measured = jax.lax.scan(body, dual.init(1.0), None, 3000)
    np.testing.assert_allclose([float(state.multiplier), float(measured[-1])], [4, 0.5], rtol=1e-3)


def test_adaptive_penalty_by_hand():
    """radius 1: above 1.5 it doubles, below 2/3 it halves, between it stays."""
    penalty = adaptive_penalty(1.0)
    for measured, expected in ((1.6, 6), (1.4, 3), (0.7, 3), (0.6, 1.5), (np.inf, 6), (np.nan, 3)):
        np.testing.assert_allclose(float(penalty.update(penalty.init(3), jnp.float32(measured))[0].multiplier), expected)


def test_lagrangian_sends_no_gradient_into_the_multiplier():
    ascent = projected_dual_ascent(1.0, 0.1)
    value, slopes = jax.value_and_grad(lambda m, d: lagrangian(ascent.init(m), d), argnums=(0, 1))(jnp.float32(3), jnp.float32(5))
    assert (float(value), float(slopes[0]), float(slopes[1])) == (15, 0, 3)


def test_settings_vmap():
    """A sweep of radii in one program equals one program each."""
    radii = jnp.array([0.5, 1.0, 2.0])
    swept = jax.vmap(lambda radius: run(projected_dual_ascent(radius, 0.1, **RATES), [3.0, 0.1, 1.0]).multiplier)(radii)
    for row, radius in zip(swept, radii, strict=True):
        np.testing.assert_allclose(row, run(projected_dual_ascent(radius, 0.1, **RATES), [3.0, 0.1, 1.0]).multiplier, rtol=1e-6)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match='radius=-1'):
        projected_dual_ascent(-1.0, 0.1)
    with pytest.raises(ValueError, match='radius=nan'):
        adaptive_penalty(float('nan'))
    with pytest.raises(ValueError, match='linear or log'):
        projected_dual_ascent(1.0, 0.1, space='cubic')
