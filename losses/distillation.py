"""On-policy distillation: rewards, credit and proximal teachers.

Source: TOP-D (2607.04751), sections 3 and 4, from public descriptions. On a state s with an action u drawn from the student's snapshot
pi_old: log ratio l = log pi_T(u|s) - log pi_old(u|s).
"""

import jax
import jax.numpy as jnp
from jax import Array

from losses.distances import gaussian_kl

CREDITS = ('immediate', 'mean_future', 'discounted')


def mean_of_valid(values: Array, valid: Array) -> Array:
    """Mean of `values` over the rows where `valid` is 1, both [...]; 0 if there is none."""
    return jnp.sum(valid * values) / jnp.maximum(jnp.sum(valid), 1)


def mixture_reward(log_ratio: Array, teacher_weight: Array | float) -> Array:
    """log((w pi_T + (1 - w) pi_old) / pi_old) = log(w exp(l) + 1 - w): the reward of distilling towards a mixture of the two.

    Bounded below by log(1 - w); w = 1 is the log ratio itself, which is not. The mixture is never built.

    Args:
      log_ratio: l, any shape. Of single action entries, each entry is treated as a token of its own (ours, for diagonal Gaussians).
      teacher_weight: w in (0, 1].
    """
    return jnp.logaddexp(log_ratio + jnp.log(teacher_weight), jnp.log1p(-jnp.asarray(teacher_weight, log_ratio.dtype)))


def mixture_weight(kl_budget: Array | float) -> Array:
    """w = 1 - exp(-kl_budget): then KL(pi_old || mixture) <= -log(1 - w) = kl_budget in every state (our derivation)."""
    return -jnp.expm1(-jnp.asarray(kl_budget, jnp.float32))


def distillation_returns(rewards: Array, ends: Array, credit: str, discount: Array | float = 1.0) -> Array:
    """Rewards with those of the future, along axis 1; nothing crosses the end of an episode.

    'immediate': r_k. 'discounted': r_k + discount * return_{k+1}.
    'mean_future' (TOP-D, equation 8): r_k + mean of r_j over j > k in the episode, without it at the last step.

    The rewards of distillation are negative on average, so 'discounted' pays for ending an episode early, the more the longer it would be;
    'mean_future' pays at most the mean of one reward for it, 'immediate' nothing.

    Args:
      rewards: [E, T, ...].
      ends: 1 where an episode ended (either way), [E, T]. The last column is where the record stops, not an end.
      credit: one of `CREDITS`.
      discount: of 'discounted', in [0, 1].

    Raises:
      ValueError: an unknown credit.
    """
    if credit not in CREDITS:
        raise ValueError(f'credit={credit!r} must be one of {", ".join(CREDITS)}')
    if credit == 'immediate':
        return rewards
    running = jnp.broadcast_to((1 - ends).reshape(ends.shape + (1,) * (rewards.ndim - 2)), rewards.shape)
    zeros = jnp.zeros_like(rewards[:, 0])

    def discounted(following: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        reward, continues = inputs
        value = reward + discount * continues * following
        return value, value

    def mean_future(future: tuple[Array, Array], inputs: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        reward, continues = inputs
        total, count = future[0] * continues, future[1] * continues
        return (total + reward, count + 1), reward + total / jnp.maximum(count, 1)

    over_time = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), (rewards, running))
    if credit == 'discounted':
        _, returns = jax.lax.scan(discounted, zeros, over_time, reverse=True)
    else:
        _, returns = jax.lax.scan(mean_future, (zeros, zeros), over_time, reverse=True)
    return jnp.moveaxis(returns, 0, 1)


def distillation_kl(student: tuple[Array, Array], target: tuple[Array, Array], direction: str) -> Array:
    """'reverse': KL(student || target); 'forward': KL(target || student). Diagonal Gaussians (mean, log_std) [..., D] -> [...].

    No gradient flows into the target. The expectation over actions is exact, so nothing of it is noise.

    Raises:
      ValueError: an unknown direction.
    """
    target = jax.lax.stop_gradient(target)
    if direction == 'reverse':
        return gaussian_kl(*student, *target)
    if direction == 'forward':
        return gaussian_kl(*target, *student)
    raise ValueError(f'direction={direction!r} must be reverse or forward')
