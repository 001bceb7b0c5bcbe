"""The wheel: it holds our packages and commands and nothing else, and works away from the checkout."""

import inspect
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ('agents', 'networks', 'losses', 'optimizers', 'envs', 'data', 'training')
FOLDERS = {**{package: package for package in PACKAGES}, 'tether_scripts': 'scripts'}  # name in the wheel -> folder of the checkout


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    """The unzipped wheel. Built from a copy, since a build leaves its own folders in the tree and reuses what it finds there."""
    source, built, unzipped = (tmp_path_factory.mktemp(name) for name in ('source', 'built', 'unzipped'))
    for name in FOLDERS.values():
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns('__pycache__'))
    for name in ('reports', 'tests'):  # must stay out
        (source / name).mkdir()
        (source / name / '__init__.py').touch()
    for name in ('setup.cfg', 'pyproject.toml', 'LICENSE'):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, '-m', 'build', '--wheel', '--no-isolation', '--outdir', str(built), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = built.glob('*.whl')
    zipfile.ZipFile(path).extractall(unzipped)
    return unzipped


def test_wheel_holds_every_file_of_our_packages_and_nothing_else(wheel):
    def files(folder: Path) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob('*') if path.is_file() and '__pycache__' not in path.parts}

    expected = {f'{package}/{name}' for package, folder in FOLDERS.items() for name in files(ROOT / folder)}
    packed = files(wheel)
    assert {name for name in packed if '.dist-info/' not in name} == expected
    assert any(name.endswith('.dist-info/licenses/LICENSE') for name in packed)


def imported_from(folder, packages):
    import importlib

    for name in packages:
        path = importlib.import_module(name).__file__
        assert str(path).startswith(folder), f'{name} is {path}'


def train_fifty_updates():
    """Runs away from the checkout: the template agent on random transitions."""
    import jax
    import numpy as np

    import agents
    from envs.types import ArraySpec, Spec

    agent = agents.make('template', Spec(ArraySpec((3,)), ArraySpec((2,), -1.0, 1.0), 10))
    generator = np.random.default_rng(0)
    observations = generator.normal(size=(64, 3)).astype(np.float32)
    batches = {'data': {'observations': observations, 'actions': np.tanh(observations[:, :2])}}
    key = jax.random.key(0)
    state = agent.init(key, {name: np.float32(value) for name, value in agent.hyper.items()})
    update = jax.jit(agent.phases['train'].update)
    losses = []
    for step in range(50):
        state, metrics = update(state, batches, step, jax.random.fold_in(key, step))
        losses.append(float(metrics['policy/loss']))
    assert losses[-1] < 0.8 * losses[0], losses


def test_wheel_trains_from_another_directory(wheel, tmp_path):
    """-P keeps the working directory off the path; the editable install of the checkout comes after PYTHONPATH."""
    code = '\n'.join([
        inspect.getsource(imported_from),
        inspect.getsource(train_fifty_updates),
        f'imported_from({str(wheel)!r}, {PACKAGES})',
        'train_fifty_updates()',
    ])  # fmt: skip
    environment = {**os.environ, 'PYTHONPATH': str(wheel)}
    done = subprocess.run([sys.executable, '-P', '-c', code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


COMMAND = """
import sys
from importlib import util
from importlib.metadata import Distribution
sys.argv = sys.argv[1:]
assert [name for name in ('scripts', 'tests', 'reports') if util.find_spec(name)] == []
entries = Distribution.at(PATH).entry_points.select(group='console_scripts')
sys.exit(entries[sys.argv[0]].load()())
"""


@pytest.fixture(scope='module')
def command(wheel):
    """command(folder, name, arguments...): what the program that pip makes of an entry does, with the wheel and its dependencies only.

    -S leaves out what site-packages add to the path, which is the checkout where that is installed.
    """
    (information,) = wheel.glob('*.dist-info')
    packages = [path for path in sys.path if Path(path).name in ('site-packages', 'dist-packages')]
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(wheel), *packages])}
    code = COMMAND.replace('PATH', repr(str(information)))

    def run(folder, name, *arguments):
        line = [sys.executable, '-S', '-P', '-c', code, f'tether-{name}', *arguments]
        return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)

    return run


@pytest.fixture(scope='module')
def trained(command, tmp_path_factory):
    """A folder, away from the checkout, with a data file and a run on it."""
    folder = tmp_path_factory.mktemp('elsewhere')
    rows, last = np.zeros((22, 1), np.float32), np.isin(np.arange(22), (10, 21))
    np.savez(folder / 'line.npz', observations=rows, actions=rows, rewards=rows[:, 0], masks=rows[:, 0] + 1, terminals=last)
    options = ['--agent=template', '--env=probe/line', '--dataset=line.npz', '--num_updates=50', '--eval_episodes=2', '--out=run']
    done = command(folder, 'train', *options)
    assert done.returncode == 0, done.stderr
    assert 'eval/return' in done.stdout
    return folder


@pytest.mark.parametrize(
    ('name', 'arguments', 'code', 'words'),
    [
        ('check-data', ['line.npz'], 0, 'line.npz'),
        ('evaluate', ['--run=run', '--num_episodes=1'], 0, 'return'),
        ('compare', ['run'], 0, 'compare.png'),
        ('doctor', [], 0, 'loss after 20 updates'),
        ('generate', ['--help'], 1, '--num_episodes'),
        ('train', ['--agent=templat'], 2, 'did you mean template'),
    ],
)
def test_wheel_has_commands(command, trained, name, arguments, code, words):
    done = command(trained, name, *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert words in done.stdout + done.stderr
    assert 'Traceback' not in done.stderr


def test_every_command_has_its_script(wheel):
    (path,) = wheel.glob('*.dist-info/entry_points.txt')
    header, *entries = path.read_text().split('\n\n')[0].splitlines()
    assert header == '[console_scripts]'
    for entry in entries:
        name, target = entry.split(' = ')
        script = name.removeprefix('tether-').replace('-', '_')
        assert target == f'tether_scripts.console:{script}'
        assert (ROOT / 'scripts' / f'{script}.py').is_file()
