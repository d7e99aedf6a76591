"""The entry point of `paraplan`: takes interrupts from the first moment, then loads and runs the command (application.py).

Nothing heavy is imported here: until `main` is entered, an interrupt would end in a traceback of the interpreter.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from .interrupts import came, noted, take_over
from .streams import interrupted


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status; whatever goes wrong is one sentence, never a traceback."""
    with noted():
        try:
            from .application import run

            return run(arguments)
        except KeyboardInterrupt:
            return interrupted(arguments)
        except Exception:
            if came():  # an import that an interrupt broke off raises what it likes
                return interrupted(arguments)
            raise


def command() -> None:
    """The process of a command: once it has its status, an interrupt no longer matters."""
    try:
        take_over()
        status = main()
    except KeyboardInterrupt:  # before main was in a place to say so
        status = interrupted(None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(status)


if __name__ == "__main__":
    command()
