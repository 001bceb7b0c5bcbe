"""Makes a dataset with a scripted expert, as FILE.npz and FILE-val.npz in OGBench's layout (a tenth as many episodes, at least one).

python scripts/generate.py --env=ogbench/pointmaze-medium-navigate-v0 --num_episodes=100 --out=FILE.npz
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tqdm
from absl import flags

from data import npz
from scripts import startup

ENV = flags.DEFINE_string('env', None, 'Dataset, such as ogbench/pointmaze-medium-navigate-v0 or ogbench/cube-single-play-v0.')
NUM_EPISODES = flags.DEFINE_integer('num_episodes', 100, 'Episodes of the training file.')
SEED = flags.DEFINE_integer('seed', 0, 'A file with more episodes of the same seed begins with a shorter one.')
OUT = flags.DEFINE_string('out', None, 'The training file, ends in .npz.')
NUM_WORKERS = flags.DEFINE_integer('num_workers', 0, 'Processes that share the work (0: this one alone); the result is the same.')
OVERWRITE = flags.DEFINE_bool('overwrite', False, 'Replace existing files.')

SECONDS_BETWEEN_LINES = 10


class Progress:
    """A bar on a terminal, now and then a line elsewhere."""

    def __init__(self, total: int):
        self._bar = tqdm.tqdm(total=total, unit='episode', desc='generating', disable=not sys.stderr.isatty())
        self._total, self._done, self._start = total, 0, time.monotonic()
        self._printed = self._start

    def __call__(self, count: int) -> None:
        self._done += count
        self._bar.update(count)
        now = time.monotonic()
        if self._bar.disable and (now - self._printed >= SECONDS_BETWEEN_LINES or self._done == self._total):
            self._printed = now
            rate = self._done / (now - self._start)
            left = (self._total - self._done) / rate
            print(f'generating: {self._done}/{self._total} episodes, {rate:.2f} per second, {left:.0f} s left', file=sys.stderr, flush=True)

    def close(self) -> None:
        self._bar.close()


def main(argv: list[str]) -> None:
    """Generates both files; the validation file first, so that a training file is never without one."""
    if len(argv) > 1:
        raise ValueError(f'unexpected argument {argv[1]!r}; options are written --name=value')
    if not ENV.value or not OUT.value:
        raise ValueError(f'--{"out" if ENV.value else "env"} is missing')
    path = Path(OUT.value).expanduser()
    if path.suffix != '.npz':
        raise ValueError(f'--out={OUT.value} must end in .npz')
    files = {'val': path.with_name(f'{path.stem}-val.npz'), 'train': path}
    existing = [str(file) for file in files.values() if file.exists()]
    if existing and not OVERWRITE.value:
        raise ValueError(f'this would replace {" and ".join(existing)}; choose another --out, or pass --overwrite')
    for flag, smallest in ((NUM_EPISODES, 1), (SEED, 0), (NUM_WORKERS, 0)):
        if flag.value < smallest:
            raise ValueError(f'--{flag.name} must be at least {smallest}, not {flag.value}')

    from envs import generate  # after the checks: it loads the simulator

    name = f'ogbench/{generate.recipe(ENV.value).name}'
    num_episodes = {'val': max(NUM_EPISODES.value // 10, 1), 'train': NUM_EPISODES.value}
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f'--out={OUT.value}: the folder cannot be written to; choose another')
    start, progress = time.monotonic(), Progress(sum(num_episodes.values()))
    try:
        made = {
            split: generate.generate(name, count, SEED.value, split=split, num_workers=NUM_WORKERS.value, progress=progress)
            for split, count in num_episodes.items()
        }
    finally:
        progress.close()
    seconds = time.monotonic() - start
    for split, result in made.items():
        npz.write(files[split], **result.arrays)
        rows = len(result.arrays['actions'])
        print(f'{files[split]}: {num_episodes[split]} episodes, {rows} rows, {result.goals_reached} of {result.goals_set} goals reached')
    rows = sum(len(result.arrays['actions']) for result in made.values())
    print(f'{name}, seed {SEED.value}: {rows} steps in {seconds:.1f} s ({rows / seconds:.0f} per second)')


if __name__ == '__main__':
    startup.run(main)
