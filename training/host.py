"""Acting in host environments (and in device environments one control step at a time): the same action queue as training/rollout.py.

R members (seeds and settings) times E environments; slot = member * E + e. The policy is vmapped over members and called once per block.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agents.types import Policy
from envs.types import DeviceEnv, HostStep, TimeStep
from training.rollout import check_mode, first_timestep, select

MAX_REPLANS = 8  # times that a plan of length 0 is asked for again at once


class DeviceAsHost:
    """A DeviceEnv behind the interface of a HostEnv, for evaluation. Seeds become keys of the same integer."""

    on_device = False

    def __init__(self, env: DeviceEnv, num_envs: int):
        self.spec, self.num_envs = env.spec, num_envs
        self._reset = jax.jit(lambda seeds: jax.vmap(lambda seed: env.reset(jax.random.key(seed)))(seeds))
        self._step = jax.jit(lambda state, actions, active: select(active, jax.vmap(env.step)(state, actions), state))
        self._select = jax.jit(select)
        self._state: Any = None

    def reset(self, seeds: np.ndarray, where: np.ndarray) -> Any:
        fresh = self._reset(jnp.asarray(seeds))
        self._state = fresh if self._state is None else self._select(jnp.asarray(where), fresh, self._state)
        return jax.tree.map(np.asarray, self._state.observation)

    def step(self, actions: np.ndarray, active: np.ndarray) -> HostStep:
        self._state = self._step(self._state, jnp.asarray(actions), jnp.asarray(active))
        state = jax.tree.map(np.asarray, self._state)
        return HostStep(state.observation, state.reward, state.mask, state.truncation, dict(state.metrics))

    def close(self) -> None:
        self._state = None


def _choose(where: np.ndarray, new: Any, old: Any) -> Any:
    """Leaf by leaf, on the host: `new` where `where`, else `old`; `where` has the leading axes of every leaf."""
    return jax.tree.map(lambda a, b: np.where(where.reshape(where.shape + (1,) * (np.ndim(a) - where.ndim)), a, b), new, old)


class Actor:
    """Runs one policy for R members in a block of R * E host environments. Keeps time steps and memories between blocks."""

    def __init__(self, policy: Policy, env: Any, num_members: int, mode: str):
        check_mode(policy, mode)
        self.policy, self.env = policy, env
        self.shape = (num_members, env.num_envs // num_members)
        if env.num_envs != num_members * self.shape[1]:
            raise ValueError(f'{env.num_envs} environments cannot be shared by {num_members} members evenly')
        self._plan = jax.jit(jax.vmap(lambda state, memory, timestep, key: policy.plan(state, memory, timestep, key, mode)))
        self._observe = jax.jit(
            jax.vmap(lambda state, memory, timestep, where: select(where, policy.observe(state, memory, timestep), memory))
        )
        self._attempt_keys = jax.jit(jax.vmap(jax.random.fold_in, in_axes=(0, None)))
        self.timestep: Any = None
        self.memory: Any = None
        self.seen = np.zeros(env.num_envs, bool)  # slots whose time step the policy has observed

    def start(self, state: Any, seeds: np.ndarray) -> None:
        """Resets every slot; seeds int64 [R * E]."""
        observation = self.env.reset(seeds, np.ones(self.env.num_envs, bool))
        self.timestep = jax.tree.map(np.asarray, first_timestep(observation, self.env.spec.actions.shape))
        self.memory = jax.vmap(lambda state: self.policy.init(state, self.shape[1]))(state)
        self.seen = np.zeros(self.env.num_envs, bool)

    def _by_member(self, tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.reshape(*self.shape, *leaf.shape[1:]), tree)

    def _observed(self, state: Any, where: np.ndarray) -> None:
        where = where & ~self.seen
        if jax.tree.leaves(self.memory) and where.any():
            self.memory = self._observe(state, self.memory, self._by_member(self.timestep), where.reshape(self.shape))
        self.seen = self.seen | where

    def _planned(self, state: Any, keys: Any, live: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict]:
        """Plans for all slots as numpy; live slots that got length 0 are asked again, at most MAX_REPLANS times."""
        timestep = self._by_member(self.timestep)
        actions, lengths, extras, asking = None, None, None, live
        for attempt in range(MAX_REPLANS):
            plan, memory = self._plan(state, self.memory, timestep, self._attempt_keys(keys, attempt))
            mask = asking.reshape(self.shape)
            new = (np.asarray(plan.actions), np.asarray(plan.length), jax.tree.map(np.asarray, dict(plan.extras)))
            self.memory = memory if attempt == 0 and mask.all() else _choose(mask, memory, self.memory)
            if actions is None:
                actions, lengths, extras = new
            else:
                actions, lengths, extras = _choose(mask, new, (actions, lengths, extras))
            asking = live & (lengths.reshape(-1) == 0)
            if not asking.any():
                break
        flatten = lambda leaf: leaf.reshape(-1, *leaf.shape[2:])  # noqa: E731
        return flatten(actions), flatten(lengths), jax.tree.map(flatten, extras)

    def block(self, state: Any, keys: Any, live: np.ndarray, reset_seeds: Callable[[np.ndarray], np.ndarray] | None) -> Iterator[dict]:
        """One plan and its control steps; yields one record per control step, leaves [R * E, ...] as in training/rollout.py plus 'metrics'.

        Args:
          state: agent states, leaves [R, ...].
          keys: [R], consumed.
          live: bool [R * E], slots that may act.
          reset_seeds: gives the seeds [R * E] for the slots bool [R * E] that are to start a new episode; None: ended slots stay ended.
        """
        waiting = ~live
        self._observed(state, ~waiting)
        actions, lengths, extras = self._planned(state, keys, live)
        for index in range(self.policy.horizon):
            active = (index < lengths) & ~waiting
            if not active.any():
                if reset_seeds is None:
                    return
                yield self._record(actions[:, index], jax.tree.map(lambda leaf, i=index: leaf[:, i], extras), active, None)
                continue
            self._observed(state, active)
            step = self.env.step(actions[:, index], active)
            record = self._record(actions[:, index], jax.tree.map(lambda leaf, i=index: leaf[:, i], extras), active, step)
            ended = active & ((step.masks < 0.5) | (step.truncations > 0.5))
            observation = step.observations
            if reset_seeds is not None and ended.any():
                observation = self.env.reset(reset_seeds(ended), ended)
            stepped = TimeStep(observation, step.rewards, step.masks, step.truncations, ended, actions[:, index], step.observations)
            self.timestep = _choose(active, stepped, self.timestep)
            self.seen = self.seen & ~active
            waiting = waiting | ended
            yield record

    def _record(self, actions: np.ndarray, extras: dict, active: np.ndarray, step: HostStep | None) -> dict:
        timestep = self.timestep
        zeros = np.zeros(active.shape, np.float32)
        rewards, masks, truncations = (zeros, zeros + 1, zeros) if step is None else (step.rewards, step.masks, step.truncations)
        arrived = timestep.observation if step is None else step.observations
        return {
            'observations': timestep.observation,
            'actions': actions,
            'rewards': _choose(active, rewards, zeros).astype(np.float32),
            'masks': _choose(active, masks, zeros + 1).astype(np.float32),
            'truncations': _choose(active, truncations, zeros).astype(np.float32),
            'next_observations': _choose(active, arrived, timestep.observation),
            'valid': active.astype(np.float32),
            'first': np.asarray(timestep.first, np.float32),
            'extras': extras,
            'metrics': {} if step is None else step.metrics,
        }
