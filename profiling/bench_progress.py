"""How far a benchmark is, on stderr: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TextIO

from .bench_result import Progress

FIRST_LINE_S: Final = 2.0
"""What is over sooner says nothing."""

BETWEEN_LINES_S: Final = 10.0


class Lines:
    """Progress for a log: nothing for two seconds, then a line at most every ten."""

    def __init__(
        self, name: str, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._stream, self._clock = name, stream, clock
        self._begun_s = clock()
        self._next_s = self._begun_s + FIRST_LINE_S

    def __call__(self, num_done: int, num_steps: int, what: str) -> None:
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + BETWEEN_LINES_S
        taken = f"{now_s - self._begun_s:.0f} s"
        print(f"{self._name}: {num_done} of {num_steps}, {taken}: {what}", file=self._stream)
        self._stream.flush()


class Bar:
    """Progress for a person, drawn by tqdm; takes no time while nothing is said."""

    def __init__(self, name: str, stream: TextIO, tqdm: Any) -> None:
        tqdm.monitor_interval = 0  # its thread would wake beside what is timed
        self._bar = tqdm(desc=name, total=1, file=stream, leave=False, dynamic_ncols=True)

    def __call__(self, num_done: int, num_steps: int, what: str) -> None:
        self._bar.total, self._bar.n = num_steps, num_done
        self._bar.set_postfix_str(what)  # draws

    def close(self) -> None:
        self._bar.close()


@contextmanager
def reporting(name: str, stream: TextIO | None = None) -> Iterator[Progress]:
    """What a benchmark is given to say how far it is. Without tqdm there are only lines."""
    stream = sys.stderr if stream is None else stream
    tqdm = _tqdm() if stream.isatty() else None
    if tqdm is None:
        yield Lines(name, stream)
        return
    bar = Bar(name, stream, tqdm)
    try:
        yield bar
    finally:
        bar.close()


def _tqdm() -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm
