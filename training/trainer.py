"""Runs an agent: stages of updates with evaluation, logging, checkpoints and exact resume. `scripts/train.py` and notebooks share it."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agents.types import Agent, Stage
from data.types import Dataset
from training import folder, logger, loop, members, rollout, space, statistics
from training.checkpoints import Checkpoints
from training.collect import Collector
from training.evaluation import Evaluator, member_scores
from training.terminal import Progress, Signals

MAX_UPDATES_PER_CALL = 500


@dataclasses.dataclass(frozen=True)
class Control:
    """Run control: may change on resume; none of it changes a number of the training."""

    log_interval: int = 1000  # updates between rows of metrics
    eval_interval: int = 0  # updates between evaluations; 0: only before the first and after the last update
    eval_episodes: int = 0  # episodes per member and evaluation; 0: no evaluation
    eval_modes: tuple[str, ...] = ('eval',)  # modes of the policy that are evaluated
    checkpoint_interval: int = 0  # updates between checkpoints; 0: only after the last update
    checkpoint_keep: int = 2  # checkpoints kept
    updates_per_call: int = 0  # most updates fused into one dispatch; 0: 500
    num_workers: int = 0  # processes that step host environments in evaluation
    num_devices: int = 0  # local devices that the members are divided over; 0: as many as divide them evenly

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < (1 if field.name in ('log_interval', 'checkpoint_keep') else 0):
                raise ValueError(f'{field.name}={value} is out of range')


class Result(NamedTuple):
    """What a run leaves."""

    state: Any  # agent states, leaves [R, ...]
    members: members.Members
    summary: dict[str, Any]
    stopped: bool  # a signal ended it before its last update


def fit(
    agent: Agent,
    source: Any = None,
    num_updates: int = 0,
    seeds: Sequence[int] = (0,),
    progress_fn: Callable[[int, dict], None] | None = None,
    *,
    stages: Sequence[Stage] | None = None,
    sources: Mapping[str, Any] | None = None,
    num_envs: int = 1,
    replay_capacity: int = 100_000,
    grid: Mapping[str, Sequence[float]] | None = None,
    eval_env: Any = '',
    prepare_states: Callable[[Any, members.Members], Any] | None = None,
    control: Control | None = None,
    out: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    announce: Callable[[str], None] = folder.to_stderr,
) -> Result:
    """Trains every seed (and setting) of an agent side by side.

    Args:
      agent: from `agents.make`.
      source: a Dataset (then needs of source 'data' read it) or an environment (source 'env').
      num_updates: updates of phase 'train'; or give `stages`.
      seeds: integers; seed s gives the same run whatever other seeds or settings run beside it.
      progress_fn: called with (updates done, {metric: [R]}) after every log interval and evaluation.
      stages: the run as a list of stages, instead of `num_updates`.
      sources: further datasets and environments by name.
      num_envs: environments per member, for online agents.
      replay_capacity: transitions kept per environment, where a phase reads what was acted.
      grid: hyper-parameter -> values; every combination is trained with every seed.
      eval_env: name of the environment of the evaluation, or a DeviceEnv.
      prepare_states: (initial states [R, ...], members) -> states, for example to adopt another run's networks.
      control: intervals and the like.
      out: run folder; None keeps everything in memory.
      config: what defines the run, stored in config.json (see `describe`).
      resume: continue the run in `out`. overwrite: delete it first.
      announce: takes one line of news.

    Returns:
      Result.

    Raises:
      ValueError: one line that says what does not fit; nothing has been written then.
    """
    named = dict(sources or {})
    if source is not None:
        named['data' if isinstance(source, Dataset) else 'env'] = source
    all_sources = loop.Sources(
        {name: jax.tree.map(jnp.asarray, value) for name, value in named.items() if isinstance(value, Dataset)},
        {name: value for name, value in named.items() if not isinstance(value, Dataset)},
        num_envs,
    )
    all_stages = list(stages) if stages is not None else [Stage('train', num_updates)]
    loop.check(agent, all_stages, all_sources)
    run = _Run(agent, all_stages, all_sources, members.over_grid(agent, seeds, grid), control or Control(), announce, progress_fn)
    if out is not None and resume:
        done = Checkpoints(Path(out).expanduser() / 'checkpoints').steps()[-1:]
        if done and done[0] > (total := sum(stage.count for stage in all_stages)):
            raise ValueError(f'{out} has done {done[0]} updates already: ask for at least as many, not {total}, or choose another folder')
    try:
        run.prepare(prepare_states, replay_capacity, eval_env, out)
        if out is None:
            return run.train(None)
        defining = {**(config or {}), 'control': dataclasses.asdict(run.control)}
        with folder.open_run(out, defining, resume, overwrite, MUTABLE, announce) as opened:
            return run.train(opened)
    finally:
        run.close()


MUTABLE = frozenset({'control', 'provenance', 'count'})  # first components of config names that may change on resume


class _Cursor(NamedTuple):
    """How far a run has come."""

    stage: int = 0
    step: int = 0  # within the stage
    counter: int = 0  # updates of the whole run

    def advanced(self, updates: int, count: int) -> '_Cursor':
        step = self.step + updates
        return _Cursor(self.stage + (step >= count), 0 if step >= count else step, self.counter + updates)


class _Run:
    """One run of `fit`."""

    def __init__(self, agent, stages, sources, team, control, announce, progress_fn):
        self.agent, self.stages, self.sources, self.team, self.control = agent, stages, sources, team, control
        self.announce, self.progress_fn = announce, progress_fn
        self.keys = members.seed_keys(team)
        self.evaluator: Evaluator | None = None
        self.compile_seconds = self.train_seconds = self.earlier_seconds = 0.0
        self.started = time.monotonic()
        self.last_scores: dict[str, np.ndarray] = {}
        self.first_scores: dict[str, np.ndarray] = {}
        self.latest: dict[str, np.ndarray] = {}  # last finite value of each metric since the last row
        self.evaluation_due = True  # at the update where the run stands
        self.evaluation_logged = False  # an earlier start of the run wrote its rows and was killed then
        self._compiled: dict[tuple, Any] = {}

    # ---- set-up

    def prepare(self, prepare_states, replay_capacity, eval_env, out) -> None:
        agent, sources, control = self.agent, self.sources, self.control
        self.spread, self.shared = members.sharding(len(self.team.seeds), control.num_devices)
        states = members.init_states(agent, self.team)
        if prepare_states is not None:
            states = prepare_states(states, self.team)
        needs = loop.needs_of(agent, self.stages)

        def init(state, key):
            return loop.init_carry(agent, sources, needs, replay_capacity, state, key)

        shapes = jax.eval_shape(jax.vmap(init), states, self.keys)
        self._check_space(shapes, replay_capacity, out)
        carry = jax.jit(jax.vmap(lambda state, key: init(state, key)._replace(replays={})))(states, self.keys)
        carry = jax.device_put(jax.tree.map(jnp.copy, carry), self.spread)  # its own buffers: they are donated to the first call
        self.carry = carry._replace(replays=loop.empty_replays(shapes.replays, self.spread))
        self.keys = jax.device_put(self.keys, self.spread)
        self.datasets = [
            jax.device_put({**sources.datasets, **jax.tree.map(jnp.asarray, dict(stage.data or {}))}, self.shared) for stage in self.stages
        ]
        self.collectors = {
            name: Collector(agent.policy, env, name, len(self.team.seeds), sources.num_envs)
            for name, env in sources.envs.items()
            if not env.on_device and any(need.kind == 'rollout' and need.source == name for need in needs)
        }
        for collector in self.collectors.values():
            collector.start(states, self.keys)
        if control.eval_episodes:
            if not eval_env:
                raise ValueError('evaluation needs an environment: pass --env, or --eval_episodes=0')
            name, made = (eval_env, None) if isinstance(eval_env, str) else ('', eval_env)
            self.evaluator = Evaluator(agent.policy, name, len(self.team.seeds), control.eval_episodes, control.num_workers, made)
            for mode in control.eval_modes:
                rollout.check_mode(agent.policy, mode)

    def _check_space(self, shapes: loop.Carry, replay_capacity: int, out: str | Path | None) -> None:
        """Says how large the replay is. Raises ValueError if it can't fit."""
        interval, keep = self.control.checkpoint_interval, self.control.checkpoint_keep
        acted = {}
        for source in shapes.replays:
            total = sum(loop.acted(self.agent, stage, source, stage.count) for stage in self.stages)
            between = max(loop.acted(self.agent, stage, source, interval) for stage in self.stages)
            acted[source] = (total, between if interval else total)
        size = space.measure(shapes, acted, keep)
        if shapes.replays:
            on_disk = f'; checkpoints: {space.spell(size.state)} of state each, parts of the replay up to {space.spell(size.parts)} in all'
            self.announce(f'replay: {space.spell(size.replays)} on the device{on_disk if out else ""}')
            space.check_memory(size, list(self.spread.mesh.devices.flat), replay_capacity)
        if out is not None:
            space.check_disk(size, out, keep, replay_capacity)

    # ---- the loop

    def train(self, opened: folder.RunFolder | None) -> Result:
        path = opened.path if opened else None
        self.checkpoints = Checkpoints(path / 'checkpoints', self.control.checkpoint_keep, self.announce) if path else None
        self.logger = logger.Logger(path, announce=self.announce) if path else None
        cursor = _Cursor()
        if opened and opened.resumed:
            cursor = self._restore(cursor)
        total = sum(stage.count for stage in self.stages)
        with Signals() as self.signals, Progress(total, cursor.counter) as self.progress:
            self._evaluate(cursor.counter)
            while cursor.stage < len(self.stages) and self.signals.received is None:
                if self.stages[cursor.stage].count == 0:
                    cursor = cursor._replace(stage=cursor.stage + 1)
                    continue
                cursor = self._advance(cursor, total)
            stopped = cursor.counter < total or self.evaluation_due
            if stopped:
                self._save(cursor)
                self.announce(f'stopped by signal after {cursor.counter} of {total} updates; continue with --resume')
        summary = self._summary(cursor.counter)
        if opened and not stopped:
            named = {'agent': opened.config.get('agent', {}).get('name'), 'env': opened.config.get('env')}
            folder.write_json(opened.path / 'summary.json', {**named, **summary})
        return Result(self.carry.state, self.team, summary, stopped)

    def close(self) -> None:
        """Ends the worker processes of the evaluation."""
        if self.evaluator:
            self.evaluator.close()

    def _advance(self, cursor: _Cursor, total: int) -> _Cursor:
        """One call of fused updates, then whatever is due."""
        control, stage = self.control, self.stages[cursor.stage]
        updates = min(control.updates_per_call or MAX_UPDATES_PER_CALL, stage.count - cursor.step)
        for interval in (control.log_interval, control.eval_interval, control.checkpoint_interval):
            if interval:
                updates = min(updates, interval - cursor.counter % interval)
        began = time.monotonic()
        metrics = self._call(stage, cursor, updates)
        for name, new in jax.device_get(metrics).items():
            self.latest[name] = np.where(np.isfinite(new), new, self.latest.get(name, np.float32(np.nan)))
        self.train_seconds += time.monotonic() - began
        cursor = cursor.advanced(updates, stage.count)
        self.progress.update(updates)

        last = cursor.counter == total
        logs, evaluates = self._on_interval(cursor.counter)
        if logs or last:
            self._log(cursor.counter)
        self.evaluation_due = evaluates or last
        self._evaluate(cursor.counter)
        if last or (control.checkpoint_interval and cursor.counter % control.checkpoint_interval == 0):
            self._save(cursor)
        return cursor

    def _call(self, stage: Stage, cursor: _Cursor, updates: int) -> dict[str, Any]:
        datasets = self.datasets[cursor.stage]
        if loop.on_host(self.agent, stage, self.sources):
            return self._host_call(stage, cursor, updates, datasets)
        counts = (jnp.int32(cursor.step), jnp.int32(cursor.counter), jnp.int32(updates))
        call = loop.make_call(self.agent, stage, self.sources)
        compiled = self._compile(('stage', cursor.stage), call, self.carry, self.keys, datasets, *counts)
        self.carry, metrics = compiled(self.carry, self.keys, datasets, *counts)
        return metrics

    def _host_call(self, stage: Stage, cursor: _Cursor, updates: int, datasets: Any) -> dict[str, Any]:
        """Updates one by one, because acting happens outside the graph; riders first, like inside it."""
        seen: dict[str, Any] = {}
        for offset in range(updates):
            riders = [(name, True) for name, period in (stage.every or {}).items() if (cursor.step + offset) % period == 0]
            for name, rider in (*riders, (stage.phase, False)):
                fresh = {}
                for need_name, need in self.agent.phases[name].needs.items():
                    if need.kind == 'rollout' and need.source in self.collectors:
                        fresh[need_name] = self.collectors[need.source].collect(self.carry.state, self.keys, need.length, need.mode)
                step, counter = jnp.int32(cursor.step + offset), jnp.int32(cursor.counter + offset)
                run = members.over_seeds(loop.make_phase(self.agent, name, self.sources, rider))
                compiled = self._compile(('host', cursor.stage, name, rider), run, self.carry, self.keys, datasets, fresh, step, counter)
                self.carry, metrics = compiled(self.carry, self.keys, datasets, fresh, step, counter)
                for metric, new in metrics.items():
                    seen[metric] = jnp.where(jnp.isfinite(new), new, seen.get(metric, jnp.nan))
        return seen

    def _compile(self, key: tuple, function: Callable, *arguments: Any) -> Any:
        if key not in self._compiled:
            self.progress.note('compiling')
            began = time.monotonic()
            self._compiled[key] = jax.jit(function, donate_argnums=0).lower(*arguments).compile()
            self.compile_seconds += time.monotonic() - began
            self.progress.note('')
        return self._compiled[key]

    # ---- what happens between calls

    def _on_interval(self, update: int) -> tuple[bool, bool]:
        """Whether metrics are logged, and whether the policy is evaluated, after `update` updates that are not the last ones."""
        control = self.control
        return update % control.log_interval == 0, control.eval_interval > 0 and update % control.eval_interval == 0

    def _log(self, update: int) -> None:
        health, env_steps = jax.device_get((self.carry.health, self.carry.env_steps))
        metrics = {**self.latest, 'health/skipped': health.skipped, 'health/diverged': health.diverged}
        if self.sources.envs:
            metrics['env_steps'] = env_steps
        if self._on_interval(update)[0]:  # else this row is the last one, and the next one needs them should the run be extended
            self.latest = {name: np.full_like(values, np.nan) for name, values in self.latest.items()}
        self._write(update, metrics)

    def _write(self, update: int, metrics: Mapping[str, Any], logged: bool = False) -> None:
        if self.logger and not logged:
            rows = []
            for member, (seed, setting) in enumerate(zip(self.team.seeds, self.team.settings, strict=True)):
                rows.append({'update': update, 'seed': int(seed), 'setting': setting, **{k: float(v[member]) for k, v in metrics.items()}})
            self.logger.write(update, rows)
        if self.progress_fn:
            self.progress_fn(update, dict(metrics))

    def _evaluate(self, update: int) -> None:
        """Evaluates if that is due. A signal ends it; it is still due then, and the resumed run begins with it."""
        if not self.evaluator or not self.evaluation_due:
            self.evaluation_due = False
            return
        diverged = np.asarray(self.carry.health.diverged)
        scores: dict[str, np.ndarray] = {}
        for mode in self.control.eval_modes:
            self.progress.note(f'evaluating {mode}')
            episodes = self.evaluator(self.carry.state, self.keys, update, mode, lambda: self.signals.received is not None)
            if episodes is None:
                return
            means = member_scores(episodes, diverged, self.evaluator.env.spec.horizon)
            scores |= {f'{mode}/{name}': values for name, values in means.items()}
        self.progress.note(_headline(scores))
        if update == 0:
            self.first_scores = scores
        self.last_scores = scores
        self._write(update, scores, self.evaluation_logged)
        self.evaluation_due = self.evaluation_logged = False

    def _save(self, cursor: _Cursor) -> None:
        if not self.checkpoints:
            return
        collectors = {name: collector.get_state() for name, collector in self.collectors.items()}
        meta = {
            **cursor._asdict(),
            'seconds': self.earlier_seconds + time.monotonic() - self.started,
            'compile_seconds': self.compile_seconds,
            'train_seconds': self.train_seconds,
            'first_scores': {name: values.tolist() for name, values in self.first_scores.items()},
            'last_scores': {name: values.tolist() for name, values in self.last_scores.items()},
            'latest': {name: values.tolist() for name, values in self.latest.items()},
            'evaluation_due': self.evaluation_due,
        }
        if cursor.counter in self.checkpoints.steps() and self.checkpoints.verify(cursor.counter) is None:
            return
        try:
            self.checkpoints.save(cursor.counter, {'carry': self.carry, 'collectors': collectors}, meta)
        except ValueError as error:  # a full disk must not end the training: the next interval tries again
            self.announce(f'{error}; training goes on')
            if cursor.stage >= len(self.stages):
                raise

    def _restore(self, cursor: _Cursor) -> _Cursor:
        assert self.checkpoints is not None
        assert self.logger is not None
        if not self.checkpoints.steps():
            self.logger.resume(-1)
            self.announce('no checkpoint was written before the run ended: starting it again')
            return cursor
        template = {
            'carry': jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.spread), self.carry),
            'collectors': {name: collector.get_state() for name, collector in self.collectors.items()},
        }
        del self.carry  # its replay makes room for the restored one
        _, tree, meta = self.checkpoints.restore(template)
        self.carry = tree['carry']
        for name, collector in self.collectors.items():
            collector.set_state(tree['collectors'][name])
        cursor = _Cursor(meta['stage'], meta['step'], meta['counter'])
        done = cursor.counter - sum(stage.count for stage in self.stages[:-1])
        extended = cursor.stage >= len(self.stages) and done < self.stages[-1].count  # the run was complete, its last stage goes on
        if extended:
            cursor = cursor._replace(stage=len(self.stages) - 1, step=done)
        self.earlier_seconds, self.compile_seconds, self.train_seconds = meta['seconds'], meta['compile_seconds'], meta['train_seconds']
        self.first_scores = {name: np.asarray(values, float) for name, values in meta['first_scores'].items()}
        self.last_scores = {name: np.asarray(values, float) for name, values in meta['last_scores'].items()}
        self.latest = {name: np.asarray(values, np.float32) for name, values in meta.get('latest', {}).items()}
        self.evaluation_due = meta.get('evaluation_due', False)
        logs, evaluates = self._on_interval(cursor.counter)
        if extended and not evaluates:
            self.evaluation_due, self.last_scores = False, {}

        def surplus(row: Mapping[str, str]) -> bool:
            """Whether it was written because the run ended here: one that was longer from the start has no such row."""
            return extended and not (logs if row.get('health/skipped') else evaluates)

        moved = self.logger.resume(cursor.counter, surplus)
        self.evaluation_logged = self.evaluation_due and _has_scores(self.logger.directory, cursor.counter, self.control.eval_modes[-1])
        self.announce(f'resuming after {cursor.counter} updates' + (f'; {moved} rows moved to metrics.discarded.csv' if moved else ''))
        return cursor

    def _summary(self, updates: int) -> dict[str, Any]:
        def by_setting(scores: Mapping[str, np.ndarray]) -> dict[str, Any]:
            labels = np.asarray(self.team.settings)
            return {
                name: {
                    label: {'per_seed': values[labels == label].tolist(), **statistics.summarise(values[labels == label])}
                    for label in dict.fromkeys(self.team.settings)
                }
                for name, values in scores.items()
            }

        health, env_steps = jax.device_get((self.carry.health, self.carry.env_steps))
        return {
            'seeds': self.team.seeds.tolist(),
            'settings': list(dict.fromkeys(self.team.settings)),
            'num_updates': updates,
            'num_env_steps': env_steps.tolist(),
            'wall_seconds': self.earlier_seconds + time.monotonic() - self.started,
            'compile_seconds': self.compile_seconds,
            'updates_per_second': updates / max(self.train_seconds - self.compile_seconds, 1e-9),
            'skipped_updates': health.skipped.tolist(),
            'diverged': health.diverged.tolist(),
            'eval': by_setting(self.last_scores),
            'eval_before': by_setting(self.first_scores),
        }


def _has_scores(run: Path, update: int, mode: str) -> bool:
    """Whether metrics.csv has an evaluation after `update` updates."""
    if not (run / logger.CSV).exists():
        return False
    rows = logger.read(run)
    return f'{mode}/length' in rows and bool(np.isfinite(rows[f'{mode}/length'][rows['update'] == update]).any())


def _headline(scores: Mapping[str, np.ndarray]) -> str:
    shown = [f'{name} {values.mean():.2f}' for name, values in scores.items() if name.endswith(('success', 'return'))]
    return ', '.join(shown)
