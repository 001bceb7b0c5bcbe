"""One episode as an animation."""

import os
import textwrap
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

import envs
from training import streams
from training.host import Actor

EVERY = 4  # control steps per frame


def open_env(name: str) -> Any:
    """A HostEnv of one slot that has drawn a frame.

    Raises ValueError (one line) for an unknown name, an environment without pictures, or a machine that cannot draw.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # GLFW warns of the missing display before MuJoCo gives up
            env = envs.make(name)
            if not env.on_device:
                env.reset(np.zeros(1, np.int64), np.ones(1, bool))
                env.render(0)
                return env
    except ValueError:
        raise
    # Each OpenGL library fails in its own way, some when MuJoCo is imported: AttributeError, ImportError, RuntimeError, mujoco.FatalError.
    except Exception as error:
        backend = f'MUJOCO_GL={os.environ["MUJOCO_GL"]}' if os.environ.get('MUJOCO_GL') else 'MUJOCO_GL unset'
        raise ValueError(
            f'no video: cannot draw {name} with {backend} ({textwrap.shorten(str(error), 120)}); choose MUJOCO_GL=egl (library libegl1) '
            'or MUJOCO_GL=osmesa (library libosmesa6), doctor.py shows which of them render, or leave --video out'
        ) from error
    raise ValueError(f'no video: {name} runs on the device, where nothing draws: leave --video out')


def record(run: Any, env: Any, mode: str, out: Path) -> Path:
    """Acts one episode with the first member of a loaded run in an `open_env` and writes it as a GIF."""
    from PIL import Image

    state = jax.tree.map(lambda leaf: leaf[:1], run.state)
    keys = jax.vmap(jax.random.key)(np.asarray(run.members.seeds[:1], np.uint32))
    actor = Actor(run.agent.policy, env, 1, mode)
    actor.start(state, np.asarray([streams.start_seed(0)]))
    frames, live, block, steps = [], np.ones(1, bool), 0, 0
    while live.any():
        block_keys = jax.vmap(lambda key, block=block: streams.eval_key(key, run.counter, mode, block))(keys)
        for step in actor.block(state, block_keys, live, reset_seeds=None):
            if steps % EVERY == 0:
                frames.append(Image.fromarray(env.render(0)))
            steps += 1
            live = live & (step['masks'] > 0.5) & (step['truncations'] < 0.5)
        block += 1
    out.parent.mkdir(parents=True, exist_ok=True)
    frames[0].save(out, save_all=True, append_images=frames[1:], duration=50, loop=0)
    return out
