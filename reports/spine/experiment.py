"""Measures reports/spine/plan.md. Run by `python scripts/report.py spine --scale=smoke|report --out=DIR`; resumable, cell by cell."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

import agents
from training import Control, fit, folder, members, runs, statistics
from training.evaluation import Evaluator, member_scores
from training.logger import read as read_metrics
from training.rollout import first_plan

matplotlib.use('Agg')
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
MAZE_TASK, CUBE_TASK = 'ogbench/pointmaze-medium-singletask-task{}-v0', 'ogbench/cube-single-singletask-task{}-v0'


class Suite(NamedTuple):
    """One data set of the plan."""

    dataset_name: str
    env_name: str  # with a place for the number of the task
    shift: int  # added to the seed of the data and to the seeds
    frozen_control: bool  # whether the control holds the base at the clone: the plan's amendment


SUITES = {
    'maze-explore': Suite('ogbench/pointmaze-medium-explore-v0', MAZE_TASK, 0, False),
    'maze-navigate': Suite('ogbench/pointmaze-medium-navigate-v0', MAZE_TASK, 0, True),
    'maze-explore-again': Suite('ogbench/pointmaze-medium-explore-v0', MAZE_TASK, 10, True),
    'cube-play': Suite('ogbench/cube-single-play-v0', CUBE_TASK, 0, True),
}
SHARED = {'batch_size': 128, 'learning_rate': 1e-3, 'horizon_length': 5, 'normalize_observations': True}
MAZE = {**SHARED, 'hidden_sizes': (64, 64), 'observation_octaves': 3}
CUBE = {**SHARED, 'hidden_sizes': (128, 128)}
GRIDS = {'qam': {'inverse_temperature': (3.0, 10.0)}, 'trqam': {'kl_budget': (0.5, 1.0)}}
MAIN, RIVALS = 'trqam_1', ('bc', 'bc_continued', 'best_of_16', 'qam_3', 'qam_10')
SCALES: dict[str, dict[str, Any]] = {
    'smoke': {
        'suites': ('maze-explore',),
        'tasks': (1,),
        'seeds': (0, 1),
        'data_seed': 0,
        'data_episodes': 10,
        'episodes': 4,
        'shrink': 100,
    },
    'report': {
        'suites': tuple(SUITES),
        'tasks': (1, 2, 3, 4, 5),
        'seeds': tuple(range(100, 110)),
        'data_seed': 1000,
        'data_episodes': 100,
        'episodes': 50,
        'shrink': 1,
    },
}


def run(scale: str, out: Path) -> None:
    """Runs what is missing of every cell, then writes results.json and table.md into `out`."""
    if scale not in SCALES:
        raise ValueError(f'--scale={scale}: choose {" or ".join(SCALES)}')
    settings = SCALES[scale]
    out.mkdir(parents=True, exist_ok=True)
    for suite in settings['suites']:
        cell = Cells(settings, suite, out / suite)
        if (out / suite / 'measured.json').exists():
            continue
        cell.make_data()
        cell.clones()
        for task in settings['tasks']:
            cell.task(task)
            write_results(scale, settings, out)  # after every task, so that a stopped run leaves what it has
        cell.finish()
    write_results(scale, settings, out)


class Cells:
    """The cells of one data set."""

    def __init__(self, settings: dict[str, Any], suite: str, out: Path):
        self.dataset_name, self.env_name, shift, self.frozen_control = SUITES[suite]
        self.settings = {
            **settings,
            'data_seed': settings['data_seed'] + shift,
            'seeds': tuple(seed + shift for seed in settings['seeds']),
        }
        self.suite, self.out = suite, out
        self.data = out / 'data.npz'
        self.config = CUBE if suite.startswith('cube') else MAZE
        self.clone_updates, self.updates = (30_000, 20_000) if suite.startswith('cube') else (10_000, 8_000)
        self.clone_updates, self.updates = self.clone_updates // settings['shrink'], self.updates // settings['shrink']
        self.workers = min(2, os.cpu_count() or 1)

    def make_data(self) -> None:
        if self.data.exists():
            return
        command = [sys.executable, str(ROOT / 'scripts/generate.py'), f'--env={self.dataset_name}', f'--out={self.data}']
        command += [
            f'--num_episodes={self.settings["data_episodes"]}',
            f'--seed={self.settings["data_seed"]}',
            f'--num_workers={self.workers}',
        ]
        self.out.mkdir(parents=True, exist_ok=True)
        subprocess.run(command, check=True)

    def _train(
        self, name: str, task: int, overrides: dict, updates: int, path: Path, prepare: Any, grid: dict, eval_interval: int = 0
    ) -> Any:
        """One compiled program; a finished one is only read. Without an `eval_interval` nothing is evaluated here: `_scores` does, once."""
        if (path / 'summary.json').exists():
            return
        env_name = self.env_name.format(task)
        made = runs.make_task(env_name, self.data)
        agent = agents.make(name, made.spec, **overrides)
        seeds = self.settings['seeds']
        config = runs.run_config(runs.describe(name, overrides, made.spec, env_name), seeds, grid, [agents.Stage('train', updates)], made)
        interval = max(updates // 4, 1)
        control = Control(
            log_interval=max(updates // 40, 1),
            eval_interval=eval_interval,
            eval_episodes=self.settings['episodes'] if eval_interval else 0,
            checkpoint_interval=interval,
            num_workers=self.workers,
        )
        prepare_states = None if prepare is None else runs.adopter(agent, 'bc', prepare)
        result = fit(
            agent,
            made.dataset,
            updates,
            seeds,
            grid=grid,
            eval_env=env_name,
            prepare_states=prepare_states,
            control=control,
            out=path,
            config=config,
            resume=True,
        )
        if result.stopped:
            raise SystemExit('stopped; the same command goes on')

    def clones(self) -> None:
        """The clone does not know the task: one run serves all five. Its floor is looked at on task 1, its score on each."""
        third = self.clone_updates // 3
        self._train('bc_flow', 1, self.config, self.clone_updates, self.out / 'bc', None, {}, eval_interval=max(third, 1))
        self._train('bc_flow', 1, self.config, self.updates, self.out / 'bc_continued', self.out / 'bc', {}, eval_interval=self.updates)

    def finish(self) -> None:
        """What outlives the runs of a data set, beside the scores of its tasks."""
        folder.write_json(self.out / 'measured.json', {'floor': _floor(self.out / 'bc'), 'provenance': folder.provenance(machine=False)})

    def task(self, task: int) -> None:
        critic = {'critic_hidden_sizes': self.config['hidden_sizes'], 'num_critics': 2, 'clip': 'per_net', 'discount': 0.99}
        for name, grid in GRIDS.items():
            self._train(name, task, {**self.config, **critic}, self.updates, self.out / f'task{task}' / name, self.out / 'bc', grid)
        if task == 1:
            control = {**self.config, **critic, 'kl_budget': 1e-6, 'freeze_base': self.frozen_control}
            self._train('trqam', task, control, self.updates, self.out / 'task1/control', self.out / 'bc', {})
        self._scores(task)

    def _scores(self, task: int) -> None:
        path = self.out / f'task{task}' / 'scores.json'
        if path.exists():
            return
        folders = {'bc': 'bc', 'bc_continued': 'bc_continued', 'qam': f'task{task}/qam', 'trqam': f'task{task}/trqam'}
        loaded = {name: runs.load(self.out / where) for name, where in folders.items()}
        seeds = list(self.settings['seeds'])
        arms: dict[str, dict[str, list[float]]] = {}
        for name, run_of in loaded.items():
            modes = {'eval': name}
            if name == 'trqam':
                modes['base_best'] = 'best_of_16'
            num_members = len(run_of.members.seeds)
            diverged = runs.load_diverged(self.out / folders[name], run_of.counter, num_members)
            for mode, label in modes.items():
                evaluator = Evaluator(run_of.agent.policy, self.env_name.format(task), num_members, self.settings['episodes'], self.workers)
                episodes = evaluator(run_of.state, members.seed_keys(run_of.members), run_of.counter, mode)
                assert episodes is not None
                means = member_scores(episodes, diverged, evaluator.env.spec.horizon)
                evaluator.close()
                for setting in dict.fromkeys(run_of.members.settings):
                    chosen = np.asarray(run_of.members.settings) == setting
                    arm = f'{label}_{setting.split("=")[1]}' if setting and mode == 'eval' else label
                    if mode == 'base_best' and setting != 'kl_budget=1':
                        continue
                    arms[arm] = {'success': means['success'][chosen].tolist(), 'length': means['length'][chosen].tolist()}
        folder.write_json(path, {'seeds': seeds, 'arms': arms, 'drift': self._drift(task, loaded), 'dual': self._dual(task)})

    def _drift(self, task: int, loaded: dict[str, Any]) -> dict[str, list[float]]:
        """Mean over held-out states of the RMS difference between an arm's action and the frozen clone's, from the same noise; per seed."""
        held_out = runs.read_dataset(self.data.with_name('data-val.npz'), self.env_name.format(task))
        rows = np.random.default_rng(0).choice(len(held_out.observations), 1000, replace=False)
        observations = jnp.asarray(np.asarray(held_out.observations)[rows])
        clone = loaded['bc']
        reference = _actions(clone.agent, clone.state, observations, np.shape(held_out.actions)[1:])
        compared = {name: loaded[name] for name in ('bc_continued', 'qam', 'trqam')}
        if (self.out / 'task1/control/summary.json').exists() and task == 1:
            compared['control'] = runs.load(self.out / 'task1/control')
        drift = {}
        for name, run_of in compared.items():
            actions = _actions(run_of.agent, run_of.state, observations, np.shape(held_out.actions)[1:])
            for setting in dict.fromkeys(run_of.members.settings):
                chosen = np.asarray(run_of.members.settings) == setting
                distance = np.sqrt(np.mean((actions[chosen] - reference) ** 2, axis=(2, 3))).mean(axis=1)
                drift[f'{name}_{setting.split("=")[1]}' if setting else name] = distance.tolist()
        return drift

    def _dual(self, task: int) -> dict[str, Any]:
        """Path KL and lambda over the last quarter of the updates, per budget and seed."""
        columns = read_metrics(self.out / f'task{task}' / 'trqam')
        late = (columns['update'] > 0.75 * self.updates) & np.isfinite(columns['actor/path_kl'])
        result = {}
        for setting in sorted(set(columns['setting'])):
            chosen = late & (columns['setting'] == setting)
            by_seed = [chosen & (columns['seed'] == seed) for seed in self.settings['seeds']]
            result[setting] = {
                'path_kl': [float(columns['actor/path_kl'][rows].mean()) for rows in by_seed],
                'lambda': [float(columns['dual/lambda'][rows].mean()) for rows in by_seed],
                'binds': [bool((columns['dual/lambda'][rows] > 0.0301).all()) for rows in by_seed],
            }
        return result


def _actions(agent: Any, states: Any, observations: Any, action_shape: tuple[int, ...]) -> np.ndarray:
    """Actions [R, N, H, A] of all members from the same noise."""
    plans = jax.jit(jax.vmap(lambda state: first_plan(agent.policy, state, observations, action_shape).actions))
    return np.asarray(plans(states))


def write_results(scale: str, settings: dict[str, Any], out: Path) -> None:
    """results.json and table.md from the cells that are done."""
    raw, claims, controls, measured = {}, [], {}, {}
    for suite in settings['suites']:
        done = {task: out / suite / f'task{task}' / 'scores.json' for task in settings['tasks']}
        raw[suite] = {f'task{task}': json.loads(path.read_text()) for task, path in done.items() if path.exists()}
        controls[suite] = _control(raw[suite])
        claims += _comparisons(suite, raw[suite], scale, len(raw[suite]) == len(settings['tasks']), controls[suite])
        whole = out / suite / 'measured.json'
        measured[suite] = json.loads(whole.read_text()) if whole.exists() else None
    folder.write_json(out / 'results.json', {'scale': scale, 'claims': claims, 'raw': raw, 'controls': controls, 'measured': measured})
    folder.write_text(out / 'table.md', _table(raw))
    for suite, tasks in raw.items():
        if tasks and measured[suite] is None:
            _plot_dual(out / suite, list(tasks), out / f'dual-{suite}.png')


def _control(tasks: dict[str, Any]) -> dict[str, Any] | None:
    """The positive control of a data set, None before its task 1 is done."""
    if 'task1' not in tasks:
        return None
    drift = {name: float(np.mean(tasks['task1']['drift'][name])) for name in ('control', MAIN)}
    return {**drift, 'holds': drift['control'] <= 0.1 * drift[MAIN]}


def _comparisons(suite: str, tasks: dict[str, Any], scale: str, complete: bool, control: dict[str, Any] | None) -> list[dict[str, Any]]:
    rows = []
    for task, scores in tasks.items():
        for rival in RIVALS:
            ours, theirs = (np.asarray(scores['arms'][arm]['success']) for arm in (MAIN, rival))
            interval = statistics.paired_bootstrap_interval(ours, theirs) if len(ours) > 1 else (np.nan, np.nan)
            rows.append((task, rival, statistics.iqm(ours - theirs), interval, statistics.wilcoxon(ours, theirs), ours))
    adjusted = statistics.holm([row[4] for row in rows]) if rows else []
    claims = []
    for (task, rival, effect, interval, p, ours), corrected in zip(rows, adjusted, strict=True):
        above, below = interval[0] > 0, interval[1] < 0
        outcome = 'confirmed' if corrected < 0.05 and above else 'refuted' if corrected < 0.05 and below else 'not_shown'
        claims.append(
            {
                'id': f'{suite}/{task}/{MAIN}-{rival}',
                'claim': f'{MAIN} reaches the goal more often than {rival} on {suite} {task}',
                'kind': 'comparison',
                'basis': 'our_derivation',
                'outcome': outcome if scale == 'report' and control and control['holds'] else 'not_shown',
                'control_holds': bool(control and control['holds']),
                'effect': effect,
                'ci95': list(interval),
                'p': float(p),
                'p_holm': float(corrected),
                'family_complete': complete,
                'seeds': len(ours),
                'scale': scale,
                'command': f'python scripts/report.py spine --scale={scale} --out=DIR',
            }
        )
    return claims


def _floor(path: Path) -> list[list[float]]:
    """Success of the clone on task 1 over its training: [[update, mean success], ...]."""
    columns = read_metrics(path)
    scored = np.isfinite(columns['eval/success'])
    updates = sorted(set(columns['update'][scored].tolist()))
    return [[update, float(columns['eval/success'][scored & (columns['update'] == update)].mean())] for update in updates]


def _plot_dual(runs_of: Path, tasks: list[str], path: Path) -> None:
    """Path KL and lambda over the updates, a column per task, a thin line per seed."""
    figure, axes = plt.subplots(2, len(tasks), figsize=(3 * len(tasks), 5), sharex=True, sharey='row', squeeze=False)
    for column, task in enumerate(tasks):
        logged = read_metrics(runs_of / task / 'trqam')
        for setting, color in zip(sorted(set(logged['setting'])), ('tab:blue', 'tab:orange'), strict=True):
            for seed in sorted(set(logged['seed'])):
                rows = (logged['setting'] == setting) & (logged['seed'] == seed) & np.isfinite(logged['actor/path_kl'])
                for row, name in enumerate(('actor/path_kl', 'dual/lambda')):
                    axes[row][column].plot(logged['update'][rows], logged[name][rows], color=color, linewidth=0.6, alpha=0.6)
            axes[0][column].axhline(float(setting.split('=')[1]), color=color, linestyle='--', label=setting)
        axes[0][column].set_title(task)
        axes[1][column].set(yscale='log', xlabel='update')
    axes[0][0].set(ylabel='path KL per control step, nats', ylim=(0, 2.5))
    axes[1][0].set_ylabel('lambda')
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=70)
    plt.close(figure)


def _table(raw: dict[str, Any]) -> str:
    lines = [
        '| data | task | arm | success IQM [95% interval] | worst seed | steps | drift from the clone | path KL | lambda |',
        '|---|---|---|---|---|---|---|---|---|',
    ]
    for suite, tasks in raw.items():
        for task, scores in tasks.items():
            for arm, values in scores['arms'].items():
                summary = statistics.summarise(values['success'])
                drift = scores['drift'].get(arm)
                setting = f'kl_budget={arm.split("_")[1]}' if arm.startswith('trqam') else ''
                dual = scores['dual'].get(setting)
                cells = [
                    suite,
                    task,
                    arm,
                    f'{summary["iqm"]:.2f} [{summary["ci95"][0]:.2f}, {summary["ci95"][1]:.2f}]',
                    f'{summary["min"]:.2f}',
                    f'{np.mean(values["length"]):.0f}',
                    f'{np.mean(drift):.3f}' if drift else '',
                    f'{np.mean(dual["path_kl"]):.2f}' + ('' if all(dual['binds']) else ' (not binding for all)') if dual else '',
                    f'{np.mean(dual["lambda"]):.3f}' if dual else '',
                ]
                lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines) + '\n'
