"""Where every random number of a run comes from.

Seed s is `jax.random.key(s)`. Each use has its stream `fold_in(key, TAG)`; nothing else folds into the seed's key. Inside a stream, names
fold in by a hash and counters as they are, so no key is used twice, a seed's keys do not depend on how many seeds or settings run beside
it, and evaluating more often changes nothing.
"""

import hashlib

import jax
from jax import Array

INIT, UPDATE, ROLLOUT, EVAL, DATA = range(5)


def stream(seed_key: Array, tag: int) -> Array:
    """The stream of one use, from the key of a seed (which is not consumed)."""
    return jax.random.fold_in(seed_key, tag)


def named(key: Array, name: str) -> Array:
    """A sub-stream by name; the same on every machine and in every process."""
    return jax.random.fold_in(key, int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], 'big'))


def update_key(seed_key: Array, phase: str, counter: Array | int) -> Array:
    """Key of one update. `counter` counts the main updates of the whole run, so a second stage repeats nothing."""
    return jax.random.fold_in(named(stream(seed_key, UPDATE), phase), counter)


def data_key(seed_key: Array, phase: str, need: str, counter: Array | int) -> Array:
    """Key of one batch."""
    return jax.random.fold_in(named(named(stream(seed_key, DATA), phase), need), counter)


def action_key(seed_key: Array, source: str, block: Array | int) -> Array:
    """Key of the plan of one block of control steps in an environment."""
    return jax.random.fold_in(named(named(stream(seed_key, ROLLOUT), source), 'act'), block)


def reset_key(seed_key: Array, source: str, slot: Array | int, episode: Array | int) -> Array:
    """Key that starts episode n of slot e."""
    return jax.random.fold_in(jax.random.fold_in(named(named(stream(seed_key, ROLLOUT), source), 'reset'), slot), episode)


def eval_key(seed_key: Array, counter: Array | int, mode: str, block: Array | int) -> Array:
    """Key of the plan of one block of an evaluation after `counter` updates."""
    return jax.random.fold_in(jax.random.fold_in(named(stream(seed_key, EVAL), mode), counter), block)


def start_seed(episode: int) -> int:
    """Integer that starts episode n of every evaluation: the same start states for all seeds, agents and times."""
    return int.from_bytes(hashlib.sha256(f'evaluation start {episode}'.encode()).digest()[:4], 'big') % 2**31
