"""Targets and errors of state-action values, for single steps and for action chunks."""

import jax.numpy as jnp
from jax import Array


def chunk_return(rewards: Array, masks: Array, valid: Array, discount: Array, count_after_terminal: bool = False) -> tuple[Array, Array]:
    """Discounted return inside a chunk, and whether to bootstrap behind it.

    R = sum_i discount^i r_i over the steps before and including the first true terminal; m = product of masks.

    Args:
      rewards: [B, H]. masks: [B, H], 0 at a true terminal. valid: [B, H], 0 behind the end of the episode.
      discount: per control step, [].
      count_after_terminal: also count the rewards that the data holds behind a true terminal, as the public QAM code does (its data go on
        after success).

    Returns:
      (R [B], m [B]).
    """
    steps = jnp.arange(rewards.shape[-1], dtype=rewards.dtype)
    masks = jnp.where(valid > 0, masks, 1.0)
    survived = jnp.cumprod(masks, axis=-1)
    counted = valid
    if not count_after_terminal:
        counted = valid * jnp.concatenate([jnp.ones_like(survived[..., :1]), survived[..., :-1]], axis=-1)
    return jnp.sum(jnp.power(discount, steps)[None] * counted * rewards, axis=-1), survived[..., -1]


def pessimistic_value(values: Array, pessimism: Array) -> Array:
    """mean_j Q_j - pessimism * std_j Q_j over an ensemble [K, ...] -> [...]; population standard deviation. No gradient at std 0."""
    return jnp.mean(values, axis=0) - pessimism * jnp.std(values, axis=0)


def ensemble_loss(values: Array, targets: Array, valid: Array) -> Array:
    """mean_{j, b} valid_b (Q_j - y)_b^2 for values [K, B], targets [B], valid [B]. Divides by K * B, not by the number of valid rows."""
    return jnp.mean(valid[None] * jnp.square(values - targets[None]))
