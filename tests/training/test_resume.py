"""kill -9 at random moments: a resumed run equals one that was never interrupted, bit for bit."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from training import logger
from training.checkpoints import Checkpoints, _listed, _read, _read_descriptions

SCRIPT = Path(__file__).with_name('resume_script.py')
UPDATES = {'offline': 400, 'device': 120, 'host': 60}


@pytest.fixture(scope='module')
def start(tmp_path_factory):
    """Starts the script; all share one compilation cache."""
    cache = tmp_path_factory.mktemp('cache')

    def run(kind, out, updates):
        environment = {**os.environ, 'JAX_COMPILATION_CACHE_DIR': str(cache)}
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), kind, str(out), str(updates)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return run


@pytest.fixture(scope='module')
def whole(start, tmp_path_factory):
    """kind -> folder of an uninterrupted run."""
    folders = {kind: tmp_path_factory.mktemp(kind) / 'run' for kind in UPDATES}

    def run(kind):
        if not folders[kind].exists():
            finish(start(kind, folders[kind], UPDATES[kind]))
        return folders[kind]

    return run


def finish(process):
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def arrays_of(folder):
    checkpoints = Checkpoints(folder / 'checkpoints')
    step = checkpoints.latest_verified()
    assert step is not None
    path = checkpoints.path(step)
    stored, meta = _read_descriptions(path)
    arrays, _ = _read(path, stored, _listed(path))
    assert arrays.keys() == stored.keys()
    return step, arrays, meta


def assert_equal_runs(ours, theirs):
    (step, arrays, meta), (other_step, others, other_meta) = arrays_of(ours), arrays_of(theirs)
    assert step == other_step
    assert arrays.keys() == others.keys()
    for name, values in arrays.items():
        np.testing.assert_array_equal(values, others[name], err_msg=name)
    assert meta['last_scores'] == other_meta['last_scores']
    rows, other_rows = logger.read(ours), logger.read(theirs)
    assert rows.keys() == other_rows.keys()
    for name, values in rows.items():
        np.testing.assert_array_equal(values, other_rows[name], err_msg=name)


def kill_and_resume(start, parent, whole, kind, kills, seed):
    """Kills soon after something new is on the disk, which is while something is computed, evaluated or saved.

    A run that reaches its end first is compared with the uninterrupted one, and the next kills meet a fresh run; so is the last run.
    """
    moments, killed, number = random.Random(seed), 0, 0
    while killed < kills:
        folder = parent / f'run_{number}'
        process = start(kind, folder, UPDATES[kind])
        for _ in range(moments.randrange(1, 6)):
            before = signature(folder)
            while signature(folder) == before and process.poll() is None:
                time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        output, _ = process.communicate(timeout=240)
        assert process.returncode in (-signal.SIGKILL, 0), output
        if process.returncode == 0:
            assert_equal_runs(folder, whole(kind))
            number += 1
        else:
            killed += 1
    finish(start(kind, parent / f'run_{number}', UPDATES[kind]))
    assert_equal_runs(parent / f'run_{number}', whole(kind))


def signature(folder):
    """What a start of the run changes: its rows and its checkpoints, whole or not."""
    rows = folder / logger.CSV
    return rows.stat().st_mtime_ns if rows.exists() else 0, sorted(path.name for path in (folder / 'checkpoints').glob('*'))


@pytest.mark.parametrize('kind', list(UPDATES))
def test_two_kills(start, whole, tmp_path, kind):
    kill_and_resume(start, tmp_path, whole, kind, kills=2, seed=len(kind))


@pytest.mark.slow
@pytest.mark.parametrize('kind', list(UPDATES))
@pytest.mark.timeout(3000)
def test_many_kills(start, whole, tmp_path, kind):
    """17 + 17 + 16 kills."""
    kill_and_resume(start, tmp_path, whole, kind, kills={'offline': 17, 'device': 17, 'host': 16}[kind], seed=0)


def test_a_longer_run_is_an_extended_one(start, whole, tmp_path):
    finish(start('offline', tmp_path / 'run', 200))
    finish(start('offline', tmp_path / 'run', UPDATES['offline']))
    step, arrays, _ = arrays_of(tmp_path / 'run')
    whole_step, others, _ = arrays_of(whole('offline'))
    assert step == whole_step
    for name, values in arrays.items():
        np.testing.assert_array_equal(values, others[name], err_msg=name)


def test_sigterm_saves_and_a_damaged_checkpoint_is_passed_over(start, whole, tmp_path):
    folder = tmp_path / 'run'
    process = start('offline', folder, UPDATES['offline'])
    while len(list((folder / 'checkpoints').glob('step_*'))) < 2 and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert 'continue with --resume' in finish(process)
    newest = sorted((folder / 'checkpoints').glob('step_*'))[-1]
    victim = max((path for path in newest.rglob('*') if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(bytes(content))
    assert 'passing over checkpoint' in finish(start('offline', folder, UPDATES['offline']))
    assert_equal_runs(folder, whole('offline'))
