"""Anchors of trust regions: where the region is, and how that moves. Pairs (init, update) on any pytree; no gradient enters an anchor.

plain EMA       ema(decay)                      leak       ema(decay, leak=0.1)
frozen          fixed()                         floor      spectral_floor(ema(decay), 0.1)
shrink-gate     shrink_gate(ema(decay))         snapshot   snapshot(every)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from losses import spectrum
from optimizers import trees


class AnchorState(NamedTuple):
    """The anchor and what its rule remembers."""

    value: Any  # tree like what is anchored
    start: Any  # the first value where the rule needs it, else ()
    count: Array  # int32 [], updates so far


class Anchor(NamedTuple):
    """A rule by which an anchor follows a quantity."""

    init: Callable[[Any], AnchorState]
    update: Callable[[AnchorState, Any], AnchorState]


def _rule(move: Callable[[AnchorState, Any], Any], remember: bool = False) -> Anchor:
    """An anchor whose next value is move(state, x); where that or x is not finite the anchor stays."""

    def init(x: Any) -> AnchorState:
        value = jax.tree.map(lambda leaf: jax.lax.stop_gradient(jnp.array(leaf)), x)
        return AnchorState(value, jax.tree.map(jnp.array, value) if remember else (), jnp.zeros((), jnp.int32))

    def update(state: AnchorState, x: Any) -> AnchorState:
        state, x = jax.lax.stop_gradient((state, x))
        moved = move(state, x)
        finite = trees.all_finite((moved, x))
        value = jax.tree.map(lambda new, old: jnp.where(finite, new, old).astype(old.dtype), moved, state.value)
        return state._replace(value=value, count=optax.safe_increment(state.count))

    return Anchor(init, update)


def fixed() -> Anchor:
    """Stays where it began."""
    return _rule(lambda state, x: state.value)


def snapshot(every: int) -> Anchor:
    """Jumps to the quantity at every `every`-th update (>= 1).

    Raises:
      ValueError: every < 1.
    """
    if every < 1:
        raise ValueError(f'every={every} must be 1 or more')

    def move(state: AnchorState, x: Any) -> Any:
        due = (state.count + 1) % every == 0
        return jax.tree.map(lambda new, old: jnp.where(due, new, old), x, state.value)

    return _rule(move)


def ema(decay: float | Array, leak: float | Array = 0.0) -> Anchor:
    """value <- decay value + (1 - decay) [(1 - leak) x + leak first value].

    Args:
      decay: in [0, 1].
      leak: in [0, 1]; above 0 the anchor is drawn back to its first value, so that slow drift can't carry it away.

    Raises:
      ValueError: a number outside its range.
    """
    for name, number in (('decay', decay), ('leak', leak)):
        if isinstance(number, int | float) and not 0 <= number <= 1:
            raise ValueError(f'{name}={number} must be between 0 and 1')

    leaks = not (isinstance(leak, int | float) and leak == 0)

    def move(state: AnchorState, x: Any) -> Any:
        target = jax.tree.map(lambda new, first: (1 - leak) * new + leak * first, x, state.start) if leaks else x
        return jax.tree.map(lambda value, new: decay * value + (1 - decay) * new, state.value, target)

    return _rule(move, remember=leaks)


def shrink_gate(anchor: Anchor) -> Anchor:
    """Accepts a move of `anchor`, whose leaves are covariances [..., D, D], only where neither trace nor effective rank falls."""

    def update(state: AnchorState, x: Any) -> AnchorState:
        moved = anchor.update(state, x)

        def gate(new: Array, old: Array) -> Array:
            larger = jnp.trace(new, axis1=-2, axis2=-1) >= jnp.trace(old, axis1=-2, axis2=-1)
            fuller = spectrum.effective_rank(new) >= spectrum.effective_rank(old)
            return jnp.where((larger & fuller)[..., None, None], new, old)

        return moved._replace(value=jax.tree.map(gate, moved.value, state.value))

    return Anchor(anchor.init, update)


def spectral_floor(anchor: Anchor, floor: float) -> Anchor:
    """Lifts the eigenvalues of covariances [..., D, D] to at least `floor` after every move of `anchor` and at its start.

    Raises:
      ValueError: floor < 0.
    """
    if not floor >= 0:
        raise ValueError(f'floor={floor} must be 0 or more')

    def lift(state: AnchorState) -> AnchorState:
        def clip(covariance: Array) -> Array:
            eigenvalues, vectors = jnp.linalg.eigh(covariance)
            scaled = vectors * jnp.maximum(eigenvalues, floor)[..., None, :]
            lifted = jnp.matmul(scaled, jnp.swapaxes(vectors, -1, -2), precision='highest')
            symmetric = 0.5 * (lifted + jnp.swapaxes(lifted, -1, -2))
            return jnp.where((eigenvalues < floor).any(-1)[..., None, None], symmetric, covariance)

        return state._replace(value=jax.tree.map(clip, state.value))

    return Anchor(lambda x: lift(anchor.init(x)), lambda state, x: lift(anchor.update(state, x)))
