"""The shapes that environments and agents agree on. NamedTuples only; anyone may import this file."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


class ArraySpec(NamedTuple):
    """Shape and bounds of one array, without the batch axis."""

    shape: tuple[int, ...]
    minimum: float = -np.inf  # one bound for every entry
    maximum: float = np.inf
    dtype: str = 'float32'


class Statistics(NamedTuple):
    """Per-entry moments of the observations of one named split, fixed for the whole run. Each field has the observation's shape."""

    mean: Any
    std: Any
    minimum: Any
    maximum: Any


class Spec(NamedTuple):
    """What an agent needs to know of its task before it sees any data."""

    observations: Any  # ArraySpec, or a dict of them
    actions: ArraySpec
    horizon: int  # control steps after which an episode is cut; 0: never
    statistics: Any = None  # Statistics (or a dict of them, like observations); None: unknown
    predict_mask: Any = None  # bool [O], the observation entries worth predicting; None: all


class TimeStep(NamedTuple):
    """What a policy sees at one control step of E environments; every leaf is [E, ...].

    Where `first`, `observation` is the new episode's, while `reward`, `mask`, `truncation`, `previous_action` and `final_observation`
    still describe the step that ended the old one (zeros, mask 1, before any step). A policy that feeds on them zeroes them there.
    """

    observation: Any
    reward: Any  # float32 [E]
    mask: Any  # float32 [E], 0 only at a true terminal: multiply the bootstrap with it
    truncation: Any  # float32 [E], 1 where a time limit cut the episode
    first: Any  # bool [E]
    previous_action: Any  # float32 [E, A]
    final_observation: Any  # the observation that the last step led to, before any reset


class EnvState(NamedTuple):
    """State of ONE on-device environment (training vmaps it). `step` never resets: that is training's business."""

    physics: Any
    observation: Any
    reward: Any  # float32 []
    mask: Any  # float32 [], 0 at a true terminal
    truncation: Any  # float32 [], 1 at the time limit
    metrics: Mapping[str, Any]  # float32 [] each; the same keys after reset and step, for example 'success'


class DeviceEnv(NamedTuple):
    """An environment inside the graph: two pure functions."""

    spec: Spec
    reset: Callable  # (key) -> EnvState; consumes the key
    step: Callable  # (EnvState, action [A]) -> EnvState
    on_device: bool = True


class HostStep(NamedTuple):
    """Result of one control step of a block of E host environments; numpy arrays. Rows of inactive slots repeat the last result."""

    observations: Any  # [E, ...], the state that the step led to, before any reset
    rewards: Any  # float32 [E]
    masks: Any  # float32 [E]
    truncations: Any  # float32 [E]
    metrics: Mapping[str, Any]  # float32 [E] each, for example 'success'
