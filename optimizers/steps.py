"""Gradient steps that agents share. Optimizers are rebuilt from `state.hyper` at every update, so that rates can be swept under vmap."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array


def global_norms(grads: dict[str, Any]) -> dict[str, Array]:
    """L2 norm of each top-level entry ('grad/norm_NAME') and of all together ('grad/norm')."""
    norms = {f'grad/norm_{name}': optax.tree.norm(entry) for name, entry in grads.items()}
    return {**norms, 'grad/norm': optax.tree.norm(grads)}


def clip_gradients(grads: dict[str, Any], max_norm: Array, clip: str) -> dict[str, Any]:
    """Scales gradients down to an L2 norm of `max_norm`: all together ('joint', as published for QAM) or each network alone ('per_net').

    Under 'joint' a spike in one network's loss shrinks every other network's gradient of that step to nothing.
    """

    def scale(entry):
        norm = optax.tree.norm(entry)
        factor = jnp.where(norm > max_norm, max_norm / jnp.where(norm > 0, norm, 1.0), 1.0)
        return jax.tree.map(lambda leaf: leaf * factor, entry)

    return scale(grads) if clip == 'joint' else {name: scale(entry) for name, entry in grads.items()}


def adam_step(grads: dict[str, Any], opt_state: Any, learning_rate: Array, max_norm: Array, clip: str) -> tuple[Any, Any, dict[str, Array]]:
    """Clip, then Adam. Start with `adam_init(params)`.

    Args:
      grads: {network: gradients}.
      opt_state: of Adam.
      learning_rate, max_norm: [].
      clip: 'joint' or 'per_net'.

    Returns:
      (updates to add to the parameters, opt_state, gradient norms before clipping).
    """
    updates, opt_state = optax.adam(learning_rate).update(clip_gradients(grads, max_norm, clip), opt_state)
    return updates, opt_state, global_norms(grads)


def adam_init(params: Any) -> Any:
    """State of Adam for `adam_step`; it does not depend on the learning rate."""
    return optax.adam(0.0).init(params)


def move_towards(targets: Any, params: Any, tau: Array) -> Any:
    """Targets after one step of exponential averaging: targets + tau * (params - targets), leaf by leaf."""
    return jax.tree.map(lambda target, param: target * (1 - tau) + param * tau, targets, params)
