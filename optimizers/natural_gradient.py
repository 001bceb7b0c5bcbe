"""Natural gradient steps with a line search on the true distance, and the conjugate gradients that they need (TRPO, 1502.05477)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from optimizers import projection, trees


class NaturalGradientState(NamedTuple):
    """What the last step did."""

    count: Any  # int32 []
    distance: Array  # [], true distance of the accepted step, 0 if none was
    step_fraction: Array  # [], of the full step, 0 if none was accepted
    accepted: Array  # bool []
    residual: Array  # [], of the conjugate gradients, relative to the right-hand side


def _add(left: Any, scale: Array, right: Any) -> Any:
    return jax.tree.map(lambda a, b: a + (scale * b).astype(a.dtype), left, right)


def conjugate_gradient(matvec: Callable[[Any], Any], b: Any, *, num_steps: int = 10, tolerance: float = 1e-10) -> tuple[Any, Array]:
    """Solves A x = b for a symmetric positive definite A, from x = 0, on pytrees.

    A fixed number of steps, so that it vmaps and its cost is known; once the squared residual is below `tolerance` times that of b, or the
    curvature along a direction is not positive, the rest change nothing.

    Args:
      matvec: A, one product per step.
      b: right-hand side; 0 gives 0.
      num_steps: of the scan.
      tolerance: see above.

    Returns:
      (x, |b - A x| / |b| as the recursion sees it).
    """
    squared = trees.inner(b, b)

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        x, residual, direction, current = carry
        product = matvec(direction)
        curvature = trees.inner(direction, product)
        running = (current > tolerance * squared) & (curvature > 0)
        length = jnp.where(running, current / jnp.where(running, curvature, 1.0), 0.0)
        x, residual = _add(x, length, direction), _add(residual, -length, product)
        following = trees.inner(residual, residual)
        ratio = jnp.where(running, following / jnp.where(running, current, 1.0), 0.0)
        moved = _add(residual, ratio, direction)
        direction = jax.tree.map(lambda new, old: jnp.where(running, new, old), moved, direction)
        return (x, residual, direction, jnp.where(running, following, current)), None

    zero = jax.tree.map(jnp.zeros_like, b)
    (x, _, _, final), _ = jax.lax.scan(step, (zero, b, b, squared), None, length=num_steps)
    return x, jnp.sqrt(final / jnp.where(squared > 0, squared, 1.0))


def natural_gradient(
    radius: optax.ScalarOrSchedule,
    *,
    cg_steps: int = 10,
    damping: float = 0.1,
    backtracks: int = 10,
    decay: float = 0.8,
    tolerance: float = 1e-10,
) -> optax.GradientTransformationExtraArgs:
    """The natural gradient step whose quadratic model of the distance is the radius, cut back until the true distance fits.

    direction = -(H + damping I)^-1 gradient, H the Hessian of `distance_fn` at the parameters; full step = direction scaled so that
    1/2 step^T H step = radius. Of the fractions decay^0, decay^1, ... of it the first is taken at which the true value is lower than now
    and the true distance within the radius. If none is, the updates are 0. The updates are steps already: no learning rate follows.

    Args:
      radius: > 0, a number, an array, or a schedule of the number of updates.
      cg_steps: products with H per update.
      damping: >= 0.
      backtracks: fractions tried, >= 1.
      decay: of the fractions, in (0, 1).
      tolerance: of `conjugate_gradient`.

    Returns:
      A transform. `update(gradients, state, params, *, value_fn, distance_fn)`: gradients of `value_fn`; `value_fn(params) -> []` is to be
      minimised; `distance_fn(params) -> []` is 0 with gradient 0 at `params` (the mean KL from the current policy). Other arguments are
      ignored.

    Raises:
      ValueError: a radius or damping that is negative; `update` without params or one of the functions.
    """
    projection.check_radius(radius)
    if isinstance(damping, int | float) and not damping >= 0:
        raise ValueError(f'damping={damping} must be 0 or more')

    def init(params: Any) -> NaturalGradientState:
        del params
        return NaturalGradientState(jnp.zeros((), jnp.int32), jnp.zeros(()), jnp.zeros(()), jnp.array(False), jnp.zeros(()))

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        value_fn: Callable | None = None,
        distance_fn: Callable | None = None,
        **extra_args: Any,
    ) -> tuple[Any, NaturalGradientState]:
        del extra_args
        if params is None or value_fn is None or distance_fn is None:
            raise ValueError('natural_gradient needs update(gradients, state, params, value_fn=..., distance_fn=...)')
        limit = radius(state.count) if callable(radius) else radius

        def hessian_product(vector: Any) -> Any:
            return jax.jvp(jax.grad(distance_fn), (params,), (vector,))[1]

        descent = jax.tree.map(jnp.negative, updates)
        direction, residual = conjugate_gradient(
            lambda vector: _add(hessian_product(vector), jnp.asarray(damping), vector), descent, num_steps=cg_steps, tolerance=tolerance
        )
        curvature = trees.inner(direction, hessian_product(direction))
        usable = jnp.isfinite(curvature) & (curvature > 0)
        scale = jnp.where(usable, jnp.sqrt(2 * limit / jnp.where(usable, curvature, 1.0)), 0.0)
        full_step = jax.tree.map(lambda leaf: (scale * leaf).astype(leaf.dtype), direction)
        value = value_fn(params)

        def good(fraction: Array) -> tuple[Array, Array]:
            moved = _add(params, fraction, full_step)
            distance = distance_fn(moved)
            return (value_fn(moved) < value) & (distance <= limit), distance

        def unfinished(carry: tuple) -> Array:
            tries, accepted, _, _ = carry
            return ~accepted & usable & (tries < backtracks)

        def attempt(carry: tuple) -> tuple:
            tries, _, _, _ = carry
            fraction = jnp.asarray(decay, float) ** tries
            accepted, distance = good(fraction)
            return tries + 1, accepted, fraction, distance.astype(float)

        start = (jnp.zeros((), jnp.int32), jnp.array(False), jnp.zeros(()), jnp.zeros(()))
        _, accepted, fraction, distance = jax.lax.while_loop(unfinished, attempt, start)
        fraction, distance = jnp.where(accepted, fraction, 0.0), jnp.where(accepted, distance, 0.0)
        step = jax.tree.map(lambda leaf: jnp.where(accepted, (fraction * leaf).astype(leaf.dtype), 0), full_step)
        return step, NaturalGradientState(optax.safe_increment(state.count), distance, fraction, accepted, residual.astype(float))

    return optax.GradientTransformationExtraArgs(init, update)
