"""Gradient steps against hand values and optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optimizers import adam_init, adam_step, clip_gradients, global_norms, move_towards

GRADS = {'a': {'w': jnp.array([3.0, 4.0])}, 'b': {'w': jnp.array([0.0, 12.0])}}  # norms 5, 12, together 13


def test_clip_by_hand():
    joint = clip_gradients(GRADS, jnp.float32(6.5), 'joint')  # half of 13
    np.testing.assert_allclose(joint['a']['w'], [1.5, 2])
    alone = clip_gradients(GRADS, jnp.float32(6), 'per_net')  # a stays, b is halved
    np.testing.assert_allclose(alone['a']['w'], [3, 4])
    np.testing.assert_allclose(alone['b']['w'], [0, 6])
    zero = jax.tree.map(jnp.zeros_like, GRADS)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(clip_gradients(zero, jnp.float32(0), 'joint')))


def test_norms_are_global_norms():
    norms = global_norms(GRADS)
    assert {name: float(value) for name, value in norms.items()} == {'grad/norm_a': 5, 'grad/norm_b': 12, 'grad/norm': 13}


def test_adam_step_is_optax():
    ours, theirs = adam_init(GRADS), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-4))
    state = theirs.init(GRADS)
    for scale in (1.0, 0.01, -2.0):
        grads = jax.tree.map(lambda leaf, s=scale: leaf * s, GRADS)
        expected, state = theirs.update(grads, state)
        updates, ours, _ = adam_step(grads, ours, jnp.float32(3e-4), jnp.float32(1), 'joint')
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-12), updates, expected)


def test_move_towards_by_hand():
    np.testing.assert_allclose(
        move_towards({'w': jnp.array([0.0, 2.0])}, {'w': jnp.array([1.0, 4.0])}, jnp.float32(0.25))['w'], [0.25, 2.5]
    )
