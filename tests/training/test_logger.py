"""The metrics file: nothing dropped, nothing twice, nothing half, and a full disk stops nobody."""

import contextlib
import csv
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from training import folder, logger
from training.logger import Logger

ROOT = Path(__file__).resolve().parents[2]


def make(path, **arguments) -> tuple[Logger, list[str]]:
    lines: list[str] = []
    return Logger(path, announce=lines.append, **{'tensorboard': False, **arguments}), lines


def rows_of(path: Path, name: str = 'metrics.csv') -> list[dict[str, str]]:
    with open(path / name, newline='') as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------------------------------------------------------- the columns


def test_rows_as_text(tmp_path):
    log, lines = make(tmp_path)
    log.write(
        10, [{'seed': 0, 'setting': '', 'loss': 0.1, 'count': 3}, {'seed': np.int64(1), 'update': 10, 'loss': float('nan'), 'count': None}]
    )
    assert (tmp_path / 'metrics.csv').read_text() == 'update,seed,setting,loss,count\n10,0,,0.1,3.0\n10,1,,nan,\n'
    log.write(20, [])
    log.write(30, [{'seed': 0, 'setting': 'a=1,b="x"', 'loss': jnp.float32(0.1), 'count': np.array([2])}])
    assert (tmp_path / 'metrics.csv').read_text().split('\n')[3] == '30,0,"a=1,b=""x""",0.10000000149011612,2.0'
    assert lines == []
    assert not log.failed


def test_a_new_column_widens_the_file(tmp_path):
    log, _ = make(tmp_path)
    log.write(1, [{'seed': 0, 'loss': 1.0}])
    log.write(2, [{'seed': 0, 'loss': 2.0, 'eval/success': 0.5}, {'seed': 1, 'time': 3.0}])
    log.write(3, [{'seed': 0, 'eval/success': None}])
    text = 'update,seed,setting,loss,eval/success,time\n1,0,,1.0,,\n2,0,,2.0,0.5,\n2,1,,,,3.0\n3,0,,,,\n'
    assert (tmp_path / 'metrics.csv').read_text() == text
    assert os.listdir(tmp_path) == ['metrics.csv']


def test_a_metric_that_is_none_has_a_column(tmp_path):
    log, _ = make(tmp_path)
    log.write(1, [{'seed': 0, 'kl': None}])
    assert np.isnan(logger.read(tmp_path)['kl']).all()


def test_read(tmp_path):
    log, _ = make(tmp_path)
    values = [1 / 3, np.float32(1e-30), -0.0, np.inf, -np.inf, np.nan, 1e300]
    for update, value in enumerate(values):
        log.write(update, [{'seed': 4, 'setting': 'tau=0.1, x', 'value': value}, {'seed': 5}])
    columns = logger.read(tmp_path)
    assert list(columns) == ['update', 'seed', 'setting', 'value']
    np.testing.assert_array_equal(columns['value'][::2], np.array(values, np.float64))
    assert np.isnan(columns['value'][1::2]).all()
    np.testing.assert_array_equal(columns['update'], np.repeat(np.arange(7.0), 2))
    np.testing.assert_array_equal(columns['seed'], [4, 5] * 7)
    assert columns['setting'].tolist() == ['tau=0.1, x', ''] * 7
    assert columns['value'].dtype == np.float64


def test_a_new_logger_continues_the_file(tmp_path):
    make(tmp_path)[0].write(1, [{'seed': 0, 'a': 1.0}])
    make(tmp_path)[0].write(2, [{'seed': 0, 'b': 2.0}])
    assert (tmp_path / 'metrics.csv').read_text() == 'update,seed,setting,a,b\n1,0,,1.0,\n2,0,,,2.0\n'


@pytest.mark.parametrize(
    ('row', 'found'),
    [
        ({'loss': 1.0}, 'needs a seed'),
        ({'seed': 0, 'update': 4}, 'update 5'),
        ({'seed': 0, 'setting': 'a\nb'}, 'one line of text'),
        ({'seed': 0, 'setting': None}, 'one line of text'),
        ({'seed': 0, 'loss': np.zeros(2)}, 'metric loss must be one number'),
        ({'seed': 0, 'loss': 'high'}, 'metric loss must be one number'),
        ({'seed': 0, 'a\nb': 1.0}, 'no name for a metric'),
    ],
)
def test_malformed_rows(tmp_path, row, found):
    log, _ = make(tmp_path)
    with pytest.raises(ValueError, match=found):
        log.write(5, [{'seed': 0, 'loss': 1.0}, row])
    assert os.listdir(tmp_path) == []


def test_files_that_are_not_ours(tmp_path):
    with pytest.raises(ValueError, match='does not exist'):
        logger.read(tmp_path)
    (tmp_path / 'metrics.csv').write_text('step,loss\n1,2\n')
    for call in (lambda: logger.read(tmp_path), lambda: make(tmp_path)[0].write(1, [{'seed': 0}]), lambda: make(tmp_path)[0].resume(1)):
        with pytest.raises(ValueError, match='no header that starts with update,seed,setting'):
            call()
    assert (tmp_path / 'metrics.csv').read_text() == 'step,loss\n1,2\n'


# ------------------------------------------------------------------------------------------------------------------------ resume


def filled(path: Path) -> Logger:
    log, _ = make(path)
    for update in (10, 20, 30):
        log.write(update, [{'seed': seed, 'loss': update + seed / 10} for seed in (0, 1)])
    return log


def test_resume_moves_later_rows(tmp_path):
    filled(tmp_path)
    log, _ = make(tmp_path)
    assert log.resume(20) == 2
    assert [(row['update'], row['seed']) for row in rows_of(tmp_path)] == [('10', '0'), ('10', '1'), ('20', '0'), ('20', '1')]
    assert [(row['update'], row['loss']) for row in rows_of(tmp_path, 'metrics.discarded.csv')] == [('30', '30.0'), ('30', '30.1')]
    log.write(30, [{'seed': 0, 'loss': 7.0, 'new': 1.0}])
    assert rows_of(tmp_path)[-1] == {'update': '30', 'seed': '0', 'setting': '', 'loss': '7.0', 'new': '1.0'}
    # Discarded once more, with one more column: the earlier ones stay.
    assert make(tmp_path)[0].resume(0) == 5
    assert rows_of(tmp_path) == []
    assert [row['new'] for row in rows_of(tmp_path, 'metrics.discarded.csv')] == ['', '', '', '', '', '', '1.0']


def test_resume_moves_surplus_rows_of_the_last_update(tmp_path):
    """After 20 updates two rows with a loss, which move, and one without. Two later ones move anyway; the second time there is none."""
    filled(tmp_path).write(20, [{'seed': 0, 'eval/success': 1.0}])
    for moved in (4, 0):
        assert make(tmp_path)[0].resume(20, lambda row: row['loss'] != '') == moved
        assert [(row['update'], row['loss'], row['eval/success']) for row in rows_of(tmp_path)[2:]] == [('20', '', '1.0')]


def test_resume_without_need(tmp_path):
    assert make(tmp_path)[0].resume(5) == 0
    assert os.listdir(tmp_path) == []
    filled(tmp_path)
    before = (tmp_path / 'metrics.csv').read_bytes()
    assert make(tmp_path)[0].resume(30) == 0
    assert (tmp_path / 'metrics.csv').read_bytes() == before
    assert os.listdir(tmp_path) == ['metrics.csv']


@pytest.mark.parametrize('cut', [1, 3, 6, 9])
def test_resume_drops_a_torn_line(tmp_path, cut):
    """The last line is '30,1,,30.1'; also when only its newline lacks, its last digits may lack."""
    filled(tmp_path)
    path = tmp_path / 'metrics.csv'
    os.truncate(path, path.stat().st_size - cut)
    torn = path.read_text().split('\n')[-1]
    assert len(logger.read(tmp_path)['update']) == 5  # while it is being written, say
    assert make(tmp_path)[0].resume(1000) == 1
    assert len(rows_of(tmp_path)) == 5
    assert path.read_text().endswith('30,0,,30.0\n')
    discarded = (tmp_path / 'metrics.discarded.csv').read_text().split('\n')[1]
    assert discarded.rstrip(',') == torn.rstrip(',')


def test_a_torn_line_is_cut_without_resume(tmp_path):
    filled(tmp_path)
    with open(tmp_path / 'metrics.csv', 'ab') as file:
        file.write(b'40,0,"\xc3')
    make(tmp_path)[0].write(50, [{'seed': 0, 'loss': 5.0}])
    assert [row['update'] for row in rows_of(tmp_path)] == ['10', '10', '20', '20', '30', '30', '50']
    assert len(rows_of(tmp_path, 'metrics.discarded.csv')) == 1


def test_damage_in_the_middle(tmp_path):
    filled(tmp_path)
    path = tmp_path / 'metrics.csv'
    path.write_text(path.read_text().replace('20,0,,20.0', '20,0,\0\0\0'))
    with pytest.raises(ValueError, match='has damaged lines'):
        logger.read(tmp_path)
    assert make(tmp_path)[0].resume(30) == 1
    assert len(logger.read(tmp_path)['loss']) == 5


def test_resume_that_is_killed_in_between_is_repeated(tmp_path, monkeypatch):
    filled(tmp_path)
    real = folder.write_text

    def killed(path, text):
        if path.name == 'metrics.csv':
            raise KeyboardInterrupt
        real(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(folder, 'write_text', killed)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path)[0].resume(10)
    assert len(rows_of(tmp_path)) == 6
    assert len(rows_of(tmp_path, 'metrics.discarded.csv')) == 4
    make(tmp_path)[0].resume(10)
    assert len(rows_of(tmp_path)) == 2
    assert len(rows_of(tmp_path, 'metrics.discarded.csv')) == 4  # not twice


WRITER = """
import sys
from training.logger import Logger
log = Logger(sys.argv[1], tensorboard=False)
print('ready', flush=True)
update = 0
while True:
    update += 1
    log.write(update, [{'seed': seed, 'x': update + seed, **({f'new_{update}': 1.0} if update % 20 == 0 else {})} for seed in range(3)])
    print(update, flush=True)
"""


def test_kill_minus_nine(tmp_path):
    process = subprocess.Popen([sys.executable, '-c', WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(100):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    reported = max([99, *(int(line) for line in process.stdout.read().split('\n')[:-1])])
    process.stdout.close()
    make(tmp_path)[0].resume(reported)
    columns = logger.read(tmp_path)
    # Everything that was reported is there, once.
    np.testing.assert_array_equal(columns['update'], np.repeat(np.arange(1.0, reported + 1), 3))
    np.testing.assert_array_equal(columns['x'], columns['update'] + columns['seed'])


# --------------------------------------------------------------------------------------------------------------------- full disk


@contextlib.contextmanager
def limited_files(size: int):
    """No file may grow beyond `size` bytes: the kernel refuses the rest of a write, as on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize('new_column', [False, True])
@pytest.mark.parametrize('room', [0, 5, 25])
def test_a_full_disk(tmp_path, new_column, room):
    """Room for none, a part, or two and a half of the next rows: training goes on, and once there is room nothing lacks or is double."""
    log = filled(tmp_path)
    lines: list[str] = []
    log._announce = lines.append
    size = (tmp_path / 'metrics.csv').stat().st_size
    with limited_files(size + room):
        for update in (40, 50):
            log.write(update, [{'seed': seed, 'loss': 4.0} for seed in range(3)])
            assert log.failed
    assert len(lines) == 1
    assert 'cannot write' in lines[0]
    assert 'training goes on' in lines[0]
    log.write(60, [{'seed': 0, 'loss': 6.0, **({'new': 1.0} if new_column else {})}])
    assert not log.failed
    columns = logger.read(tmp_path)
    np.testing.assert_array_equal(columns['update'], [10, 10, 20, 20, 30, 30, 40, 40, 40, 50, 50, 50, 60])
    assert ('new' in columns) == new_column


def test_a_folder_that_vanished(tmp_path):
    log, lines = make(tmp_path / 'gone')
    log.write(1, [{'seed': 0}])
    log.write(2, [{'seed': 0}])
    assert log.failed
    assert len(lines) == 1
    (tmp_path / 'gone').mkdir()
    log.write(3, [{'seed': 0}])
    assert not log.failed
    assert logger.read(tmp_path / 'gone')['update'].tolist() == [1, 2, 3]


# -------------------------------------------------------------------------------------------------------------------- TensorBoard


def crc32c(data: bytes) -> int:
    """Bit by bit, from the polynomial (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def events_of(path: Path) -> list:
    from tensorboardX.proto import event_pb2

    data, events = path.read_bytes(), []
    while data:
        (length,), (length_crc,) = struct.unpack('<Q', data[:8]), struct.unpack('<I', data[8:12])
        body, (body_crc,) = data[12 : 12 + length], struct.unpack('<I', data[12 + length : 16 + length])
        assert (length_crc, body_crc) == (masked(data[:8]), masked(body))
        events.append(getattr(event_pb2, 'Event').FromString(body))  # noqa: B009  (made at run time, unknown to type checkers)
        data = data[16 + length :]
    return events


def test_tensorboard_events(tmp_path, caplog):
    assert crc32c(b'123456789') == 0xE3069283  # the check value of CRC-32C
    threads = threading.active_count()
    log, lines = make(tmp_path, tensorboard=True)
    log.write(10, [{'seed': 0, 'loss': 1.0, 'eval/success': None}, {'seed': 1, 'loss': 2.0}])
    broken = {'loss': float('nan'), 'grad': float('inf'), 'tau': 0.25}
    log.write(20, [{'seed': 0, 'loss': 3.0, 'eval/success': 0.5}, {'seed': 0, 'setting': 'kl=0.1/x', **broken}])
    assert lines == []
    assert caplog.text == ''  # tensorboardX warns of numbers that are not finite
    paths = sorted((tmp_path / 'events').rglob('events.out.tfevents.*'))
    assert [str(path.parent.relative_to(tmp_path / 'events')) for path in paths] == ['kl=0.1%2Fx/seed_0', 'seed_0', 'seed_1']
    first = events_of(paths[1])
    assert first[0].file_version == 'brain.Event:2'
    scalars = [(event.step, value.tag, value.simple_value) for event in first for value in event.summary.value]
    assert scalars == [(10, 'loss', 1.0), (20, 'loss', 3.0), (20, 'eval/success', 0.5)]
    assert [(value.tag, value.simple_value) for value in events_of(paths[0])[1].summary.value] == [('tau', 0.25)]
    assert [rows_of(tmp_path)[-1][name] for name in broken] == ['nan', 'inf', '0.25']
    assert threading.active_count() == threads


def test_tensorboard_hides_what_a_resume_discards(tmp_path):
    log, _ = make(tmp_path, tensorboard=True)
    log.write(10, [{'seed': 0, 'loss': 1.0}])
    log.write(20, [{'seed': 0, 'loss': 2.0}])
    log, _ = make(tmp_path, tensorboard=True)
    log.resume(10)
    log.write(20, [{'seed': 0, 'loss': 3.0}])
    old, new = sorted((tmp_path / 'events').rglob('events.out.tfevents.*'))
    assert [event.step for event in events_of(old)] == [0, 10, 20]
    version, start, event = events_of(new)
    assert version.file_version == 'brain.Event:2'
    assert (start.session_log.status, start.step) == (start.session_log.START, 11)
    assert (event.step, event.summary.value[0].simple_value) == (20, 3.0)


@pytest.mark.parametrize(('surplus', 'step'), [(lambda row: row['loss'] != '', 21), (lambda row: True, 11)])
def test_tensorboard_hides_surplus_rows_if_nothing_else_was_written_then(tmp_path, surplus, step):
    log, _ = make(tmp_path, tensorboard=True)
    log.write(10, [{'seed': 0, 'loss': 1.0}])
    log.write(20, [{'seed': 0, 'loss': 2.0}, {'seed': 0, 'eval/success': 1.0}])
    log, _ = make(tmp_path, tensorboard=True)
    log.resume(20, surplus)
    log.write(30, [{'seed': 0, 'loss': 3.0}])
    _, new = sorted((tmp_path / 'events').rglob('events.out.tfevents.*'))
    assert events_of(new)[1].step == step


def test_tensorboard_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'tensorboardX', None)
    monkeypatch.delitem(sys.modules, 'tensorboardX.proto', raising=False)
    monkeypatch.delitem(sys.modules, 'tensorboardX.summary', raising=False)
    log, lines = make(tmp_path, tensorboard=True)
    log.write(1, [{'seed': 0, 'loss': 1.0}])
    log.write(2, [{'seed': 0, 'loss': 1.0}])
    assert lines == ['TensorBoard events are off: pip install tensorboardX to have them; metrics.csv has everything']
    assert len(rows_of(tmp_path)) == 2
    assert not log.failed


def test_tensorboard_on_a_full_disk(tmp_path):
    log, lines = make(tmp_path, tensorboard=True)
    log.write(1, [{'seed': 0, 'loss': 1.0}])
    with limited_files(0):
        for update in range(2, 30):
            log.write(update, [{'seed': 0, 'loss': 1.0}])  # neither blocks nor raises
    assert len(lines) == 2
    assert 'events are off from here on' in lines[1]
    log.write(30, [{'seed': 0, 'loss': 1.0}])
    assert len(rows_of(tmp_path)) == 30
    assert not log.failed


def test_importing_needs_no_tensorboard():
    done = subprocess.run(
        [sys.executable, '-c', 'import training.logger, sys; print("tensorboardX" in sys.modules)'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == 'False'
