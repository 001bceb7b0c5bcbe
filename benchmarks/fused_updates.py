"""Many updates fused into one dispatch against one dispatch per update: the same updates, the same numbers."""

import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import agents
from agents.types import Stage
from data.dataset import from_trajectories
from envs.types import ArraySpec, Spec
from training import loop, members

UPDATES, REPEATS = 50, 7
SIZES = {'hidden_sizes': (64, 64), 'critic_hidden_sizes': (64, 64), 'num_critics': 2, 'batch_size': 128}


def run(peer: Path | None) -> dict[str, Any]:
    """Seconds per update both ways, interleaved, median of REPEATS. `peer` is not used: both sides are ours."""
    if peer is not None:
        raise ValueError('benchmark fused_updates compares two ways of running our own code: leave out --peer')
    random = np.random.default_rng(0)
    rows = 1001 * 10
    dataset = from_trajectories(
        random.standard_normal((rows, 2)).astype(np.float32),
        random.uniform(-1, 1, (rows, 2)).astype(np.float32),
        -np.ones(rows, np.float32),
        np.ones(rows, np.float32),
        np.full(10, 1000),
    )
    agent = agents.make('trqam', Spec(ArraySpec((2,)), ArraySpec((2,), -1, 1), 1000), **SIZES)
    team = members.over_grid(agent, [0])
    sources = loop.Sources({'data': jax.tree.map(jnp.asarray, dataset)}, {})
    keys, stage = members.seed_keys(team), Stage('train', UPDATES)

    def fresh() -> Any:
        init = jax.jit(jax.vmap(lambda state, key: loop.init_carry(agent, sources, [], 1, state, key)))
        return jax.tree.map(jnp.copy, init(members.init_states(agent, team), keys))

    call = jax.jit(loop.make_call(agent, stage, sources), donate_argnums=0)
    began = time.perf_counter()
    compiled = call.lower(fresh(), keys, sources.datasets, jnp.int32(0), jnp.int32(0), jnp.int32(1)).compile()
    compile_seconds = time.perf_counter() - began

    def measure(size: int) -> tuple[float, Any]:
        carry = jax.block_until_ready(fresh())
        counters = [jnp.int32(start) for start in range(0, UPDATES, size)]
        began = time.perf_counter()
        for counter in counters:
            carry, metrics = compiled(carry, keys, sources.datasets, counter, counter, jnp.int32(size))
            np.asarray(metrics['critic/loss'])
        return (time.perf_counter() - began) / UPDATES, jax.device_get(carry.state.params)

    times: dict[int, list[float]] = {UPDATES: [], 1: []}
    states: dict[int, Any] = {}
    for _ in range(REPEATS):
        for size in times:
            seconds, states[size] = measure(size)
            times[size].append(seconds)
    equal = all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(states[1]), jax.tree.leaves(states[UPDATES]), strict=True))
    return {
        'fused_ms_per_update': 1e3 * float(np.median(times[UPDATES])),
        'single_ms_per_update': 1e3 * float(np.median(times[1])),
        'ratio_fused_to_single': float(np.median(np.asarray(times[UPDATES]) / np.asarray(times[1]))),
        'bit_identical': equal,
        'compile_seconds': compile_seconds,
        'flops_of_one_update': (compiled.cost_analysis() or {}).get('flops'),
        'load_average': os.getloadavg(),
        'updates': UPDATES,
        'repeats': REPEATS,
    }
