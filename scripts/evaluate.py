"""Evaluates a trained run: complete episodes from the start states that every evaluation uses.

python scripts/evaluate.py --run=DIR[@STEP] --num_episodes=50 [--mode=eval] [--video]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import startup

startup.set_up_jax()

import os

import numpy as np
from absl import flags

import envs
import training
from training import folder, members, statistics, video
from training.evaluation import Evaluator, member_scores

RUN = flags.DEFINE_string('run', None, 'Run folder, or RUN@STEP.')
NUM_EPISODES = flags.DEFINE_integer('num_episodes', 50, 'Episodes per member.', lower_bound=1)
MODE = flags.DEFINE_string('mode', 'eval', 'Mode of the policy.')
ENV = flags.DEFINE_string('env', None, 'Another environment than that of the run.')
NUM_WORKERS = flags.DEFINE_integer('num_workers', min(2, os.cpu_count() or 1), 'Processes that step the environment.', lower_bound=0)
VIDEO = flags.DEFINE_bool('video', False, "Also write DIR/video/MODE.gif with the first member's first episode.")
OUT = flags.DEFINE_string('out', None, 'Result file; DIR/evaluation.json if not given.')


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise ValueError(f'unexpected argument {argv[1]!r}; options are written --name=value')
    if not RUN.value:
        raise ValueError('--run is missing')
    run = training.load(RUN.value)
    env_name = ENV.value or run.config['env']
    team = run.members
    evaluator = Evaluator(run.agent.policy, env_name, len(team.seeds), NUM_EPISODES.value, NUM_WORKERS.value)
    try:
        episodes = evaluator(run.state, members.seed_keys(team), run.counter, MODE.value)
    finally:
        evaluator.close()
    assert episodes is not None
    scores = member_scores(episodes, np.zeros(len(team.seeds), bool), evaluator.env.spec.horizon)
    result: dict = {
        'env': env_name,
        'mode': MODE.value,
        'updates': run.counter,
        'episodes': NUM_EPISODES.value,
        'seeds': team.seeds,
        'eval': {},
    }
    for name, values in scores.items():
        for setting in dict.fromkeys(team.settings):
            chosen = values[np.asarray(team.settings) == setting]
            summary = statistics.summarise(chosen)
            result['eval'].setdefault(name, {})[setting] = {'per_seed': chosen.tolist(), **summary}
            low, high = summary['ci95']
            print(f'{name:<10} {setting:<20} {summary["iqm"]:.3f} [{low:.3f}, {high:.3f}]  worst {summary["min"]:.3f}')
    path = Path(RUN.value.partition('@')[0])
    folder.write_json(Path(OUT.value) if OUT.value else path / 'evaluation.json', result)
    if VIDEO.value:
        env = envs.make(env_name)
        try:
            print(video.record(run, env, MODE.value, path / 'video' / f'{MODE.value}.gif'))
        except (RuntimeError, ImportError, OSError, AttributeError, NotImplementedError) as error:
            print(f'no video: {" ".join(str(error).split())[:200]} (try MUJOCO_GL=egl or MUJOCO_GL=osmesa)', file=sys.stderr)


if __name__ == '__main__':
    startup.run(main)
