"""Statistics against hand values, scipy, and the values of rliable's own metrics tests (Agarwal et al. 2021)."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from training import statistics

RLIABLE_X = [[1, 2], [2, 2], [1, 1], [2, 1]]
RLIABLE_Y = [[1, 1], [2, 2], [3, 3]]
scores = hnp.arrays(np.float64, hnp.array_shapes(min_dims=1, max_dims=2, max_side=12), elements=st.floats(-100, 100))


def test_iqm_by_hand():
    # Eight values: two go at either end, the mean of 3, 4, 5, 6 is 4.5 whatever the ends are.
    assert statistics.iqm([1, 2, 3, 4, 5, 6, 7, 1e9]) == 4.5
    # Five values: floor(5 / 4) = 1 goes at either end.
    assert statistics.iqm([5, 1, 2, 9, 3]) == pytest.approx(10 / 3)
    # Three values: none goes.
    assert statistics.iqm([1, 2, 6]) == 3.0
    # A failed seed may be scored as minus infinity.
    assert statistics.iqm([-np.inf, 2, 3, 4]) == 2.5


def test_values_of_rliable():
    assert statistics.iqm(RLIABLE_X) == 1.5
    assert statistics.iqm(RLIABLE_Y) == 2
    assert statistics.probability_of_improvement(RLIABLE_X, RLIABLE_Y) == pytest.approx(1 / 3)


@given(scores)
def test_iqm_is_scipys_trimmed_mean(values):
    assert statistics.iqm(values) == pytest.approx(stats.trim_mean(values.ravel(), 0.25), abs=1e-9)


def test_nan_shows():
    assert np.isnan(statistics.iqm([1, 2, 3, np.nan]))
    assert np.isnan(statistics.stratified_bootstrap_interval([1, 2, np.nan])).all()
    assert np.isnan(statistics.paired_bootstrap_interval([1, 2, np.nan], [1, 2, 3])).all()
    assert np.isnan(statistics.probability_of_improvement([1.0, np.nan], [1, 2]))
    summary = statistics.summarise([0.5, np.nan])
    assert summary['n'] == 2
    assert np.isnan([summary['iqm'], summary['mean'], summary['min'], *summary['ci95']]).all()
    for test in (statistics.wilcoxon, lambda a, b: statistics.tost_paired(a, b, 1.0)):
        with pytest.raises(ValueError, match='finite'):
            test([1, np.nan, 2], [1, 2, 3])


def test_bootstrap_of_two_values_by_hand():
    # Draws of two from {0, 1}: the mean is 0, 1/2, 1 with chances 1/4, 1/2, 1/4. So the 10% quantile is 0 and the 90% quantile 1; the
    # 30% and 70% quantiles are 1/2.
    assert statistics.stratified_bootstrap_interval([0, 1], np.mean, confidence=0.8) == (0.0, 1.0)
    assert statistics.stratified_bootstrap_interval([0, 1], np.mean, confidence=0.4) == (0.5, 0.5)


@pytest.mark.parametrize('statistic', [np.mean, statistics.iqm])
def test_bootstrap_against_scipy(statistic):
    values = np.random.default_rng(0).normal(size=20)
    ours = statistics.stratified_bootstrap_interval(values, statistic, num_resamples=4000)
    theirs = stats.bootstrap((values,), statistic, vectorized=False, n_resamples=4000, method='percentile', rng=1).confidence_interval
    # Two Monte Carlo estimates; the standard error of such a quantile is about 0.01.
    np.testing.assert_allclose(ours, theirs, atol=0.04)


def test_bootstrap_draws_each_task_by_itself():
    # Two tasks with opposite columns: drawn together their sum is always 1 per row, drawn by themselves it scatters.
    table = np.array([[0.0, 1.0], [1.0, 0.0]] * 5)
    low, high = statistics.stratified_bootstrap_interval(table, np.mean)
    assert low < 0.45
    assert high > 0.55
    # And no value ever moves to another task.
    low, high = statistics.stratified_bootstrap_interval(np.tile([3.0, 7.0], (5, 1)), lambda x: float(x[:, 1].min() - x[:, 0].max()))
    assert (low, high) == (4.0, 4.0)


def test_bootstrap_is_reproducible_and_covers():
    values = np.random.default_rng(1).normal(size=30)
    first = statistics.stratified_bootstrap_interval(values, seed=3)
    assert first == statistics.stratified_bootstrap_interval(values, seed=3)
    assert first != statistics.stratified_bootstrap_interval(values, seed=4)
    # 200 samples of 30 normal numbers: the 95% interval of the mean holds 0 in 95% of them, less the known shortfall of small samples
    # (about 93%); the standard deviation of the count is 1.8%.
    generator = np.random.default_rng(2)
    intervals = [statistics.stratified_bootstrap_interval(generator.normal(size=30), np.mean, num_resamples=300) for _ in range(200)]
    assert 0.87 <= np.mean([low <= 0 <= high for low, high in intervals]) <= 0.985


def test_paired_interval_uses_the_pairs():
    base = np.random.default_rng(0).normal(size=10) * 100
    # The same seeds, each better by exactly 1: no doubt at all, however much the seeds differ.
    np.testing.assert_allclose(statistics.paired_bootstrap_interval(base + 1, base), (1, 1), atol=1e-9)
    low, high = statistics.paired_bootstrap_interval(base + 1, base[::-1])
    assert low < -10
    assert high > 10
    with pytest.raises(ValueError, match='equal shapes'):
        statistics.paired_bootstrap_interval([1, 2], [1, 2, 3])


def test_probability_of_improvement_by_hand():
    # Pairs (a, b) of a = 1, 3 with b = 2, 3: lost, lost, won, drawn -> (0 + 0 + 1 + 1/2) / 4.
    assert statistics.probability_of_improvement([1, 3], [2, 3]) == 0.375
    # A second task that is always won: the mean of 0.375 and 1.
    assert statistics.probability_of_improvement([[1, 9], [3, 9]], [[2, 0], [3, 0]]) == 0.6875


@given(hnp.arrays(np.int64, (5,), elements=st.integers(0, 5)), hnp.arrays(np.int64, (7,), elements=st.integers(0, 5)))
def test_probability_of_improvement_is_mann_whitney(a, b):
    expected = stats.mannwhitneyu(a, b).statistic / (a.size * b.size)
    assert statistics.probability_of_improvement(a, b) == pytest.approx(expected)
    assert statistics.probability_of_improvement(a, b) + statistics.probability_of_improvement(b, a) == pytest.approx(1)


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1: 0.04, 0.06, 0.06, 0.04; none may fall: 0.04, 0.06, 0.06, 0.06.
    np.testing.assert_allclose(statistics.holm([0.04, 0.01, 0.03, 0.02]), [0.06, 0.04, 0.06, 0.06])
    np.testing.assert_allclose(statistics.holm([0.6, 0.7]), [1.0, 1.0])
    assert statistics.holm([]).shape == (0,)
    for bad in ([0.1, np.nan], [1.5], [-0.1], [[0.1]]):
        with pytest.raises(ValueError, match='p-values'):
            statistics.holm(bad)


@given(hnp.arrays(np.float64, st.integers(1, 8), elements=st.floats(0, 1)))
def test_holm_lies_between_raw_and_bonferroni(values):
    adjusted = statistics.holm(values)
    assert np.all(adjusted >= values)
    assert np.all(adjusted <= np.minimum(values * values.size, 1) + 1e-15)
    assert np.all(np.diff(adjusted[np.argsort(values, kind='stable')]) >= 0)


def signed_rank_by_enumeration(difference: np.ndarray) -> float:
    """Two-sided p-value: the share of all 2^n signs whose positive rank sum is at least as far out, doubled from the smaller tail."""
    difference = difference[difference != 0]
    ranks = stats.rankdata(np.abs(difference))
    observed = ranks[difference > 0].sum()
    sums = np.array([np.dot(signs, ranks) for signs in itertools.product((0, 1), repeat=difference.size)])
    return min(1.0, 2 * min(np.mean(sums <= observed + 1e-9), np.mean(sums >= observed - 1e-9)))


def test_wilcoxon_by_hand():
    # Five wins out of five: 2 / 2^5. All rank sums are extreme in one of 32 ways.
    assert statistics.wilcoxon([2, 3, 4, 5, 7], [1, 1, 1, 1, 1]) == pytest.approx(2 / 32)
    assert statistics.wilcoxon([2, 3, 4, 5, 7], [1, 1, 1, 1, 1], 'greater') == pytest.approx(1 / 32)
    assert statistics.wilcoxon([2, 3, 4, 5, 7], [1, 1, 1, 1, 1], 'less') == pytest.approx(1)
    assert statistics.wilcoxon([0.5, 0.7], [0.5, 0.7]) == 1.0
    assert statistics.wilcoxon([0.0, 0.0], [0.0, 0.0]) == 1.0


@given(hnp.arrays(np.int64, (8,), elements=st.integers(-3, 3)))
def test_wilcoxon_with_ties_is_exact(difference):
    expected = signed_rank_by_enumeration(difference) if difference.any() else 1.0
    # In fiftieths, as success rates are, where equal differences are not equal in floating point.
    base = np.arange(8) / 8
    assert statistics.wilcoxon(base + difference / 50, base) == pytest.approx(expected)


def test_wilcoxon_of_many_pairs_is_scipys():
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(2, 30))
    assert statistics.wilcoxon(a, b) == pytest.approx(float(np.asarray(stats.wilcoxon(a, b))[1]))


def test_tost_by_hand():
    # Differences 1, 2, 3: mean 2, standard deviation 1, standard error 1 / sqrt(3). Margin 4: both limits are 2 and 6 away; the nearer one
    # gives t = 2 sqrt(3) with 2 degrees of freedom, where P(T > t) = 1/2 - t / (2 sqrt(2 + t^2)).
    t = 2 * np.sqrt(3)
    assert statistics.tost_paired([1, 2, 3], [0, 0, 0], 4.0) == pytest.approx(0.5 - t / (2 * np.sqrt(2 + t * t)))
    assert statistics.tost_paired([0, 0, 0], [1, 2, 3], 4.0) == pytest.approx(0.5 - t / (2 * np.sqrt(2 + t * t)))
    assert statistics.tost_paired([1, 2, 3], [0, 0, 0], 2.0) == pytest.approx(0.5)
    assert statistics.tost_paired([3, 4], [2, 3], 2.0) == 0.0
    assert statistics.tost_paired([3, 4], [2, 3], 0.5) == 1.0


def test_tost_is_two_t_tests():
    a, b = np.random.default_rng(0).normal(size=(2, 12))
    tests = [stats.ttest_1samp(a - b, limit, alternative=side) for limit, side in ((-0.8, 'greater'), (0.8, 'less'))]
    assert statistics.tost_paired(a, b, 0.8) == pytest.approx(max(float(np.asarray(test)[1]) for test in tests))
    for margin in (0.0, -1.0, np.nan):
        with pytest.raises(ValueError, match='positive margin'):
            statistics.tost_paired(a, b, margin)


def test_summarise():
    summary = statistics.summarise(np.array([0.0, 0.5, 0.75, 1.0], np.float32))
    assert summary['iqm'] == 0.625  # the middle two
    assert summary['mean'] == 0.5625
    assert summary['min'] == 0.0
    assert summary['n'] == 4
    low, high = summary['ci95']
    assert 0 <= low < 0.625 < high <= 1
    assert all(type(summary[name]) is float for name in ('iqm', 'mean', 'min'))
    one = statistics.summarise([0.5])
    assert (one['iqm'], one['mean'], one['min'], one['n']) == (0.5, 0.5, 0.5, 1)
    assert np.isnan(one['ci95']).all()  # one seed says nothing about scatter
    for bad in ([], [[1.0, 2.0]]):
        with pytest.raises(ValueError, match=r'scores|score per seed'):
            statistics.summarise(bad)
