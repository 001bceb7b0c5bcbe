"""Curves from an anchor to a point: `curve(anchor, x, fraction)` is the anchor at 0 and x at 1, and the metric grows along it.

`fraction` [...] has the batch dimensions of the metric; leaves may have event dimensions behind them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from optimizers import trees

Curve = Callable[[Any, Any, Array], Any]


def linear(anchor: Any, x: Any, fraction: Array) -> Any:
    """anchor + fraction (x - anchor), leaf by leaf."""
    return jax.tree.map(lambda a, b: a + trees.expand(fraction, a) * (b - a), anchor, x)


def gaussian_geodesic(anchor: tuple[Array, Array], x: tuple[Array, Array], fraction: Array) -> tuple[Array, Array]:
    """Normalised x^fraction anchor^(1 - fraction) of diagonal Gaussians (mean, log_std): straight in their natural parameters.

    precision = f / std_x^2 + (1 - f) / std_a^2; the mean is the average weighted by these precisions. It is the argmin of KL(q || x) under
    a bound on KL(q || anchor).
    """
    (mean0, log_std0), (mean1, log_std1) = anchor, x
    share = trees.expand(fraction, mean0)
    log_ratio = 2 * (log_std0 - log_std1)  # of the precisions, x over anchor
    shift = jnp.maximum(log_ratio, 0)  # the larger precision is scaled to 1, so that nothing overflows
    from_x, from_anchor = share * jnp.exp(log_ratio - shift), (1 - share) * jnp.exp(-shift)
    total = from_x + from_anchor
    mean = mean0 + (from_x / total) * (mean1 - mean0)
    return mean, log_std0 - 0.5 * (shift + jnp.log(total))


def categorical_geodesic(anchor: Array, x: Array, fraction: Array) -> Array:
    """Normalised x^fraction anchor^(1 - fraction) of categorical distributions, as log probabilities [..., K]."""
    log_anchor, log_x = jax.nn.log_softmax(anchor), jax.nn.log_softmax(x)
    share = trees.expand(fraction, log_x)
    return jax.nn.log_softmax(share * log_x + (1 - share) * log_anchor)
