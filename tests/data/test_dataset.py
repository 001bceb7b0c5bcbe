"""Building and describing datasets."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from data import dataset
from envs import types as env_types

ROOT = Path(__file__).resolve().parents[2]


def columns(lengths):
    n = sum(lengths) + len(lengths)
    return {
        'observations': np.arange(2.0 * n).reshape(n, 2),
        'actions': np.full((n, 1), 0.5),
        'rewards': np.arange(n),
        'masks': np.ones(n),
        'lengths': lengths,
    }


def test_index_arrays_of_two_episodes_and_a_single_observation():
    # rows:  0 1 2 | 3 | 4 5        episodes of 2, 0 and 1 transitions
    given = columns([2, 0, 1])
    given['masks'][1] = 0  # the first episode ends in a true terminal
    given['masks'][2] = 0  # the final row's mask is not a transition's: it is replaced
    built = dataset.from_trajectories(**given, extras={'qpos': np.ones((6, 3))})
    np.testing.assert_array_equal(built.steps_left, [2, 1, 0, 0, 1, 0])
    np.testing.assert_array_equal(built.steps_done, [0, 1, 2, 0, 0, 1])
    np.testing.assert_array_equal(built.transition_rows, [0, 1, 4])
    np.testing.assert_array_equal(built.episode_starts, [0, 3, 4])
    np.testing.assert_array_equal(built.episode_lengths, [2, 0, 1])
    np.testing.assert_array_equal(built.rewards, [0, 1, 0, 0, 4, 0])
    np.testing.assert_array_equal(built.masks, [1, 0, 1, 1, 1, 1])
    np.testing.assert_array_equal(built.truncations, [0, 0, 0, 0, 1, 0])
    np.testing.assert_array_equal(built.actions[:, 0], [0.5, 0.5, 0, 0, 0.5, 0])
    assert given['rewards'][2] == 2  # the caller's arrays are untouched
    assert built.observations.dtype == built.rewards.dtype == built.extras['qpos'].dtype == np.float32
    assert built.steps_left.dtype == built.transition_rows.dtype == built.episode_starts.dtype == np.int32


def test_dict_observations_and_images_keep_their_form():
    given = columns([1])
    given['observations'] = {'image': np.zeros((2, 4, 4, 3), np.uint8), 'state': np.array([[1.0], [3.0]])}
    built = dataset.from_trajectories(**given)
    assert built.observations['image'].dtype == np.uint8
    moments = dataset.statistics(built)
    assert isinstance(moments['state'], env_types.Statistics)
    assert (moments['state'].mean, moments['state'].std) == ([2.0], [1.0])
    assert moments['image'].mean.shape == (4, 4, 3)


def test_statistics_are_taken_in_float64_over_all_rows(monkeypatch):
    monkeypatch.setattr(dataset, 'ROWS_PER_BLOCK', 2)  # several blocks
    given = columns([4])
    # Mean 1e6 and deviations -2, -1, 0, 1, 2: variance 10 / 5 = 2, which float32 sums of squares around 1e12 would lose.
    given['observations'] = (1e6 + np.arange(-2.0, 3.0))[:, None]
    moments = dataset.statistics(dataset.from_trajectories(**given))
    np.testing.assert_allclose(moments.std, [np.sqrt(2)], rtol=1e-6)
    np.testing.assert_array_equal([moments.mean, moments.minimum, moments.maximum], [[1e6], [1e6 - 2], [1e6 + 2]])
    assert all(x.dtype == np.float32 for x in moments)


def test_size_and_hash():
    built = dataset.from_trajectories(**columns([2, 1]))
    # 5 rows: observations 40 + actions 20 + rewards, masks, truncations, steps_left, steps_done 5 x 20; 3 transitions 12; 2 episodes 16
    assert dataset.nbytes(built) == 40 + 20 + 100 + 12 + 16
    digest = dataset.dataset_hash(built)
    assert len(digest) == 16
    assert digest == dataset.dataset_hash(jax.device_put(built))
    changed = columns([2, 1])
    changed['observations'][3, 1] += 1
    assert digest != dataset.dataset_hash(dataset.from_trajectories(**changed))
    assert digest != dataset.dataset_hash(built._replace(rewards=built.rewards.astype(np.float64)))
    # The same bytes under other names or shapes are another dataset.
    assert digest != dataset.dataset_hash(built._replace(extras={'x': np.zeros((5, 0))}))
    assert digest != dataset.dataset_hash(built._replace(observations=built.observations.reshape(5, 2, 1)))


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'lengths': [3]}, r'observations has shape \(5, 2\).* = 4 rows'),
        ({'lengths': [-1, 4]}, 'non-negative integer'),
        ({'lengths': [2.0, 1.0]}, 'non-negative integer'),
        ({'lengths': [0, 0, 0, 0, 0]}, 'no episode has a transition'),
        ({'rewards': np.zeros(4)}, 'rewards has shape'),
        ({'actions': np.zeros(5)}, 'actions must be'),
        ({'masks': np.full(5, 0.5)}, 'masks may only hold'),
        ({'observations': np.array([['a'] * 2] * 5)}, 'must be numbers'),
        ({'rewards': np.array([0, np.nan, 0, 0, 0])}, r"\['rewards'\] holds NaN or Inf at row 1"),
        ({'observations': {'a': np.array([[0], [0], [np.inf], [0], [0]])}}, r"\['observations'\]\['a'\] holds NaN or Inf at row 2"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_in_one_line(change, message):
    with pytest.raises(ValueError, match=message) as error:
        dataset.from_trajectories(**{**columns([2, 1]), **change})
    assert '\n' not in str(error.value)


def test_importing_data_starts_no_backend_and_files_need_no_jax():
    code = (
        'import sys; import data.npz, data.validate, data.types; assert "jax" not in sys.modules;'
        'import data.dataset, data.replay, data.sampling; from jax._src import xla_bridge; assert not xla_bridge._backends'
    )
    subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=True)
