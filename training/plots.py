"""Pictures of runs. Matplotlib is imported when one is drawn."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training import logger

PANELS = (
    ('eval/success', 'success'),
    ('eval/return', 'return'),
    ('actor/path_kl', 'path KL (nats per control step)'),
    ('dual/lambda', 'lambda'),
    ('actor/clone_loss', 'clone loss'),
    ('critic/loss', 'critic loss'),
)


MAX_PANELS = 4  # the first of those above that the runs have


def curve(run: str | Path, out: str | Path | None = None) -> Path:
    """Draws the curves of one run into its curve.png (or `out`): mean over seeds, band from the worst to the best seed."""
    return compare([run], out or Path(run) / 'curve.png')


def labels(run_folders: Sequence[str | Path]) -> list[str]:
    """A name for each run: the last part of its path, or the whole path as given where two would be called the same.

    Raises ValueError for a folder given twice.
    """
    paths = [os.path.realpath(run) for run in run_folders]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise ValueError(f'{run_folders[index]} is given twice: name each run once')
    names = [os.path.basename(os.path.abspath(run)) for run in run_folders]
    return [name if names.count(name) == 1 else str(run) for name, run in zip(names, run_folders, strict=True)]


def compare(run_folders: Sequence[str | Path], out: str | Path) -> Path:
    """Draws several runs into one figure; returns the file."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    tables = {label: logger.read(run) for label, run in zip(labels(run_folders), run_folders, strict=True)}
    panels = [(name, label) for name, label in PANELS if any(_points(table, name) is not None for table in tables.values())]
    if any(name == 'eval/success' for name, _ in panels):
        panels = [panel for panel in panels if panel[0] != 'eval/return']
    panels = panels[:MAX_PANELS]
    figure, axes = plt.subplots(1, max(len(panels), 1), figsize=(4.2 * max(len(panels), 1), 3.4), squeeze=False, layout='constrained')
    for axis, (name, label) in zip(axes[0], panels, strict=False):
        for run, table in tables.items():
            for setting in dict.fromkeys(table['setting']):
                points = _points(table, name, setting)
                if points is None:
                    continue
                updates, mean, low, high = points
                title = ' '.join(part for part in (run if len(tables) > 1 else '', str(setting)) if part)
                (drawn,) = axis.plot(updates, mean, marker='o' if len(updates) < 12 else None, markersize=3, label=title or None)
                axis.fill_between(updates, low, high, alpha=0.2, color=drawn.get_color(), linewidth=0)
        axis.set_xlabel('updates')
        axis.set_title(label, fontsize=10)
        axis.grid(alpha=0.3)
        if name in ('dual/lambda', 'critic/loss'):
            axis.set_yscale('log')
        if name == 'eval/success':
            axis.set_ylim(-0.03, 1.03)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize=8)
    figure.suptitle('mean over seeds; band: worst to best seed', fontsize=9)
    figure.savefig(out, dpi=110)
    plt.close(figure)
    return Path(out)


def _points(table: dict[str, Any], name: str, setting: str | None = None) -> tuple[np.ndarray, ...] | None:
    if name not in table:
        return None
    chosen = np.isfinite(table[name])
    if setting is not None:
        chosen &= table['setting'] == setting
    updates = np.unique(table['update'][chosen])
    if not updates.size:
        return None
    values = [table[name][chosen & (table['update'] == update)] for update in updates]
    return updates, np.asarray([v.mean() for v in values]), np.asarray([v.min() for v in values]), np.asarray([v.max() for v in values])
