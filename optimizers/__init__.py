"""Trust regions and optimizer steps in the Optax manner: metric, curve, anchor, radius, and a way to enforce it."""

from optimizers import anchors, curves, fisher, metrics
from optimizers.dual import Dual, DualState, adaptive_penalty, lagrangian, projected_dual_ascent
from optimizers.natural_gradient import NaturalGradientState, conjugate_gradient, natural_gradient
from optimizers.projection import (
    ProjectionInfo,
    project,
    project_decoupled,
    project_full_gaussian,
    radius_fraction,
    straight_fraction,
)
from optimizers.steps import adam_init, adam_step, clip_gradients, global_norms, gradient_step, minibatch_steps, move_towards
from optimizers.trust_region import TrustRegionState, project_to_trust_region, set_anchor

__all__ = [
    'Dual',
    'DualState',
    'NaturalGradientState',
    'ProjectionInfo',
    'TrustRegionState',
    'adam_init',
    'adam_step',
    'adaptive_penalty',
    'anchors',
    'clip_gradients',
    'conjugate_gradient',
    'curves',
    'fisher',
    'global_norms',
    'gradient_step',
    'lagrangian',
    'metrics',
    'minibatch_steps',
    'move_towards',
    'natural_gradient',
    'project',
    'project_decoupled',
    'project_full_gaussian',
    'project_to_trust_region',
    'projected_dual_ascent',
    'radius_fraction',
    'set_anchor',
    'straight_fraction',
]
