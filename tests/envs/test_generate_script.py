"""scripts/generate.py from the outside."""

import os
import subprocess
import sys

import numpy as np
import pytest

from data import npz

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MAZE = '--env=ogbench/pointmaze-medium-stitch-singletask-task1-v0'


def run(*arguments):
    return subprocess.run([sys.executable, 'scripts/generate.py', *arguments], cwd=ROOT, capture_output=True, text=True)


def test_both_files(tmp_path):
    out = tmp_path / 'new' / 'maze.npz'
    done = run(MAZE, '--num_episodes=21', '--seed=3', f'--out={out}', '--num_workers=2')
    assert done.returncode == 0, done.stderr
    assert 'goals reached' in done.stdout
    assert 'per second' in done.stdout
    assert '23/23 episodes' in done.stderr  # 21 and a tenth of them; stderr is no terminal: lines, no bar
    train, validation = npz.read(out), npz.read(tmp_path / 'new' / 'maze-val.npz')
    assert (len(train['lengths']), len(validation['lengths'])) == (21, 2)
    assert sorted(path.name for path in out.parent.iterdir()) == ['maze-val.npz', 'maze.npz']

    before = out.read_bytes()
    refused = run(MAZE, '--num_episodes=1', f'--out={out}')
    assert refused.returncode == 2
    assert refused.stderr.startswith('error: this would replace')
    assert out.read_bytes() == before

    again = run(MAZE, '--num_episodes=2', '--seed=3', f'--out={out}', '--overwrite')
    assert again.returncode == 0, again.stderr
    np.testing.assert_array_equal(npz.read(out)['actions'], train['actions'][: 2 * 201])  # the first two of the 21
    assert len(npz.read(tmp_path / 'new' / 'maze-val.npz')['lengths']) == 1  # at least one


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ([], '--env is missing'),
        ([MAZE], '--out is missing'),
        ([MAZE, '--out=maze'], 'must end in .npz'),
        ([MAZE, '--out=x/maze.npz', '--num_episodes=0'], '--num_episodes must be at least 1, not 0'),
        ([MAZE, '--out=x/maze.npz', '--num_episodes=few'], '--num_episodes=few'),
        ([MAZE, '--out=x/maze.npz', 'extra'], "unexpected argument 'extra'"),
        (['--env=ogbench/pointmaze-medum-stitch-v0', '--out=x/maze.npz'], 'did you mean ogbench/pointmaze-medium-stitch-v0'),
    ],
)
def test_mistakes_get_one_line_and_leave_nothing(arguments, message, tmp_path):
    done = run(*(argument.replace('--out=', f'--out={tmp_path}/') for argument in arguments))
    assert done.returncode == 2
    assert done.stderr.startswith('error: ')
    assert done.stderr.count('\n') == 1
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []
