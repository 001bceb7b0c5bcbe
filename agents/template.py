"""Behaviour cloning in forty lines: copy this file, then see docs/new_agent.md."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from agents.fields import hyper, static, sweepable, validate
from agents.types import Agent, Need, Phase, Plan, Policy
from networks import MLP, observation_encoder
from optimizers import adam_init, gradient_step


@dataclasses.dataclass(frozen=True)
class Config:
    learning_rate: float = sweepable(1e-3, 'Adam step size', low=0)
    max_grad_norm: float = sweepable(1.0, 'global L2 norm that gradients are clipped to', low=0)
    batch_size: int = static(64, 'transitions per update', low=1)
    hidden_sizes: tuple[int, ...] = static((32, 32), 'widths of the policy network', low=1)
    normalize_observations: bool = static(False, 'standardise with the statistics of the data')
    __post_init__ = validate


class State(NamedTuple):
    params: Any
    opt_state: Any
    hyper: dict
    aux: dict


def make(config: Config, spec) -> Agent:
    encode, size = observation_encoder(spec, config.normalize_observations, octaves=0)
    network = MLP(config.hidden_sizes, spec.actions.shape[0])

    def init(key, hyper):
        params = {'policy': network.init(key, jnp.zeros((1, size)))}
        return State(params, adam_init(params), hyper, {})

    def loss(params, state, batches, key):
        batch = batches['data']
        errors = network.apply(params['policy'], encode(batch['observations'])) - batch['actions']
        value = jnp.mean(jnp.square(errors))
        return value, {'policy/loss': value}

    def build(loss, transform=None):
        return lambda state, batches, step, key: gradient_step(loss, state, batches, key, transform=transform)

    def plan(state, memory, timestep, key, mode):
        raw: Any = network.apply(state.params['policy'], encode(timestep.observation))
        actions = jnp.clip(raw, -1, 1)
        return Plan(actions[:, None], jnp.ones(actions.shape[0], jnp.int32), {}), memory

    train = Phase({'data': Need('transitions', config.batch_size)}, build(loss), loss, build=build)
    policy = Policy(1, lambda state, num_envs: (), lambda state, memory, timestep: memory, plan)
    adopt = {'policy': lambda state, other: state._replace(params=other.params)}
    return Agent(init, {'train': train}, policy, adopt, hyper(config))
