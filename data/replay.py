"""A ring buffer of transitions for each of E environments. Pure functions; every one of them can be vmapped over seeds.

An environment's transitions are kept in the order in which they were made, so chunks and windows can be cut from them. An episode ends
where its mask is 0 or its truncation is 1; the newest and the oldest stored transition are borders too, and change no stored value.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from data import sampling, types
from envs import types as env_types


def init(spec: env_types.Spec, capacity: int, num_envs: int, extras_example: Mapping[str, Any] | None = None) -> types.Replay:
    """An empty replay.

    Args:
      spec: shapes and types of one observation and one action.
      capacity: transitions kept per environment (C).
      num_envs: environments (E).
      extras_example: arrays (or shapes with a dtype) of ONE step; they are stored and sampled under 'extras'.

    Raises:
      ValueError: capacity or num_envs is below 1, or int32 cannot number the rows.
    """
    if capacity < 1 or num_envs < 1:
        raise ValueError(f'a replay needs capacity and num_envs of at least 1, got {capacity} and {num_envs}')
    if capacity * num_envs >= 2**31:
        raise ValueError(f'{num_envs} x {capacity} transitions are more than int32 can index; use a smaller capacity')

    def column(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.zeros((num_envs, capacity, *shape), dtype)

    def observations() -> Any:
        return jax.tree.map(lambda x: column(x.shape, x.dtype), spec.observations, is_leaf=lambda x: isinstance(x, env_types.ArraySpec))

    columns = {
        'observations': observations(),
        'actions': column(spec.actions.shape, spec.actions.dtype),
        'rewards': column((), jnp.float32),
        'masks': column((), jnp.float32),
        'truncations': column((), jnp.float32),
        'next_observations': observations(),
        'extras': {name: column(x.shape, x.dtype) for name, x in (extras_example or {}).items()},
    }
    return types.Replay(columns, *(jnp.zeros((num_envs,), dtype) for dtype in (jnp.int32, jnp.int32, jnp.uint32)))


def nbytes(spec: env_types.Spec, capacity: int, num_envs: int, extras_example: Mapping[str, Any] | None = None) -> int:
    """Bytes that `init` with the same arguments would take; allocates nothing."""
    shapes = jax.eval_shape(lambda: init(spec, capacity, num_envs, extras_example))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def add(replay: types.Replay, steps: Mapping[str, Any]) -> types.Replay:
    """Appends fresh transitions, overwriting the oldest.

    Args:
      replay: what to append to.
      steps: leaves [E, T, ...] under the names of the replay's columns, and `valid` [E, T]. Rows with valid 0 are not stored. Other
        entries are ignored. T must not exceed the capacity.

    Raises:
      ValueError: a column is missing, or has another shape than [E, T, ...].
    """
    extras = {name: steps.get('extras', {}).get(name) for name in replay.columns['extras']}
    given = {name: steps.get(name) for name in replay.columns if name != 'extras'}
    missing = [name for name, x in {**given, **extras, 'valid': steps.get('valid')}.items() if x is None]
    if missing:
        raise ValueError(f'steps lack {", ".join(missing)}')
    num_envs, capacity = replay.columns['rewards'].shape
    num_steps = steps['rewards'].shape[1]
    if num_steps > capacity:
        raise ValueError(f'{num_steps} steps per environment do not fit a replay of {capacity}; raise its capacity')

    valid = jnp.asarray(steps['valid'], bool)
    count = jnp.cumsum(valid, axis=1, dtype=jnp.int32)
    slots = jnp.arange(num_envs, dtype=jnp.int32)[:, None]
    # Row `capacity` does not exist, so a scatter in mode 'drop' leaves out what goes there. No row is written twice, as T <= capacity.
    rows = jnp.where(valid, (replay.pointer[:, None] + count - 1) % capacity, capacity)

    def write(column: jax.Array, values: Any) -> jax.Array:
        if values.shape != (num_envs, num_steps, *column.shape[2:]):
            raise ValueError(f'a replay column of {num_envs} x {num_steps} steps of {column.shape[2:]} was given {values.shape}')
        return column.at[slots, rows].set(jnp.asarray(values, column.dtype), mode='drop')

    return types.Replay(
        columns=jax.tree.map(write, dict(replay.columns), {**given, 'extras': extras}),
        pointer=(replay.pointer + count[:, -1]) % capacity,
        size=jnp.minimum(replay.size + count[:, -1], capacity),
        added=replay.added + count[:, -1].astype(jnp.uint32),
    )


def sample(replay: types.Replay, need: Any, key: jax.Array) -> dict[str, Any]:
    """Draws a batch as `data.sampling.sample` does, with 'extras' beside it where the replay stores any.

    Uniform with replacement over all stored transitions of all environments. An empty replay yields a batch with `valid` 0 throughout.
    The step before the oldest stored one is forgotten, so a window that begins there has zeros as its first previous action and reward.

    Args:
      replay: what to draw from.
      need: kind, batch_size and length (`agents.types.Need`).
      key: consumed.

    Raises:
      ValueError: need.kind, need.batch_size or need.length makes no sense here.
    """
    sampling.check_need(need)
    if need.batch_size < 1:
        raise ValueError(f'batch_size is {need.batch_size}; sample at least 1, or use blocks for all of the data')
    ends = jnp.cumsum(replay.size, dtype=jnp.int32)
    picks = jax.random.randint(key, (need.batch_size,), 0, ends[-1])
    slots = jnp.minimum(jnp.searchsorted(ends, picks, side='right'), len(ends) - 1).astype(jnp.int32)
    return _gather(replay, need, slots, picks - (ends - replay.size)[slots])


def blocks(replay: types.Replay, need: Any, block_size: int) -> dict[str, Any]:
    """All E * C places of the replay once, environment by environment, oldest first, as [num_blocks, block_size, ...].

    Places that hold nothing have `valid` 0, as have the repetitions that fill the last block. need.batch_size is not read.
    """
    sampling.check_need(need)
    num_envs, capacity = replay.columns['rewards'].shape
    picks = sampling.block_picks(num_envs * capacity, block_size)
    exists = picks < num_envs * capacity
    slots = jnp.where(exists, picks // capacity, num_envs - 1)
    return sampling.fold_blocks(_gather(replay, need, slots, jnp.where(exists, picks % capacity, capacity)), block_size)


def _gather(replay: types.Replay, need: Any, slots: jax.Array, ages: jax.Array) -> dict[str, Any]:
    """The batch at the transitions number `ages` [B] (0: the oldest) of environments `slots` [B]; invalid where nothing is stored."""
    num_envs, capacity = replay.columns['rewards'].shape
    flat = jax.tree.map(lambda x: x.reshape((num_envs * capacity, *x.shape[2:])), dict(replay.columns))
    size = replay.size[slots]
    oldest = replay.pointer[slots] - size

    def read(name: str, rows: jax.Array) -> Any:
        return sampling.take(flat[name], rows)

    def finish(rows: jax.Array, *details: jax.Array) -> dict[str, Any]:
        batch = sampling.assemble(read, rows, *details)
        return {**batch, 'extras': read('extras', rows)} if flat['extras'] else batch

    def row_of(ages: jax.Array) -> jax.Array:  # [B, L] -> [B, L]
        return slots[:, None] * capacity + (oldest[:, None] + ages) % capacity

    def ended(ages: jax.Array) -> jax.Array:
        rows = row_of(ages)
        return (read('masks', rows) == 0) | (read('truncations', rows) == 1)

    def inside(steps: jax.Array, borders: jax.Array) -> jax.Array:
        """Which of `steps` (ages [B, L], away from the first) are stored, with no border on the way to them."""
        return (jnp.cumsum(borders, axis=1, dtype=jnp.int32) == 0) & (steps >= 0) & (steps < size[:, None]) & (ages < size)[:, None]

    if need.kind == 'transitions':
        return finish(row_of(ages[:, None])[:, 0], ages < size)
    if need.kind == 'chunks':
        offsets = jnp.arange(need.length, dtype=jnp.int32)[None, :]
        steps = ages[:, None] + offsets
        valid = inside(steps, jnp.pad(ended(steps)[:, :-1], ((0, 0), (1, 0))))  # the border is what the step before marked
        last = jnp.maximum(valid.sum(axis=1, dtype=jnp.int32) - 1, 0)[:, None]
        return finish(row_of(ages[:, None] + jnp.minimum(offsets, last)), valid)
    # Backward in time, one step further than the window: that one is the previous action of its first step.
    offsets = jnp.arange(need.length + 1, dtype=jnp.int32)[None, :]
    steps = ages[:, None] - offsets
    walked = inside(steps, ended(steps).at[:, 0].set(False))  # the border is what the step itself marked, but the walk begins at one
    valid, has_previous = walked[:, :-1], walked[:, 1:]
    first = jnp.maximum(valid.sum(axis=1, dtype=jnp.int32) - 1, 0)[:, None]
    rows = row_of(ages[:, None] - jnp.minimum(offsets[:, :-1], first))
    return finish(*(jnp.flip(x, axis=1) for x in (rows, valid, row_of(steps[:, 1:]), has_previous)))
