"""Acting inside the graph: the action queue, automatic resets and the record of what happened.

Environments replan in lockstep every `policy.horizon` control steps. Each executes the first `length` steps of its plan, then waits (rows
with `valid` 0) for the boundary; so does one whose episode ended, after a fresh reset: a plan never runs on into the next episode.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from agents.types import Policy
from envs.types import DeviceEnv, TimeStep
from training import streams


class RolloutState(NamedTuple):
    """Where E environments of one seed stand between two rollouts."""

    env: Any  # EnvState, leaves [E, ...]
    timestep: TimeStep
    memory: Any
    seen: Array  # bool [E], whether the policy has observed this time step
    episodes: Array  # int32 [E], episodes begun before the current one
    blocks: Array  # int32 [], plans made so far


def select(where: Array, new: Any, old: Any) -> Any:
    """Leaf by leaf `new` where `where` [E], else `old`."""
    return jax.tree.map(lambda a, b: jnp.where(where.reshape(where.shape + (1,) * (a.ndim - where.ndim)), a, b), new, old)


def first_timestep(observation: Any, action_shape: tuple[int, ...]) -> TimeStep:
    """The time step before anything has happened, for observations [E, ...]."""
    num_envs = jax.tree.leaves(observation)[0].shape[0]
    zeros = jnp.zeros(num_envs)
    return TimeStep(observation, zeros, zeros + 1, zeros, zeros == 0, jnp.zeros((num_envs, *action_shape)), observation)


def first_plan(policy: Policy, state: Any, observations: Any, action_shape: tuple[int, ...]) -> Any:
    """The plan of ONE member at the start of episodes, observations [E, ...], from a fixed key: for shapes and comparisons."""
    timestep = first_timestep(observations, action_shape)
    memory = policy.observe(state, policy.init(state, timestep.reward.shape[0]), timestep)
    return policy.plan(state, memory, timestep, jax.random.key(0), 'eval')[0]


def check_mode(policy: Policy, mode: str) -> None:
    """Raises ValueError for a mode that the policy does not have."""
    if mode not in policy.modes:
        raise ValueError(f'mode {mode!r} of the policy: choose {", ".join(policy.modes)}')


def start(env: DeviceEnv, policy: Policy, state: Any, seed_key: Array, source: str, num_envs: int) -> RolloutState:
    """Fresh episodes in `num_envs` copies of `env`."""
    episodes = jnp.zeros(num_envs, jnp.int32)
    env_state = _reset(env, seed_key, source, episodes)
    timestep = first_timestep(env_state.observation, env.spec.actions.shape)
    return RolloutState(env_state, timestep, policy.init(state, num_envs), episodes < 0, episodes, jnp.zeros((), jnp.int32))


def _reset(env: DeviceEnv, seed_key: Array, source: str, episodes: Array) -> Any:
    def one(slot, episode):
        return env.reset(streams.reset_key(seed_key, source, slot, episode))

    return jax.vmap(one)(jnp.arange(episodes.shape[0]), episodes)


def rollout(env: DeviceEnv, policy: Policy, source: str, length: int, mode: str) -> Callable[..., tuple[RolloutState, dict]]:
    """Builds `act(state, rollout_state, seed_key) -> (rollout_state, steps)`.

    `steps` has leaves [E, length, ...]: observations, actions, rewards, masks, truncations, next_observations (the true ones, before a
    reset), valid, first, and `extras` of the plan. Raises ValueError unless `length` is a multiple of `policy.horizon`.
    """
    if length % policy.horizon:
        raise ValueError(f'a rollout of {length} control steps is not a multiple of the policy horizon {policy.horizon}')

    def act(state: Any, rollout_state: RolloutState, seed_key: Array) -> tuple[RolloutState, dict]:
        def control_step(carry, inputs):
            env_state, timestep, memory, seen, episodes, waiting, planned = carry
            index, action, extras = inputs
            active = (index < planned) & ~waiting
            memory = select(active & ~seen, policy.observe(state, memory, timestep), memory)

            stepped = jax.vmap(env.step)(env_state, action)
            ended = (stepped.mask < 0.5) | (stepped.truncation > 0.5)
            fresh = _reset(env, seed_key, source, episodes + 1)
            new_timestep = TimeStep(
                observation=select(ended, fresh.observation, stepped.observation),
                reward=stepped.reward,
                mask=stepped.mask,
                truncation=stepped.truncation,
                first=ended,
                previous_action=action,
                final_observation=stepped.observation,
            )
            record = {
                'observations': timestep.observation,
                'actions': action,
                'rewards': jnp.where(active, stepped.reward, 0.0),
                'masks': jnp.where(active, stepped.mask, 1.0),
                'truncations': jnp.where(active, stepped.truncation, 0.0),
                'next_observations': select(active, stepped.observation, timestep.observation),
                'valid': active.astype(jnp.float32),
                'first': timestep.first.astype(jnp.float32),
                'extras': extras,
            }
            env_state = select(active, select(ended, fresh, stepped), env_state)
            timestep = select(active, new_timestep, timestep)
            episodes = jnp.where(active & ended, episodes + 1, episodes)
            return (env_state, timestep, memory, seen & ~active, episodes, waiting | (active & ended), planned), record

        def block(carry, _):
            env_state, timestep, memory, seen, episodes, blocks = carry
            memory = select(~seen, policy.observe(state, memory, timestep), memory)  # not again after an idle block
            key = jax.random.fold_in(streams.action_key(seed_key, source, blocks), 0)  # the first attempt, as on the host
            plan, memory = policy.plan(state, memory, timestep, key, mode)
            time_major = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), (plan.actions, dict(plan.extras)))
            waiting = jnp.zeros(plan.length.shape, bool)
            carry = (env_state, timestep, memory, jnp.ones_like(seen), episodes, waiting, plan.length)
            carry, steps = jax.lax.scan(control_step, carry, (jnp.arange(policy.horizon), *time_major))
            return (*carry[:5], blocks + 1), steps

        carry: Any = tuple(rollout_state)
        carry, steps = jax.lax.scan(block, carry, None, length // policy.horizon)
        steps = jax.tree.map(lambda leaf: jnp.moveaxis(leaf.reshape(length, *leaf.shape[2:]), 0, 1), steps)
        return RolloutState(*carry), steps

    return act
