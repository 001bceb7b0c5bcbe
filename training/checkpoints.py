"""Whole training states on disk: written by orbax, guarded by a manifest of our own.

Orbax restores a flipped byte without a word, casts dtypes silently and takes an empty folder with a large number for the newest step. So
each checkpoint carries a SHA-256 manifest that is written last, a folder gets its final name only when it is complete, and restoring
compares paths, shapes and dtypes with the state that the program expects. Nothing is pickled.

    step_000001000/manifest.json    sizes and hashes of all files below
                   tree.json        path, shape and dtype of every leaf
                   meta.json        what the caller adds
                   parts.json       names, sizes and hashes of the parts that hold the columns of the replays; only if there are any
                   state/           the other arrays, an ordinary orbax checkpoint: a flat dict {path: array}; random keys as uint32 data
    step_000001000.replay_0.npz     a part: rows that replay number 0 got since the checkpoint before (training/replay_parts.py)

A part is complete and durable before a checkpoint lists it, is never changed, and goes when no checkpoint lists it any more.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from training import folder, replay_parts
from training.replay_parts import Part

FORMAT = 'tether checkpoint 1'
MANIFEST, PARTS = 'manifest.json', 'parts.json'
_STEP = re.compile(r'step_(\d{9})')
_TEMPORARY = re.compile(r'step_\d{9}(\.old)?\.tmp')
_PART = re.compile(r'step_\d{9}\.replay_\d+\.npz(\.tmp)?')
_UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, EOFError, zipfile.BadZipFile)  # whatever orbax and numpy say of files


class CheckpointError(ValueError):
    """A checkpoint can't be written or used; the message is one line."""


class Leaf(NamedTuple):
    """What is known of one leaf without its values."""

    shape: tuple[int, ...]
    dtype: str
    key: str  # implementation of a typed random key, '' for other arrays


class Checkpoints:
    """The checkpoints in one directory. One process writes; others may read meanwhile.

    Attributes:
      directory: absolute path; made by the first `save`.
      keep: how many sound checkpoints `save` leaves, itself included.
    """

    def __init__(self, directory: str | os.PathLike, keep: int = 2, announce: Callable[[str], None] = folder.to_stderr):
        if keep < 1:
            raise ValueError(f'keep must be at least 1, not {keep}')
        self.directory = Path(os.path.abspath(directory))
        self.keep = keep
        self._announce = announce
        self._parts: dict[str, list[Part]] = {}  # by path of the replay: of the checkpoint that was saved or restored last

    def path(self, step: int) -> Path:
        """Folder of one step, whether it exists or not."""
        return self.directory / f'step_{step:09d}'

    def steps(self) -> list[int]:
        """Steps that have a folder, ascending. Some of them may not verify."""
        if not self.directory.is_dir():
            return []
        found = [(_STEP.fullmatch(path.name), path) for path in self.directory.iterdir()]
        return sorted(int(match.group(1)) for match, path in found if match and path.is_dir())

    def latest_verified(self) -> int | None:
        """The newest step that verifies, None if there is none."""
        return next((step for step in reversed(self.steps()) if self.verify(step) is None), None)

    def verify(self, step: int) -> str | None:
        """Reads and hashes every file of a step and the parts that it lists. Returns the first defect, None if it is sound."""
        return _defect(self.path(step), step, hashes=True)

    def save(self, step: int, tree: Any, meta: Mapping[str, Any]) -> Path:
        """Writes one checkpoint and deletes the sound ones before it, except for the newest `keep - 1`.

        A kill at any moment leaves either the old set or the new one, plus a `.tmp` folder or a part without a checkpoint, which the next
        `save` removes.

        Args:
          step: 0 .. 999999999. An existing step is refused, unless it is damaged: then it is replaced.
          tree: pytree of numpy or JAX arrays and typed keys (no Python numbers); sharded arrays are gathered. Keys are not consumed. Of a
            `data.types.Replay` in it, only what was added since this object last saved or restored it is written.
          meta: what `folder.to_json` takes.

        Returns:
          The folder of the checkpoint.

        Raises:
          ValueError: a leaf that is no array, or an existing step.
          CheckpointError: it can't be written, for example because the disk is full. Earlier checkpoints are intact.
        """
        if not 0 <= step < 10**9:
            raise ValueError(f'a checkpoint step is between 0 and 999999999, not {step}')
        leaves, replays = _describe(tree), replay_parts.find(tree)
        arrays = _to_host(tree, leaves, without=_columns(leaves, replays))
        final = self.path(step)
        temporary = final.with_name(final.name + '.tmp')
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._tidy()
            if os.path.lexists(final):
                self._refuse_existing(step)
            parts = self._write_parts(step, replays)
            _write(temporary, step, arrays, leaves, folder.to_json(dict(meta)), parts)
            if os.path.lexists(final):
                os.replace(final, final.with_name(final.name + '.old.tmp'))
            os.replace(temporary, final)
            folder.sync_folder(self.directory)
        except OSError as error:
            raise CheckpointError(f'cannot write checkpoint {final}: {error.strerror or error}') from error
        else:
            self._parts = parts
            self._rotate(step)
        finally:
            self._tidy()
        return final

    def restore(self, template: Any, step: int | None = None, part: str = '') -> tuple[int, Any, dict]:
        """Reads a checkpoint into the structure of `template`.

        Args:
          template: pytree of arrays or `jax.ShapeDtypeStruct`; only structure, shapes, dtypes and shardings are used. A leaf without a
            sharding comes back as a numpy array, one with a sharding is placed like it (a key is always a JAX array).
          step: this one and no other; None: the newest that verifies, with one announced line for each that is passed over.
          part: path of the subtree that `template` stands for, such as "['carry'].state"; '' is the whole tree.

        Returns:
          (step, tree, meta).

        Raises:
          CheckpointError: none is usable, or the state that it holds has other paths, shapes or dtypes than `template`.
        """
        wanted = {part + name: leaf for name, leaf in _describe(template).items()}
        replays = [part + name for name in replay_parts.find(template)]
        defects = []
        for candidate in reversed(self.steps()) if step is None else [step]:
            path = self.path(candidate)
            defect = self.verify(candidate)
            if defect is None:
                stored, meta = _read_descriptions(path)
                _compare({name: leaf for name, leaf in stored.items() if name.startswith(part)}, wanted, path)
                try:
                    arrays, parts = _read(path, stored, replays)
                    tree = _place(arrays, stored, template, part)
                except _UNREADABLE as error:
                    defect = f'its arrays cannot be read: {_reason(error)}'
                else:
                    self._parts = parts
                    return candidate, tree, meta
            defects.append(f'{path.name}: {defect}')
            if step is None:
                self._announce(f'passing over checkpoint {path}: {defect}')
        raise CheckpointError(f'no usable checkpoint in {self.directory}: {"; ".join(defects) or "there is none"}')

    def _refuse_existing(self, step: int) -> None:
        path = self.path(step)
        if self.verify(step) is None:
            raise ValueError(f'{path} exists already: a checkpoint is never overwritten, choose another step or delete it')
        ours = path.is_dir() and ((path / MANIFEST).exists() or (path / 'tree.json').exists() or not any(path.iterdir()))
        if not ours:
            raise CheckpointError(f'{path} is not a checkpoint of this project: move it away')

    def _write_parts(self, step: int, replays: Mapping[str, Any]) -> dict[str, list[Part]]:
        """Writes the rows that are in no part yet. Returns what the checkpoint lists. Raises OSError."""
        listed = {}
        for number, (name, replay) in enumerate(replays.items()):
            earlier = [part for part in self._parts.get(name, []) if part.step < step]
            if any(_part_defect(self.directory, part.entry, hashes=False) for part in earlier):
                earlier = []  # somebody took one away: the next checkpoints must not need it
            listed[name], fresh = replay_parts.plan(earlier, replay)
            if fresh.any():
                path = self.directory / f'{self.path(step).name}.replay_{number}.npz'
                temporary = path.with_name(path.name + '.tmp')
                replay_parts.write(temporary, replay, fresh)
                entry = {'file': path.name, **_entry(temporary)}
                os.replace(temporary, path)
                listed[name].append(Part(step, entry, np.array(replay.added).reshape(-1), fresh))
        if replays:
            folder.sync_folder(self.directory)
        return listed

    def _tidy(self) -> None:
        """Deletes what is temporary and the parts that no checkpoint lists. A failure to delete is no failure to save."""
        if not self.directory.is_dir():
            return
        for path in list(self.directory.iterdir()):
            if _TEMPORARY.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # a list that can't be read now may be readable later: then nothing is deleted
            listed = {entry['file'] for step in self.steps() for entries in _listed(self.path(step)).values() for entry in entries}
            for path in list(self.directory.iterdir()):
                if _PART.fullmatch(path.name) and path.name not in listed:
                    path.unlink()

    def _rotate(self, newest: int) -> None:
        """Deletes older checkpoints of ours; `newest` was just written. Folders without our manifest are never touched."""
        older = [step for step in reversed(self.steps()) if step < newest and (self.path(step) / MANIFEST).exists()]
        sound = [step for step in older if _defect(self.path(step), step, hashes=False) is None]
        kept = sound[: self.keep - 1]
        for step in older:
            if step not in kept:
                path = self.path(step)
                doomed = path.with_name(path.name + '.old.tmp')
                # A failure to delete is no failure to save; the name changes first, so that a kill leaves no half checkpoint.
                with contextlib.suppress(OSError):
                    os.replace(path, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


# --------------------------------------------------------------------------------------------------------------- trees of arrays


def _describe(tree: Any) -> dict[str, Leaf]:
    """{path: Leaf}, in the order of the leaves. Raises ValueError for a leaf without shape and numeric dtype."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path)
        if not hasattr(leaf, 'shape') or not hasattr(leaf, 'dtype'):
            raise ValueError(f'leaf {name} is a {type(leaf).__name__}: checkpoints hold arrays only, use np.asarray')
        is_key = _is_key(leaf)
        if not is_key and not jnp.issubdtype(leaf.dtype, np.number) and leaf.dtype != np.bool_:
            raise ValueError(f'leaf {name} has dtype {leaf.dtype}: checkpoints hold numbers, booleans and random keys only')
        if is_key and 0 in leaf.shape:
            raise ValueError(f'leaf {name} is an array of no random keys: leave it out')
        key = str(jax.random.key_impl(leaf)) if is_key and isinstance(leaf, jax.Array) else ''
        leaves[name] = Leaf(tuple(leaf.shape), str(leaf.dtype), key)
    return leaves


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _columns(leaves: Mapping[str, Leaf], replays: Iterable[str]) -> set[str]:
    """Which leaves are columns of one of the replays; paths."""
    prefixes = tuple(f'{name}.columns[' for name in replays)
    return {name for name in leaves if name.startswith(prefixes)}


def _to_host(tree: Any, leaves: dict[str, Leaf], without: set[str]) -> dict[str, np.ndarray]:
    values = {
        name: jax.random.key_data(leaf) if _is_key(leaf) else leaf
        for name, leaf in zip(leaves, jax.tree.leaves(tree), strict=True)
        if name not in without
    }
    return {name: np.asarray(value) for name, value in jax.device_get(values).items()}


def _compare(stored: dict[str, Leaf], wanted: dict[str, Leaf], path: Path) -> None:
    def spell(leaf: Leaf | None) -> str:
        return f'{leaf.dtype}{list(leaf.shape)}' if leaf else 'missing'

    lines = [
        f'{name} is {spell(stored.get(name))}, expected {spell(wanted.get(name))}'
        for name in [*stored, *(name for name in wanted if name not in stored)]
        if spell(stored.get(name)) != spell(wanted.get(name))
    ]
    if lines:
        more = f' and {len(lines) - 5} more' if len(lines) > 5 else ''
        raise CheckpointError(f'{path} holds another state: {"; ".join(lines[:5])}{more}. Use the configuration that it was saved with')


def _place(arrays: dict[str, np.ndarray], stored: dict[str, Leaf], template: Any, part: str) -> Any:
    paths, structure = jax.tree_util.tree_flatten_with_path(template)
    placed = []
    for path, like in paths:
        name = part + jax.tree_util.keystr(path)
        value: Any = arrays.pop(name)
        sharding = getattr(like, 'sharding', None)
        if stored[name].key:
            value = jax.random.wrap_key_data(value, impl=stored[name].key)
        if isinstance(like, jax.Array) and not like.committed:
            sharding = None  # stays free to move, as in a run that was never interrupted
            value = value if stored[name].key else jax.device_put(value, may_alias=False)
        if sharding is not None:
            value = jax.device_put(value, sharding, may_alias=False)
        placed.append(jax.block_until_ready(value))  # only then the popped array goes: a large replay must not be held twice
    return jax.tree_util.tree_unflatten(structure, placed)


# --------------------------------------------------------------------------------------------------------------------- the files


def _write(path: Path, step: int, arrays: dict, leaves: dict[str, Leaf], meta: str, parts: dict[str, list[Part]]) -> None:
    """Fills a new folder, manifest last. Raises OSError."""
    path.mkdir()
    _write_arrays(path / 'state', arrays)
    (path / 'tree.json').write_text(json.dumps({name: leaf._asdict() for name, leaf in leaves.items()}), encoding='utf-8')
    (path / 'meta.json').write_text(meta, encoding='utf-8')
    if parts:
        lists = {name: [part.entry for part in listed] for name, listed in parts.items()}
        (path / PARTS).write_text(json.dumps(lists, indent=1), encoding='utf-8')
    names = _files(path)
    entries = {name: _entry(path / name) for name in names}
    for name in names:
        with open(path / name, 'rb') as file:
            os.fsync(file.fileno())
    with open(path / MANIFEST, 'wb') as file:
        file.write(_manifest_text(step, entries))
        file.flush()
        os.fsync(file.fileno())
    for parent, _, _ in os.walk(path):
        folder.sync_folder(Path(parent))


def _manifest_text(step: int, entries: dict) -> bytes:
    return json.dumps({'format': FORMAT, 'step': step, 'files': entries}, indent=1, sort_keys=True).encode()


def _files(path: Path) -> list[str]:
    """Relative names of all files below a folder, without our manifest."""
    found = [os.path.relpath(os.path.join(parent, name), path) for parent, _, names in os.walk(path) for name in names]
    return sorted(name for name in found if name != MANIFEST)


def _hash(path: Path) -> str:
    with open(path, 'rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def _entry(path: Path) -> dict[str, Any]:
    return {'size': path.stat().st_size, 'sha256': _hash(path)}


def _file_defect(path: Path, entry: Mapping[str, Any], hashes: bool) -> str | None:
    """Whether a file differs from its entry. Raises OSError, but for a file that is missing."""
    if not path.is_file():
        return 'is missing'
    if (size := path.stat().st_size) != entry['size']:
        return f'has {size} bytes instead of {entry["size"]}'
    if hashes and _hash(path) != entry['sha256']:
        return 'has another SHA-256 than when it was written'
    return None


def _part_defect(directory: Path, entry: Mapping[str, Any], hashes: bool) -> str | None:
    defect = _file_defect(directory / entry['file'], entry, hashes)
    return f'its part {entry["file"]} {defect}' if defect else None


def _listed(path: Path) -> dict[str, list[dict]]:
    """What a checkpoint folder lists: {path of the replay: [{file, size, sha256}]}, oldest first. Raises OSError.

    Nothing if there is no list, or if it is damaged: its hash shows that.
    """
    try:
        lists = json.loads((path / PARTS).read_bytes())
        sound = all(_PART.fullmatch(entry['file']) for entries in lists.values() for entry in entries)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return lists if sound else {}


def _step_of(part: str) -> int:
    return int(part.split('.')[0].removeprefix('step_'))


def _defect(path: Path, step: int, hashes: bool) -> str | None:
    """First defect of a checkpoint folder or of its parts, None if there is none. Without `hashes` only names and sizes are looked at."""
    try:
        text = (path / MANIFEST).read_bytes()
        manifest = json.loads(text)
        entries = manifest['files']
        # Written in one canonical form, so that no changed byte of the manifest itself can go unnoticed.
        if text != _manifest_text(step, entries):
            return f'{MANIFEST} is damaged or belongs to another step'
        names = _files(path)
        for name in sorted(set(names) ^ set(entries)):
            return f'{name} is missing' if name in entries else f'{name} does not belong there'
        for name in names:
            if defect := _file_defect(path / name, entries[name], hashes):
                return f'{name} {defect}'
        for entry in (entry for entries in _listed(path).values() for entry in entries):
            if defect := _part_defect(path.parent, entry, hashes):
                return defect
    except FileNotFoundError as error:
        return 'there is no such checkpoint' if not path.exists() else f'{os.path.relpath(error.filename, path)} is missing'
    except OSError as error:
        return f'cannot be read: {error.strerror or error}'
    except (ValueError, KeyError, TypeError, AttributeError):
        return f'{MANIFEST} is damaged'
    return None


def _read_descriptions(path: Path) -> tuple[dict[str, Leaf], dict]:
    tree = folder.read_json(path / 'tree.json')
    leaves = {name: Leaf(tuple(leaf['shape']), leaf['dtype'], leaf['key']) for name, leaf in tree.items()}
    return leaves, folder.read_json(path / 'meta.json')


@contextlib.contextmanager
def _orbax() -> Iterator[Any]:
    """A synchronous orbax handler. Its log, which repeats each error as pages of tracebacks, is off meanwhile; the errors are raised."""
    from orbax import checkpoint as ocp

    loggers = [logging.getLogger(name) for name in ('absl', 'asyncio')]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    # One database for all arrays instead of a file each; compression costs more time than it saves space on floats.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)
    try:
        yield handler
    finally:
        handler.close()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Raises OSError, also where orbax raises something else."""
    from etils import epath
    from orbax import checkpoint as ocp

    path.mkdir()
    items = {name: array for name, array in arrays.items() if array.size}  # orbax refuses empty arrays and empty trees
    if not items:
        return
    try:
        with _orbax() as handler:
            handler.save(epath.Path(path), args=ocp.args.PyTreeSave(items))
            handler.finalize(epath.Path(path))
    except (ValueError, RuntimeError) as error:
        raise OSError(_reason(error)) from error


def _read(path: Path, stored: dict[str, Leaf], replays: Iterable[str]) -> tuple[dict[str, np.ndarray], dict[str, list[Part]]]:
    """All arrays but the columns of the replays that are not asked for, and the parts of those that are. Raises one of _UNREADABLE."""
    listed = _listed(path)
    in_parts = _columns(stored, listed)
    arrays = _read_arrays(path, {name: leaf for name, leaf in stored.items() if name not in in_parts})
    parts = {}
    for name in (name for name in replays if name in listed):
        prefix = f'{name}.columns'
        counters = {field: arrays[f'{name}.{field}'] for field in ('pointer', 'size', 'added')}
        leaves = {leaf.removeprefix(prefix): stored[leaf] for leaf in _columns(stored, [name])}
        columns, spans = replay_parts.read([path.parent / entry['file'] for entry in listed[name]], counters, leaves)
        arrays |= {prefix + column: values for column, values in columns.items()}
        parts[name] = [Part(_step_of(entry['file']), entry, *span) for entry, span in zip(listed[name], spans, strict=True)]
    return arrays, parts


def _read_arrays(path: Path, stored: dict[str, Leaf]) -> dict[str, np.ndarray]:
    from etils import epath
    from orbax import checkpoint as ocp

    empty = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in stored.items() if 0 in leaf.shape}
    names = [name for name in stored if name not in empty]
    if not names:
        return empty
    arguments = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    with _orbax() as handler:
        return empty | handler.restore(epath.Path(path / 'state'), args=ocp.args.PyTreeRestore(restore_args=arguments))


def _reason(error: BaseException) -> str:
    """One line: the operating system's words if they are to be found in the message, else its beginning."""
    text = str(error)
    code = re.search(r"os_error_code='(\d+)'", text)
    return os.strerror(int(code.group(1))) if code else ' '.join(text.split())[:200]
