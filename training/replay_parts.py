"""Rows of a replay in append-only files, so that a checkpoint writes only what is new since the one before it.

A part is an .npz file for all environments of all members of one replay (S slots: members times environments):

    ends     uint32 [S], the replay's counter `added` behind the last row of the part
    counts   int32 [S], rows of each slot; the last one is row number `ends` of its slot
    others   one array [sum(counts), ...] per column, named as in the tree; slot after slot, oldest row first

Where a row lies in the ring follows from the pointer, the size and the counter of the checkpoint that lists the part: the row that was
added `age` rows before the newest one is at (pointer - 1 - age) % capacity. Nothing is pickled.
"""

import math
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from data.types import Replay

BLOCK_BYTES = 2**26  # most bytes that leave the device at once
BLOCK_ROWS = 2**14  # rows that are put into the ring at once


class Part(NamedTuple):
    """One file, and which rows it holds."""

    step: int  # of the checkpoint that it was written for
    entry: dict[str, Any]  # file, size and sha256, as checkpoints list them
    ends: np.ndarray  # uint32 [S]
    counts: np.ndarray  # int32 [S]


def find(tree: Any) -> dict[str, Replay]:
    """{path: replay} for every replay in a pytree."""
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, Replay))[0]
    return {jax.tree_util.keystr(path): node for path, node in leaves if isinstance(node, Replay)}


def columns(replay: Replay) -> dict[str, Any]:
    """{path: column [..., E, C, ...]}."""
    return {jax.tree_util.keystr(path): column for path, column in jax.tree_util.tree_flatten_with_path(replay.columns)[0]}


def plan(parts: Sequence[Part], replay: Replay) -> tuple[list[Part], np.ndarray]:
    """What the next checkpoint lists.

    Args:
      parts: those of the checkpoint before, oldest first; none for the first one.
      replay: as that checkpoint's, with rows added since; leaves [..., E, ...].

    Returns:
      (parts that hold a row which is still in the ring, int32 [S]: how many of each slot's newest rows are in no part).
    """
    size, added = (np.array(leaf).reshape(-1) for leaf in (replay.size, replay.added))
    fresh = np.minimum(added - parts[-1].ends, size).astype(np.int32) if parts else size
    kept = [part for part in parts if np.any((part.counts > 0) & (added - part.ends < size))]
    # Slots of unequal speed: what a fast one has overwritten long ago stays in the parts that a slow one still needs.
    places = len(size) * _capacity(replay)
    if sum(int(part.counts.sum()) for part in kept) + int(fresh.sum()) > 2 * places:
        return [], size
    return kept, fresh


def write(path: Path, replay: Replay, counts: np.ndarray) -> None:
    """Writes the newest `counts` [S] rows of a replay of JAX arrays as a new, durable file. Raises OSError."""
    with open(path, 'wb') as file:
        with zipfile.ZipFile(file, 'w') as archive:
            for name, values in (('ends', np.asarray(replay.added).reshape(-1)), ('counts', counts)):
                _write_member(archive, name, values.dtype, values.shape, [values])
            for name, column in columns(replay).items():
                shape = (int(counts.sum()), *column.shape[replay.pointer.ndim + 1 :])
                _write_member(archive, name, _stored_dtype(column.dtype), shape, _rows(column, replay, counts))
        file.flush()
        os.fsync(file.fileno())


def read(files: Sequence[Path], counters: Mapping[str, np.ndarray], leaves: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], list]:
    """Rebuilds the columns of a replay, bit for bit; places that were never written are zero.

    Args:
      files: the parts that its checkpoint lists, oldest first.
      counters: pointer, size and added of the checkpoint, [..., E].
      leaves: {path: shape [..., E, C, ...] and dtype} of the columns.

    Returns:
      ({path: column}, [(ends, counts) of each file]).

    Raises:
      OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile: a file is not what `write` made.
      ValueError: the rows of the ring are not all there.
    """
    pointer, size, added = (counters[name].reshape(-1) for name in ('pointer', 'size', 'added'))
    lead = counters['pointer'].ndim
    rings: dict[str, Any] = {name: np.zeros((len(size), *leaf.shape[lead:]), leaf.dtype) for name, leaf in leaves.items()}
    capacity = next(iter(rings.values())).shape[1]
    placed = np.zeros(len(size), np.int64)  # newest rows of each slot that are in their place
    spans = []
    for path in reversed(files):
        with np.load(path, allow_pickle=False) as part:
            ends, counts = part['ends'], part['counts']
            spans.insert(0, (ends, counts))
            take = np.minimum(counts, size - placed)
            if np.any((take > 0) & (added - ends != placed)):
                raise ValueError(f'{path.name} does not continue the next part')
            slots, steps = _locate(take, np.arange(take.sum()))
            rows = (np.cumsum(counts) - take)[slots] + steps
            places = (pointer[slots].astype(np.int64) - placed[slots] - take[slots] + steps) % capacity
            for name, ring in rings.items():
                stored = part[name]
                if stored.dtype != _stored_dtype(ring.dtype) or stored.shape != (counts.sum(), *ring.shape[2:]):
                    raise ValueError(f'{path.name} holds another {name}')
                for start in range(0, len(rows), BLOCK_ROWS):
                    block = slice(start, start + BLOCK_ROWS)
                    ring[slots[block], places[block]] = stored[rows[block]].view(ring.dtype)
            placed += take
    if np.any(placed < size):
        raise ValueError('its parts lack rows of the replay')
    return {name: ring.reshape(leaves[name].shape) for name, ring in rings.items()}, spans


def _capacity(replay: Replay) -> int:
    return jax.tree.leaves(replay.columns)[0].shape[replay.pointer.ndim]


def _locate(counts: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slot, and row within the slot, of rows that are numbered slot after slot."""
    ends = np.cumsum(counts, dtype=np.int64)
    slots = np.searchsorted(ends, numbers, side='right')
    return slots, numbers - (ends - counts)[slots]


@jax.jit
def _take(column: jax.Array, index: tuple) -> jax.Array:
    return column.at[index].get(mode='clip')


def _rows(column: jax.Array, replay: Replay, counts: np.ndarray) -> Iterator[np.ndarray]:
    """The newest `counts` [S] rows of a column, in blocks of one size, so that they take little memory and one program makes them all."""
    lead = replay.pointer.ndim
    pointer = np.asarray(replay.pointer).reshape(-1).astype(np.int64)
    row_bytes = math.prod(column.shape[lead + 1 :]) * column.dtype.itemsize
    first = 0
    for shard in _shards(column):  # each for itself: a gather across devices would add up their answers, and -0.0 + 0.0 is 0.0
        own = slice(first, first + math.prod(shard.shape[:lead]))
        first = own.stop
        total = int(counts[own].sum())
        block = min(max(1, BLOCK_BYTES // max(1, row_bytes)), 1 << total.bit_length())
        for start in range(0, total, block):
            numbers = np.minimum(np.arange(start, start + block), total - 1)
            slots, steps = _locate(counts[own], numbers)
            places = (pointer[own][slots] - counts[own][slots] + steps) % shard.shape[lead]
            rows = np.asarray(_take(shard, (*np.unravel_index(slots, shard.shape[:lead]), places)))
            yield rows[: total - start]


def _shards(column: jax.Array) -> list[jax.Array]:
    """The pieces of an array on each device, in order. They must be divided along the first axis, if at all."""
    pieces = {shard.index[0].start or 0: shard.data for shard in column.addressable_shards}
    if any(piece.shape[1:] != column.shape[1:] for piece in pieces.values()):
        raise ValueError('a replay may be divided over devices along its first axis only')
    return [pieces[start] for start in sorted(pieces)]


def _stored_dtype(dtype: Any) -> np.dtype:
    """What numpy files call a type: bfloat16 and the like, which they don't know, are kept as unsigned integers of that size."""
    dtype = np.dtype(dtype)
    return dtype if dtype.kind in 'biuf' else np.dtype(f'u{dtype.itemsize}')


def _write_member(archive: zipfile.ZipFile, name: str, dtype: np.dtype, shape: tuple, blocks: Any) -> None:
    with archive.open(f'{name}.npy', 'w', force_zip64=True) as file:
        header = {'descr': np.lib.format.dtype_to_descr(dtype), 'fortran_order': False, 'shape': shape}
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(block.tobytes())
