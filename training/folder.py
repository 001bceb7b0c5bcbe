"""The run folder: who may write in it, what config it belongs to, and small files written so that a kill never leaves half of one.

A run folder holds `config.json` (its mark: nothing is ever deleted from a folder without one), `lock`, `metrics.csv`, `checkpoints/` and
what else OWNED names. It may be moved or copied when no process works on it.
"""

import fcntl
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 'tether run 1'  # stored in config.json under 'format'
ABSENT = '(absent)'  # stands for a missing key in a comparison of configs

# Everything that a run makes, as patterns below its folder: `overwrite` deletes these and nothing else.
OWNED = (
    'metrics.csv',
    'metrics.csv.tmp',
    'metrics.discarded.csv',
    'metrics.discarded.csv.tmp',
    'summary.json',
    'summary.json.tmp',
    'curve.png',
    'checkpoints/step_[0-9]*',
    'events*/**/events.out.tfevents.*',
    'video/*.mp4',
    'video/*.gif',
    'config.json.tmp',
    'config.json',  # last: while it is there, an interrupted deletion can be repeated
)
PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'mujoco', 'ogbench')

_held: set[tuple[int, int]] = set()  # device and inode of the lock files that this process holds


def to_stderr(message: str) -> None:
    """Prints one line where it does not mix with results."""
    print(message, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------------- small files


def write_text(path: Path, text: str) -> None:
    """Replaces a file in one step: readers see the old text or the new one, also after a kill or a power cut. Raises OSError."""
    path = Path(path)
    temporary = path.with_name(path.name + '.tmp')
    try:
        with open(temporary, 'w', encoding='utf-8', newline='') as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable (a rename is safe only after this)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_json(value: Any) -> str:
    """JSON text of nested dicts, sequences, numbers, arrays (numpy or JAX) and paths.

    JSON has no NaN or infinity: NaN becomes null, infinities the strings 'inf' and '-inf', which `float` reads back.

    Raises:
      ValueError: an object of another type.
    """
    return json.dumps(_plain(value), indent=2, allow_nan=False) + '\n'


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if np.isfinite(value):
            return float(value)
        return None if np.isnan(value) else ('inf' if value > 0 else '-inf')
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, '__array__'):
        array = np.asarray(value)
        if array.dtype.kind in 'biufU':
            return _plain(array.tolist())
        if np.can_cast(array.dtype, np.float32):  # bfloat16 and other short floats that numpy itself does not know
            return _plain(array.astype(np.float32).tolist())
    raise ValueError(f'cannot write a {type(value).__name__} as JSON: turn it into numbers, strings, lists or dicts first')


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file atomically; see `to_json` for what it takes. Raises ValueError with one line when it can't."""
    text = to_json(value)
    try:
        write_text(Path(path), text)
    except OSError as error:
        raise ValueError(f'cannot write {path}: {_reason(error)}') from error


def read_json(path: Path) -> Any:
    """Reads a JSON file. Raises ValueError with one line when it is missing, unreadable or damaged."""
    try:
        return json.loads(Path(path).read_bytes().decode('utf-8'))
    except OSError as error:
        raise ValueError(f'cannot read {path}: {_reason(error)}') from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f'{path} is damaged or not JSON ({error}): restore it from a copy or delete it') from error


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


# ----------------------------------------------------------------------------------------------------------------- run folders


class RunFolder:
    """An opened run folder. Holds the lock until `close` (or the end of a `with` block, or the death of the process).

    Attributes:
      path: absolute folder.
      config: the config as it stands in config.json (JSON types).
      resumed: True if the folder belonged to an earlier start of the same run.
      changed: {dotted name: (stored, given)} of the run-control fields that this resume changes.
    """

    def __init__(self, path: Path, config: dict, resumed: bool, changed: dict[str, tuple], descriptor: int):
        self.path = path
        self.config = config
        self.resumed = resumed
        self.changed = changed
        self._descriptor: int | None = descriptor

    def close(self) -> None:
        """Releases the lock. May be called twice."""
        if self._descriptor is not None:
            _unlock(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> 'RunFolder':
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def open_run(
    path: str | os.PathLike,
    config: Mapping[str, Any],
    resume: bool = False,
    overwrite: bool = False,
    mutable: set[str] | frozenset[str] = frozenset(),
    announce: Callable[[str], None] = to_stderr,
) -> RunFolder:
    """Creates, continues or clears a run folder, locks it and writes config.json.

    `resume` on a folder that does not exist yet starts a new run, so that one command serves every attempt of a job.

    Args:
      path: the folder; parents are created, `~` is expanded.
      config: nested dict of what defines the run, see `to_json` for the types.
      resume: continue the run of this folder; the stored config must equal `config` except below the keys in `mutable`.
      overwrite: delete what the old run in this folder made (OWNED) and start anew; foreign files stay.
      mutable: first components of the dotted names that may change on resume (run control).
      announce: takes one line about what changed.

    Raises:
      ValueError: one line that says what to do. Nothing has been changed in an existing folder then.
    """
    if resume and overwrite:
        raise ValueError('choose one of --resume (continue the run) and --overwrite (delete it and start anew)')
    folder = _checked_path(path)
    given = json.loads(to_json(dict(config)))
    _stored_config(folder, resume, overwrite)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f'cannot create the run folder {folder}: {_reason(error)}') from error
    descriptor = _lock(folder)
    try:
        stored = _stored_config(folder, resume, overwrite)  # again: another process may have finished a run since
        changed = {}
        if stored is not None and resume:
            changed = differences(stored, given)
            _refuse({name: pair for name, pair in changed.items() if name.split('.')[0] not in mutable}, folder)
        elif stored is not None:
            _delete_owned(folder)
        write_json(folder / 'config.json', {'format': FORMAT, **given})
    except BaseException:
        _unlock(descriptor)
        raise
    if changed:
        announce(f'resuming {folder} with {_spell(changed)}')
    return RunFolder(folder, given, stored is not None and resume, changed, descriptor)


def check_run(path: str | os.PathLike, resume: bool, overwrite: bool) -> None:
    """Raises ValueError where `open_run` would refuse the folder because of what is in it; changes nothing."""
    if resume and overwrite:
        raise ValueError('choose one of --resume (continue the run) and --overwrite (delete it and start anew)')
    _stored_config(_checked_path(path), resume, overwrite)


def read_config(path: str | os.PathLike) -> dict:
    """The stored config of a run folder, without opening or locking it. Raises ValueError if it is not a run folder."""
    file = Path(path) / 'config.json'
    if not file.exists():
        raise ValueError(f'{path} is not a run folder: it has no config.json')
    config = read_json(file)
    if not isinstance(config, dict) or config.pop('format', None) != FORMAT:
        raise ValueError(f'{file} was not written by this project (no "format": "{FORMAT}"): choose another folder')
    return config


def flatten(config: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
    """{'agent': {'tau': 1}} -> {'agent.tau': 1}. Empty dicts stay, as values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f'{prefix}{key}.'))
        else:
            flat[f'{prefix}{key}'] = value
    return flat


def differences(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{dotted name: (stored, given)} where two configs differ; a missing key counts as ABSENT. 1 and 1.0 are equal, 1 and true are not."""
    old, new = flatten(stored), flatten(given)
    pairs = {name: (old.get(name, ABSENT), new.get(name, ABSENT)) for name in [*old, *(name for name in new if name not in old)]}
    return {name: (a, b) for name, (a, b) in pairs.items() if a != b or isinstance(a, bool) != isinstance(b, bool)}


def _refuse(changed: dict[str, tuple], folder: Path) -> None:
    if changed:
        raise ValueError(
            f'cannot resume {folder} with another configuration: {_spell(changed)}. Give the stored values back or choose another folder'
        )


def _spell(changed: dict[str, tuple], limit: int = 8) -> str:
    parts = [f'{name} {_short(a)} -> {_short(b)}' for name, (a, b) in list(changed.items())[:limit]]
    more = len(changed) - limit
    return ', '.join(parts) + (f' and {more} more' if more > 0 else '')


def _short(value: Any) -> str:
    text = value if value is ABSENT else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + '...'


def _checked_path(path: str | os.PathLike) -> Path:
    text = os.fspath(path)
    if not text or '\0' in text:
        raise ValueError(f'{text!r} is not a folder name: give a path without NUL characters')
    return Path(os.path.abspath(os.path.expanduser(text)))


def _stored_config(folder: Path, resume: bool, overwrite: bool) -> dict | None:
    """Config of the run in `folder`; None if there is nothing there. Raises ValueError if the flags don't allow to go on."""
    try:
        if not folder.exists():
            return None
        if not folder.is_dir():
            raise ValueError(f'{folder} is a file: choose another folder for the run')
        names = set(os.listdir(folder)) - {'lock', 'config.json.tmp'}  # what a start that was killed early leaves
    except OSError as error:
        raise ValueError(f'cannot open the run folder {folder}: {_reason(error)}') from error
    if not names:
        return None
    if not (resume or overwrite):
        raise ValueError(f'{folder} is not empty: add --resume to continue its run, --overwrite to delete it, or choose another folder')
    return read_config(folder)


def _delete_owned(folder: Path) -> None:
    try:
        for pattern in OWNED:
            for path in list(folder.glob(pattern)):
                _delete(path)
            top = pattern.split('/')[0]
            if top != pattern:
                for parent in list(folder.glob(top)):
                    _delete_empty(parent)
    except OSError as error:
        raise ValueError(f'cannot delete the old run in {folder}: {_reason(error)}') from error


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for child in list(path.iterdir()):
            _delete(child)
        path.rmdir()
    else:
        path.unlink()


def _delete_empty(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for child in list(path.iterdir()):
            _delete_empty(child)
        if not any(path.iterdir()):
            path.rmdir()


def _lock(folder: Path) -> int:
    """Takes the lock of a run folder. The kernel drops it when this process ends, however it ends; forked children don't inherit it."""
    path = folder / 'lock'
    try:
        # A process loses its lock when it closes ANY descriptor of the file, so look before opening it a second time.
        if path.exists() and _identity(os.stat(path)) in _held:
            raise ValueError(f'{folder} is already open in this process: close that run first')
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ValueError(f'cannot write in the run folder {folder}: {_reason(error)}') from error
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f'process {os.getpid()} on {socket.gethostname()}\n'.encode())
    except (BlockingIOError, PermissionError) as error:  # what a lock that another process holds gives
        owner = os.read(descriptor, 200).decode('utf-8', 'replace').strip() or 'another process'
        os.close(descriptor)
        raise ValueError(f'{folder} is in use by {owner}: wait for it, stop it, or choose another folder') from error
    except OSError as error:
        os.close(descriptor)
        raise ValueError(f'cannot lock the run folder {folder}: {_reason(error)}') from error
    _held.add(_identity(os.fstat(descriptor)))
    return descriptor


def _unlock(descriptor: int) -> None:
    _held.discard(_identity(os.fstat(descriptor)))
    os.close(descriptor)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


# ------------------------------------------------------------------------------------------------------------------ provenance


def provenance(machine: bool = True) -> dict[str, Any]:
    """Where numbers come from: versions (None: not installed), git commit and dirty flag (None: not a checkout), number of cores.

    machine: also the command line and the operating system, which a published result leaves out.
    """
    commit, dirty = _git_state(Path(__file__).resolve().parents[1])
    local = {'command': list(sys.argv), 'platform': platform.platform()} if machine else {}
    return {
        'python': platform.python_version(),
        'versions': {name: _version(name) for name in PACKAGES},
        'git_commit': commit,
        'git_dirty': dirty,
        'cpu_count': os.cpu_count(),
        **local,
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state(root: Path) -> tuple[str | None, bool | None]:
    """Commit and dirty flag of the checkout whose top is `root`; (None, None) if it is none, as for a copy installed inside another one."""
    # Variables such as GIT_DIR, set while a hook runs, would point git to another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith('GIT_')}

    def git(*arguments: str) -> str:
        command = ['git', '-C', str(root), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True).stdout.strip()

    try:
        if Path(git('rev-parse', '--show-toplevel')).resolve() != root.resolve():
            return None, None
        return git('rev-parse', 'HEAD'), bool(git('status', '--porcelain'))
    except (OSError, subprocess.SubprocessError):
        return None, None
