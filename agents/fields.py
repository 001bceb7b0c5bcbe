"""Fields of agent configurations: each carries its comment and its range, and says whether it may be swept under vmap."""

import dataclasses
import math
from typing import Any


def sweepable(default: float, comment: str, low: float = -math.inf, high: float = math.inf) -> Any:
    """A number that changes no shape: it lives in `state.hyper` and may differ between the members of a vmapped grid. Range [low, high]."""
    return dataclasses.field(default=float(default), metadata={'comment': comment, 'low': low, 'high': high, 'sweep': True})


def static(default: Any, comment: str, low: float = -math.inf, high: float = math.inf, choices: tuple[str, ...] | None = None) -> Any:
    """A field that is compiled in: sizes, switches, names. Range [low, high] of a number or of every number in a tuple."""
    return dataclasses.field(default=default, metadata={'comment': comment, 'low': low, 'high': high, 'choices': choices, 'sweep': False})


def hyper(config: Any) -> dict[str, float]:
    """The sweepable fields of a configuration with their values."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.metadata['sweep']}


def validate(config: Any) -> None:
    """Raises ValueError, naming field, value and range, for the first field that is out of range. Call it from `__post_init__`."""
    for field in dataclasses.fields(config):
        check(field, getattr(config, field.name))


def check(field: dataclasses.Field, value: Any) -> None:
    """Raises ValueError if `value` does not fit `field`."""
    metadata, name = field.metadata, field.name
    expected = float if metadata['sweep'] else type(field.default)
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not expected:
        raise ValueError(f'{name}={value!r} must be of type {expected.__name__}')
    if metadata.get('choices') and value not in metadata['choices']:
        raise ValueError(f'{name}={value!r} must be one of {", ".join(metadata["choices"])}')
    if isinstance(value, bool | str):
        return
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f'{name}={value!r} must hold numbers')
        if not (math.isfinite(number) and metadata['low'] <= number <= metadata['high']):
            raise ValueError(f'{name}={value!r} is outside its range [{metadata["low"]:g}, {metadata["high"]:g}]')
