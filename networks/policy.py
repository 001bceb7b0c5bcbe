"""Gaussian policies."""

from collections.abc import Sequence

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from networks.mlp import MLP

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


class GaussianPolicy(nn.Module):
    """Diagonal Gaussian over actions before any squashing: observations [..., O] -> (mean, log_std), each [..., A].

    Without hidden layers the mean is affine. log_std is one learned vector, or a second output of the network; clipped to [-5, 2].
    """

    action_size: int
    hidden_sizes: Sequence[int]
    state_dependent_std: bool = False

    @nn.compact
    def __call__(self, observations: Array) -> tuple[Array, Array]:
        outputs = MLP(self.hidden_sizes, self.action_size * (2 if self.state_dependent_std else 1))(observations)
        if self.state_dependent_std:
            mean, log_std = jnp.split(outputs, 2, axis=-1)
        else:
            mean = outputs
            log_std = self.param('log_std', nn.initializers.zeros, (self.action_size,))
            log_std = jnp.broadcast_to(log_std, mean.shape)
        return mean, jnp.clip(log_std, LOG_STD_MIN, LOG_STD_MAX)
