from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs.types import ArraySpec, Spec, Statistics
from networks import MLP, EnsembleCritic, VelocityField, observation_encoder

SPEC = Spec(ArraySpec((2,)), ArraySpec((1,)), 10)


def test_encoder_by_hand():
    """z = (s - mean) / std; then sin, cos of 1.5 z and of 3 z."""
    statistics = Statistics(np.array([1.0, 0.0]), np.array([2.0, 0.0]), None, None)
    encode, size = observation_encoder(SPEC._replace(statistics=statistics), True, 2)
    z = np.array([1.0, 5.0])  # (3 - 1) / 2 and 0.005 / the floor of 1e-3
    expected = np.concatenate([z, np.sin(1.5 * z), np.cos(1.5 * z), np.sin(3 * z), np.cos(3 * z)])
    assert size == 10
    np.testing.assert_allclose(encode(jnp.array([3.0, 0.005])), expected, rtol=1e-4)
    assert encode(jnp.zeros((4, 3, 2))).shape == (4, 3, 10)


def test_encoder_refuses():
    with pytest.raises(ValueError, match='statistics'):
        observation_encoder(SPEC, True, 0)
    with pytest.raises(ValueError, match='dict'):
        observation_encoder(SPEC._replace(observations={'a': ArraySpec((2,))}), False, 0)


def test_ensemble_is_separate_perceptrons():
    critic = EnsembleCritic(3, (8, 8))
    observations, actions = jax.random.normal(jax.random.key(0), (5, 2)), jax.random.normal(jax.random.key(1), (5, 1))
    params = critic.init(jax.random.key(2), observations, actions)
    values: Any = critic.apply(params, observations, actions)
    assert values.shape == (3, 5)
    assert len({float(row[0]) for row in np.asarray(values)}) == 3
    (inner,) = params['params'].values()
    for member in range(3):
        alone: Any = MLP((8, 8), 1, True).apply(
            {'params': jax.tree.map(lambda leaf, m=member: leaf[m], inner)}, jnp.concatenate([observations, actions], -1)
        )
        np.testing.assert_allclose(values[member], alone[:, 0], rtol=1e-5, atol=1e-6)


def test_layer_norm_follows_the_activation():
    """With kernel of the last layer = identity the output is a normalised vector: mean 0, variance 1."""
    network = MLP((6,), 6, True)
    params = network.init(jax.random.key(0), jnp.zeros((1, 4)))
    params['params']['Dense_1'] = {'kernel': jnp.eye(6), 'bias': jnp.zeros(6)}
    out = np.asarray(network.apply(params, jax.random.normal(jax.random.key(1), (3, 4))))
    np.testing.assert_allclose(out.mean(-1), 0, atol=1e-5)
    np.testing.assert_allclose(out.std(-1), 1, atol=1e-3)


def test_velocity_keeps_one_action():
    field = VelocityField(1, (4,))
    args = jnp.zeros((7, 2)), jnp.zeros((7, 1)), jnp.zeros((7, 1))
    velocities: Any = field.apply(field.init(jax.random.key(0), *args), *args)
    assert velocities.shape == (7, 1)
