"""The documents: links and names lead somewhere, the Python runs, and tables say what the code says."""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import json
import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import agents
import training
from agents import registry as agent_registry
from data.dataset import from_trajectories
from envs import registry as env_registry
from envs.types import ArraySpec, Spec
from losses import adjoint_matching as am
from losses.flow_matching import integrate_flow
from training import runs, streams
from training.loop import Health

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted((ROOT / 'docs').glob('*.md'))]
CODE = ('agents', 'data', 'envs', 'losses', 'networks', 'optimizers', 'scripts', 'training')
SPEC = Spec(ArraySpec((1,)), ArraySpec((1,), -1, 1), 20)
SMALL = {'hidden_sizes': (8,), 'batch_size': 4, 'horizon_length': 2, 'flow_steps': 2}
CRITIC = {'critic_hidden_sizes': (8,), 'num_critics': 2}


def page(name):
    return (ROOT / name).read_text()


def blocks(text, language):
    return re.findall(rf'^```{language}\n(.*?)^```$', text, re.DOTALL | re.MULTILINE)


def table(text, first_header):
    """Cells of the first table whose header starts with `first_header`."""
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f'| {first_header} |'))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith('|'):
            break
        rows.append([cell.strip() for cell in line.strip().strip('|').split('|')])
    return rows


def unquoted(cells):
    return [name for cell in cells for name in re.findall(r'`([^`]+)`', cell)]


def dataset():
    rows = np.random.default_rng(0).uniform(-1, 1, (2, 42, 1)).astype(np.float32)
    return from_trajectories(rows[0], rows[1], np.zeros(42, np.float32), np.ones(42, np.float32), np.full(2, 20))


# ---- names


@pytest.mark.parametrize('path', PAGES, ids=lambda path: path.name)
def test_links_and_paths_exist(path):
    text = path.read_text()
    for target in re.findall(r'\]\(([^)#]+)\)', text):
        if '://' not in target:
            assert (path.parent / target).exists(), target
    for target in re.findall(r'`((?:' + '|'.join(CODE) + r'|tests|docs|reports|benchmarks)/[\w/]+\.(?:py|md))`', text):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize('path', PAGES, ids=lambda path: path.name)
def test_names_in_the_code_exist(path):
    text = re.sub(r'^```.*?^```$', '', path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for name in set(re.findall(r'`((?:' + '|'.join(CODE) + r')(?:\.\w+)+)(?:\([^`]*\))?`', text)):
        module, _, attribute = name.rpartition('.')
        assert hasattr(importlib.import_module(module), attribute) or importlib.util.find_spec(name), name
    for file, function in re.findall(r'`([\w/]+\.py)::(\w+)`', text):
        found = [candidate for candidate in (ROOT / 'tests').rglob(Path(file).name) if str(candidate).endswith(file)]
        assert len(found) == 1, file
        assert function in {node.name for node in ast.parse(found[0].read_text()).body if isinstance(node, ast.FunctionDef)}, function


@pytest.mark.parametrize('path', PAGES, ids=lambda path: path.name)
def test_flags_of_commands_exist(path):
    """In code blocks every flag of `python scripts/NAME.py` is defined there; fields and grids belong to the agent that is named."""
    text = '\n'.join(re.findall(r'^```\w*\n(.*?)^```$', path.read_text(), re.DOTALL | re.MULTILINE)).replace('\\\n', ' ')
    for script, rest in re.findall(r'python scripts/(\w+)\.py([^\n]*)', text):
        source = (ROOT / 'scripts' / f'{script}.py').read_text()
        defined = set(re.findall(r"DEFINE_\w+\(\s*'(\w+)'", source))
        for flag, value in re.findall(r'--([\w.]+)=?(\S*)', rest.partition(' #')[0]):
            kind, _, field = flag.partition('.')
            if field and kind in ('agent', 'grid'):
                named = re.findall(r'--agent=(\w+)', rest)
                users = [name for name in agents.names() if not named or name in named or named[0] not in agents.names()]
                assert any(field in {f.name for f in dataclasses.fields(agents.module(name).Config)} for name in users), flag
            elif kind == 'init':
                assert field == 'bc', flag
            else:
                assert flag in defined | {'helpfull', 'verbosity'}, (script, flag, value)


def test_methods_marked_as_here_are_here():
    rows = table(page('README.md'), 'agent')
    assert sorted(unquoted([row[0] for row in rows])) == agents.names()
    assert {row[1] for row in rows} == {'here'}


# ---- Python in the pages


@pytest.mark.parametrize('name', ['README.md', 'docs/new_agent.md', 'docs/new_environment.md', 'docs/data.md'])
def test_python_blocks_run(name, monkeypatch, tmp_path):
    """All blocks of a page, one after the other, in an empty folder."""
    monkeypatch.setattr(agent_registry, '_REGISTERED', {})
    monkeypatch.setattr(env_registry, '_REGISTERED', {})
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType('page')
    monkeypatch.setitem(sys.modules, 'page', module)  # dataclasses look their module up
    found = blocks(page(name), 'python')
    assert found
    for block in found:
        exec(compile(block, name, 'exec'), module.__dict__)


def test_the_walk_through_shows_the_whole_template():
    """The excerpts in docs/new_agent.md, one after the other, are agents/template.py from its first class on."""
    source = (ROOT / 'agents' / 'template.py').read_text()
    shown = '\n'.join(blocks(page('docs/new_agent.md'), 'py'))
    code = [line.rstrip() for line in source[source.index('@dataclasses') :].splitlines() if line.strip()]
    assert [line.rstrip() for line in shown.splitlines() if line.strip()] == code


def test_an_agent_of_ones_own_trains(monkeypatch, tmp_path):
    """The file of docs/new_agent.md, imported as `--import=my_module` does, makes twenty updates."""
    monkeypatch.setattr(agent_registry, '_REGISTERED', {})
    (tmp_path / 'my_module.py').write_text(blocks(page('docs/new_agent.md'), 'python')[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'my_module', raising=False)
    importlib.import_module('my_module')
    assert 'robust_clone' in agents.names()
    agent = agents.make('robust_clone', SPEC, batch_size=4)
    seen = []
    training.fit(agent, dataset(), 20, (0,), lambda update, metrics: seen.append(update), announce=lambda line: None)
    assert seen == [20]


# ---- tables


def spelt(value):
    if isinstance(value, tuple):
        return ','.join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else f'{value:g}' if isinstance(value, float) else str(value)


def field_row(field):
    metadata = field.metadata
    limits = f'[{metadata["low"]:g}, {metadata["high"]:g}]'
    allowed = ', '.join(metadata.get('choices') or ()) or ('' if isinstance(field.default, bool | str) else limits)
    allowed = 'true, false' if isinstance(field.default, bool) else allowed
    return [f'`{field.name}`', spelt(field.default), allowed, 'yes' if metadata['sweep'] else '', metadata['comment']]


@pytest.mark.parametrize('name', ['bc_flow', 'qam', 'topd', 'topd_flow', 'trqam'])
def test_field_tables_are_the_configurations(name):
    expected = [field_row(field) for field in dataclasses.fields(agents.module(name).Config)]
    assert table(page(f'docs/{name}.md'), 'field') == expected, '\n'.join(f'| {" | ".join(row)} |' for row in expected)


@pytest.mark.parametrize(
    ('name', 'overrides'),
    [
        ('bc_flow', SMALL),
        ('qam', SMALL | CRITIC),
        ('topd', {'num_minibatches': 2}),
        ('topd_flow', {'num_minibatches': 2}),
        ('trqam', SMALL | CRITIC),
    ],
)
def test_metric_tables_are_complete(name, overrides):
    agent = agents.make(name, SPEC, **overrides)
    rows = np.zeros((4, 2, 1), np.float32)
    names = ('observations', 'next_observations', 'actions')
    batch: dict = dict.fromkeys(names, rows) | dict.fromkeys(('rewards', 'masks', 'truncations', 'valid'), rows[..., 0])
    batch['extras'] = {'unsquashed': rows}
    need = next(iter(agent.phases['train'].needs))

    def update(key):
        state = agent.init(key, {field: jnp.float32(value) for field, value in agent.hyper.items()})
        return agent.phases['train'].update(state, {need: jax.tree.map(jnp.asarray, batch)}, 0, key)[1]

    assert set(unquoted([row[0] for row in table(page(f'docs/{name}.md'), 'metric')])) == set(jax.eval_shape(update, jax.random.key(0)))


def test_run_folder_page_names_what_a_run_writes(tmp_path):
    text, out = page('docs/run_folder.md'), tmp_path / 'run'
    overrides = {'hidden_sizes': (8,), 'batch_size': 4}
    task = runs.Task(SPEC, None, None)
    description = {**runs.describe('template', overrides, SPEC, 'probe/line'), 'init': {}, 'matmul_precision': 'float32', 'online': {}}
    config = runs.run_config(description, (0,), {}, [agents.Stage('train', 2)], task)
    control = training.Control(eval_episodes=1, num_devices=1)
    training.fit(
        agents.make('template', SPEC, **overrides),
        dataset(),
        2,
        control=control,
        eval_env='probe/line',
        out=out,
        config=config,
        announce=lambda line: None,
    )
    summary = json.loads((out / 'summary.json').read_text())
    assert set(unquoted([row[0] for row in table(text, 'field of summary.json')])) == set(summary)
    assert set(next(iter(summary['eval'].values()))['']) == set(unquoted(re.findall(r'^Each score holds (.*?)\.$', text, re.MULTILINE)))
    stored = json.loads((out / 'config.json').read_text())
    assert set(unquoted([row[0] for row in table(text, 'field of config.json')])) == set(stored)
    assert set(unquoted([row[0] for row in table(text, 'control')])) == set(training.Control.__dataclass_fields__)
    files = {name.split('/')[0] for name in unquoted([row[0] for row in table(text, 'file')])}
    assert {path.name for path in out.iterdir()} <= files
    header = (out / 'metrics.csv').read_text().splitlines()[0].split(',')
    assert header[:3] == ['update', 'seed', 'setting']
    assert {f'health/{name}' for name in Health._fields if name != 'in_a_row'} <= set(header)


def test_streams_table():
    named = unquoted([row[0] for row in table(page('docs/randomness.md'), 'stream')])
    assert named == ['INIT', 'UPDATE', 'ROLLOUT', 'EVAL', 'DATA']
    assert [getattr(streams, name) for name in named] == list(range(5))


# ---- the discretisation table of docs/trqam.md, measured again


@functools.partial(jax.jit, static_argnums=0)
def discretisation(num_steps, std):
    """(KL published, shift published, KL transpose, shift transpose, SDE sd, ODE sd) for base N(0, std^2), Q(a) = a, lambda = 1.

    All fields are affine in the action, so one path per random number gives the exact standard deviation of the end point.
    """

    def base(actions, times):
        return actions * (times * std**2 - (1 - times)) / ((1 - times) ** 2 + times**2 * std**2)

    variance = am.diffusion_squared(am.flow_times(num_steps), 1 / num_steps)[:, None, None]
    values = []
    for adjoint_time in ('published', 'transpose'):
        shift = -variance / 2 * am.lean_adjoint(base, jnp.zeros((num_steps, 1, 1)), -jnp.ones((1, 1)), adjoint_time)

        def tuned(actions, times, shift=shift):
            return base(actions, times) + shift[jnp.round(times * num_steps).astype(jnp.int32)][..., 0, 0]

        values += [am.path_kl(shift, jnp.zeros_like(shift))[0], integrate_flow(tuned, jnp.zeros((1, 1)), num_steps)[0, 0]]
    units = jnp.eye(num_steps)[:, :, None]
    simulated = am.simulate_path(base, base, units[0], units[1:]).final
    return jnp.stack([*values, jnp.sqrt(jnp.sum(simulated**2)), integrate_flow(base, jnp.ones((1, 1)), num_steps)[0, 0]])


def test_discretisation_table():
    for steps, std, kl, kl_t, kl_exact, shift, shift_t, shift_exact, sde, ode in table(page('docs/trqam.md'), 'T'):
        s = float(std)
        measured = discretisation(int(steps), s)
        shown = [float(value) for value in (kl, shift, kl_t, shift_t, sde, ode)]
        np.testing.assert_allclose(shown, measured, rtol=6e-3, err_msg=f'T = {steps}, s = {std}')  # three digits
        np.testing.assert_allclose([float(kl_exact), float(shift_exact)], [s**2 / 2, s**2])
