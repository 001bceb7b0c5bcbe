"""Multi-layer perceptrons, alone and as an ensemble of critics."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array


class MLP(nn.Module):
    """GELU (tanh form) perceptron with Xavier-uniform kernels and an optional LayerNorm AFTER each activation, as in QAM's public code.

    [..., I] -> [..., output_size].
    """

    hidden_sizes: Sequence[int]
    output_size: int
    layer_norm: bool = False

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        features = inputs
        for size in self.hidden_sizes:
            features = nn.gelu(nn.Dense(size, kernel_init=nn.initializers.xavier_uniform())(features))
            if self.layer_norm:
                features = nn.LayerNorm()(features)
        return nn.Dense(self.output_size, kernel_init=nn.initializers.xavier_uniform())(features)


class EnsembleCritic(nn.Module):
    """K independent state-action values in one module: observations [B, O], actions [B, A] -> [K, B]."""

    num_critics: int
    hidden_sizes: Sequence[int]
    layer_norm: bool = True

    @nn.compact
    def __call__(self, observations: Array, actions: Array) -> Array:
        over_members: Any = nn.vmap  # its annotation leaves out that in_axes may be None
        ensemble = over_members(MLP, variable_axes={'params': 0}, split_rngs={'params': True}, in_axes=None, axis_size=self.num_critics)
        values = ensemble(self.hidden_sizes, 1, self.layer_norm)(jnp.concatenate([observations, actions], axis=-1))
        return values[..., 0]
