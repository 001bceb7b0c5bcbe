"""Trust-region QAM: adjoint matching inside a budget on how far whole denoising paths may drift from the clone.

Source: TRQAM and its public code. lambda enters the sampling SDE (sigma = g / sqrt(lambda)) and is the multiplier of the path-KL budget:

    D        = mean_b sum_k (2 h / g_k^2) |tuned - target base|^2 / H          (path KL, before the update)
    D_ema   <- decay D_ema + (1 - decay) min(D, kl_clip * kl_budget)
    lambda  <- project(lambda + dual_step_size (D_ema - kl_budget)),   used as lambda_scale * lambda

Everything else is agents/qam.py with an unscaled adjoint; L_TRQAM(lambda) = lambda * L_QAM(1 / lambda).
"""

import dataclasses

import jax.numpy as jnp

from agents import qam
from agents.fields import static, sweepable
from agents.types import Agent
from optimizers import projected_dual_ascent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(qam.BaseConfig):
    """Defaults are those of TRQAM's public code."""

    discount: float = sweepable(0.995, 'discount per control step', low=0, high=1)
    kl_budget: float = sweepable(1.0, 'radius of the path KL, nats per control step of the chunk', low=1e-6)
    dual_step_size: float = sweepable(0.01, 'step size of the dual variable', low=0)
    dual_init: float = sweepable(1.0, 'first value of the dual variable', low=1e-6)
    dual_min: float = sweepable(0.01, 'lower end of the interval that the dual variable is projected to', low=1e-8)
    dual_max: float = sweepable(100.0, 'upper end of that interval', low=1e-8)
    lambda_scale: float = sweepable(3.0, 'lambda is this times the dual variable', low=1e-8)
    kl_decay: float = sweepable(0.9, 'decay of the moving average of the path KL', low=0, high=0.999999)
    kl_clip: float = sweepable(2.0, 'multiples of the budget at which one measured path KL is cut off', low=1)
    dual_space: str = static('linear', 'step on the dual variable itself (published) or on its logarithm', choices=('linear', 'log'))
    ema_bias_correction: bool = static(False, 'correct the start of the moving average, which is published without')


def make(config: Config, spec) -> Agent:
    """Modes of the policy and `init.bc`: as for QAM."""

    def ascent(hyper):
        return projected_dual_ascent(
            hyper['kl_budget'],
            hyper['dual_step_size'],
            decay=hyper['kl_decay'],
            clip=hyper['kl_clip'],
            minimum=hyper['dual_min'],
            maximum=hyper['dual_max'],
            space=config.dual_space,
            bias_correction=config.ema_bias_correction,
        )

    def update(dual, hyper, path_kl, adjoint_energy):
        dual, seen = ascent(hyper).update(dual, path_kl)
        return dual, {
            'dual/lambda': hyper['lambda_scale'] * dual.multiplier,
            'dual/kl_clipped': seen['clipped'],
            'dual/kl_average': seen['average'],
            'dual/kl_over_budget': path_kl / hyper['kl_budget'],
            'dual/lambda_newton': jnp.sqrt(adjoint_energy / (2 * hyper['kl_budget'])),
        }

    temperature = qam.Temperature(
        init=lambda hyper: ascent(hyper).init(hyper['dual_init']),
        scales=lambda dual, hyper: (jnp.float32(1), hyper['lambda_scale'] * dual.multiplier),
        update=update,
    )
    return qam.make_with_temperature(config, spec, temperature)
