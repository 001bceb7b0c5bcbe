"""Trust regions and optimizer steps in the Optax manner."""

from optimizers.dual import DualState, init_dual, update_dual
from optimizers.steps import adam_init, adam_step, clip_gradients, global_norms, gradient_step, move_towards

__all__ = [
    'DualState',
    'adam_init',
    'adam_step',
    'clip_gradients',
    'global_norms',
    'gradient_step',
    'init_dual',
    'move_towards',
    'update_dual',
]
