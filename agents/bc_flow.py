"""Behaviour cloning with a flow policy over action chunks: the clone that QAM and TRQAM start from and stay near.

Source: flow matching as in FQL (2502.02538) and QAM (2601.14234); chunks executed open loop (Q-chunking, 2507.07969).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agents.fields import hyper, static, sweepable, validate
from agents.types import Agent, Need, Phase, Plan, Policy
from losses.flow_matching import flow_matching_loss, integrate_flow
from networks import VelocityField, observation_encoder
from optimizers import adam_init, gradient_step


@dataclasses.dataclass(frozen=True)
class Config:
    """Defaults are those of QAM's public code."""

    learning_rate: float = sweepable(3e-4, 'Adam step size', low=0)
    max_grad_norm: float = sweepable(1.0, 'L2 norm that gradients are clipped to', low=0)
    batch_size: int = static(256, 'chunks per update', low=1)
    horizon_length: int = static(5, 'control steps per action chunk, executed open loop', low=1)
    flow_steps: int = static(10, 'Euler steps T from noise to action', low=1)
    hidden_sizes: tuple[int, ...] = static((512, 512, 512, 512), 'widths of the velocity fields', low=1)
    layer_norm: bool = static(False, 'LayerNorm in the velocity fields')
    normalize_observations: bool = static(False, 'standardise observations with the statistics of the data')
    observation_octaves: int = static(0, 'octaves of sin and cos features of the observations', low=0, high=16)
    __post_init__ = validate


class State(NamedTuple):
    params: Any  # {'base'}
    opt_state: Any
    hyper: dict
    aux: dict


class VelocityNetwork(NamedTuple):
    """A velocity field over flat chunks, on encoded observations."""

    encode: Callable  # observations [..., O] -> features [..., F]
    init: Callable  # (key) -> params
    field: Callable[..., Any]  # (params, features [..., F]) -> velocity: (actions [..., H * A], times [..., 1]) -> [..., H * A]
    action_size: int  # H * A


def velocity_network(config: Any, spec: Any) -> VelocityNetwork:
    """The field that a flow agent's `config` describes."""
    encode, feature_size = observation_encoder(spec, config.normalize_observations, config.observation_octaves)
    action_size = config.horizon_length * spec.actions.shape[0]
    module = VelocityField(action_size, config.hidden_sizes, config.layer_norm)

    def init(key):
        return module.init(key, jnp.zeros((1, feature_size)), jnp.zeros((1, action_size)), jnp.zeros((1, 1)))

    def field(params, features):
        return lambda actions, times: module.apply(params, features, actions, times)

    return VelocityNetwork(encode, init, field, action_size)


def chunk_policy(config: Any, spec: Any, sample: Callable, modes: tuple[str, ...] = ('eval', 'explore')) -> Policy:
    """A policy without memory that executes whole chunks. sample: (state, observations [E, O], key, mode) -> [E, H * A].

    Raises ValueError for a mode that is not in `modes`.
    """

    def plan(state, memory, timestep, key, mode):
        if mode not in modes:
            raise ValueError(f'mode {mode!r} of the policy: choose {", ".join(modes)}')
        actions = sample(state, timestep.observation, key, mode)
        num_envs = actions.shape[0]
        chunks = actions.reshape(num_envs, config.horizon_length, *spec.actions.shape)
        return Plan(chunks, jnp.full(num_envs, config.horizon_length, jnp.int32), {}), memory

    return Policy(config.horizon_length, lambda state, num_envs: (), lambda state, memory, timestep: memory, plan, modes=modes)


def flat_chunks(batch: dict) -> jax.Array:
    """Actions [B, H, A] -> [B, H * A]."""
    return batch['actions'].reshape(batch['actions'].shape[0], -1)


def make(config: Config, spec) -> Agent:
    """Modes of the policy: 'eval' and 'explore' are the same draw from the flow. `init.bc` continues from another run's clone."""
    network = velocity_network(config, spec)

    def init(key, hyper):
        params = {'base': network.init(key)}
        return State(params, adam_init(params), hyper, {})

    def prepare(state, batches, key):
        noise_key, time_key = jax.random.split(key)
        actions = flat_chunks(batches['data'])
        noises = jax.random.normal(noise_key, actions.shape)
        return {**batches, 'noises': {'clone': noises, 'times': jax.random.uniform(time_key, (actions.shape[0], 1))}}

    def loss(params, state, batches, key):
        batch, noises = batches['data'], batches['noises']
        velocity = network.field(params['base'], network.encode(batch['observations'][:, 0]))
        value = flow_matching_loss(velocity, flat_chunks(batch), noises['clone'], noises['times'], batch['valid'][:, -1])
        return value, {'actor/clone_loss': value}

    def build(loss, transform=None):
        def update(state, batches, step, key):
            prepare_key, loss_key = jax.random.split(key)
            batches = prepare(state, batches, prepare_key)
            return gradient_step(loss, state, batches, loss_key, transform=transform)

        return update

    def sample(state, observations, key, mode):
        noises = jax.random.normal(key, (observations.shape[0], network.action_size))
        velocity = network.field(state.params['base'], network.encode(observations))
        return jnp.clip(integrate_flow(velocity, noises, config.flow_steps), -1, 1)

    train = Phase({'data': Need('chunks', config.batch_size, config.horizon_length)}, build(loss), loss, prepare, build)
    adopt = {'bc': lambda state, other: state._replace(params={'base': other.params['base']})}
    return Agent(init, {'train': train}, chunk_policy(config, spec, sample), adopt, hyper(config))
