"""Whether loading a hit is faster than computing its tokens again.

A load takes what its transfer took on the device (on the rank where it took longest); a prefill, as
the engine sees it, the tokens that a step computed over the time of the step. That a load is
noticed only when the step beside it has ended is not counted against it: the time of that step is
others' work, which computing the tokens would have made longer.

A load of ``n`` tokens is predicted to take ``n`` times the median time of a token in the last
loads, and no less than the shortest of them; computing them, ``n`` over the prefill rate of the
faster recent steps. Nothing is declined before both have been seen.

A hit that is declined tells nothing of loads: one slow load, the first one say, would turn them off
for good. So what was seen is forgotten as hits are declined, and in the end a hit is loaded again.
"""

import statistics
from collections import deque

MIN_STEP_TOKENS = 64
"""A step with fewer tokens is mostly decoding, and says little about prefill."""

WINDOW = 32
"""Samples of each kind that are remembered."""

DECLINED_PER_LOAD = 16
"""For so many hits that are declined, the oldest load is forgotten."""


class LoadWorth:
    """Decides by ``min_tokens``, or by what has been measured where that is None."""

    def __init__(self, min_tokens: int | None) -> None:
        self._min_tokens = min_tokens
        self._loads: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._prefill_rates: deque[float] = deque(maxlen=WINDOW)
        self._num_declined = 0

    def saw_load(self, num_tokens: int, seconds: float) -> None:
        """A load of ``num_tokens`` took this long on its device."""
        if num_tokens > 0 and seconds > 0:
            self._loads.append((num_tokens, seconds))

    def saw_decline(self) -> None:
        """A request goes on to compute a hit that was not worth a load."""
        self._num_declined += 1
        if self._num_declined % DECLINED_PER_LOAD == 0 and self._loads:
            self._loads.popleft()

    def saw_step(self, num_tokens: int, seconds: float) -> None:
        """A step computed ``num_tokens`` in this time."""
        if num_tokens >= MIN_STEP_TOKENS and seconds > 0:
            self._prefill_rates.append(num_tokens / seconds)

    @property
    def measured(self) -> bool:
        """Whether both rates have been seen."""
        return bool(self._loads and self._prefill_rates)

    def allows(self, num_tokens: int) -> bool:
        """Whether a hit of ``num_tokens`` should be loaded."""
        if self._min_tokens is not None:
            return num_tokens >= self._min_tokens
        if not self.measured:
            return True
        return self.load_s(num_tokens) <= self.prefill_s(num_tokens)

    def load_s(self, num_tokens: int) -> float:
        """Predicted seconds of a load; some load must have been seen."""
        per_token = statistics.median(seconds / tokens for tokens, seconds in self._loads)
        return max(num_tokens * per_token, min(seconds for _, seconds in self._loads))

    def prefill_s(self, num_tokens: int) -> float:
        """Predicted seconds of computing; some step must have been seen."""
        rates = sorted(self._prefill_rates)
        return num_tokens / rates[len(rates) * 3 // 4]


class StepClock:
    """Times steps that may overlap (async scheduling): a step's time starts when it was built, or
    when the one before it ended, whichever is later."""

    def __init__(self, max_in_flight: int = 16) -> None:
        self._built: deque[tuple[float, int]] = deque(maxlen=max_in_flight)
        self._ended_s = float("-inf")

    def built(self, now_s: float, num_tokens: int) -> None:
        """A step that computes ``num_tokens`` was built; others are not told."""
        self._built.append((now_s, num_tokens))

    def ended(self, now_s: float) -> tuple[int, float] | None:
        """The oldest step has ended: its tokens and seconds; None when none is in flight."""
        if not self._built:
            return None
        built_s, num_tokens = self._built.popleft()
        seconds = now_s - max(built_s, self._ended_s)
        self._ended_s = now_s
        return num_tokens, seconds
