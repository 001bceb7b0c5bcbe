"""Distances between distributions, denoising paths and covariances, each zero when its two arguments are equal.

Batch dimensions lead, event dimensions come last and are summed over. `optimizers/metrics.py` gives them the shape that trust regions use.
Products of covariances run at the highest precision, since a distance is a small difference of large numbers.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array


def _product(left: Array, right: Array) -> Array:
    return jnp.matmul(left, right, precision='highest')


def _excess(exponent: Array) -> Array:
    """exp(u) - 1 - u >= 0. By its series near 0, where the difference would keep few digits or none."""
    near = jnp.abs(exponent) < 0.1
    small = jnp.where(near, exponent, 0)
    series = 1 + small / 9
    for order in range(8, 2, -1):
        series = 1 + small / order * series
    return jnp.where(near, 0.5 * jnp.square(small) * series, jnp.expm1(exponent) - exponent)


def gaussian_kl(mean: Array, log_std: Array, mean0: Array, log_std0: Array) -> Array:
    """KL(N(mean, std^2) || N(mean0, std0^2)) of diagonal Gaussians, in nats.

    sum_i log(std0_i / std_i) + (std_i^2 + (mean_i - mean0_i)^2) / (2 std0_i^2) - 1/2

    Args:
      mean, log_std, mean0, log_std0: [..., D].

    Returns:
      [...], >= 0.
    """
    log_ratio = 2 * (log_std - log_std0)
    scaled = (mean - mean0) * jnp.exp(-log_std0)
    return 0.5 * jnp.sum(jnp.square(scaled) + _excess(log_ratio), axis=-1)


def full_gaussian_kl(mean: Array, covariance: Array, mean0: Array, covariance0: Array) -> Array:
    """KL(N(mean, covariance) || N(mean0, covariance0)), in nats, by Cholesky factors.

    Args:
      mean, mean0: [..., D].
      covariance, covariance0: symmetric and positive definite, [..., D, D].

    Returns:
      [...], >= 0; inf where a covariance is not positive definite (a singular Gaussian has no finite KL to a regular one), with gradient 0.
    """
    factors = [jnp.linalg.cholesky(each) for each in (covariance, covariance0)]
    regular = functools.reduce(jnp.logical_and, (jnp.isfinite(factor).all((-2, -1)) for factor in factors))
    identity = jnp.broadcast_to(jnp.eye(covariance.shape[-1], dtype=covariance.dtype), covariance.shape)
    # The factors are computed again from safe inputs: the gradient of a failed Cholesky is NaN even where its value is not used.
    safe = [jnp.where(regular[..., None, None], each, identity) for each in (covariance, covariance0)]
    factor, factor0 = (jnp.linalg.cholesky(each) for each in safe)
    whitened = jax.lax.linalg.triangular_solve(factor0, factor, left_side=True, lower=True)  # factor0^-1 factor
    shift = jax.lax.linalg.triangular_solve(factor0, (mean - mean0)[..., None], left_side=True, lower=True)[..., 0]
    # As in gaussian_kl: w^2 - 1 - 2 log w of the diagonal is exp(u) - 1 - u with u = 2 log w.
    log_ratio = 2 * jnp.log(jnp.diagonal(whitened, axis1=-2, axis2=-1))
    below = jnp.sum(jnp.square(jnp.tril(whitened, -1)), axis=(-2, -1))
    value = 0.5 * (below + jnp.sum(jnp.square(shift) + _excess(log_ratio), axis=-1))
    return jnp.where(regular, value, jnp.inf)


def categorical_kl(logits: Array, logits0: Array) -> Array:
    """KL(softmax(logits) || softmax(logits0)) over the last axis, in nats.

    Args:
      logits, logits0: [..., K]; -inf forbids a class.

    Returns:
      [...], >= 0; inf where a class that is forbidden in logits0 is not in logits.
    """
    log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(logits0)
    possible = log_p > -jnp.inf
    difference = jnp.where(possible, log_p, 0) - jnp.where(possible, log_q, 0)
    # p d + q - p of every class is >= 0 and the q - p add up to 0. Where p is close to q it is p (exp(-d) - 1 + d).
    close = possible & (jnp.abs(difference) < 1)
    small = jnp.where(close, difference, 0)
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    return jnp.sum(jnp.where(close, p * _excess(-small), p * difference + (q - p)), axis=-1)


def path_kl(drift: Array, drift0: Array, diffusion_squared: Array, step_size: Array | float) -> Array:
    """KL between the laws of two Euler-Maruyama paths with the same noise (Girsanov), in nats: sum_k h |b_k - b0_k|^2 / (2 g_k^2).

    Args:
      drift: b_k at states drawn from its own path law, [T, ..., A].
      drift0: b0_k at the same states, [T, ..., A].
      diffusion_squared: g_k^2 > 0, [T].
      step_size: h.

    Returns:
      [...]; its mean over sampled paths is an unbiased estimate.
    """
    squared = jnp.sum(jnp.square(drift - drift0), axis=-1)
    return jnp.tensordot(step_size / (2 * diffusion_squared), squared, axes=1, precision='highest')


def frobenius_squared(covariance: Array, covariance0: Array) -> Array:
    """Squared Frobenius norm of the difference of matrices [..., D, D], as [...]."""
    return jnp.sum(jnp.square(covariance - covariance0), axis=(-2, -1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def bures_wasserstein_squared(covariance: Array, covariance0: Array, numerical_floor: float = 1e-6) -> Array:
    """Squared Bures-Wasserstein distance: tr A + tr B - 2 tr (B^1/2 A B^1/2)^1/2. Symmetric in A and B.

    The gradient is the closed form dW^2/dA = I - B^1/2 (B^1/2 A B^1/2)^-1/2 B^1/2, one minus the optimal map from A to B. Nothing is
    differentiated through an eigendecomposition, which gives NaN at repeated eigenvalues, that is, at A = B. In directions where A has lost
    its rank the exact gradient is infinite; there the eigenvalues of the inverse root are floored, so the pull is strong and finite.

    Args:
      covariance, covariance0: symmetric positive semidefinite, [..., D, D].
      numerical_floor: eigenvalues of B^1/2 A B^1/2 below this times (tr B / D)^2 count as that in the gradient; the value is exact.

    Returns:
      [...], >= 0. Rounding leaves about 1e-6 of tr A + tr B in float32, and 1e-4 where a covariance has almost lost its rank: the distance
      goes as the root of a small eigenvalue.

    Source: Bhatia, Jain and Lim 2019, 'On the Bures-Wasserstein distance between positive definite matrices'.
    """
    # Singular values of A^1/2 B^1/2 instead of roots of eigenvalues: the roots would turn a rounding of 1e-7 into 3e-4.
    cross = jnp.sum(jnp.linalg.svd(_product(_square_root(covariance), _square_root(covariance0)), compute_uv=False), axis=-1)
    return jnp.maximum(_trace(covariance) + _trace(covariance0) - 2 * cross, 0)


def _trace(matrix: Array) -> Array:
    return jnp.trace(matrix, axis1=-2, axis2=-1)


def _square_root(covariance: Array) -> Array:
    eigenvalues, vectors = jnp.linalg.eigh(covariance)
    return _product(vectors * jnp.sqrt(jnp.maximum(eigenvalues, 0))[..., None, :], jnp.swapaxes(vectors, -1, -2))


def _sandwich(outer: Array, inner: Array) -> Array:
    return _product(_product(outer, inner), outer)


def _optimal_map(covariance: Array, covariance0: Array, numerical_floor: float) -> Array:
    """T with T A T = B for A = covariance, B = covariance0: B^1/2 (B^1/2 A B^1/2)^-1/2 B^1/2, eigenvalues floored."""
    root0 = _square_root(covariance0)
    eigenvalues, vectors = jnp.linalg.eigh(_sandwich(root0, covariance))
    floor = numerical_floor * jnp.square(_trace(covariance0) / covariance0.shape[-1])
    inverse_root = 1 / jnp.sqrt(jnp.maximum(eigenvalues, jnp.maximum(floor, jnp.finfo(covariance.dtype).tiny)[..., None]))
    half = _product(root0, vectors)
    return _product(half * inverse_root[..., None, :], jnp.swapaxes(half, -1, -2))


def _bures_forward(covariance, covariance0, numerical_floor):
    return bures_wasserstein_squared(covariance, covariance0, numerical_floor), (covariance, covariance0)


def _bures_backward(numerical_floor, saved, cotangent):
    covariance, covariance0 = saved
    identity = jnp.broadcast_to(jnp.eye(covariance.shape[-1], dtype=covariance.dtype), covariance.shape)
    scale = cotangent[..., None, None]
    forward = scale * (identity - _optimal_map(covariance, covariance0, numerical_floor))
    backward = scale * (identity - _optimal_map(covariance0, covariance, numerical_floor))
    return forward, backward


bures_wasserstein_squared.defvjp(_bures_forward, _bures_backward)
