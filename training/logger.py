"""Metrics on disk: metrics.csv, always, and TensorBoard events, if tensorboardX is there.

The CSV is the record. It has one row per update, seed and setting, a header that is the union of all metrics ever written, no row twice
after a resume, and no half rows. Trouble with the disk never stops a run.
"""

import csv
import io
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from training import folder

CSV = 'metrics.csv'
DISCARDED = 'metrics.discarded.csv'
KEYS = ('update', 'seed', 'setting')  # first columns; the others are metrics


class Logger:
    """Writes the metrics of one run folder. Nothing touches the disk before the first `write` or `resume`.

    Attributes:
      failed: True while rows wait in memory because the disk refused them. They are tried again with each `write`.
    """

    def __init__(self, directory: str | os.PathLike, tensorboard: bool = True, announce: Callable[[str], None] = folder.to_stderr):
        self.directory = Path(os.path.abspath(directory))
        self.failed = False
        self._announce = announce
        self._columns: list[str] | None = None  # of the file; None: not looked at yet
        self._size = 0  # bytes of the file that hold whole rows
        self._pending: list[dict[str, str]] = []
        self._events = _Events(self.directory / 'events', announce) if tensorboard else None

    def write(self, update: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends rows and hands them to the operating system, so that a kill loses none.

        Args:
          update: number of updates done; must equal each row's 'update', if it has one.
          rows: dicts with 'seed' and 'setting' (one line of text, '' if there is none) and metrics: numbers or arrays of one number.
            NaN is written as 'nan', None as an empty cell.

        Raises:
          ValueError: a malformed row, never a full disk.
        """
        cells = [_cells(update, row) for row in rows]
        self._pending.extend(cells)
        try:
            self._append()
        except OSError as error:
            if not self.failed:
                reason = error.strerror or error
                self._announce(f'cannot write {self.directory / CSV} ({reason}): training goes on, the rows are kept and tried again')
            self.failed = True
        if self._events is not None:
            self._events.write(cells)

    def resume(self, update: int, surplus: Callable[[Mapping[str, str]], bool] = lambda row: False) -> int:
        """Makes the file end at `update`: later rows and a torn last line move to metrics.discarded.csv. Returns how many moved.

        `surplus` says which rows of `update` itself move, too; it sees their cells as text, '' where there is none. Killed in between, it
        may be called again: no row is lost, none is moved twice.

        Raises:
          ValueError: the files can't be read or written.
        """
        path = self.directory / CSV
        if self._events is not None:
            self._events.purge_step = update + 1
        if not path.exists():
            return 0
        try:
            table = _parse(path)
            late = [int(row['update']) > update or (int(row['update']) == update and surplus(row)) for row in table.rows]
            kept = [row for row, moves in zip(table.rows, late, strict=True) if not moves]
            moved = [row for row, moves in zip(table.rows, late, strict=True) if moves] + table.damaged
            if self._events is not None and kept:
                self._events.purge_step = int(kept[-1]['update']) + 1
            if moved:
                _add_discarded(self.directory / DISCARDED, table.columns, moved)
                folder.write_text(path, _text(table.columns, kept))
            self._open()
        except OSError as error:
            raise ValueError(f'cannot cut {path} back to update {update}: {error.strerror or error}') from error
        return len(moved)

    def _open(self) -> None:
        path = self.directory / CSV
        table = _parse(path) if path.exists() else _Table(list(KEYS), [], [], False)
        if table.damaged:
            _add_discarded(self.directory / DISCARDED, table.columns, table.damaged)
        if table.damaged or not path.exists():
            folder.write_text(path, _text(table.columns, table.rows))
        self._columns, self._size = table.columns, path.stat().st_size

    def _append(self) -> None:
        if not self._pending:
            return
        if self._columns is None:
            self._open()
        assert self._columns is not None  # for the type checker
        path = self.directory / CSV
        os.truncate(path, self._size)  # drops what an earlier failed write has left
        new = [name for name in dict.fromkeys(name for row in self._pending for name in row) if name not in self._columns]
        if new:
            columns = self._columns + new
            folder.write_text(path, _text(columns, _parse(path).rows + self._pending))
            self._columns, self._size = columns, path.stat().st_size
        else:
            data = _text(self._columns, self._pending, header=False).encode()
            with open(path, 'ab', buffering=0) as file:
                written = file.write(data)
                if written != len(data):
                    raise OSError(f'only {written} of {len(data)} bytes fitted')
            self._size += len(data)
        self._pending = []
        self.failed = False


def read(directory: str | os.PathLike) -> dict[str, np.ndarray]:
    """Columns of a run's metrics.csv, also while it is being written (a torn last line is left out).

    Returns:
      {name: float64 [rows]}, missing cells NaN; 'setting' is an array of strings.

    Raises:
      ValueError: no such file, or one that is damaged.
    """
    path = Path(directory) / CSV
    if not path.exists():
        raise ValueError(f'{path} does not exist: give the folder of a run that has logged something')
    try:
        table = _parse(path)
    except OSError as error:
        raise ValueError(f'cannot read {path}: {error.strerror or error}') from error
    if len(table.damaged) > table.torn:
        raise ValueError(f'{path} has damaged lines: {table.damaged[0]}. Resume the run, or delete the lines')
    cells = {name: [row[name] for row in table.rows] for name in table.columns}
    return {
        name: np.array(column, dtype=str) if name == 'setting' else np.array([float(cell or 'nan') for cell in column], np.float64)
        for name, column in cells.items()
    }


def _cells(update: int, row: Mapping[str, Any]) -> dict[str, str]:
    """The cells of one row as text."""
    setting = row.get('setting', '')
    if 'seed' not in row or row.get('update', update) != update:
        raise ValueError(f'a row needs a seed, and update {update} if any: got {dict(row)}')
    if not isinstance(setting, str) or not setting.isprintable():
        raise ValueError(f'a setting is one line of text, not {setting!r}')
    cells = {'update': str(int(update)), 'seed': str(int(row['seed'])), 'setting': setting}
    for name, value in row.items():
        if name in KEYS:
            continue
        if not name or not name.isprintable():
            raise ValueError(f'{name!r} is no name for a metric')
        try:
            cells[name] = '' if value is None else repr(float(np.asarray(value).reshape(())))
        except (TypeError, ValueError) as error:
            raise ValueError(f'metric {name} must be one number, not {value!r}') from error
    return cells


def _text(columns: list[str], rows: list[dict[str, str]], header: bool = True) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator='\n')
    if header:
        writer.writerow(columns)
    writer.writerows([row.get(name, '') for name in columns] for row in rows)
    return buffer.getvalue()


class _Table(NamedTuple):
    columns: list[str]
    rows: list[dict[str, str]]
    damaged: list[dict[str, str]]
    torn: bool  # the last of the damaged lines has no newline: a write was cut off


def _parse(path: Path) -> _Table:
    """Reads a CSV file of ours. A last line without its newline is damaged even if it looks complete: its last digits may lack."""
    lines = path.read_bytes().decode('utf-8', errors='replace').split('\n')  # no cell holds a newline, see _cells
    columns = next(csv.reader(lines[:1]), [])
    if columns[: len(KEYS)] != list(KEYS) or len(lines) < 2:
        raise ValueError(f'{path} has no header that starts with {",".join(KEYS)}: move it away')
    rows, damaged = [], []
    for line in lines[1:-1]:
        cells = next(csv.reader([line]), [])
        if len(cells) == len(columns) and _is_sound(cells):
            rows.append(dict(zip(columns, cells, strict=True)))
        else:
            damaged.append(dict(zip(columns, cells, strict=False)))
    last = next(csv.reader(lines[-1:]), [])
    if last:
        damaged.append(dict(zip(columns, last, strict=False)))
    return _Table(columns, rows, damaged, bool(last))


def _is_sound(cells: list[str]) -> bool:
    update, seed, _, *metrics = cells
    try:
        numbers = [int(update), int(seed), *(float(cell) for cell in metrics if cell)]
    except ValueError:
        return False
    return numbers[0] >= 0  # updates count from 0


def _add_discarded(path: Path, columns: list[str], moved: list[dict[str, str]]) -> None:
    """Appends rows to the discarded ones in one step, unless they are there already because an earlier attempt was killed after this."""
    old: list[dict[str, str]] = []
    if path.exists():
        with open(path, encoding='utf-8', newline='') as file:
            reader = csv.DictReader(file)
            old = list(reader)
            columns = list(dict.fromkeys([*(reader.fieldnames or ()), *columns]))
    rows = [{name: row.get(name) or '' for name in columns} for row in old + moved]
    if rows[len(old) :] != rows[: len(old)][-len(moved) :]:
        folder.write_text(path, _text(columns, rows))


class _Events:
    """TensorBoard event files, one folder per setting and seed.

    tensorboardX's own writer has a thread behind a short queue: once the disk is full the thread dies and the next calls block for ever. So
    this uses only its messages and checksums and appends each record itself. Numbers that are not finite are left out.
    """

    def __init__(self, directory: Path, announce: Callable[[str], None]):
        self.purge_step: int | None = None  # TensorBoard hides earlier events from this step on
        self._directory = directory
        self._announce = announce
        self._on = True
        self._files: dict[tuple[str, str], Path] = {}

    def write(self, rows: list[dict[str, str]]) -> None:
        if not self._on:
            return
        try:
            for row in rows:
                self._write_row(row)
        except ImportError:
            self._stop('TensorBoard events are off: pip install tensorboardX to have them; metrics.csv has everything')
        except OSError as error:
            self._stop(f'TensorBoard events are off from here on ({error.strerror or error}); metrics.csv has everything')

    def _stop(self, message: str) -> None:
        self._on = False
        self._announce(message)

    def _write_row(self, row: dict[str, str]) -> None:
        from tensorboardX.proto import event_pb2
        from tensorboardX.summary import scalar

        messages: Any = event_pb2  # its classes are made at run time, which type checkers can't see
        step = int(row['update'])
        events = []
        run = (row['setting'], row['seed'])
        if run not in self._files:
            self._files[run] = self._new_file(*run)
            events.append(messages.Event(wall_time=time.time(), file_version='brain.Event:2'))
            if self.purge_step is not None:
                start = messages.SessionLog(status=messages.SessionLog.START)
                events.append(messages.Event(wall_time=time.time(), step=self.purge_step, session_log=start))
        event = messages.Event(wall_time=time.time(), step=step)
        for name, cell in row.items():
            if name not in KEYS and cell and math.isfinite(float(cell)):  # tensorboardX warns of each NaN: a rider that did not run
                event.summary.MergeFrom(scalar(name, float(cell)))
        with open(self._files[run], 'ab') as file:
            file.write(b''.join(_record(event.SerializeToString()) for event in [*events, event]))

    def _new_file(self, setting: str, seed: str) -> Path:
        path = self._directory / quote(setting, safe='=,.+- ') / f'seed_{seed}'
        path.mkdir(parents=True, exist_ok=True)
        seconds, rest = divmod(time.time_ns(), 10**9)  # TensorBoard reads the files of a folder in the order of their names
        return path / f'events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{rest:09d}'


def _record(data: bytes) -> bytes:
    """The TFRecord framing: length, its checksum, data, its checksum (tensorflow.org/tutorials/load_data/tfrecord)."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack('<Q', len(data))
    return length + struct.pack('<I', masked_crc32c(length)) + data + struct.pack('<I', masked_crc32c(data))
