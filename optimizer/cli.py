"""The entry point of `paraplan`: takes interrupts from the first moment, then loads and runs the command (application.py).

Nothing heavy is imported here: until `main` is entered, an interrupt would end in a traceback of the interpreter.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .streams import interrupted


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status; whatever goes wrong is one sentence, never a traceback."""
    with _interrupts() as seen:
        try:
            from .application import run

            return run(arguments, seen.is_set)
        except KeyboardInterrupt:
            return interrupted()
        except Exception:
            if seen.is_set():  # an import that an interrupt broke off raises what it likes
                return interrupted()
            raise


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Notes that SIGINT came, beside raising KeyboardInterrupt: extension modules turn that into errors of their own.

    A handler that somebody else has set, or an ignored signal, stays.
    """
    seen = threading.Event()
    own = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def note(number: int, frame: object) -> None:
        seen.set()
        raise KeyboardInterrupt

    if own:
        signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        if own:
            signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    sys.exit(main())
