"""Likelihoods of Gaussian actions and the clipped surrogate of PPO."""

import math

import jax.numpy as jnp
from jax import Array


def gaussian_log_prob(mean: Array, log_std: Array, values: Array) -> Array:
    """Log density of each entry under N(mean, std^2), [..., D]; sum over the last axis for that of the vector."""
    return -0.5 * jnp.square((values - mean) * jnp.exp(-log_std)) - log_std - 0.5 * math.log(2 * math.pi)


def clipped_surrogate(log_ratio: Array, advantages: Array, clip: Array | float) -> Array:
    """min(p A, clip(p, 1 - clip, 1 + clip) A) with p = exp(log_ratio), entry by entry; to be maximised.

    Source: Schulman et al. 2017 (PPO), equation 7.
    """
    ratio = jnp.exp(log_ratio)
    return jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip, 1 + clip) * advantages)
