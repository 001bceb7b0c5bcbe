"""Sampling from a dataset: shapes, borders, uniformity, transformations."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

from agents.types import Need
from data import dataset, sampling


def build(lengths, terminal=()):
    """Row r observes r and acts r + 0.5 (so that 0 is padding); rewards are 10 + r; masks are 0 at the rows `terminal`."""
    n = sum(lengths) + len(lengths)
    rows = np.arange(n, dtype=np.float32)
    return dataset.from_trajectories(rows[:, None], rows[:, None] + 0.5, 10 + rows, ~np.isin(rows, terminal), lengths)


def test_transitions_hold_the_right_neighbours():
    data = build([2, 1], terminal=[1])  # rows 0 1 2 | 3 4
    batch = sampling.blocks(data, Need('transitions'), 3)
    expected = {
        'observations': [[[0], [1], [3]]],
        'actions': [[[0.5], [1.5], [3.5]]],
        'rewards': [[10, 11, 13]],
        'masks': [[1, 0, 1]],
        'truncations': [[0, 0, 1]],
        'next_observations': [[[1], [2], [4]]],  # the final observations 2 and 4 are reached
        'valid': [[1, 1, 1]],
    }
    assert batch.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(batch[name], values, err_msg=name)
        assert batch[name].dtype == jnp.float32


def test_chunk_repeats_the_last_transition_after_the_end():
    batch = jax.tree.map(lambda x: x[0, 1], sampling.blocks(build([3, 2]), Need('chunks', length=4), 8))  # starts at row 1 of 0..3
    np.testing.assert_array_equal(batch['valid'], [1, 1, 0, 0])
    np.testing.assert_array_equal(batch['observations'][:, 0], [1, 2, 2, 2])
    np.testing.assert_array_equal(batch['next_observations'][:, 0], [2, 3, 3, 3])
    np.testing.assert_array_equal(batch['actions'][:, 0], [1.5, 2.5, 2.5, 2.5])
    np.testing.assert_array_equal(batch['rewards'], [11, 12, 0, 0])
    np.testing.assert_array_equal(batch['masks'], [1, 1, 1, 1])
    np.testing.assert_array_equal(batch['truncations'], [0, 1, 0, 0])


def test_window_is_padded_before_the_start():
    # Episodes own rows 0..2 and 3..6; transition number 3 is row 4, the second of its episode.
    batch = jax.tree.map(lambda x: x[0, 3], sampling.blocks(build([2, 3]), Need('windows', length=4), 8))
    np.testing.assert_array_equal(batch['valid'], [0, 0, 1, 1])
    np.testing.assert_array_equal(batch['observations'][:, 0], [3, 3, 3, 4])
    np.testing.assert_array_equal(batch['actions'][:, 0], [0, 0, 3.5, 4.5])
    np.testing.assert_array_equal(batch['rewards'], [0, 0, 13, 14])
    np.testing.assert_array_equal(batch['masks'], [1, 1, 1, 1])
    np.testing.assert_array_equal(batch['previous_actions'][:, 0], [0, 0, 0, 3.5])
    np.testing.assert_array_equal(batch['previous_rewards'], [0, 0, 0, 13])


def test_window_inside_an_episode_knows_what_was_done_before_it():
    batch = jax.tree.map(lambda x: x[0, 2], sampling.blocks(build([4]), Need('windows', length=2), 4))  # rows 1 and 2
    np.testing.assert_array_equal(batch['valid'], [1, 1])
    np.testing.assert_array_equal(batch['previous_actions'][:, 0], [0.5, 1.5])
    np.testing.assert_array_equal(batch['previous_rewards'], [10, 11])


def reference(lengths, terminal, kind, length, number):
    """Transition `number` by lists: for each step (episode, t, valid), as the docstring of sampling says."""
    episode, t = [(e, t) for e, n in enumerate(lengths) for t in range(n)][number]
    first = sum(lengths[:episode]) + episode
    last = lengths[episode] - 1
    steps = []
    for i in range(length):
        at = t + i if kind == 'chunks' else t - (length - 1) + i
        inside = 0 <= at <= last
        near = first + min(max(at, 0), last)
        mask = 0.0 if near in terminal else 1.0
        step = {
            'observations': near,
            'next_observations': near + 1,
            'actions': near + 0.5 if inside or kind == 'chunks' else 0,
            'rewards': 10 + near if inside else 0,
            'masks': mask if inside else 1,
            'truncations': float(inside and at == last and mask == 1),
            'valid': float(inside),
        }
        if kind == 'windows':
            step['previous_actions'] = near - 0.5 if inside and at > 0 else 0
            step['previous_rewards'] = 9 + near if inside and at > 0 else 0
        steps.append(step)
    return {name: np.array([step[name] for step in steps], np.float32) for name in steps[0]}


blocks = jax.jit(sampling.blocks, static_argnums=(1, 2))


@hypothesis.given(
    # Nine transitions in four episodes, so that every example has the same shapes and compiles once.
    lengths=st.tuples(*[st.integers(0, 9)] * 3).map(lambda cuts: np.diff([0, *sorted(cuts), 9]).tolist()),
    terminal=st.sets(st.integers(0, 12), max_size=4),
    kind=st.sampled_from(['chunks', 'windows']),
    length=st.sampled_from([1, 3, 7]),
)
def test_chunks_and_windows_equal_a_reference_by_lists(lengths, terminal, kind, length):
    data = build(lengths, tuple(terminal))
    batch = jax.device_get(blocks(data, Need(kind, length=length), 9))
    for number in range(9):
        for name, values in reference(lengths, terminal, kind, length, number).items():
            np.testing.assert_array_equal(batch[name][0, number].reshape(-1), values, err_msg=f'{name} of transition {number}')


def test_every_transition_is_equally_likely():
    data = jax.device_put(build([1, 17, 4, 28]))  # 50 transitions
    draw = jax.jit(functools.partial(sampling.sample, need=Need('chunks', 20_000, 2)))
    rows = np.asarray(draw(data, key=jax.random.key(0))['observations'][:, 0, 0]).astype(int)
    counts = np.bincount(rows, minlength=54)
    assert not counts[[1, 19, 24, 53]].any()  # final rows start nothing
    # 49 degrees of freedom; a right sampler fails at this key with probability 0.001
    assert stats.chisquare(counts[data.transition_rows]).pvalue > 0.001


@pytest.mark.parametrize('need', [Need('transitions', 6), Need('chunks', 6, length=3), Need('windows', 6, length=3)])
def test_vmap_over_keys_equals_a_loop_and_jit_equals_eager(need):
    data = jax.device_put(build([3, 5]))
    keys = jax.random.split(jax.random.key(1), 3)
    draw = jax.jit(lambda data, key: sampling.sample(data, need, key))
    together = jax.jit(jax.vmap(draw, in_axes=(None, 0)))(data, keys)
    for i in range(3):
        eager = sampling.sample(data, need, keys[i])
        for name, values in eager.items():
            np.testing.assert_array_equal(values, together[name][i], err_msg=name)
            assert values.shape[:2] == ((6, 3) if need.length == 3 else (6, *values.shape[1:2]))


def test_the_dataset_is_not_copied_per_key():
    data = jax.device_put(build([3, 5]))
    keys = jax.random.split(jax.random.key(1), 100)
    jaxpr = jax.make_jaxpr(jax.vmap(lambda d, k: sampling.sample(d, Need('transitions', 2), k), in_axes=(None, 0)))(data, keys)
    sizes = [variable.aval.size for equation in jaxpr.eqns for variable in equation.outvars]
    assert max(sizes) <= 100 * 2 * 2  # keys, indices and batches only


def test_blocks_hold_every_transition_once_and_pad_the_rest():
    data = build([3, 4])
    batch = sampling.blocks(data, Need('transitions'), 3)
    assert batch['observations'].shape == (3, 3, 1)
    np.testing.assert_array_equal(batch['valid'], [[1, 1, 1], [1, 1, 1], [1, 0, 0]])
    np.testing.assert_array_equal(batch['observations'][batch['valid'] == 1, 0], data.transition_rows)
    np.testing.assert_array_equal(batch['rewards'][2], [10 + 7, 0, 0])
    windows = sampling.blocks(data, Need('windows', length=2), 3)
    assert windows['actions'].shape == (3, 3, 2, 1)
    np.testing.assert_array_equal(windows['valid'][2], [[1, 1], [0, 0], [0, 0]])
    np.testing.assert_array_equal(windows['actions'][2, 1:], np.zeros((2, 2, 1)))
    chunks = sampling.blocks(data, Need('chunks', length=2), 3)
    np.testing.assert_array_equal(chunks['valid'], [[[1, 1], [1, 1], [1, 0]], [[1, 1], [1, 1], [1, 1]], [[1, 0], [0, 0], [0, 0]]])


def test_dict_observations():
    data = build([2, 1])
    data = data._replace(observations={'a': data.observations, 'b': np.repeat(data.observations[:, :, None], 2, axis=2).astype(np.uint8)})
    batch = sampling.blocks(data, Need('chunks', length=2), 3)
    np.testing.assert_array_equal(batch['next_observations']['a'][0, :, 0, 0], [1, 2, 4])
    assert batch['next_observations']['b'].shape == (1, 3, 2, 1, 2)
    assert batch['observations']['b'].dtype == jnp.uint8


@pytest.mark.parametrize(
    ('need', 'message'),
    [
        (Need('rollout', 4), 'transitions, chunks, windows, not .rollout.'),
        (Need('transitions', 0), 'batch_size is 0'),
        (Need('chunks', 4, length=0), 'length is 0'),
    ],
)
def test_senseless_needs_are_refused(need, message):
    with pytest.raises(ValueError, match=message):
        sampling.sample(build([2]), need, jax.random.key(0))


def test_senseless_block_size_is_refused():
    with pytest.raises(ValueError, match='block_size is 0'):
        sampling.blocks(build([2]), Need('transitions'), 0)
