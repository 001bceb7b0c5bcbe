"""Videos: what can be drawn is, what cannot is said in one line."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import agents
import envs
from envs import registry
from training import members, video


def test_an_episode_becomes_a_gif(tmp_path):
    """A strip of 8 x 64 pixels, every fourth of 10 control steps: at most 3 frames (equal ones are merged)."""
    env = video.open_env('probe/host-line:horizon=10')
    agent = agents.make('template', env.spec, hidden_sizes=(8,))
    team = members.over_grid(agent, (3,))
    run = SimpleNamespace(agent=agent, state=members.init_states(agent, team), members=team, counter=0)
    with Image.open(video.record(run, env, 'eval', tmp_path / 'video' / 'eval.gif')) as image:
        assert (image.format, image.size) == ('GIF', (64, 8))
        assert 1 <= getattr(image, 'n_frames', 1) <= 3


class Blind(envs.SlotEnv):
    """Fails in `render` like an OpenGL library, with a message of several lines."""

    def __init__(self, num_envs):
        super().__init__(envs.make('probe/line').spec, num_envs)

    def _reset(self, slot, seed):
        return np.zeros(1, np.float32)

    def _step(self, slots, actions):
        raise AssertionError

    def _get_simulation(self):
        return {}

    def _set_simulation(self, state):
        pass

    def render(self, slot):
        raise AttributeError('no attribute\nglGetError')


def broken_import(num_envs):
    raise ImportError('no library')


@pytest.mark.parametrize(('constructor', 'reason'), [(Blind, 'no attribute glGetError'), (broken_import, 'no library')])
@pytest.mark.parametrize(('variable', 'named'), [('osmesa', 'MUJOCO_GL=osmesa'), ('', 'MUJOCO_GL unset')])
def test_what_cannot_be_drawn_is_said(monkeypatch, constructor, reason, variable, named):
    monkeypatch.setenv('MUJOCO_GL', variable)
    monkeypatch.setitem(registry._REGISTERED, 'lab/blind', registry.Registered(constructor, False))
    with pytest.raises(ValueError, match=f'cannot draw lab/blind with {named} .{reason}.; choose MUJOCO_GL=egl') as caught:
        video.open_env('lab/blind')
    assert '\n' not in str(caught.value)
    assert caught.value.__cause__ is not None  # `--verbosity=1` shows the whole story


def test_names_and_devices_keep_their_own_errors():
    for name, message in (('probe/line', 'runs on the device'), ('probe/lin', 'did you mean probe/line')):
        with pytest.raises(ValueError, match=message):
            video.open_env(name)
