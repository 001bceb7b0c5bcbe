"""Environments that run on the host: the contract (`HostEnv`) and the bookkeeping that most of them share (`SlotEnv`)."""

import abc
from collections.abc import Mapping
from typing import Any

import numpy as np

from envs.types import ArraySpec, HostStep, Spec


class HostEnv(abc.ABC):
    """A block of E environments ("slots") that are stepped together on the host.

    Every array that goes in or out has the slots as its leading axis. Nothing resets by itself: a slot whose episode ended (mask 0 or
    truncation 1) must be reset before it is stepped again. Observations, rewards, masks, truncations are as in `envs.types.HostStep`.

    Attributes:
      spec: `envs.types.Spec`; `horizon` is the time limit in control steps.
      num_envs: E.
      on_device: False; tells this kind from `envs.types.DeviceEnv`.
    """

    on_device = False
    spec: Spec
    num_envs: int

    @abc.abstractmethod
    def reset(self, seeds: Any, where: Any) -> Any:
        """Starts new episodes in some slots.

        Args:
          seeds: int64 [E], not negative. The start of a slot is a function of its seed alone, whatever ran before.
          where: bool [E], the slots to reset.

        Returns:
          Observations [E, ...]: the new episode's where `where`, the current ones elsewhere.
        """

    @abc.abstractmethod
    def step(self, actions: Any, active: Any) -> HostStep:
        """Advances the active slots by one control step.

        Args:
          actions: float32 [E, A]; clipped to the bounds of `spec.actions`. Rows of inactive slots are ignored.
          active: bool [E].

        Returns:
          A HostStep. Rows of inactive slots repeat their last result (after a reset: its observation, reward 0, mask 1, truncation 0).

        Raises:
          ValueError: an active slot has no running episode, or its action is not finite.
        """

    @abc.abstractmethod
    def get_state(self) -> dict[str, np.ndarray]:
        """Everything that later results depend on: plain arrays [E, ...]. They hold whatever the number of worker processes."""

    @abc.abstractmethod
    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues, bit for bit, where `get_state` was called on an environment of the same name and number of slots.

        Raises:
          ValueError: the arrays are not those of this environment.
        """

    @abc.abstractmethod
    def render(self, slot: int) -> np.ndarray:
        """An image of one slot, uint8 [height, width, 3]. Needs an OpenGL backend (MUJOCO_GL=egl or osmesa without a display)."""

    def close(self) -> None:  # noqa: B027 (most have nothing to free)
        """Frees what the environment holds; it cannot be used afterwards."""


def check_state(state: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Raises ValueError, naming the first difference, unless `state` has the names, shapes and dtypes of `expected`."""
    if set(state) != set(expected):
        names = ', '.join(sorted(set(state) ^ set(expected)))
        raise ValueError(f'this is not a state of this environment: the entries differ in {names}')
    for name, array in expected.items():
        given = np.asarray(state[name])
        if given.shape != array.shape or given.dtype != array.dtype:
            raise ValueError(
                f'this is not a state of this environment: {name} is {given.dtype}{list(given.shape)}, not {array.dtype}{list(array.shape)}'
            )


class SlotEnv(HostEnv):
    """A HostEnv that keeps the books: step counters, time limit, last results, checks. Subclasses supply the five `_` methods.

    Observations are one array, not a dict.
    """

    def __init__(self, spec: Spec, num_envs: int, metrics: tuple[str, ...] = ('success',)):
        if not isinstance(spec.observations, ArraySpec):
            raise ValueError('SlotEnv takes one array of observations; subclass HostEnv for a dict of them')
        self.spec = spec
        self.num_envs = num_envs
        self._books = {
            'observations': np.zeros((num_envs, *spec.observations.shape), spec.observations.dtype),
            'rewards': np.zeros(num_envs, np.float32),
            'masks': np.ones(num_envs, np.float32),
            'truncations': np.zeros(num_envs, np.float32),
            'num_steps': np.zeros(num_envs, np.int64),
            'running': np.zeros(num_envs, bool),
        }
        self._metrics = {name: np.zeros(num_envs, np.float32) for name in metrics}

    @abc.abstractmethod
    def _reset(self, slot: int, seed: int) -> Any:
        """Starts an episode in one slot from `seed` (>= 0) alone; returns its observation."""

    @abc.abstractmethod
    def _step(self, slots: np.ndarray, actions: np.ndarray) -> tuple[Any, Any, Any, Mapping[str, Any]]:
        """Steps `slots` (int [n]) with `actions` (float32 [n, A], within bounds).

        Returns observations [n, ...], rewards [n], terminals bool [n] (true terminals only) and {metric: [n]}.
        """

    @abc.abstractmethod
    def _get_simulation(self) -> dict[str, np.ndarray]:
        """The simulation's own part of `get_state`, as copies."""

    @abc.abstractmethod
    def _set_simulation(self, state: Mapping[str, np.ndarray]) -> None:
        """Undoes `_get_simulation`; must copy what it keeps."""

    def reset(self, seeds: Any, where: Any) -> np.ndarray:
        seeds, where = np.asarray(seeds), np.asarray(where)
        if seeds.shape != (self.num_envs,) or seeds.dtype.kind not in 'iu':
            raise ValueError(f'seeds must be {self.num_envs} integers, not {seeds.dtype}{list(seeds.shape)}')
        if where.shape != (self.num_envs,) or where.dtype != bool:
            raise ValueError(f'where must be {self.num_envs} booleans, not {where.dtype}{list(where.shape)}')
        if (seeds[where] < 0).any():
            raise ValueError(f'seeds must not be negative: {seeds[where].min()}')
        books = self._books
        for slot in np.flatnonzero(where):
            books['observations'][slot] = self._reset(int(slot), int(seeds[slot]))
        books['rewards'][where], books['masks'][where], books['truncations'][where] = 0, 1, 0
        books['num_steps'][where], books['running'][where] = 0, True
        for values in self._metrics.values():
            values[where] = 0
        return books['observations'].copy()

    def step(self, actions: Any, active: Any) -> HostStep:
        actions, active = np.asarray(actions, np.float32), np.asarray(active)
        if actions.shape != (self.num_envs, *self.spec.actions.shape):
            raise ValueError(f'actions must be {[self.num_envs, *self.spec.actions.shape]}, not {list(actions.shape)}')
        if active.shape != (self.num_envs,) or active.dtype != bool:
            raise ValueError(f'active must be {self.num_envs} booleans, not {active.dtype}{list(active.shape)}')
        slots = np.flatnonzero(active)
        books = self._books
        if not books['running'][slots].all():
            stopped = slots[~books['running'][slots]].tolist()
            raise ValueError(f'slots {stopped} have no running episode: reset them before stepping')
        if not np.isfinite(actions[slots]).all():
            raise ValueError(f'actions of slots {slots[~np.isfinite(actions[slots]).all(axis=1)].tolist()} are not finite')
        if slots.size:
            clipped = np.clip(actions[slots], self.spec.actions.minimum, self.spec.actions.maximum)
            observations, rewards, terminals, metrics = self._step(slots, clipped)
            books['num_steps'][slots] += 1
            # A true terminal on the last permitted step is a terminal, not a truncation: there is nothing to bootstrap from.
            truncations = (books['num_steps'][slots] >= self.spec.horizon) & ~np.asarray(terminals) & (self.spec.horizon > 0)
            books['observations'][slots] = observations
            books['rewards'][slots] = rewards
            books['masks'][slots] = 1.0 - np.asarray(terminals)
            books['truncations'][slots] = truncations
            books['running'][slots] = ~(np.asarray(terminals) | truncations)
            for name, values in self._metrics.items():
                values[slots] = metrics[name]
        return HostStep(
            observations=books['observations'].copy(),
            rewards=books['rewards'].copy(),
            masks=books['masks'].copy(),
            truncations=books['truncations'].copy(),
            metrics={name: values.copy() for name, values in self._metrics.items()},
        )

    def get_state(self) -> dict[str, np.ndarray]:
        state = {name: values.copy() for name, values in self._books.items()}
        state |= {f'metrics/{name}': values.copy() for name, values in self._metrics.items()}
        return state | {f'simulation/{name}': values for name, values in self._get_simulation().items()}

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        check_state(state, self.get_state())
        for name, values in self._books.items():
            values[:] = state[name]
        for name, values in self._metrics.items():
            values[:] = state[f'metrics/{name}']
        prefix = 'simulation/'
        self._set_simulation({name.removeprefix(prefix): values for name, values in state.items() if name.startswith(prefix)})
