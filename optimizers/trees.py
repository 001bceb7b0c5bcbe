"""Arithmetic on pytrees that trust regions share. Batch dimensions, where there are any, lead in every leaf."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def inner(left: Any, right: Any) -> Array:
    """Inner product of two trees, []: at the highest precision, in float32 or better."""
    products = [jnp.vdot(a, b, precision='highest') for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)]
    return sum(products, jnp.zeros((), jnp.float32))


def all_finite(tree: Any, batch_dims: int = 0) -> Array:
    """[...]: whether all entries of all leaves behind the batch dimensions are finite; True for a tree without leaves."""
    checks = [jnp.isfinite(leaf).all(tuple(range(batch_dims, leaf.ndim))) for leaf in jax.tree.leaves(tree)]
    return jnp.stack(checks or [jnp.array(True)]).all(0)


def expand(values: Array, like: Array) -> Array:
    """`values` [...] with trailing axes of size 1, so that it broadcasts over the event dimensions of `like` [..., D...]."""
    return values.reshape(values.shape + (1,) * (like.ndim - values.ndim))


def select(mask: Array, chosen: Any, other: Any) -> Any:
    """Leaf by leaf `chosen` where `mask` [...] holds, else `other`."""
    return jax.tree.map(lambda a, b: jnp.where(expand(mask, a), a, b), chosen, other)
