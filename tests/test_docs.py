"""The documents: links lead somewhere and the Python runs."""

import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import agents
import training
from agents import registry
from data.dataset import from_trajectories
from envs.types import ArraySpec, Spec

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted((ROOT / 'docs').glob('*.md'))]


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page):
    text = page.read_text()
    for target in re.findall(r'\]\(([^)#]+)\)', text):
        if '://' not in target:
            assert (page.parent / target).exists(), target
    for path in re.findall(r'`((?:agents|losses|optimizers|tests|training|scripts|docs|reports)/[\w/]+\.(?:py|md))`', text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize('name', ['README.md', 'docs/new_agent.md'])
def test_python_blocks_run(name, monkeypatch):
    monkeypatch.setattr(registry, '_REGISTERED', {})
    run_blocks(name, monkeypatch)


def run_blocks(name, monkeypatch):
    blocks = re.findall(r'```python\n(.*?)```', (ROOT / name).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        module = types.ModuleType('block')
        monkeypatch.setitem(sys.modules, 'block', module)  # dataclasses look their module up
        exec(compile(block, name, 'exec'), module.__dict__)


def test_an_agent_of_ones_own_trains(monkeypatch):
    """The file of docs/new_agent.md, makes twenty updates."""
    monkeypatch.setattr(registry, '_REGISTERED', {})
    run_blocks('docs/new_agent.md', monkeypatch)
    rows = np.random.default_rng(0).uniform(-1, 1, (2, 42, 1)).astype(np.float32)
    dataset = from_trajectories(rows[0], rows[1], np.zeros(42, np.float32), np.ones(42, np.float32), np.full(2, 20))
    agent = agents.make('robust_clone', Spec(ArraySpec((1,)), ArraySpec((1,), -1, 1), 20), batch_size=4)
    seen = []
    training.fit(agent, dataset, 20, (0,), lambda update, metrics: seen.append(update), announce=lambda line: None)
    assert seen == [20]
