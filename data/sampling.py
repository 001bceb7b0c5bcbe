"""Batches out of a dataset, inside the graph. Pure functions; the dataset is an argument of the jitted program, never a closure.

A batch is a dict of float32 arrays (observations keep their type and may be dicts), with leading axes [B] for transitions and [B, L] for
chunks and windows:

  observations, actions, rewards, masks, truncations, next_observations, valid
  previous_actions, previous_rewards   (windows only) what was done and received one step before; zeros at an episode's first step

No chunk and no window leaves its episode. Steps outside it have `valid` 0, reward 0, mask 1 and truncation 0, and repeat the observations
of the nearest step inside. In a chunk they repeat its action too; in a window, where they come before the episode, the actions are zero.

`need` is an `agents.types.Need`, of which kind, batch_size and length are read.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from data import types

NAMES = ('observations', 'actions', 'rewards', 'masks', 'truncations', 'next_observations')
KINDS = ('transitions', 'chunks', 'windows')


def sample(dataset: types.Dataset, need: Any, key: jax.Array) -> dict[str, Any]:
    """Draws need.batch_size transitions, or the chunks that start or the windows that end at them.

    Uniform with replacement over ALL transitions, so long episodes weigh by their length. Works under `vmap` over keys alone.

    Args:
      dataset: trajectories, N rows and T transitions.
      need: what to draw.
      key: consumed.

    Returns:
      A batch as described at the top of this file.

    Raises:
      ValueError: need.kind, need.batch_size or need.length makes no sense here.
    """
    check_need(need)
    if need.batch_size < 1:
        raise ValueError(f'batch_size is {need.batch_size}; sample at least 1, or use blocks for all of the data')
    picks = jax.random.randint(key, (need.batch_size,), 0, dataset.transition_rows.shape[0])
    return _gather(dataset, need, picks, jnp.ones((need.batch_size,), bool))


def blocks(dataset: types.Dataset, need: Any, block_size: int) -> dict[str, Any]:
    """All of the dataset once, in recorded order: a batch with leading axes [num_blocks, block_size] or [num_blocks, block_size, L].

    The last block is filled up with repetitions of the last transition that have `valid` 0. need.batch_size is not read.

    Raises:
      ValueError: need.kind, need.length or block_size makes no sense here.
    """
    check_need(need)
    count = dataset.transition_rows.shape[0]
    picks = block_picks(count, block_size)
    return fold_blocks(_gather(dataset, need, jnp.minimum(picks, count - 1), picks < count), block_size)


def _gather(dataset: types.Dataset, need: Any, picks: jax.Array, exists: jax.Array) -> dict[str, Any]:
    """The batch at transitions number `picks` [B]; where not `exists` [B], all of it is invalid."""
    here = take(dataset.transition_rows, picks)

    def read(name: str, rows: jax.Array) -> Any:
        if name == 'next_observations':
            return take(dataset.observations, rows + 1)
        return take(getattr(dataset, name), rows)

    if need.kind == 'transitions':
        return assemble(read, here, exists)
    if need.kind == 'chunks':
        offsets = jnp.arange(need.length, dtype=jnp.int32)[None, :]
        left = take(dataset.steps_left, here)[:, None]
        return assemble(read, here[:, None] + jnp.minimum(offsets, left - 1), (offsets < left) & exists[:, None])
    offsets = jnp.arange(need.length - 1, -1, -1, dtype=jnp.int32)[None, :]
    done = take(dataset.steps_done, here)[:, None]
    rows = here[:, None] - jnp.minimum(offsets, done)
    return assemble(read, rows, (offsets <= done) & exists[:, None], jnp.maximum(rows - 1, 0), (offsets < done) & exists[:, None])


def assemble(
    read: Callable[[str, jax.Array], Any],
    rows: jax.Array,
    valid: jax.Array,
    previous_rows: jax.Array | None = None,
    has_previous: jax.Array | None = None,
) -> dict[str, Any]:
    """Turns row numbers into a batch; shared with the replay.

    Args:
      read: (name, rows) -> that column (or dict of columns) at those rows.
      rows: int32 [...], the row of each step; invalid steps name the row that they repeat.
      valid: bool [...].
      previous_rows: int32 [...], for windows: the row of the step before each.
      has_previous: bool [...], whether that step belongs to the same episode.
    """
    batch = {name: read(name, rows) for name in NAMES}
    batch['rewards'] = jnp.where(valid, batch['rewards'], 0)
    batch['masks'] = jnp.where(valid, batch['masks'], 1)
    batch['truncations'] = jnp.where(valid, batch['truncations'], 0)
    batch['valid'] = valid.astype(jnp.float32)
    if previous_rows is not None and has_previous is not None:
        batch['actions'] = _where(valid, batch['actions'])
        batch['previous_actions'] = _where(has_previous, read('actions', previous_rows))
        batch['previous_rewards'] = _where(has_previous, read('rewards', previous_rows))
    return batch


def take(tree: Any, rows: jax.Array) -> Any:
    """Rows of every leaf, numpy leaves too. Row numbers are inside by construction, so clipping costs nothing and hides nothing."""
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode='clip'), tree)


def check_need(need: Any) -> None:
    """Raises ValueError where a stored source cannot serve `need`."""
    if need.kind not in KINDS:
        raise ValueError(f'stored data serve the kinds {", ".join(KINDS)}, not {need.kind!r}')
    if need.length < 1:
        raise ValueError(f'length is {need.length}; {need.kind} have at least 1 step')


def block_picks(count: int, block_size: int) -> jax.Array:
    """int32 0, 1, ... up to the first multiple of block_size that is not below count."""
    if block_size < 1:
        raise ValueError(f'block_size is {block_size}; use at least 1')
    return jnp.arange(-(-count // block_size) * block_size, dtype=jnp.int32)


def fold_blocks(batch: Any, block_size: int) -> Any:
    """[num_blocks * block_size, ...] -> [num_blocks, block_size, ...] in every leaf."""
    return jax.tree.map(lambda x: x.reshape((-1, block_size, *x.shape[1:])), batch)


def _where(condition: jax.Array, values: jax.Array) -> jax.Array:
    """`values` where the condition on their leading axes holds, else zeros."""
    return jnp.where(condition.reshape(condition.shape + (1,) * (values.ndim - condition.ndim)), values, 0)
