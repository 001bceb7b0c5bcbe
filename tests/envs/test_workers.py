"""Environments in worker processes: same numbers, clear errors, no process left behind."""

import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

import envs
from envs import registry, workers
from envs.types import ArraySpec, Spec

MAZE = 'ogbench/pointmaze-medium-singletask-task1-v0'
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def assert_same_step(ours, theirs):
    for left, right in zip(ours[:4], theirs[:4], strict=True):
        np.testing.assert_array_equal(left, right)
        assert left.dtype == right.dtype
    np.testing.assert_array_equal(ours.metrics['success'], theirs.metrics['success'])


def test_equals_the_same_environment_in_this_process():
    with_workers, alone = envs.make(MAZE, 5, num_workers=2), envs.make(MAZE, 5)
    try:
        assert isinstance(with_workers, workers.WorkerEnv)
        assert with_workers.spec == alone.spec
        assert (with_workers.on_device, with_workers.num_envs) == (False, 5)
        rng = np.random.default_rng(0)
        seeds, everyone = rng.integers(0, 2**32, 5), np.ones(5, bool)
        np.testing.assert_array_equal(with_workers.reset(seeds, everyone), alone.reset(seeds, everyone))
        for _ in range(50):
            actions, active = rng.uniform(-1, 1, (5, 2)).astype(np.float32), rng.random(5) < 0.7
            assert_same_step(with_workers.step(actions, active), alone.step(actions, active))
        some = np.array([True, False, False, True, False])
        np.testing.assert_array_equal(with_workers.reset(seeds + 1, some), alone.reset(seeds + 1, some))
        state = with_workers.get_state()
        for name, values in alone.get_state().items():
            np.testing.assert_array_equal(state[name], values, err_msg=name)
        # A state moves between numbers of workers.
        with_workers.reset(seeds, everyone)
        with_workers.set_state(alone.get_state())
        assert_same_step(with_workers.step(actions, everyone), alone.step(actions, everyone))
    finally:
        with_workers.close()


def test_more_workers_than_slots_and_pictures():
    env = envs.make('probe/host-line', 2, num_workers=4)
    alone = envs.make('probe/host-line', 2)
    assert len(env._workers) == 2
    for each in (env, alone):
        each.reset(np.array([1, 2]), np.ones(2, bool))
    np.testing.assert_array_equal(env.render(1), alone.render(1))
    with pytest.raises(ValueError, match=r'0\.\.1, not 2'):
        env.render(2)
    env.close()
    env.close()
    with pytest.raises(RuntimeError, match='is closed'):
        env.get_state()


def test_device_environments_ignore_workers():
    assert envs.make('probe/line', 3, num_workers=2).on_device


def test_an_error_in_a_worker_arrives_as_itself_and_closes_the_environment():
    env = envs.make('probe/host-line', 2, num_workers=2)
    with pytest.raises(ValueError, match=r'slots \[0\] have no running episode'):
        env.step(np.zeros((2, 1)), np.ones(2, bool))
    with pytest.raises(RuntimeError, match='is closed'):
        env.reset(np.zeros(2, int), np.ones(2, bool))
    with pytest.raises(ValueError, match='horizon must be'):
        envs.make('probe/host-line:horizon=0', 2, num_workers=1)


def test_a_killed_worker_is_named():
    env = envs.make('probe/host-line', 4, num_workers=2)
    os.kill(env._workers[1]._process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r'environment worker 2 of 2 \(probe/host-line\) was killed by signal 9'):
        env.reset(np.zeros(4, int), np.ones(4, bool))
    assert all(worker._process.returncode is not None for worker in env._workers)


def test_wrong_shapes_are_refused_before_anything_is_sent():
    env = envs.make('probe/host-line', 4, num_workers=2)
    with pytest.raises(ValueError, match=r'actions must have 4 rows, not \[3, 1\]'):
        env.step(np.zeros((3, 1)), np.ones(4, bool))
    env.reset(np.zeros(4, int), np.ones(4, bool))  # still open
    env.close()


def alive(pid):
    try:
        with open(f'/proc/{pid}/stat') as file:
            return file.read().rpartition(')')[2].split()[0] not in 'ZX'
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


PARENT = """
import signal, sys, time
import numpy as np
import envs
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
env = envs.make('probe/host-line', 4, num_workers=2)
try:
    print(*(worker._process.pid for worker in env._workers), flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    env.reset(np.zeros(4, int), np.ones(4, bool))  # the workers are not disturbed
    print('still there', flush=True)
"""


@pytest.fixture
def parent():
    process = subprocess.Popen(
        [sys.executable, '-c', PARENT], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    yield process
    process.kill()
    process.communicate()


def test_workers_leave_when_their_parent_is_killed(parent):
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(alive(pid) for pid in pids)
    parent.kill()
    wait_until(lambda: not any(alive(pid) for pid in pids))


def test_workers_ignore_the_signals_of_the_terminal(parent):
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    for pid in pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    os.killpg(parent.pid, signal.SIGINT)
    out, err = parent.communicate(timeout=30)
    assert (out.strip(), err, parent.returncode) == ('still there', '', 0)
    wait_until(lambda: not any(alive(pid) for pid in pids))


OWN = """
import numpy as np
from envs import probes

def corridor(num_envs, length=3):
    return probes.HostLine(num_envs, length)

def broken(num_envs):
    raise KeyError('no such robot')
"""


def test_a_users_own_environment_in_workers(tmp_path, monkeypatch):
    (tmp_path / 'own_corridor.py').write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, '_REGISTERED', {})
    import own_corridor  # pyright: ignore[reportMissingImports]

    envs.register('own/corridor', own_corridor.corridor)
    env = envs.make('own/corridor:length=7', 3, num_workers=2)
    assert env.spec.horizon == 7
    assert env.reset(np.arange(3), np.ones(3, bool)).shape == (3, 1)
    env.close()
    envs.register('own/broken', own_corridor.broken)
    with pytest.raises(RuntimeError, match=r"worker 1 of 1 \(own/broken\) failed: KeyError: 'no such robot'"):
        envs.make('own/broken', num_workers=1)


def test_workers_need_no_jax_and_the_package_no_simulator():
    code = 'import sys, envs; print(sorted({"jax", "mujoco", "ogbench", "gymnasium"} & set(sys.modules)));'
    code += 'import envs.worker_main, envs.point_maze, envs.generate, envs.probes; print("jax" in sys.modules)'
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split('\n')[:2] == ['[]', 'False']


@pytest.mark.parametrize(
    'array',
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6, dtype=np.int64).reshape(3, 2).T,
        np.array([True, False]),
        np.zeros((0, 3), np.uint8),
        np.float64(2.5),
    ],
    ids=['float', 'transposed', 'bool', 'empty', 'scalar'],
)
def test_messages_arrive_as_they_were(array):
    left, right = socket.socketpair()
    with left, right:
        workers.send(left, {'operation': 'test'}, {'array': array, 'other': np.ones(2)})
        header, arrays = workers.receive(right)
    assert header == {'operation': 'test'}
    np.testing.assert_array_equal(arrays['array'], array)
    assert arrays['array'].dtype == array.dtype
    np.testing.assert_array_equal(arrays['other'], np.ones(2))


def test_specs_arrive_as_they_were():
    entries = {'pixels': ArraySpec((8, 8, 3), 0, 255, 'uint8'), 'state': ArraySpec((4,))}
    spec = Spec(entries, ArraySpec((2,), -1.0, 1.0), 100)
    assert workers.unpack_spec(workers.pack_spec(spec)) == spec
    masked = Spec(ArraySpec((2,)), ArraySpec((2,)), 0, predict_mask=np.array([True, False]))
    np.testing.assert_array_equal(workers.unpack_spec(workers.pack_spec(masked)).predict_mask, [True, False])
    with pytest.raises(ValueError, match='statistics'):
        workers.pack_spec(spec._replace(statistics=0))


def test_dicts_of_observations_travel():
    observations = {'pixels': np.zeros((2, 3), np.uint8), 'state': np.ones((2, 4), np.float32)}
    back = workers.unpack_observations({**workers.pack_observations(observations), 'rewards': np.zeros(2)})
    assert back.keys() == observations.keys()
    np.testing.assert_array_equal(back['state'], observations['state'])
