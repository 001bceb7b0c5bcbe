"""Looks at a data file and says what is in it, what is wrong with it and what is odd about it. numpy only."""

import hashlib
import os
from typing import NamedTuple

import numpy as np

from data import npz

GAP_RATIO = 20.0  # jumps this many times larger than the median are pointed at
ROWS_PER_BLOCK = 65_536  # bounds the float64 copies


class Report(NamedTuple):
    """What `validate` found. Rows count observations and start at 0. Ranges and gaps leave non-finite numbers out."""

    path: str
    layout: str  # raw | compact | regular
    columns: tuple[str, ...]
    rows: int
    episodes: int
    transitions: int
    length_min: int  # transitions per episode
    length_mean: float
    length_max: int
    observation_shape: tuple[int, ...]
    observation_range: tuple[float, float]
    action_size: int
    action_range: tuple[float, float]
    action_limit_share: float  # share of action entries of transitions with |a| >= 1
    gap_median: float  # of |o[t + 1] - o[t]| (Euclidean) over all transitions
    gap_max: float
    gap_row: int  # the t of the largest one
    non_finite: dict[str, int]  # column -> number of NaN and Inf; columns without any are left out
    repeated_episodes: int  # episodes whose observations equal an earlier one's bit for bit
    reward_range: tuple[float, float] | None  # over transitions; None where the file has no rewards
    mask_zeros: int | None  # transitions with mask 0; None where the file has no masks
    mask_zeros_inside: int | None  # of those, how many do not end their episode
    defects: tuple[str, ...]  # what makes the file unusable or unreadable for ogbench
    warnings: tuple[str, ...]  # what deserves a look


def validate(path: str | os.PathLike) -> Report:
    """Examines one file in any of the layouts of `data.npz`.

    Whether a reward belongs to the state before or after its action cannot be told from a file; only its length, its numbers and its
    agreement with the masks are checked.

    Raises:
      DataError: the file cannot be read at all (damaged, a column missing, columns of different lengths, ...).
    """
    recording = npz.load(path)
    arrays = recording.arrays
    observations, actions, lengths = arrays['observations'], arrays['actions'], arrays['lengths']
    finals = np.cumsum(lengths + 1) - 1
    is_transition = np.ones(len(observations), bool)
    is_transition[finals] = False
    transition_rows = np.flatnonzero(is_transition)
    taken = actions[is_transition]

    gaps = _gaps(observations, transition_rows)
    finite_gaps = np.where(np.isfinite(gaps), gaps, -1)
    gap_index = int(finite_gaps.argmax())
    non_finite = {name: int(npz.non_finite(recording, name).sum()) for name in arrays}
    non_finite = {name: count for name, count in non_finite.items() if count}
    rewards, masks = arrays.get('rewards'), arrays.get('masks')
    zeros = None if masks is None else is_transition & (masks == 0)
    report = Report(
        path=str(path),
        layout=recording.layout,
        columns=tuple(name for name in arrays if name != 'lengths'),
        rows=len(observations),
        episodes=len(lengths),
        transitions=len(transition_rows),
        length_min=int(lengths.min()),
        length_mean=float(lengths.mean()),
        length_max=int(lengths.max()),
        observation_shape=observations.shape[1:],
        observation_range=_range(observations),
        action_size=actions.shape[1],
        action_range=_range(taken),
        action_limit_share=float((np.abs(taken) >= 1).mean()),
        gap_median=float(np.median(gaps[np.isfinite(gaps)])) if np.isfinite(gaps).any() else float('nan'),
        gap_max=float(gaps[gap_index]),
        gap_row=int(transition_rows[gap_index]),
        non_finite=non_finite,
        repeated_episodes=_repeated(observations, lengths),
        reward_range=None if rewards is None else _range(rewards[is_transition]),
        mask_zeros=None if zeros is None else int(zeros.sum()),
        mask_zeros_inside=None if zeros is None else int((zeros[:-1] & is_transition[1:]).sum()),
        defects=(),
        warnings=(),
    )
    bad_masks = 0 if masks is None else int((~np.isin(masks, (0, 1)) & np.isfinite(masks)).sum())
    return report._replace(defects=tuple(_defects(report, recording.terminated, bad_masks)), warnings=tuple(_warnings(report)))


def format(report: Report) -> str:
    """The report as lines of text, without its defects (the caller decides where errors go)."""
    low, high = report.observation_range
    action_low, action_high = report.action_range
    lines = [
        f'{report.path}: {report.layout} layout, columns {", ".join(report.columns)}',
        f'  {report.episodes} episodes, {report.transitions} transitions, {report.rows} observations',
        f'  transitions per episode: min {report.length_min}, mean {report.length_mean:.1f}, max {report.length_max}',
        f'  observations {list(report.observation_shape)}: {low:.4g} to {high:.4g}',
        f'  actions [{report.action_size}]: {action_low:.4g} to {action_high:.4g}, {report.action_limit_share:.1%} with |a| >= 1',
        f'  one-step change of observations: median {report.gap_median:.4g}, largest {report.gap_max:.4g} at row {report.gap_row}',
        f'  non-finite numbers: {sum(report.non_finite.values())}; repeated episodes: {report.repeated_episodes}',
    ]
    if report.reward_range is not None:
        lines.append(f'  rewards: {report.reward_range[0]:.4g} to {report.reward_range[1]:.4g}')
    if report.mask_zeros is not None:
        lines.append(f'  masks: 0 at {report.mask_zeros} transitions, {report.mask_zeros_inside} of them before the end of their episode')
    return '\n'.join(lines + [f'  warning: {warning}' for warning in report.warnings])


def _defects(report: Report, terminated: bool, bad_masks: int) -> list[str]:
    defects = [f'{name} holds {count} NaN or Inf; drop those trajectories' for name, count in report.non_finite.items()]
    if not terminated:
        defects.append(f'terminals do not mark the last row ({report.rows - 1}); the last trajectory is cut short: mark or drop it')
    if bad_masks:
        defects.append(f'masks must be 0 or 1, but {bad_masks} rows are neither')
    if (report.reward_range is None) != (report.mask_zeros is None):
        present, absent = ('masks', 'rewards') if report.reward_range is None else ('rewards', 'masks')
        defects.append(f'there are {present} but no {absent}; give both, or neither to take them from the task')
    return defects


def _warnings(report: Report) -> list[str]:
    warnings = []
    if report.gap_max > GAP_RATIO * report.gap_median > 0:
        ratio = report.gap_max / report.gap_median
        warnings.append(f'the change after row {report.gap_row} is {ratio:.0f} times the median; is the end of a trajectory unmarked?')
    if report.repeated_episodes:
        warnings.append(f'{report.repeated_episodes} episodes repeat earlier ones exactly; was one seed used twice?')
    if report.length_min == 0:
        warnings.append('some episodes are a single observation without any transition')
    if max(np.abs(report.action_range)) > 1:
        warnings.append('actions leave [-1, 1]')
    return warnings


def _gaps(observations: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """float64 [T]: the Euclidean norm of each one-step change; NaN or Inf where an observation is."""
    gaps = np.empty(len(rows))
    with np.errstate(invalid='ignore'):
        for start in range(0, len(rows), ROWS_PER_BLOCK):
            block = rows[start : start + ROWS_PER_BLOCK]
            change = observations[block + 1].astype(np.float64) - observations[block]
            gaps[start : start + len(block)] = np.sqrt(np.square(change.reshape(len(block), -1)).sum(axis=1))
    return gaps


def _range(values: np.ndarray) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (float('nan'), float('nan'))


def _repeated(observations: np.ndarray, lengths: np.ndarray) -> int:
    starts = np.cumsum(lengths + 1) - lengths - 1
    hashes = {
        hashlib.sha256(np.ascontiguousarray(observations[start : start + length + 1]).data).digest()
        for start, length in zip(starts, lengths, strict=True)
    }
    return len(lengths) - len(hashes)
