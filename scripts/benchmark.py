"""Runs a side-by-side speed measurement and prints its result as JSON.

python scripts/benchmark.py NAME [--peer=CHECKOUT] [--out=FILE]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import startup

startup.set_up_jax()

from absl import flags

from training import folder

PEER = flags.DEFINE_string('peer', None, "Checkout of the peer's code, for benchmarks that have one.")
OUT = flags.DEFINE_string('out', None, 'Also write the result to this file.')


def main(argv: list[str]) -> None:
    module = startup.load_named('benchmarks', argv, '.py')
    if PEER.value and not Path(PEER.value).is_dir():
        raise ValueError(f'--peer={PEER.value} is not a folder')
    result = module.run(Path(PEER.value) if PEER.value else None)
    print(folder.to_json(result))
    if OUT.value:
        folder.write_json(Path(OUT.value), result)


if __name__ == '__main__':
    startup.run(main)
