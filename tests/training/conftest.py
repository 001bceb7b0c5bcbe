import numpy as np
import pytest

from data.dataset import from_trajectories


@pytest.fixture(scope='session')
def dummies(helper):
    """The module tests/training/dummies.py."""
    return helper('training/dummies.py')


@pytest.fixture(scope='session')
def dataset():
    """Six episodes of 20 random transitions with one observation and one action entry."""
    random = np.random.default_rng(0)
    rows = 6 * 21
    observations, actions = random.uniform(-1, 1, (2, rows, 1)).astype(np.float32)
    return from_trajectories(observations, actions, -np.ones(rows, np.float32), np.ones(rows, np.float32), np.full(6, 20))
