"""Complete evaluation episodes, for all members at once. Touches no training key and no training state."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import envs
from agents.types import Policy
from training import streams
from training.host import MAX_REPLANS, Actor, DeviceAsHost


class Evaluator:
    """Runs `num_episodes` episodes per member, always from the same start states: those of `streams.start_seed(0), (1), ...`.

    Args:
      policy: how states act.
      env_name: environment, see `envs.make`.
      num_members: R.
      num_episodes: episodes per member, >= 1.
      num_workers: processes that step a host environment, 0 for none. Results do not depend on it.
      env: an environment made by the caller, used instead of `env_name`; a DeviceEnv, or a HostEnv of R * num_episodes slots.
    """

    def __init__(self, policy: Policy, env_name: str, num_members: int, num_episodes: int, num_workers: int = 0, env: Any = None):
        self.num_members, self.num_episodes = num_members, num_episodes
        slots = num_members * num_episodes
        made = env if env is not None else envs.make(env_name, num_envs=slots, num_workers=num_workers)
        self.env = DeviceAsHost(made, slots) if made.on_device else made
        self._policy = policy
        self._actors: dict[str, Actor] = {}
        self._keys: dict[str, Callable] = {}
        self.network_calls = 0  # of the last evaluation, for the speed rules' tests

    def __call__(
        self, state: Any, seed_keys: Any, counter: int, mode: str = 'eval', stop: Callable[[], bool] = lambda: False
    ) -> dict[str, np.ndarray] | None:
        """Scores of every episode: {'return', 'length', and each metric of the environment at its maximum: [R, num_episodes]}.

        Args:
          state: agent states, leaves [R, ...].
          seed_keys: keys of the members' seeds, [R], not consumed.
          counter: number of updates done; it selects the keys of the actions.
          mode: mode of the policy.
          stop: polled once per block; when it says so the evaluation is abandoned and the result is None.

        Raises:
          ValueError: the policy plans no action at all.
        """
        if mode not in self._actors:
            self._actors[mode] = Actor(self._policy, self.env, self.num_members, mode)
            self._keys[mode] = jax.jit(
                jax.vmap(lambda key, counter, block: streams.eval_key(key, counter, mode, block), in_axes=(0, None, None))
            )
        actor = self._actors[mode]
        slots = self.num_members * self.num_episodes
        actor.start(state, np.tile([streams.start_seed(episode) for episode in range(self.num_episodes)], self.num_members))
        live = np.ones(slots, bool)
        scores = {'return': np.zeros(slots), 'length': np.zeros(slots)}
        block = 0
        while live.any():
            if stop():
                return None
            idle = True
            for record in actor.block(state, self._keys[mode](seed_keys, counter, block), live, reset_seeds=None):
                idle = False
                acted = record['valid'] > 0
                scores['return'] += np.where(acted, record['rewards'], 0.0)
                scores['length'] += acted
                for name, values in record['metrics'].items():
                    best = scores.setdefault(name, np.full(slots, -np.inf))
                    np.maximum(best, values, out=best, where=acted)
                live = live & ~(acted & ((record['masks'] < 0.5) | (record['truncations'] > 0.5)))
            if idle:  # or a policy that never acts would keep us here for ever
                raise ValueError(f'the policy planned no action {MAX_REPLANS} times in a row: let it plan at least one')
            block += 1
        self.network_calls = block
        return {name: values.reshape(self.num_members, self.num_episodes) for name, values in scores.items()}

    def close(self) -> None:
        """Ends the worker processes."""
        self.env.close()


def member_scores(scores: dict[str, np.ndarray], diverged: np.ndarray, horizon: int) -> dict[str, np.ndarray]:
    """Mean per member [R] of each score; a diverged member gets the worst possible one.

    That is success 0, the whole horizon as length, and for anything else the lowest value that any member's episode had.
    """
    means = {}
    for name, values in scores.items():
        worst = {'success': 0.0, 'length': float(horizon) if horizon else float(values.max())}.get(name, float(values.min()))
        means[name] = np.where(diverged, worst, values.mean(axis=1))
    return means
