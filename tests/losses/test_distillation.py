"""Rewards and returns of distillation by hand, and the bounds that the mixture comes with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from losses.distances import gaussian_kl
from losses.distillation import distillation_kl, distillation_returns, mixture_reward, mixture_weight
from losses.policy_gradient import clipped_surrogate, gaussian_log_prob


def test_mixture_reward_by_hand():
    """w = 0.2: ratio 1 -> log 1 = 0; ratio 6 -> log(1.2 + 0.8) = log 2; ratio 0 -> log 0.8; w = 1 -> the log ratio."""
    np.testing.assert_allclose(mixture_reward(jnp.log(jnp.array([1.0, 6.0, 1e-30])), 0.2), np.log([1, 2, 0.8]), atol=1e-6)
    ratios = jnp.array([-1e4, -3.0, 0.0, 2.0, 1e4])
    np.testing.assert_array_equal(mixture_reward(ratios, 1.0), ratios)
    small = np.asarray(mixture_reward(ratios, 0.1))
    assert np.isfinite(small).all()
    assert (np.diff(small) >= 0).all()
    np.testing.assert_allclose(small[0], np.log(0.9), rtol=1e-6)


def discrete_pairs(count=200, size=5):
    random = np.random.default_rng(0)
    return random.dirichlet(np.full(size, 0.3), (2, count)) + 1e-12


@pytest.mark.parametrize('weight', [0.1, 0.5, 0.9])
def test_what_the_mixture_guarantees(weight):
    """KL(old || mixture) <= min(-log(1 - w), w KL(old || teacher)); E[r^2] <= TV (log^2(1 - w) + 0.64761 w)."""
    teacher, old = discrete_pairs()
    reward = np.log(weight * teacher / old + 1 - weight)
    np.testing.assert_allclose(mixture_reward(jnp.asarray(np.log(teacher / old)), weight), reward, rtol=1e-4, atol=1e-5)
    kl = -(old * reward).sum(1)
    assert (kl <= np.minimum(-np.log(1 - weight), weight * (old * np.log(old / teacher)).sum(1)) + 1e-12).all()
    variation = 0.5 * np.abs(teacher - old).sum(1)
    assert ((old * reward**2).sum(1) <= variation * (np.log(1 - weight) ** 2 + 0.64761 * weight) + 1e-12).all()


def test_weight_of_a_radius():
    np.testing.assert_allclose(-np.log(1 - mixture_weight(0.3)), 0.3, rtol=1e-6)


REWARDS, ENDS = jnp.array([[1.0, 2.0, 3.0, 4.0, 6.0]]), jnp.array([[0.0, 1.0, 0.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ('credit', 'expected'),
    [
        ('immediate', [1, 2, 3, 4, 6]),
        ('discounted', [1 + 0.5 * 2, 2, 3 + 0.5 * (4 + 0.5 * 6), 4 + 0.5 * 6, 6]),
        ('mean_future', [1 + 2, 2, 3 + (4 + 6) / 2, 4 + 6, 6]),
    ],
)
def test_returns_by_hand(credit, expected):
    """Two episodes: rewards 1, 2 and 3, 4, 6."""
    np.testing.assert_allclose(distillation_returns(REWARDS, ENDS, credit, 0.5)[0], expected)
    entries = distillation_returns(jnp.stack([REWARDS, 2 * REWARDS], -1), ENDS, credit, 0.5)
    np.testing.assert_allclose(entries[0, :, 1], 2 * np.asarray(expected))
    with pytest.raises(ValueError, match='must be one of immediate'):
        distillation_returns(REWARDS, ENDS, 'all')


@pytest.mark.parametrize(('credit', 'advantage_of_dying'), [('immediate', 0), ('mean_future', 1), ('discounted', 19)])
def test_die_now(credit, advantage_of_dying):
    """Each step costs 1; one episode ends at once, the other after 20 steps. Summed credit prefers to end by the 19 steps saved."""
    rewards = -jnp.ones((2, 20))
    ends = jnp.zeros((2, 20)).at[0, 0].set(1).at[1, 19].set(1)
    returns = distillation_returns(rewards, ends, credit, 1.0)
    np.testing.assert_allclose(returns[0, 0] - returns[1, 0], advantage_of_dying, atol=1e-5)


def test_gaussian_log_prob_is_scipy():
    mean, log_std, values = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    np.testing.assert_allclose(gaussian_log_prob(mean, log_std, values), stats.norm.logpdf(values, mean, np.exp(log_std)), rtol=1e-5)


def test_clipped_surrogate_by_hand():
    """p = 1.5 and 0.5, A = 1 and -1, clip 0.2: the smaller of p A and the clipped one."""
    ratios, advantages = jnp.log(jnp.array([1.5, 1.5, 0.5, 0.5])), jnp.array([1.0, -1.0, 1.0, -1.0])
    np.testing.assert_allclose(clipped_surrogate(ratios, advantages, 0.2), [1.2, -1.5, 0.5, -0.8], rtol=1e-6)


def test_directions_and_no_gradient_into_the_target():
    student, target = (jnp.array([0.0]), jnp.array([0.0])), (jnp.array([1.0]), jnp.array([0.5]))
    np.testing.assert_allclose(distillation_kl(student, target, 'reverse'), gaussian_kl(*student, *target))
    np.testing.assert_allclose(distillation_kl(student, target, 'forward'), gaussian_kl(*target, *student))
    for direction in ('reverse', 'forward'):
        gradients = jax.grad(lambda s, t, d=direction: distillation_kl(s, t, d), argnums=(0, 1))(student, target)
        assert all(float(leaf[0]) != 0 for leaf in gradients[0])
        assert all(float(leaf[0]) == 0 for leaf in gradients[1])
    with pytest.raises(ValueError, match='reverse or forward'):
        distillation_kl(student, target, 'sideways')
