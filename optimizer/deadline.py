"""One time limit over all that is asked: every question gets what is left of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

LEAST_S = 1e-3
"""Seconds that a question gets however late it is: a search with no time at all could not say that it had none."""


class OutOfTime(KeyboardInterrupt):
    """A question that its time limit ends, as an interrupt would: what is found so far stands."""


@dataclass(frozen=True)
class Deadline:
    """A moment on the monotonic clock; `limit_s` is how long it was away when it was set, infinite without a limit."""

    limit_s: float = np.inf
    end_s: float = np.inf

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """So many seconds from now; None for no limit."""
        return cls() if seconds is None else cls(seconds, time.monotonic() + seconds)

    @property
    def left_s(self) -> float | None:
        """Seconds that are left, none below 0; None without a limit."""
        return None if np.isinf(self.end_s) else max(self.end_s - time.monotonic(), 0.0)

    def share_s(self, parts: int = 1) -> float | None:
        """Seconds for one of `parts` questions that are still to come; None without a limit."""
        return None if self.left_s is None else max(self.left_s / parts, LEAST_S)

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.end_s

    def check(self) -> None:
        """Raises OutOfTime once it has passed."""
        if self.passed:
            raise OutOfTime

    def heard(self, progress: Callable[[float], None] | None) -> Callable[[float], None]:
        """The same progress, which ends what reports it once the time has passed."""

        def tell(share: float) -> None:
            if progress is not None:
                progress(share)
            self.check()

        return tell


NEVER = Deadline()
