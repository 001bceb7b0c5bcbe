"""Members of a run: every setting of a grid with every seed, trained side by side in one compiled program."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from agents.types import Agent
from training import streams


class Members(NamedTuple):
    """R members, settings outermost: member = setting * num_seeds + seed."""

    seeds: np.ndarray  # int [R]
    settings: list[str]  # [R], '' without a grid, else 'kl_budget=0.5,tau=0.01'
    hyper: dict[str, np.ndarray]  # float32 [R] each


def over_grid(agent: Agent, seeds: Sequence[int], grid: Mapping[str, Sequence[float]] | None = None) -> Members:
    """The members for some seeds and every combination of the grid's values.

    Raises ValueError for a grid over something that is not a hyper-parameter of the agent, for no values or seeds, for one given twice, or
    for a seed outside 0..2**32 - 1.
    """
    seeds = [int(seed) for seed in seeds]
    if len(set(seeds)) != len(seeds) or not seeds:
        raise ValueError(f'seeds must be given, each once, got {seeds}')
    if min(seeds) < 0 or max(seeds) >= 2**32:
        raise ValueError(f'seeds must lie in 0..{2**32 - 1}, got {seeds}')
    grid = dict(grid or {})
    for name in grid:
        if name not in agent.hyper:
            raise ValueError(f'{name!r} cannot be swept in one program; choose among {", ".join(sorted(agent.hyper))}')
    combinations = list(itertools.product(*grid.values()))
    labels = [','.join(f'{name}={value:g}' for name, value in zip(grid, values, strict=True)) for values in combinations]
    if len(set(labels)) != len(labels) or not labels:
        raise ValueError(f'every value of the grid must be given once and differ in its first 6 digits, got {grid}')
    settings = [{**agent.hyper, **dict(zip(grid, values, strict=True))} for values in combinations]
    hyper = {name: np.repeat(np.asarray([setting[name] for setting in settings], np.float32), len(seeds)) for name in agent.hyper}
    return Members(np.tile(np.asarray(seeds), len(settings)), [label for label in labels for _ in seeds], hyper)


def seed_keys(members: Members) -> jax.Array:
    """One typed key per member, [R]; seed s has the same key whatever runs beside it."""
    return jax.vmap(jax.random.key)(jnp.asarray(members.seeds, jnp.uint32))


def init_states(agent: Agent, members: Members) -> Any:
    """Agent states, leaves [R, ...]."""

    def init(key, hyper):
        return agent.init(streams.stream(key, streams.INIT), hyper)

    hyper = {name: jnp.asarray(values) for name, values in members.hyper.items()}
    return jax.jit(jax.vmap(init))(seed_keys(members), hyper)


def over_seeds(step: Callable) -> Callable:
    """Maps step(carry, key, datasets, fresh, *counters) over members: carry, key and fresh have a leading [R], the rest is shared."""

    def mapped(carry, keys, datasets, fresh, *counters):
        return jax.vmap(step, in_axes=(0, 0, None, 0) + (None,) * len(counters))(carry, keys, datasets, fresh, *counters)

    return mapped


def sharding(num_members: int, num_devices: int) -> tuple[Any, Any]:
    """(sharding of leaves [R, ...] over the first `num_devices` local devices, sharding of what is shared).

    `num_devices` 0 takes as many local devices as divide the members evenly.

    Raises ValueError if the members cannot be divided evenly or there are fewer devices.
    """
    devices = jax.local_devices()
    num_devices = num_devices or max(n for n in range(1, len(devices) + 1) if num_members % n == 0)
    if not 1 <= num_devices <= len(devices):
        raise ValueError(f'--num_devices={num_devices}, but there are {len(devices)} local devices')
    if num_members % num_devices:
        raise ValueError(f'{num_members} members (seeds x settings) cannot be divided over {num_devices} devices: change either number')
    mesh = jax.make_mesh((num_devices,), ('member',), axis_types=(AxisType.Auto,), devices=devices[:num_devices])
    return NamedSharding(mesh, PartitionSpec('member')), NamedSharding(mesh, PartitionSpec())
