"""One episode as an animation."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from training import streams
from training.host import Actor

EVERY = 4  # control steps per frame


def record(run: Any, env: Any, mode: str, out: Path) -> Path:
    """Acts one episode with the first member of a loaded run in a HostEnv of one slot and writes it as a GIF.

    Raises ValueError for an environment that cannot be rendered here; whatever the GL library raises passes through.
    """
    if env.on_device:
        raise ValueError('environments on the device have no renderer')
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
