"""Whether a run fits: its bytes on the device and in the run folder, known before anything is allocated or written."""

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from training.loop import Carry

MEMINFO = Path('/proc/meminfo')


class Size(NamedTuple):
    """Bytes."""

    replays: int  # on the device
    state: int  # everything else that a checkpoint holds, but for what host environments add: kilobytes
    parts: int  # most that the parts of the replays will take, for all checkpoints together


def measure(carry: Carry, acted: Mapping[str, tuple[int, int]], keep: int) -> Size:
    """The size of a run.

    Args:
      carry: arrays or their shapes.
      acted: source of each replay -> most rows that each environment adds (in the whole run, between two checkpoints).
      keep: checkpoints kept.
    """
    parts = 0
    for source, replay in carry.replays.items():
        capacity = jax.tree.leaves(replay.columns)[0].shape[replay.pointer.ndim]
        total, interval = acted[source]
        # The oldest of keep + 1 checkpoints, while the newest is written, needs a full ring and one part that begins before it.
        rows = min(total, capacity + (keep + 1) * min(interval, capacity))
        parts += -(-_nbytes(replay.columns) * rows // capacity)
    replays = sum(_nbytes(replay.columns) for replay in carry.replays.values())
    return Size(replays, _nbytes(carry) - replays, parts)


def check_memory(size: Size, devices: Sequence[Any], capacity: int) -> None:
    """Raises ValueError (one line) if replays and state do not fit in the free memory of the devices, where it is known."""
    free, needed = free_memory(devices), size.replays + size.state
    if free is not None and needed > free:
        raise ValueError(f'replay and state take {spell(needed)}, but {spell(free)} of memory are free: lower --replay_capacity={capacity}')


def check_disk(size: Size, out: str | os.PathLike, keep: int, capacity: int) -> None:
    """Raises ValueError (one line) if the checkpoints do not fit on the disk of a run folder, which need not exist yet.

    While one is written, there are keep + 1 of them. What the checkpoints of this folder take already counts as free.
    """
    folder = Path(os.path.abspath(Path(out).expanduser()))
    place = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    free = shutil.disk_usage(place).free + (_folder_bytes(folder / 'checkpoints') if place == folder else 0)
    needed = (keep + 1) * size.state + size.parts
    if needed > free:
        flags = f'--replay_capacity={capacity} or --checkpoint_keep={keep}' if size.parts else f'--checkpoint_keep={keep}'
        raise ValueError(
            f'the checkpoints take up to {spell(needed)}, but {folder} has room for {spell(free)}: lower {flags}, or choose another --out'
        )


def free_memory(devices: Sequence[Any]) -> int | None:
    """Bytes that are free on all devices together, each taking an equal share; None if nobody knows."""
    if devices[0].platform == 'cpu':  # they share the memory of the machine
        return _available_memory()
    stats = [device.memory_stats() or {} for device in devices]
    if any('bytes_limit' not in each for each in stats):
        return None
    return len(devices) * min(each['bytes_limit'] - each.get('bytes_in_use', 0) for each in stats)


def spell(size: int) -> str:
    """1234567 -> '1.2 MB'."""
    value = float(size)
    for unit in ('B', 'kB', 'MB', 'GB', 'TB'):
        if value < 999.95 or unit == 'TB':
            break
        value /= 1000
    return f'{size} B' if unit == 'B' else f'{value:.1f} {unit}'


def _nbytes(tree: Any) -> int:
    def data(leaf: Any) -> Any:
        return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(lambda: jax.tree.map(data, tree))))


def _folder_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # another process may delete it just now
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _available_memory() -> int | None:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith('MemAvailable:')), None)
