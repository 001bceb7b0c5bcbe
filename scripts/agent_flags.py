"""Flags that depend on the agent: --agent.FIELD, --grid.FIELD and --init.NAME, and what other code bases call ours."""

import dataclasses
import difflib
import importlib
from collections.abc import Sequence
from typing import Any

from absl import flags

from agents import registry

FOREIGN = {
    'env_name': 'env',
    'save_dir': 'out',
    'dataset_dir': 'dataset',
    'dataset_path': 'dataset',
    'offline_steps': 'num_updates',
    'online_steps': 'num_env_steps',
    'num_steps': 'num_updates',
    'num_timesteps': 'num_env_steps',
    'seeds': 'num_seeds',
    'seed_num': 'num_seeds',
    'buffer_size': 'replay_capacity',
    'eval_freq': 'eval_interval',
    'save_interval': 'checkpoint_interval',
    'restore_path': 'init.bc',
}


def value_of(argv: Sequence[str], name: str) -> str | None:
    """The last value of --name=VALUE or --name VALUE on a command line, before any flags are defined."""
    found = None
    for index, argument in enumerate(argv):
        flag, equals, value = argument.partition('=')
        if flag not in (f'--{name}', f'-{name}'):  # absl takes both
            continue
        if equals:
            found = value
        elif index + 1 < len(argv):
            found = argv[index + 1]
    return found


def import_own(argv: Sequence[str]) -> None:
    """Imports the module that --import=MODULE names, which registers a user's own agents and environments. Raises ValueError."""
    module = value_of(argv, 'import')
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f'--import={module}: {error}; the module must be on the path (PYTHONPATH) and call agents.register') from error


def define(argv: Sequence[str]) -> None:
    """Defines the flags of the agent that a command line names, and answers names of other code bases.

    Raises ValueError (one line) for an unknown agent or a foreign or misspelt name.
    """
    import_own(argv)
    name = value_of(argv, 'agent')
    fields = list(dataclasses.fields(registry.module(name).Config)) if name else []
    for field in fields:
        low, high = field.metadata['low'], field.metadata['high']
        bounds = '' if isinstance(field.default, bool | str) else f' in [{low:g}, {high:g}]'
        choices = f' ({" | ".join(field.metadata["choices"])})' if field.metadata.get('choices') else ''
        text = f'{field.metadata["comment"]}{choices}{bounds}; default {_spelt(field.default)}'
        flags.DEFINE_string(f'agent.{field.name}', None, text)
        if field.metadata['sweep']:
            flags.DEFINE_string(f'grid.{field.name}', None, f'values of agent.{field.name}, separated by commas: a vmapped sweep')
    for argument in argv[1:]:
        flag = argument.split('=', 1)[0].lstrip('-')
        if flag.startswith('init.'):
            if flag not in flags.FLAGS:
                flags.DEFINE_string(flag, None, 'run whose networks this one starts from, RUN or RUN@STEP')
        elif argument.startswith('-') and flag not in flags.FLAGS:
            _explain(flag, [field.name for field in fields])


def _explain(flag: str, fields: list[str]) -> None:
    prefix, _, name = flag.rpartition('.')
    name = name.removeprefix('no') if name.startswith('no') and name[2:] in flags.FLAGS else name
    if prefix in ('agent', 'grid') and fields:
        near = registry.FOREIGN_NAMES.get(name) or next(iter(difflib.get_close_matches(name, fields, n=1)), None)
        raise ValueError(f'--{flag}: ' + (f'did you mean --{prefix}.{near}?' if near in fields else f'this agent has {", ".join(fields)}'))
    if name in FOREIGN and name not in flags.FLAGS:
        raise ValueError(f'--{flag} is called --{FOREIGN[name]} here')
    if name in (*registry.FOREIGN_NAMES, *fields) and name not in flags.FLAGS:
        raise ValueError(f'--{flag}: did you mean --agent.{registry.FOREIGN_NAMES.get(name, name)}?')


def _spelt(value: Any) -> str:
    return ','.join(map(str, value)) if isinstance(value, tuple) else f'{value:g}' if isinstance(value, float) else str(value)


def overrides(name: str) -> dict[str, Any]:
    """The agent's fields that were set. Raises ValueError for a value that does not parse."""
    result = {}
    for field in dataclasses.fields(registry.module(name).Config):
        text = flags.FLAGS[f'agent.{field.name}'].value
        if text is not None:
            result[field.name] = parse(f'--agent.{field.name}', text, field.default)
    return result


def grid(name: str) -> dict[str, tuple[float, ...]]:
    """The swept fields and their values."""
    result = {}
    for field in dataclasses.fields(registry.module(name).Config):
        text = flags.FLAGS[f'grid.{field.name}'].value if field.metadata['sweep'] else None
        if text is not None:
            if flags.FLAGS[f'agent.{field.name}'].value is not None:
                raise ValueError(f'give --agent.{field.name} or --grid.{field.name}, not both')
            result[field.name] = tuple(parse(f'--grid.{field.name}', part, field.default) for part in text.split(','))
            for value in result[field.name]:
                registry.config(name, **{field.name: value})
    return result


def inits() -> dict[str, str]:
    """{NAME: RUN} of every --init.NAME=RUN."""
    return {flag.removeprefix('init.'): str(flags.FLAGS[flag].value) for flag in flags.FLAGS if flag.startswith('init.')}


def parse(flag: str, text: str, default: Any) -> Any:
    """Text as a value of the type of `default`. Raises ValueError with a hint."""
    if isinstance(default, bool):
        if text.lower() not in ('true', 'false'):
            raise ValueError(f'{flag}={text} must be true or false')
        return text.lower() == 'true'
    if isinstance(default, tuple):
        return tuple(parse(flag, part, 0) for part in text.split(','))
    if isinstance(default, str):
        return text
    try:
        return type(default)(text)
    except ValueError:
        kind = 'a whole number (write 1000, not 1e3)' if isinstance(default, int) else 'a number'
        raise ValueError(f'{flag}={text} must be {kind}') from None
