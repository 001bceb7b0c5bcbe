"""Compares runs: final scores with intervals, paired differences where the seeds agree, and the curves in one figure.

python scripts/compare.py RUN RUN ... [--out=compare.png]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import startup

startup.set_up_jax()

import numpy as np
from absl import flags

from training import folder, plots, statistics

OUT = flags.DEFINE_string('out', 'compare.png', 'The figure.')
METRIC = flags.DEFINE_string('metric', None, 'Metric of the summaries; eval/success if there is one, else eval/return.')


def entries(paths: list[str], metric: str | None) -> tuple[str, dict[str, tuple[list[int], np.ndarray]]]:
    """The metric, and {label: (seeds, score per seed)} for every setting of every run."""
    found: dict[str, tuple[list[int], np.ndarray]] = {}
    for name, path in zip(plots.labels(paths), paths, strict=True):
        folder.read_config(path)
        if not (Path(path) / 'summary.json').exists():
            raise ValueError(f'{path} has no summary.json: the run is not finished; continue it with --resume')
        summary = folder.read_json(Path(path) / 'summary.json')
        metric = metric or ('eval/success' if 'eval/success' in summary['eval'] else 'eval/return')
        if metric not in summary['eval']:
            raise ValueError(f'{path} has no {metric}; it has {", ".join(summary["eval"]) or "no evaluation"}')
        for setting, values in summary['eval'][metric].items():
            found[' '.join(part for part in (name, setting) if part)] = (summary['seeds'], np.asarray(values['per_seed'], float))
    assert metric is not None
    return metric, found


def main(argv: list[str]) -> None:
    if len(argv) < 2:
        raise ValueError('name the run folders to compare')
    if not Path(OUT.value).resolve().parent.is_dir():
        raise ValueError(f'--out={OUT.value}: its folder does not exist')
    metric, found = entries(argv[1:], METRIC.value)
    first, (first_seeds, first_scores) = next(iter(found.items()))
    print(f'{metric}: IQM [95% interval], worst seed; difference to {first!r} is paired by seed')
    for label, (seeds, scores) in found.items():
        summary = statistics.summarise(scores)
        low, high = summary['ci95']
        text = f'{label:<32} {summary["iqm"]:.3f} [{low:.3f}, {high:.3f}]  worst {summary["min"]:.3f}  n {len(seeds)}'
        if label != first and seeds == first_seeds and len(seeds) > 1:
            low, high = statistics.paired_bootstrap_interval(scores, first_scores)
            better = statistics.probability_of_improvement(scores, first_scores)
            text += f'  difference {statistics.iqm(scores - first_scores):+.3f} [{low:+.3f}, {high:+.3f}]  P(better) {better:.2f}'
        print(text)
    print(plots.compare(argv[1:], OUT.value))


if __name__ == '__main__':
    startup.run(main)
