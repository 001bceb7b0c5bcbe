"""Builds a `Dataset` from recorded trajectories, and describes it: statistics, size, hash. Everything here is numpy on the host."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from data import types
from envs import types as env_types

ROWS_PER_BLOCK = 65_536  # bounds the float64 copies of `statistics`


def from_trajectories(
    observations: Any,
    actions: Any,
    rewards: Any,
    masks: Any,
    lengths: Any,
    extras: Mapping[str, Any] | None = None,
) -> types.Dataset:
    """Builds a dataset from flat arrays with one row per OBSERVATION, episode after episode.

    An episode of n transitions owns n + 1 consecutive rows. What the caller gives for the action, reward and mask of its final row is
    replaced by zero, zero and one, because nothing was done there. `truncations` is derived: 1 on the last transition of each episode
    whose mask there is not 0.

    Args:
      observations: [N, ...] or a dict of such; float64 becomes float32, other types are kept.
      actions: [N, A], stored as float32.
      rewards: [N], stored as float32.
      masks: [N], 0 at a true terminal and 1 elsewhere; stored as float32.
      lengths: [M] integers, number of TRANSITIONS of each episode; sum(lengths + 1) must be N.
      extras: further columns [N, ...].

    Returns:
      A Dataset of numpy arrays; put it on a device with `jax.device_put`.

    Raises:
      ValueError: arrays do not fit together, are not finite, or hold no transition.
    """
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or lengths.dtype.kind not in 'iu' or lengths.size == 0 or lengths.min() < 0:
        raise ValueError(f'lengths must be one non-negative integer per episode, got {lengths.dtype} of shape {lengths.shape}')
    lengths = lengths.astype(np.int64)
    num_rows = int(lengths.sum()) + len(lengths)
    if not lengths.any():
        raise ValueError('no episode has a transition; give at least two observations of one episode')
    if num_rows >= 2**31:
        raise ValueError(f'{num_rows} rows are more than int32 can index; split the data into several files')

    steps_done = np.arange(num_rows) - np.repeat(np.cumsum(lengths + 1) - lengths - 1, lengths + 1)
    steps_left = np.repeat(lengths, lengths + 1) - steps_done
    is_final = steps_left == 0

    observations = jax.tree_util.tree_map_with_path(
        lambda path, x: _column(f'observations{jax.tree_util.keystr(path)}', x, num_rows), observations
    )
    extras = {name: _column(name, x, num_rows) for name, x in (extras or {}).items()}
    actions = _column('actions', actions, num_rows).astype(np.float32)  # astype copies: the caller's arrays stay as they are
    rewards = _column('rewards', rewards, num_rows).astype(np.float32)
    masks = _column('masks', masks, num_rows).astype(np.float32)
    if actions.ndim != 2 or rewards.ndim != 1 or masks.ndim != 1:
        raise ValueError(
            f'actions must be [N, A], rewards [N] and masks [N], got shapes {actions.shape}, {rewards.shape} and {masks.shape}'
        )
    actions[is_final] = 0
    rewards[is_final] = 0
    masks[is_final] = 1
    for path, x in jax.tree_util.tree_leaves_with_path({'observations': observations, 'actions': actions, 'rewards': rewards}):
        if not np.isfinite(x).all():
            row = int(np.argwhere(~np.isfinite(x))[0][0])
            raise ValueError(f'{jax.tree_util.keystr(path)} holds NaN or Inf at row {row}; run scripts/check_data.py on the file')
    if not np.isin(masks, (0, 1)).all():
        raise ValueError('masks may only hold 0 (true terminal) and 1')

    truncations = np.zeros(num_rows, np.float32)
    truncations[(steps_left == 1) & (masks != 0)] = 1
    return types.Dataset(
        observations=observations,
        actions=actions,
        rewards=rewards,
        masks=masks,
        truncations=truncations,
        steps_left=steps_left.astype(np.int32),
        steps_done=steps_done.astype(np.int32),
        transition_rows=np.flatnonzero(steps_left > 0).astype(np.int32),
        episode_starts=np.flatnonzero(steps_done == 0).astype(np.int32),
        episode_lengths=lengths.astype(np.int32),
        extras=extras,
    )


def statistics(dataset: types.Dataset) -> Any:
    """Mean, standard deviation (of the population), minimum and maximum of each observation entry over ALL rows, final ones included.

    Returns:
      `envs.types.Statistics` of float32 arrays with the observation's shape, or a dict of them where observations are a dict. Sums are
      taken in float64.
    """
    return jax.tree.map(lambda x: _moments(np.asarray(x)), dataset.observations)


def nbytes(dataset: types.Dataset) -> int:
    """Bytes that the dataset takes on one device."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(dataset))


def dataset_hash(dataset: types.Dataset) -> str:
    """First 16 hexadecimal digits of the SHA-256 over each field's name, dtype, shape and bytes (in C order)."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(dataset):
        value = np.asarray(leaf)
        digest.update(f'{jax.tree_util.keystr(path)} {value.dtype.str} {value.shape}\n'.encode())
        digest.update(np.ascontiguousarray(value).data)
    return digest.hexdigest()[:16]


def _moments(values: np.ndarray) -> env_types.Statistics:
    mean = values.mean(axis=0, dtype=np.float64)
    squares = np.zeros_like(mean)
    for start in range(0, len(values), ROWS_PER_BLOCK):
        squares += np.square(values[start : start + ROWS_PER_BLOCK] - mean[None]).sum(axis=0)
    std = np.sqrt(squares / len(values))
    return env_types.Statistics(*(np.asarray(x, np.float32) for x in (mean, std, values.min(axis=0), values.max(axis=0))))


def _column(name: str, values: Any, num_rows: int) -> np.ndarray:
    values = np.asarray(values)
    if values.dtype.kind not in 'biuf':
        raise ValueError(f'{name} must be numbers, got {values.dtype}')
    if values.ndim == 0 or len(values) != num_rows:
        raise ValueError(f'{name} has shape {values.shape}, but lengths ask for sum(lengths + 1) = {num_rows} rows')
    return values.astype(np.float32) if values.dtype == np.float64 else values
