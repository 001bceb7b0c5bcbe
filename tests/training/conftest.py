import pytest


@pytest.fixture(scope='session')
def dummies(helper):
    """The module tests/training/dummies.py."""
    return helper('training/dummies.py')
