"""Names, options and their errors."""

import numpy as np
import pytest

import envs
from envs import registry


def test_parse_reads_values_by_their_looks():
    name = envs.parse('mujoco/Hopper-v5:gravity=0.5,steps=3,flat=true,terrain=rough')
    assert name == ('mujoco', 'Hopper-v5', {'gravity': 0.5, 'steps': 3, 'flat': True, 'terrain': 'rough'})
    assert [type(value) for value in name.options.values()] == [float, int, bool, str]
    assert envs.parse('mine') == ('', 'mine', {})


@pytest.mark.parametrize('name', ['probe/line:', 'probe/line:horizon', 'probe/line:horizon=', 'probe/line:=3', 'probe/line:horizon=3,'])
def test_malformed_options_are_refused(name):
    with pytest.raises(ValueError, match='cannot read'):
        envs.make(name)


@pytest.mark.parametrize(
    ('name', 'answer'),
    [
        ('probe/lin', 'did you mean probe/line'),
        ('prob/line', r"unknown environment 'prob/line'; did you mean probe/line\?"),
        ('line', r'did you mean probe/line\?'),
        ('nothing/like-it', r'known: lqr/\.\.\., ogbench/\.\.\., probe/\.\.\.'),
        ('ogbench/pointmaze-medum-singletask-task1-v0', 'did you mean ogbench/pointmaze-medium-singletask-task1-v0 or'),
        ('ogbench/pointmaze-medium-singletask-task9-v0', 'did you mean ogbench/pointmaze-medium-singletask-task'),
        ('pointmaze-medium-navigate-singletask-task1-v0', r'did you mean ogbench/pointmaze-medium-singletask-task1-v0\?'),
        ('ogbench/pointmaze-medium-navigate-v0', 'draws its goals at random; .* write one task: ogbench/pointmaze-medium-singletask-v0'),
        ('probe/constant:horizon=3', "has no option 'horizon'; it takes none"),
        ('probe/line:horizn=3', "has no option 'horizn'; it takes horizon"),
        ('probe/line:horizon=0', 'at least 1, not 0'),
        ('probe/line:horizon=2.5', 'at least 1, not 2.5'),
        ('probe/line:horizon=true', 'at least 1, not True'),
        ('probe/infinite:reward=nan', 'must be a finite number'),
        ('probe/line:horizon=3,horizon=4', 'gives horizon twice'),
        ('ogbench/cube-single-singletask-v0:implementation=gym', "has no option 'implementation'; it takes none"),
        ('ogbench/pointmaze-medium-singletask-v0:implementation=fast', "must be batched or gym, not 'fast'"),
    ],
)
def test_bad_names_and_options_get_one_line_that_helps(name, answer):
    with pytest.raises(ValueError, match=answer) as caught:
        envs.make(name)
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('numbers', [{'num_envs': 0}, {'num_envs': 1.5}, {'num_workers': -1}])
def test_bad_numbers_are_refused(numbers):
    with pytest.raises(ValueError, match='must be a whole number of at least'):
        envs.make('probe/host-line', **numbers)


def test_names_can_be_made_and_hold_no_pixels():
    names = envs.names()
    assert {'probe/line', 'ogbench/pointmaze-medium-singletask-task1-v0', 'ogbench/cube-single-singletask-v0'} <= set(names)
    assert not [name for name in names if 'visual' in name]


def test_dataset_names_mean_their_environment():
    module, identifier = registry._family('ogbench/cube-double-play-singletask-task3-v0')
    assert (module.__name__, identifier) == ('envs.ogbench', 'cube-double-singletask-task3-v0')
    # The type of a dataset is no part of a name that merely looks like one.
    assert registry._family('ogbench/antsoccer-arena-stitch-singletask-v0')[1] == 'antsoccer-arena-singletask-v0'


def test_a_users_own_environment(monkeypatch):
    monkeypatch.setattr(registry, '_REGISTERED', {})

    def constructor(num_envs, speed=1.0):
        return num_envs, speed

    envs.register('lab/reacher', constructor)
    assert envs.make('lab/reacher:speed=2', num_envs=3) == (3, 2)
    assert 'lab/reacher' in envs.names()
    with pytest.raises(ValueError, match='taken'):
        envs.register('lab/reacher', constructor)
    with pytest.raises(ValueError, match='its options are speed'):
        envs.make('lab/reacher:sped=2')
    with pytest.raises(ValueError, match='did you mean lab/reacher'):
        envs.make('lab/reachr')
    with pytest.raises(ValueError, match='built-in family'):
        envs.register('ogbench/mine', constructor)
    with pytest.raises(ValueError, match='no colon'):
        envs.register('lab/a:b', constructor)
    with pytest.raises(ValueError, match='move its constructor to the top level of a module'):
        envs.make('lab/reacher', num_workers=1)  # a local function cannot be found by another process


def test_relabel_errors():
    with pytest.raises(ValueError, match='no rewards for recorded states'):
        envs.relabel('probe/line', {})
    with pytest.raises(ValueError, match='need the columns qpos'):
        envs.relabel('ogbench/pointmaze-medium-singletask-v0', {'observations': np.zeros((3, 2))})
    with pytest.raises(ValueError, match='button_states'):
        envs.relabel('ogbench/puzzle-3x3-singletask-v0', {'qpos': np.zeros((3, 30))})
