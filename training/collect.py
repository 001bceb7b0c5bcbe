"""Acting in host environments for training: the same contract as training/rollout.py, outside the graph."""

from typing import Any

import jax
import numpy as np

from agents.types import Policy
from training import streams
from training.host import Actor


class Collector:
    """Steps R * E host environments for R members and remembers where each stands."""

    def __init__(self, policy: Policy, env: Any, source: str, num_members: int, num_envs: int):
        if env.num_envs != num_members * num_envs:
            raise ValueError(f'{source!r} has {env.num_envs} slots, but {num_members} members x {num_envs} environments are trained')
        self._policy, self._env, self._num_members, self._num_envs = policy, env, num_members, num_envs
        self._episodes = np.zeros(env.num_envs, np.int32)
        self._blocks = np.zeros((), np.int32)
        self._actors: dict[str, Actor] = {}
        self._timestep: Any = None
        self._memory: Any = None
        self._seen = np.zeros(env.num_envs, bool)
        self._action_keys = jax.jit(jax.vmap(lambda key, block: streams.action_key(key, source, block), in_axes=(0, None)))

        def reset_seed(key, slot, episode):
            return jax.random.bits(streams.reset_key(key, source, slot, episode), dtype='uint32')

        slots = np.arange(num_envs)
        self._reset_seeds = jax.jit(jax.vmap(lambda key, episodes: jax.vmap(reset_seed, in_axes=(None, 0, 0))(key, slots, episodes)))

    def _seeds(self, keys: Any) -> np.ndarray:
        seeds = self._reset_seeds(keys, self._episodes.reshape(self._num_members, self._num_envs))
        return np.asarray(seeds).reshape(-1).astype(np.int64) % 2**31

    def _actor(self, mode: str) -> Actor:
        """The actor of a mode; all modes go on from where the environments stand."""
        if mode not in self._actors:
            self._actors[mode] = Actor(self._policy, self._env, self._num_members, mode)
        actor = self._actors[mode]
        actor.timestep, actor.memory, actor.seen = self._timestep, self._memory, self._seen
        return actor

    def start(self, state: Any, keys: Any) -> None:
        """Begins the first episodes, once and before anything else. `keys` are the members' seed keys, not consumed."""
        actor = self._actor('explore')
        actor.start(state, self._seeds(keys))
        self._timestep, self._memory, self._seen = actor.timestep, actor.memory, actor.seen

    def collect(self, state: Any, keys: Any, length: int, mode: str) -> dict[str, Any]:
        """`length` control steps: leaves [R, E, length, ...] as from `rollout.rollout`. `keys` are the members' seed keys, not consumed."""
        actor = self._actor(mode)

        def reset_seeds(ended: np.ndarray) -> np.ndarray:
            self._episodes = self._episodes + ended.astype(np.int32)
            return self._seeds(keys)

        records = []
        for _ in range(length // self._policy.horizon):
            live = np.ones(self._env.num_envs, bool)
            for record in actor.block(state, self._action_keys(keys, self._blocks), live, reset_seeds):
                record.pop('metrics')
                records.append(record)
            self._blocks = self._blocks + np.int32(1)
        self._timestep, self._memory, self._seen = actor.timestep, actor.memory, actor.seen
        shape = (self._num_members, self._num_envs)
        return jax.tree.map(lambda *leaves: np.stack(leaves, axis=1).reshape(*shape, length, *leaves[0].shape[1:]), *records)

    def get_state(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as arrays."""
        return {
            'env': self._env.get_state(),
            'timestep': self._timestep,
            'memory': jax.tree.map(np.asarray, self._memory),
            'seen': self._seen,
            'episodes': self._episodes,
            'blocks': self._blocks,
        }

    def set_state(self, saved: dict[str, Any]) -> None:
        """Continues from `get_state`, bit for bit."""
        self._env.set_state(jax.tree.map(np.asarray, saved['env']))
        self._timestep, self._memory = jax.tree.map(np.asarray, saved['timestep']), saved['memory']
        self._seen = np.asarray(saved['seen'])
        self._episodes, self._blocks = np.asarray(saved['episodes']), np.asarray(saved['blocks'])
