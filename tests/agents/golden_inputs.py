"""Inputs of the golden test by formula, so that the other side could be fed the same without files."""

import jax
import jax.numpy as jnp
import numpy as np

BATCH, CHUNK, STEPS, ACTIONS, OBSERVATIONS = 5, 2, 4, 2, 3
SIZE = CHUNK * ACTIONS


def wave(shape, phase):
    """Numbers in [-1, 1] that do not repeat: sin(0.7 i^1.1 + phase)."""
    return np.sin(0.7 * np.arange(1, np.prod(shape) + 1) ** 1.1 + phase).reshape(shape).astype(np.float32)


def fill(tree, phase):
    """Parameters: every leaf a wave over the square root of its rows, LayerNorm scales around 1."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = []
    for index, (path, leaf) in enumerate(paths):
        name = jax.tree_util.keystr(path)
        values = wave(leaf.shape, phase + index)
        if 'kernel' in name:
            values = values * np.sqrt(2.0 / leaf.shape[-2])
        leaves.append(jnp.asarray(1 + 0.1 * values if 'scale' in name else values if 'kernel' in name else 0.1 * values))
    return jax.tree_util.tree_unflatten(structure, leaves)


def batch():
    """A batch as our samplers give it; row 2 ends truly at its first step, row 3 was cut after its first step."""
    masks, valid = np.ones((BATCH, CHUNK), np.float32), np.ones((BATCH, CHUNK), np.float32)
    masks[2, 0] = 0
    valid[3, 1] = 0
    return {
        'observations': wave((BATCH, CHUNK, OBSERVATIONS), 1),
        'next_observations': wave((BATCH, CHUNK, OBSERVATIONS), 2),
        'actions': wave((BATCH, CHUNK, ACTIONS), 3),
        'rewards': -1 + 0.5 * wave((BATCH, CHUNK), 4) * valid - (1 - valid) * -1,
        'masks': masks,
        'valid': valid,
    }


def noises():
    return {
        'next_actions': 1.5 * wave((1, BATCH, SIZE), 5),
        'clone': 1.5 * wave((BATCH, SIZE), 6),
        'times': 0.5 + 0.5 * wave((BATCH, 1), 7),
        'path': 1.5 * wave((BATCH, SIZE), 8),
        'path_steps': 1.5 * wave((STEPS - 1, BATCH, SIZE), 9),
    }
