"""OGBench files: equal to the official loader, and one clear line for every way in which a file can be bad."""

import http.server
import io
import os
import pickle
import threading
import zipfile

import numpy as np
import pytest

from data import archive, dataset, npz

LENGTHS = [3, 1, 4]  # 8 transitions, 11 observations


def columns(seed=0):
    rng = np.random.default_rng(seed)
    return {
        'observations': rng.normal(size=(11, 3)).astype(np.float32),
        'actions': rng.uniform(-1, 1, size=(11, 2)).astype(np.float32),
        'lengths': np.array(LENGTHS),
        'qpos': rng.normal(size=(11, 4)).astype(np.float32),
        'qvel': rng.normal(size=(11, 2)).astype(np.float32),
        'button_states': rng.integers(0, 2, size=(11, 2)),
    }


def raw():
    """The columns as they lie in a raw file."""
    data = columns()
    data['terminals'] = np.zeros(11, bool)
    data['terminals'][np.cumsum(np.array(data.pop('lengths')) + 1) - 1] = True
    return data


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'cube-v0.npz'


def assert_one_line(error, path, *parts):
    text = str(error.value)
    assert '\n' not in text
    assert text.startswith(f'{path}: ')
    for part in parts:
        assert part in text
    assert isinstance(error.value, ValueError)


def test_write_then_read_returns_the_same(path):
    data = columns()
    npz.write(path, **data)
    result = npz.read(path)
    assert result.keys() == data.keys()
    for name, values in data.items():
        np.testing.assert_array_equal(result[name], values, err_msg=name)
    with np.load(path) as file:
        types = {name: file[name].dtype for name in file.files}
    float32 = dict.fromkeys(('observations', 'actions', 'qpos', 'qvel'), np.float32)
    assert types == {**float32, 'terminals': np.bool_, 'button_states': np.int64}  # as OGBench distributes them
    assert os.listdir(path.parent) == [path.name]


def test_transitions_equal_those_of_the_official_loader(path):
    utils = pytest.importorskip('ogbench.utils')
    npz.write(path, **columns())
    ours = npz.read(path)
    n = len(ours['observations'])
    built = dataset.from_trajectories(ours['observations'], ours['actions'], np.zeros(n), np.ones(n), ours['lengths'])
    official = utils.load_dataset(str(path), add_info=True)
    rows = built.transition_rows
    assert len(rows) == 8
    np.testing.assert_array_equal(built.observations[rows], official['observations'])
    np.testing.assert_array_equal(built.actions[rows], official['actions'])
    np.testing.assert_array_equal(built.observations[rows + 1], official['next_observations'])
    np.testing.assert_array_equal(built.truncations[rows], official['terminals'])
    for name in ('qpos', 'qvel', 'button_states'):
        np.testing.assert_array_equal(ours[name][rows], official[name])


def test_ogbench_makes_an_environment_and_both_datasets_from_our_files(path):
    ogbench = pytest.importorskip('ogbench')
    data = columns()
    del data['button_states']
    data['observations'] = data['observations'][:, :2]
    npz.write(path, **data)
    npz.write(path.with_name('cube-v0-val.npz'), **data)
    _, train, val = ogbench.make_env_and_datasets('pointmaze-medium-navigate-singletask-task1-v0', dataset_path=str(path))
    assert train['observations'].shape == val['next_observations'].shape == (8, 2)
    np.testing.assert_array_equal(train['masks'], np.ones(8))  # nothing near the goal


@pytest.mark.parametrize('compact', [True, False])
def test_what_the_official_loader_returns_is_read_back(path, compact):
    utils = pytest.importorskip('ogbench.utils')
    npz.write(path, **columns())
    expected = npz.read(path)
    other = path.with_name('other.npz')
    np.savez(other, **utils.load_dataset(str(path), compact_dataset=compact, add_info=True))
    recording = npz.load(other)
    assert (recording.layout, recording.terminated) == ('compact' if compact else 'regular', True)
    result = npz.read(other)
    finals = np.cumsum(np.array(LENGTHS) + 1) - 1
    np.testing.assert_array_equal(result['lengths'], LENGTHS)
    np.testing.assert_array_equal(result['observations'], expected['observations'])
    for name in ('actions', 'qpos', 'qvel', 'button_states'):
        np.testing.assert_array_equal(np.delete(result[name], finals, 0), np.delete(expected[name], finals, 0), err_msg=name)
    if not compact:  # this layout does not hold the simulator's state at final observations, and we do not make it up
        assert np.isnan(result['qpos'][finals]).all()
        assert (result['button_states'][finals] == -1).all()


def test_rewards_and_masks_of_a_regular_file(path):
    np.savez(
        path,
        observations=np.array([[0.0], [1], [5]]),
        next_observations=np.array([[1.0], [2], [6]]),
        actions=np.array([[0.1], [0.2], [0.3]]),
        terminals=np.array([0, 1, 1]),
        rewards=np.array([7, 8, 9]),
        masks=np.array([True, False, True]),
    )
    result = npz.read(path)
    np.testing.assert_array_equal(result['observations'][:, 0], [0, 1, 2, 5, 6])
    np.testing.assert_array_equal(result['rewards'], [7, 8, 0, 9, 0])
    np.testing.assert_array_equal(result['masks'], [1, 0, 1, 1, 1])
    np.testing.assert_array_equal(result['lengths'], [2, 1])
    assert {x.dtype for name, x in result.items() if name != 'lengths'} == {np.dtype(np.float32)}


def test_the_layout_may_be_given(path):
    np.savez(path, **raw(), valids=np.ones(11))
    assert npz.load(path, 'raw').layout == 'raw'
    with pytest.raises(ValueError, match=r'unknown layout .flat.; known: auto, raw, compact, regular'):
        npz.read(path, 'flat')
    with pytest.raises(npz.DataError, match='lacks next_observations'):
        npz.read(path, 'regular')


def test_last_trajectory_without_an_end_mark_ends_with_the_file(path):
    data = raw()
    data['terminals'][-1] = False
    np.savez(path, **data)
    recording = npz.load(path)
    assert not recording.terminated
    np.testing.assert_array_equal(recording.arrays['lengths'], LENGTHS)


def test_images_big_endian_fortran_and_float64_files(path):
    data = raw()
    data['observations'] = np.arange(11 * 12, dtype=np.uint8).reshape(11, 2, 2, 3)
    data['actions'] = np.asfortranarray(data['actions'].astype('>f8'))
    data['terminals'] = data['terminals'].astype(np.float64)
    np.savez_compressed(path, **data)
    result = npz.read(path)
    np.testing.assert_array_equal(result['observations'], data['observations'])
    np.testing.assert_array_equal(result['actions'], data['actions'].astype(np.float32))
    assert result['observations'].dtype == np.uint8
    assert result['actions'].dtype == np.float32
    assert result['actions'].flags.c_contiguous


# -- damaged and foreign files --------------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickling it leaves a file behind."""

    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return (open, (self.target, 'w'))


@pytest.mark.parametrize('where', ['observations', 'terminals', 'qpos'])
def test_objects_are_never_unpickled(path, tmp_path, where):
    trap = tmp_path / 'trap'
    bomb = np.empty(11, object)
    bomb[0] = Bomb(trap)
    np.savez(path, **{**raw(), where: bomb})
    with pytest.raises(npz.DataError) as error:
        npz.read(path)
    assert_one_line(error, path, where, 'never unpickled')
    assert not trap.exists()
    with np.load(path, allow_pickle=True) as file:
        assert file[where] is not None
    assert trap.exists()  # the trap works: it was not sprung above


def test_objects_in_a_column_that_nobody_asked_for_are_left_alone(path, tmp_path):
    bomb = np.empty(1, object)
    bomb[0] = Bomb(tmp_path / 'trap')
    np.savez(path, **raw(), infos=bomb)
    assert 'infos' not in npz.read(path)
    assert not (tmp_path / 'trap').exists()


def test_a_pickle_saved_as_npz_is_not_loaded(path, tmp_path):
    path.write_bytes(pickle.dumps(Bomb(tmp_path / 'trap')))
    with pytest.raises(npz.DataError) as error:
        npz.read(path)
    assert_one_line(error, path, 'is not an npz file')
    assert not (tmp_path / 'trap').exists()


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (b'', 'is empty (0 bytes)'),
        (b'<!DOCTYPE html><html><body>404</body></html>', 'web page (HTML)'),
        (b'\n  <html>\n<head>', 'web page (HTML)'),
        (b'\x89HDF\r\n\x1a\n' + bytes(100), 'HDF5'),
        (b'\x93NUMPY\x01\x00' + bytes(100), '.npy'),
        (b'version https://git-lfs.github.com/spec/v1\noid sha256:0\n', 'Git LFS pointer'),
        (b'hello', 'is not an npz file'),
        (b'PK\x03\x04' + bytes(200), 'cut short or damaged'),
    ],
)
def test_foreign_files(path, content, message):
    path.write_bytes(content)
    with pytest.raises(npz.DataError) as error:
        npz.read(path)
    assert_one_line(error, path, message, 'again')


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(npz.DataError) as error:
        npz.read(tmp_path / 'no.npz')
    assert_one_line(error, tmp_path / 'no.npz', 'no such file')
    with pytest.raises(npz.DataError) as error:
        npz.read(tmp_path)
    assert_one_line(error, tmp_path, 'is a folder')


def test_a_path_with_a_line_break_still_gives_one_line(tmp_path):
    with pytest.raises(npz.DataError) as error:
        npz.read(tmp_path / 'two\nlines.npz')
    assert '\n' not in str(error.value)


def npy(values):
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def npy_header(shape):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {'descr': '<f4', 'fortran_order': False, 'shape': shape})
    return file.getvalue()


def save_members(path, members):
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as zipped:
        for name, content in members:
            zipped.writestr(name, content)


def test_every_truncation_is_noticed(path):
    np.savez_compressed(path, **raw())
    whole = path.read_bytes()
    for size in range(0, len(whole), 37):
        path.write_bytes(whole[:size])
        with pytest.raises(npz.DataError) as error:
            npz.read(path)
        assert_one_line(error, path)


@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
def test_a_flipped_byte_changes_nothing_or_is_noticed(path, save):
    save(path, **raw())
    whole, expected = path.read_bytes(), npz.read(path)
    noticed = 0
    for position in range(0, len(whole), 11):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        try:
            result = npz.read(path)
        except npz.DataError:
            noticed += 1
        else:
            # Dates, version fields and names of optional columns do not matter; no value that is returned may differ.
            for name, values in result.items():
                np.testing.assert_array_equal(values, expected[name], err_msg=f'{name}, byte {position}')
    assert noticed > 0.7 * len(whole) / 11


def test_a_wrong_checksum_is_noticed(path):
    np.savez(path, **raw())  # stored, so that a changed number does not disturb decompression
    whole = path.read_bytes()
    place = whole.index(raw()['actions'].tobytes())
    path.write_bytes(whole[:place] + b'\x00' + whole[place + 1 :])
    with pytest.raises(npz.DataError) as error:
        npz.read(path)
    assert_one_line(error, path, 'actions', 'CRC')


@pytest.mark.parametrize(
    ('change', 'parts'),
    [
        ({'observations': None}, ('lacks observations', 'it has actions')),
        ({'terminals': None}, ('lacks terminals',)),
        ({'actions': np.zeros((10, 2), np.float32)}, ('columns differ in length', 'actions 10', 'observations 11')),
        ({'qpos': np.zeros((12, 2), np.float32)}, ('columns differ in length', 'qpos 12')),
        ({'actions': np.zeros(11, np.float32)}, ('actions must be floats with 2 axes', '(11,)')),
        ({'actions': np.zeros((11, 1), np.int32)}, ('actions must be floats', 'int32')),
        ({'actions': np.zeros((11, 0), np.float32)}, ('actions is empty', '(11, 0)')),
        ({'observations': np.zeros(11)}, ('observations must be floats or uint8 with 2 or more axes',)),
        ({'observations': np.zeros((11, 2), np.uint16)}, ('observations must be', 'uint16')),
        ({'observations': np.full((11, 2), 'a')}, ('observations must be', '<U1')),
        ({'observations': np.zeros((11, 2), complex)}, ('observations must be', 'complex128')),
        ({'observations': np.zeros((11, 2), 'f4,f4')}, ('observations must be',)),
        ({'observations': np.float32(1)}, ('observations must be',)),
        ({'terminals': np.full(11, 2)}, ('terminals may hold only 0 and 1, but row 0 is 2',)),
        ({'terminals': np.full(11, np.nan)}, ('terminals may hold only 0 and 1, but row 0 is nan',)),
        ({'terminals': np.zeros((11, 1), bool)}, ('terminals must be',)),
        ({'terminals': np.ones(11, bool)}, ('no transition',)),
        ({'button_states': np.zeros((11, 2))}, ('button_states must be integers',)),
        ({'valids': np.zeros(11)}, ('valids 0 but terminals 0',)),
    ],
)
def test_columns_that_make_no_sense(path, change, parts):
    np.savez(path, **{name: x for name, x in {**raw(), **change}.items() if x is not None})
    with pytest.raises(npz.DataError) as error:
        npz.read(path)
    assert_one_line(error, path, *parts)


def test_zero_rows(path):
    np.savez(path, **{name: x[:0] for name, x in raw().items()})
    with pytest.raises(npz.DataError) as error:
        npz.read(path)
    assert_one_line(error, path, 'observations is empty')


@pytest.mark.parametrize(
    ('name', 'index', 'value', 'parts'),
    [
        ('observations', (7, 2), np.nan, ('observations holds nan at row 7, column 2',)),
        ('actions', (10, 0), -np.inf, ('actions holds -inf at row 10, column 0',)),
        ('qpos', (3, 1), np.nan, ('qpos holds nan at row 3, column 1',)),
        ('rewards', 4, np.inf, ('rewards holds inf at row 4',)),
    ],
)
def test_non_finite_numbers_are_named(path, name, index, value, parts):
    data = {**raw(), 'rewards': np.zeros(11)}
    data[name][index] = value
    np.savez(path, **data)
    with pytest.raises(npz.DataError) as error:
        npz.read(path)
    assert_one_line(error, path, *parts)


def test_float64_numbers_that_float32_cannot_hold(path):
    data = raw()
    data['observations'] = data['observations'].astype(np.float64)
    data['observations'][2, 1] = 1e300
    np.savez(path, **data)
    with pytest.raises(npz.DataError, match='observations holds inf at row 2, column 1'):
        npz.read(path)


def test_a_regular_file_whose_next_observations_do_not_follow(path):
    data = {'observations': np.zeros((3, 1)), 'next_observations': np.array([[0.0], [9], [0]]), 'actions': np.zeros((3, 1))}
    np.savez(path, **data, terminals=[False, False, True])
    with pytest.raises(npz.DataError, match='next_observations of row 1 are not observations of row 2'):
        npz.read(path)
    np.savez(path, **data, terminals=[False, True, True])
    np.testing.assert_array_equal(npz.read(path)['observations'][:, 0], [0, 0, 9, 0, 0])
    np.savez(path, **{**data, 'next_observations': np.zeros((3, 2))}, terminals=[0, 0, 1])
    with pytest.raises(npz.DataError, match='differ in type or shape'):
        npz.read(path)


@pytest.mark.parametrize('name', ['/etc/passwd.npy', '../up.npy', 'a/../../up.npy', 'C:\\x.npy', '..\\up.npy'])
def test_member_names_that_point_elsewhere(path, name):
    save_members(path, [(f'{key}.npy', npy(values)) for key, values in raw().items()] + [(name, b'x')])
    with pytest.raises(npz.DataError) as error:
        npz.read(path)
    assert_one_line(error, path, 'unsafe member name')


@pytest.mark.filterwarnings('ignore:Duplicate name')
def test_two_members_of_one_name(path):
    save_members(path, [('observations.npy', npy(np.zeros(3))), ('observations.npy', npy(np.ones(3)))])
    with pytest.raises(npz.DataError, match='two members of one name'):
        npz.read(path)


def test_zip_bomb_is_refused_before_it_is_decompressed(path, monkeypatch):
    data = {**raw(), 'observations': np.zeros((11, 100_000), np.float32)}  # 4.4 MB that compress to a few kB
    np.savez_compressed(path, **data)
    assert path.stat().st_size < 20_000
    npz.read(path)
    monkeypatch.setattr(archive, 'MAX_BYTES', 2**20)
    with pytest.raises(npz.DataError) as error:
        npz.read(path)
    assert_one_line(error, path, 'over the limit')


def test_a_header_that_claims_more_than_there_is(path):
    # numpy alone would first allocate 4 TB.
    huge = npy_header((10**12, 1))
    save_members(path, [('observations.npy', huge)] + [(f'{key}.npy', npy(x)) for key, x in raw().items() if key != 'observations'])
    with pytest.raises(npz.DataError) as error:
        npz.read(path)
    assert_one_line(error, path, 'observations claims shape (1000000000000, 1)')


@pytest.mark.parametrize(
    'content',
    [
        b'',
        b'\x93NUMPY',
        b'\x93NUMPY\x01\x00\xff\xff',
        b'\x93NUMPY\x01\x00\x02\x00{}',
        b'\x93NUMPY\x01\x00\x04\x00{[(\n',
        b'\x93NUMPY\x03\x00\x04\x00\x00\x00{}  ',
        npy_header((-2, -2)) + bytes(16),
        b'not npy at all',
        pickle.dumps([1, 2]),
    ],
)
def test_members_that_are_no_arrays(path, content):
    save_members(path, [('observations.npy', content)])
    with pytest.raises(npz.DataError) as error:
        npz.read(path)
    assert_one_line(error, path, 'observations')


def test_foreign_compression(path):
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_BZIP2) as zipped:
        zipped.writestr('observations.npy', npy(np.zeros((2, 2))))
    with pytest.raises(npz.DataError, match='compressed in a way that numpy does not write'):
        npz.read(path)


# -- writing --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'lengths': [3, 1, 3]}, r'sum\(lengths \+ 1\) = 11'),
        ({'lengths': [0] * 11}, 'no trajectory has a transition'),
        ({'qpos': np.full((11, 1), np.nan)}, 'qpos holds nan at row 0, column 0'),
        ({'actions': np.zeros((5, 2))}, 'differ in length'),
    ],
)
def test_what_could_not_be_read_back_is_not_written(path, change, message):
    path.write_bytes(b'old')
    with pytest.raises(npz.DataError, match=message):
        npz.write(path, **{**columns(), **change})
    assert path.read_bytes() == b'old'
    assert os.listdir(path.parent) == [path.name]


def test_a_write_that_fails_half_way_leaves_the_old_file(path, monkeypatch):
    npz.write(path, **columns())
    before = path.read_bytes()

    def full(file, **_):
        file.write(b'PK half')
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(np, 'savez_compressed', full)
    with pytest.raises(npz.DataError) as error:
        npz.write(path, **columns(1))
    assert_one_line(error, path, 'No space left on device')
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_writing_needs_a_folder_and_a_suffix(tmp_path):
    with pytest.raises(npz.DataError, match='No such file or directory'):
        npz.write(tmp_path / 'no' / 'a.npz', **columns())
    with pytest.raises(npz.DataError, match=r'must end in \.npz'):
        npz.write(tmp_path / 'a.zip', **columns())


# -- finding and downloading ----------------------------------------------------------------------------------------------------------


def test_find(tmp_path):
    folder = tmp_path / 'data'
    folder.mkdir()
    for name in ('b-v0.npz', 'a-v0.npz', 'a-v0-val.npz', '.hidden.npz', 'notes.txt', 'cube-single-play-v0.npz'):
        (folder / name).touch()
    assert npz.find(folder) == [folder / 'a-v0.npz', folder / 'b-v0.npz', folder / 'cube-single-play-v0.npz']
    assert npz.find(str(folder / 'a-v0-val.npz')) == [folder / 'a-v0-val.npz']
    cube = [folder / 'cube-single-play-v0.npz']
    assert npz.find('cube-single-play-v0', folder) == npz.find('ogbench/cube-single-play-singletask-task2-v0', folder) == cube
    (tmp_path / 'none').mkdir()
    for wrong, message in [
        (tmp_path / 'none', 'this folder holds no npz file'),
        (tmp_path / 'x.npz', 'no such file or folder'),
        ('../no-such-recording', 'no such file or folder'),
        ('cube-double-play-v0', '--download'),
    ]:
        with pytest.raises(npz.DataError, match=message):
            npz.find(wrong, folder)


@pytest.mark.parametrize(
    ('name', 'file'),
    [
        ('cube-single-play-v0', 'cube-single-play-v0.npz'),
        ('puzzle-3x3-play-singletask-task1-v0', 'puzzle-3x3-play-v0.npz'),
        ('antmaze-medium-navigate-oraclerep-v0', 'antmaze-medium-navigate-v0.npz'),
        ('cube-single-play-v0-val', 'cube-single-play-v0-val.npz'),
    ],
)
def test_file_names(name, file):
    assert npz.file_name(name) == file
    with pytest.raises(ValueError, match='no name of an OGBench dataset'):
        npz.file_name(f'../{name}')


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves one file whole, cut short or stalled, depending on its name."""

    content = b''
    release = threading.Event()

    def do_GET(self):
        if 'missing' in self.path:
            self.send_error(404)
            return
        page = 'page' in self.path
        content = b'<html>please log in</html>' if page else self.content
        self.send_response(200)
        if 'unsized' not in self.path:
            self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        cut = any(word in self.path for word in ('early', 'stall', 'unsized-cut'))
        self.wfile.write(content[: len(content) // 2] if cut else content)
        if 'stall' in self.path:
            self.wfile.flush()
            self.release.wait(20)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(path, monkeypatch):
    npz.write(path, **columns())
    monkeypatch.setattr(Handler, 'content', path.read_bytes())
    Handler.release.clear()
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, args=(0.05,), daemon=True).start()
        monkeypatch.setattr(npz, 'URL', f'http://127.0.0.1:{httpd.server_port}/ogbench')
        yield httpd
        Handler.release.set()
        httpd.shutdown()


def test_download(server, tmp_path):
    folder = tmp_path / 'new' / 'folder'
    for name in ('cube-single-play-singletask-task1-v0', 'unsized-play-v0'):
        path = npz.download(name, folder, progress=False)
        assert path.read_bytes() == Handler.content
    assert sorted(os.listdir(folder)) == ['cube-single-play-v0.npz', 'unsized-play-v0.npz']
    path.write_bytes(b'mine')
    assert npz.download('unsized-play-v0', folder).read_bytes() == b'mine'  # what is there is not fetched again


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('missing-play-v0', r'answers 404 .*check the name'),
        ('early-play-v0', r'ended after \d+ of \d+ bytes; try again'),
        ('stall-play-v0', r'download failed \(.*timed out'),
        ('page-play-v0', 'web page'),
        ('unsized-cut-v0', 'cut short or damaged'),
    ],
)
def test_a_failed_download_leaves_nothing_behind(server, tmp_path, name, message):
    folder = tmp_path / 'folder'
    with pytest.raises(npz.DataError, match=message) as error:
        npz.download(name, folder, progress=False, timeout=0.3 if 'stall' in name else 30)
    assert '\n' not in str(error.value)
    assert 'http://127.0.0.1' in str(error.value)
    assert os.listdir(folder) == []


def test_download_without_a_server(tmp_path, monkeypatch):
    monkeypatch.setattr(npz, 'URL', 'http://127.0.0.1:9/ogbench')  # nobody listens on the discard port
    with pytest.raises(npz.DataError, match=r'download failed .*put the file into'):
        npz.download('cube-single-play-v0', tmp_path, progress=False)
