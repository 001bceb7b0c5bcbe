"""Data from scripted experts, after OGBench's recipes (https://github.com/seohongpark/ogbench, data_gen_scripts/).

  pointmaze-{medium,large,giant,teleport}-navigate   walk to one random goal after another
                                         -stitch     walk to a goal four cells away and stay there
                                         -path       walk to one random goal and stay there
                                         -explore    follow a random heading, redrawn every 10 steps
  cube-{single,double}-play                          follow a planned path with smooth noise, pick and place one cube after another
                      -noisy                         the same with a closed-loop controller, noise and random actions

The experts (`get_oracle_subgoal`, `CubePlanOracle`, `CubeMarkovOracle`) are those inside the ogbench package; steps per episode and
noise are those of its commands, except that it has none for point mazes of type explore and path, which get the noise 0.5 of the others.
Episode n is a function of (seed, split, n) alone: a file with more episodes begins with a shorter one's, whatever the number of workers.
Actions are rounded to float32 before they are executed, so the recorded ones are exactly those.
"""

import concurrent.futures
import functools
import queue
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from envs import ogbench, point_maze, registry, workers

SPLITS = ('train', 'val')
_MAZES = ('medium', 'large', 'giant', 'teleport')
_MAZE_TYPES = ('navigate', 'stitch', 'path', 'explore')
_CUBES = ('single', 'double')
_CUBE_TYPES = ('play', 'noisy')

_MAZE_CHUNK = 25  # episodes that are stepped together
_MAZE_NOISE = 0.5
_HEADING_STEPS = 10
_STITCH_CELLS = 4
_CUBE_NOISE = 0.1
_CUBE_NOISE_SCALE = np.array([1.0, 1.0, 1.0, 3.0, 10.0])  # x, y, z, yaw, gripper
_CUBE_NOISE_SMOOTHING = 0.5
_CUBE_MIN_NORM = 0.4
_CUBE_RANDOM_ACTIONS = 0.1
_CUBE_STACKING = {'single': 0.0, 'double': 0.25}


class Recipe(NamedTuple):
    """How the episodes of one dataset are made."""

    name: str  # of the dataset, 'pointmaze-medium-navigate-v0'
    environment: str  # 'pointmaze-medium-v0'
    suite: str  # pointmaze | cube
    size: str  # of the maze, or 'single', 'double'
    dataset_type: str
    num_steps: int  # rows of an episode: one per observation, so one more than its transitions


class Generated(NamedTuple):
    """Episodes in OGBench's raw layout, one row per OBSERVATION: N = episodes * steps."""

    arrays: dict[str, np.ndarray]  # observations, actions, qpos, qvel: float32 [N, ...]; lengths: int64 [episodes], TRANSITIONS of each
    goals_reached: int
    goals_set: int


def names() -> list[str]:
    """The datasets that can be generated."""
    mazes = [f'ogbench/pointmaze-{size}-{kind}-v0' for size in _MAZES for kind in _MAZE_TYPES]
    return mazes + [f'ogbench/cube-{size}-{kind}-v0' for size in _CUBES for kind in _CUBE_TYPES]


def recipe(name: str, dataset_type: str | None = None) -> Recipe:
    """Finds the recipe of a dataset.

    Args:
      name: 'ogbench/pointmaze-medium-navigate-v0'; the name of a task (`-singletask-task1`) within it is ignored.
      dataset_type: for a name without one.

    Raises:
      ValueError: there is no such recipe.
    """
    parsed = registry.parse(name)
    parts = ogbench.split(parsed.identifier)
    if parsed.family != 'ogbench' or parts is None:
        raise registry.unknown('dataset', name, names())
    registry.check_no_options(name, parsed.options)
    if dataset_type and parts.dataset_type and dataset_type != parts.dataset_type:
        raise ValueError(f'{name!r} is of type {parts.dataset_type}, not {dataset_type}')
    kind = parts.dataset_type or dataset_type
    suite, _, size = parts.base.partition('-')
    kinds = {'pointmaze': _MAZE_TYPES, 'cube': _CUBE_TYPES}.get(suite, ())
    if not kind and kinds:
        known = ', '.join(kinds)
        raise ValueError(f'{name!r} lacks the type of the dataset: write ogbench/{parts.base}-TYPE-{parts.version}, TYPE one of {known}')
    full = f'{parts.base}-{kind}-{parts.version}'
    if f'ogbench/{full}' not in names():
        raise registry.unknown('dataset', f'ogbench/{full}', names())
    num_steps = 201 if kind == 'stitch' else 2001 if (size, kind) == ('giant', 'navigate') else 1001
    return Recipe(full, f'{parts.base}-{parts.version}', suite, size, str(kind), num_steps)


def generate(
    name: str,
    num_episodes: int,
    seed: int = 0,
    dataset_type: str | None = None,
    split: str = 'train',
    num_workers: int = 0,
    progress: Callable[[int], Any] | None = None,
) -> Generated:
    """Makes the first `num_episodes` episodes of a dataset.

    Args:
      name: see `recipe`.
      num_episodes: at least 1.
      seed: not negative.
      dataset_type: see `recipe`.
      split: 'train' or 'val', which are independent.
      num_workers: processes that share the work; 0 and 1: this one does it. The result is the same.
      progress: called with a number of episodes whenever that many more are done.

    Raises:
      ValueError: unknown dataset or a bad number.
    """
    dataset = recipe(name, dataset_type)
    for label, number, smallest in (('num_episodes', num_episodes, 1), ('seed', seed, 0), ('num_workers', num_workers, 0)):
        if not isinstance(number, int | np.integer) or number < smallest:
            raise ValueError(f'{label} must be a whole number of at least {smallest}, not {number!r}')
    if split not in SPLITS:
        raise ValueError(f'split must be train or val, not {split!r}')
    size = _MAZE_CHUNK if dataset.suite == 'pointmaze' else 1
    chunks = [list(range(first, min(first + size, num_episodes))) for first in range(0, num_episodes, size)]
    parts = []
    for chunk, part in zip(chunks, _run(f'ogbench/{dataset.name}', int(seed), split, chunks, num_workers), strict=True):
        parts.append(part)
        if progress is not None:
            progress(len(chunk))
    arrays = {key: np.concatenate([part.arrays[key] for part in parts]) for key in parts[0].arrays}
    return Generated(arrays, sum(part.goals_reached for part in parts), sum(part.goals_set for part in parts))


def _run(name: str, seed: int, split: str, chunks: list[list[int]], num_workers: int) -> Iterator[Generated]:
    num_workers = min(num_workers, len(chunks))
    if num_workers < 2:
        yield from (episodes(name, seed, split, chunk) for chunk in chunks)
        return
    pool = [workers.Worker(f'generation worker {index + 1} of {num_workers}') for index in range(num_workers)]
    idle: queue.SimpleQueue[workers.Worker] = queue.SimpleQueue()
    for worker in pool:
        idle.put(worker)

    def ask(chunk: list[int]) -> Generated:
        worker = idle.get()
        try:
            worker.send('generate', name=name, seed=seed, split=split, numbers=chunk)
            fields, arrays = worker.receive()
        finally:
            idle.put(worker)
        return Generated(arrays, fields['goals_reached'], fields['goals_set'])

    executor = concurrent.futures.ThreadPoolExecutor(num_workers)  # each thread only waits for one worker
    try:
        yield from executor.map(ask, chunks)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        for worker in pool:
            worker.stop()


def episodes(name: str, seed: int, split: str, numbers: list[int]) -> Generated:
    """Makes the episodes with the given numbers, in that order, in this process. Arguments as in `generate`, unchecked."""
    dataset = recipe(name)
    keys = [(seed, SPLITS.index(split), number) for number in numbers]
    if dataset.suite == 'pointmaze':
        return _maze_episodes(dataset, [np.random.default_rng(key) for key in keys])
    parts = [_cube_episode(dataset, np.random.default_rng(key)) for key in keys]
    arrays = {key: np.concatenate([part.arrays[key] for part in parts]) for key in parts[0].arrays}
    return Generated(arrays, sum(part.goals_reached for part in parts), sum(part.goals_set for part in parts))


@functools.lru_cache(maxsize=1)
def _built(identifier: str) -> Any:
    """OGBench's environment of a recipe, with what its oracles need."""
    options = {'mode': 'data_collection'} if identifier.startswith('cube') else {}
    return ogbench.build(identifier, terminate_at_goal=False, **options)


class _Guide:
    """OGBench's maze oracle for many points: the unit vector towards the centre of the next cell. It depends on cells only: remembered."""

    def __init__(self, env: Any):
        self._env = env
        num_cells = env.maze_map.size
        self._centres = np.full((num_cells, num_cells, 2), np.nan)

    def _cell(self, positions: np.ndarray) -> np.ndarray:
        unit = self._env._maze_unit
        columns = ((positions[:, 0] + self._env._offset_x + unit / 2) / unit).astype(int)
        rows = ((positions[:, 1] + self._env._offset_y + unit / 2) / unit).astype(int)
        return rows * self._env.maze_map.shape[1] + columns

    def __call__(self, positions: np.ndarray, goals: np.ndarray) -> np.ndarray:
        here, there = self._cell(positions), self._cell(goals)
        for index in np.flatnonzero(np.isnan(self._centres[here, there, 0])):
            self._centres[here[index], there[index]] = self._env.get_oracle_subgoal(positions[index], goals[index])[0]
        return _unit(self._centres[here, there] - positions)


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / (np.linalg.norm(vectors, axis=-1, keepdims=True) + 1e-6)


def _free_cells(maze_map: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Free cells [C, 2], and those of them that are no straight corridor: corners, crossings, dead ends, where OGBench puts goals."""
    free = maze_map == 0
    down, up, right, left = (np.roll(free, shift, axis) for shift, axis in ((-1, 0), (1, 0), (-1, 1), (1, 1)))
    corridor = (up & down & ~left & ~right) | (left & right & ~up & ~down)
    return np.argwhere(free), np.argwhere(free & ~corridor)


def _maze_episodes(dataset: Recipe, randoms: list[np.random.Generator]) -> Generated:
    env = _built(dataset.environment)
    num_points, num_steps, kind = len(randoms), dataset.num_steps, dataset.dataset_type
    stepper, guide = point_maze.Stepper(env, num_points), _Guide(env)
    cells, vertices = _free_cells(env.maze_map)

    goals, shown = np.empty((num_points, 2)), np.empty((num_points, 2))
    noise, headings = np.empty((num_points, num_steps, 2)), np.zeros((num_points, -(-num_steps // _HEADING_STEPS), 2))
    for point, random in enumerate(randoms):
        start = random.choice(cells)
        candidates = vertices
        if kind == 'stitch':
            distances = env.get_oracle_subgoal(env.ij_to_xy(start), env.ij_to_xy(start))[1]
            near = np.argwhere(distances == _STITCH_CELLS)
            candidates = near if len(near) else start[None]
        task = {'init_ij': tuple(start), 'goal_ij': tuple(random.choice(candidates))}
        shown[point] = stepper.reset(point, int(random.integers(2**32)), options={'task_info': task})
        goals[point] = env.cur_goal_xy
        noise[point] = random.normal(0, _MAZE_NOISE, (num_steps, 2))
        headings[point] = _unit(random.normal(size=headings.shape[1:]))

    arrays = {name: np.empty((num_points, num_steps, 2), np.float32) for name in ('observations', 'actions', 'qpos', 'qvel')}
    points, reached, goals_reached = np.arange(num_points), np.zeros(num_points, bool), 0
    for step in range(num_steps):
        arrays['observations'][:, step] = shown  # where a portal was entered, not where it led; qpos has that
        arrays['qpos'][:, step] = stepper.positions
        arrays['qvel'][:, step] = stepper.velocities
        directions = headings[:, step // _HEADING_STEPS] if kind == 'explore' else guide(stepper.positions, goals)
        actions = np.clip(directions + noise[:, step], -1, 1).astype(np.float32)
        arrays['actions'][:, step] = actions
        shown = stepper.step(points, actions)
        successes = stepper.is_near(shown, goals)
        if kind == 'navigate':
            goals_reached += int(successes.sum())
            for point in np.flatnonzero(successes):
                offset = randoms[point].uniform(-1, 1, 2) * env._noise * env._maze_unit / 4
                goals[point] = np.array(env.ij_to_xy(randoms[point].choice(vertices))) + offset
        else:
            goals_reached += int((successes & ~reached).sum())
            reached |= successes
    flat: dict[str, np.ndarray] = {name: values.reshape(num_points * num_steps, 2) for name, values in arrays.items()}
    goals_set = num_points + goals_reached if kind == 'navigate' else num_points
    return Generated({**flat, 'lengths': np.full(num_points, num_steps - 1, np.int64)}, goals_reached, goals_set)


def _cube_episode(dataset: Recipe, random: np.random.Generator) -> Generated:
    from ogbench.manipspace.oracles.markov.cube_markov import CubeMarkovOracle
    from ogbench.manipspace.oracles.plan.cube_plan import CubePlanOracle

    env = _built(dataset.environment)
    reset_seed, numpy_seed = (int(seed) for seed in random.integers(2**32, size=2))
    noisy = dataset.dataset_type == 'noisy'
    rows: dict[str, list[np.ndarray]] = {name: [] for name in ('observations', 'actions', 'qpos', 'qvel')}
    goals_reached, goals_set = 0, 1
    stacking = random.uniform(0, _CUBE_STACKING[dataset.size])
    scale = random.uniform(0, _CUBE_NOISE) * _CUBE_NOISE_SCALE
    with ogbench.global_numpy(np.random.RandomState(numpy_seed)):  # the oracles draw from the global generator
        observation, info = env.reset(seed=reset_seed)
        if noisy:
            expert: Any = CubeMarkovOracle(env=env, min_norm=_CUBE_MIN_NORM)
        else:
            expert = CubePlanOracle(env=env, noise=_CUBE_NOISE, noise_smoothing=_CUBE_NOISE_SMOOTHING)
        expert.reset(observation, info)
        for _ in range(dataset.num_steps):
            action = np.asarray(expert.select_action(observation, info))
            if noisy:
                is_random = random.uniform() < _CUBE_RANDOM_ACTIONS
                action = random.uniform(-1, 1, 5) if is_random else action + random.normal(0, scale)
            action = np.clip(action, -1, 1).astype(np.float32)
            rows['observations'].append(observation)
            rows['actions'].append(action)
            observation, _, _, _, info = env.step(action)
            rows['qpos'].append(info['prev_qpos'])
            rows['qvel'].append(info['prev_qvel'])
            if expert.done:
                goals_reached += int(info['success'])
                goals_set += 1
                expert.reset(*env.set_new_target(p_stack=stacking))
    arrays = {name: np.asarray(values, np.float32) for name, values in rows.items()}
    return Generated({**arrays, 'lengths': np.array([dataset.num_steps - 1])}, goals_reached, goals_set)
