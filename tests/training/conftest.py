import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope='session')
def dummies():
    """The module tests/training/dummies.py; tests are not a package."""
    spec = importlib.util.spec_from_file_location('dummies', Path(__file__).with_name('dummies.py'))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
