"""Optax's own common tests for transforms, read from the installed wheel and run on ours."""

import ast
import importlib.util
import unittest
from pathlib import Path
from typing import Any

import jax
import optax
import pytest

from optimizers import project_to_trust_region

ENTRY = {'opt_name': 'tether', 'opt_kwargs': {'learning_rate': 1e-1}, 'wrapper_name': None, 'wrapper_kwargs': None}
LISTS = {'_MAIN_OPTIMIZERS_UNDER_TEST': [ENTRY], '_OTHER_OPTIMIZERS_UNDER_TEST': []}


def common_tests(monkeypatch):
    """The module of the wheel, with its lists of optimizers exchanged for ours before the test cases are made."""
    found = importlib.util.find_spec('optax.contrib')
    assert found is not None
    assert found.submodule_search_locations is not None
    path = Path(found.submodule_search_locations[0]) / '_common_test.py'
    tree, kept, replaced = ast.parse(path.read_text()), [], set()
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AugAssign) else None
        name = target.id if isinstance(target, ast.Name) else ''
        if name in LISTS:
            if isinstance(node, ast.AugAssign):
                continue
            if name not in replaced:
                node = ast.parse(f'{name} = {LISTS[name]!r}').body[0]
                replaced.add(name)
        kept.append(node)
    assert replaced == set(LISTS)
    tree.body = kept

    def tether(learning_rate: optax.ScalarOrSchedule, radius: optax.ScalarOrSchedule = 1e3):
        return optax.chain(optax.adam(learning_rate), project_to_trust_region(radius))

    monkeypatch.setattr(optax.contrib, 'tether', tether, raising=False)
    namespace: dict[str, Any] = {'__name__': 'optax_common'}
    exec(compile(tree, str(path), 'exec'), namespace)
    return namespace['ContribTest']


@pytest.mark.slow
def test_optax_common_tests_pass(monkeypatch):
    """Adam in a ball that holds the minimum: extra arguments, no second compilation, convergence on four problems, injected
    hyper-parameters, dtypes, accumulation, stable states, schedules."""
    with jax.numpy_rank_promotion('allow'):
        suite = unittest.defaultTestLoader.loadTestsFromTestCase(common_tests(monkeypatch))
        result = unittest.TestResult()
        suite.run(result)
    assert not result.failures, result.failures[0]
    assert not result.errors, result.errors[0]
    assert result.testsRun >= 15
    assert len(result.skipped) <= 1, result.skipped
