"""What a run takes, and what there is."""

import collections
import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from agents.types import Agent, Need, Phase, Stage
from data import replay
from envs.types import ArraySpec, Spec
from training import loop, space

SPEC = Spec(ArraySpec((2,)), ArraySpec((1,), -1, 1), 20)  # a row: 2 x 8 B observations, 4 B action, 12 B reward, mask, truncation = 32 B


class Device(NamedTuple):
    platform: str
    stats: dict[str, int] | None

    def memory_stats(self):
        return self.stats


def carry(capacity, state):
    """Two members of three environments."""
    ring = jax.eval_shape(jax.vmap(lambda _: replay.init(SPEC, capacity, 3)), jnp.zeros(2))
    zero = jnp.zeros(2, jnp.int32)
    return loop.Carry(state, {}, {'env': ring}, zero, loop.Health(zero, zero, jnp.zeros(2, bool)))


@pytest.mark.parametrize(
    ('total', 'interval', 'rows'),
    [
        (50, 10, 50),  # the ring is never full: each row is written once
        (10**6, 10, 100 + 3 * 10),  # keep 2: a full ring, the rest of its oldest part, and the parts of two later checkpoints
        (10**6, 10**6, 4 * 100),  # each checkpoint has all of the ring, and one more is written while the others are there
    ],
)
def test_by_hand(total, interval, rows):
    """A member's state: 10 floats, a key of 2 words, three counters and a flag. Pointer, size and counter of 6 environments."""
    state = {'weight': jnp.zeros((2, 10)), 'key': jax.random.split(jax.random.key(0), 2)}
    size = space.measure(carry(100, state), {'env': (total, interval)}, keep=2)
    assert size == space.Size(replays=6 * 100 * 32, state=2 * (40 + 8) + 2 * (3 * 4 + 1) + 6 * 12, parts=6 * rows * 32)


def test_how_much_is_acted():
    """80 updates with a rollout of 5 steps; a rider every 3 updates (27 of them) acts 2 steps there and 7 elsewhere."""
    update: Any = None
    phases = {
        'train': Phase({'a': Need('rollout', length=5, source='env'), 'b': Need('transitions', 8, source='env')}, update),
        'rider': Phase({'a': Need('rollout', length=2, source='env'), 'c': Need('rollout', length=7, source='other')}, update),
    }
    agent: Any = Agent(None, phases, None, {}, {})  # type: ignore[arg-type]
    stage = Stage('train', 1000, {'rider': 3})
    assert loop.acted(agent, stage, 'env', 80) == 80 * 5 + 27 * 2
    assert loop.acted(agent, stage, 'other', 80) == 27 * 7
    assert loop.acted(agent, Stage('train', 1000), 'other', 80) == 0
    assert loop.acted(agent, stage, 'env', 0) == 0


def test_an_empty_replay_is_what_init_gives():
    ring = jax.vmap(lambda _: replay.init(SPEC, 4, 3))(jnp.zeros(2))
    made = loop.empty_replays(jax.eval_shape(lambda: {'env': ring}), jax.sharding.SingleDeviceSharding(jax.devices()[1]))['env']
    assert jax.tree.structure(made) == jax.tree.structure(ring)
    for ours, theirs in zip(jax.tree.leaves(made), jax.tree.leaves(ring), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert (ours == theirs).all()
        assert ours.devices() == {jax.devices()[1]}
    assert len({leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(made)}) == len(jax.tree.leaves(made))  # each may be donated


def test_memory(monkeypatch, tmp_path):
    size = space.Size(replays=3_000_000, state=500_000, parts=0)
    for free, fits in ((None, True), (3_500_000, True), (3_499_999, False)):
        monkeypatch.setattr(space, 'free_memory', lambda devices, free=free: free)
        if fits:
            space.check_memory(size, [], 1000)
        else:
            with pytest.raises(
                ValueError, match=r'^replay and state take 3\.5 MB, but 3\.5 MB of memory are free: lower --replay_capacity=1000$'
            ):
                space.check_memory(size, [], 1000)


def test_free_memory(monkeypatch, tmp_path):
    gpus = [Device('gpu', {'bytes_limit': 100, 'bytes_in_use': 30}), Device('gpu', {'bytes_limit': 100})]
    assert space.free_memory(gpus) == 2 * 70  # the fuller one has no room for more than 70
    assert space.free_memory([gpus[0], Device('gpu', None)]) is None
    assert space.free_memory([Device('tpu', {'bytes_in_use': 3})]) is None
    cpus = [Device('cpu', None)] * 2
    monkeypatch.setattr(space, 'MEMINFO', tmp_path / 'meminfo')
    assert space.free_memory(cpus) is None
    space.MEMINFO.write_text('MemTotal:       16384 kB\nMemFree:         1 kB\nMemAvailable:    2000 kB\n')
    assert space.free_memory(cpus) == 2000 * 1024
    space.MEMINFO.write_text('MemTotal:       16384 kB\n')
    assert space.free_memory(cpus) is None


def test_this_machine_tells_its_memory():
    free = space.free_memory(jax.local_devices())
    assert free is None or free > 2**20


def test_disk(monkeypatch, tmp_path):
    """keep 2: three states of 100 B and 500 B of parts. 150 B of the folder's own checkpoints count as free."""
    asked = []

    def usage(path):
        asked.append(path)
        return collections.namedtuple('usage', 'free')(free)

    monkeypatch.setattr(shutil, 'disk_usage', usage)
    size = space.Size(replays=1, state=100, parts=500)
    run = tmp_path / 'new' / 'run'
    free = 800
    space.check_disk(size, run, 2, 64)
    assert asked == [tmp_path]
    free = 799
    with pytest.raises(
        ValueError, match=r'take up to 800 B, but .*/new/run has room for 799 B: lower --replay_capacity=64 or --checkpoint_keep=2'
    ):
        space.check_disk(size, run, 2, 64)
    (run / 'checkpoints' / 'step_000000001').mkdir(parents=True)
    (run / 'checkpoints' / 'step_000000001' / 'state').write_bytes(bytes(100))
    (run / 'checkpoints' / 'step_000000001.replay_0.npz').write_bytes(bytes(50))
    (run / 'metrics.csv').write_bytes(bytes(1000))
    free = 650
    space.check_disk(size, run, 2, 64)
    assert asked[-1] == run
    free = 649
    with pytest.raises(ValueError, match='has room for 799 B'):
        space.check_disk(size, run, 2, 64)
    with pytest.raises(ValueError, match=r'lower --checkpoint_keep=8, or choose another --out$'):
        space.check_disk(size._replace(parts=0), run, 8, 64)


@pytest.mark.parametrize(
    ('size', 'text'),
    [
        (0, '0 B'),
        (999, '999 B'),
        (1000, '1.0 kB'),
        (999_949, '999.9 kB'),
        (999_950, '1.0 MB'),
        (2_400_000_000, '2.4 GB'),
        (10**16, '10000.0 TB'),
    ],
)
def test_spell(size, text):
    assert space.spell(size) == text
