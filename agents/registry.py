"""Agents by name. A user's own file registers itself: `agents.register('mine', sys.modules[__name__])`, loaded with --import=my_module."""

import dataclasses
import difflib
import importlib
from types import ModuleType
from typing import Any

from agents.types import Agent

_BUILT_IN = {name: f'agents.{name}' for name in ('bc_flow', 'qam', 'template', 'topd', 'topd_flow', 'trqam')}
_REGISTERED: dict[str, ModuleType] = {}


def names() -> list[str]:
    """Names that `make` takes."""
    return sorted({*_BUILT_IN, *_REGISTERED})


def register(name: str, module: ModuleType) -> None:
    """Adds an agent: a module with `Config` (a frozen dataclass of agents.fields fields) and `make(config, spec) -> Agent`."""
    missing = [part for part in ('Config', 'make') if not hasattr(module, part)]
    if missing:
        raise ValueError(f'agent {name!r} lacks {" and ".join(missing)}: an agent file defines Config and make(config, spec)')
    _REGISTERED[name] = module


def module(name: str) -> ModuleType:
    """The file of an agent; also takes the path form `agents/NAME.py`. Raises ValueError with the nearest names for an unknown one."""
    name = name.removeprefix('agents/').removesuffix('.py')
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name not in _BUILT_IN:
        near = difflib.get_close_matches(name, names(), n=3) or names()
        raise ValueError(f'unknown agent {name!r}: did you mean {" or ".join(near)}?')
    return importlib.import_module(_BUILT_IN[name])


def config(name: str, **overrides: Any) -> Any:
    """The configuration of an agent. Raises ValueError for an unknown field (with the nearest name) or a value out of range."""
    config_class = module(name).Config
    fields = [field.name for field in dataclasses.fields(config_class)]
    for field in overrides:
        if field not in fields:
            near = FOREIGN_NAMES.get(field) or next(iter(difflib.get_close_matches(field, fields, n=1)), None)
            hint = f'did you mean {near}?' if near in fields else f'it has {", ".join(fields)}'
            raise ValueError(f'agent {name!r} has no field {field!r}: {hint}')
    return config_class(**overrides)


def make(name: str, spec: Any, **overrides: Any) -> Agent:
    """An agent by name, for a task. Raises ValueError as `config` does."""
    return module(name).make(config(name, **overrides), spec)


# What other code bases call our fields, so that muscle memory gets an answer instead of a default.
FOREIGN_NAMES = {
    'lr': 'learning_rate',
    'gamma': 'discount',
    'num_qs': 'num_critics',
    'rho': 'pessimism',
    'inv_temp': 'inverse_temperature',
    'eps_kl': 'kl_budget',
    'epsilon': 'kl_budget',
    'eta_lambda': 'dual_step_size',
    'lam_scale': 'lambda_scale',
    'actor_hidden_dims': 'hidden_sizes',
    'value_hidden_dims': 'critic_hidden_sizes',
    'hidden_dims': 'hidden_sizes',
    'horizon': 'horizon_length',
    'chunk_size': 'horizon_length',
    'target_update_rate': 'tau',
}
