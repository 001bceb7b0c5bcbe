"""Q-learning with adjoint matching: a flow policy follows the action gradient of a critic ensemble, tilted by exp(inverse_temperature * Q).

Source: QAM (Li and Levine 2601.14234) and its public code. One update of the algorithm:

    a'    = flow of tuned at s', clipped;  y = R + discount^H m (mean_j - pessimism std_j) target Q_j(s', a')
    L_Q   = ensemble regression of Q on y
    L_BC  = flow matching of base on the data
    x     = memoryless SDE of tuned (T - 1 noisy steps), last step noiseless with target base
    a_T   = -inverse_temperature * grad_a mean_j target Q_j(s, clip(x_T));  a_k = lean adjoint of target base
    L_AM  = sum_k |2 (tuned - target base)(x_k) / sigma_k + sigma_k a_k|^2
    Adam on L_Q + L_BC + L_AM after one global-norm clip; EMA of critic and base

TRQAM is this file with another `Temperature`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agents.bc_flow import chunk_policy, flat_chunks, velocity_network
from agents.fields import hyper, static, sweepable, validate
from agents.types import Agent, Need, Phase
from losses import adjoint_matching as am
from losses.flow_matching import flow_matching_loss, integrate_flow
from losses.temporal_difference import chunk_return, ensemble_loss, pessimistic_value
from networks import EnsembleCritic
from optimizers import adam_init, gradient_step, move_towards

MODES = ('eval', 'explore', 'base', 'base_best')  # of the policy, see make_with_temperature


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """Fields that QAM and TRQAM share; defaults are those of QAM's public code."""

    learning_rate: float = sweepable(3e-4, 'Adam step size', low=0)
    max_grad_norm: float = sweepable(1.0, 'L2 norm that gradients are clipped to', low=0)
    discount: float = sweepable(0.99, 'discount per control step', low=0, high=1)
    tau: float = sweepable(0.005, 'rate at which target networks follow', low=0, high=1)
    pessimism: float = sweepable(0.5, "weight of the ensemble's standard deviation in the target (rho)", low=0)
    batch_size: int = static(256, 'chunks per update', low=1)
    horizon_length: int = static(5, 'control steps per action chunk, executed open loop', low=1)
    flow_steps: int = static(10, 'Euler steps T from noise to action', low=2)
    hidden_sizes: tuple[int, ...] = static((512, 512, 512, 512), 'widths of the velocity fields', low=1)
    critic_hidden_sizes: tuple[int, ...] = static((512, 512, 512, 512), 'widths of the critics', low=1)
    layer_norm: bool = static(False, 'LayerNorm in the velocity fields (the critics always have it)')
    num_critics: int = static(10, 'size of the critic ensemble K', low=1)
    best_of_n: int = static(1, 'candidates among which the critic picks, in targets and in acting', low=1)
    base_candidates: int = static(16, "candidates of policy mode 'base_best'", low=1)
    normalize_observations: bool = static(False, 'standardise observations with the statistics of the data')
    observation_octaves: int = static(0, 'octaves of sin and cos features of the observations', low=0, high=16)
    freeze_base: bool = static(False, 'hold the base velocity at the clone instead of training it on')
    adjoint_time: str = static('published', 'flow time of the adjoint Jacobian', choices=('published', 'transpose'))
    clip: str = static('joint', 'one gradient norm for all networks, or one for each', choices=('joint', 'per_net'))
    stale_targets: bool = static(False, 'let targets follow the OLD parameters, as the public code does')
    count_after_terminal: bool = static(False, 'count rewards behind a true terminal inside a chunk, as the public code does')
    __post_init__ = validate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(BaseConfig):
    inverse_temperature: float = sweepable(3.0, 'weight of the critic against the clone (tau)', low=0)


class State(NamedTuple):
    params: Any  # {'critic', 'base', 'tuned'}; no 'base' when it is frozen
    target_params: Any  # {'critic', 'base'}
    opt_state: Any
    temperature: Any  # what Temperature.init gave
    hyper: dict
    aux: dict


class Temperature(NamedTuple):
    """How strongly the policy leaves the clone."""

    init: Callable  # (hyper) -> temperature
    scales: Callable  # (temperature, hyper) -> (factor of the adjoint, regularisation lambda in sigma = g / sqrt(lambda))
    update: Callable  # (temperature, hyper, path_kl [], adjoint_energy []) -> (temperature, metrics)


def make(config: Config, spec) -> Agent:
    """Modes of the policy: as for `make_with_temperature`."""
    constant = Temperature(
        init=lambda hyper: (),
        scales=lambda temperature, hyper: (hyper['inverse_temperature'], jnp.float32(1)),
        update=lambda temperature, hyper, path_kl, adjoint_energy: (temperature, {}),
    )
    return make_with_temperature(config, spec, constant)


def make_with_temperature(config: BaseConfig, spec, temperature: Temperature) -> Agent:
    """The algorithm for any rule of the temperature.

    Modes of the policy: 'eval' and 'explore' draw from the tuned flow, 'base' from the clone that the trust region is centred on (target
    base), 'base_best' picks the best of `base_candidates` draws of that clone under the critic's mean.
    `init.bc` starts base, target base and tuned from the clone of a bc_flow run; the path KL is 0 there.
    """
    network = velocity_network(config, spec)
    critic_module = EnsembleCritic(config.num_critics, config.critic_hidden_sizes)
    trained_base = not config.freeze_base

    def critic(params, features, actions) -> Any:
        return critic_module.apply(params, features, actions)

    def init(key, hyper):
        critic_key, base_key, tuned_key = jax.random.split(key, 3)
        features = network.encode(jnp.zeros((1, *spec.observations.shape)))
        params = {'critic': critic_module.init(critic_key, features, jnp.zeros((1, network.action_size))), 'tuned': network.init(tuned_key)}
        base = network.init(base_key)
        targets = {'critic': params['critic'], 'base': base}
        if trained_base:
            params['base'] = base
        return State(params, targets, adam_init(params), temperature.init(hyper), hyper, {})

    def draw(velocity_params, critic_params, features, noises):
        """Actions [B, H * A] from noises [N, B, H * A]: the critic's favourite among the N flows, clipped to the box."""
        repeated = jnp.broadcast_to(features[None], (noises.shape[0], *features.shape))
        actions = jnp.clip(integrate_flow(network.field(velocity_params, repeated), noises, config.flow_steps), -1, 1)
        if noises.shape[0] == 1:
            return actions[0]
        best = jnp.argmax(jnp.mean(critic(critic_params, repeated, actions), axis=0), axis=0)
        return jnp.take_along_axis(actions, best[None, :, None], axis=0)[0]

    def draw_noises(key, actions):
        """Every random number of one update; x_0 and the step noises of the path come from different keys."""
        keys = jax.random.split(key, 5)
        return {
            'next_actions': jax.random.normal(keys[0], (config.best_of_n, *actions.shape)),
            'clone': jax.random.normal(keys[1], actions.shape),
            'times': jax.random.uniform(keys[2], (actions.shape[0], 1)),
            'path': jax.random.normal(keys[3], actions.shape),
            'path_steps': jax.random.normal(keys[4], (config.flow_steps - 1, *actions.shape)),
        }

    def prepare(state, batches, key):
        """What carries no gradient: TD targets, simulated paths, adjoints. Takes the noises from `batches` if it finds them there."""
        batch, hyper, params, targets = batches['data'], state.hyper, state.params, state.target_params
        features, next_features = network.encode(batch['observations'][:, 0]), network.encode(batch['next_observations'][:, -1])
        noises = batches['noises'] if 'noises' in batches else draw_noises(key, flat_chunks(batch))

        next_actions = draw(params['tuned'], params['critic'], next_features, noises['next_actions'])
        next_values = pessimistic_value(critic(targets['critic'], next_features, next_actions), hyper['pessimism'])
        returns, alive = chunk_return(
            batch['rewards'], batch['masks'], batch['valid'], hyper['discount'], count_after_terminal=config.count_after_terminal
        )
        td_targets = returns + hyper['discount'] ** config.horizon_length * alive * next_values

        tuned, base = network.field(params['tuned'], features), network.field(targets['base'], features)
        path = am.simulate_path(tuned, base, noises['path'], noises['path_steps'])
        gradient = am.action_gradient(lambda actions: jnp.mean(critic(targets['critic'], features, actions), axis=0), path.final)
        adjoint_scale, _ = temperature.scales(state.temperature, hyper)
        adjoints = am.lean_adjoint(base, path.states, -adjoint_scale * gradient, config.adjoint_time)
        base_velocities = _along(network, targets['base'], features, path.states)
        prepared = {'td': td_targets, 'path': path, 'adjoints': adjoints, 'base_velocities': base_velocities, 'gradient': gradient}
        return {**batches, 'noises': noises, 'targets': jax.lax.stop_gradient(prepared)}

    def loss(params, state, batches, key):
        batch, noises, targets = batches['data'], batches['noises'], batches['targets']
        features, actions, valid = network.encode(batch['observations'][:, 0]), flat_chunks(batch), batch['valid'][:, -1]

        values = critic(params['critic'], features, actions)
        critic_loss = ensemble_loss(values, targets['td'], valid)

        clone_loss = jnp.float32(0)
        if trained_base:
            clone_loss = flow_matching_loss(network.field(params['base'], features), actions, noises['clone'], noises['times'], valid)

        velocities = _along(network, params['tuned'], features, targets['path'].states)
        _, regularisation = temperature.scales(state.temperature, state.hyper)
        matching_loss = am.matching_loss(velocities, targets['base_velocities'], targets['adjoints'], regularisation)

        metrics = {
            'critic/loss': critic_loss,
            'critic/value_mean': jnp.mean(values),
            'critic/value_min': jnp.min(values),
            'critic/value_max': jnp.max(values),
            'actor/clone_loss': clone_loss,
            'actor/matching_loss': matching_loss,
            'actor/path_kl': jnp.mean(am.path_kl(velocities, targets['base_velocities'])) / config.horizon_length,
            'actor/adjoint_energy': am.adjoint_energy(targets['adjoints']) / config.horizon_length,
            'actor/gradient_max': jnp.max(jnp.abs(targets['gradient'])),
            'actor/gradient_mean': jnp.mean(jnp.abs(targets['gradient'])),
            'actor/outside_box': jnp.mean(jnp.abs(targets['path'].final) > 1),
        }
        return critic_loss + clone_loss + matching_loss, metrics

    def build(loss, transform=None):
        def update(state, batches, step, key):
            prepare_key, loss_key = jax.random.split(key)
            batches = prepare(state, batches, prepare_key)
            old_params = state.params
            state, metrics = gradient_step(loss, state, batches, loss_key, config.clip, transform)

            followed = old_params if config.stale_targets else state.params
            targets = {  # a frozen base is no parameter: its target stays
                name: move_towards(target, followed[name], state.hyper['tau']) if name in followed else target
                for name, target in state.target_params.items()
            }

            new_temperature, temperature_metrics = temperature.update(
                state.temperature, state.hyper, metrics['actor/path_kl'], metrics['actor/adjoint_energy']
            )
            state = state._replace(target_params=targets, temperature=new_temperature)
            return state, {**metrics, **temperature_metrics}

        return update

    def sample(state, observations, key, mode):
        features = network.encode(observations)
        candidates = {'base': 1, 'base_best': config.base_candidates}.get(mode, config.best_of_n)
        velocity_params = state.target_params['base'] if mode in ('base', 'base_best') else state.params['tuned']
        noises = jax.random.normal(key, (candidates, observations.shape[0], network.action_size))
        return draw(velocity_params, state.params['critic'], features, noises)

    def adopt_clone(state, other):
        clone = other.params['base']
        params = {name: entry if name == 'critic' else clone for name, entry in state.params.items()}
        return state._replace(params=params, target_params={**state.target_params, 'base': clone}, opt_state=adam_init(params))

    train = Phase({'data': Need('chunks', config.batch_size, config.horizon_length)}, build(loss), loss, prepare, build)
    return Agent(init, {'train': train}, chunk_policy(config, spec, sample, MODES), {'bc': adopt_clone}, hyper(config))


def _along(network, params, features, states):
    """Velocities [T, B, H * A] at every state of the paths, in one call of T * B rows."""
    num_steps, batch_size = states.shape[:2]
    repeated = jnp.broadcast_to(features[None], (num_steps, *features.shape))
    times = jnp.broadcast_to(am.flow_times(num_steps, states.dtype)[:, None, None], (num_steps, batch_size, 1))
    return network.field(params, repeated)(states, times)
