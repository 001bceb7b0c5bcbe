"""The one training loop: a stage of updates as a compiled program.

What an update eats is described by the agent's needs; this file turns them into samplers and rollouts inside the graph. `step` (local to
the stage) and `counter` (of the whole run) are shared by all members and never batched, so that `step % period` stays a real branch under
vmap.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import data.replay
import data.sampling
from agents.types import Agent, Need, Stage
from training import rollout, streams
from training.members import over_seeds

BLOCK_SIZE = 1024  # rows per block when a need takes all of its source
MAX_SKIPPED = 100  # non-finite updates in a row after which a member is frozen as diverged


class Health(NamedTuple):
    """Non-finite updates of one member. They are skipped: the state stays as it was."""

    skipped: Array  # int32 []
    in_a_row: Array  # int32 []
    diverged: Array  # bool []; then frozen for good


class Carry(NamedTuple):
    """Everything that training changes; leaves [R, ...] outside the vmap."""

    state: Any
    rollouts: Mapping[str, rollout.RolloutState]  # by source, environments on the device
    replays: Mapping[str, Any]  # by source
    env_steps: Array  # int32 [], valid control steps taken
    health: Health


class Sources(NamedTuple):
    """Where batches come from."""

    datasets: Mapping[str, Any]  # name -> Dataset on the device; an argument of the compiled program
    envs: Mapping[str, Any]  # name -> DeviceEnv or HostEnv
    num_envs: int = 1  # environments per member


def needs_of(agent: Agent, stages: list[Stage]) -> list[Need]:
    """Every need of every phase that the stages run."""
    phases = {name for stage in stages for name in (stage.phase, *(stage.every or {}))}
    for name in phases:
        if name not in agent.phases:
            raise ValueError(f'the agent has no phase {name!r}; it has {", ".join(agent.phases)}')
    return [need for name in phases for need in agent.phases[name].needs.values()]


def check(agent: Agent, stages: list[Stage], sources: Sources) -> None:
    """Raises ValueError when a phase or a source is missing or a rollout does not fit the policy."""
    for stage in stages:
        known = {*sources.datasets, *sources.envs, *(stage.data or {})}
        for need in needs_of(agent, [stage]):
            if need.source not in known:
                raise ValueError(
                    f'phase {stage.phase!r} needs the source {need.source!r}, but there is only {", ".join(sorted(known)) or "none"}'
                )
            if need.kind == 'rollout' and need.source not in sources.envs:
                raise ValueError(f'phase {stage.phase!r} acts in {need.source!r}, which is a dataset, not an environment')
            if need.kind == 'rollout':
                rollout.check_mode(agent.policy, need.mode)
            if need.kind == 'rollout' and need.length % agent.policy.horizon:
                raise ValueError(f'a rollout of {need.length} control steps is not a multiple of the policy horizon {agent.policy.horizon}')


def on_host(agent: Agent, stage: Stage, sources: Sources) -> bool:
    """Whether the stage acts in an environment outside the graph, so that its updates cannot be fused."""
    return any(need.kind == 'rollout' and not sources.envs[need.source].on_device for need in needs_of(agent, [stage]))


def acted(agent: Agent, stage: Stage, source: str, updates: int) -> int:
    """Most control steps that so many updates of a stage act in each environment of a source."""
    runs = [(stage.phase, updates), *((name, -(-updates // period)) for name, period in (stage.every or {}).items())]
    return sum(
        count * need.length
        for name, count in runs
        for need in agent.phases[name].needs.values()
        if need.kind == 'rollout' and need.source == source
    )


def init_carry(agent: Agent, sources: Sources, needs: list[Need], replay_capacity: int, state: Any, seed_key: Array) -> Carry:
    """The carry of ONE member before its first update (vmap it)."""
    rollouts, replays = {}, {}
    for name, env in sources.envs.items():
        if env.on_device and any(need.kind == 'rollout' and need.source == name for need in needs):
            rollouts[name] = rollout.start(env, agent.policy, state, seed_key, name, sources.num_envs)
        if any(need.kind != 'rollout' and need.source == name for need in needs):
            extras = plan_extras(agent, env, state, sources.num_envs)
            replays[name] = data.replay.init(env.spec, replay_capacity, sources.num_envs, extras)
    zero = jnp.zeros((), jnp.int32)
    return Carry(state, rollouts, replays, zero, Health(zero, zero, jnp.zeros((), bool)))


def empty_replays(shapes: Any, sharding: Any) -> Any:
    """Replays of all members, of the shapes that `init_carry` gives them; made where they stay, so that they are never held twice."""
    # Without a row, every array of data.replay.init is zero.
    return jax.jit(lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), out_shardings=sharding)()


def plan_extras(agent: Agent, env: Any, state: Any, num_envs: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of what a plan stores beside ONE transition."""

    def plan(state):
        observations = jax.tree.map(
            lambda part: jnp.zeros((num_envs, *part.shape), part.dtype),
            env.spec.observations,
            is_leaf=lambda part: hasattr(part, 'minimum'),
        )
        return rollout.first_plan(agent.policy, state, observations, env.spec.actions.shape).extras

    return {name: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype) for name, leaf in jax.eval_shape(plan, state).items()}


def make_phase(agent: Agent, name: str, sources: Sources, rider: bool = False):
    """Builds run(carry, seed_key, datasets, fresh, step, counter) -> (carry, metrics) for one phase and ONE member.

    `fresh` holds, by name of the need, steps that were acted outside the graph. A rider's updates are skipped and counted like others when
    they are not finite, but only main updates make a member diverged or clear its name: a rider that merely acts is always finite.
    """
    phase = agent.phases[name]
    ordered = sorted(phase.needs.items(), key=lambda item: item[1].kind != 'rollout')  # act first, then read what was acted

    def run(carry: Carry, seed_key, datasets, fresh, step, counter):
        rollouts, replays, env_steps, batches = dict(carry.rollouts), dict(carry.replays), carry.env_steps, {}
        for need_name, need in ordered:
            key = streams.data_key(seed_key, name, need_name, counter)
            if need.kind == 'rollout':
                if need_name in fresh:
                    steps = fresh[need_name]
                else:
                    act = rollout.rollout(sources.envs[need.source], agent.policy, need.source, need.length, need.mode)
                    rollouts[need.source], steps = act(carry.state, rollouts[need.source], seed_key)
                env_steps = env_steps + jnp.sum(steps['valid']).astype(jnp.int32)
                if need.source in replays:
                    replays[need.source] = data.replay.add(replays[need.source], steps)
                batches[need_name] = steps
            elif need.source in replays:
                batches[need_name] = _read(data.replay, replays[need.source], need, key)
            else:
                batches[need_name] = _read(data.sampling, datasets[need.source], need, key)
        state, metrics = phase.update(carry.state, batches, step, streams.update_key(seed_key, name, counter))
        state, health = _guarded(state, carry.state, carry.health, rider)
        return Carry(state, rollouts, replays, env_steps, health), {key: jnp.float32(value) for key, value in metrics.items()}

    return run


def _read(module: Any, source: Any, need: Need, key: Array) -> Any:
    return module.sample(source, need, key) if need.batch_size else module.blocks(source, need, BLOCK_SIZE)


def _guarded(new: Any, old: Any, health: Health, rider: bool) -> tuple[Any, Health]:
    """The new state if the update made no number in it infinite or NaN and the member has not diverged, else the old one."""
    sound = [
        jnp.all(jnp.isfinite(a) | (a == b))  # what is infinite by intention, such as a budget without limit, stays as it is
        for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
        if jnp.issubdtype(a.dtype, jnp.floating)
    ]
    finite = jnp.stack(sound).all()
    in_a_row = health.in_a_row if rider else jnp.where(finite, 0, health.in_a_row + 1)
    diverged = health.diverged | (in_a_row >= MAX_SKIPPED)
    keep = finite & ~health.diverged
    state = jax.tree.map(lambda a, b: jnp.where(keep, a, b), new, old)
    return state, Health(health.skipped + ~finite, in_a_row, diverged)


def make_call(agent: Agent, stage: Stage, sources: Sources):
    """Builds call(carry, keys, datasets, step, counter, updates) -> (carry, {metric: [R]}): `updates` updates of a stage for all members.

    One program serves any number of updates, which is why it changes no bit of the result (a scan of another length is another program, and
    XLA rounds it differently). Of each metric the last finite value is kept; NaN if there was none. Metrics of a rider are NaN where it
    did not run.
    """
    main = make_phase(agent, stage.phase, sources)
    riders = [(period, make_phase(agent, name, sources, rider=True)) for name, period in (stage.every or {}).items()]

    def member(carry, seed_key, datasets, fresh, first_step, first_counter, updates):
        def update(carry, step, counter):
            metrics = {}
            for period, rider in riders:

                def run(carry, rider=rider):
                    return rider(carry, seed_key, datasets, fresh, step, counter)

                def skip(carry, run=run):
                    return carry, _missing(jax.eval_shape(run, carry)[1])

                carry, rider_metrics = jax.lax.cond(step % period == 0, run, skip, carry)
                metrics |= rider_metrics
            carry, main_metrics = main(carry, seed_key, datasets, fresh, step, counter)
            return carry, metrics | main_metrics

        def body(index, loop_carry):
            carry, seen = loop_carry
            carry, metrics = update(carry, first_step + index, first_counter + index)
            return carry, jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(new), new, old), metrics, seen)

        seen = _missing(jax.eval_shape(update, carry, first_step, first_counter)[1])
        return jax.lax.fori_loop(0, updates, body, (carry, seen))

    mapped = over_seeds(member)
    return lambda carry, keys, datasets, step, counter, updates: mapped(carry, keys, datasets, {}, step, counter, updates)


def _missing(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, jnp.nan), shapes)
