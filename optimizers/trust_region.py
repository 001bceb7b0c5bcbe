"""A ball around an anchor that parameters never leave, as the last transform of an Optax chain."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from optimizers import metrics, projection, trees


class TrustRegionState(NamedTuple):
    """The region and where the parameters are in it."""

    anchor: Any  # tree like the parameters
    precision: Any  # what the form takes
    distance: Array  # float32 [], of the parameters after the update
    fraction: Array  # float32 [], of the way from the anchor that was kept
    count: Array  # int32 []


def project_to_trust_region(
    radius: optax.ScalarOrSchedule,
    *,
    precision: Any = 1.0,
    form: Callable[[Any, Any], Array] = metrics.diagonal_form,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Scales parameters + updates back towards the anchor so that form(precision, parameters - anchor) <= radius.

    Put it last in the chain: updates are added to the parameters, so nothing may change them afterwards. It is the projection along the ray
    from the anchor; entries whose precision is 0 shrink along with the others unless `mask` frees them. An update that is not finite,
    or whose form is not, becomes 0. The anchor is the parameters given to `init` until `set_anchor`.

    Args:
      radius: >= 0, a number, an array, or a schedule of the number of updates.
      precision: F of the start: one number for all entries, or what `form` takes. 0 constrains nothing until `set_anchor`.
      form: (precision, step) -> [], homogeneous of degree 2: `metrics.diagonal_form`, `low_rank_form`, ...
      mask: tree of booleans with the structure of the parameters, or of their first levels; leaves under False are free; None: none is.

    Returns:
      A transform whose `update` needs `params` and ignores other arguments. Updates keep their dtype; the geometry is computed in float32.
      For `optax.inject_hyperparams` everything but the radius is static: static_args=('precision', 'form', 'mask').

    Raises:
      ValueError: a negative radius; `update` without params.

    Examples:
      >>> optimizer = optax.chain(optax.adam(1e-3), project_to_trust_region(0.05))
    """
    projection.check_radius(radius)

    def init(params: Any) -> TrustRegionState:
        if jax.tree_util.all_leaves([precision]) and jnp.ndim(precision) == 0:
            start = jax.tree.map(lambda leaf: jnp.full(leaf.shape, precision, jnp.float32), params)
        else:
            start = jax.tree.map(jnp.array, precision)
        anchor = jax.tree.map(jnp.array, params)  # copies, so that params and the state may be donated
        return TrustRegionState(anchor, start, jnp.zeros((), jnp.float32), jnp.ones((), jnp.float32), jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, TrustRegionState]:
        del extra_args
        if params is None:
            raise ValueError('project_to_trust_region needs the parameters: call update(updates, state, params)')
        limit = jnp.asarray(radius(state.count) if callable(radius) else radius, jnp.float32)
        bound = jax.tree.map(lambda _: True, params) if mask is None else _broadcast(mask, params)
        step = jax.tree.map(
            lambda keep, p, u, a: (p.astype(jnp.float32) + u.astype(jnp.float32) - a.astype(jnp.float32)) * keep,
            bound,
            params,
            updates,
            state.anchor,
        )
        distance = form(state.precision, step).astype(jnp.float32)
        finite = jnp.isfinite(distance) & trees.all_finite(updates)
        fraction = projection.straight_fraction(distance, limit)

        def project(keep: bool, param: Array, change: Array, anchor: Array, away: Array) -> Array:
            back = anchor.astype(jnp.float32) + fraction * away - param.astype(jnp.float32)
            projected = jnp.where(fraction < 1, back.astype(change.dtype), change) if keep else change
            return jnp.where(finite, projected, jnp.zeros_like(change))

        updates = jax.tree.map(project, bound, params, updates, state.anchor, step)
        distance = jnp.where(finite, distance * jnp.square(fraction), state.distance)
        count = optax.safe_increment(state.count)
        return updates, state._replace(distance=distance, fraction=jnp.where(finite, fraction, 0.0), count=count)

    return optax.GradientTransformationExtraArgs(init, update)


def set_anchor(state: TrustRegionState, params: Any, precision: Any, *, decay: float = 1.0, merge: str = 'latest') -> TrustRegionState:
    """The region after another task: precision <- decay * precision + new precision, anchored anew. For diagonal precisions.

    Args:
      state: of `project_to_trust_region`.
      params: where the task ended.
      precision: its diagonal Fisher, a tree like the parameters.
      decay: of the old precision, in [0, 1]; 0 forgets it.
      merge: 'latest' anchors at `params` (online EWC); 'exact' at the mean of the old anchor and `params` weighted by their precisions:
        then the form is the sum of the tasks' own forms, up to a constant.

    Raises:
      ValueError: an unknown merge.
    """
    if merge not in ('latest', 'exact'):
        raise ValueError(f'merge={merge!r} must be latest or exact')
    old = jax.tree.map(lambda p: decay * p, state.precision)
    total = jax.tree.map(jnp.add, old, precision)

    def between(param: Array, anchor: Array, before: Array, both: Array) -> Array:
        share = before / jnp.where(both > 0, both, 1.0)
        return (param + share * (anchor - param)).astype(param.dtype)

    anchor = jax.tree.map(jnp.array, params) if merge == 'latest' else jax.tree.map(between, params, state.anchor, old, total)
    return state._replace(anchor=anchor, precision=total, distance=metrics.quadratic(total)(params, anchor))


def _broadcast(mask: Any, params: Any) -> Any:
    """The mask of every leaf, from a tree that may end above the leaves."""
    return jax.tree.map(lambda keep, part: jax.tree.map(lambda _: keep, part), mask, params)
