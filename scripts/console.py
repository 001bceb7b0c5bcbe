"""Commands of an installed Tether: `tether-train` does what `python scripts/train.py` does, and so on; setup.cfg lists them."""

import functools
import runpy
import sys
from pathlib import Path


def _run(name: str) -> None:
    sys.modules['scripts'] = sys.modules[__name__.rpartition('.')[0]]  # installed, this folder has another name: see setup.cfg
    runpy.run_path(str(Path(__file__).with_name(f'{name}.py')), run_name='__main__')


check_data = functools.partial(_run, 'check_data')
compare = functools.partial(_run, 'compare')
doctor = functools.partial(_run, 'doctor')
evaluate = functools.partial(_run, 'evaluate')
generate = functools.partial(_run, 'generate')
train = functools.partial(_run, 'train')
