"""The first experience: data from a scripted expert, a clone, TRQAM for four seeds, success before and after.

python scripts/demo.py --out=runs/demo

It is a demonstration, not evidence: task, features and data were chosen after looking at success. Run it again and it goes on where it
stopped. For measured claims see reports/.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import startup

startup.set_up_jax()

import shlex
import shutil
import subprocess
import time

from absl import flags

from training import folder

OUT = flags.DEFINE_string('out', 'runs/demo', 'Folder for the data and both runs.')

ENV = 'ogbench/pointmaze-medium-singletask-task1-v0'
SHARED = {
    'agent.hidden_sizes': '64,64',
    'agent.batch_size': 128,
    'agent.learning_rate': 1e-3,
    'agent.horizon_length': 5,
    'agent.normalize_observations': 'true',
    'agent.observation_octaves': 3,
}
CRITIC = {
    'agent.discount': 0.99,
    'agent.critic_hidden_sizes': '64,64',
    'agent.num_critics': 2,
    'agent.clip': 'per_net',
    'agent.kl_budget': 1,
}


def commands(out: Path) -> list[tuple[Path, list[str]]]:
    """(file that shows that it is done, command line) of each step."""
    data, clone, tuned = out / 'data.npz', out / 'bc', out / 'trqam'
    train = {'env': ENV, 'dataset': data, 'num_seeds': 4, 'checkpoint_interval': 2000, **SHARED}
    return [
        (data, _command('generate', {'env': 'ogbench/pointmaze-medium-explore-v0', 'num_episodes': 100, 'out': data})),
        (clone / 'summary.json', _command('train', {'agent': 'bc_flow', **train, 'num_updates': 10_000, 'eval_episodes': 0, 'out': clone})),
        (
            tuned / 'summary.json',
            _command(
                'train', {'agent': 'trqam', **train, **CRITIC, 'init.bc': clone, 'num_updates': 8000, 'eval_interval': 2000, 'out': tuned}
            ),
        ),
    ]


def _command(script: str, options: dict) -> list[str]:
    resume = ['--resume'] if script == 'train' else []
    return [f'scripts/{script}.py', *(f'--{name}={value}' for name, value in options.items()), *resume]


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise ValueError(f'unexpected argument {argv[1]!r}; options are written --name=value')
    out = Path(OUT.value).resolve()
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for done, command in commands(out):
        print(f'\n$ python {shlex.join(command)}', flush=True)
        if done.exists():
            print('done already', flush=True)
            continue
        status = subprocess.run([sys.executable, *command], cwd=startup.ROOT).returncode
        if status or not done.exists():
            print('the demo stopped here; run it again to go on', file=sys.stderr)
            return status or 1
    for name in ('curve.png', 'summary.json'):
        shutil.copy(out / 'trqam' / name, out / name)
    summary = folder.read_json(out / 'summary.json')
    before, after = (summary[part]['eval/success'][''] for part in ('eval_before', 'eval'))
    print('\nSuccess over 50 episodes per seed, IQM of 4 seeds [95% interval]:')
    print(f'  clone  {before["iqm"]:.2f} [{before["ci95"][0]:.2f}, {before["ci95"][1]:.2f}]')
    print(f'  TRQAM  {after["iqm"]:.2f} [{after["ci95"][0]:.2f}, {after["ci95"][1]:.2f}]')
    print('A demonstration on a task and settings chosen after looking at success; four seeds support no claim. Evidence is in reports/.')
    print(f'{out / "curve.png"}, {out / "summary.json"}; {time.monotonic() - began:.0f} s')
    return 0


if __name__ == '__main__':
    startup.run(main)
