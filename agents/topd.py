"""TOP-D: on-policy distillation of a Gaussian teacher into a Gaussian student, by way of a proximal teacher near the student.

Source: TOP-D (2607.04751), re-implemented from public descriptions; it was published for language models. Per update, with pi_old the
student as it acted, u an action before squashing and pi_T the frozen teacher:

    l = log pi_T(u|s) - log pi_old(u|s)                        proximal = none: plain on-policy distillation (OPD)
    r = log(w exp(l) + 1 - w),   w = teacher_weight            proximal = mixture: as published
    pi_T <- argmin KL(q || pi_T), KL(q || pi_old) <= kl_budget proximal = kl_radius: ours, per state
    pi_T <- mean and std projected apart                       proximal = decoupled: after Otto et al. 2021
    A = (credit of r - mean) / std over the batch
    J = mean min(p A, clip(p, 1 - c, 1 + c) A),   p = pi / pi_old, c = ratio_clip, over num_epochs passes of num_minibatches

estimator = sampled: p, l and r of the whole action, as for a token. per_dimension (ours): of each action entry by itself. analytic: no
samples of actions; the loss is KL(student || target) or its reverse, exact in every state. 'analytic' with aggregate=True and
direction='forward' is DAgger with a likelihood loss. Teacher and student see the same bijection, so its Jacobian cancels everywhere.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agents.fields import hyper, static, sweepable, validate
from agents.types import Agent, Need, Phase, Plan, Policy
from losses.distances import gaussian_kl
from losses.distillation import CREDITS, distillation_kl, distillation_returns, mean_of_valid, mixture_reward
from losses.policy_gradient import clipped_surrogate, gaussian_log_prob
from networks import GaussianPolicy, observation_encoder
from optimizers import adam_init, curves, metrics, minibatch_steps, project, project_decoupled

ESTIMATORS = ('sampled', 'per_dimension', 'analytic')
PROXIMAL = ('none', 'mixture', 'kl_radius', 'decoupled')


@dataclasses.dataclass(frozen=True)
class Config:
    learning_rate: float = sweepable(1e-3, 'Adam step size', low=0)
    max_grad_norm: float = sweepable(1.0, 'global L2 norm that gradients are clipped to', low=0)
    teacher_weight: float = sweepable(0.2, 'w, weight of the teacher in the mixture', low=1e-6, high=1)
    kl_budget: float = sweepable(0.3, 'radius in nats per state of kl_radius, and of the mean for decoupled', low=0)
    covariance_budget: float = sweepable(0.01, 'radius of the standard deviations for decoupled', low=0)
    ratio_clip: float = sweepable(0.2, 'half width of the interval of ratios p', low=0)
    discount: float = sweepable(0.99, 'of credit = discounted', low=0, high=1)
    estimator: str = static('sampled', 'how the gradient is estimated', choices=ESTIMATORS)
    proximal: str = static('mixture', 'which proximal teacher', choices=PROXIMAL)
    credit: str = static('immediate', 'which future rewards count', choices=CREDITS)
    direction: str = static('reverse', 'of the analytic KL: reverse is KL(student, teacher)', choices=('reverse', 'forward'))
    aggregate: bool = static(False, 'analytic: learn from all states visited so far (needs a replay), not from the last rollout')
    normalize_advantages: bool = static(True, 'subtract the mean and divide by the standard deviation over the batch')
    rollout_length: int = static(16, 'control steps per environment and update', low=1)
    num_epochs: int = static(1, 'passes over a rollout', low=1)
    num_minibatches: int = static(16, 'gradient steps per pass; 1 is one step on the whole rollout', low=1)
    batch_size: int = static(256, 'states per update of aggregate', low=1)
    hidden_sizes: tuple[int, ...] = static((32, 32), 'widths of the student', low=1)
    teacher_hidden_sizes: tuple[int, ...] = static((64, 64), 'widths of the teacher', low=1)
    state_dependent_std: bool = static(False, "the student's standard deviation is an output of its network")
    normalize_observations: bool = static(False, 'standardise the observations of the student with the statistics of the data')

    def __post_init__(self):
        validate(self)
        if self.estimator == 'analytic' and self.proximal == 'mixture':
            raise ValueError('proximal=mixture is no Gaussian, so estimator=analytic has no closed form for it: choose another')
        if self.aggregate and self.estimator != 'analytic':
            raise ValueError('aggregate=True needs estimator=analytic: old actions are not drawn from the present student')


class State(NamedTuple):
    params: Any  # {'policy'}
    teacher: Any  # parameters, never trained
    opt_state: Any
    hyper: dict
    aux: dict


def make(config: Config, spec) -> Agent:
    """Modes of the policy: 'eval' acts with the mean, 'explore' samples. `init.teacher` takes the policy of another run as the teacher."""
    encode, size = observation_encoder(spec, config.normalize_observations, octaves=0)
    action_size = spec.actions.shape[0]
    student = GaussianPolicy(action_size, config.hidden_sizes, config.state_dependent_std)
    teacher = GaussianPolicy(action_size, config.teacher_hidden_sizes)
    squash = jnp.tanh if np.isfinite(spec.actions.maximum - spec.actions.minimum) else lambda actions: actions

    def distribution(params, observations) -> tuple[jax.Array, jax.Array]:
        result: Any = student.apply(params['policy'], encode(observations))
        return result

    def init(key, hyper):
        student_key, teacher_key = jax.random.split(key)
        params = {'policy': student.init(student_key, jnp.zeros((1, size)))}
        return State(params, teacher.init(teacher_key, jnp.zeros((1, *spec.observations.shape))), adam_init(params), hyper, {})

    def proximal_teacher(old, target, hyper) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """(target as a Gaussian, fraction of states where it was projected)."""
        if config.proximal == 'kl_radius':
            target, info = project(metrics.gaussian_kl, curves.gaussian_geodesic, target, old, hyper['kl_budget'])
        elif config.proximal == 'decoupled':
            target, info = project_decoupled(target, old, hyper['kl_budget'], hyper['covariance_budget'])
        else:
            return target, jnp.zeros(())
        return target, jnp.mean(info.active.astype(jnp.float32))

    def prepare(state, batches, key):
        """{'rows': what the loss takes of a rollout [E, T], as rows [N, ...], 'seen': metrics}. Draws nothing: the key is not used."""
        fresh = batches['states'] if config.aggregate else batches['fresh']
        old = distribution(state.params, fresh['observations'])
        teachers: Any = teacher.apply(state.teacher, fresh['observations'])
        target, active = proximal_teacher(old, teachers, state.hyper)
        rows = {'observations': fresh['observations'], 'old': old, 'target': target, 'valid': fresh['valid']}
        seen = {
            'distill/kl_to_teacher': jnp.mean(gaussian_kl(*old, *teachers)),
            'distill/kl_to_target': jnp.mean(gaussian_kl(*old, *target)),
            'distill/projected': active,
        }
        if config.estimator != 'analytic':
            actions = fresh['extras']['unsquashed']
            log_prob = per_token(gaussian_log_prob(*old, actions))
            reward = per_token(gaussian_log_prob(*target, actions)) - log_prob
            if config.proximal == 'mixture':
                reward = mixture_reward(reward, state.hyper['teacher_weight'])
                floor = jnp.log1p(-state.hyper['teacher_weight'])
                seen['distill/at_floor'] = jnp.mean((reward < floor + 0.01).astype(jnp.float32))
            ends = jnp.maximum(1 - fresh['masks'], fresh['truncations'])
            advantages = distillation_returns(reward, ends, config.credit, state.hyper['discount'])
            if config.normalize_advantages:
                advantages = (advantages - jnp.mean(advantages)) / jnp.maximum(jnp.std(advantages), 1e-6)
            rows = {**rows, 'actions': actions, 'log_prob': log_prob, 'advantages': advantages}
            seen = {**seen, 'distill/reward': jnp.mean(reward), 'distill/reward_min': jnp.min(reward)}
        batch_dims = fresh['valid'].ndim
        return {'rows': jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[batch_dims:]), rows), 'seen': seen}

    def per_token(log_prob):
        """[..., A] -> [..., A] where each entry counts by itself, else their sum as [..., 1]."""
        return log_prob if config.estimator == 'per_dimension' else jnp.sum(log_prob, axis=-1, keepdims=True)

    def loss(params, state, batches, key):
        rows = batches['rows']
        policy = distribution(params, rows['observations'])
        if config.estimator == 'analytic':
            value = mean_of_valid(distillation_kl(policy, rows['target'], config.direction), rows['valid'])
            return value, {'distill/loss': value}
        log_ratio = per_token(gaussian_log_prob(*policy, rows['actions'])) - rows['log_prob']
        surrogate = jnp.sum(clipped_surrogate(log_ratio, rows['advantages'], state.hyper['ratio_clip']), axis=-1)
        clipped = jnp.abs(jnp.expm1(log_ratio)) > state.hyper['ratio_clip']
        value = -mean_of_valid(surrogate, rows['valid'])
        return value, {'distill/loss': value, 'distill/clipped': jnp.mean(clipped.astype(jnp.float32))}

    def build(loss, transform=None):
        def update(state, batches, step, key):
            prepared = prepare(state, batches, None)
            rows = prepared['rows']
            state, steps = minibatch_steps(loss, state, rows, key, config.num_epochs, config.num_minibatches, transform=transform)
            moved = gaussian_kl(*distribution(state.params, rows['observations']), *rows['old'])
            return state, {**steps, **prepared['seen'], 'distill/kl_moved': jnp.mean(moved)}

        return update

    def plan(state, memory, timestep, key, mode):
        mean, log_std = distribution(state.params, timestep.observation)
        noise = jax.random.normal(key, mean.shape) if mode == 'explore' else jnp.zeros_like(mean)
        unsquashed = mean + jnp.exp(log_std) * noise
        length = jnp.ones(mean.shape[0], jnp.int32)
        return Plan(squash(unsquashed)[:, None], length, {'unsquashed': unsquashed[:, None]}), memory

    needs = {'fresh': Need('rollout', length=config.rollout_length, source='env')}
    if config.aggregate:
        needs['states'] = Need('transitions', config.batch_size, source='env')
    policy = Policy(1, lambda state, num_envs: (), lambda state, memory, timestep: memory, plan)
    adopt = {'teacher': lambda state, other: state._replace(teacher=other.params['policy'])}
    return Agent(init, {'train': Phase(needs, build(loss), loss, prepare, build)}, policy, adopt, hyper(config))
