"""Velocity fields of flow policies."""

from collections.abc import Sequence

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from networks.mlp import MLP


class VelocityField(nn.Module):
    """Velocity v(s, x, t) of an action at flow time t: observations [..., O], actions [..., A], times [..., 1] -> [..., A].

    The scalar time enters as it is, and the action axis is kept when A is 1 (the public code squeezes it away and then breaks).
    """

    action_size: int
    hidden_sizes: Sequence[int]
    layer_norm: bool = False

    @nn.compact
    def __call__(self, observations: Array, actions: Array, times: Array) -> Array:
        inputs = jnp.concatenate([observations, actions, times], axis=-1)
        return MLP(self.hidden_sizes, self.action_size, self.layer_norm)(inputs)
