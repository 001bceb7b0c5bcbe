"""Metrics of trust regions: `metric(x, anchor) -> [...]`, >= 0 and zero at the anchor. The formulas are in `losses/distances.py`.

`x` and `anchor` are pytrees of the same structure: (mean, log_std), (mean, covariance), logits, a covariance, or parameters. A metric keeps
the batch dimensions that lead and sums over the event dimensions that come last.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from losses import distances
from optimizers import trees

Metric = Callable[[Any, Any], Array]
Gaussian = tuple[Array, Array]


class RankOne(NamedTuple):
    """F = scale * direction direction^T."""

    direction: Any  # tree like the parameters
    scale: Array  # []


class Kronecker(NamedTuple):
    """F of one dense layer = inputs (x) outputs."""

    inputs: Array  # [in + 1, in + 1] with bias, [in, in] without
    outputs: Array  # [out, out]


def gaussian_kl(x: Gaussian, anchor: Gaussian) -> Array:
    """KL(x || anchor) of diagonal Gaussians (mean [..., D], log_std [..., D])."""
    return distances.gaussian_kl(*x, *anchor)


def full_gaussian_kl(x: Gaussian, anchor: Gaussian) -> Array:
    """KL(x || anchor) of Gaussians (mean [..., D], covariance [..., D, D])."""
    return distances.full_gaussian_kl(*x, *anchor)


def categorical_kl(x: Array, anchor: Array) -> Array:
    """KL(x || anchor) of categorical distributions given as logits [..., K]."""
    return distances.categorical_kl(x, anchor)


def reverse(metric: Metric) -> Metric:
    """The same metric with its arguments exchanged: KL(anchor || x) for a KL."""
    return lambda x, anchor: metric(anchor, x)


def quadratic(precision: Any, form: Callable[[Any, Any], Array] | None = None) -> Metric:
    """1/2 (x - anchor)^T F (x - anchor) over whole parameter trees, in float32, [].

    Args:
      precision: what `form` takes for F: one of the estimates of `optimizers/fisher.py`.
      form: (precision, step) -> [], one of the forms below; None: `diagonal_form`.
    """

    def metric(x: Any, anchor: Any) -> Array:
        return (form or diagonal_form)(precision, displacement(x, anchor))

    return metric


def displacement(x: Any, anchor: Any) -> Any:
    """x - anchor in float32, leaf by leaf."""
    return jax.tree.map(lambda a, b: a.astype(jnp.float32) - b.astype(jnp.float32), x, anchor)


def diagonal_form(precision: Any, step: Any) -> Array:
    """1/2 sum_i p_i d_i^2 for a step d and p >= 0, a tree like it."""
    return 0.5 * trees.inner(jax.tree.map(lambda p, d: p * d, precision, step), step)


def rank_one_form(precision: RankOne, step: Any) -> Array:
    """1/2 c (mu^T d)^2."""
    return 0.5 * precision.scale * jnp.square(trees.inner(precision.direction, step))


def low_rank_form(factors: Any, step: Any) -> Array:
    """1/2 sum_r (u_r^T d)^2 for factors u, a tree like d with leaves [R, ...]."""
    return 0.5 * jnp.sum(jnp.square(jax.vmap(lambda factor: trees.inner(factor, step))(factors)))


def kronecker_form(factors: dict[str, Kronecker], step: Any) -> Array:
    """1/2 sum over layers of <D, A D G>, where D [in + 1, out] stacks the steps of a kernel and of its bias.

    Args:
      factors: {'/'.join(path of the layer): its two factors}; the path of a network that is one layer is ''.
      step: tree of a Flax network, {'params': {...: {'kernel', 'bias'}}}; layers without factors do not count.
    """
    total = jnp.zeros((), jnp.float32)
    for name, (inputs, outputs) in factors.items():
        layer = functools.reduce(lambda tree, key: tree[key], name.split('/') if name else (), step['params'])
        stacked = jnp.concatenate([layer['kernel'], layer['bias'][None]]) if 'bias' in layer else layer['kernel']
        product = jnp.matmul(jnp.matmul(inputs, stacked, precision='highest'), outputs, precision='highest')
        total = total + 0.5 * trees.inner(product, stacked)
    return total
