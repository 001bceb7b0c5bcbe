"""Probe environments: problems so small that values and best policies are known by hand, to find which part of an agent is broken.

All have one action in [-1, 1] and one observation; `V` is the value of the best policy, g the discount.

  probe/constant    one step, observation 0, reward 1.                                  V = 1: the critic can learn a number
  probe/observation one step, observation -1 or 1, reward = observation.                V(o) = o: it sees its input
  probe/delay       two steps, observation 0 then 1, reward 1 at the end.               V(0) = g, V(1) = 1: it discounts
  probe/action      one step, observation 0, reward 1 - (a - 1/2)^2.                    best a = 1/2, V = 1: the policy improves
  probe/policy      one step, observation o = -1 or 1, reward 1 - (a - o/2)^2.          best a = o/2, V = 1: it depends on its input
  probe/infinite    never ends by itself, cut after `horizon` (10), reward each step    V = reward / (1 - g): time limits bootstrap
                    `reward` (1), observation 0.
  probe/line        x in [-1, 1] moves by a/10, starts below 0, reward -|x - 1| after   best a = 1: true ends (success) and time
                    the move, ends when x > 0.95, cut after `horizon` (20) steps.       limits in one problem
  probe/host-line   the same on the host, in numpy.

A true end on the last permitted step is a true end, not a truncation.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from envs import registry
from envs.host import SlotEnv
from envs.types import ArraySpec, DeviceEnv, EnvState, Spec

_GOAL = 0.95
_STEP_SIZE = 0.1


class Probe(NamedTuple):
    """A one-dimensional problem whose observation is its state; every number is float32 []."""

    start: Callable  # (key) -> observation
    move: Callable  # (observation, action, step) -> (next observation, reward, terminal bool)
    horizon: int


def _sign(key: Any) -> Any:
    import jax

    return jax.random.rademacher(key, (), 'float32')


def _zero(key: Any) -> Any:
    import jax.numpy as jnp

    del key
    return jnp.zeros(())


def _constant() -> Probe:
    return Probe(_zero, lambda observation, action, step: (observation, 1.0, True), 1)


def _observation() -> Probe:
    return Probe(_sign, lambda observation, action, step: (observation, observation, True), 1)


def _delay() -> Probe:
    return Probe(_zero, lambda observation, action, step: (1.0, step == 1, step == 1), 2)


def _action() -> Probe:
    return Probe(_zero, lambda observation, action, step: (observation, 1 - (action - 0.5) ** 2, True), 1)


def _policy() -> Probe:
    return Probe(_sign, lambda observation, action, step: (observation, 1 - (action - observation / 2) ** 2, True), 1)


def _infinite(reward: float = 1.0, horizon: int = 10) -> Probe:
    if isinstance(reward, bool | str):
        raise ValueError(f'reward of probe/infinite must be a number, not {reward!r}')
    return Probe(_zero, lambda observation, action, step: (observation, reward, False), _checked(horizon))


def _line(horizon: int = 20) -> Probe:
    import jax
    import jax.numpy as jnp

    def move(position, action, step):
        del step
        position = jnp.clip(position + _STEP_SIZE * action, -1, 1)
        return position, -jnp.abs(position - 1), position > _GOAL

    return Probe(lambda key: jax.random.uniform(key, (), minval=-1, maxval=0), move, _checked(horizon))


def _checked(horizon: Any) -> int:
    if isinstance(horizon, bool) or not isinstance(horizon, int) or horizon < 1:
        raise ValueError(f'horizon must be a whole number of at least 1, not {horizon!r}')
    return horizon


_PROBES = {
    'constant': _constant,
    'observation': _observation,
    'delay': _delay,
    'action': _action,
    'policy': _policy,
    'infinite': _infinite,
    'line': _line,
}
_OPTIONS = {'infinite': ('reward', 'horizon'), 'line': ('horizon',), 'host-line': ('horizon',)}


def names() -> tuple[str, ...]:
    return (*_PROBES, 'host-line')


def canonical(identifier: str) -> str:
    if identifier not in names():
        raise registry.unknown('environment', f'probe/{identifier}', [f'probe/{name}' for name in names()])
    return identifier


def is_on_device(identifier: str) -> bool:
    return identifier != 'host-line'


def make(identifier: str, num_envs: int, options: Mapping[str, Any]) -> DeviceEnv | SlotEnv:
    """See `envs.make`. `identifier` is canonical."""
    registry.check_no_options(f'probe/{identifier}', options, _OPTIONS.get(identifier, ()))
    return HostLine(num_envs, **options) if identifier == 'host-line' else _device(_PROBES[identifier](**options))


def _spec(horizon: int) -> Spec:
    return Spec(ArraySpec((1,)), ArraySpec((1,), -1.0, 1.0), horizon)


def _device(probe: Probe) -> DeviceEnv:
    """A DeviceEnv whose `physics` counts the steps of the episode (int32 [])."""
    import jax.numpy as jnp

    def state(step, observation, reward, terminal, truncation):
        reward, terminal, truncation = (jnp.asarray(value, jnp.float32) for value in (reward, terminal, truncation))
        observation = jnp.asarray(observation, jnp.float32).reshape(1)
        return EnvState(step, observation, reward, 1 - terminal, truncation, {'success': terminal})

    def reset(key):
        return state(jnp.zeros((), jnp.int32), probe.start(key), 0, False, False)

    def step(previous, action):
        observation, reward, terminal = probe.move(previous.observation[0], action[0], previous.physics)
        count = previous.physics + 1
        return state(count, observation, reward, terminal, (count >= probe.horizon) & jnp.logical_not(terminal))

    return DeviceEnv(_spec(probe.horizon), reset, step)


class HostLine(SlotEnv):
    """probe/line as a HostEnv."""

    def __init__(self, num_envs: int, horizon: int = 20):
        super().__init__(_spec(_checked(horizon)), num_envs)
        self._positions = np.zeros(num_envs, np.float32)

    def _reset(self, slot: int, seed: int) -> np.ndarray:
        self._positions[slot] = np.random.default_rng(seed).uniform(-1, 0)
        return self._positions[slot]

    def _step(self, slots: np.ndarray, actions: np.ndarray) -> tuple[Any, Any, Any, Mapping[str, Any]]:
        positions = np.clip(self._positions[slots] + np.float32(_STEP_SIZE) * actions[:, 0], -1, 1)
        self._positions[slots] = positions
        terminals = positions > np.float32(_GOAL)
        return positions[:, None], -np.abs(positions - 1), terminals, {'success': terminals}

    def _get_simulation(self) -> dict[str, np.ndarray]:
        return {'positions': self._positions.copy()}

    def _set_simulation(self, state: Mapping[str, np.ndarray]) -> None:
        self._positions[:] = state['positions']

    def render(self, slot: int) -> np.ndarray:
        """A white strip with the goal in green and the point in black, uint8 [8, 64, 3]."""
        image = np.full((8, 64, 3), 255, np.uint8)
        column = lambda position: int((position + 1) / 2 * 63)  # noqa: E731
        image[:, column(_GOAL) :] = (0, 160, 0)
        image[:, column(self._positions[slot])] = 0
        return image
