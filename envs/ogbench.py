"""OGBench (https://github.com/seohongpark/ogbench, version 1.2.2): names, environments, rewards of recorded states.

Only its single-task environments are environments here: the others draw a goal that the observation does not contain. Rewards are theirs
and are decided on the state BEFORE the step: -1 (mazes) or minus the number of unsolved parts, 0 at the goal, where the episode ends.
"""

# pyright: reportAttributeAccessIssue=false
# (mujoco's functions come from C++ without stubs)

import contextlib
import copy
import functools
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import mujoco
import numpy as np

from envs import registry
from envs.host import SlotEnv
from envs.types import ArraySpec, Spec

DATASET_TYPES = ('navigate', 'stitch', 'explore', 'path', 'play', 'noisy')
_NAME = re.compile(rf'(?P<base>.+?)(-(?P<type>{"|".join(DATASET_TYPES)}))?(-(?P<task>singletask(-task\d+)?))?-(?P<version>v\d+)')

# What OGBench's environments change in the model between steps: colours, goal markers, locks of drawers and windows.
_MODEL_FIELDS = ('geom_rgba', 'mat_rgba', 'geom_pos', 'site_pos', 'dof_damping')
# What they read before a step although physics does not carry it: the pose of the gripper after the last forward pass (one substep ago)...
_DATA_FIELDS = ('site_xpos', 'site_xmat')
# ...and what they remember themselves. All else is a function of the task or is written before it is read.
_ATTRIBUTES = ('_success', '_cur_button_states')


class Parts(NamedTuple):
    """The parts of an OGBench name."""

    base: str  # 'pointmaze-medium'
    dataset_type: str  # 'navigate', or '' in the name of an environment
    task: str  # 'singletask-task1', 'singletask' (the default task), or '' (goal-conditioned)
    version: str  # 'v0'


def split(identifier: str) -> Parts | None:
    """Splits the name of an OGBench environment or dataset; None if it does not end in a version."""
    match = _NAME.fullmatch(identifier)
    return match and Parts(match['base'], match['type'] or '', match['task'] or '', match['version'])


@functools.cache
def names() -> tuple[str, ...]:
    """Identifiers of the single-task environments with states as observations."""
    specs = _gymnasium().envs.registration.registry.values()
    return tuple(spec.id for spec in specs if str(spec.entry_point).startswith('ogbench.') and _is_supported(spec.id))


def _is_supported(identifier: str) -> bool:
    return '-singletask' in identifier and not identifier.startswith('visual-')


def canonical(identifier: str) -> str:
    """The environment that is meant: the type of a dataset is stripped. Raises ValueError, one line, for an unknown name."""
    parts = split(identifier)
    wanted = identifier if parts is None else '-'.join(filter(None, (parts.base, parts.task, parts.version)))
    if wanted in names():
        return wanted
    if parts is not None and not parts.task and f'{parts.base}-singletask-{parts.version}' in names():
        default = f'{parts.base}-singletask-{parts.version}'
        raise ValueError(
            f"'ogbench/{identifier}' draws its goals at random; as an environment write one task: ogbench/{default} (the default task) "
            f'or ogbench/{parts.base}-singletask-task1-{parts.version}'
        )
    raise registry.unknown('environment', f'ogbench/{wanted}', [f'ogbench/{name}' for name in names()])


def is_on_device(identifier: str) -> bool:
    del identifier
    return False


def make(identifier: str, num_envs: int, options: Mapping[str, Any]) -> SlotEnv:
    """See `envs.make`. `identifier` is canonical."""
    is_point_maze = identifier.startswith('pointmaze-')
    registry.check_no_options(f'ogbench/{identifier}', options, ('implementation',) if is_point_maze else ())
    implementation = options.get('implementation', 'batched' if is_point_maze else 'gym')
    if implementation == 'batched':
        from envs import point_maze

        return point_maze.PointMazeEnv(identifier, num_envs)
    if implementation != 'gym':
        raise ValueError(f'implementation of ogbench/{identifier} must be batched or gym, not {implementation!r}')
    return OGBenchEnv(identifier, num_envs)


def relabel(identifier: str, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """See `envs.relabel`: OGBench's own `relabel_dataset`, applied to the rows as they are."""
    from ogbench.relabel_utils import relabel_dataset

    needed = ('qpos', 'button_states') if identifier.startswith(('scene', 'puzzle')) else ('qpos',)
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise ValueError(f'rewards of ogbench/{identifier} need the columns {" and ".join(missing)}, which the dataset lacks')
    columns = {name: np.asarray(arrays[name]) for name in needed}
    with global_numpy(np.random.RandomState(0)):
        relabel_dataset(identifier, _task_env(identifier), columns)
    return columns['rewards'], columns['masks']


@functools.lru_cache(maxsize=2)
def _task_env(identifier: str) -> Any:
    return build(identifier)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the suite says about the missing display, the OpenGL backend and the precision of bounds."""
    logger = logging.getLogger('absl')
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            yield
    finally:
        logger.setLevel(level)


def _gymnasium() -> Any:
    with _quiet():
        import gymnasium
        import ogbench  # noqa: F401  (registers its environments)
    return gymnasium


def build(identifier: str, **options: Any) -> Any:
    """OGBench's own environment, without wrappers (so without a time limit), reset once (which sets the task) and reproducible.

    Their arm environments take the random actions within a reset from a fresh, randomly seeded space, and the first observation depends
    on them: here `action_space` is an attribute, to be seeded before each reset.
    """
    gymnasium = _gymnasium()
    with _quiet(), global_numpy(np.random.RandomState(0)):
        env: Any = gymnasium.make(identifier, disable_env_checker=True, **options).unwrapped
        if isinstance(getattr(type(env), 'action_space', None), property):
            space = env.action_space
            env.__class__ = type(type(env).__name__, (type(env),), {'action_space': None})
            env.action_space = space
        env.action_space.seed(0)
        env.reset(seed=0)
    if hasattr(env, 'fullpath'):
        os.unlink(env.fullpath)  # a maze leaves its model in a temporary file
    return env


def horizon(identifier: str) -> int:
    """OGBench's time limit in control steps."""
    return _gymnasium().spec(identifier).max_episode_steps


def state_spec(env: Any, limit: int) -> Spec:
    """The Spec of an environment from `build`."""
    observations = ArraySpec(env.observation_space.shape)
    return Spec(observations, ArraySpec(env.action_space.shape, -1.0, 1.0), limit)


@contextlib.contextmanager
def global_numpy(random: np.random.RandomState) -> Iterator[None]:
    """Lets code that draws from numpy's global generator draw from `random` instead; the global one is left as it was."""
    saved = np.random.get_state()  # noqa: NPY002 (here and below: it is what OGBench draws from)
    np.random.set_state(random.get_state())  # noqa: NPY002
    try:
        yield
    finally:
        random.set_state(np.random.get_state())  # noqa: NPY002
        np.random.set_state(saved)  # noqa: NPY002


def pack_random(randoms: list[np.random.RandomState]) -> dict[str, np.ndarray]:
    """States of E generators as arrays [E, ...]."""
    states: list[Any] = [random.get_state(legacy=True) for random in randoms]
    return {
        'random_keys': np.stack([state[1] for state in states]),
        'random_position': np.array([state[2] for state in states], np.int64),
        'random_has_gauss': np.array([state[3] for state in states], np.int64),
        'random_gauss': np.array([state[4] for state in states], np.float64),
    }


def unpack_random(randoms: list[np.random.RandomState], state: Mapping[str, np.ndarray]) -> None:
    """Undoes `pack_random`."""
    rows = zip(state['random_keys'], state['random_position'], state['random_has_gauss'], state['random_gauss'], strict=True)
    for random, (keys, position, has_gauss, gauss) in zip(randoms, rows, strict=True):
        random.set_state(('MT19937', keys, int(position), int(has_gauss), float(gauss)))


class OGBenchEnv(SlotEnv):
    """Any single-task OGBench environment with states as observations, stepped by OGBench's own code.

    All slots share one compiled model (an arm's takes seconds to build and 60 MB). A slot is a shallow copy of the environment with
    simulation data of its own; what the environment writes into the model is put back before a slot is used.
    """

    def __init__(self, identifier: str, num_envs: int):
        first = build(identifier)
        super().__init__(state_spec(first, horizon(identifier)), num_envs)
        self._model = first.model
        self._slots = [first, *(_clone(first) for _ in range(num_envs - 1))]
        self._fields = [{name: getattr(self._model, name).copy() for name in _MODEL_FIELDS} for _ in range(num_envs)]
        self._attributes = [name for name in _ATTRIBUTES if hasattr(first, name)]
        self._randoms = [np.random.RandomState(0) for _ in range(num_envs)]

    @contextlib.contextmanager
    def _entered(self, slot: int) -> Iterator[Any]:
        for name, values in self._fields[slot].items():
            getattr(self._model, name)[:] = values
        with global_numpy(self._randoms[slot]):
            yield self._slots[slot]
        for name, values in self._fields[slot].items():
            values[:] = getattr(self._model, name)

    def _reset(self, slot: int, seed: int) -> np.ndarray:
        self._randoms[slot].seed(seed % 2**32)
        with self._entered(slot) as env:
            env.action_space.seed(seed)
            return env.reset(seed=seed)[0]

    def _step(self, slots: np.ndarray, actions: np.ndarray) -> tuple[Any, Any, Any, Mapping[str, Any]]:
        results = []
        for slot, action in zip(slots, actions, strict=True):
            with self._entered(slot) as env:
                results.append(env.step(action))
        observations, rewards, terminals, _, infos = zip(*results, strict=True)
        return np.stack(observations), np.array(rewards), np.array(terminals, bool), {'success': [info['success'] for info in infos]}

    def _get_simulation(self) -> dict[str, np.ndarray]:
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        physics = np.empty((self.num_envs, mujoco.mj_stateSize(self._model, kind)))
        for env, row in zip(self._slots, physics, strict=True):
            mujoco.mj_getState(self._model, env.data, row, kind)
        state = {'physics': physics}
        state |= {f'data/{name}': np.stack([getattr(env.data, name) for env in self._slots]) for name in _DATA_FIELDS}
        state |= {f'model/{name}': np.stack([fields[name] for fields in self._fields]) for name in _MODEL_FIELDS}
        state |= {f'env/{name}': np.stack([np.asarray(getattr(env, name)) for env in self._slots]) for name in self._attributes}
        return state | pack_random(self._randoms)

    def _set_simulation(self, state: Mapping[str, np.ndarray]) -> None:
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        unpack_random(self._randoms, state)
        for slot, env in enumerate(self._slots):
            for name, values in self._fields[slot].items():
                values[:] = state[f'model/{name}'][slot]
                getattr(self._model, name)[:] = values
            mujoco.mj_setState(self._model, env.data, state['physics'][slot], kind)
            mujoco.mj_forward(self._model, env.data)  # contacts and poses, for pictures; it moves the solver's warm start, hence twice
            mujoco.mj_setState(self._model, env.data, state['physics'][slot], kind)
            for name in _DATA_FIELDS:
                getattr(env.data, name)[:] = state[f'data/{name}'][slot]
            for name in self._attributes:
                value = state[f'env/{name}'][slot]
                setattr(env, name, value.copy() if value.ndim else value.item())

    def render(self, slot: int) -> np.ndarray:
        with self._entered(slot) as env:
            return env.render()

    def close(self) -> None:
        for env in self._slots:
            renderer = getattr(env, 'custom_renderer', None) or getattr(env, '_renderer', None)
            if renderer is not None:
                renderer.close()


def _clone(env: Any) -> Any:
    """A second environment on the same model. Not copy.copy, which a gymnasium environment answers by building a new one."""
    clone = object.__new__(type(env))
    clone.__dict__.update({name: value.copy() if isinstance(value, np.ndarray) else value for name, value in vars(env).items()})
    setattr(clone, '_data' if hasattr(env, '_data') else 'data', copy.copy(env.data))
    return clone
