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

import training
from envs.types import Spec
from scripts import agent_flags
from training import folder, members, runs, statistics, video
from training.evaluation import Evaluator, member_scores

RUN = flags.DEFINE_string('run', None, 'Run folder, or RUN@STEP.')
NUM_EPISODES = flags.DEFINE_integer('num_episodes', 50, 'Episodes per member.', lower_bound=1)
MODE = flags.DEFINE_string('mode', 'eval', 'Mode of the policy.')
ENV = flags.DEFINE_string('env', None, 'Another environment than that of the run.')
NUM_WORKERS = flags.DEFINE_integer('num_workers', min(2, os.cpu_count() or 1), 'Processes that step the environment.', lower_bound=0)
VIDEO = flags.DEFINE_bool('video', False, "Also write DIR/video/MODE.gif with the first member's first episode.")
flags.DEFINE_string('import', None, 'Python module that registers an agent or environment of your own.')
OUT = flags.DEFINE_string('out', None, 'Result file; DIR/evaluation.json if not given.')


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise ValueError(f'unexpected argument {argv[1]!r}; options are written --name=value')
    if not RUN.value:
        raise ValueError('--run is missing')
    path = Path(runs.split_step(RUN.value)[0])
    out = Path(OUT.value) if OUT.value else path / 'evaluation.json'
    if OUT.value and not out.resolve().parent.is_dir():
        raise ValueError(f'--out={OUT.value}: its folder does not exist')
    agent_flags.import_own(sys.argv)
    run = training.load(RUN.value)
    env_name = ENV.value or run.config['env']
    video_env = video.open_env(env_name) if VIDEO.value else None  # before any work: it may be impossible
    team = run.members
    diverged = runs.load_diverged(RUN.value, run.counter, len(team.seeds))
    evaluator = Evaluator(run.agent.policy, env_name, len(team.seeds), NUM_EPISODES.value, NUM_WORKERS.value)
    try:
        _check_shapes(run.config, env_name, evaluator.env.spec)
        episodes = evaluator(run.state, members.seed_keys(team), run.counter, MODE.value)
    finally:
        evaluator.close()
    assert episodes is not None
    scores = member_scores(episodes, diverged, evaluator.env.spec.horizon)
    result: dict = {
        'env': env_name,
        'mode': MODE.value,
        'updates': run.counter,
        'episodes': NUM_EPISODES.value,
        'seeds': team.seeds,
        'diverged': diverged,
        'eval': {},
    }
    for name, values in scores.items():
        for setting in dict.fromkeys(team.settings):
            chosen = values[np.asarray(team.settings) == setting]
            summary = statistics.summarise(chosen)
            result['eval'].setdefault(name, {})[setting] = {'per_seed': chosen.tolist(), **summary}
            low, high = summary['ci95']
            print(f'{name:<10} {setting:<20} {summary["iqm"]:.3f} [{low:.3f}, {high:.3f}]  worst {summary["min"]:.3f}')
    if diverged.any():
        print(f'{diverged.sum()} of {diverged.size} members have diverged and count as the worst', file=sys.stderr)
    folder.write_json(out, result)
    if video_env is not None:
        print(video.record(run, video_env, MODE.value, path / 'video' / f'{MODE.value}.gif'))
        video_env.close()


def _check_shapes(config: dict, env_name: str, spec: Spec) -> None:
    _, trained = runs.rebuild(config)
    shapes = [(runs.shapes(task.observations), task.actions.shape) for task in (trained, spec)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f'--env={env_name} has observations {shapes[1][0]} and actions {shapes[1][1]}, but the run was trained on '
            f'{shapes[0][0]} and {shapes[0][1]}: choose an environment of the same robot'
        )


if __name__ == '__main__':
    startup.run(main)
