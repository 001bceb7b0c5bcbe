"""What a run shares with its terminal: signals and progress."""

import signal
import sys
import time
from typing import Any


class Signals:
    """SIGTERM and SIGINT ask the run to save and stop; a second one ends the process at once."""

    def __init__(self):
        self.received: int | None = None
        self._old: dict[int, Any] = {}

    def __enter__(self) -> 'Signals':
        try:
            self._old = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        except ValueError:  # not the main thread: the owner of the process decides
            self._old = {}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if self.received is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received = number


class Progress:
    """A bar on a terminal, plain lines elsewhere."""

    def __init__(self, total: int, done: int):
        from tqdm import tqdm

        self._terminal = sys.stderr.isatty()
        self._bar = tqdm(total=total, initial=done, unit='update', file=sys.stderr, dynamic_ncols=True, disable=not self._terminal)
        self._done, self._total, self._first, self._began = done, total, done, time.monotonic()
        self._spoke = time.monotonic()

    def __enter__(self) -> 'Progress':
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.close()

    def update(self, updates: int) -> None:
        self._done += updates
        self._bar.update(updates)
        if not self._terminal and time.monotonic() - self._spoke > 30:
            self._spoke = time.monotonic()
            rate = (self._done - self._first) / (self._spoke - self._began)
            left = (self._total - self._done) / max(rate, 1e-9)
            print(f'{self._done}/{self._total} updates, {rate:.1f}/s, about {left:.0f} s left', file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """What is going on, beside the bar."""
        self._bar.set_postfix_str(text)
        if text and not self._terminal:
            print(f'{self._done}/{self._total} updates: {text}', file=sys.stderr, flush=True)
