"""Gradient steps that agents share. Optimizers are rebuilt from `state.hyper` at every update, so that rates can be swept under vmap."""

from collections.abc import Callable
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


def gradient_step(
    loss: Callable, state: Any, batches: Any, key: Array, clip: str = 'joint', transform: Callable | None = None
) -> tuple[Any, dict[str, Array]]:
    """One clipped Adam step of an agent on its loss.

    Args:
      loss: (params, state, batches, key) -> (scalar, metrics).
      state: an agent's state with params, opt_state (of `adam_init`) and hyper (learning_rate, max_grad_norm).
      batches: what the loss takes.
      key: consumed.
      clip: see `clip_gradients`.
      transform: (updates, state) -> (updates, state), last before the parameters move: where a wrapper projects.

    Returns:
      (state with new params and opt_state, metrics of the loss with gradient norms).
    """
    (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(state.params, state, batches, key)
    rates = state.hyper['learning_rate'], state.hyper['max_grad_norm']
    updates, opt_state, norms = adam_step(grads, state.opt_state, *rates, clip=clip)
    if transform is not None:
        updates, state = transform(updates, state)
    return state._replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state), {**metrics, **norms}


def minibatch_steps(
    loss: Callable, state: Any, rows: Any, key: Array, num_epochs: int, num_minibatches: int, transform: Callable | None = None
) -> tuple[Any, dict[str, Array]]:
    """Passes over the rows of an on-policy batch in fresh random orders, one `gradient_step` per minibatch.

    Args:
      loss: (params, state, {'rows': minibatch}, key) -> (scalar, metrics).
      state: an agent's state.
      rows: leaves [N, ...].
      key: consumed.
      num_epochs, num_minibatches: passes, and steps in each; N must be a multiple of the latter.
      transform: see `gradient_step`.

    Returns:
      (state, mean metrics of all steps).

    Raises:
      ValueError: the rows do not divide into the minibatches.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    if count % num_minibatches:
        raise ValueError(f'{count} states per update do not divide into num_minibatches={num_minibatches}')
    order_key, loss_key = jax.random.split(key)

    def step(state: Any, inputs: tuple[Array, Array]) -> tuple[Any, dict[str, Array]]:
        picks, key = inputs
        return gradient_step(loss, state, {'rows': jax.tree.map(lambda leaf: leaf[picks], rows)}, key, transform=transform)

    orders = jax.vmap(lambda key: jax.random.permutation(key, count))(jax.random.split(order_key, num_epochs))
    picks = orders.reshape(num_epochs * num_minibatches, -1)
    state, metrics = jax.lax.scan(step, state, (picks, jax.random.split(loss_key, picks.shape[0])))
    return state, jax.tree.map(jnp.mean, metrics)


def adam_init(params: Any) -> Any:
    """State of Adam for `adam_step`; it does not depend on the learning rate."""
    return optax.adam(0.0).init(params)


def move_towards(targets: Any, params: Any, tau: Array) -> Any:
    """Targets after one step of exponential averaging: targets + tau * (params - targets), leaf by leaf."""
    return jax.tree.map(lambda target, param: target * (1 - tau) + param * tau, targets, params)
