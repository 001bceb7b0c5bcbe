"""The notebooks run from top to bottom, and their numbers say what their text says."""

import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest

NOTEBOOKS = Path(__file__).resolve().parents[1] / 'notebooks'


def execute(name):
    """Namespace after all code cells."""
    cells = json.loads((NOTEBOOKS / name).read_text())['cells']
    source = '\n'.join(''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code')
    matplotlib.use('Agg')
    namespace: dict[str, Any] = {}
    exec(compile(source, name, 'exec'), namespace)
    return namespace


def test_trust_regions():
    summary = execute('trust_regions.ipynb')['summary']
    projected, chained, dual, penalty, natural = summary.values()
    assert projected['largest KL'] <= 0.5
    assert projected['KL at the end'] == pytest.approx(0.5, abs=1e-3)
    assert chained['largest KL'] < 0.5  # the quadratic metric is the tighter one here
    assert dual['largest KL'] > 0.6  # it leaves the region on the way
    assert dual['from the best point'] < 0.02
    assert penalty['largest KL'] > 0.6
    assert natural['largest KL'] > 0.5
