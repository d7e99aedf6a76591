"""What SIGINT ends, and that none is lost: an exception that an extension module swallows is raised again at the next look.

An interrupt raises KeyboardInterrupt where it arrives, until an answer is held (`hold`): from then on it raises only where
something is done that the answer can do without (`stoppable`), and waits elsewhere. Whatever is asked later knows by its Deadline
that one came. Without a handler of ours (a library's caller has its own) the exception alone says so.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


class OutOfTime(KeyboardInterrupt):
    """A question that its time limit ends, as an interrupt would: what is found so far stands."""


class _State:
    """How many interrupts came, whether the last has ended nothing yet, whether an answer is held, and inside how many blocks that
    may be left at once.
    """

    came = 0
    waits = False
    held = False
    blocks = 0


_state = _State()


@contextmanager
def noted() -> Iterator[None]:
    """Takes SIGINT as long as the command runs; a handler that somebody else has set, or an ignored signal, stays."""
    own = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if own:
        take_over()
    try:
        yield
    finally:
        if own:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _forget()


def take_over() -> None:
    """From here to its end this process takes SIGINT as a command does."""
    _forget()
    signal.signal(signal.SIGINT, _note)


def _forget() -> None:
    _state.came, _state.waits, _state.held, _state.blocks = 0, False, False, 0


def _note(number: int, frame: object) -> None:
    """Raises at once where nothing would be lost, and where one waits already: who interrupts twice wants to be rid of it."""
    again, _state.waits = _state.waits, True
    _state.came += 1
    if again or _state.blocks or not _state.held:
        raise KeyboardInterrupt


def came() -> int:
    """How many interrupts came so far."""
    return _state.came


def hold() -> None:
    """From here to the end of the command an interrupt ends what an answer can do without, not the answer."""
    _state.held = True


def check() -> None:
    """KeyboardInterrupt where one came that has ended nothing yet."""
    if _state.waits:
        raise KeyboardInterrupt


@contextmanager
def raised() -> Iterator[None]:
    """A block that an interrupt leaves at once: there is no answer yet."""
    _state.blocks += 1
    try:
        check()
        yield
        check()
    finally:
        _state.blocks -= 1


class stoppable:  # noqa: N801 - reads as the statement that it is
    """A block that an interrupt or the time limit ends: what it has done by then stands. `by` is what ended it."""

    def __init__(self) -> None:
        self.by: KeyboardInterrupt | None = None

    def __enter__(self) -> stoppable:
        _state.blocks += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        _state.blocks -= 1
        if kind is not None and not isinstance(error, KeyboardInterrupt):
            return False
        self.by = error if isinstance(error, KeyboardInterrupt) else KeyboardInterrupt() if _state.waits else None
        if isinstance(self.by, OutOfTime) or self.by is None:
            return self.by is not None
        _state.came += not _state.waits  # raised without a signal of ours
        _state.waits = False
        return True

    @property
    def stopped(self) -> bool:
        return self.by is not None
