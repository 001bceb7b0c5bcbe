"""What a network sees of an observation."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array

STD_FLOOR = 1e-3  # an observation entry that never moves in the data is centred, not blown up
LOWEST_FREQUENCY = 1.5  # radians per standard deviation; with three octaves this resolves the walls of a medium maze


def observation_encoder(spec, normalize: bool, octaves: int) -> tuple[Callable[[Array], Array], int]:
    """Fixed features of flat observations: z = (s - mean) / std and, for each octave k, sin and cos of 1.5 * 2^k * z.

    Small perceptrons smooth values across thin walls; Fourier features let them change quickly with position.

    Args:
      spec: the task; `spec.statistics` must be known when `normalize` is set.
      normalize: whether to standardise with the statistics of the data, which stay fixed for the whole run.
      octaves: number of frequencies, 0 for none.

    Returns:
      (encode: [..., O] -> [..., O * (1 + 2 * octaves)], size of its result).
    """
    if isinstance(spec.observations, dict):
        raise ValueError('this agent takes flat observations, the environment gives a dict: choose an agent that takes dicts')
    if len(spec.observations.shape) != 1:
        raise ValueError(f'this agent takes flat observations [O], the environment gives {spec.observations.shape}')
    if normalize and spec.statistics is None:
        raise ValueError('normalize_observations needs the statistics of a dataset: pass --dataset, or switch it off')
    size = spec.observations.shape[0]
    mean, std = (spec.statistics.mean, spec.statistics.std) if normalize else (0.0, 1.0)

    def encode(observations: Array) -> Array:
        scaled = observations
        if normalize:
            row = (1,) * (observations.ndim - 1) + (size,)
            floored = np.maximum(np.asarray(std, np.float32), np.float32(STD_FLOOR)).reshape(row)
            scaled = (observations - np.asarray(mean, np.float32).reshape(row)) / floored
        waves = [wave(LOWEST_FREQUENCY * 2.0**k * scaled) for k in range(octaves) for wave in (jnp.sin, jnp.cos)]
        return jnp.concatenate([scaled, *waves], axis=-1)

    return encode, size * (1 + 2 * octaves)
