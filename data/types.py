"""Containers of recorded experience. NamedTuples only; anyone may import this file."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Dataset(NamedTuple):
    """Trajectories on the device, one row per OBSERVATION: an episode of n transitions owns n + 1 rows, so its final observation is kept.

    Row i and row i + 1 form a transition where `steps_left[i] > 0`. The action, reward and mask of a final row are zero, zero, one.
    """

    observations: Any  # [N, ...] or a dict of such
    actions: Any  # [N, A]
    rewards: Any  # float32 [N]
    masks: Any  # float32 [N], 0 only at a true terminal
    truncations: Any  # float32 [N], 1 on the last transition of an episode that did not end in a true terminal
    steps_left: Any  # int32 [N], transitions from this row to the end of its episode; 0 on its final row
    steps_done: Any  # int32 [N], transitions before this row in its episode
    transition_rows: Any  # int32 [T], the rows where a transition starts
    episode_starts: Any  # int32 [M], first row of each episode
    episode_lengths: Any  # int32 [M], its number of transitions
    extras: Mapping[str, Any]  # further columns [N, ...] (qpos, qvel, ...); not sampled


class Replay(NamedTuple):
    """A ring of transitions for each of E environments, in the order in which they were made."""

    columns: Mapping[str, Any]  # leaves [E, C, ...]: observations, actions, rewards, masks, truncations, next_observations, extras
    pointer: Any  # int32 [E], where the next transition goes
    size: Any  # int32 [E], how many are stored
    added: Any  # uint32 [E], how many were ever stored, modulo 2**32
