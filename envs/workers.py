"""Environments split over worker processes.

Each worker is a fresh interpreter that runs `envs.worker_main` at the other end of a socket pair. A message is a length, a JSON header
(which names the arrays that follow, their dtypes and shapes) and the raw bytes of those arrays; nothing is pickled. Workers sit in a
session of their own, ignore SIGINT and SIGTERM and leave when the socket closes, so none outlives its parent, however that ended.
"""

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from envs.host import HostEnv
from envs.types import ArraySpec, HostStep, Spec

_LENGTH = struct.Struct('<Q')
# A worker is one of several: each must keep to its own core.
_SINGLE_THREAD = dict.fromkeys(('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS', 'NUMEXPR_NUM_THREADS'), '1')


def send(channel: socket.socket, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
    """Sends one message. Raises OSError if the other end is gone."""
    arrays = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    layout = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    text = json.dumps({**header, 'arrays': layout}).encode()
    # Shapes come from the header: ascontiguousarray has made a row of a scalar, whose bytes are the same.
    channel.sendall(b''.join([_LENGTH.pack(len(text)), text, *(array.tobytes() for array in arrays.values())]))


def receive(channel: socket.socket) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Waits for one message. Raises EOFError if the other end is gone."""
    (length,) = _LENGTH.unpack(_read(channel, _LENGTH.size))
    header = json.loads(bytes(_read(channel, length)))
    arrays = {}
    for name, dtype, shape in header.pop('arrays'):
        array = np.empty(shape, np.dtype(dtype))
        if array.nbytes:
            _fill(channel, array.reshape(-1).view(np.uint8).data)
        arrays[name] = array
    return header, arrays


def _read(channel: socket.socket, count: int) -> bytearray:
    buffer = bytearray(count)
    _fill(channel, memoryview(buffer))
    return buffer


def _fill(channel: socket.socket, view: memoryview) -> None:
    while view.nbytes:
        count = channel.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]


def pack_spec(spec: Spec) -> dict[str, Any]:
    """A Spec as JSON; statistics belong to datasets and are refused."""
    if spec.statistics is not None:
        raise ValueError('an environment in worker processes cannot carry statistics: they belong to the dataset')
    observations = spec.observations
    pack = {key: value._asdict() for key, value in observations.items()} if isinstance(observations, Mapping) else observations._asdict()
    mask = None if spec.predict_mask is None else np.asarray(spec.predict_mask).tolist()
    return {
        'dict': isinstance(observations, Mapping),
        'observations': pack,
        'actions': spec.actions._asdict(),
        'horizon': spec.horizon,
        'mask': mask,
    }


def unpack_spec(packed: Mapping[str, Any]) -> Spec:
    """Undoes `pack_spec`."""

    def array_spec(fields):
        return ArraySpec(**{**fields, 'shape': tuple(fields['shape'])})

    entries = packed['observations']
    observations = {key: array_spec(fields) for key, fields in entries.items()} if packed['dict'] else array_spec(entries)
    mask = None if packed['mask'] is None else np.asarray(packed['mask'], bool)
    return Spec(observations, array_spec(packed['actions']), packed['horizon'], predict_mask=mask)


def pack_observations(observations: Any) -> dict[str, np.ndarray]:
    """An array, or a dict of arrays, as entries of a message."""
    if isinstance(observations, Mapping):
        return {f'observations/{key}': value for key, value in observations.items()}
    return {'observations': observations}


def unpack_observations(arrays: Mapping[str, np.ndarray]) -> Any:
    """Undoes `pack_observations`."""
    if 'observations' in arrays:
        return arrays['observations']
    prefix = 'observations/'
    return {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}


def importable(constructor: Callable, name: str) -> str:
    """'module:function' under which a worker finds a registered constructor. Raises ValueError if there is no such path."""
    module, path = getattr(constructor, '__module__', '__main__'), getattr(constructor, '__qualname__', '')
    if module == '__main__' or getattr(sys.modules.get(module), path, None) is not constructor:
        raise ValueError(f'{name!r} cannot run in worker processes: move its constructor to the top level of a module that can be imported')
    return f'{module}:{path}'


class Worker:
    """One worker process. After any error it is stopped and cannot be used again."""

    def __init__(self, label: str):
        """`label` names it in error messages, for example 'environment worker 1 of 2'."""
        self.label = label
        self.channel, theirs = socket.socketpair()
        # The same search path as ours, so that the worker imports the same packages; -P keeps the working directory out of it.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, '-P', '-m', 'envs.worker_main', str(theirs.fileno())],
                env={**os.environ, **_SINGLE_THREAD, 'PYTHONPATH': path},
                stdin=subprocess.DEVNULL,
                stdout=2,  # whatever a library prints goes to our stderr
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.stop = weakref.finalize(self, _stop, self.channel, self._process)

    def send(self, operation: str, arrays: Mapping[str, np.ndarray] | None = None, **fields: Any) -> None:
        """Asks for something; exactly one `receive` must follow."""
        if not self.stop.alive:
            raise RuntimeError(f'{self.label} is closed')
        try:
            send(self.channel, {'operation': operation, **fields}, arrays)
        except OSError:
            raise self._death() from None

    def receive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Waits for the answer: (fields, arrays).

        Raises:
          ValueError: the worker raised one; with its message.
          RuntimeError: the worker raised anything else, or died.
        """
        if not self.stop.alive:
            raise RuntimeError(f'{self.label} is closed')
        try:
            fields, arrays = receive(self.channel)
        except (EOFError, OSError):
            raise self._death() from None
        if 'error' in fields:
            self.stop()
            if fields['kind'] == 'ValueError':
                raise ValueError(fields['error'])
            raise RuntimeError(f'{self.label} failed: {fields["kind"]}: {fields["error"]}')
        return fields, arrays

    def _death(self) -> RuntimeError:
        self.stop()
        code = self._process.returncode
        how = f'was killed by signal {-code}' if code < 0 else f'exited with code {code}'
        return RuntimeError(f'{self.label} {how}; anything that it printed is above')


def _hang_up(channel: socket.socket) -> None:
    with contextlib.suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)  # unlike close, this also wakes a thread of ours that waits for an answer
    channel.close()


def _stop(channel: socket.socket, process: subprocess.Popen) -> None:
    _hang_up(channel)
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:  # in a long simulation: nothing of value is lost
        process.kill()
        process.wait()


class WorkerEnv(HostEnv):
    """A HostEnv whose slots live in worker processes, in contiguous blocks that step at the same time.

    Results and states are those of the same environment in one process. After an error all workers are stopped and the environment is
    closed.
    """

    def __init__(self, name: str, num_envs: int, num_workers: int, constructor: str = ''):
        """See `envs.make`. `constructor`: where to find that of a registered name, from `importable`."""
        self.num_envs = num_envs
        num_workers = min(num_workers, num_envs)
        blocks = np.array_split(np.arange(num_envs), num_workers)
        self._blocks = [slice(int(block[0]), int(block[-1]) + 1) for block in blocks]
        self._workers: list[Worker] = []
        try:
            for index in range(num_workers):
                self._workers.append(Worker(f'environment worker {index + 1} of {num_workers} ({name})'))
            for worker, block in zip(self._workers, self._blocks, strict=True):
                worker.send('make', name=name, num_envs=block.stop - block.start, constructor=constructor)
            self.spec = unpack_spec(self._receive()[0][0]['spec'])
        except BaseException:
            self.close()
            raise

    def reset(self, seeds: Any, where: Any) -> Any:
        arrays = self._call('reset', {'seeds': np.asarray(seeds), 'where': np.asarray(where)})
        return unpack_observations(arrays)

    def step(self, actions: Any, active: Any) -> HostStep:
        arrays = self._call('step', {'actions': np.asarray(actions, np.float32), 'active': np.asarray(active)})
        metrics = {name.removeprefix('metrics/'): values for name, values in arrays.items() if name.startswith('metrics/')}
        return HostStep(unpack_observations(arrays), arrays['rewards'], arrays['masks'], arrays['truncations'], metrics)

    def get_state(self) -> dict[str, np.ndarray]:
        return self._call('get_state', {})

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._call('set_state', {name: np.asarray(values) for name, values in state.items()})

    def render(self, slot: int) -> np.ndarray:
        index = next((index for index, block in enumerate(self._blocks) if block.start <= slot < block.stop), None)
        if index is None:
            raise ValueError(f'slot must be in 0..{self.num_envs - 1}, not {slot}')
        self._workers[index].send('render', slot=int(slot) - self._blocks[index].start)
        return self._receive([self._workers[index]])[0][1]['image']

    def close(self) -> None:
        for worker in self._workers:
            _hang_up(worker.channel)  # all at once, so that they leave side by side
        for worker in self._workers:
            worker.stop()

    def _call(self, operation: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Every worker gets its rows of `arrays` before any answer is awaited. Returns the answers' arrays, joined."""
        for name, values in arrays.items():
            if values.shape[:1] != (self.num_envs,):
                raise ValueError(f'{name} must have {self.num_envs} rows, not {list(values.shape)}')
        try:
            for worker, block in zip(self._workers, self._blocks, strict=True):
                worker.send(operation, {name: values[block] for name, values in arrays.items()})
        except BaseException:
            self.close()
            raise
        answers = [answer for _, answer in self._receive()]
        return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}

    def _receive(self, senders: list[Worker] | None = None) -> list[tuple[dict[str, Any], dict[str, np.ndarray]]]:
        try:
            return [worker.receive() for worker in (senders or self._workers)]
        except BaseException:  # an unread answer would be taken for that of the next request
            self.close()
            raise
