"""What runs an agent: the training loop, acting, evaluation, checkpoints, logging and statistics.

`training.fit(agent, source, num_updates, seeds)` is the whole loop from Python; `training.load(RUN)` brings a trained agent back.
"""

from training.members import Members, over_grid, over_seeds
from training.runs import describe, load, make_task
from training.trainer import Control, Result, fit

__all__ = ['Control', 'Members', 'Result', 'describe', 'fit', 'load', 'make_task', 'over_grid', 'over_seeds']
