"""Checks an installation: versions, devices, shadowed packages, renderers, and twenty updates against stored numbers.

python scripts/doctor.py          exit code 1 if something is broken
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import startup

startup.set_up_jax()

import importlib
import importlib.metadata
import os
import re
import subprocess
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import agents
from envs.types import ArraySpec, Spec

OK, WARN, FAIL = 'ok', 'WARN', 'FAIL'
EXPECTED_LOSS = 0.36275  # of the template agent after 20 updates, measured on an AVX-512 CPU
TOLERANCE = 1e-3
MAIN_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'mujoco', 'ogbench', 'gymnasium')


def versions() -> Iterator[tuple[str, str]]:
    """Installed versions, in a checkout against requirements.lock."""
    lock = startup.ROOT / 'requirements.lock'
    locked = dict(re.findall(r'^([\w.-]+)==([\w.]+)', lock.read_text(), re.MULTILINE)) if lock.exists() else {}
    for name in MAIN_PACKAGES:
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield FAIL, f'{name} is not installed: run make setup'
            continue
        yield (OK, f'{name} {found}') if found == locked.get(name, found) else (WARN, f'{name} {found}, tested with {locked.get(name)}')


def devices() -> Iterator[tuple[str, str]]:
    yield OK, f'devices: {", ".join(f"{device.platform} {device.device_kind}" for device in jax.local_devices())}'
    yield OK, f'compilation cache: {os.environ.get("JAX_COMPILATION_CACHE_DIR")}'


def packages() -> Iterator[tuple[str, str]]:
    """Whether our generic names lead to our packages."""
    for name in startup.PACKAGES:
        path = Path(importlib.import_module(name).__file__ or '').parent
        yield (OK, f'{name} is {path}') if path == startup.ROOT / name else (WARN, f'{name} is {path}, not {startup.ROOT / name}')


def renderers() -> Iterator[tuple[str, str]]:
    """Each GL backend draws one frame in a process of its own."""
    code = (
        'import mujoco; model = mujoco.MjModel.from_xml_string("<mujoco/>"); renderer = mujoco.Renderer(model, 8, 8);'
        'renderer.update_scene(mujoco.MjData(model)); renderer.render()'
    )
    for backend in ('egl', 'osmesa'):
        environment = {**os.environ, 'MUJOCO_GL': backend}
        try:
            works = subprocess.run([sys.executable, '-c', code], env=environment, capture_output=True, timeout=120).returncode == 0
        except subprocess.TimeoutExpired:
            works = False
        yield (OK, f'MUJOCO_GL={backend} renders') if works else (WARN, f'MUJOCO_GL={backend} does not render: no videos with it')


def numbers() -> Iterator[tuple[str, str]]:
    """Twenty updates of the template agent on fixed data."""
    agent = agents.make('template', Spec(ArraySpec((3,)), ArraySpec((2,), -1, 1), 10))
    observations = np.linspace(-1, 1, 64 * 3, dtype=np.float32).reshape(64, 3)
    batches = {'data': {'observations': observations, 'actions': np.sin(3 * observations[:, :2])}}
    state = agent.init(jax.random.key(0), {name: jnp.float32(value) for name, value in agent.hyper.items()})
    update = jax.jit(agent.phases['train'].update)
    metrics = {}
    for step in range(20):
        state, metrics = update(state, batches, step, jax.random.key(step))
    loss = float(metrics['policy/loss'])
    close = abs(loss - EXPECTED_LOSS) < TOLERANCE * EXPECTED_LOSS
    yield (OK if close else FAIL), f'loss after 20 updates {loss:.5f}, expected {EXPECTED_LOSS:.5f}'


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise ValueError(f'unexpected argument {argv[1]!r}')
    worst = 0
    for check in (versions, devices, packages, renderers, numbers):
        for grade, text in check():
            print(f'{grade:<4} {text}', flush=True)
            worst = max(worst, grade == FAIL)
    return int(worst)


if __name__ == '__main__':
    startup.run(main)
