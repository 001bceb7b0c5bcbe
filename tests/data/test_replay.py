"""The ring buffer against lists, and its borders."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

from agents.types import Need
from data import replay
from envs import types as env_types

SPEC = env_types.Spec(env_types.ArraySpec((2,)), env_types.ArraySpec((1,)), horizon=0)
add = jax.jit(replay.add)
blocks = jax.jit(replay.blocks, static_argnums=(1, 2))


def steps(numbers, valid=None, masks=None, truncations=None):
    """Steps [E, T] whose every entry tells their number: observation (n, -n), action n + 0.5, reward 100 + n, next (n + 0.25, ...)."""
    numbers = np.asarray(numbers, np.float32)
    ones = np.ones_like(numbers)
    return {
        'observations': np.stack([numbers, -numbers], axis=-1),
        'actions': numbers[..., None] + 0.5,
        'rewards': 100 + numbers,
        'masks': ones if masks is None else np.asarray(masks, np.float32),
        'truncations': 0 * ones if truncations is None else np.asarray(truncations, np.float32),
        'next_observations': np.stack([numbers + 0.25, numbers], axis=-1),
        'extras': {'log_prob': numbers / 8},
        'valid': ones if valid is None else np.asarray(valid, np.float32),
    }


def empty(capacity, num_envs):
    return replay.init(SPEC, capacity, num_envs, {'log_prob': jax.ShapeDtypeStruct((), np.float32)})


def append(rings, capacity, new):
    """The slow reference: one list of (number, mask, truncation) per environment."""
    for e, ring in enumerate(rings):
        for t in range(new['valid'].shape[1]):
            if new['valid'][e, t]:
                ring.append((float(new['observations'][e, t, 0]), float(new['masks'][e, t]), float(new['truncations'][e, t])))
        del ring[:-capacity]


def reference(ring, age, kind, length):
    """What the batch must hold at transition `age` of a list: walk step by step until an episode or the list ends."""

    def ends(i):
        return ring[i][1] == 0 or ring[i][2] == 1

    inside = [age]
    while kind == 'chunks' and len(inside) < length and inside[-1] + 1 < len(ring) and not ends(inside[-1]):
        inside.append(inside[-1] + 1)
    while kind == 'windows' and len(inside) < length and inside[0] > 0 and not ends(inside[0] - 1):
        inside.insert(0, inside[0] - 1)
    valid = [True] * len(inside)
    padding = length - len(inside)
    walk = inside + [inside[-1]] * padding if kind == 'chunks' else [inside[0]] * padding + inside
    valid = valid + [False] * padding if kind == 'chunks' else [False] * padding + valid
    rows = []
    for i, ok in zip(walk, valid, strict=True):
        number, mask, truncation = ring[i]
        row = {
            'observations': (number, -number),
            'next_observations': (number + 0.25, number),
            'actions': (number + 0.5 if ok or kind == 'chunks' else 0,),
            'rewards': 100 + number if ok else 0,
            'masks': mask if ok else 1,
            'truncations': truncation if ok else 0,
            'valid': float(ok),
            'log_prob': number / 8,
        }
        if kind == 'windows':
            has_previous = ok and i > 0 and not ends(i - 1)
            row['previous_actions'] = (ring[i - 1][0] + 0.5 if has_previous else 0,)
            row['previous_rewards'] = 100 + ring[i - 1][0] if has_previous else 0
        rows.append(row)
    return {name: np.array([row[name] for row in rows], np.float32) for name in rows[0]}


bits = st.lists(st.booleans(), min_size=6, max_size=6)


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    calls=st.lists(st.tuples(bits, bits, bits), max_size=5),
    kind=st.sampled_from(['transitions', 'chunks', 'windows']),
    length=st.sampled_from([1, 2, 6]),  # 6 exceeds the capacity of 4
)
def test_equals_a_reference_by_lists(calls, kind, length):
    ring, rings, added = empty(4, 2), [[], []], np.zeros(2)
    for call, (valid, terminal, truncated) in enumerate(calls):
        numbers = 10 * call + np.arange(3)[None, :] + 1000 * np.arange(2)[:, None]
        valid, terminal, truncated = (np.reshape(x, (2, 3)) for x in (valid, terminal, truncated))
        new = steps(numbers, valid, masks=~terminal, truncations=truncated & ~terminal)
        ring = add(ring, new)
        append(rings, 4, new)
        added += valid.sum(axis=1)
    np.testing.assert_array_equal(ring.added, added)
    np.testing.assert_array_equal(ring.size, [len(x) for x in rings])
    batch = jax.device_get(blocks(ring, Need(kind, length=length), 4))  # block e is environment e, oldest first
    batch['log_prob'] = batch.pop('extras')['log_prob']
    for e, expected in enumerate(rings):
        assert not batch['valid'][e, len(expected) :].any()
        assert not batch['rewards'][e, len(expected) :].any()
        for age in range(len(expected)):
            wanted = reference(expected, age, kind, 1 if kind == 'transitions' else length)
            assert wanted.keys() == batch.keys()
            for name, values in wanted.items():
                values = values[0] if kind == 'transitions' else values
                np.testing.assert_array_equal(batch[name][e, age], values, err_msg=f'{name} of environment {e}, age {age}')


def test_by_hand_after_wrap_around():
    # Capacity 4: numbers 0..5 leave 2, 3, 4, 5 in places 2, 3, 0, 1. The episode ends after 3.
    ring = empty(4, 1)
    ring = add(ring, steps([[0, 1, 2]]))
    ring = add(ring, steps([[3, 4, 5]], truncations=[[1, 0, 0]]))
    np.testing.assert_array_equal(ring.columns['rewards'], [[104, 105, 102, 103]])
    assert (int(ring.pointer[0]), int(ring.size[0]), int(ring.added[0])) == (2, 4, 6)
    chunks = blocks(ring, Need('chunks', length=3), 4)
    np.testing.assert_array_equal(chunks['rewards'][0], [[102, 103, 0], [103, 0, 0], [104, 105, 0], [105, 0, 0]])
    np.testing.assert_array_equal(chunks['truncations'][0], [[0, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]])  # no border is invented
    np.testing.assert_array_equal(chunks['masks'], np.ones((1, 4, 3)))
    windows = blocks(ring, Need('windows', length=2), 4)
    np.testing.assert_array_equal(windows['rewards'][0], [[0, 102], [102, 103], [0, 104], [104, 105]])
    np.testing.assert_array_equal(windows['previous_rewards'][0], [[0, 0], [0, 102], [0, 0], [0, 104]])  # 1 is forgotten


def test_invalid_steps_are_not_stored():
    ring = add(empty(3, 2), steps([[0, 1, 2], [5, 6, 7]], valid=[[0, 1, 0], [1, 0, 1]]))
    np.testing.assert_array_equal(ring.size, [1, 2])
    np.testing.assert_array_equal(ring.columns['rewards'], [[101, 0, 0], [105, 107, 0]])
    unchanged = add(ring, steps([[8], [9]], valid=[[0], [0]]))
    jax.tree.map(np.testing.assert_array_equal, ring, unchanged)


def test_samples_are_uniform_over_what_is_stored():
    ring = empty(40, 3)
    ring = add(ring, steps(np.arange(30)[None, :] + 100 * np.arange(3)[:, None], valid=np.arange(30)[None, :] < [[30], [0], [7]]))
    need = Need('transitions', 20_000)
    batch = jax.jit(functools.partial(replay.sample, need=need))(ring, key=jax.random.key(0))
    numbers = np.asarray(batch['observations'][:, 0]).astype(int)
    values, counts = np.unique(numbers, return_counts=True)
    np.testing.assert_array_equal(values, [*range(30), *range(200, 207)])
    assert stats.chisquare(counts).pvalue > 0.001  # a right sampler fails at this key with probability 0.001
    assert np.asarray(batch['valid']).all()


@pytest.mark.parametrize('kind', ['transitions', 'chunks', 'windows'])
def test_sample_agrees_with_blocks(kind):
    # Blocks are checked against lists above; each sampled row must be one of theirs, whole.
    ring = empty(4, 2)
    for call in range(3):
        ring = add(ring, steps(10 * call + np.arange(6).reshape(2, 3), valid=[[1, 1, 0], [1, 1, 1]], masks=[[1, 0, 1], [1, 1, call != 1]]))
    need = Need(kind, 64, length=3)
    every = jax.tree.map(lambda x: np.asarray(x).reshape(8, -1), blocks(ring, need, 4))
    drawn = jax.tree.map(lambda x: np.asarray(x).reshape(64, -1), replay.sample(ring, need, jax.random.key(2)))
    table = {tuple(np.concatenate(row)) for row in zip(*jax.tree.leaves(every), strict=True)}
    assert {tuple(np.concatenate(row)) for row in zip(*jax.tree.leaves(drawn), strict=True)} == table


@pytest.mark.parametrize('kind', ['transitions', 'chunks', 'windows'])
def test_empty_replay_yields_nothing_valid(kind):
    batch = replay.sample(empty(4, 2), Need(kind, 5, length=3), jax.random.key(0))
    assert not np.asarray(batch['valid']).any()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(batch))


def test_vmap_over_seeds_equals_a_loop():
    need = Need('windows', 8, length=3)
    valid = np.array([[[1, 0, 1]], [[1, 1, 1]]])
    news = [steps(np.arange(3)[None, :] + 50 * s, valid=valid[s]) for s in range(2)]

    def stack(*xs):
        return jnp.stack(xs)

    rings = jax.tree.map(stack, empty(4, 1), empty(4, 1))
    keys = jax.random.split(jax.random.key(3), 2)
    rings = jax.vmap(replay.add)(rings, jax.tree.map(stack, *news))
    batches = jax.vmap(lambda ring, key: replay.sample(ring, need, key))(rings, keys)
    for s in range(2):
        alone = replay.sample(replay.add(empty(4, 1), news[s]), need, keys[s])
        jax.tree.map(np.testing.assert_array_equal, alone, jax.tree.map(lambda x, s=s: x[s], batches))


def test_dict_observations_types_and_size():
    images = env_types.ArraySpec((4, 4, 3), dtype='uint8')
    spec = SPEC._replace(observations={'image': images, 'state': env_types.ArraySpec((2,))})
    # per transition: 2 x (48 + 8) observations, 4 action, 12 reward, mask, truncation = 128; per environment three counters
    assert replay.nbytes(spec, 10, 3) == 3 * (10 * 128 + 12)
    assert replay.nbytes(SPEC, 10, 3, {'log_prob': np.zeros((), np.float32)}) == 3 * (10 * (2 * 8 + 4 + 12 + 4) + 12)
    ring = replay.init(spec, 10, 3)
    assert sum(x.nbytes for x in jax.tree.leaves(ring)) == replay.nbytes(spec, 10, 3)
    new = steps(np.arange(6).reshape(3, 2))
    pair = {'image': np.full((3, 2, 4, 4, 3), 7, np.uint8), 'state': new['observations']}
    ring = replay.add(ring, {**new, 'observations': pair, 'next_observations': pair})
    batch = replay.sample(ring, Need('chunks', 5, length=2), jax.random.key(0))
    assert batch['observations']['image'].dtype == jnp.uint8
    assert (np.asarray(batch['next_observations']['image']) == 7).all()
    assert 'extras' not in batch  # this replay stores none, though the steps had some


def test_size_of_a_replay_that_could_never_be_allocated():
    assert replay.nbytes(SPEC, 2**30, 1) == 2**30 * (2 * 8 + 4 + 12) + 12


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'valid': None}, 'steps lack valid'),
        ({'extras': {}}, 'steps lack log_prob'),
        ({'rewards': np.zeros((2, 5), np.float32)}, '5 steps per environment do not fit a replay of 4'),
        ({'actions': np.zeros((2, 3, 2), np.float32)}, r'was given \(2, 3, 2\)'),
    ],
)
def test_steps_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replay.add(empty(4, 2), {**steps(np.zeros((2, 3))), **change})


@pytest.mark.parametrize(('capacity', 'num_envs', 'message'), [(0, 1, 'at least 1'), (4, 0, 'at least 1'), (2**30, 2, 'int32')])
def test_senseless_sizes_are_refused(capacity, num_envs, message):
    with pytest.raises(ValueError, match=message):
        replay.init(SPEC, capacity, num_envs)


@pytest.mark.parametrize(
    ('need', 'message'),
    [
        (Need('rollout', 4), 'transitions, chunks, windows'),
        (Need('windows', 0), 'batch_size is 0'),
        (Need('chunks', 2, length=-1), 'length is -1'),
    ],
)
def test_senseless_needs_are_refused(need, message):
    with pytest.raises(ValueError, match=message):
        replay.sample(empty(4, 1), need, jax.random.key(0))
