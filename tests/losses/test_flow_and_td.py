"""Hand values of the flow-matching loss, the Euler sampler and the TD pieces."""

import jax.numpy as jnp
import numpy as np

from losses.flow_matching import flow_matching_loss, integrate_flow
from losses.temporal_difference import chunk_return, ensemble_loss, pessimistic_value


def test_flow_matching_loss_by_hand():
    """Field 0: errors are -(x1 - x0) = -(1, 3) and -(0, 2); means of squares 5 and 2; the second row is not valid: (5 + 0) / 2."""
    actions, noises = jnp.array([[1.0, 1.0], [0.0, 1.0]]), jnp.array([[0.0, -2.0], [0.0, -1.0]])
    times = jnp.full((2, 1), 0.25)
    loss = flow_matching_loss(lambda a, t: jnp.zeros_like(a), actions, noises, times, jnp.array([1.0, 0.0]))
    assert float(loss) == 2.5


def test_flow_matching_sees_the_straight_path():
    """A field that returns its input x_t = 0.75 x0 + 0.25 x1 = -0.5: error -0.5 - 2 = -2.5."""
    loss = flow_matching_loss(lambda a, t: a, jnp.array([[1.0]]), jnp.array([[-1.0]]), jnp.array([[0.25]]), jnp.ones(1))
    assert float(loss) == 6.25


def test_euler_by_hand():
    """v = t, two steps from 1: 1 + 0/2 + 0.5/2 = 1.25."""
    assert float(integrate_flow(lambda a, t: t, jnp.array([[1.0]]), 2)[0, 0]) == 1.25


def test_chunk_return_by_hand():
    """discount 0.5: row 0 runs through, -1 - 0.5 - 0.25; row 1 ends truly after its second step, -1 + 0; row 2 is cut after its first."""
    rewards = jnp.array([[-1.0, -1.0, -1.0], [-1.0, 0.0, -1.0], [-1.0, 0.0, 0.0]])
    masks = jnp.array([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 0.0, 1.0]])  # the 0 of row 2 is of another episode: it ends nothing
    valid = jnp.array([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    returns, alive = chunk_return(rewards, masks, valid, jnp.float32(0.5))
    np.testing.assert_allclose(returns, [-1.75, -1.0, -1.0])
    np.testing.assert_array_equal(alive, [1, 0, 1])
    returns, alive = chunk_return(rewards, masks, valid, jnp.float32(0.5), count_after_terminal=True)
    np.testing.assert_allclose(returns, [-1.75, -1.25, -1.0])  # the public code counts the -1 behind the goal
    np.testing.assert_array_equal(alive, [1, 0, 1])


def test_pessimism_and_ensemble_loss_by_hand():
    values = jnp.array([[1.0, 4.0], [3.0, 4.0]])
    np.testing.assert_allclose(pessimistic_value(values, jnp.float32(0.5)), [1.5, 4.0])  # population std 1 and 0
    # squares against (1, 0): (0, 16) and (4, 16); the second row is not valid: (0 + 4) / 4
    assert float(ensemble_loss(values, jnp.array([1.0, 0.0]), jnp.array([1.0, 0.0]))) == 1.0
