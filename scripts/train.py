"""Trains an agent for many seeds (and settings) in one compiled program.

python scripts/train.py --agent=trqam --agent.kl_budget=0.5 --env=ogbench/pointmaze-medium-singletask-task1-v0 --dataset=FILE.npz \
    --init.bc=RUN --num_seeds=4 --num_updates=20000 --out=DIR [--resume]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import startup

startup.set_up_jax()

import os
from typing import Any, NamedTuple

import jax
from absl import flags

import agents
import envs
import training
from agents.types import Agent, Stage
from scripts import agent_flags
from training import folder, logger, members, plots, runs

FLAGS = flags.FLAGS
flags.DEFINE_string('agent', None, 'Name of an agent, or agents/NAME.py; its fields are --agent.FIELD (see --agent=NAME --helpfull).')
flags.DEFINE_string('env', None, 'Environment, such as ogbench/pointmaze-medium-singletask-task1-v0.')
flags.DEFINE_string('dataset', None, 'File of recorded trajectories, a folder that holds one, or the name of an OGBench dataset.')
flags.DEFINE_bool('download', False, 'Fetch an OGBench dataset that is not there yet.')
flags.DEFINE_string('import', None, 'Python module that registers an agent or environment of your own.')
flags.DEFINE_integer('seed', 0, 'First seed.', lower_bound=0)
flags.DEFINE_integer('num_seeds', 1, 'Seeds, trained side by side.', lower_bound=1)
flags.DEFINE_integer('num_updates', None, "Updates of phase 'train'.", lower_bound=0)
flags.DEFINE_integer(
    'num_env_steps', None, 'Control steps per seed, instead of --num_updates, for agents that act while they train.', lower_bound=1
)
flags.DEFINE_integer('pretrain_updates', 0, "Updates of the agent's phase 'pretrain' before.", lower_bound=0)
flags.DEFINE_integer('num_envs', 1, 'Environments per seed, for agents that act while they train.', lower_bound=1)
flags.DEFINE_integer('replay_capacity', 100_000, 'Transitions kept per environment, where an agent reads a replay.', lower_bound=1)
flags.DEFINE_string('out', None, 'Run folder.')
flags.DEFINE_bool('resume', False, 'Continue the run in --out (or start it, if there is none).')
flags.DEFINE_bool('overwrite', False, 'Delete the run in --out first.')
flags.DEFINE_integer('log_interval', 1000, 'Updates between rows of metrics.', lower_bound=1)
flags.DEFINE_integer('eval_interval', 0, 'Updates between evaluations; 0: before the first and after the last.', lower_bound=0)
flags.DEFINE_integer('eval_episodes', 50, 'Episodes per seed and evaluation; 0: none.', lower_bound=0)
flags.DEFINE_list('eval_modes', ['eval'], 'Modes of the policy that are evaluated.')
flags.DEFINE_integer('checkpoint_interval', 1000, 'Updates between checkpoints; 0: only after the last.', lower_bound=0)
flags.DEFINE_integer('checkpoint_keep', 2, 'Checkpoints kept.', lower_bound=1)
flags.DEFINE_integer('updates_per_call', 0, 'Updates fused into one dispatch; 0: chosen. Changes no result.', lower_bound=0)
flags.DEFINE_integer('num_workers', min(2, os.cpu_count() or 1), 'Processes that step host environments in evaluation.', lower_bound=0)
flags.DEFINE_integer('num_devices', 0, 'Local devices that seeds are divided over; 0: as many as divide them evenly.', lower_bound=0)
flags.DEFINE_enum('matmul_precision', 'float32', ['float32', 'tensorfloat32', 'bfloat16'], 'Precision of products in the networks.')

# Named by the design, used by no agent in the house yet: refused instead of ignored.
for _name in ('updates_per_step', 'offline_updates', 'source_env', 'tasks', 'preset'):
    flags.DEFINE_string(_name, None, 'No agent uses it yet.')


class Job(NamedTuple):
    """A checked command line."""

    agent: Agent
    task: runs.Task
    env_name: str
    stages: list[Stage]
    seeds: range
    grid: dict[str, tuple[float, ...]]
    prepare_states: Any
    control: training.Control
    config: dict[str, Any]


def prepare() -> Job:
    """Checks every flag and reads the data; writes nothing. Raises ValueError (one line)."""
    for name in ('updates_per_step', 'offline_updates', 'source_env', 'tasks', 'preset'):
        if FLAGS[name].value is not None:
            raise ValueError(f'--{name}: no agent here uses it yet')
    for name in ('agent', 'env', 'out'):
        if not FLAGS[name].value:
            raise ValueError(f'--{name} is missing')
    if FLAGS.num_updates is None and FLAGS.num_env_steps is None:
        raise ValueError('--num_updates is missing (or --num_env_steps for agents that act while they train)')
    name = FLAGS.agent.removeprefix('agents/').removesuffix('.py')
    overrides, grid = agent_flags.overrides(name), agent_flags.grid(name)
    agents.config(name, **overrides)
    folder.check_run(FLAGS.out, FLAGS.resume, FLAGS.overwrite)
    control = training.Control(**{field: _control_value(field) for field in training.Control.__dataclass_fields__})
    if FLAGS.dataset and FLAGS.download:
        runs.download(FLAGS.dataset)
    task = runs.make_task(FLAGS.env, FLAGS.dataset)
    agent = agents.make(name, task.spec, **overrides)
    stages = _stages(agent)
    seeds = range(FLAGS.seed, FLAGS.seed + FLAGS.num_seeds)
    members.over_grid(agent, seeds, grid)
    adopters = [runs.adopter(agent, kind, run) for kind, run in agent_flags.inits().items() if run]
    if len(adopters) > 1:
        raise ValueError('give one --init.NAME only: a later one would overwrite the earlier')
    description = {
        **runs.describe(name, overrides, task.spec, FLAGS.env),
        'init': agent_flags.inits(),
        'matmul_precision': FLAGS.matmul_precision,
    }
    config = runs.run_config(description, seeds, grid, stages, task)
    config['online'] = {'num_envs': FLAGS.num_envs, 'replay_capacity': FLAGS.replay_capacity}
    return Job(agent, task, FLAGS.env, stages, seeds, grid, adopters[0] if adopters else None, control, config)


def _control_value(field: str) -> Any:
    return tuple(FLAGS.eval_modes) if field == 'eval_modes' else FLAGS[field].value


def _stages(agent: Agent) -> list[Stage]:
    stages = []
    if FLAGS.pretrain_updates:
        if 'pretrain' not in agent.phases:
            raise ValueError(f"--pretrain_updates: this agent has no phase 'pretrain', only {', '.join(agent.phases)}")
        stages.append(Stage('pretrain', FLAGS.pretrain_updates))
    rollouts = [need for need in agent.phases['train'].needs.values() if need.kind == 'rollout']
    if FLAGS.num_env_steps is None:
        return [*stages, Stage('train', FLAGS.num_updates)]
    if FLAGS.num_updates is not None:
        raise ValueError('give --num_updates or --num_env_steps, not both')
    if not rollouts:
        raise ValueError('--num_env_steps: this agent does not act while it trains; give --num_updates')
    per_update = sum(need.length for need in rollouts) * FLAGS.num_envs
    return [*stages, Stage('train', -(-FLAGS.num_env_steps // per_update))]


def execute(job: Job, resume: bool, overwrite: bool, out: str) -> training.Result:
    """Trains, then draws the curve."""
    sources, env = {}, None
    if any(need.kind == 'rollout' for phase in job.agent.phases.values() for need in phase.needs.values()):
        slots = len(members.over_grid(job.agent, job.seeds, job.grid).seeds) * job.config['online']['num_envs']
        env = envs.make(job.env_name, num_envs=slots)
        sources['env'] = env
    try:
        result = training.fit(
            job.agent,
            job.task.dataset,
            stages=job.stages,
            seeds=job.seeds,
            sources=sources,
            num_envs=job.config['online']['num_envs'],
            replay_capacity=job.config['online']['replay_capacity'],
            grid=job.grid,
            eval_env=job.env_name,
            prepare_states=job.prepare_states,
            control=job.control,
            out=out,
            config=job.config,
            resume=resume,
            overwrite=overwrite,
        )
    finally:
        if env is not None and not env.on_device:
            env.close()
    if not result.stopped and has_curve(out):
        plots.curve(out)
    return result


def has_curve(out: str) -> bool:
    """Whether the run has logged anything: one without updates and evaluation has not."""
    return (Path(out).expanduser() / logger.CSV).exists()


def table(summary: dict[str, Any]) -> str:
    """Evaluation before and after, per metric and setting."""
    lines = []
    for metric, settings in summary['eval'].items():
        for setting, after in settings.items():
            before = summary['eval_before'].get(metric, {}).get(setting)
            start = f'{before["iqm"]:.2f} -> ' if before else ''
            interval = f' [{after["ci95"][0]:.2f}, {after["ci95"][1]:.2f}]' if after['n'] > 1 else ''
            lines.append(f'{metric:<24} {setting:<20} {start}{after["iqm"]:.2f}{interval}  worst of {after["n"]}: {after["min"]:.2f}')
    return '\n'.join(lines)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise ValueError(f'unexpected argument {argv[1]!r}; options are written --name=value')
    jax.config.update('jax_default_matmul_precision', FLAGS.matmul_precision)
    result = execute(prepare(), FLAGS.resume, FLAGS.overwrite, FLAGS.out)
    print(table(result.summary))
    if result.stopped:
        return
    files = ['curve.png'] * has_curve(FLAGS.out) + ['summary.json']
    print(f'{result.summary["updates_per_second"]:.1f} updates/s; {", ".join(str(Path(FLAGS.out) / file) for file in files)}')


if __name__ == '__main__':
    try:
        agent_flags.define(sys.argv)
    except ValueError as error:
        startup.fail(error)
    startup.run(main)
