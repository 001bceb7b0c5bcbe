"""An agent that exercises what offline learning does not: on-policy, two phases, two environments with replay, plans of varying length.

Its numbers can be checked by hand: parameters count updates, metrics count valid rows, memory counts calls of observe and plan.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agents.types import Agent, Need, Phase, Plan, Policy

HORIZON, LENGTH = 4, 8
HYPER = {'rate': np.float32(0.1), 'nan_at': np.float32(-1)}


class State(NamedTuple):
    params: Any
    hyper: dict
    aux: dict


def make(spec: Any, fixed_length: int | None = None, nan_at: int = -1, least_length: int = 0) -> Agent:
    """Acts with random actions; plan lengths are drawn from `least_length`..4, or fixed. Update number `nan_at` gives NaN, for ever."""

    def init(key, hyper):
        return State({'weight': jax.random.normal(key, (3,)), 'updates': jnp.float32(0), 'refits': jnp.float32(0)}, hyper, {})

    def update(state, batches, step, key):
        fresh, target = batches['fresh'], batches['target']
        noise = jax.random.normal(key, (3,))
        weight = state.params['weight'] + state.hyper['rate'] * (noise + jnp.mean(target['rewards']) + jnp.mean(fresh['rewards']))
        weight = jnp.where(state.params['updates'] == state.hyper['nan_at'], jnp.nan, weight)
        params = {**state.params, 'weight': weight, 'updates': state.params['updates'] + 1}
        metrics = {
            'fresh/valid': jnp.sum(fresh['valid']),
            'fresh/log_prob': jnp.sum(fresh['extras']['log_prob'] * fresh['valid']),
            'target/valid': jnp.sum(target['valid']),
            'step': jnp.float32(step),
        }
        return state._replace(params=params), metrics

    def refit(state, batches, step, key):
        params = {**state.params, 'refits': state.params['refits'] + 1}
        return state._replace(params=params), {'refit/valid': jnp.sum(batches['chunks']['valid'])}

    def collect(state, batches, step, key):
        return state, {'collect/valid': jnp.sum(batches['other']['valid'])}

    def count(state, batches, step, key):
        return state, {'count/valid': jnp.sum(batches['all']['valid'])}

    def observe(state, memory, timestep):
        observed = jnp.where(timestep.first, 0, memory['observed']) + 1
        return {'observed': observed, 'planned': jnp.where(timestep.first, 0, memory['planned'])}

    def plan(state, memory, timestep, key, mode):
        num_envs = timestep.reward.shape[0]
        action_key, length_key = jax.random.split(key)
        actions = jax.random.uniform(action_key, (num_envs, HORIZON, *spec.actions.shape), minval=-1)
        lengths = jax.random.randint(length_key, (num_envs,), least_length, HORIZON + 1, jnp.int32)
        if fixed_length is not None:
            lengths = jnp.full((num_envs,), fixed_length, jnp.int32)
        observed = jnp.broadcast_to(memory['observed'].astype(jnp.float32)[:, None], (num_envs, HORIZON))
        memory = {**memory, 'planned': memory['planned'] + 1}
        return Plan(actions, lengths, {'log_prob': jnp.ones((num_envs, HORIZON)), 'observed': observed}), memory

    def memory(state, num_envs):
        return {'observed': jnp.zeros(num_envs, jnp.int32), 'planned': jnp.zeros(num_envs, jnp.int32)}

    phases = {
        'train': Phase({'fresh': Need('rollout', length=LENGTH, source='env'), 'target': Need('transitions', 16, source='other')}, update),
        'collect': Phase({'other': Need('rollout', length=LENGTH, source='other')}, collect),
        'refit': Phase({'chunks': Need('chunks', 4, 3, source='env')}, refit),
        'count': Phase({'all': Need('transitions', 0, source='other')}, count),
    }
    return Agent(init, phases, Policy(HORIZON, memory, observe, plan), {}, {'rate': 0.1, 'nan_at': float(nan_at)})
