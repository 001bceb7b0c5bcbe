"""Names of environments, and the table of families that know how to build them."""

import difflib
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from envs import workers

# family -> the module that builds it, imported when one of its names is first used. Each defines
#   names() -> identifiers without the family; canonical(identifier) -> the one of them that is meant (else ValueError);
#   is_on_device(identifier); make(identifier, num_envs, options) -> DeviceEnv or HostEnv, refusing options without effect;
#   and, if its datasets carry no rewards, relabel(identifier, arrays).
_FAMILIES = {'lqr': 'envs.lqr', 'ogbench': 'envs.ogbench', 'probe': 'envs.probes'}
_REGISTERED: dict[str, 'Registered'] = {}


class Name(NamedTuple):
    """The parts of `family/identifier:option=value,...`."""

    family: str  # '' for a registered name without a slash
    identifier: str
    options: Mapping[str, int | float | bool | str]


class Registered(NamedTuple):
    """An environment of the user's own."""

    constructor: Callable
    on_device: bool


def parse(name: str) -> Name:
    """Splits a name. Values become int, float or bool where they read as one ('true' and 'false' are bool), else str.

    Raises:
      ValueError: an option without value, given twice, or not finite.
    """
    base, _, text = name.partition(':')
    family, slash, identifier = base.partition('/')
    if not slash:
        family, identifier = '', base
    options: dict[str, int | float | bool | str] = {}
    for option in text.split(',') if ':' in name else ():
        key, equals, value = option.partition('=')
        if not (key and equals and value):
            raise ValueError(f'cannot read {option!r} in {name!r}: write FAMILY/NAME:option=value,option=value')
        if key in options:
            raise ValueError(f'{name!r} gives {key} twice')
        options[key] = _value(value)
        if isinstance(options[key], float) and not math.isfinite(options[key]):  # pyright: ignore[reportArgumentType]
            raise ValueError(f'{key} in {name!r} must be a finite number')
    return Name(family, identifier, options)


def _value(text: str) -> int | float | bool | str:
    if text.lower() in ('true', 'false'):
        return text.lower() == 'true'
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def names() -> list[str]:
    """Every environment that can be made here, without options. Imports the suites."""
    built_in = [f'{family}/{identifier}' for family in _FAMILIES for identifier in _module(family).names()]
    return sorted(built_in + list(_REGISTERED))


def register(name: str, constructor: Callable, on_device: bool = False) -> None:
    """Adds an environment of your own under `name`.

    Args:
      name: for example 'lab/reacher'; no ':' or ',', and no built-in family in front.
      constructor: (num_envs, **options) -> `envs.types.DeviceEnv`, whose num_envs is ignored, or `envs.HostEnv`. Its keyword
        arguments are the options that the name takes. For use in worker processes it must be found in an importable module by its
        own name.
      on_device: whether it returns a DeviceEnv.

    Raises:
      ValueError: the name is malformed or taken.
    """
    family = name.partition('/')[0]
    if not name or any(character in name for character in ':,= '):
        raise ValueError(f'cannot register {name!r}: a name has no colon, comma, equals sign or space')
    if family in _FAMILIES:
        raise ValueError(f'cannot register {name!r}: {family}/ is a built-in family, choose another')
    if name in _REGISTERED:
        raise ValueError(f'cannot register {name!r}: the name is taken')
    _REGISTERED[name] = Registered(constructor, on_device)


def is_registered(name: str) -> bool:
    """Whether `register` has been called for this name (options after it do not matter)."""
    return name.partition(':')[0] in _REGISTERED


def make(name: str, num_envs: int = 1, num_workers: int = 0) -> Any:
    """Builds an environment.

    Args:
      name: `family/identifier:option=value,...` or a registered name. Families and their options:
        ogbench: single-task environments of OGBench, such as `ogbench/pointmaze-medium-singletask-task1-v0`; `-singletask-v0` is the
          default task, and names of datasets (`...-navigate-singletask-task1-v0`) are accepted. Point mazes take
          `implementation=batched` (default) or `gym`, which give the same numbers.
        probe: tiny problems with known values, see `envs.probes`.
        lqr: linear dynamics with quadratic costs, whose best policy is known, see `envs.lqr`.
      num_envs: E, the number of slots of a HostEnv; a DeviceEnv is one environment, which training vmaps.
      num_workers: over how many processes a HostEnv splits its slots (0: none, step in this process); no more than num_envs are
        started. The results are the same. Ignored by a DeviceEnv.

    Returns:
      `envs.types.DeviceEnv` or `envs.HostEnv`; both have `spec` and `on_device`.

    Raises:
      ValueError: unknown name or option (one line with the nearest good ones), or a bad number.
      RuntimeError: a worker process failed to start.
    """
    for label, number, smallest in (('num_envs', num_envs, 1), ('num_workers', num_workers, 0)):
        if not isinstance(number, int | np.integer) or number < smallest:
            raise ValueError(f'{label} must be a whole number of at least {smallest}, not {number!r}')
    parsed = parse(name)
    registered = _REGISTERED.get(name.partition(':')[0])
    if registered is not None:
        _check_options(name, registered.constructor, parsed.options)
        if num_workers and not registered.on_device:
            return workers.WorkerEnv(name, num_envs, num_workers, workers.importable(registered.constructor, name))
        return registered.constructor(num_envs, **parsed.options)
    module, identifier = _family(name)
    if num_workers and not module.is_on_device(identifier):
        return workers.WorkerEnv(name, num_envs, num_workers)
    return module.make(identifier, num_envs, parsed.options)


def relabel(name: str, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Rewards and masks of recorded rows under the task of an environment.

    Args:
      name: an environment whose family defines its rewards on recorded states (ogbench, single-task).
      arrays: columns [N, ...] of a dataset, one row per observation; ogbench needs `qpos`, and `button_states` for scenes and puzzles.

    Returns:
      (rewards float32 [N], masks float32 [N]); masks are 0 where the task is solved.

    Raises:
      ValueError: unknown name, no such definition, or a missing column.
    """
    module, identifier = _family(name)
    if not hasattr(module, 'relabel'):
        raise ValueError(f'{name!r} has no rewards for recorded states; use a dataset that brings its own')
    return module.relabel(identifier, arrays)


def unknown(what: str, given: str, known: Any) -> ValueError:
    """A one-line error that ends with the nearest good names, or with all of them if none is near."""
    known = [str(name) for name in known]
    near = difflib.get_close_matches(given, known, n=3, cutoff=0.6)
    hint = f'did you mean {" or ".join(near)}?' if near else f'known: {", ".join(known[:12])}{", ..." if len(known) > 12 else ""}'
    return ValueError(f'unknown {what} {given!r}; {hint}')


def check_no_options(name: str, options: Mapping[str, Any], allowed: Any = ()) -> None:
    """Raises ValueError if `options` has names other than `allowed`: an option without effect would be a silent bug."""
    for option in options:
        if option not in allowed:
            takes = f'it takes {", ".join(sorted(allowed))}' if allowed else 'it takes none'
            raise ValueError(f'{name} has no option {option!r}; {takes}')


def _check_options(name: str, constructor: Callable, options: Mapping[str, Any]) -> None:
    try:
        inspect.signature(constructor).bind(1, **options)
    except TypeError as error:
        allowed = list(inspect.signature(constructor).parameters)[1:]
        raise ValueError(f'{name!r}: {error}; its options are {", ".join(allowed) or "none"}') from None


def _module(family: str) -> Any:
    return importlib.import_module(_FAMILIES[family])


def _family(name: str) -> tuple[Any, str]:
    """The module and the canonical identifier that a built-in name means."""
    parsed = parse(name)
    if parsed.family in _FAMILIES:
        module = _module(parsed.family)
        return module, module.canonical(parsed.identifier)
    base = name.partition(':')[0]
    for family in _FAMILIES:  # a forgotten or misspelt family in front of a good name
        try:
            identifier = _module(family).canonical(parsed.identifier)
        except ValueError:
            continue
        raise ValueError(f'unknown environment {base!r}; did you mean {family}/{identifier}?')
    raise unknown('environment', base, [*_REGISTERED, *(f'{family}/...' for family in _FAMILIES)])
