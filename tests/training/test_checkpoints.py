"""Checkpoints: what comes back is what was saved, bit for bit, or a message; never something else."""

import contextlib
import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from training import checkpoints, folder
from training.checkpoints import CheckpointError, Checkpoints

ROOT = Path(__file__).resolve().parents[2]


class State(NamedTuple):
    params: Any
    optimizer: Any
    key: Any
    hyper: Any
    aux: Any


def make_state(scale: float = 1.0) -> State:
    params = {'dense/0': {'kernel': jnp.arange(6.0).reshape(2, 3) * scale, 'bias': jnp.full((3,), -0.0)}, 'log.std': jnp.float32(scale)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    return State(
        params=params,
        optimizer=optimizer.update(params, optimizer.init(params))[1],
        key=jax.random.split(jax.random.key(3), 4),
        hyper={'kl_budget': np.float32(0.5), 'nan_payload': np.array([0x7FC12345, 0xFF812345], np.uint32).view(np.float32)},
        aux={
            'mask': np.array([True, False]),
            'pixels': np.arange(8, dtype=np.uint8).reshape(2, 2, 2),
            'counter': np.int64(2**40),
            'half': jnp.ones(3, jnp.bfloat16),
            'nothing': (),
            'none': None,
            'no_rows': np.zeros((0, 5), np.float32),
            'numbered': {7: [jnp.int32(-1)], 11: jax.random.key(1, impl='rbg')},
        },
    )


def bits(leaf: Any) -> tuple:
    dtype = str(leaf.dtype)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return dtype, leaf.shape, np.asarray(leaf).tobytes()


def assert_same(tree: Any, other: Any) -> None:
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(tree)[0], jax.tree.leaves(other), strict=True):
        assert bits(a) == bits(b), jax.tree_util.keystr(path)


@pytest.fixture
def small(tmp_path):
    """Two sound checkpoints, 10 and 20, whose only array is its step; and the announced lines."""
    lines = []
    store = Checkpoints(tmp_path / 'checkpoints', announce=lines.append)
    for step in (10, 20):
        store.save(step, small_tree(step), {'step': step})
    return store, lines


def small_tree(step: int) -> dict:
    return {'x': np.full((3, 4), step, np.float32), 'n': np.int32(step)}


def names(store: Checkpoints) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir())


def files(path: Path) -> list[Path]:
    return sorted(item for item in path.rglob('*') if item.is_file())


# ------------------------------------------------------------------------------------------------------------------- round trips


def test_whole_state_comes_back_bit_for_bit(tmp_path):
    state = make_state()
    store = Checkpoints(tmp_path)
    path = store.save(5, state, {'update': 5, 'note': 'x', 'bad': float('nan')})
    assert path == tmp_path / 'step_000000005'
    step, restored, meta = store.restore(make_state(2.0))
    assert (step, meta) == (5, {'update': 5, 'note': 'x', 'bad': None})
    assert_same(state, restored)
    assert isinstance(restored.optimizer[1][0], optax.ScaleByAdamState)
    assert isinstance(restored.params['log.std'], jax.Array)
    assert isinstance(restored.hyper['kl_budget'], np.ndarray)
    # Keys are usable, and give the numbers of the saved ones.
    np.testing.assert_array_equal(jax.random.normal(restored.key[2]), jax.random.normal(state.key[2]))


def test_abstract_template(tmp_path):
    """Shapes without shardings, as `jax.eval_shape` makes them, give host arrays."""
    store = Checkpoints(tmp_path)
    state = {'x': jnp.arange(3.0), 'key': jax.random.key(0)}
    store.save(0, state, {})
    restored = store.restore(jax.eval_shape(lambda: {'x': jnp.zeros(3), 'key': jax.random.key(1)}))[1]
    assert isinstance(restored['x'], np.ndarray)
    assert_same(state, restored)


@pytest.mark.parametrize('tree', [{}, (), None, {'a': np.zeros((0, 2))}])
def test_trees_without_values(tmp_path, tree):
    store = Checkpoints(tmp_path)
    store.save(1, tree, {'a': 1})
    step, restored, meta = store.restore(tree)
    assert (step, meta) == (1, {'a': 1})
    assert_same(tree, restored)


def test_two_devices_to_one_and_back(tmp_path):
    devices = jax.devices()
    assert len(devices) >= 2
    split = NamedSharding(Mesh(np.array(devices[:2]), ('seeds',)), PartitionSpec('seeds'))
    value = np.arange(8, dtype=np.float32).reshape(4, 2)
    keys = jax.random.split(jax.random.key(0), 4)
    two = {'x': jax.device_put(value, split), 'key': jax.device_put(keys, split)}
    one = {'x': jnp.zeros((4, 2)), 'key': jax.random.split(jax.random.key(9), 4)}
    store = Checkpoints(tmp_path)
    store.save(1, two, {})
    restored = store.restore(one)[1]
    assert restored['x'].devices() == {devices[0]}
    assert not restored['x'].committed  # as free to move as the template
    assert_same(one | {'x': jnp.asarray(value), 'key': keys}, restored)
    store.save(2, restored, {})
    abstract = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split) for name, leaf in two.items()}
    for template in (two, abstract):
        again = store.restore(template)[1]
        assert again['x'].sharding == split
        assert again['key'].sharding == split
        assert_same(two, again)


def test_restored_arrays_may_be_donated(tmp_path):
    store = Checkpoints(tmp_path)
    state = {'x': jnp.arange(1024.0)}
    store.save(1, state, {})
    restored = store.restore(state)[1]
    moved = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)(restored)
    np.testing.assert_array_equal(moved['x'], np.arange(1024) + 1)


def test_saving_uses_up_no_key(tmp_path):
    with jax.debug_key_reuse(True):
        key = jax.random.key(0)
        Checkpoints(tmp_path).save(1, {'key': key}, {})
        jax.random.normal(Checkpoints(tmp_path).restore({'key': key})[1]['key'])
        jax.random.normal(key)


def test_arrays_are_plain_orbax(tmp_path):
    """Someone without this project can read them."""
    from orbax import checkpoint as ocp

    path = Checkpoints(tmp_path).save(1, State({'w': jnp.arange(3.0)}, (), jax.random.key(5), {}, {}), {})
    arrays = ocp.PyTreeCheckpointer().restore(path / 'state')
    assert set(arrays) == {".params['w']", '.key'}
    np.testing.assert_array_equal(arrays[".params['w']"], [0.0, 1.0, 2.0])
    np.testing.assert_array_equal(arrays['.key'], jax.random.key_data(jax.random.key(5)))


@pytest.mark.parametrize('leaf', [1, 2.5, 'text', np.array(['a']), np.array([object()]), np.datetime64('2020-01-01')])
def test_only_numbers_are_saved(tmp_path, leaf):
    store = Checkpoints(tmp_path / 'new')
    with pytest.raises(ValueError, match=r"leaf \['a'\] (is a|has dtype)"):
        store.save(1, {'a': leaf}, {})
    assert not store.directory.exists()


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match='keep must be'):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(ValueError, match='between 0 and'):
        Checkpoints(tmp_path).save(-1, {}, {})
    with pytest.raises(ValueError, match='cannot write a set as JSON'):
        Checkpoints(tmp_path).save(1, {}, {'a': {1}})
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------ which ones are kept


def test_rotation_and_foreign_folders(tmp_path):
    store = Checkpoints(tmp_path / 'checkpoints', keep=2)
    foreign = [store.directory / name for name in ('9', 'step_000000001', 'step_5', 'notes.tmp', 'step_000000002.bak')]
    for path in foreign:
        path.mkdir(parents=True)
        (path / 'mine.txt').write_text('x')
    (store.directory / 'README').write_text('x')
    before = names(store)
    for step in (3, 4, 5, 6):
        store.save(step, small_tree(step), {})
    assert sorted([*before, 'step_000000005', 'step_000000006']) == names(store)
    assert store.steps() == [1, 5, 6]
    assert store.latest_verified() == 6
    assert all((path / 'mine.txt').exists() for path in foreign)


def test_a_damaged_checkpoint_does_not_count_as_kept(small):
    store, _ = small
    (store.path(20) / 'meta.json').write_text('{}')
    store.save(30, small_tree(30), {})
    assert store.steps() == [10, 30]


def test_an_existing_step(small):
    store, _ = small
    with pytest.raises(ValueError, match='exists already'):
        store.save(20, small_tree(21), {})
    assert store.restore(small_tree(0))[1]['n'] == 20
    (store.path(20) / 'meta.json').write_text('{"step": 99}')
    store.save(20, small_tree(21), {})
    assert store.restore(small_tree(0))[1]['n'] == 21
    assert names(store) == ['step_000000010', 'step_000000020']


def test_somebody_elses_step_folder_is_not_replaced(small):
    store, _ = small
    store.path(30).mkdir()
    (store.path(30) / 'mine.txt').write_text('x')
    with pytest.raises(CheckpointError, match='move it away'):
        store.save(30, small_tree(30), {})
    assert (store.path(30) / 'mine.txt').exists()


# ------------------------------------------------------------------------------------------------------------------------ faults


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x20
    path.write_bytes(bytes(data))


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize('fault', [flip, truncate, os.remove])
def test_each_file_in_turn(small, fault):
    store, lines = small
    whole = store.directory.parent / 'whole'
    shutil.copytree(store.path(20), whole)
    damaged = [path.relative_to(whole) for path in files(whole) if path.stat().st_size]
    assert {'manifest.json', 'tree.json', 'meta.json'} < {str(path) for path in damaged}
    assert any(path.parts[0] == 'state' for path in damaged)
    for name in damaged:
        shutil.rmtree(store.path(20))
        shutil.copytree(whole, store.path(20))
        assert store.verify(20) is None
        fault(store.path(20) / name)
        defect = store.verify(20)
        assert defect is not None, name
        assert str(name) in defect or name.name == 'manifest.json'  # a changed manifest accuses another file
        assert store.latest_verified() == 10
        lines.clear()
        step, tree, meta = store.restore(small_tree(0))
        assert (step, meta) == (10, {'step': 10})
        assert_same(tree, small_tree(10))
        assert len(lines) == 1
        assert str(store.path(20)) in lines[0]
        assert defect in lines[0]
        with pytest.raises(CheckpointError, match='no usable checkpoint'):
            store.restore(small_tree(0), step=20)


def test_every_bit_of_the_manifest(small):
    store, _ = small
    path = store.path(20) / 'manifest.json'
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(bytes(damaged))
        assert store.verify(20) is not None, position
    path.write_bytes(whole)
    assert store.verify(20) is None


@pytest.mark.parametrize('text', ['', '{}', '[]', 'null', '{"files": 3}', '{"files": {"meta.json": null}}', '\0'])
def test_nonsense_manifest(small, text):
    store, _ = small
    (store.path(20) / 'manifest.json').write_text(text)
    assert 'manifest.json' in store.verify(20)


def test_an_extra_file(small):
    store, _ = small
    (store.path(20) / 'state' / 'extra').touch()
    assert store.verify(20) == f'{Path("state/extra")} does not belong there'


def test_an_empty_folder_with_a_larger_number(small):
    store, lines = small
    store.path(99).mkdir()
    assert store.steps() == [10, 20, 99]
    assert store.restore(small_tree(0))[0] == 20
    assert lines == [f'passing over checkpoint {store.path(99)}: manifest.json is missing']
    store.save(99, small_tree(99), {})  # and it is no obstacle later
    assert store.restore(small_tree(0))[0] == 99


def test_a_checkpoint_under_another_number(small):
    store, _ = small
    store.path(20).rename(store.path(30))
    assert 'another step' in store.verify(30)
    assert store.restore(small_tree(0))[0] == 10


def test_nothing_usable(small, tmp_path):
    store, lines = small
    with pytest.raises(CheckpointError, match=r'no usable checkpoint in .*nowhere: there is none'):
        Checkpoints(tmp_path / 'nowhere').restore({})
    assert store.verify(11) == 'there is no such checkpoint'
    for step in (10, 20):
        (store.path(step) / 'meta.json').unlink()
    with pytest.raises(CheckpointError, match=r'no usable.*step_000000020: meta.json is missing; step_000000010: meta.json is missing'):
        store.restore(small_tree(0))
    assert len(lines) == 2
    assert store.latest_verified() is None


def test_files_that_only_orbax_dislikes(small, capfd, caplog):
    """A manifest that fits garbage: orbax's objection becomes one line, without its pages of tracebacks."""
    store, lines = small
    path = store.path(20)
    for name in files(path / 'state'):
        name.write_bytes(b'garbage')
    entries = {name: {'size': (path / name).stat().st_size, 'sha256': checkpoints._hash(path / name)} for name in checkpoints._files(path)}
    (path / 'manifest.json').write_bytes(checkpoints._manifest_text(20, entries))
    assert store.verify(20) is None
    assert store.restore(small_tree(0))[0] == 10
    assert len(lines) == 1
    assert 'its arrays cannot be read' in lines[0]
    assert '\n' not in lines[0]
    assert capfd.readouterr().err == ''
    assert caplog.records == []


@pytest.mark.parametrize(
    ('template', 'found'),
    [
        ({'x': np.zeros((4, 3), np.float32), 'n': np.int32(0)}, r"\['x'\] is float32\[3, 4\], expected float32\[4, 3\]"),
        ({'x': jnp.zeros((3, 4), jnp.bfloat16), 'n': np.int32(0)}, r"\['x'\] is float32\[3, 4\], expected bfloat16\[3, 4\]"),
        ({'x': np.zeros((3, 4), np.float32), 'n': np.float32(0)}, r"\['n'\] is int32\[\], expected float32\[\]"),
        ({'x': np.zeros((3, 4), np.float32)}, r"\['n'\] is int32\[\], expected missing"),
        ({**small_tree(0), 'more': np.zeros(2)}, r"\['more'\] is missing, expected float64\[2\]"),
        ((np.zeros((3, 4), np.float32), np.int32(0)), r"\['n'\] is int32.* \[0\] is missing"),
        ({'x': np.zeros((3, 4), np.float32), 'n': {'m': np.int32(0)}}, r"\['n'\]\['m'\] is missing"),
    ],
)
def test_another_state_is_refused(small, template, found):
    store, lines = small
    with pytest.raises(CheckpointError, match=found):
        store.restore(template)
    assert lines == []  # an older checkpoint would not fit either: no walking back


def test_another_kind_of_key_is_refused(tmp_path):
    store = Checkpoints(tmp_path)
    store.save(1, {'key': jax.random.key(0)}, {})
    with pytest.raises(CheckpointError, match=r'key<fry>\[\], expected key<rbg>\[\]'):
        store.restore({'key': jax.random.key(0, impl='rbg')})
    with pytest.raises(CheckpointError, match=r'key<fry>\[\], expected uint32\[2\]'):
        store.restore({'key': jax.random.key_data(jax.random.key(0))})


def test_a_long_list_of_differences_is_cut(tmp_path):
    store = Checkpoints(tmp_path)
    store.save(1, {str(i): np.zeros(i + 1) for i in range(8)}, {})
    with pytest.raises(CheckpointError, match='and 3 more') as info:
        store.restore({str(i): np.zeros(1, np.float32) for i in range(8)})
    assert str(info.value).count('expected') == 5


# ----------------------------------------------------------------------------------------------------------- the disk and the kill


@contextlib.contextmanager
def limited_files(size: int):
    """No file may grow beyond `size` bytes: a write fails in the kernel, as on a full disk, for orbax's C++ as well as for Python."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_write_that_fails_inside_orbax(small, capfd, caplog):
    store, _ = small
    tree = {'x': np.random.default_rng(0).standard_normal((300, 300)), 'n': np.int32(1)}
    with limited_files(100_000), pytest.raises(CheckpointError, match=r'cannot write checkpoint .*step_000000030: File too large$') as info:
        store.save(30, tree, {})
    assert '\n' not in str(info.value)
    assert capfd.readouterr().err == ''
    assert caplog.records == []
    assert names(store) == ['step_000000010', 'step_000000020']
    assert store.restore(small_tree(0))[0] == 20
    store.save(30, tree, {})  # with room again it works
    assert store.verify(30) is None


@pytest.mark.parametrize('place', ['os.fsync', 'os.replace', 'pathlib.Path.write_text'])
def test_a_full_disk_elsewhere(small, monkeypatch, place):
    store, _ = small

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(place, full)
        with pytest.raises(CheckpointError, match=r'cannot write checkpoint .*: No space left on device$'):
            store.save(30, small_tree(30), {})
    assert names(store) == ['step_000000010', 'step_000000020']
    assert store.restore(small_tree(0))[0] == 20


def test_a_read_only_folder(small, powerless):
    store, _ = small
    store.directory.chmod(0o555)
    with powerless(), pytest.raises(CheckpointError, match='Permission denied'):
        store.save(30, small_tree(30), {})
    with powerless():
        assert store.restore(small_tree(0))[0] == 20  # reading needs no right to write
    store.directory.chmod(0o755)
    assert names(store) == ['step_000000010', 'step_000000020']


class Killed(BaseException):
    pass


def kill_at(monkeypatch, count: int) -> None:
    """The count-th change of the file system, and all later ones, do not happen: what a kill at this moment leaves on the disk."""
    calls = 0

    def wrap(function):
        def wrapper(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls >= count:
                raise Killed
            return function(*args, **kwargs)

        return wrapper

    for name in ('os.fsync', 'os.replace', 'os.rename', 'os.unlink', 'os.rmdir', 'os.mkdir'):
        monkeypatch.setattr(name, wrap(getattr(os, name.split('.')[1])))
    monkeypatch.setattr(checkpoints.Checkpoints, '_tidy', wrap(checkpoints.Checkpoints._tidy))
    monkeypatch.setattr(shutil, 'rmtree', wrap(shutil.rmtree))


def test_a_stop_at_every_change_of_the_file_system(tmp_path, monkeypatch):
    """Whichever call is the last that happens, the newest checkpoint that verifies is the old or the new one; the next save tidies up."""
    moments = 0
    for count in range(1, 200):
        store = Checkpoints(tmp_path / str(count), keep=1, announce=lambda line: None)
        store.save(1, small_tree(1), {'step': 1})
        with monkeypatch.context() as patch:
            kill_at(patch, count)
            try:
                store.save(2, small_tree(2), {'step': 2})
                finished = True
            except Killed:
                finished = False
        step, tree, meta = store.restore(small_tree(0))
        assert meta == {'step': step}
        assert_same(tree, small_tree(step))
        store.save(3, small_tree(3), {'step': 3})
        assert names(store) == ['step_000000003']
        if finished:
            break
        moments += 1
    assert moments > 10


KILLED_SAVER = """
import sys
import numpy as np
from training.checkpoints import Checkpoints
store = Checkpoints(sys.argv[1])
rng = np.random.default_rng(0)
step = (store.steps() or [0])[-1]
print('ready', flush=True)
while True:
    step += 1
    store.save(step, {f'leaf_{i}': np.full((50, 50), step + i, np.float32) for i in range(20)}, {'step': step})
    print(step, flush=True)
"""


def test_kill_minus_nine(tmp_path):
    """Five processes that save without a pause are killed at random moments; what is found afterwards is whole."""
    generator = random.Random(time.time_ns())
    savers = [
        subprocess.Popen([sys.executable, '-c', KILLED_SAVER, str(tmp_path / str(i))], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for i in range(5)
    ]
    for i, saver in enumerate(savers):
        assert saver.stdout is not None
        for _ in range(3):  # 'ready' and two saves
            assert saver.stdout.readline()
        time.sleep(generator.uniform(0, 0.2))
        saver.send_signal(signal.SIGKILL)
        saver.wait()
        reported = max([2, *(int(line) for line in saver.stdout.read().split('\n')[:-1])])  # the last step that it called saved
        saver.stdout.close()
        lines = []
        store = Checkpoints(tmp_path / str(i), announce=lines.append)
        step, tree, meta = store.restore({f'leaf_{k}': np.zeros((50, 50), np.float32) for k in range(20)})
        assert meta == {'step': step}
        assert step >= reported
        assert lines == []  # not even a damaged one to pass over
        assert_same(tree, {f'leaf_{k}': np.full((50, 50), step + k, np.float32) for k in range(20)})
        store.save(step + 1, tree, {})
        assert names(store) == [f'step_{step:09d}', f'step_{step + 1:09d}']


def test_manifest_is_readable_json(small):
    store, _ = small
    manifest = json.loads((store.path(20) / 'manifest.json').read_text())
    assert manifest['format'] == checkpoints.FORMAT
    assert manifest['step'] == 20
    assert set(manifest['files']) == {str(path.relative_to(store.path(20))) for path in files(store.path(20))} - {'manifest.json'}
    assert folder.read_json(store.path(20) / 'meta.json') == {'step': 20}
