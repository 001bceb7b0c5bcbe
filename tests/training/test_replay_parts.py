"""Replays in append-only parts: what comes back is the ring that was saved, bit for bit, and a row is written once."""

import contextlib
import errno
import functools
import json
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import PyTreeCheckpointer

from data import replay as rings
from data.types import Replay
from envs.types import ArraySpec, Spec
from training import checkpoints, replay_parts
from training.checkpoints import CheckpointError, Checkpoints
from training.replay_parts import Part

SPEC = Spec({'image': ArraySpec((2,), dtype='uint8'), 'state': ArraySpec((3,))}, ArraySpec((1,), -1, 1), 20)
EXTRAS = {'half': jax.ShapeDtypeStruct((2,), jnp.bfloat16), 'chosen': jax.ShapeDtypeStruct((), jnp.bool_)}
add = jax.jit(jax.vmap(rings.add))
columns_of = replay_parts.columns


def empty(capacity, num_members=1, num_envs=1):
    ring = rings.init(SPEC, capacity, num_envs, EXTRAS)
    return jax.tree.map(lambda leaf: jnp.zeros((num_members, *leaf.shape), leaf.dtype), ring)


def steps(numbers, valid=None):
    """Steps [R, E, T] whose entries all follow from their number; some are bits that arithmetic does not keep: -0.0, NaN payloads."""
    numbers = np.asarray(numbers)
    odd = np.where(numbers % 2, np.uint32(0x80000000), 0x7FC00000 + numbers.astype(np.uint32)).view(np.float32)
    observations = {
        'image': np.stack([numbers % 256, numbers // 256 % 256], axis=-1).astype(np.uint8),
        'state': np.stack([numbers.astype(np.float32), np.full(numbers.shape, 1e-40, np.float32), odd], axis=-1),
    }
    return {
        'observations': observations,
        'actions': numbers[..., None] / np.float32(7),
        'rewards': 100 + numbers.astype(np.float32),
        'masks': np.ones(numbers.shape, np.float32),
        'truncations': np.zeros(numbers.shape, np.float32),
        'next_observations': observations,
        'extras': {'half': np.stack([numbers, -numbers], axis=-1).astype(jnp.bfloat16), 'chosen': numbers % 3 == 0},
        'valid': np.ones(numbers.shape) if valid is None else np.asarray(valid, float),
    }


def bits(ring):
    return [(leaf.shape, str(leaf.dtype), np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(ring)]


def assert_same(ring, other):
    assert bits(ring) == bits(other)


def tree_of(ring, step=0):
    return {'replays': {'env': ring}, 'n': np.int32(step)}


def parts_in(store):
    return sorted(path.name for path in store.directory.iterdir() if 'replay' in path.name)


def listed_by(store, step):
    (entries,) = json.loads((store.path(step) / 'parts.json').read_text()).values()
    return [entry['file'] for entry in entries]


def name_of(step):
    return f'step_{step:09d}.replay_0.npz'


def rewards_in(store, step):
    with np.load(store.directory / name_of(step), allow_pickle=False) as part:
        return part["['rewards']"].tolist()


@pytest.fixture(scope='module')
def original(tmp_path_factory):
    """Checkpoints 10, 20 and 30 of a ring of 8 places that got 2, 3 and 2 rows: (store, {step: ring})."""
    store = Checkpoints(tmp_path_factory.mktemp('original') / 'checkpoints', keep=3)
    ring, saved, number = empty(8), {}, 0
    for step, count in ((10, 2), (20, 3), (30, 2)):
        ring = add(ring, steps(number + np.arange(count)[None, None]))
        number += count
        store.save(step, tree_of(ring, step), {})
        saved[step] = ring
    return store, saved


@pytest.fixture
def grown(original, tmp_path):
    """A copy of the original: (store, its lines, {step: ring})."""
    store, saved = original
    shutil.copytree(store.directory, tmp_path / 'checkpoints')
    lines = []
    copy = Checkpoints(tmp_path / 'checkpoints', keep=3, announce=lines.append)
    copy._parts = store._parts
    return copy, lines, saved


def restore(store, template=None, **keywords):
    step, tree, _ = store.restore(tree_of(empty(8) if template is None else template), **keywords)
    return step, tree['replays']['env']


# ------------------------------------------------------------------------------------------------------------------ what is written


def test_by_hand(tmp_path):
    """Capacity 4. Rows 0-2; then 3, 4 (4 takes place 0); then nothing; then 5-8, which overwrite everything."""
    store, ring = Checkpoints(tmp_path, keep=1), empty(4)

    def save(step):
        store.save(step, tree_of(ring, step), {})
        restored_step, restored = restore(Checkpoints(tmp_path), ring)
        assert restored_step == step
        assert_same(restored, ring)
        return listed_by(store, step)

    assert save(1) == []
    ring = add(ring, steps([[[0, 1, 2]]]))
    assert save(2) == [name_of(2)]
    assert rewards_in(store, 2) == [100, 101, 102]
    ring = add(ring, steps([[[3, 4]]]))
    assert np.asarray(ring.columns['rewards']).tolist() == [[[104, 101, 102, 103]]]
    assert save(3) == [name_of(2), name_of(3)]
    assert rewards_in(store, 3) == [103, 104]
    assert save(4) == [name_of(2), name_of(3)]
    ring = add(ring, steps([[[5, 6, 7, 8]]]))
    assert np.asarray(ring.columns['rewards']).tolist() == [[[108, 105, 106, 107]]]
    assert save(5) == parts_in(store) == [name_of(5)]
    assert rewards_in(store, 5) == [105, 106, 107, 108]
    # 9 rows more than the 4 that it holds: only those are new
    for number in range(9, 18):
        ring = add(ring, steps([[[number]]]))
    assert save(6) == parts_in(store) == [name_of(6)]
    assert rewards_in(store, 6) == [114, 115, 116, 117]
    # exactly one round more: pointer and size are as before, the rows are not
    for number in range(18, 22):
        ring = add(ring, steps([[[number]]]))
    assert save(7) == [name_of(7)]
    assert rewards_in(store, 7) == [118, 119, 120, 121]


def test_slots_of_their_own(tmp_path):
    """Two members of two environments; capacity 3. What is not valid is not stored, so pointers and sizes differ."""
    store, ring = Checkpoints(tmp_path, keep=1), empty(3, 2, 2)
    numbers = 10 * np.arange(4).reshape(2, 2, 1) + np.arange(3)
    ring = add(ring, steps(numbers, [[[1, 1, 1], [0, 0, 0]], [[0, 1, 0], [1, 0, 1]]]))
    store.save(1, tree_of(ring), {})
    assert rewards_in(store, 1) == [100, 101, 102, 121, 130, 132]
    ring = add(ring, steps(numbers + 3, [[[1, 0, 0], [0, 0, 0]], [[0, 0, 0], [1, 1, 1]]]))
    store.save(2, tree_of(ring), {})
    assert rewards_in(store, 2) == [103, 133, 134, 135]
    with np.load(tmp_path / name_of(2), allow_pickle=False) as part:
        assert part['ends'].tolist() == [4, 0, 1, 5]
        assert part['counts'].tolist() == [1, 0, 0, 3]
    assert listed_by(store, 2) == [name_of(1), name_of(2)]  # 101, 102 and 121 are still stored
    assert_same(restore(Checkpoints(tmp_path), empty(3, 2, 2))[1], ring)


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    calls=st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=4, max_size=4), st.sampled_from(['', 's', 'r'])), max_size=12),
    first=st.sampled_from([0, 2**32 - 7]),
)
def test_any_order_of_adding_saving_and_restoring(calls, first):
    """Four slots get 0 to 3 rows per call; counters that pass 2**32 change nothing."""
    ring, parts = empty(5, 2, 2), []
    pointer = jnp.full((2, 2), first % 5, jnp.int32)
    ring = ring._replace(added=ring.added + jnp.uint32(first), pointer=pointer)
    columns = columns_of(ring)
    with tempfile.TemporaryDirectory() as folder:
        for call, (counts, then) in enumerate([*calls, ([0] * 4, 'r')]):
            numbers = 1000 * np.arange(4).reshape(2, 2, 1) + 3 * call + np.arange(3)
            ring = add(ring, steps(numbers, np.arange(3) < np.reshape(counts, (2, 2, 1))))
            if not then:
                continue
            parts, fresh = replay_parts.plan(parts, ring)
            assert sum(part.counts.sum() for part in parts) + fresh.sum() <= 2 * 4 * 5
            if fresh.any():
                path = Path(folder, str(call))
                replay_parts.write(path, ring, fresh)
                parts = [*parts, Part(call, {'file': path.name}, np.array(ring.added).reshape(-1), fresh)]
            if then == 'r':
                files = [Path(folder, part.entry['file']) for part in parts]
                counters = {name: np.asarray(getattr(ring, name)) for name in ('pointer', 'size', 'added')}
                restored, spans = replay_parts.read(files, counters, columns)
                for name, column in columns_of(ring).items():
                    assert restored[name].tobytes() == np.asarray(column).tobytes(), name
                parts = [part._replace(ends=ends, counts=counts) for part, (ends, counts) in zip(parts, spans, strict=True)]


def test_a_slow_slot_does_not_make_the_parts_grow(tmp_path):
    """One slot gets a row per save, the other fills its 4 places: then 6 of 8 rows of the parts are soon overwritten.

    Rows in the parts: 5, 10, 15, and 20 would be more than twice the ring's 8 places, so the fourth part holds the whole ring.
    """
    store, ring, sizes = Checkpoints(tmp_path, keep=1), empty(4, 1, 2), []
    for step in range(1, 9):
        ring = add(ring, steps(4 * step + np.zeros((1, 2, 1), int) + np.arange(4), [[[1, 0, 0, 0], [1, 1, 1, 1]]]))
        store.save(step, tree_of(ring), {})
        sizes.append(sum(len(rewards_in(store, int(name[5:14]))) for name in parts_in(store)))
    assert sizes == [5, 10, 15, 8, 13, 8, 13, 8]
    assert_same(restore(Checkpoints(tmp_path), empty(4, 1, 2))[1], ring)


def test_an_idle_slot_keeps_only_its_own_parts(tmp_path):
    """Capacity 2. Both slots get a row, then only the second one: its rows of 3 and 4 are stored, and the first one's row of 1."""
    store, ring = Checkpoints(tmp_path, keep=1), empty(2, 1, 2)
    for step in range(1, 5):
        ring = add(ring, steps(np.full((1, 2, 1), step), [[[step == 1], [1]]]))
        store.save(step, tree_of(ring), {})
    assert listed_by(store, 4) == [name_of(1), name_of(3), name_of(4)]
    assert_same(restore(Checkpoints(tmp_path), empty(2, 1, 2))[1], ring)


def test_a_row_is_written_once(grown):
    store, _, saved = grown
    before = {name: (store.directory / name).stat() for name in parts_in(store)}
    assert list(before) == [name_of(10), name_of(20), name_of(30)]
    ring = add(saved[30], steps([[[7]]]))
    store.save(40, tree_of(ring, 40), {})
    assert listed_by(store, 30) == [name_of(10), name_of(20), name_of(30)]
    assert listed_by(store, 40) == [name_of(10), name_of(20), name_of(30), name_of(40)]
    assert rewards_in(store, 40) == [107]
    for name, status in before.items():
        now = (store.directory / name).stat()
        assert (now.st_ino, now.st_mtime_ns, now.st_size) == (status.st_ino, status.st_mtime_ns, status.st_size)
    # and nowhere else: of the replay, the checkpoint itself holds the counters only
    assert set(PyTreeCheckpointer().restore(store.path(40) / 'state')) == {
        "['n']",
        *(f"['replays']['env'].{counter}" for counter in ('pointer', 'size', 'added')),
    }


def test_parts_of_no_kept_checkpoint_go(grown):
    """Three checkpoints are kept; 8 places. After rows 7-9, 0 and 1 are overwritten, so 40 does without part 10; 20 and 30 need it."""
    store, _, saved = grown
    ring = add(saved[30], steps([[[7, 8, 9]]]))
    store.save(40, tree_of(ring), {})
    assert store.steps() == [20, 30, 40]
    assert listed_by(store, 40) == [name_of(20), name_of(30), name_of(40)]
    assert parts_in(store) == [name_of(step) for step in (10, 20, 30, 40)]
    for step in (50, 60):
        store.save(step, tree_of(ring), {})
    assert store.steps() == [40, 50, 60]
    assert parts_in(store) == [name_of(step) for step in (20, 30, 40)]
    assert_same(restore(store)[1], ring)


def test_two_replays_and_none(tmp_path):
    """Each replay has its own parts; a tree without one has no list."""
    store = Checkpoints(tmp_path)
    first, second = add(empty(4), steps([[[0, 1]]])), add(empty(8), steps([[[5]]]))
    store.save(1, {'a': first, 'b': [second]}, {})
    assert parts_in(store) == ['step_000000001.replay_0.npz', 'step_000000001.replay_1.npz']
    tree = store.restore({'a': empty(4), 'b': [empty(8)]})[1]
    assert_same(tree['a'], first)
    assert_same(tree['b'], [second])
    plain = Checkpoints(tmp_path / 'plain')
    assert not (plain.save(1, {'x': np.zeros(3)}, {}) / 'parts.json').exists()
    assert parts_in(plain) == []


def test_two_devices(tmp_path):
    """Divided by members: every bit comes back to the device it was on, also to one device."""
    split = NamedSharding(Mesh(np.array(jax.devices()[:2]), ('member',)), PartitionSpec('member'))
    ring = empty(4, 4, 2)
    for call in range(2):
        ring = add(ring, steps(100 * np.arange(8).reshape(4, 2, 1) + 3 * call + np.arange(3), np.arange(24).reshape(4, 2, 3) % 5 > 0))
    store = Checkpoints(tmp_path)
    store.save(1, tree_of(jax.device_put(ring, split)), {})
    one, two = restore(store, ring)[1], restore(store, jax.device_put(empty(4, 4, 2), split))[1]
    assert_same(one, ring)
    assert_same(two, ring)
    assert {leaf.sharding for leaf in jax.tree.leaves(two)} == {split}
    across = NamedSharding(split.mesh, PartitionSpec(None, 'member'))
    with pytest.raises(ValueError, match='along its first axis only'):
        Checkpoints(tmp_path / 'across').save(1, tree_of(jax.device_put(ring, across)), {})


def test_blocks(tmp_path, monkeypatch):
    """A column that leaves the device in several blocks is the same file."""
    ring = add(empty(64, 2, 2), steps(np.arange(200).reshape(2, 2, 50)))
    for block_bytes in (2**26, 100):
        monkeypatch.setattr(replay_parts, 'BLOCK_BYTES', block_bytes)
        replay_parts.write(tmp_path / str(block_bytes), ring, np.array(ring.size).reshape(-1))
    assert (tmp_path / '100').read_bytes() == (tmp_path / str(2**26)).read_bytes()


def test_after_a_restore_only_what_is_new_is_written(grown):
    store, _, saved = grown
    again = Checkpoints(store.directory, keep=3)
    ring = add(restore(again, step=20)[1], steps([[[50]]]))
    again.save(25, tree_of(ring), {})
    assert listed_by(again, 25) == [name_of(10), name_of(20), name_of(25)]
    assert rewards_in(again, 25) == [150]
    assert_same(restore(again, step=25)[1], ring)
    assert_same(restore(again, step=30)[1], saved[30])
    # One that has restored nothing knows of no part.
    Checkpoints(store.directory, keep=3).save(40, tree_of(saved[30]), {})
    assert listed_by(store, 40) == [name_of(40)]
    assert rewards_in(store, 40) == [100 + number for number in range(7)]


def test_a_state_alone_needs_no_replay(grown):
    store, _, _ = grown
    step, number, _ = Checkpoints(store.directory).restore(np.int32(0), part="['n']")
    assert (step, int(number)) == (30, 30)


def test_another_replay_is_refused(grown):
    store, _, _ = grown
    with pytest.raises(CheckpointError, match=r"columns\['masks'\] is float32\[1, 1, 8\], expected float32\[1, 1, 4\]"):
        restore(store, empty(4))


# ------------------------------------------------------------------------------------------------------------------------ faults


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x20
    path.write_bytes(bytes(data))


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def make_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ('fault', 'words'),
    [(flip, 'has another SHA-256 than'), (truncate, 'bytes instead of'), (os.remove, 'is missing'), (make_folder, 'is missing')],
)
@pytest.mark.parametrize(('victim', 'unusable'), [(30, [30]), (20, [30, 20]), (10, [30, 20, 10])])
def test_a_damaged_part(grown, fault, words, victim, unusable):
    """Every checkpoint that needs it is passed over, the newest other one is taken."""
    store, lines, saved = grown
    fault(store.directory / name_of(victim))
    if unusable == [30, 20, 10]:
        with pytest.raises(CheckpointError, match='no usable checkpoint'):
            restore(store)
    else:
        step, ring = restore(store)
        assert step == {1: 20, 2: 10}[len(unusable)]
        assert_same(ring, saved[step])
    assert len(lines) == len(unusable)
    for step, line in zip(unusable, lines, strict=True):
        assert line.startswith(f'passing over checkpoint {store.path(step)}: its part {name_of(victim)} ')
        assert words in line
        assert '\n' not in line


def test_going_on_after_a_damaged_part(grown):
    """30 is unusable; from 20 the run comes to 30 again and replaces it, and its part."""
    store, _, saved = grown
    flip(store.directory / name_of(30))
    again = Checkpoints(store.directory, keep=3, announce=lambda line: None)
    step, ring = restore(again)
    assert step == 20
    ring = add(ring, steps([[[5, 6]]]))
    again.save(30, tree_of(ring, 30), {})
    assert [again.verify(step) for step in (10, 20, 30)] == [None] * 3
    assert_same(restore(again)[1], saved[30])
    assert rewards_in(again, 30) == [105, 106]


def test_a_step_that_is_saved_again(grown):
    """Damaged meanwhile: its part is made anew from the one before, with all rows since then."""
    store, _, saved = grown
    flip(store.path(30) / 'tree.json')
    ring = add(saved[30], steps([[[7]]]))
    store.save(30, tree_of(ring, 30), {})
    assert listed_by(store, 30) == [name_of(10), name_of(20), name_of(30)]
    assert rewards_in(store, 30) == [105, 106, 107]
    assert_same(restore(store)[1], ring)


@pytest.mark.parametrize('fault', [flip, os.remove])
def test_a_damaged_list(grown, fault):
    store, lines, saved = grown
    fault(store.path(30) / 'parts.json')
    step, ring = restore(store)
    assert step == 20
    assert_same(ring, saved[20])
    assert 'parts.json' in lines[0]


def test_a_list_that_lacks_a_part(grown):
    """Whatever may be listed, a ring is whole or refused."""
    store, _, saved = grown
    counters = {name: np.asarray(getattr(saved[30], name)) for name in ('pointer', 'size', 'added')}
    files = [store.directory / name_of(step) for step in (10, 20, 30)]
    read = functools.partial(replay_parts.read, counters=counters, leaves=columns_of(empty(8)))
    assert len(read(files)[1]) == 3
    for wrong, message in (
        (files[1:], 'lack rows'),
        ([], 'lack rows'),
        (files[:2], 'does not continue'),
        ([files[0], files[2]], 'does not continue'),
        (files[::-1], 'does not continue'),
    ):
        with pytest.raises(ValueError, match=message):
            read(wrong)
    with pytest.raises(ValueError, match=r"holds another \['rewards'\]"):
        read(files, leaves={**columns_of(empty(8)), "['rewards']": jax.ShapeDtypeStruct((1, 1, 8), jnp.int32)})


@pytest.mark.parametrize('garbage', [b'', b'garbage', b'PK\x03\x04garbage'])
def test_garbage_with_the_right_hash(grown, garbage):
    store, lines, saved = grown
    part, path = store.directory / name_of(30), store.path(30)
    part.write_bytes(garbage)
    lists = json.loads((path / 'parts.json').read_text())
    next(iter(lists.values()))[-1].update(checkpoints._entry(part))
    (path / 'parts.json').write_text(json.dumps(lists))
    entries = {name: checkpoints._entry(path / name) for name in checkpoints._files(path)}
    (path / 'manifest.json').write_bytes(checkpoints._manifest_text(30, entries))
    assert store.verify(30) is None
    step, ring = restore(store)
    assert step == 20
    assert_same(ring, saved[20])
    assert 'its arrays cannot be read' in lines[0]
    assert '\n' not in lines[0]


def test_a_list_may_name_nothing_else(grown, tmp_path):
    """A name that is no part's is no part: nothing outside the folder is read."""
    store, _, _ = grown
    path = store.path(30)
    (path / 'parts.json').write_text(json.dumps({'x': [{'file': '../../secret.npz', 'size': 1, 'sha256': ''}]}))
    assert checkpoints._listed(path) == {}


def test_strays_go_and_foreign_files_stay(grown):
    """What a kill between a part and its checkpoint leaves."""
    store, lines, saved = grown
    strays = ['step_000000035.replay_0.npz', 'step_000000035.replay_1.npz.tmp']
    foreign = ['mine.npz', 'step_000000035.npz', 'replay_0.npz']
    for name in strays + foreign:
        (store.directory / name).write_text('x')
    step, ring = restore(store)
    assert (step, lines) == (30, [])
    assert_same(ring, saved[30])
    store.save(40, tree_of(ring), {})
    names = [path.name for path in store.directory.iterdir()]
    assert not set(strays) & set(names)
    assert set(foreign) < set(names)


def test_a_list_that_cannot_be_read_now_deletes_nothing(grown, monkeypatch):
    """The disk may answer again later, and then its checkpoint needs its parts."""
    store, _, _ = grown
    read = Path.read_bytes

    def broken(path):
        if path == store.path(30) / 'parts.json':
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path)

    monkeypatch.setattr(Path, 'read_bytes', broken)
    before = parts_in(store)
    store._tidy()
    assert parts_in(store) == before


def test_a_part_that_somebody_took_away_is_made_good(grown):
    store, _, saved = grown
    (store.directory / name_of(20)).unlink()
    ring = add(saved[30], steps([[[7]]]))
    store.save(40, tree_of(ring, 40), {})
    assert listed_by(store, 40) == [name_of(40)]
    assert rewards_in(store, 40) == [100 + number for number in range(8)]
    assert_same(restore(store)[1], ring)


@pytest.mark.parametrize('place', ['training.replay_parts.write', 'os.fsync', 'pathlib.Path.write_text'])
def test_a_full_disk(grown, monkeypatch, place):
    """One line; the old checkpoints are whole, no half part stays, and the next part holds the rows of both."""
    store, _, saved = grown
    before = sorted(path.name for path in store.directory.iterdir())
    ring = add(saved[30], steps([[[7]]]))

    def full(path, *_, **__):
        if place.startswith('training'):
            path.write_text('half')
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(place, full)
        with pytest.raises(CheckpointError, match=r'cannot write checkpoint .*step_000000040: No space left on device$'):
            store.save(40, tree_of(ring, 40), {})
    assert sorted(path.name for path in store.directory.iterdir()) == before
    assert [store.verify(step) for step in store.steps()] == [None] * 3
    ring = add(ring, steps([[[8]]]))
    store.save(50, tree_of(ring, 50), {})
    assert rewards_in(store, 50) == [107, 108]
    assert_same(restore(store)[1], ring)


def test_a_write_that_fails_in_the_kernel(grown, helper):
    """A part of 4000 rows of more than 40 B, where no file may grow beyond 100 kB; the state alone would fit."""
    store, _, _ = grown
    before = sorted(path.name for path in store.directory.iterdir())
    ring = add(empty(4000), steps(np.arange(4000)[None, None]))
    with (
        helper('training/test_checkpoints.py').limited_files(100_000),
        pytest.raises(CheckpointError, match=r'step_000000040: File too large$'),
    ):
        store.save(40, tree_of(ring), {})
    assert sorted(path.name for path in store.directory.iterdir()) == before


def test_a_stop_at_every_change_of_the_file_system(tmp_path, monkeypatch, helper):
    """Whichever call is the last that happens, the newest checkpoint that verifies is the old or the new one; the next save tidies up."""
    faults = helper('training/test_checkpoints.py')
    rings_at = {1: add(empty(4), steps([[[0, 1]]]))}
    rings_at[2] = add(rings_at[1], steps([[[2, 3, 4]]]))
    rings_at[3] = add(rings_at[2], steps([[[5, 6]]]))
    first = Checkpoints(tmp_path / 'first', keep=1)
    first.save(1, tree_of(rings_at[1]), {})
    moments = 0
    for count in range(1, 200):
        lines = []
        store, resumed = (Checkpoints(tmp_path / 'run', keep=1, announce=lines.append) for _ in range(2))
        shutil.copytree(first.directory, store.directory)
        store._parts = first._parts
        with monkeypatch.context() as patch:
            faults.kill_at(patch, count)
            finished = False
            with contextlib.suppress(faults.Killed):
                store.save(2, tree_of(rings_at[2]), {})
                finished = True
        step, ring = restore(resumed, empty(4))
        assert_same(ring, rings_at[step])
        assert lines == []
        resumed.save(3, tree_of(rings_at[3]), {})
        # The ring holds rows 3 to 6: those of part 2 (rows 2 to 4) and part 3, or part 3 has all four, where 2 was not saved.
        assert listed_by(resumed, 3) == ([name_of(3)] if step == 1 else [name_of(2), name_of(3)])
        assert sorted(path.name for path in store.directory.iterdir()) == sorted(['step_000000003', *parts_in(resumed)])
        assert parts_in(resumed) == listed_by(resumed, 3)
        assert resumed.verify(3) is None
        shutil.rmtree(store.directory)
        if finished:
            break
        moments += 1
    assert moments > 12


def test_find():
    ring = empty(2)
    assert replay_parts.find({'a': [ring], 'b': jnp.zeros(2)}) == {"['a'][0]": ring}
    assert list(replay_parts.find(ring)) == ['']
    assert isinstance(replay_parts.find({'a': jax.eval_shape(lambda: ring)})["['a']"], Replay)
