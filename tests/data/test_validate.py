"""The report of a data file, against counts made by hand."""

from typing import Any

import numpy as np
import pytest

from data import npz, validate


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'a.npz'


def raw() -> dict[str, Any]:
    """Two episodes of 3 and 2 transitions in one dimension; they move by 1, 2, 3 and by 1, 1."""
    return {
        'observations': np.array([[0.0], [1], [3], [6], [5], [6], [7]]),
        'actions': np.array([[0.5, -1], [1, 0], [0, 0], [9, 9], [0.25, 0], [0, -0.5], [9, 9]]),
        'terminals': np.array([0, 0, 0, 1, 0, 0, 1], bool),
    }


def test_a_sound_file(path):
    np.savez(path, **raw())
    report = validate.validate(path)
    assert (report.layout, report.rows, report.episodes, report.transitions) == ('raw', 7, 2, 5)
    assert (report.length_min, report.length_mean, report.length_max) == (2, 2.5, 3)
    assert (report.observation_shape, report.observation_range) == ((1,), (0, 7))
    # Final rows' actions (9) lead nowhere and do not count: 2 of 10 entries, -1 and 1, are at the limit.
    assert (report.action_size, report.action_range, report.action_limit_share) == (2, (-1, 1), 0.2)
    # Changes 1, 2, 3, 1, 1; from 6 to 5 a new episode begins.
    assert (report.gap_median, report.gap_max, report.gap_row) == (1, 3, 2)
    assert report.defects == report.warnings == ()
    text = validate.format(report)
    assert '2 episodes, 5 transitions, 7 observations' in text
    assert 'largest 3 at row 2' in text
    assert '20.0% with |a| >= 1' in text
    assert 'rewards' not in text


def test_numbers_do_not_depend_on_the_block_size(path, monkeypatch):
    np.savez(path, **raw())
    whole = validate.validate(path)
    monkeypatch.setattr(validate, 'ROWS_PER_BLOCK', 2)
    assert validate.validate(path) == whole


def test_non_finite_numbers_are_counted_and_left_out_of_ranges(path):
    data = raw()
    data['observations'][1] = np.nan
    data['actions'][0] = [np.inf, np.nan]
    np.savez(path, **data)
    report = validate.validate(path)
    assert report.non_finite == {'observations': 1, 'actions': 2}
    assert report.observation_range == (0, 7)
    assert (report.gap_median, report.gap_max, report.gap_row) == (1, 3, 2)  # 3, 1 and 1 remain
    assert [defect.split(';')[0] for defect in report.defects] == ['observations holds 1 NaN or Inf', 'actions holds 2 NaN or Inf']


def test_nothing_but_nan(path):
    data = raw()
    data['observations'][:] = np.nan
    np.savez(path, **data)
    report = validate.validate(path)
    assert np.isnan([*report.observation_range, report.gap_median, report.gap_max]).all()
    assert validate.format(report)


def test_unmarked_ends(path):
    data = raw()
    data['terminals'][-1] = False
    np.savez(path, **data)
    assert ['last row (6)' in defect for defect in validate.validate(path).defects] == [True]


def test_a_jump_is_pointed_at(path):
    data = raw()
    data['observations'] = np.array([[0.0], [1], [2], [3], [50], [51], [52]])
    data['terminals'] = np.array([0, 0, 0, 0, 0, 0, 1], bool)  # the end after row 3 is not marked
    np.savez(path, **data)
    report = validate.validate(path)
    assert report.gap_row == 3
    assert ['after row 3 is 47 times the median' in warning for warning in report.warnings if 'actions' not in warning] == [True]
    assert report.defects == ()


def test_repeated_and_empty_episodes_and_large_actions(path):
    one = raw()
    two: dict[str, Any] = {
        name: np.concatenate([x, x[:4], x[3:4]]) for name, x in one.items()
    }  # the first episode again, then a lonely final row
    two['actions'][0] = 1.5
    np.savez(path, **two)
    report = validate.validate(path)
    assert (report.episodes, report.repeated_episodes, report.length_min) == (4, 1, 0)
    assert len(report.warnings) == 3
    assert 'warning: 1 episodes repeat' in validate.format(report)


def test_rewards_and_masks(path):
    # Mask 0 at rows 1 (inside), 2 (end of the first episode) and 6 (a final row: no transition).
    data = {**raw(), 'rewards': np.array([-1, 0, 0, 77, -1, -1, 77]), 'masks': np.array([1, 0, 0, 1, 1, 1, 0])}
    np.savez(path, **data)
    report = validate.validate(path)
    assert (report.reward_range, report.mask_zeros, report.mask_zeros_inside) == ((-1, 0), 2, 1)
    assert report.defects == ()
    assert '0 at 2 transitions, 1 of them before the end' in validate.format(report)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'rewards': np.zeros(7)}, 'there are rewards but no masks'),
        ({'masks': np.ones(7)}, 'there are masks but no rewards'),
        ({'rewards': np.zeros(7), 'masks': np.full(7, 0.5)}, '7 rows are neither'),
        ({'rewards': np.full(7, np.nan), 'masks': np.ones(7)}, 'rewards holds 7 NaN or Inf'),
    ],
)
def test_rewards_and_masks_that_do_not_agree(path, change, message):
    np.savez(path, **raw(), **change)
    assert [message in defect for defect in validate.validate(path).defects] == [True]


def test_rewards_of_another_length_cannot_be_read(path):
    np.savez(path, **raw(), rewards=np.zeros(6), masks=np.ones(7))
    with pytest.raises(npz.DataError, match=r'columns differ in length .*rewards 6'):
        validate.validate(path)


def test_regular_layout_and_images(path):
    np.savez(
        path,
        observations=np.zeros((2, 2, 2, 3), np.uint8),
        next_observations=np.array([np.zeros((2, 2, 3)), np.full((2, 2, 3), 2)], np.uint8),
        actions=np.zeros((2, 1)),
        terminals=[0, 1],
        qpos=np.zeros((2, 3)),
    )
    report = validate.validate(path)
    assert (report.layout, report.rows, report.transitions) == ('regular', 3, 2)
    assert report.gap_max == np.sqrt(12 * 4)
    assert report.non_finite == {}  # the simulator's state at the final observation was never recorded
    assert report.defects == ()
