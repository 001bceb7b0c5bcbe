"""What the spectrum of a covariance says about collapse."""

import jax.numpy as jnp
from jax import Array


def effective_rank(covariance: Array) -> Array:
    """exp of the entropy of the normalised eigenvalues (Roy and Vetterli 2007, on the covariance): [..., D, D] -> [...], in [1, D].

    Negative eigenvalues, which rounding makes, count as 0; a covariance of zeros has effective rank 1.
    """
    eigenvalues = jnp.maximum(jnp.linalg.eigvalsh(covariance), 0)
    total = jnp.sum(eigenvalues, axis=-1, keepdims=True)
    shares = eigenvalues / jnp.where(total > 0, total, 1)
    return jnp.exp(-jnp.sum(shares * jnp.log(jnp.where(shares > 0, shares, 1)), axis=-1))
