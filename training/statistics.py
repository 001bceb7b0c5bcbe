"""Statistics of a few seeds: robust means with intervals, and tests for the comparison of two arms.

Scores are [S] or [S, K]: S seeds (runs), K tasks. Higher is better where a direction matters. numpy, and scipy for the two tests.
A score that is NaN makes each figure NaN, because dropping a failed run would flatter its method: give it its worst value first.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

EXACT_PAIRS = 14  # up to here the signed-rank test enumerates all 2^n signs


def iqm(scores: Any) -> float:
    """Interquartile mean: the mean of what is left after floor(n / 4) of all n values are cut off at either end.

    Source: Agarwal et al. 2021 (arXiv 2108.13264), section 4.3; the same as `scipy.stats.trim_mean(scores, 0.25, axis=None)`.
    """
    values = np.sort(_finite_or_nan(scores).ravel())
    cut = values.size // 4
    return float(np.mean(values[cut : values.size - cut]))


def stratified_bootstrap_interval(
    scores: Any,
    statistic: Callable[[np.ndarray], float] = iqm,
    num_resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile interval of a statistic when the seeds are drawn again, for each task by itself.

    Source: Agarwal et al. 2021 (arXiv 2108.13264), section 4.1.

    Args:
      scores: [S] or [S, K].
      statistic: takes scores of the same shape.
      num_resamples: number of bootstrap samples.
      confidence: mass inside the interval.
      seed: of the resampling.

    Returns:
      (low, high); NaN for a single seed, whose scatter is unknown.
    """
    table = _table(scores)
    if np.shape(scores)[0] == 1 or np.isnan(table).any():
        return float('nan'), float('nan')
    generator = np.random.default_rng(seed)
    draws = np.empty(num_resamples)
    for index in range(num_resamples):
        rows = generator.integers(len(table), size=table.shape)
        draws[index] = statistic(np.take_along_axis(table, rows, axis=0).reshape(np.shape(scores)))
    tail = (1 - confidence) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return float(low), float(high)


def paired_bootstrap_interval(
    a: Any,
    b: Any,
    statistic: Callable[[np.ndarray], float] = iqm,
    num_resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Interval of a statistic of the differences a - b of two arms that share their seeds: pairs are drawn again together.

    Args:
      a: [S] or [S, K], row s from seed s.
      b: like `a`, rows in the same order.
      statistic, num_resamples, confidence, seed: see `stratified_bootstrap_interval`.
    """
    return stratified_bootstrap_interval(_differences(a, b), statistic, num_resamples, confidence, seed)


def probability_of_improvement(a: Any, b: Any) -> float:
    """Chance that a run of `a` beats a run of `b` on the same task, ties counted half, mean over tasks (Mann-Whitney's U / (S_a S_b)).

    Source: Agarwal et al. 2021 (arXiv 2108.13264), section 4.3.

    Args:
      a: [S_a] or [S_a, K].
      b: [S_b] or [S_b, K]; the seeds need not be the same ones.
    """
    first, second = _table(a), _table(b)
    if first.shape[1] != second.shape[1]:
        raise ValueError(f'both arms need the same tasks: {first.shape[1]} and {second.shape[1]}')
    if np.isnan(first).any() or np.isnan(second).any():
        return float('nan')
    wins = (first[:, None] > second[None]) + 0.5 * (first[:, None] == second[None])
    return float(np.mean(wins))


def holm(p_values: Any) -> np.ndarray:
    """Adjusted p-values [n] that keep the chance of any false discovery in the family below the level they are compared with.

    The k-th smallest of n is multiplied by n - k + 1, and none may fall below a smaller one's. Source: Holm 1979 (Scand. J. Statist. 6).
    """
    values = np.asarray(p_values, np.float64)
    if values.ndim != 1 or not np.all((values >= 0) & (values <= 1)):
        raise ValueError(f'p-values are a list of numbers in [0, 1], not {p_values}')
    order = np.argsort(values, kind='stable')
    stepped = np.maximum.accumulate(values[order] * np.arange(values.size, 0, -1))
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


def wilcoxon(a: Any, b: Any, alternative: str = 'two-sided') -> float:
    """p-value of Wilcoxon's signed-rank test of paired scores [S] (scipy). Pairs without a difference are dropped; 1 if none is left.

    Success rates come in few steps, so ties are the rule and tables for untied ranks do not hold: up to EXACT_PAIRS pairs all signs are
    enumerated.

    Args:
      a: [S], row s from seed s.
      b: [S], in the same order.
      alternative: 'two-sided', 'greater' (a > b) or 'less'.
    """
    from scipy import stats

    difference = _paired(a, b)
    # Rounded, or 0.3 - 0.2 and 0.2 - 0.1 would not tie; only ranks matter, so the scale is free.
    difference = np.round(difference / max(np.max(np.abs(a)), np.max(np.abs(b)), np.finfo(float).tiny), 10)
    difference = difference[difference != 0]
    if difference.size == 0:
        return 1.0
    method: Any = stats.PermutationMethod(n_resamples=2**EXACT_PAIRS) if 2 <= difference.size <= EXACT_PAIRS else 'auto'
    result: Any = stats.wilcoxon(difference, alternative=alternative, method=method)
    return float(result.pvalue)


def tost_paired(a: Any, b: Any, margin: float) -> float:
    """p-value of 'the mean difference lies within -margin .. margin': the larger one of two one-sided paired t tests.

    Source: Schuirmann 1987 (J. Pharmacokinet. Biopharm. 15). Small: the arms are equivalent at this margin.

    Args:
      a: [S], row s from seed s.
      b: [S], in the same order.
      margin: > 0, in units of the score; to be fixed before looking.
    """
    from scipy import stats

    difference = _paired(a, b)
    if not margin > 0 or difference.size < 2:
        raise ValueError(f'equivalence needs a positive margin and two pairs or more, not {margin} and {difference.size}')
    error = np.std(difference, ddof=1) / np.sqrt(difference.size)
    if error == 0:
        return 0.0 if abs(difference[0]) < margin else 1.0
    distances = np.array([margin - np.mean(difference), margin + np.mean(difference)])  # to the upper and to the lower limit
    return float(np.max(stats.t.sf(distances / error, difference.size - 1)))


def summarise(per_seed: Any) -> dict[str, Any]:
    """{'iqm', 'ci95' [low, high], 'mean', 'min' (worst seed if higher is better), 'n'} of one score per seed [S], as Python numbers."""
    values = _finite_or_nan(per_seed)
    if values.ndim != 1:
        raise ValueError(f'summarise takes one score per seed, not an array of shape {values.shape}')
    return {
        'iqm': iqm(values),
        'ci95': list(stratified_bootstrap_interval(values)),
        'mean': float(np.mean(values)),
        'min': float(np.min(values)),
        'n': int(values.size),
    }


def _finite_or_nan(scores: Any) -> np.ndarray:
    """float64 copy; all NaN if any entry is (sorting would put a NaN on top, where the trimming hides it)."""
    values = np.asarray(scores, np.float64)
    if values.size == 0:
        raise ValueError('there are no scores')
    return np.full_like(values, np.nan) if np.isnan(values).any() else values


def _table(scores: Any) -> np.ndarray:
    values = _finite_or_nan(scores)
    if values.ndim not in (1, 2):
        raise ValueError(f'scores are [seeds] or [seeds, tasks], not of shape {values.shape}')
    return values.reshape(len(values), -1)


def _differences(a: Any, b: Any) -> np.ndarray:
    first, second = _finite_or_nan(a), _finite_or_nan(b)
    if first.shape != second.shape:
        raise ValueError(f'paired scores need equal shapes, not {first.shape} and {second.shape}')
    return first - second


def _paired(a: Any, b: Any) -> np.ndarray:
    difference = _differences(a, b)
    if difference.ndim != 1 or not np.isfinite(difference).all():
        raise ValueError('a paired test takes one finite score per seed: give a failed run its worst value first')
    return difference
