"""The command line as a user meets it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data import npz

ROOT = Path(__file__).resolve().parents[2]
MAZE = 'ogbench/pointmaze-medium-singletask-task1-v0'


def script(name, *arguments, cwd=None):
    environment = {**os.environ, 'XLA_FLAGS': '--xla_force_host_platform_device_count=2'}
    return subprocess.run(
        [sys.executable, str(ROOT / 'scripts' / f'{name}.py'), *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A folder with a small file of maze trajectories and a finished run of two seeds and two settings."""
    path = tmp_path_factory.mktemp('runs')
    made = script('generate', '--env=ogbench/pointmaze-medium-explore-v0', '--num_episodes=2', f'--out={path / "data.npz"}')
    assert made.returncode == 0, made.stderr
    done = train(path, path / 'bc', '--grid.learning_rate=0.001,0.01', '--num_seeds=2', '--num_updates=40', '--eval_episodes=0')
    assert done.returncode == 0, done.stderr
    return path


def train(path, out, *arguments, agent='bc_flow'):
    sizes = ['--agent.hidden_sizes=8', '--agent.batch_size=8', '--agent.flow_steps=2']
    return script('train', f'--agent={agent}', *sizes, f'--env={MAZE}', f'--dataset={path / "data.npz"}', f'--out={out}', *arguments)


def test_a_run_leaves_what_the_docs_say(folder):
    assert {'config.json', 'metrics.csv', 'summary.json', 'curve.png', 'checkpoints', 'events'} <= {
        path.name for path in (folder / 'bc').iterdir()
    }
    summary = json.loads((folder / 'bc' / 'summary.json').read_text())
    assert summary['agent'] == 'bc_flow'
    assert summary['env'] == MAZE
    assert summary['num_updates'] == 40
    assert summary['settings'] == ['learning_rate=0.001', 'learning_rate=0.01']
    config = json.loads((folder / 'bc' / 'config.json').read_text())
    assert config['dataset_hash']
    assert config['provenance']['devices']


def test_start_from_the_clone_evaluate_and_compare(folder):
    """One process each: train TRQAM from the clone with evaluation, evaluate it again, compare it with itself."""
    grid = [
        '--grid.learning_rate=0.001,0.01',
        '--num_seeds=2',
        '--num_updates=4',
        f'--init.bc={folder / "bc"}',
        '--eval_episodes=1',
        '--num_workers=0',
    ]
    sizes = ['--agent.critic_hidden_sizes=8', '--agent.num_critics=2']
    done = train(folder, folder / 'trqam', *grid, *sizes, agent='trqam')
    assert done.returncode == 0, done.stderr
    assert 'step-0 actions differ by at most 0.00e+00' in done.stderr
    assert 'eval/success' in done.stdout
    evaluated = script('evaluate', f'--run={folder / "trqam"}', '--num_episodes=1', '--mode=base', '--num_workers=0')
    assert evaluated.returncode == 0, evaluated.stderr
    result = json.loads((folder / 'trqam' / 'evaluation.json').read_text())
    assert (result['mode'], result['updates']) == ('base', 4)
    compared = script('compare', folder / 'trqam', f'--out={folder / "compare.png"}')
    assert compared.returncode == 0, compared.stderr
    assert (folder / 'compare.png').stat().st_size > 1000
    assert compared.stdout.count('trqam learning_rate') == 3


def test_an_existing_run_is_refused_then_extended(folder):
    common = ['--grid.learning_rate=0.001,0.01', '--num_seeds=2', '--eval_episodes=0']
    refused = train(folder, folder / 'bc', *common, '--num_updates=40')
    assert refused.returncode == 2
    assert '--resume' in refused.stderr
    other = train(folder, folder / 'bc', *common, '--num_updates=60', '--agent.horizon_length=3', '--resume')
    assert other.returncode == 2
    assert 'horizon_length' in other.stderr
    extended = train(folder, folder / 'bc', *common, '--num_updates=60', '--resume')
    assert extended.returncode == 0, extended.stderr
    assert 'resuming after 40 updates' in extended.stderr


BAD = [
    (['--agent=trqm'], 'did you mean trqam'),
    (['--agent=trqam', '--agent.lr=1'], '--agent.learning_rate'),
    (['--agent=trqam', '--lr=1'], '--agent.learning_rate'),
    (['--agent=trqam', '--env_name=x'], '--env'),
    (['-agent=trqam', '--seed_num=3'], '--num_seeds'),
    (['--agent=trqam', '--agent.tau=0.1', '--grid.tau=0.1,0.2', '--env=probe/line', '--out=OUT', '--num_updates=1'], 'not both'),
    (['--agent=trqam', '--agnet.x=1'], 'unknown flag'),
    (['--agent=trqam', '--agent.kl_budget=-1', '--env=probe/line', '--out=OUT', '--num_updates=1'], 'outside its range'),
    (['--agent=trqam', '--grid.kl_budget=1,-1', '--env=probe/line', '--out=OUT', '--num_updates=1'], 'outside its range'),
    (['--agent=trqam', '--agent.batch_size=1e3', '--env=probe/line', '--out=OUT', '--num_updates=1'], 'write 1000, not 1e3'),
    (['--agent=trqam', '--env=probe/lin', '--out=OUT', '--num_updates=1'], 'probe/line'),
    (['--agent=trqam', '--env=probe/line', '--out=OUT', '--num_updates=1', '--preset=x'], 'no agent here uses it yet'),
    (['--agent=trqam', '--env=probe/line', '--out=OUT'], '--num_updates is missing'),
    (['--agent=trqam', '--env=probe/line', '--out=OUT', '--num_updates=1', '--dataset=nothing.npz'], 'no such file'),
    (['--agent=trqam', '--env=probe/line', '--out=OUT', '--num_updates=-1'], 'num_updates'),
    (['--agent=bc_flow', '--env=probe/line', '--out=OUT', '--num_updates=1', '--num_env_steps=5'], 'not both'),
    (['--agent=bc_flow', '--env=probe/line', '--out=OUT', '--num_updates=1'], "needs the source 'data'"),
]


@pytest.fixture(scope='module')
def refusals(tmp_path_factory):
    """Runs every bad command line, two processes at a time. -> [(returncode, stderr, folder is empty)]"""
    from concurrent.futures import ThreadPoolExecutor

    path = tmp_path_factory.mktemp('bad')

    def run(index):
        out = path / str(index)
        done = script('train', *[str(part).replace('OUT', str(out)) for part in BAD[index][0]])
        return done.returncode, done.stderr, not out.exists()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(len(BAD))))


@pytest.mark.parametrize('index', range(len(BAD)))
def test_user_errors_are_one_line_with_exit_code_2(refusals, index):
    code, stderr, untouched = refusals[index]
    assert code == 2, stderr
    assert untouched
    lines = [line for line in stderr.splitlines() if line.strip()]
    assert len(lines) == 1, stderr
    assert lines[0].startswith('error: ')
    assert BAD[index][1] in lines[0]


def test_a_recording_of_another_environment_is_refused(folder, tmp_path):
    npz.write(tmp_path / 'other.npz', np.zeros((5, 3)), np.zeros((5, 1)), lengths=[4], qpos=np.zeros((5, 2)), qvel=np.zeros((5, 2)))
    done = script(
        'train', '--agent=bc_flow', f'--env={MAZE}', f'--dataset={tmp_path / "other.npz"}', f'--out={tmp_path / "run"}', '--num_updates=1'
    )
    assert done.returncode == 2, done.stderr
    assert 'recorded in another environment' in done.stderr
    assert not (tmp_path / 'run').exists()


def test_help_shows_the_fields(folder):
    done = script('train', '--agent=trqam', '--helpfull')
    assert 'radius of the path KL' in done.stdout
    assert 'default 0.005' in done.stdout


def test_report_and_benchmark_name_what_exists():
    for name, known in (('report', 'spine'), ('benchmark', 'fused_updates')):
        done = script(name, 'nothing')
        assert done.returncode == 2
        assert known in done.stderr


def test_doctor_is_content(tmp_path):
    """Run from a folder that holds other packages of our names: ours are used, and that is said."""
    (tmp_path / 'agents').mkdir()
    done = script('doctor', cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert 'FAIL' not in done.stdout
    assert 'loss after 20 updates' in done.stdout
    assert 'has the name of a Tether package' in done.stderr


def test_single_dashes_reach_the_agent(folder):
    """absl takes -agent=NAME too; the flags of its fields must be there then."""
    done = script('train', '-agent', 'trqam', '-agent.kl_budget', '-1', '--env=probe/line', '--out=x', '--num_updates=1')
    assert done.returncode == 2
    assert 'kl_budget=-1.0 is outside its range' in done.stderr


def test_a_run_that_logs_nothing_succeeds(folder):
    done = train(folder, folder / 'nothing', '--num_updates=0', '--eval_episodes=0')
    assert done.returncode == 0, done.stderr
    assert 'curve.png' not in done.stdout
    assert (folder / 'nothing' / 'summary.json').exists()


def test_an_unknown_mode_is_refused_before_anything_is_written(folder):
    sizes = ['--agent.critic_hidden_sizes=8', '--agent.num_critics=2']
    options = ['--num_updates=1', '--eval_modes=bogus', '--eval_episodes=1', '--num_workers=0']
    done = train(folder, folder / 'mode', *sizes, *options, agent='trqam')
    assert done.returncode == 2, done.stderr
    assert "mode 'bogus'" in done.stderr
    assert not (folder / 'mode').exists()


def test_evaluate_refuses_before_it_acts(folder):
    for options, words in (
        (['--env=probe/line'], 'was trained on (2,) and (2,)'),
        ([f'--out={folder / "no" / "x.json"}'], 'folder does not exist'),
    ):
        done = script('evaluate', f'--run={folder / "bc"}', '--num_workers=0', *options)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert done.stdout == ''
    assert not (folder / 'bc' / 'evaluation.json').exists()


@pytest.fixture(scope='module')
def lines(folder):
    """Two finished runs of a probe that are both called run, below a folder with an @ in its name."""
    rows, last = np.zeros((22, 1), np.float32), np.isin(np.arange(22), (10, 21))
    np.savez(folder / 'line.npz', observations=rows, actions=rows, rewards=rows[:, 0], masks=rows[:, 0] + 1, terminals=last)
    for parent, rate in (('me@lab', '0.001'), ('other', '0.01')):
        sizes = ['--agent.hidden_sizes=8', '--agent.batch_size=8', '--agent.flow_steps=2', f'--agent.learning_rate={rate}']
        options = ['--env=probe/line', f'--dataset={folder / "line.npz"}', '--num_seeds=2', '--num_updates=2', '--eval_episodes=2']
        done = script('train', '--agent=bc_flow', *sizes, *options, f'--out={folder / parent / "run"}')
        assert done.returncode == 0, done.stderr
    return folder / 'me@lab' / 'run', folder / 'other' / 'run'


def test_runs_of_one_name_are_both_compared(lines):
    compared = script('compare', *lines, f'--out={lines[0] / "compare.png"}')
    assert compared.returncode == 0, compared.stderr
    assert [compared.stdout.count(f'{path} ') for path in lines] == [1, 1]
    assert compared.stdout.count('P(better)') == 1
    twice = script('compare', lines[0], lines[0], f'--out={lines[0] / "twice.png"}')
    assert twice.returncode == 2
    assert 'given twice' in twice.stderr


def test_evaluations_lie_beside_their_run(lines):
    """The folder is me@lab/run."""
    done = script('evaluate', f'--run={lines[0]}@2', '--num_episodes=1', '--num_workers=0')
    assert done.returncode == 0, done.stderr
    result = json.loads((lines[0] / 'evaluation.json').read_text())
    assert result['diverged'] == [False, False]


@pytest.mark.parametrize(
    ('which', 'backend', 'words'),
    [
        ('maze', 'glfw', 'with MUJOCO_GL=glfw ('),  # fails when something is drawn: there is no display
        ('maze', 'unheard_of', 'with MUJOCO_GL=unheard_of ('),  # fails when mujoco is imported, like a library that is not there
        ('line', 'egl', 'runs on the device'),
    ],
)
def test_a_video_that_cannot_be_made_is_one_line(folder, lines, tmp_path, monkeypatch, which, backend, words):
    for name in ('DISPLAY', 'WAYLAND_DISPLAY'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('MUJOCO_GL', backend)
    run = {'maze': folder / 'bc', 'line': lines[1]}[which]
    done = script('evaluate', f'--run={run}', '--num_workers=0', '--video', f'--out={tmp_path / "scores.json"}')
    assert (done.returncode, done.stdout) == (2, ''), done.stderr
    assert done.stderr.startswith('error: no video: ')
    assert words in done.stderr
    assert 'leave --video out' in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    assert not (run / 'video').exists()


OWN = """
import sys
import agents
from agents import template
from agents.template import Config, make
agents.register('own_clone', sys.modules[__name__])
"""


def test_an_agent_of_ones_own_is_trained_and_evaluated(folder, tmp_path, monkeypatch):
    (tmp_path / 'own_agent.py').write_text(OWN)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    common = ['--import=own_agent', f'--env={MAZE}', f'--dataset={folder / "data.npz"}', f'--out={tmp_path / "run"}']
    done = script('train', '--agent=own_clone', *common, '--num_updates=2', '--eval_episodes=0')
    assert done.returncode == 0, done.stderr
    options = [f'--run={tmp_path / "run"}', '--num_episodes=1', '--num_workers=0']
    unknown = script('evaluate', *options)
    assert unknown.returncode == 2
    assert "unknown agent 'own_clone'" in unknown.stderr
    evaluated = script('evaluate', *options, '--import=own_agent')
    assert evaluated.returncode == 0, evaluated.stderr
