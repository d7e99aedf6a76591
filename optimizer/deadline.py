"""One time limit over all that is asked: every question gets what is left of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from . import interrupts

LEAST_S = 1e-3
"""Seconds that a question gets however late it is: a search with no time at all could not say that it had none."""


@dataclass(frozen=True)
class Deadline:
    """A moment on the monotonic clock, or the next interrupt; `limit_s` is how long it was away when it was set, infinite without a
    limit, and `heard` how many interrupts had come before.
    """

    limit_s: float = np.inf
    end_s: float = np.inf
    heard: float = field(default_factory=interrupts.came)

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """So many seconds from now; None for no limit."""
        return cls() if seconds is None else cls(seconds, time.monotonic() + seconds)

    @property
    def left_s(self) -> float | None:
        """Seconds that are left, none below 0 and none after an interrupt; None without a limit."""
        if self.interrupted:
            return 0.0
        return None if self.end_s == np.inf else max(self.end_s - time.monotonic(), 0.0)

    def share_s(self, parts: int = 1) -> float | None:
        """Seconds for one of `parts` questions that are still to come; None without a limit."""
        return None if self.left_s is None else max(self.left_s / parts, LEAST_S)

    @property
    def interrupted(self) -> bool:
        """Whether the user interrupted since it was set."""
        return interrupts.came() > self.heard

    @property
    def passed(self) -> bool:
        return self.interrupted or time.monotonic() >= self.end_s

    @property
    def over(self) -> Deadline:
        """The same limit, passed."""
        return replace(self, end_s=-np.inf)

    def check(self) -> None:
        """Raises OutOfTime once it has passed, KeyboardInterrupt after an interrupt."""
        if self.passed:
            raise KeyboardInterrupt if self.interrupted else interrupts.OutOfTime

    def hearing(self, progress: Callable[[float], None] | None) -> Callable[[float], None]:
        """The same progress, which ends what reports it once the time has passed."""

        def tell(share: float) -> None:
            if progress is not None:
                progress(share)
            self.check()

        return tell


NEVER = Deadline(heard=np.inf)
"""No end."""
