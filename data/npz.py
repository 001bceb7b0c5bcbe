"""Reads, writes and finds OGBench's npz files. numpy only: nothing is unpickled, nothing is extracted to disk.

Layouts (https://github.com/seohongpark/ogbench, `ogbench/utils.py`), all with one flat axis over time:

  raw      what OGBench distributes, one row per OBSERVATION. `terminals` is True on the last row of each recorded trajectory: that row
           is the final observation and its action leads nowhere.
  compact  the same rows, with `valids` 0 on final rows; `terminals` is 1 on the final row and on the one before.
  regular  one row per TRANSITION with `next_observations`; `terminals` is 1 on the last transition.

In all of them `terminals` marks where a recording was cut, NOT a true terminal: never use it as a mask of the bootstrap.
"""

import http.client
import os
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tqdm

from data.archive import AGAIN, COLUMNS, DataError, expected, fault, float32, open_archive, read_columns

__all__ = ['DataError', 'Recording', 'check_columns', 'download', 'file_name', 'find', 'load', 'non_finite', 'read', 'write']

URL = 'https://rail.eecs.berkeley.edu/datasets/ogbench'
DIRECTORY = '~/.ogbench/data'  # where the ogbench package keeps its files
REQUIRED = {
    'raw': ('observations', 'actions', 'terminals'),
    'compact': ('observations', 'actions', 'terminals', 'valids'),
    'regular': ('observations', 'actions', 'terminals', 'next_observations'),
}
OPTIONAL = ('rewards', 'masks', 'qpos', 'qvel', 'button_states')


class Recording(NamedTuple):
    """What `load` finds in a file; `read` returns only its arrays."""

    arrays: dict[str, np.ndarray]  # columns, one row per observation, and `lengths`
    layout: str  # raw | compact | regular
    terminated: bool  # whether the file marks its last row as the end of a trajectory


def read(path: str | os.PathLike, layout: str = 'auto') -> dict[str, np.ndarray]:
    """Reads a file into flat arrays with one row per OBSERVATION.

    Args:
      path: the file.
      layout: 'raw', 'compact', 'regular', or 'auto' to tell by the names of the columns.

    Returns:
      observations float32 (or uint8) [N, ...], actions float32 [N, A], lengths int64 [M] (TRANSITIONS of each trajectory, so that
      sum(lengths + 1) is N), and where the file has them qpos, qvel, button_states (types kept), rewards, masks (float32 [N]).
      The action of a final row is what the file says. The regular layout has no final rows beside their observations: there actions
      and rewards are 0, masks 1, qpos and qvel NaN, button_states -1. A last trajectory without an end mark ends with the file.

    Raises:
      DataError: anything else than a sound file with finite numbers.
    """
    recording = load(path, layout)
    _check_finite(path, recording)
    return recording.arrays


def load(path: str | os.PathLike, layout: str = 'auto') -> Recording:
    """As `read`, but lets non-finite numbers pass (the validator counts them)."""
    path = Path(path).expanduser()
    columns = read_columns(path)
    if layout == 'auto':
        layout = 'regular' if 'next_observations' in columns else 'compact' if 'valids' in columns else 'raw'
    if layout not in REQUIRED:
        raise ValueError(f'unknown layout {layout!r}; known: auto, {", ".join(REQUIRED)}')
    missing = [name for name in REQUIRED[layout] if name not in columns]
    if missing:
        has = ', '.join(columns) or 'none of the known columns'
        raise fault(path, f'lacks {", ".join(missing)} (it has {has}); write the file in the {layout} OGBench layout')
    columns = {name: columns[name] for name in (*REQUIRED[layout], *OPTIONAL) if name in columns}
    check_columns(path, columns)

    ends = columns.pop('terminals') != 0
    if layout == 'compact':
        valids = columns.pop('valids') != 0
        if not ends[~valids].all():
            raise fault(path, f'row {np.flatnonzero(~valids & ~ends)[0]} has valids 0 but terminals 0; {AGAIN}')
        ends = ~valids
    terminated = bool(ends[-1])
    ends[-1] = True
    rows_per_trajectory = np.diff(np.flatnonzero(ends), prepend=-1)
    if layout == 'regular':
        columns = _with_final_rows(path, columns, ends)
        lengths = rows_per_trajectory
    else:
        lengths = rows_per_trajectory - 1
    if not lengths.any():
        raise fault(path, f'holds no transition, every row ends a trajectory; {AGAIN}')
    return Recording({**columns, 'lengths': lengths}, layout, terminated)


def write(
    path: str | os.PathLike,
    observations: Any,
    actions: Any,
    lengths: Any,
    qpos: Any,
    qvel: Any,
    button_states: Any = None,
) -> None:
    """Writes a file in the raw layout, with OGBench's types, that `ogbench.make_env_and_datasets(name, dataset_path=path)` reads.

    That function also asks for NAME-val.npz beside NAME.npz. The file appears whole or not at all.

    Args:
      path: ends in .npz; replaced if it exists.
      observations: [N, ...], one row per OBSERVATION; uint8 is kept, other types become float32.
      actions: [N, A]; float32.
      lengths: [M] integers, TRANSITIONS of each trajectory; sum(lengths + 1) must be N.
      qpos: [N, P], state of the simulator at each observation; float32.
      qvel: [N, V]; float32.
      button_states: int64 [N, K] for scenes and puzzles.

    Raises:
      DataError: `read` would refuse the result; then nothing is written.
    """
    path = Path(path).expanduser()
    if path.suffix != '.npz':
        raise fault(path, 'the name of a data file must end in .npz')
    observations = np.asarray(observations)
    columns = {
        'observations': observations if observations.dtype == np.uint8 else float32(observations),
        'actions': float32(actions),
        'terminals': np.zeros(len(observations), bool),
        'qpos': float32(qpos),
        'qvel': float32(qvel),
    }
    if button_states is not None:
        columns['button_states'] = np.asarray(button_states, np.int64)
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or lengths.dtype.kind not in 'iu' or (lengths < 0).any() or (lengths + 1).sum() != len(observations):
        raise fault(path, f'not written: lengths must be non-negative integers with sum(lengths + 1) = {len(observations)}')
    columns['terminals'][np.cumsum(lengths + 1) - 1] = True
    check_columns(path, columns)
    _check_finite(path, Recording(columns, 'raw', True))
    if not lengths.any():
        raise fault(path, 'not written: no trajectory has a transition')

    temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
    try:
        with open(temporary, 'wb') as file:
            np.savez_compressed(file, **columns)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise fault(path, f'cannot be written ({error.strerror or error}); choose another place') from error
    finally:
        temporary.unlink(missing_ok=True)


def find(name_or_path: str | os.PathLike, directory: str | os.PathLike = DIRECTORY) -> list[Path]:
    """The files that a user means by `--dataset=FILE|DIR|NAME`.

    Args:
      name_or_path: a file; a folder, of which all npz files are taken in alphabetical order, without those that end in -val.npz; or the
        name of an OGBench dataset or single-task environment.
      directory: where the files of names are looked for.

    Raises:
      DataError: there is no such file.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.glob('*.npz') if not file.name.startswith('.') and not file.name.endswith('-val.npz'))
        if not files:
            raise fault(path, 'this folder holds no npz file (those that end in -val.npz do not count)')
        return files
    if path.exists():
        return [path]
    if path.suffix == '.npz' or not _is_name(name_or_path):
        raise fault(path, 'no such file or folder; check the path')
    file = Path(directory).expanduser() / file_name(name_or_path)
    if not file.is_file():
        raise fault(file, 'no such file; give --download to fetch it, or make it with scripts/generate.py')
    return [file]


def file_name(name: str | os.PathLike) -> str:
    """File name of an OGBench dataset; tasks of one dataset share its file ('cube-single-play-singletask-task1-v0').

    Raises:
      ValueError: this cannot be the name of an OGBench dataset.
    """
    if not _is_name(name):
        raise ValueError(f'{str(name)!r} is no name of an OGBench dataset; they look like cube-single-play-v0')
    parts = str(name).removeprefix('ogbench/').split('-')
    return '-'.join(part for part in parts if not re.fullmatch(r'singletask|oraclerep|task\d+', part)) + '.npz'


def download(name: str, directory: str | os.PathLike = DIRECTORY, progress: bool = True, timeout: float = 30.0) -> Path:
    """Fetches the file of an OGBench dataset, unless it is there already. Called only where the user asked for a download.

    Args:
      name: dataset or single-task environment; with '-val' at the end, the validation file.
      directory: folder of the file; made if missing. The file appears there whole or not at all.
      progress: show a progress bar (on a terminal).
      timeout: seconds without a byte after which the server counts as stalled.

    Returns:
      The path of the file.

    Raises:
      DataError: it could not be fetched.
    """
    path = Path(directory).expanduser() / file_name(name)
    if path.is_file():
        return path
    url = f'{URL}/{path.name}'
    temporary = path.with_name(f'.{path.name}.{os.getpid()}.part')
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(url, timeout=timeout) as response, open(temporary, 'wb') as file:
            size = response.headers.get('Content-Length')
            size = int(size) if size and size.isdigit() else None
            visible = progress and sys.stderr.isatty()
            with tqdm.tqdm(total=size, unit='B', unit_scale=True, desc=path.name, disable=not visible) as bar:
                while block := response.read(2**20):
                    file.write(block)
                    bar.update(len(block))
            received = file.tell()
        if size is not None and received != size:
            raise fault(url, f'the download ended after {received} of {size} bytes; try again')
        open_archive(temporary, url).close()
        os.replace(temporary, path)
    except urllib.error.HTTPError as error:
        raise fault(url, f'the server answers {error.code} {error.reason}; check the name of the dataset') from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, 'reason', None) or error
        raise fault(url, f'the download failed ({reason}); try again, or put the file into {path.parent} yourself') from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def check_columns(path: Any, columns: dict[str, np.ndarray]) -> None:
    """Raises DataError unless the columns have rows, equally many of them, and flags hold only 0 and 1."""
    for name, values in columns.items():
        axes, kinds = COLUMNS[name]
        wrong_axes = values.ndim < axes if axes == 2 and 'observations' in name else values.ndim != axes
        if wrong_axes or values.dtype.kind not in kinds or ('observations' in name and values.dtype.kind == 'u' and values.itemsize > 1):
            raise fault(path, f'{name} must be {expected(name)}, not {values.dtype} of shape {values.shape}; {AGAIN}')
        if values.size == 0:
            raise fault(path, f'{name} is empty (shape {values.shape}); {AGAIN}')
        if name in ('terminals', 'valids') and not np.isin(values, (0, 1)).all():
            row = np.flatnonzero(~np.isin(values, (0, 1)))[0]
            raise fault(path, f'{name} may hold only 0 and 1, but row {row} is {values[row]}; {AGAIN}')
    rows = {name: len(values) for name, values in columns.items()}
    if len(set(rows.values())) > 1:
        raise fault(path, f'columns differ in length ({", ".join(f"{name} {n}" for name, n in rows.items())}); {AGAIN}')


def non_finite(recording: Recording, name: str) -> np.ndarray:
    """bool, like the column: where it holds NaN or Inf, without the final rows that the regular layout does not record."""
    values = recording.arrays[name]
    bad = ~np.isfinite(values)
    if recording.layout == 'regular' and name in ('qpos', 'qvel'):
        bad[np.cumsum(recording.arrays['lengths'] + 1) - 1] = False
    return bad


def _check_finite(path: Path | str | os.PathLike, recording: Recording) -> None:
    for name, values in recording.arrays.items():
        bad = non_finite(recording, name)
        if bad.any():
            row, *column = (int(i) for i in np.unravel_index(np.argmax(bad), bad.shape))
            place = f'row {row}' + (f', column {", ".join(map(str, column))}' if column else '')
            raise fault(path, f'{name} holds {values[(row, *column)]} at {place}; drop that trajectory or {AGAIN}')


def _with_final_rows(path: Path, columns: dict[str, np.ndarray], ends: np.ndarray) -> dict[str, np.ndarray]:
    """From one row per transition to one per observation; `ends` [T] marks last transitions."""
    observations, following = columns['observations'], columns.pop('next_observations')
    if following.shape != observations.shape or following.dtype != observations.dtype:
        raise fault(path, f'next_observations and observations differ in type or shape ({following.shape}, {observations.shape}); {AGAIN}')
    same = (observations[1:] == following[:-1]) | ((observations[1:] != observations[1:]) & (following[:-1] != following[:-1]))
    breaks = np.flatnonzero(~same.reshape(len(same), -1).all(axis=1) & ~ends[:-1])
    if breaks.size:
        raise fault(path, f'next_observations of row {breaks[0]} are not observations of row {breaks[0] + 1}; mark its end in terminals')
    rows = np.arange(len(ends)) + np.cumsum(ends) - ends  # each final row before shifts what follows
    finals = rows[ends] + 1
    fill = {'masks': 1, 'qpos': np.nan, 'qvel': np.nan, 'button_states': -1}
    result = {}
    for name, values in columns.items():
        dtype = np.dtype(np.int64) if name == 'button_states' else values.dtype
        result[name] = np.full((len(ends) + len(finals), *values.shape[1:]), fill.get(name, 0), dtype)
        result[name][rows] = values
    result['observations'][finals] = following[ends]
    return result


def _is_name(name: str | os.PathLike) -> bool:
    return re.fullmatch(r'(ogbench/)?[a-z0-9]+(-[a-z0-9]+)*-v\d+(-val)?', str(name)) is not None
