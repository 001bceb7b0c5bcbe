"""What a run is made of, as JSON and back: tasks with their data, config.json, and `load` for notebooks, evaluation and serving."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import agents
import envs
from agents.types import Agent
from data import dataset as datasets
from data import npz
from data.types import Dataset
from envs.types import ArraySpec, Spec, Statistics
from envs.workers import pack_spec, unpack_spec
from training import folder, members
from training.checkpoints import Checkpoints
from training.rollout import first_plan

ACTION_MARGIN = 1e-5  # recorded actions are clipped to +-(1 - margin), so that none lies on the border of the box


class Task(NamedTuple):
    """An environment's spec, with the data that belong to it."""

    spec: Spec  # with the statistics of the data
    dataset: Dataset | None
    dataset_hash: str | None


def read_dataset(path: str | Path, env_name: str, spec: Spec | None = None) -> Dataset:
    """A file as a Dataset. Rewards and masks are those of the environment's task where it defines them on recorded states.

    With the environment's `spec`, its shapes are checked first. Raises ValueError (one line) for a damaged file, one recorded elsewhere,
    or one that holds no rewards for this environment.
    """
    arrays = dict(npz.read(path))
    recorded = [arrays[name].shape[1:] for name in ('observations', 'actions')]
    # before rewards are computed from what may be another robot
    if spec is not None and recorded != (expected := [shapes(spec.observations), spec.actions.shape]):
        raise ValueError(
            f'{path} has observations {recorded[0]} and actions {recorded[1]}, but {env_name} has '
            f'{expected[0]} and {expected[1]}: it was recorded in another environment'
        )
    if ('rewards' in arrays) != ('masks' in arrays):
        raise ValueError(f'{path} has only one of rewards and masks: store both, or neither to take those of {env_name}')
    if 'rewards' not in arrays:
        arrays['rewards'], arrays['masks'] = envs.relabel(env_name, arrays)
    extras = {name: arrays[name] for name in ('qpos', 'qvel', 'button_states') if name in arrays}
    limit = 1 - ACTION_MARGIN
    actions = np.clip(arrays['actions'], -limit, limit)
    return datasets.from_trajectories(arrays['observations'], actions, arrays['rewards'], arrays['masks'], arrays['lengths'], extras)


def shapes(observations: Any) -> Any:
    """Shape of an ArraySpec, or {name: shape} of a dict of them."""
    return {name: part.shape for name, part in observations.items()} if isinstance(observations, Mapping) else observations.shape


def download(name: str) -> None:
    """Fetches an OGBench dataset (training and validation file) unless it is there. Raises ValueError if that fails."""
    file = npz.file_name(name)
    if not (Path(npz.DIRECTORY).expanduser() / file).is_file():
        for stem in (file.removesuffix('.npz') + '-val', file.removesuffix('.npz')):
            npz.download(stem)


def make_task(env_name: str, dataset: str | Path | None = None) -> Task:
    """The task of an environment, and of a file of recorded trajectories for it."""
    env = envs.make(env_name)
    spec = env.spec
    if not env.on_device:
        env.close()
    if dataset is None:
        return Task(spec, None, None)
    files = npz.find(dataset)
    if len(files) > 1:
        raise ValueError(f'{dataset} holds {len(files)} files; training on a rotation of files is not built yet: name one of them')
    loaded = read_dataset(files[0], env_name, spec)
    return Task(spec._replace(statistics=datasets.statistics(loaded)), loaded, datasets.dataset_hash(loaded))


def describe(name: str, overrides: Mapping[str, Any], spec: Spec, env_name: str = '') -> dict[str, Any]:
    """The part of config.json from which `load` rebuilds an agent."""
    statistics = jax.tree.map(
        lambda part: {key: np.asarray(value).tolist() for key, value in part._asdict().items()},
        spec.statistics,
        is_leaf=lambda part: isinstance(part, Statistics),
    )
    packed = {**pack_spec(spec._replace(statistics=None)), 'statistics': statistics}
    return {'agent': {'name': name, 'overrides': dict(overrides)}, 'spec': packed, 'env': env_name}


def rebuild(config: Mapping[str, Any]) -> tuple[Agent, Spec]:
    """The agent and the task that `describe` wrote down."""
    packed = dict(config['spec'])
    statistics = packed.pop('statistics')
    observations = _float_bounds(packed['observations'], packed['dict'])
    spec = unpack_spec({**packed, 'actions': _float_bounds(packed['actions'], False), 'observations': observations})
    if statistics is not None:
        parts = {key: _statistics(part) for key, part in statistics.items()} if packed['dict'] else _statistics(statistics)
        spec = spec._replace(statistics=parts)
    overrides = {key: tuple(value) if isinstance(value, list) else value for key, value in config['agent']['overrides'].items()}
    return agents.make(config['agent']['name'], spec, **overrides), spec


def _statistics(fields: Mapping[str, Any]) -> Statistics:
    return Statistics(**{key: np.asarray(value, np.float32) for key, value in fields.items()})


def _float_bounds(fields: Mapping[str, Any], is_dict: bool) -> dict[str, Any]:
    """JSON spells infinite bounds as text."""
    if is_dict:
        return {key: _float_bounds(part, False) for key, part in fields.items()}
    return {**fields, 'minimum': float(fields['minimum']), 'maximum': float(fields['maximum'])}


def split_step(run: str | Path) -> tuple[str, int | None]:
    """The folder and the step that RUN or RUN@STEP names (None: the newest). Raises ValueError for a step that is no number."""
    path, _, at = str(run).rpartition('@')
    if not path or '/' in at or Path(run).is_dir():  # a folder may have an @ in its name
        return str(run), None
    if not at.isdigit():
        raise ValueError(f'cannot read the step of {run!r}: write RUN@STEP')
    return path, int(at)


def load_diverged(run: str | Path, counter: int, num_members: int) -> np.ndarray:
    """Which members had diverged, and were frozen, at the checkpoint of `counter` updates: bool [R]. Raises ValueError as `load` does."""
    template = jax.ShapeDtypeStruct((num_members,), jnp.bool_)
    path, _ = split_step(run)
    return np.asarray(Checkpoints(Path(path) / 'checkpoints').restore(template, counter, part="['carry'].health.diverged")[1])


class Loaded(NamedTuple):
    """A trained run."""

    agent: Agent
    state: Any  # agent states, leaves [R, ...]
    config: dict[str, Any]
    members: members.Members
    counter: int  # updates that the state has seen


def load(run: str | Path, step: int | None = None) -> Loaded:
    """The agent, states and config of a run folder, at its newest sound checkpoint or at `step` updates.

    Only the agent's state is taken; replay and environments stay on disk. `RUN@STEP` names a step, too.

    Raises ValueError (one line) if there is no such run or checkpoint, or if it does not fit the agent of its config.
    """
    path, named = split_step(run)
    step = step if named is None else named
    config = folder.read_config(path)
    agent, _ = rebuild(config)
    team = members.over_grid(agent, config['seeds'], config.get('grid'))
    template = jax.eval_shape(lambda: members.init_states(agent, team))
    counter, state, _ = Checkpoints(Path(path) / 'checkpoints').restore(template, step, part="['carry'].state")
    return Loaded(agent, jax.tree.map(jnp.asarray, state), config, team, counter)


def adopter(agent: Agent, name: str, run: str | Path, announce: Any = folder.to_stderr) -> Any:
    """prepare_states for `fit`: every member starts from the networks of another run (`--init.NAME=RUN[@STEP]`).

    A member takes the other run's member of the same seed, where that run has one setting and all the seeds; else members pair up in order,
    and a run with one member serves all. After adopting, the actions of both are compared on the
    same observations under the same keys and the largest difference is announced.

    Raises ValueError if the agent cannot adopt that kind of run, or the number of members or the shapes do not fit.
    """
    if name not in agent.adopt:
        raise ValueError(f'--init.{name}: this agent can start from {", ".join(agent.adopt) or "nothing"}')

    def prepare(states: Any, team: members.Members) -> Any:
        other = load(run)
        index = _partners(name, run, team, other.members)
        source = jax.tree.map(lambda leaf: leaf[index], other.state)
        try:
            adopted = jax.vmap(agent.adopt[name])(states, source)
        except (KeyError, AttributeError) as error:
            raise ValueError(f'--init.{name}={run}: that run has other networks ({error}); choose a run of the right agent') from error
        before, after = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (states, adopted))
        if before != after:
            raise ValueError(f'--init.{name}={run}: its networks have other shapes; give both runs the same sizes and features')
        announce(f'--init.{name}={run}: step-0 actions differ by at most {_difference(agent, adopted, other, source):.2e}')
        return adopted

    return prepare


def _partners(name: str, run: str | Path, team: members.Members, other: members.Members) -> np.ndarray:
    """Index into the other run for each member."""
    theirs = {int(seed): index for index, seed in enumerate(other.seeds)}
    if len(set(other.settings)) == 1 and all(int(seed) in theirs for seed in team.seeds):
        return np.asarray([theirs[int(seed)] for seed in team.seeds])
    if len(other.seeds) not in (1, len(team.seeds)):
        raise ValueError(
            f'--init.{name}={run} has {len(other.seeds)} members with other seeds than the {len(team.seeds)} of this run: '
            'use the same seeds, as many members, or a run with one'
        )
    return np.arange(len(team.seeds)) % len(other.seeds)


def _difference(agent: Agent, states: Any, other: Loaded, source: Any) -> float:
    _, spec = rebuild(other.config)
    if agent.policy.horizon != other.agent.policy.horizon:
        raise ValueError(
            f'the runs plan {agent.policy.horizon} and {other.agent.policy.horizon} control steps: set the same horizon_length'
        )
    observations = _example_observations(spec, np.random.default_rng(0))
    plans = [_plans(owner, state, observations, spec) for owner, state in ((agent, states), (other.agent, source))]
    return float(jnp.max(jnp.abs(plans[0] - plans[1])))


def _example_observations(spec: Spec, random: np.random.Generator) -> Any:
    """16 observations like those of the data; without statistics, spread over the bounds where there are any."""

    def example(part: ArraySpec, statistics: Statistics | None) -> Any:
        noise = random.standard_normal((16, *part.shape))
        if statistics is not None:
            noise = np.asarray(statistics.mean)[None] + np.asarray(statistics.std)[None] * noise
        elif np.isfinite(part.maximum - part.minimum):
            noise = random.uniform(part.minimum, part.maximum, noise.shape)
        return jnp.asarray(np.clip(noise, part.minimum, part.maximum).astype(part.dtype))

    if isinstance(spec.observations, Mapping):
        statistics = spec.statistics or dict.fromkeys(spec.observations)
        return {name: example(part, statistics[name]) for name, part in spec.observations.items()}
    return example(spec.observations, spec.statistics)


def _plans(agent: Agent, states: Any, observations: Any, spec: Spec) -> Any:
    return jax.jit(jax.vmap(lambda state: first_plan(agent.policy, state, observations, spec.actions.shape).actions))(states)


def run_config(
    description: Mapping[str, Any], seeds: Sequence[int], grid: Mapping[str, Any], stages: Sequence[Any], task: Task
) -> dict[str, Any]:
    """config.json of a run: what defines it, and where it was made. The 'count' of the last stage may be extended on resume."""
    described: list[dict[str, Any]] = [{'phase': stage.phase, 'every': dict(stage.every or {}), 'count': stage.count} for stage in stages]
    last = described[-1].pop('count')
    return {
        **description,
        'seeds': [int(seed) for seed in seeds],
        'grid': {name: list(values) for name, values in grid.items()},
        'stages': described,
        'count': {str(len(stages) - 1): last},
        'dataset_hash': task.dataset_hash,
        'provenance': {**folder.provenance(), 'devices': [f'{device.platform}:{device.device_kind}' for device in jax.local_devices()]},
    }
