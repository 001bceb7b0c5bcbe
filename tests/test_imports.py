"""The house rules that can be read off the source: which way imports point, what `types.py` may hold, what an import may start."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TYPES = {'agents.types', 'envs.types', 'data.types'}
# Package -> what it may import besides itself: packages, or single modules.
ALLOWED = {
    'losses': set(),
    'networks': {'losses'} | TYPES,
    'optimizers': {'losses'} | TYPES,
    'agents': {'networks', 'optimizers', 'losses'} | TYPES,
    'envs': TYPES,
    'data': TYPES,
    'training': {'agents', 'networks', 'optimizers', 'losses', 'envs', 'data'},
}
ABOVE = {'scripts', 'notebooks', 'reports', 'benchmarks', 'tests'}
SIMULATORS = ('mujoco', 'brax', 'ogbench', 'gymnasium', 'metaworld')
PICKLES = {'pickle', 'cloudpickle', 'dill', 'joblib', 'shelve', 'marshal'}


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob('*.py'))]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


MODULES = {module_name(path): path for path in sources(*ALLOWED)}


def imported(tree: ast.AST) -> Iterator[str]:
    """Absolute names of the modules that a file imports, at its top or inside a function. `from envs import types` is `envs.types`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, 'relative import'
            for alias in node.names:
                submodule = f'{node.module}.{alias.name}'
                yield submodule if submodule in MODULES else str(node.module)


def upward(module: str, tree: ast.AST) -> list[str]:
    package = module.split('.')[0]
    ours = (name for name in imported(tree) if name.split('.')[0] in ALLOWED.keys() | ABOVE)
    return [name for name in ours if name.split('.')[0] not in ALLOWED[package] | {package} and name not in ALLOWED[package]]


@pytest.mark.parametrize('module', MODULES)
def test_imports_point_down(module):
    assert upward(module, ast.parse(MODULES[module].read_text())) == []


@pytest.mark.parametrize(
    ('module', 'line', 'found'),
    [
        ('losses.distances', 'from envs import types', ['envs.types']),
        ('networks.mlp', 'import optimizers', ['optimizers']),
        ('agents.sac', 'import training.fit', ['training.fit']),
        ('envs.brax', 'def make():\n    from data import dataset', ['data.dataset']),
        ('training.fit', 'from scripts import train', ['scripts']),
        ('data.npz', 'from envs import types', []),
        ('data.npz', 'import envs', ['envs']),
        ('agents.sac', 'from agents.types import Agent\nfrom losses import distances', []),
    ],
)
def test_import_check_itself(module, line, found):
    assert upward(module, ast.parse(line)) == found


def test_agents_never_import_each_other_in_a_circle():
    agents = {name: path for name, path in MODULES.items() if name.startswith('agents.')}
    edges = {name: set(imported(ast.parse(path.read_text()))) & agents.keys() for name, path in agents.items()}
    while leaves := {name for name, targets in edges.items() if not targets & edges.keys()}:
        edges = {name: targets for name, targets in edges.items() if name not in leaves}
    assert not edges


def test_every_package_is_regular():
    """A folder without `__init__.py` is left out of the wheel without a word."""
    folders = {path.parent for path in MODULES.values()}
    assert {module_name(folder / '__init__.py') for folder in folders} >= ALLOWED.keys()
    assert [folder for folder in folders if not (folder / '__init__.py').is_file()] == []


@pytest.mark.parametrize('module', sorted(TYPES))
def test_types_hold_named_tuples_only(module):
    docstring, *body = ast.parse(MODULES[module].read_text()).body
    assert isinstance(docstring, ast.Expr)
    for node in body:
        if isinstance(node, ast.ClassDef):
            assert [ast.unparse(base) for base in node.bases] == ['NamedTuple']
            assert all(isinstance(field, ast.AnnAssign | ast.Expr) for field in node.body)
        else:
            assert isinstance(node, ast.Import | ast.ImportFrom), ast.unparse(node)


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, '-c', code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)


def test_importing_packages_loads_no_simulator():
    done = run(f'import {", ".join(ALLOWED)}, sys; print(sorted(set({SIMULATORS}) & set(sys.modules)))')
    assert (done.stdout.strip(), done.returncode) == ('[]', 0), done.stderr


def test_importing_modules_starts_no_backend():
    """With a platform that does not exist, the first array or key raises."""
    imports = '\n'.join(f'import {name}' for name in MODULES if not name.endswith('_main'))
    done = run(imports, JAX_PLATFORMS='none_such')
    assert done.returncode == 0, done.stderr
    done = run('import jax.numpy as jnp; jnp.zeros(())', JAX_PLATFORMS='none_such')
    assert 'none_such' in done.stderr
    assert done.returncode != 0


def test_distrax_is_imported_in_one_place():
    users = {name for name, path in MODULES.items() for target in imported(ast.parse(path.read_text())) if target.startswith('distrax')}
    assert users <= {'networks.distributions'}


def unsafe(tree: ast.AST) -> Iterator[str]:
    """Calls and imports that run code from a file, hide an error, or load an object array."""
    if PICKLES & {name.split('.')[0] for name in imported(tree)}:
        yield 'pickle'
    for node in ast.walk(tree):
        match node:
            case ast.ExceptHandler(type=None):
                yield 'bare except'
            case ast.Call(func=ast.Name(id='eval' | 'exec' as name)):
                yield name
            case ast.Attribute(value=ast.Name(id='yaml'), attr='load' | 'unsafe_load' | 'full_load'):
                yield 'yaml.load'
            case ast.Call(func=ast.Attribute(value=ast.Name(id='np' | 'numpy'), attr='load'), keywords=keywords):
                if not any(word.arg == 'allow_pickle' for word in keywords):
                    yield 'np.load without allow_pickle=False'
            case ast.keyword(arg='allow_pickle', value=value) if not (isinstance(value, ast.Constant) and value.value is False):
                yield 'allow_pickle'


@pytest.mark.parametrize('path', sources(*ALLOWED, 'scripts', 'benchmarks', 'reports'), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_unsafe(path):
    assert list(unsafe(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    ('code', 'found'),
    [
        ('import pickle', 'pickle'),
        ('from joblib import load', 'pickle'),
        ('try:\n    f()\nexcept:\n    pass', 'bare except'),
        ('eval("1")', 'eval'),
        ('yaml.load(text)', 'yaml.load'),
        ('np.load(path)', 'np.load without allow_pickle=False'),
        ('np.load(path, allow_pickle=True)', 'allow_pickle'),
    ],
)
def test_unsafe_check_itself(code, found):
    assert list(unsafe(ast.parse(code))) == [found]
    assert list(unsafe(ast.parse('agent.eval(x); np.load(path, allow_pickle=False)'))) == []


def test_no_script_hides_a_standard_module():
    """A script's folder comes first on the path: scripts/profile.py would be what `import profile` finds."""
    assert {path.stem for path in sources('scripts')} & sys.stdlib_module_names == set()
