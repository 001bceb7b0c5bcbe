"""Trust regions and optimizer steps in the Optax manner."""

from optimizers.dual import DualState, init_dual, project_log_dual, update_dual
from optimizers.steps import adam_init, adam_step, clip_gradients, global_norms, move_towards

__all__ = [
    'DualState',
    'adam_init',
    'adam_step',
    'clip_gradients',
    'global_norms',
    'init_dual',
    'move_towards',
    'project_log_dual',
    'update_dual',
]
