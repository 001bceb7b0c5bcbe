"""OGBench's point mazes, many at a time: the same numbers as its own environment, without its work per step.

A step moves the point by 0.2 * action, stops it and runs five physics steps, which push it out of the walls. Physics includes the warm
start of the contact solver: without that (as with `mujoco.rollout`) positions near walls drift by an ulp.
"""

# pyright: reportAttributeAccessIssue=false
# (mujoco's functions come from C++ without stubs)

from collections.abc import Mapping
from typing import Any

import mujoco
import numpy as np

from envs import ogbench
from envs.host import SlotEnv

_PHYSICS = mujoco.mjtState.mjSTATE_INTEGRATION
_STEP_SIZE = 0.2


class Stepper:
    """Physics of E points in one maze.

    Attributes:
      env: OGBench's environment from `ogbench.build`: the maze, and the resets.
      states: float64 [E, S], complete physics states.
      positions: float64 [E, 2], the part of `states` that is the position.
      velocities: float64 [E, 2], likewise.
      randoms: one generator per point; teleports draw from it.
    """

    def __init__(self, env: Any, num_points: int):
        self.env = env
        model = env.model
        self.states = np.zeros((num_points, mujoco.mj_stateSize(model, _PHYSICS)))
        start = mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_TIME)
        self.positions = self.states[:, start : start + model.nq]
        self.velocities = self.states[:, start + model.nq : start + model.nq + model.nv]
        self.randoms = [np.random.RandomState(0) for _ in range(num_points)]
        self._data = mujoco.MjData(model)

    def reset(self, point: int, seed: int, **options: Any) -> np.ndarray:
        """OGBench's own reset of one point from `seed` alone; returns its position [2]. `env.cur_goal_xy` is its goal until the next."""
        self.randoms[point].seed(seed % 2**32)
        with ogbench.global_numpy(self.randoms[point]):
            self.env.action_space.seed(seed)
            self.env.reset(seed=seed, **options)
        mujoco.mj_getState(self.env.model, self.env.data, self.states[point], _PHYSICS)
        return self.positions[point].copy()

    def step(self, points: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Moves `points` (int [n]) by one control step; actions float32 [n, 2].

        Returns the positions float64 [n, 2] that the step led to, BEFORE any teleport: that is what OGBench shows as the observation.
        """
        model, data = self.env.model, self._data
        self.positions[points] += _STEP_SIZE * actions
        self.velocities[points] = 0
        for state in map(self.states.__getitem__, points):
            mujoco.mj_setState(model, data, state, _PHYSICS)
            mujoco.mj_step(model, data, nstep=self.env.frame_skip)
            mujoco.mj_getState(model, data, state, _PHYSICS)
        reached = self.positions[points]
        if self.env._teleport_info is not None:
            self._teleport(points, reached)
        return reached

    def _teleport(self, points: np.ndarray, reached: np.ndarray) -> None:
        info = self.env._teleport_info
        entrances, exits = np.array(info['teleport_in_xys']), np.array(info['teleport_out_xys'])
        distances = np.linalg.norm(reached[:, None] - entrances[None], axis=-1)
        for point in points[(distances <= 1.5 * info['teleport_radius']).any(axis=1)]:
            mujoco.mj_setState(self.env.model, self._data, self.states[point], _PHYSICS)
            self._data.qpos[:] = exits[self.randoms[point].randint(len(exits))]
            mujoco.mj_forward(self.env.model, self._data)
            mujoco.mj_getState(self.env.model, self._data, self.states[point], _PHYSICS)

    def is_near(self, positions: np.ndarray, goals: np.ndarray) -> np.ndarray:
        """Whether positions [n, 2] are within OGBench's tolerance of goals [n, 2]; bool [n]."""
        return np.linalg.norm(positions - goals, axis=-1) <= self.env._goal_tol


class PointMazeEnv(SlotEnv):
    """A block of single-task point mazes."""

    def __init__(self, identifier: str, num_envs: int):
        env = ogbench.build(identifier)
        super().__init__(ogbench.state_spec(env, ogbench.horizon(identifier)), num_envs)
        self._stepper = Stepper(env, num_envs)
        self._goal = np.array(env.cur_goal_xy)  # a single task has one goal, without noise

    def _reset(self, slot: int, seed: int) -> np.ndarray:
        return self._stepper.reset(slot, seed)

    def _step(self, slots: np.ndarray, actions: np.ndarray) -> tuple[Any, Any, Any, Mapping[str, Any]]:
        # Success is that of the state before the step, as in OGBench's single tasks.
        successes = self._stepper.is_near(self._stepper.positions[slots], self._goal[None])
        observations = self._stepper.step(slots, actions)
        return observations, successes - 1.0, successes, {'success': successes}

    def _get_simulation(self) -> dict[str, np.ndarray]:
        return {'physics': self._stepper.states.copy(), **ogbench.pack_random(self._stepper.randoms)}

    def _set_simulation(self, state: Mapping[str, np.ndarray]) -> None:
        self._stepper.states[:] = state['physics']
        ogbench.unpack_random(self._stepper.randoms, state)

    def render(self, slot: int) -> np.ndarray:
        env = self._stepper.env
        mujoco.mj_setState(env.model, env.data, self._stepper.states[slot], _PHYSICS)
        mujoco.mj_forward(env.model, env.data)
        return env.render()

    def close(self) -> None:
        if self._stepper.env.custom_renderer is not None:
            self._stepper.env.custom_renderer.close()
