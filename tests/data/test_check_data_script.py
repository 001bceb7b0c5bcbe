"""scripts/check_data.py as a user runs it, and what scripts/startup.py makes of errors."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments, cwd=ROOT):
    command = [sys.executable, str(ROOT / 'scripts' / 'check_data.py'), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def columns(n=4):
    xy = np.arange(2.0 * n).reshape(n, 2) / 10
    return {'observations': xy, 'actions': np.zeros((n, 2)), 'terminals': np.arange(n) == n - 1, 'qpos': xy.copy(), 'qvel': xy.copy()}


def test_sound_files_from_another_folder(tmp_path):
    np.savez(tmp_path / 'a.npz', **columns(4))
    np.savez(tmp_path / 'b.npz', **columns(6))
    result = run('a.npz', 'b.npz', cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, '')
    assert '1 episodes, 3 transitions, 4 observations' in result.stdout
    assert '1 episodes, 5 transitions, 6 observations' in result.stdout


def test_one_line_per_defect_and_the_good_file_is_still_reported(tmp_path):
    bad = columns()
    bad['observations'][1, 1] = np.nan
    bad['terminals'][-1] = False
    np.savez(tmp_path / 'bad.npz', **bad)
    np.savez(tmp_path / 'good.npz', **columns())
    (tmp_path / 'page.npz').write_text('<html></html>')
    result = run(*(tmp_path / name for name in ('bad.npz', 'page.npz', 'missing.npz', 'good.npz')))
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 4
    assert all(line.startswith(f'error: {tmp_path}') for line in lines)
    for line, part in zip(lines, ('observations holds 1 NaN', 'last row (3)', 'web page', 'no such file'), strict=True):
        assert part in line
    assert 'good.npz: raw layout' in result.stdout


def test_successes_under_a_task(tmp_path):
    np.savez(tmp_path / 'a.npz', **columns())
    result = run(tmp_path / 'a.npz', '--env=ogbench/pointmaze-medium-navigate-singletask-task1-v0')
    assert (result.returncode, result.stderr) == (0, '')
    assert 'rewards -1 to -1; solved at 0 of 3 transitions, in 0 of 1 episodes' in result.stdout


@pytest.mark.parametrize(
    ('arguments', 'parts'),
    [
        ((), ('no file given', 'FILE...')),
        (('--enw=x', 'a.npz'), ('enw', 'did you mean --env')),
        (('--env=ogbench/nothing-v0', 'a.npz'), ('nothing',)),
    ],
)
def test_wrong_command_lines_end_in_one_line(tmp_path, arguments, parts):
    np.savez(tmp_path / 'a.npz', **columns())
    result = run(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith('error: ')
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ('body', 'code', 'error'),
    [
        ('return 3', 3, ''),
        ('return None', 0, ''),
        ('raise ValueError("two\\n  lines")', 2, 'error: two lines\n'),
        ('open("no/such/file")', 2, "error: [Errno 2] No such file or directory: 'no/such/file'\n"),
        ('raise KeyboardInterrupt', 130, 'interrupted\n'),
    ],
)
def test_startup(body, code, error):
    program = f'from scripts import startup\ndef main(argv):\n    {body}\nstartup.run(main)'
    result = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stderr) == (code, error)


def test_bugs_keep_their_traceback_and_verbosity_shows_that_of_user_errors():
    program = 'from scripts import startup\ndef main(argv):\n    raise {}("x")\nstartup.run(main)'
    for error, flag, code in [('TypeError', '--verbosity=0', 1), ('ValueError', '--verbosity=1', 2)]:
        command = [sys.executable, '-c', program.format(error), flag]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert result.returncode == code
        assert 'Traceback' in result.stderr
