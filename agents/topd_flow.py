"""On-policy distillation of a flow policy into a flow policy, with a budget on how far whole denoising paths may move in one update (ours).

A flow has no cheap density, but each step of its memoryless SDE is Gaussian, and student and teacher share its noise. With v_old the
student as it acted, v_T the frozen teacher and x_k a path drawn from v_old on a state that the student visited:

    K    = mean_b sum_k (2 h / g_k^2) |v_T - v_old|^2            path KL(old || teacher) by Girsanov, on the old paths
    beta = min(1, sqrt(kl_budget / K))                           then KL(old || target) = beta^2 K <= kl_budget, exactly
    v*   = v_old + beta (v_T - v_old)                            proximal teacher, with no gradient
    loss = mean_b sum_k (2 h / g_k^2) |v - v*|^2                 over num_epochs passes of num_minibatches

The idea is TOP-D's (2607.04751) proximal teacher in the metric of TRQAM's paths; neither paper has this form.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agents.bc_flow import chunk_policy, velocity_network
from agents.fields import hyper, static, sweepable, validate
from agents.types import Agent, Need, Phase
from losses.adjoint_matching import flow_times, path_kl, simulate_path
from losses.distillation import mean_of_valid
from losses.flow_matching import integrate_flow
from optimizers import adam_init, minibatch_steps, straight_fraction


@dataclasses.dataclass(frozen=True)
class Config:
    learning_rate: float = sweepable(1e-3, 'Adam step size', low=0)
    max_grad_norm: float = sweepable(1.0, 'global L2 norm that gradients are clipped to', low=0)
    kl_budget: float = sweepable(1.0, 'radius of the path KL of one update, nats per control step of the chunk', low=0)
    per_state: bool = static(False, 'a fraction beta for every state instead of one for the batch')
    horizon_length: int = static(1, 'control steps per action chunk, executed open loop', low=1)
    flow_steps: int = static(10, 'Euler steps T from noise to action', low=2)
    rollout_length: int = static(16, 'control steps per environment and update, a multiple of horizon_length', low=1)
    num_epochs: int = static(1, 'passes over a rollout', low=1)
    num_minibatches: int = static(16, 'gradient steps per pass', low=1)
    hidden_sizes: tuple[int, ...] = static((64, 64), 'widths of the student', low=1)
    teacher_hidden_sizes: tuple[int, ...] = static((64, 64), 'widths of the teacher', low=1)
    layer_norm: bool = static(False, 'LayerNorm in both')
    normalize_observations: bool = static(False, 'standardise observations with the statistics of the data')
    observation_octaves: int = static(0, 'octaves of sin and cos features of the observations', low=0, high=16)
    __post_init__ = validate


class State(NamedTuple):
    params: Any  # {'base'}
    teacher: Any  # parameters, never trained
    opt_state: Any
    hyper: dict
    aux: dict


def make(config: Config, spec) -> Agent:
    """Modes of the policy: 'eval' and 'explore' are the same draw from the flow. `init.teacher` takes another run's clone as the teacher,
    `init.bc` as the student."""
    student = velocity_network(config, spec)
    teacher = velocity_network(dataclasses.replace(config, hidden_sizes=config.teacher_hidden_sizes), spec)
    times = flow_times(config.flow_steps)

    def init(key, hyper):
        student_key, teacher_key = jax.random.split(key)
        params = {'base': student.init(student_key)}
        return State(params, teacher.init(teacher_key), adam_init(params), hyper, {})

    def along(velocity, states):
        """Velocities [B, T, A] at the states [B, T, A] of the paths."""
        return velocity(states, jnp.broadcast_to(times[None, :, None], (*states.shape[:2], 1)))

    def repeated(observations):
        features = student.encode(observations)
        return jnp.broadcast_to(features[:, None], (features.shape[0], config.flow_steps, features.shape[1]))

    def kl(velocities, others):
        """Path KL per state and control step, [B]."""
        first_time = [jnp.moveaxis(each, 1, 0) for each in (velocities, others)]
        return path_kl(*first_time) / config.horizon_length

    def prepare(state, batches, key):
        """Paths of the student on the states of a rollout [E, T], and targets there, as rows; the noise of the paths is drawn here."""
        fresh = batches['fresh']
        observations = fresh['observations'].reshape(-1, *fresh['observations'].shape[2:])
        first_key, step_key = jax.random.split(key)
        size = (observations.shape[0], student.action_size)
        noise = jax.random.normal(first_key, size)
        step_noises = jax.random.normal(step_key, (config.flow_steps - 1, *size))
        old_field = student.field(state.params['base'], student.encode(observations))
        states = jnp.moveaxis(simulate_path(old_field, old_field, noise, step_noises).states, 0, 1)
        old = along(student.field(state.params['base'], repeated(observations)), states)
        goal = along(teacher.field(state.teacher, repeated(observations)), states)
        valid = fresh['valid'].reshape(-1)
        distances = kl(goal, old)
        measured = distances if config.per_state else mean_of_valid(distances, valid)[None]
        fraction = straight_fraction(measured, state.hyper['kl_budget'])
        target = old + fraction[:, None, None] * (goal - old)
        rows = {'observations': observations, 'states': states, 'target': target, 'valid': valid}
        seen = {
            'distill/kl_to_teacher': mean_of_valid(distances, valid),
            'distill/kl_to_target': mean_of_valid(kl(target, old), valid),
            'distill/fraction': jnp.mean(fraction),
        }
        return {'rows': rows, 'seen': seen}

    def loss(params, state, batches, key):
        rows = batches['rows']
        velocities = along(student.field(params['base'], repeated(rows['observations'])), rows['states'])
        value = mean_of_valid(kl(velocities, rows['target']), rows['valid'])
        return value, {'distill/loss': value}

    def build(loss, transform=None):
        def update(state, batches, step, key):
            prepare_key, steps_key = jax.random.split(key)
            prepared = prepare(state, batches, prepare_key)
            state, steps = minibatch_steps(
                loss, state, prepared['rows'], steps_key, config.num_epochs, config.num_minibatches, transform=transform
            )
            return state, {**steps, **prepared['seen']}

        return update

    def sample(state, observations, key, mode):
        noises = jax.random.normal(key, (observations.shape[0], student.action_size))
        velocity = student.field(state.params['base'], student.encode(observations))
        return jnp.clip(integrate_flow(velocity, noises, config.flow_steps), -1, 1)

    needs = {'fresh': Need('rollout', length=config.rollout_length, source='env')}
    adopt = {
        'teacher': lambda state, other: state._replace(teacher=other.params['base']),
        'bc': lambda state, other: state._replace(params={'base': other.params['base']}),
    }
    return Agent(init, {'train': Phase(needs, build(loss), loss, prepare, build)}, chunk_policy(config, spec, sample), adopt, hyper(config))
