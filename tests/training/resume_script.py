"""One small run, to be killed and resumed: python resume_script.py KIND OUT NUM_UPDATES. KIND: offline, device or host."""

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'

import numpy as np

import agents
import envs
import training
from data.dataset import from_trajectories
from training import runs


def load_dummies():
    spec = importlib.util.spec_from_file_location('dummies', Path(__file__).with_name('dummies.py'))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(kind: str, out: str, num_updates: int) -> training.Result:
    control = training.Control(
        log_interval=10, eval_interval=40, eval_episodes=2, checkpoint_interval=20, updates_per_call=5, num_workers=0, num_devices=1
    )
    seeds = (3, 5)
    common = {'control': control, 'out': out, 'resume': True, 'eval_env': 'probe/host-line:horizon=10'}
    if kind == 'offline':
        random = np.random.default_rng(0)
        rows = 5 * 21
        dataset = from_trajectories(
            random.uniform(-1, 1, (rows, 1)).astype(np.float32),
            random.uniform(-1, 1, (rows, 1)).astype(np.float32),
            -np.ones(rows, np.float32),
            np.ones(rows, np.float32),
            np.full(5, 20),
        )
        spec = envs.make('probe/line').spec
        overrides = {'hidden_sizes': (8,), 'batch_size': 8, 'horizon_length': 2, 'flow_steps': 2}
        config = runs.run_config(
            runs.describe('bc_flow', overrides, spec, 'probe/line'),
            seeds,
            {},
            [agents.Stage('train', num_updates)],
            runs.Task(spec, None, None),
        )
        return training.fit(agents.make('bc_flow', spec, **overrides), dataset, num_updates, seeds, config=config, **common)
    name = 'probe/line:horizon=10' if kind == 'device' else 'probe/host-line:horizon=10'
    sources = {source: envs.make(name, num_envs=len(seeds) * 2) for source in ('env', 'other')}
    stages = [agents.Stage('collect', 1), agents.Stage('train', num_updates, {'collect': 3, 'refit': 2})]
    agent = load_dummies().make(envs.make(name).spec)
    return training.fit(
        agent, sources=sources, num_envs=2, replay_capacity=200, stages=stages, seeds=seeds, config={'seeds': [3, 5]}, **common
    )


if __name__ == '__main__':
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
