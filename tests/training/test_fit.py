"""`fit` and its folder: resume, signals, damage, full disks, extension. Kill -9 is in test_resume.py."""

import collections
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

import agents
import envs
import training
from agents.types import Stage
from data.dataset import from_trajectories
from envs.types import ArraySpec, Spec
from training import checkpoints, logger, space

SPEC = Spec(ArraySpec((1,)), ArraySpec((1,), -1, 1), 20)
UPDATES = 12


@pytest.fixture(scope='module')
def make_dataset():
    def make(seed, episodes):
        random = np.random.default_rng(seed)
        rows = episodes * 21
        observations, actions = random.uniform(-1, 1, (2, rows, 1)).astype(np.float32)
        return from_trajectories(observations, actions, -np.ones(rows, np.float32), np.ones(rows, np.float32), np.full(episodes, 20))

    return make


@pytest.fixture(scope='module')
def train(make_dataset):
    """train(out, ...) -> (Result, lines of news): a tiny clone, evaluated and saved every 4 updates."""
    agent = agents.make('bc_flow', SPEC, hidden_sizes=(8,), batch_size=8, horizon_length=2, flow_steps=2)
    dataset = make_dataset(0, 6)

    def run(out, updates=UPDATES, seeds=(0, 1), config=None, control=None, **keywords):
        news: list[str] = []
        intervals = {
            'log_interval': 4,
            'eval_interval': 4,
            'eval_episodes': 2,
            'checkpoint_interval': 4,
            'checkpoint_keep': 3,
            'num_devices': 1,
        }
        result = training.fit(
            agent,
            dataset,
            updates,
            seeds,
            eval_env='probe/line:horizon=4',
            control=training.Control(**{**intervals, **(control or {})}),
            out=out,
            config={'agent': {'name': 'bc_flow'}, 'seeds': list(seeds), **(config or {})},
            announce=news.append,
            **keywords,
        )
        return result, news

    return run


@pytest.fixture(scope='module')
def whole(train, tmp_path_factory):
    """(folder, Result) of an uninterrupted run."""
    folder = tmp_path_factory.mktemp('whole') / 'run'
    return folder, train(folder)[0]


def assert_equal_states(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def assert_equal_rows(ours, theirs):
    rows, others = logger.read(ours), logger.read(theirs)
    assert rows.keys() == others.keys()
    for name, values in rows.items():
        np.testing.assert_array_equal(values, others[name], err_msg=name)


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob('*')) if path.is_file()}


def stop_at(update, evaluation=False):
    """A progress_fn that sends SIGTERM when the row of this update is written."""

    def progress(done, metrics):
        if done == update and any(name.startswith('eval/') for name in metrics) == evaluation:
            os.kill(os.getpid(), signal.SIGTERM)

    return progress


@pytest.mark.parametrize('update', [4, UPDATES])
def test_a_signal_during_an_evaluation_loses_nothing(train, whole, tmp_path, update):
    """The evaluation is abandoned; the resumed run begins with it, also where it was the last thing to do."""
    run = tmp_path / 'run'
    result, news = train(run, progress_fn=stop_at(update))
    assert result.stopped
    assert any('continue with --resume' in line for line in news)
    assert not (run / 'summary.json').exists()
    result, _ = train(run, resume=True)
    assert not result.stopped
    assert_equal_states(result.state, whole[1].state)
    assert_equal_rows(run, whole[0])
    assert result.summary['eval'] == whole[1].summary['eval']
    assert result.summary['eval_before'] == whole[1].summary['eval_before']


def test_an_evaluation_made_good_is_written_once(train, whole, tmp_path):
    """Stopped in the evaluation after 4 updates, resumed, and stopped again right behind it, before the next checkpoint."""
    run = tmp_path / 'run'
    train(run, progress_fn=stop_at(4))

    def die(done, metrics):
        if done == 4 and 'eval/return' in metrics:
            raise RuntimeError('killed')

    with pytest.raises(RuntimeError, match='killed'):
        train(run, resume=True, progress_fn=die)
    train(run, resume=True)
    assert_equal_rows(run, whole[0])


def test_a_signal_before_the_first_update(train, whole, tmp_path):
    run = tmp_path / 'run'
    result, _ = train(run, progress_fn=stop_at(0, evaluation=True))
    assert result.stopped
    assert result.summary['num_updates'] == 0
    result, _ = train(run, resume=True)
    assert_equal_states(result.state, whole[1].state)
    assert_equal_rows(run, whole[0])


def test_a_second_signal_ends_the_process_at_once():
    program = (
        'import os, signal\nfrom training.terminal import Signals\nwith Signals() as signals:\n'
        '    os.kill(os.getpid(), signal.SIGTERM)\n    print(signals.received, flush=True)\n'
        '    os.kill(os.getpid(), signal.SIGTERM)\n    print("still here", flush=True)\n'
    )
    ended = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, f'{int(signal.SIGTERM)}\n')


def test_a_finished_run_resumes_to_itself(train, whole):
    rows = (whole[0] / 'metrics.csv').read_bytes()
    result, _ = train(whole[0], resume=True)
    assert_equal_states(result.state, whole[1].state)
    assert result.summary['eval'] == whole[1].summary['eval']
    assert (whole[0] / 'metrics.csv').read_bytes() == rows


def test_what_resume_and_overwrite_refuse(train, whole):
    before = content(whole[0])
    for keywords, message in (
        ({}, 'add --resume'),
        ({'resume': True, 'overwrite': True}, 'choose one of'),
        ({'resume': True, 'config': {'agent': {'name': 'qam'}}}, 'agent.name "bc_flow" -> "qam"'),
        ({'resume': True, 'seeds': (0, 2)}, r'seeds \[0, 1\] -> \[0, 2\]'),
        ({'resume': True, 'updates': 8}, 'has done 12 updates already: ask for at least as many, not 8'),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            train(whole[0], **keywords)
        assert '\n' not in str(caught.value)
        assert content(whole[0]) == before


def test_overwrite_starts_anew(train, whole, tmp_path):
    run = tmp_path / 'run'
    train(run, updates=4)
    result, _ = train(run, overwrite=True)
    assert_equal_states(result.state, whole[1].state)
    assert_equal_rows(run, whole[0])


@pytest.mark.parametrize(('updates', 'discarded'), [(8, []), (10, [10] * 4)])
def test_an_extended_run_is_a_longer_one(train, whole, tmp_path, updates, discarded):
    """Rows of two seeds every 4 updates: a log and an evaluation that were written after 10, because they were the last, move away."""
    run = tmp_path / 'run'
    train(run, updates=updates)
    assert logger.read(run)['update'].max() == updates
    result, _ = train(run, resume=True)
    assert_equal_states(result.state, whole[1].state)
    assert (run / 'metrics.csv').read_text() == (whole[0] / 'metrics.csv').read_text()
    assert discarded_updates(run) == discarded
    assert {**result.summary, **TIMES} == {**whole[1].summary, **TIMES}


def test_an_extended_run_may_keep_its_last_log_but_not_its_last_evaluation(train, tmp_path):
    """8 is on the interval of the log; without an interval the only evaluations are the first and the last one."""
    run, control = tmp_path / 'run', {'eval_interval': 0}
    train(run, updates=8, control=control)
    train(run, resume=True, control=control)
    rows = logger.read(run)
    for metric, updates in (('actor/clone_loss', [4, 8, 12]), ('eval/length', [0, 12])):
        assert rows['update'][np.isfinite(rows[metric])].tolist() == np.repeat(updates, 2).tolist()
    assert discarded_updates(run) == [8, 8]


def test_an_evaluation_that_is_due_only_at_the_end_is_not_made_good_when_extended(train, whole, tmp_path):
    """A signal abandons the evaluation after 10 updates; the run of 12 has none there."""
    run = tmp_path / 'run'
    assert train(run, updates=10, progress_fn=stop_at(10))[0].stopped
    train(run, resume=True)
    assert_equal_rows(run, whole[0])
    assert discarded_updates(run) == [10, 10]


TIMES = dict.fromkeys(('wall_seconds', 'compile_seconds', 'updates_per_second'))


def discarded_updates(run):
    if not (run / 'metrics.discarded.csv').exists():
        return []
    _, *rows = (run / 'metrics.discarded.csv').read_text().splitlines()
    return [int(row.partition(',')[0]) for row in rows]


def truncate(step):
    victim = max((path for path in step.rglob('*') if path.is_file()), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1])


def flip(step):
    victim = max((path for path in step.rglob('*') if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(bytes(data))


def lose(step):
    next(path for path in (step / 'state').rglob('*') if path.is_file()).unlink()


def empty(step):
    for path in sorted(step.rglob('*'), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize('damage', [truncate, flip, lose, empty])
def test_a_damaged_newest_checkpoint_is_passed_over(train, whole, tmp_path, damage):
    run = tmp_path / 'run'
    train(run, progress_fn=stop_at(8, evaluation=True))
    steps = sorted((run / 'checkpoints').glob('step_*'))
    assert [step.name for step in steps] == ['step_000000004', 'step_000000008']
    damage(steps[-1])
    result, news = train(run, resume=True)
    assert any('passing over checkpoint' in line and 'step_000000008' in line for line in news)
    assert any('resuming after 4 updates' in line for line in news)
    assert_equal_states(result.state, whole[1].state)
    assert_equal_rows(run, whole[0])
    assert checkpoints.Checkpoints(run / 'checkpoints').verify(8) is None


def test_a_full_disk_does_not_end_the_training(train, whole, tmp_path, monkeypatch):
    """The checkpoint after 4 updates cannot be written; the later ones can."""
    write = checkpoints._write

    def full(path, step, *arguments):
        if step == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, step, *arguments)

    monkeypatch.setattr(checkpoints, '_write', full)
    result, news = train(tmp_path / 'run')
    assert any('No space left on device; training goes on' in line for line in news)
    assert_equal_states(result.state, whole[1].state)
    assert sorted(path.name for path in (tmp_path / 'run' / 'checkpoints').iterdir()) == ['step_000000008', 'step_000000012']


def test_two_devices_over_several_calls(train, whole):
    """12 updates in 6 calls: the carry that comes back must fit the program again."""
    result, _ = train(None, control={'num_devices': 2, 'updates_per_call': 2})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), result.state.params, whole[1].state.params)


def test_a_stage_may_have_its_own_data(make_dataset):
    """Four updates on A, then four on B, equal a run on A continued on B; the data have other sizes."""
    agent = agents.make('bc_flow', SPEC, hidden_sizes=(8,), batch_size=8, horizon_length=2, flow_steps=2)
    first, second = make_dataset(1, 3), make_dataset(2, 5)
    keywords: dict[str, Any] = {'control': training.Control(num_devices=1), 'announce': lambda message: None}
    both = training.fit(agent, first, stages=[Stage('train', 4), Stage('train', 4, data={'data': second})], **keywords)
    alone = training.fit(agent, first, 8, **keywords)
    swapped = training.fit(agent, second, stages=[Stage('train', 4, data={'data': first}), Stage('train', 4)], **keywords)
    assert_equal_states(both.state.params, swapped.state.params)
    assert not np.array_equal(jax.tree.leaves(both.state.params)[0], jax.tree.leaves(alone.state.params)[0])


# ------------------------------------------------------------------------------------------------------------ the online dummy


def online(dummies, name, stages, out=None, **keywords):
    env_name = f'probe/{name}:horizon=10'
    intervals = {'log_interval': 6, 'num_devices': 1, **keywords.pop('control', {})}
    sources = {source: envs.make(env_name, num_envs=4) for source in ('env', 'other')}
    rows: dict[int, dict] = {}
    result = training.fit(
        dummies.make(sources['env'].spec),
        sources=sources,
        num_envs=2,
        replay_capacity=64,
        stages=stages,
        seeds=(0, 1),
        progress_fn=lambda update, metrics: rows.update({update: {key: np.asarray(value) for key, value in metrics.items()}}),
        control=training.Control(**intervals),
        out=out,
        **{'announce': lambda message: None, **keywords},
    )
    return result, rows


@pytest.mark.parametrize('name', ['line', 'host-line'])
def test_rows_hold_the_last_finite_value_however_updates_are_fused(dummies, tmp_path, name):
    """A rider in updates 1 and 8, and a row every 3: its value is in the row after 9 updates, though it ran in an earlier call."""
    stages = [Stage('train', 12, {'collect': 7})]
    control = {'log_interval': 3, 'checkpoint_interval': 2, 'checkpoint_keep': 3}
    _, fused = online(dummies, name, stages, control=control | {'checkpoint_interval': 0})
    result, single = online(dummies, name, stages, out=tmp_path / 'run', control=control | {'updates_per_call': 1})
    finite = {update: bool(np.isfinite(row['collect/valid']).all()) for update, row in fused.items()}
    assert finite == {3: True, 6: False, 9: True, 12: False}
    for update, row in fused.items():
        assert row.keys() == single[update].keys()
        for key, values in row.items():
            np.testing.assert_array_equal(values, single[update][key], err_msg=f'{update} {key}')
    # Resumed after 8 updates: the row after 9 still has the value of the rider.
    before = (tmp_path / 'run' / 'metrics.csv').read_text()
    for step in (10, 12):
        lose(tmp_path / 'run' / 'checkpoints' / f'step_{step:09d}')
    resumed, _ = online(dummies, name, stages, out=tmp_path / 'run', resume=True, control=control | {'updates_per_call': 1})
    assert (tmp_path / 'run' / 'metrics.csv').read_text() == before
    assert_equal_states(resumed.state, result.state)


def test_an_extended_run_logs_what_happened_before_its_old_end(dummies, tmp_path):
    """A row every 3 updates. The rider of update 8 is in the last row of a run of 8; once extended, it is in the row after 9."""
    online(dummies, 'line', [Stage('train', 12, {'collect': 7})], out=tmp_path / 'whole', control={'log_interval': 3})
    for count in (8, 12):
        stages = [Stage('train', count, {'collect': 7})]
        online(dummies, 'line', stages, out=tmp_path / 'run', resume=True, control={'log_interval': 3}, config={'count': count})
        rows = logger.read(tmp_path / 'run')
        assert np.isfinite(rows['collect/valid'][rows['update'] == min(count, 9)]).all()
    assert (tmp_path / 'run' / 'metrics.csv').read_text() == (tmp_path / 'whole' / 'metrics.csv').read_text()
    assert discarded_updates(tmp_path / 'run') == [8, 8]


def test_a_host_environment_that_has_not_been_used_yet_is_saved(dummies, tmp_path):
    """Only 'other' is acted in before the first checkpoint; 'env' starts in the second stage."""
    stages = [Stage('collect', 2), Stage('train', 2)]
    control = {'checkpoint_interval': 1, 'checkpoint_keep': 4}
    whole, _ = online(dummies, 'host-line', stages, out=tmp_path / 'run', control=control)
    for step in range(2, 5):
        lose(tmp_path / 'run' / 'checkpoints' / f'step_{step:09d}')
    resumed, _ = online(dummies, 'host-line', stages, out=tmp_path / 'run', resume=True, control=control)
    assert_equal_states(resumed.state, whole.state)
    assert resumed.summary['num_env_steps'] == whole.summary['num_env_steps']


def test_a_need_without_batch_size_reads_everything_stored(dummies):
    """Two rollouts of 8 control steps in 2 environments: what they acted is stored, and the blocks hold each row once."""
    _, rows = online(dummies, 'line', [Stage('collect', 2), Stage('count', 1)], control={'log_interval': 1})
    np.testing.assert_array_equal(rows[3]['count/valid'], rows[1]['collect/valid'] + rows[2]['collect/valid'])
    assert (rows[3]['count/valid'] > 0).all()


def test_two_devices_act_like_one(dummies):
    stages = [Stage('train', 4, {'collect': 2})]
    one, rows = online(dummies, 'line', stages, control={'log_interval': 1})
    two, others = online(dummies, 'line', stages, control={'log_interval': 1, 'num_devices': 2})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), two.state, one.state)
    np.testing.assert_array_equal(rows[4]['fresh/valid'], others[4]['fresh/valid'])


# ------------------------------------------------------------------------------------------------------------ replays on the disk


IN_PARTS: dict[str, Any] = {'control': {'log_interval': 2, 'checkpoint_interval': 2, 'checkpoint_keep': 3}}


@pytest.fixture(scope='module', params=['line', 'host-line'])
def acted(request, dummies, tmp_path_factory):
    """(name, folder, Result) of 12 updates that were saved every 2, with a replay that is read from 'other'."""
    folder = tmp_path_factory.mktemp('acted') / 'run'
    return request.param, folder, online(dummies, request.param, [Stage('train', 12, {'collect': 3})], folder, **IN_PARTS)[0]


def parts_of(run, step):
    (entries,) = json.loads((run / 'checkpoints' / f'step_{step:09d}' / 'parts.json').read_text()).values()
    return [run / 'checkpoints' / entry['file'] for entry in entries]


def stored_replay(run):
    """The replay of the newest checkpoint: {name: array}."""
    store = checkpoints.Checkpoints(run / 'checkpoints')
    path = store.path(store.steps()[-1])
    stored, _ = checkpoints._read_descriptions(path)
    arrays, _ = checkpoints._read(path, stored, checkpoints._listed(path))
    return {name: values for name, values in arrays.items() if 'replays' in name}


def test_a_checkpoint_adds_a_part(acted):
    """The rider acts in updates 1, 4, 7 and 10: between checkpoints 2 and 4, 6 and 8, 8 and 10, but not 4 and 6 or 10 and 12."""
    _, run, _ = acted
    assert [path.name for path in parts_of(run, 12)] == [f'step_{step:09d}.replay_0.npz' for step in (2, 4, 8, 10)]
    assert sorted(path.name for path in (run / 'checkpoints').iterdir() if path.is_file()) == [path.name for path in parts_of(run, 12)]


def test_a_damaged_part_costs_one_checkpoint_and_no_number(acted, dummies, tmp_path):
    """12 and 10 need the part of 10; the run goes on after 8 updates and comes to the same end."""
    name, whole, result = acted
    run = tmp_path / 'run'
    shutil.copytree(whole, run)
    victim = parts_of(run, 12)[-1]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(bytes(data))
    news: list[str] = []
    stages = [Stage('train', 12, {'collect': 3})]
    resumed, _ = online(dummies, name, stages, run, resume=True, announce=news.append, **IN_PARTS)
    passed = [line for line in news if 'passing over' in line]
    assert [f'step_{step:09d}: its part {victim.name} has another SHA-256' in line for step, line in zip((12, 10), passed, strict=True)]
    assert 'resuming after 8 updates' in news[-1]
    assert_equal_states(resumed.state, result.state)
    assert (run / 'metrics.csv').read_text() == (whole / 'metrics.csv').read_text()
    jax.tree.map(np.testing.assert_array_equal, stored_replay(run), stored_replay(whole))
    assert [path.read_bytes() for path in parts_of(run, 12)] == [path.read_bytes() for path in parts_of(whole, 12)]


def test_an_extended_run_goes_on_with_its_parts(acted, dummies, tmp_path):
    name, whole, result = acted
    run = tmp_path / 'run'
    for count in (8, 12):
        extended, _ = online(dummies, name, [Stage('train', count, {'collect': 3})], run, resume=True, config={'count': count}, **IN_PARTS)
    assert_equal_states(extended.state, result.state)
    jax.tree.map(np.testing.assert_array_equal, stored_replay(run), stored_replay(whole))
    assert [path.name for path in parts_of(run, 12)] == [path.name for path in parts_of(whole, 12)]


def test_members_on_two_devices_resume(dummies, tmp_path):
    control = {**IN_PARTS['control'], 'num_devices': 2}
    stages = [Stage('train', 6, {'collect': 2})]
    whole, _ = online(dummies, 'line', stages, tmp_path / 'run', control=control)
    stored = stored_replay(tmp_path / 'run')
    lose(tmp_path / 'run' / 'checkpoints' / 'step_000000006')
    resumed, _ = online(dummies, 'line', stages, tmp_path / 'run', resume=True, control=control)
    assert_equal_states(resumed.state, whole.state)
    jax.tree.map(np.testing.assert_array_equal, stored_replay(tmp_path / 'run'), stored)


def test_overwriting_deletes_the_parts(acted, dummies, tmp_path):
    name, whole, _ = acted
    run = tmp_path / 'run'
    shutil.copytree(whole, run)
    online(dummies, name, [Stage('train', 1)], run, overwrite=True, **IN_PARTS)
    assert sorted(path.name for path in (run / 'checkpoints').iterdir()) == ['step_000000001']


def test_the_size_is_said_at_the_start(dummies, tmp_path):
    """A row is 2 x 4 B observation, 4 B action, 3 x 4 B reward, mask, truncation, 2 x 4 B extras = 32 B; 64 rows, 2 environments, 2 seeds.

    'collect' runs in updates 1, 4, 7, 10 of 12, for 8 steps each: at most 32 rows per environment, and 32 x 4 x 32 B = 4096 B.
    """
    news: list[str] = []
    stages = [Stage('train', 12, {'collect': 3})]
    online(dummies, 'line', stages, tmp_path / 'run', announce=news.append, **IN_PARTS)
    assert news[0].startswith('replay: 8.2 kB on the device; checkpoints: ')
    assert news[0].endswith(' of state each, parts of the replay up to 4.1 kB in all')
    online(dummies, 'line', stages, announce=news.append, **IN_PARTS)
    assert news[1:] == ['replay: 8.2 kB on the device']


def test_a_replay_that_cannot_fit_is_refused(dummies, train, tmp_path, monkeypatch):
    """Before anything is allocated or written, in one line; runs without a replay are held against the disk only."""
    free = collections.namedtuple('usage', 'total used free')
    stages, run = [Stage('train', 12, {'collect': 3})], tmp_path / 'run'
    with monkeypatch.context() as patch:
        patch.setattr(space, 'free_memory', lambda devices: 8000)
        with pytest.raises(ValueError, match=r'take 8\.\d kB, but 8\.0 kB of memory are free: lower --replay_capacity=64$'):
            online(dummies, 'line', stages, run, **IN_PARTS)
        train(None)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: free(0, 0, 4000))
    with pytest.raises(
        ValueError, match=r'has room for 4\.0 kB: lower --replay_capacity=64 or --checkpoint_keep=3, or choose another --out$'
    ):
        online(dummies, 'line', stages, run, **IN_PARTS)
    with pytest.raises(ValueError, match=r'has room for 4\.0 kB: lower --checkpoint_keep=3, or choose another --out$'):
        train(run)
    assert not run.exists()
    train(None)
