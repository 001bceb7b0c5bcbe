"""The wheel: it holds our packages and nothing else, and works away from the checkout."""

import inspect
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ('agents', 'networks', 'losses', 'optimizers', 'envs', 'data', 'training')


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    """The unzipped wheel. Built from a copy, since a build leaves its own folders in the tree and reuses what it finds there."""
    source, built, unzipped = (tmp_path_factory.mktemp(name) for name in ('source', 'built', 'unzipped'))
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns('__pycache__'))
    for name in ('scripts', 'tests'):  # must stay out
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

    expected = {f'{package}/{name}' for package in PACKAGES for name in files(ROOT / package)}
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
