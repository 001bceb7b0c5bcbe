"""The agent contract. NamedTuples only; anyone may import this file. DESIGN: an algorithm is a few pure functions.

Shapes: B batch rows, L steps of a chunk or window, E environments, T control steps, H steps of a plan, A and O action and observation
entries.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Need(NamedTuple):
    """What one input of a phase looks like. Training turns it into a sampler inside the graph; agents never import data."""

    kind: str  # transitions [B, ...] | chunks [B, L, ...] from t | windows [B, L, ...] up to t, left-padded | rollout [E, T, ...]
    batch_size: int = 0  # 0: all of the source, in blocks [N, B, ...] with `valid`; ignored by rollout
    length: int = 1  # L of chunks and windows; T of a rollout, a multiple of policy.horizon
    source: str = 'data'  # a dataset or an environment: 'rollout' acts in it, the other kinds read what was acted (its replay)
    mode: str = 'explore'  # rollout only: the policy's mode


class Phase(NamedTuple):
    """One kind of update. `update == build(loss)`; wrappers rebuild it from another loss or with a transform at its end."""

    needs: Mapping[str, Need]
    update: Callable  # (state, {name: batch}, step, key) -> (state, {metric: float32 []}); consumes the key
    loss: Callable | None = None  # (params, state, batches, key) -> (scalar, metrics); takes any leading size from the batch
    prepare: Callable | None = None  # (state, batches, key) -> the batches that loss takes (PPO: advantages, flattened)
    build: Callable | None = None  # (loss, transform) -> update; transform: (updates, state) -> (updates, state), last in the chain


class Plan(NamedTuple):
    """Actions for the next control steps of E environments."""

    actions: Any  # float32 [E, H, A]
    length: Any  # int32 [E], 0..H: how many are executed
    extras: Mapping[str, Any]  # leaves [E, H, ...] (log_prob, value, distances), stored beside the transitions


class Policy(NamedTuple):
    """How a state acts. `observe(t)` precedes `plan(t)`; `plan` is called every `horizon` control steps."""

    horizon: int  # control steps that one plan covers
    init: Callable  # (state, num_envs) -> memory, every leaf [E, ...]; () if none
    observe: Callable  # (state, memory, timestep) -> memory; every control step, no network
    plan: Callable  # (state, memory, timestep, key, mode) -> (Plan, memory); consumes the key
    routes: Mapping[str, Callable] | None = None  # alternatives to plan for dispatch on the host; route i gets fold_in(key, i)
    route: Callable | None = None  # (state, memory, timestep) -> int32 [E]; plan == select(routes, route)
    modes: tuple[str, ...] = ('eval', 'explore')  # what `mode` may be; training refuses others before it acts


class Agent(NamedTuple):
    """An algorithm. Not hashable and not a jit argument: close over it.

    `state` is a NamedTuple of arrays with at least `params`, `hyper` (dict of float32 scalars) and `aux` (dict for wrappers, keyed by their
    name; agents never read it). Nothing is hidden outside it and no shape in it changes after `init`.
    """

    init: Callable  # (key, hyper) -> state; consumes the key; hyper: {name: float32 []}, already complete
    phases: Mapping[str, Phase]  # 'train' always
    policy: Policy
    adopt: Mapping[str, Callable]  # name -> (state, other_state) -> state: start from another run's networks
    hyper: Mapping[str, float]  # defaults of what may be swept under vmap


class Stage(NamedTuple):
    """A run is a list of stages. Riders (`every`) run BEFORE the main update, whenever step % period == 0."""

    phase: str
    count: int
    every: Mapping[str, int] | None = None
    data: Mapping[str, Any] | None = None  # other sources for this stage only
