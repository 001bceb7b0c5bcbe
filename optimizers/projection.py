"""Projection to a trust region {y: metric(y, anchor) <= radius} along a curve from the anchor.

The fraction of the curve that fits is found by bisection, of which the feasible end is kept: the result never leaves the region by more
than the rounding of its own entries, whatever the metric is, as long as it grows along the curve.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from optimizers import curves, metrics, trees


class ProjectionInfo(NamedTuple):
    """What a projection did, each [...] with the batch dimensions of the metric."""

    fraction: Array  # of the curve that was kept, 0 (anchor) .. 1 (x)
    distance: Array  # of the result from the anchor, <= radius
    active: Array  # bool: x lay outside, or was not finite


def check_radius(radius: Any) -> None:
    """Raises ValueError for a radius that is a Python number and negative or NaN. Arrays are not looked at."""
    if isinstance(radius, int | float) and not radius >= 0:
        raise ValueError(f'radius={radius} must be 0 or more')


def _check(x: Any, radius: Any) -> None:
    check_radius(radius)
    if not jax.tree.leaves(x):
        raise ValueError('there is nothing to project: the tree has no leaves')


def _with_dtypes(curve: curves.Curve) -> curves.Curve:
    """The same curve in the dtypes of x: the fraction, float32 like the metric, would turn bfloat16 leaves into float32."""

    def cast(anchor: Any, x: Any, fraction: Array) -> Any:
        return jax.tree.map(lambda point, leaf: point.astype(leaf.dtype), curve(anchor, x, fraction), x)

    return cast


def straight_fraction(distance: Array, radius: Any) -> Array:
    """min(1, sqrt(radius / distance)), [...]: how much of a straight line fits, for a metric that grows with its square. Differentiable."""
    outside = distance > radius
    # Not the root of the quotient, whose gradient in the distance is 0 * inf at radius 0.
    return jnp.where(outside, jnp.sqrt(radius) / jnp.sqrt(jnp.where(outside, distance, 1.0)), 1.0)


def radius_fraction(metric: metrics.Metric, curve: curves.Curve, x: Any, anchor: Any, radius: Any, *, num_steps: int = 40) -> Array:
    """The largest fraction of the curve inside the region, found by bisection, [...]; no gradient flows through it.

    Args:
      metric: grows along the curve. A NaN counts as outside.
      curve: from the anchor (fraction 0) to x (1).
      x, anchor: pytrees of one structure, no leaf without entries.
      radius: >= 0, [] or [...].
      num_steps: halvings; 40 exhaust float32.

    Raises:
      ValueError: a negative radius, or a tree without leaves.
    """
    _check(x, radius)
    x, anchor = jax.lax.stop_gradient((x, anchor))

    def inside(fraction: Array) -> Array:
        return metric(curve(anchor, x, fraction), anchor) <= radius

    distance = metric(x, anchor)

    def halve(bracket: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        feasible, outside = bracket
        middle = 0.5 * (feasible + outside)
        fits = inside(middle)
        return (jnp.where(fits, middle, feasible), jnp.where(fits, outside, middle)), None

    zeros = jnp.zeros_like(distance)
    (feasible, _), _ = jax.lax.scan(halve, (zeros, zeros + 1), None, length=num_steps)
    return jnp.where(distance <= radius, 1.0, feasible)


def project(
    metric: metrics.Metric,
    curve: curves.Curve,
    x: Any,
    anchor: Any,
    radius: Any,
    *,
    num_steps: int = 40,
    differentiable: bool = False,
) -> tuple[Any, ProjectionInfo]:
    """The last point of the curve from the anchor to x inside the region.

    Inside, x is returned bit for bit with the identity as its gradient. Where an entry of x is not finite, the anchor is returned.

    Args:
      metric, curve, x, anchor, radius, num_steps: see `radius_fraction`. Leaves of x are [..., D...] with the metric's batch in front.
      differentiable: let gradients flow to x, anchor and radius, also through the fraction. Its derivative is that of the implicit function
        metric(curve(fraction)) = radius, by one Newton correction of value zero at the fraction found. False: none flows at all, which is
        what a target of a regression needs.

    Returns:
      (point, ProjectionInfo).

    Raises:
      ValueError: a negative radius, or a tree without leaves.
    """
    if not differentiable:
        x, anchor, radius = jax.lax.stop_gradient((x, anchor, radius))
    _check(x, radius)
    batch_dims = jax.eval_shape(metric, x, anchor).ndim
    finite = trees.all_finite(x, batch_dims)
    x = trees.select(finite, x, anchor)
    curve = _with_dtypes(curve)
    fraction = radius_fraction(metric, curve, x, anchor, radius, num_steps=num_steps)
    distance = metric(x, anchor)
    outside = finite & ~(distance <= radius)
    kept = outside & (fraction > 0)  # at fraction 0 the curve may still be NaN, if x is huge: 0 * inf
    if differentiable:
        fraction = _implicit(metric, curve, x, anchor, radius, fraction, kept)
    on_curve = curve(anchor, trees.select(kept, x, anchor), fraction)
    point = trees.select(outside, trees.select(kept, on_curve, anchor), x)
    reached = jnp.where(outside, metric(point, anchor), distance)
    return point, ProjectionInfo(jnp.where(finite, fraction, 0.0), jax.lax.stop_gradient(reached), outside | ~finite)


def _implicit(metric: metrics.Metric, curve: curves.Curve, x: Any, anchor: Any, radius: Any, fraction: Array, active: Array) -> Array:
    """`fraction` with the gradient of the implicit function metric(curve(anchor, x, fraction), anchor) = radius; its value is unchanged."""

    def excess(fraction: Array, x: Any, anchor: Any, radius: Any) -> Array:
        return metric(curve(anchor, x, fraction), anchor) - radius

    fixed = jax.lax.stop_gradient((x, anchor, radius))
    _, slope = jax.jvp(lambda each: excess(each, *fixed), (fraction,), (jnp.ones_like(fraction),))
    usable = active & jnp.isfinite(slope) & (slope > 0)
    # A double where: elsewhere the argument is replaced too, since 0 times a gradient that is not finite would be NaN.
    x = trees.select(usable, x, jax.lax.stop_gradient(anchor))
    moved = excess(fraction, x, anchor, radius)
    correction = (moved - jax.lax.stop_gradient(moved)) / jax.lax.stop_gradient(jnp.where(usable, slope, 1.0))
    return jnp.where(usable, fraction - correction, fraction)


def project_full_gaussian(x: metrics.Gaussian, anchor: metrics.Gaussian, radius: Any) -> tuple[metrics.Gaussian, ProjectionInfo]:
    """The Gaussian nearest to x in KL(. || x) among those with KL(. || anchor) <= radius, for full covariances; no gradient.

    With anchor covariance L L^T and eigenvectors U of L^-1 C L^-T, x and anchor are both diagonal in the coordinates U^T L^-1: the diagonal
    problem is solved there. One Cholesky factor and one eigendecomposition each.

    Args:
      x, anchor: (mean [..., D], covariance [..., D, D]); positive definite. Where one of x is not, the anchor is returned.
      radius: >= 0, [] or [...].

    Raises:
      ValueError: a negative radius.
    """
    check_radius(radius)
    x, anchor = jax.lax.stop_gradient((x, anchor))
    (mean, covariance), (mean0, covariance0) = x, anchor
    factor = jnp.linalg.cholesky(covariance0)

    def solve(right: Array) -> Array:
        return jax.lax.linalg.triangular_solve(factor, right, left_side=True, lower=True)

    def product(left: Array, right: Array) -> Array:
        return jnp.matmul(left, right, precision='highest')

    whitened = solve(jnp.swapaxes(solve(covariance), -1, -2))
    finite = jnp.isfinite(whitened).all((-2, -1)) & jnp.isfinite(mean).all(-1)
    identity = jnp.broadcast_to(jnp.eye(mean.shape[-1], dtype=mean.dtype), whitened.shape)
    eigenvalues, vectors = jnp.linalg.eigh(jnp.where(finite[..., None, None], whitened, identity))
    definite = finite & (eigenvalues > 0).all(-1)
    back = product(factor, vectors)
    shift = product(jnp.swapaxes(vectors, -1, -2), solve((mean - mean0)[..., None]))[..., 0]
    origin = (jnp.zeros_like(shift), jnp.zeros_like(shift))
    target = (jnp.where(definite[..., None], shift, jnp.nan), 0.5 * jnp.log(jnp.where(eigenvalues > 0, eigenvalues, 1.0)))
    (shift, log_std), info = project(metrics.gaussian_kl, curves.gaussian_geodesic, target, origin, radius)
    scaled = back * jnp.exp(log_std)[..., None, :]
    point = (mean0 + product(back, shift[..., None])[..., 0], product(scaled, jnp.swapaxes(scaled, -1, -2)))
    return trees.select(info.active, trees.select(definite, point, anchor), x), info


def project_decoupled(
    x: metrics.Gaussian, anchor: metrics.Gaussian, mean_radius: Any, covariance_radius: Any, kind: str = 'kl'
) -> tuple[metrics.Gaussian, ProjectionInfo]:
    """Mean and covariance of a diagonal Gaussian, each projected to its own radius; differentiable in x and anchor.

    Where an entry of x, or (but for kl) of its variance is not finite, the anchor is returned.

    | kind        | distance of the means             | distance of the covariances          | straight line in |
    |-------------|-----------------------------------|--------------------------------------|------------------|
    | kl          | 1/2 sum (m - m0)^2 / std0^2       | KL at equal means                    | precisions       |
    | wasserstein | sum (m - m0)^2 / std0^2           | sum (std - std0)^2 / std0^2          | std              |
    | frobenius   | sum (m - m0)^2                    | sum (std^2 - std0^2)^2               | variances        |

    Args:
      x, anchor: (mean [..., D], log_std [..., D]).
      mean_radius, covariance_radius: >= 0.
      kind: of the distances.

    Returns:
      ((mean, log_std), ProjectionInfo of the covariance's projection).

    Raises:
      ValueError: a negative radius, or an unknown kind.

    Source: Otto et al. 2021, 'Differentiable trust region layers for deep reinforcement learning' (Wasserstein with its scaled precision).
    """
    check_radius(mean_radius)
    check_radius(covariance_radius)
    if kind not in ('kl', 'wasserstein', 'frobenius'):
        raise ValueError(f'kind={kind!r} must be kl, wasserstein or frobenius')
    finite = trees.all_finite(x if kind == 'kl' else (*x, jnp.exp(2 * x[1])), x[0].ndim - 1)
    (mean, log_std), (mean0, log_std0) = trees.select(finite, x, anchor), anchor
    scaled = jnp.square(mean - mean0) * (1.0 if kind == 'frobenius' else jnp.exp(-2 * log_std0))
    mean_distance = jnp.sum(scaled, axis=-1) * (0.5 if kind == 'kl' else 1.0)
    mean = curves.linear(mean0, mean, straight_fraction(mean_distance, mean_radius))
    if kind == 'kl':
        same = jnp.zeros_like(mean0)
        (_, log_std), info = project(
            metrics.gaussian_kl, curves.gaussian_geodesic, (same, log_std), (same, log_std0), covariance_radius, differentiable=True
        )
        return (mean, log_std), ProjectionInfo(jnp.where(finite, info.fraction, 0.0), info.distance, info.active | ~finite)
    power = 1 if kind == 'wasserstein' else 2
    size, size0 = jnp.exp(power * log_std), jnp.exp(power * log_std0)
    scale = jnp.exp(-2 * log_std0) if kind == 'wasserstein' else jnp.ones_like(log_std0)
    distance = jnp.sum(jnp.square(size - size0) * scale, axis=-1)
    fraction = straight_fraction(distance, covariance_radius)
    active = distance > covariance_radius
    moved = jnp.log(curves.linear(size0, size, fraction)) / power
    reached = jnp.where(fraction > 0, distance * jnp.square(fraction), 0.0)  # an infinite distance leaves the fraction 0
    info = ProjectionInfo(jnp.where(finite, fraction, 0.0), jax.lax.stop_gradient(reached), active | ~finite)
    return (mean, trees.select(active, moved, log_std)), info
