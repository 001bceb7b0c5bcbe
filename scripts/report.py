"""Measures a report again.

python scripts/report.py NAME --scale=smoke|report --out=DIR
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import startup

startup.set_up_jax()

from absl import flags

SCALE = flags.DEFINE_enum('scale', 'smoke', ['smoke', 'report'], 'smoke runs the code, report measures.')
OUT = flags.DEFINE_string('out', None, 'Folder for runs and results; what is done there already is kept.')


def main(argv: list[str]) -> None:
    run = startup.load_named('reports', argv, 'experiment.py').run
    if not OUT.value:
        raise ValueError('--out is missing')
    run(SCALE.value, Path(OUT.value).resolve())


if __name__ == '__main__':
    startup.run(main)
