"""Run folders: who may open which, what is compared, what is deleted, and small files that are never half written."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from training import folder

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    'agent': {'name': 'trqam', 'kl_budget': 0.5, 'hidden_sizes': (32, 32)},
    'env': 'x',
    'run': {'num_updates': 100, 'log_interval': 10},
}


def config(**changes) -> dict:
    """CONFIG with other values at dotted names, dots spelt as double underscores."""
    new = json.loads(json.dumps(CONFIG))
    for name, value in changes.items():
        *parents, last = name.split('__')
        target = new
        for parent in parents:
            target = target[parent]
        target[last] = value
    return new


def contents(path: Path) -> dict[str, bytes]:
    return {str(item.relative_to(path)): item.read_bytes() for item in path.rglob('*') if item.is_file()}


# -------------------------------------------------------------------------------------------------------------------- opening


def test_a_new_run(tmp_path):
    with folder.open_run(tmp_path / 'a' / 'b', CONFIG) as run:
        assert run.path == tmp_path / 'a' / 'b'
        assert not run.resumed
        assert run.config['agent']['hidden_sizes'] == [32, 32]
        assert folder.read_config(run.path) == run.config
        assert json.loads((run.path / 'config.json').read_text())['format'] == folder.FORMAT
    assert sorted(os.listdir(tmp_path / 'a' / 'b')) == ['config.json', 'lock']


def test_an_existing_run_needs_a_flag(tmp_path):
    folder.open_run(tmp_path / 'run', CONFIG).close()
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r'not empty: add --resume .* --overwrite') as info:
        folder.open_run(tmp_path / 'run', CONFIG)
    assert '\n' not in str(info.value)
    with pytest.raises(ValueError, match='choose one of --resume'):
        folder.open_run(tmp_path / 'run', CONFIG, resume=True, overwrite=True)
    assert contents(tmp_path) == before


def test_a_start_that_was_killed_early_is_no_obstacle(tmp_path):
    (tmp_path / 'lock').touch()
    (tmp_path / 'config.json.tmp').write_text('{"form')
    with folder.open_run(tmp_path, CONFIG) as run:
        assert not run.resumed


@pytest.mark.parametrize('flag', ['resume', 'overwrite'])
@pytest.mark.parametrize('config_text', [None, '{"agent": 1}', '[1]', '{"format"'])
def test_a_folder_of_somebody_else(tmp_path, flag, config_text):
    """A folder that was not made by this project is neither resumed nor cleared: `--out=~` must not cost anyone their videos."""
    (tmp_path / 'video').mkdir()
    (tmp_path / 'video' / 'holiday.mp4').write_text('x')
    if config_text is not None:
        (tmp_path / 'config.json').write_text(config_text)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r'not a run folder|not written by this project|damaged or not JSON'):
        folder.open_run(tmp_path, CONFIG, resume=flag == 'resume', overwrite=flag == 'overwrite')
    assert contents(tmp_path) == before


def test_resume_of_nothing_starts_anew(tmp_path):
    with folder.open_run(tmp_path / 'run', CONFIG, resume=True) as run:
        assert not run.resumed
    with folder.open_run(tmp_path / 'run', CONFIG, resume=True) as run:
        assert run.resumed


# ------------------------------------------------------------------------------------------------------------------- comparing


def test_resume_with_other_run_control(tmp_path):
    lines = []
    folder.open_run(tmp_path, CONFIG).close()
    with folder.open_run(tmp_path, config(run__num_updates=200), resume=True, mutable={'run'}, announce=lines.append) as run:
        assert run.resumed
        assert run.changed == {'run.num_updates': (100, 200)}
        assert folder.read_config(run.path)['run']['num_updates'] == 200
    assert lines == [f'resuming {tmp_path} with run.num_updates 100 -> 200']


@pytest.mark.parametrize(
    ('given', 'found'),
    [
        (config(agent__kl_budget=1.0), 'agent.kl_budget 0.5 -> 1.0'),
        (config(agent__hidden_sizes=[32]), r'agent.hidden_sizes \[32, 32\] -> \[32\]'),
        (config(agent__new=None), r'agent.new \(absent\) -> null'),
        ({'env': 'x', 'run': CONFIG['run']}, r'agent.name "trqam" -> \(absent\), agent.kl_budget'),
        (config(env='y', run__log_interval=True), 'env "x" -> "y"'),
        (config(env={'name': 'x'}), r'env "x" -> \(absent\), env.name \(absent\) -> "x"'),
        (config(agent__kl_budget=True), 'agent.kl_budget 0.5 -> true'),
        (config(runs={'num_updates': 3}), r'runs.num_updates \(absent\) -> 3'),
        (config(empty={}), r'empty \(absent\) -> {}'),
    ],
)
def test_resume_with_another_configuration(tmp_path, given, found):
    folder.open_run(tmp_path, CONFIG).close()
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=found) as info:
        folder.open_run(tmp_path, given, resume=True, mutable={'run'})
    assert '\n' not in str(info.value)
    assert 'run.log_interval' not in str(info.value)
    after = contents(tmp_path)
    assert after['config.json'] == before['config.json']
    folder.open_run(tmp_path, CONFIG, resume=True).close()  # the lock was released


def test_equal_configurations(tmp_path):
    """What JSON can't tell apart is no difference: tuples and lists, 1 and 1.0, numpy and Python numbers, infinities."""
    first = {'a': (1, 2), 'b': 1, 'c': np.float32(0.5), 'd': float('inf'), 'e': float('nan'), 'f': Path('x')}
    folder.open_run(tmp_path, first).close()
    second = {'f': 'x', 'a': np.array([1, 2]), 'b': 1.0, 'c': 0.5, 'd': np.float64('inf'), 'e': None}
    with folder.open_run(tmp_path, second, resume=True) as run:
        assert run.changed == {}
        assert float(run.config['d']) == float('inf')


def test_one_is_not_true():
    assert folder.differences({'a': 1, 'b': 2}, {'a': True, 'b': 2.0}) == {'a': (1, True)}


def test_many_differences_are_cut():
    with pytest.raises(ValueError, match='and 2 more') as info:
        folder._refuse(folder.differences({}, {f'k{i}': 'v' * 500 for i in range(10)}), Path('run'))
    assert len(str(info.value)) < 1200


# -------------------------------------------------------------------------------------------------------------------- deleting


def test_overwrite_deletes_what_is_ours_and_nothing_else(tmp_path):
    folder.open_run(tmp_path, CONFIG).close()
    ours = [
        'metrics.csv',
        'metrics.discarded.csv',
        'summary.json',
        'curve.png',
        'checkpoints/step_000000001/manifest.json',
        'checkpoints/step_000000001/state/d/0',
        'checkpoints/step_000000002.tmp/x',
        'events/a=1/seed_0/events.out.tfevents.1.host.2.3',
        'video/0.mp4',
    ]
    foreign = ['notes.txt', 'metrics_backup.csv', 'checkpoints/keep/best.npz', 'events/a=1/why.txt', 'video/plan.odt', 'sub/summary.json']
    for name in ours + foreign:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    elsewhere = tmp_path.parent / 'elsewhere'
    elsewhere.mkdir()
    (elsewhere / 'precious').write_text('x')
    (tmp_path / 'checkpoints' / 'step_000000009').symlink_to(elsewhere)
    with folder.open_run(tmp_path, config(env='z'), overwrite=True) as run:
        assert not run.resumed
        assert run.config['env'] == 'z'
    assert set(contents(tmp_path)) == {'config.json', 'lock', *foreign}
    assert not (tmp_path / 'checkpoints' / 'step_000000001').exists()
    assert not (tmp_path / 'checkpoints' / 'step_000000009').is_symlink()
    assert (elsewhere / 'precious').exists()
    with folder.open_run(tmp_path, CONFIG, overwrite=True):
        pass


def test_overwrite_that_is_killed_can_be_repeated(tmp_path, monkeypatch):
    folder.open_run(tmp_path, CONFIG).close()
    for name in ('metrics.csv', 'summary.json'):
        (tmp_path / name).write_text('x')
    deleted = []

    def stop_after_one(path):
        if deleted:
            raise KeyboardInterrupt
        deleted.append(path)
        os.unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(folder, '_delete', stop_after_one)
        with pytest.raises(KeyboardInterrupt):
            folder.open_run(tmp_path, CONFIG, overwrite=True)
    assert (tmp_path / 'config.json').exists()
    folder.open_run(tmp_path, CONFIG, overwrite=True).close()
    assert set(contents(tmp_path)) == {'config.json', 'lock'}


# --------------------------------------------------------------------------------------------------------------------- locking

HOLDER = """
import sys, time
from training import folder
try:
    run = folder.open_run(sys.argv[1], {'a': 1}, resume=True)
except ValueError as error:
    print(error, flush=True)
else:
    if sys.argv[2:] == ['fork']:
        import os
        if os.fork() == 0:
            os.close(1)
            time.sleep(5)
            os._exit(0)
    print('open', flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def holder(path, *arguments):
    with subprocess.Popen([sys.executable, '-c', HOLDER, str(path), *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_a_second_process_is_refused_until_the_first_dies(tmp_path):
    path = tmp_path / 'run'
    with holder(path) as (process, answer):
        assert answer == 'open'
        before = contents(path)
        for resume in (True, False):
            with pytest.raises(ValueError, match=rf'in use by process {process.pid} on \S+: wait'):
                folder.open_run(path, {'a': 1}, resume=resume, overwrite=not resume)
        assert contents(path) == before
        process.send_signal(signal.SIGKILL)
        process.wait()
        with folder.open_run(path, {'a': 1}, resume=True) as run:
            assert run.resumed
            with holder(path) as (_, refused):
                assert f'in use by process {os.getpid()}' in refused
    with holder(path) as (_, answer):
        assert answer == 'open'


def test_a_worker_that_outlives_its_parent_does_not_keep_the_lock(tmp_path):
    with holder(tmp_path / 'run', 'fork') as (process, answer):
        assert answer == 'open'
        process.send_signal(signal.SIGKILL)
        process.wait()
        folder.open_run(tmp_path / 'run', {'a': 1}, resume=True).close()


def test_the_same_process_twice(tmp_path):
    run = folder.open_run(tmp_path / 'run', CONFIG)
    (tmp_path / 'link').symlink_to(tmp_path / 'run')
    for path in (tmp_path / 'run', tmp_path / 'link'):
        with pytest.raises(ValueError, match='already open in this process'):
            folder.open_run(path, CONFIG, resume=True)
    with holder(tmp_path / 'run') as (_, refused):  # the failed attempts have not dropped the lock
        assert 'in use' in refused
    run.close()
    run.close()
    folder.open_run(tmp_path / 'link', CONFIG, resume=True).close()


# ----------------------------------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize('name', ['with space', 'ünï/cødé 機械', 'quote\'and"dollar$', '-dash', 'new\nline'])
def test_unusual_names(tmp_path, name):
    with folder.open_run(tmp_path / name, CONFIG) as run:
        assert (run.path / 'config.json').exists()
    folder.open_run(tmp_path / name, CONFIG, resume=True).close()


def test_relative_paths_and_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    with folder.open_run('sub/../relative', CONFIG) as run:
        assert run.path == tmp_path / 'relative'
    with folder.open_run('~/run', CONFIG) as run:
        assert run.path == tmp_path / 'home' / 'run'


def test_a_run_may_be_moved(tmp_path):
    folder.open_run(tmp_path / 'old', CONFIG).close()
    shutil.move(tmp_path / 'old', tmp_path / 'new')
    with folder.open_run(tmp_path / 'new', CONFIG, resume=True) as run:
        assert run.resumed


@pytest.mark.parametrize('path', ['', 'a\0b'])
def test_impossible_names(path):
    with pytest.raises(ValueError, match='not a folder name'):
        folder.open_run(path, CONFIG)


def test_places_where_nothing_can_be_written(tmp_path):
    (tmp_path / 'file').write_text('x')
    with pytest.raises(ValueError, match='is a file: choose another'):
        folder.open_run(tmp_path / 'file', CONFIG)
    with pytest.raises(ValueError, match=r'cannot (open|create) the run folder .*Not a directory'):
        folder.open_run(tmp_path / 'file' / 'run', CONFIG)
    with pytest.raises(ValueError, match=r'cannot (open|create) the run folder .*File name too long'):
        folder.open_run(tmp_path / ('x' * 300), CONFIG)
    assert os.listdir(tmp_path) == ['file']


def test_without_permission(tmp_path, powerless):
    folder.open_run(tmp_path / 'run', CONFIG).close()
    (tmp_path / 'run').chmod(0o555)
    (tmp_path / 'run' / 'lock').chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        with powerless():
            with pytest.raises(ValueError, match=r'cannot create the run folder .*Permission denied'):
                folder.open_run(tmp_path / 'other', CONFIG)
            with pytest.raises(ValueError, match=r'cannot write in the run folder .*Permission denied'):
                folder.open_run(tmp_path / 'run', CONFIG, resume=True)
    finally:
        tmp_path.chmod(0o755)
        (tmp_path / 'run').chmod(0o755)


# ----------------------------------------------------------------------------------------------------------------- small files


def test_json_of_what_training_has(tmp_path):
    value = {
        'float32': np.float32(0.5),
        'int64': np.int64(3),
        'bool': np.bool_(True),
        'array': np.array([[1.0, np.nan], [np.inf, -np.inf]]),
        'jax': jnp.arange(2),
        'half': jnp.ones(2, jnp.bfloat16),
        'words': np.array(['a', 'b']),
        'nan': float('nan'),
        'inf': -float('inf'),
        'path': Path('a/b'),
        'tuple': (1, None, 'ü', False),
        3: {'nested': {}},
    }
    folder.write_json(tmp_path / 'x.json', value)
    text = (tmp_path / 'x.json').read_text()
    assert 'NaN' not in text
    assert 'Infinity' not in text
    assert folder.read_json(tmp_path / 'x.json') == {
        'float32': 0.5,
        'int64': 3,
        'bool': True,
        'array': [[1.0, None], ['inf', '-inf']],
        'jax': [0, 1],
        'half': [1.0, 1.0],
        'words': ['a', 'b'],
        'nan': None,
        'inf': '-inf',
        'path': 'a/b',
        'tuple': [1, None, 'ü', False],
        '3': {'nested': {}},
    }
    assert folder.read_json(tmp_path / 'x.json')['bool'] is True


@pytest.mark.parametrize('value', [{1}, object(), b'x', np.array([object()]), np.complex64(1j), lambda: None])
def test_json_of_other_things(tmp_path, value):
    with pytest.raises(ValueError, match='as JSON'):
        folder.write_json(tmp_path / 'x.json', {'a': [value]})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('place', ['os.fsync', 'os.replace'])
def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch, place):
    path = tmp_path / 'x.json'
    folder.write_json(path, {'old': 1})

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(place, full)
        with pytest.raises(ValueError, match=r'cannot write .*x.json: No space left on device$'):
            folder.write_json(path, {'new': 2})
    assert folder.read_json(path) == {'old': 1}
    assert os.listdir(tmp_path) == ['x.json']


@pytest.mark.parametrize('content', [b'', b'{"a": ', b'\xff\xfe', b'{"a": 1} x', b'[' * 100_000])
def test_damaged_json(tmp_path, content):
    path = tmp_path / 'x.json'
    path.write_bytes(content)
    with pytest.raises(ValueError, match='damaged or not JSON') as info:
        folder.read_json(path)
    assert '\n' not in str(info.value)


def test_missing_json(tmp_path):
    with pytest.raises(ValueError, match=r'cannot read .*: No such file'):
        folder.read_json(tmp_path / 'x.json')
    with pytest.raises(ValueError, match=r'cannot read .*: Is a directory'):
        folder.read_json(tmp_path)


# ------------------------------------------------------------------------------------------------------------------ provenance


def test_provenance():
    found = folder.provenance()
    assert found['python'] == '.'.join(map(str, sys.version_info[:3]))
    assert found['versions']['numpy'] == np.__version__
    assert set(found['versions']) == set(folder.PACKAGES)
    assert found['command'] == sys.argv
    assert found['cpu_count'] == os.cpu_count()
    json.loads(folder.to_json(found))
    assert folder._version('no-such-package-here') is None


def git(path: Path, *arguments: str) -> str:
    identity = ['-c', 'user.name=a', '-c', 'user.email=a@b', '-c', 'commit.gpgsign=false']
    environment = {name: value for name, value in os.environ.items() if not name.startswith('GIT_')}
    command = ['git', *identity, *arguments]
    return subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_git_state(tmp_path, monkeypatch):
    assert folder._git_state(tmp_path / 'nowhere') == (None, None)
    git(tmp_path, 'init')
    (tmp_path / 'a').write_text('1')
    git(tmp_path, 'add', 'a')
    git(tmp_path, 'commit', '-m', 'x')
    commit = git(tmp_path, 'rev-parse', 'HEAD')
    assert folder._git_state(tmp_path) == (commit, False)
    (tmp_path / 'site-packages').mkdir()
    (tmp_path / 'site-packages' / 'b').write_text('2')
    assert folder._git_state(tmp_path) == (commit, True)
    assert folder._git_state(tmp_path / 'site-packages') == (None, None)  # an installed copy inside somebody's checkout
    monkeypatch.setenv('GIT_DIR', str(tmp_path / 'other'))  # as in a hook
    assert folder._git_state(tmp_path) == (commit, True)
    monkeypatch.setenv('PATH', '')
    assert folder._git_state(tmp_path) == (None, None)
