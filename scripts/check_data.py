"""Says what is in data files and what is wrong with them: python scripts/check_data.py FILE... [--env=NAME].

Exit code 0 if all files are usable, else 2 with one line per defect.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from absl import flags

from data import npz, validate
from scripts import startup

ENV = flags.DEFINE_string('env', None, 'Single-task environment; also counts successes and shows the rewards that its task gives.')


def main(argv: list[str]) -> int:
    """Checks every file and returns the exit code."""
    if len(argv) < 2:
        raise ValueError('no file given; usage: python scripts/check_data.py FILE... [--env=NAME]')
    num_defects = 0
    for path in argv[1:]:
        try:
            report = validate.validate(path)
            print(validate.format(report))
            defects = [f'{path}: {defect}' for defect in report.defects]
            if ENV.value and not defects:
                print(describe_task(path, ENV.value))
        except npz.DataError as error:
            defects = [str(error)]
        for defect in defects:
            print(startup.line(defect), file=sys.stderr)
        num_defects += len(defects)
    return 2 if num_defects else 0


def describe_task(path: str, name: str) -> str:
    """What the rewards of environment `name` make of a file."""
    import envs  # not at the top: a plain check needs no environment

    arrays = npz.read(path)
    rewards, masks = envs.relabel(name, arrays)
    finals = np.cumsum(arrays['lengths'] + 1) - 1
    rewards, solved = np.delete(rewards, finals), np.delete(masks, finals) == 0
    episodes = np.repeat(np.arange(len(finals)), arrays['lengths'])
    return (
        f'  {name}: rewards {rewards.min():.4g} to {rewards.max():.4g}; solved at {solved.sum()} of {len(solved)} transitions, '
        f'in {len(np.unique(episodes[solved]))} of {len(finals)} episodes'
    )


if __name__ == '__main__':
    startup.run(main)
