"""The command's two streams: progress and sentences on standard error, results on standard output, and what breaks either."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

INTERRUPTED = 130
PATIENCE_S = 1.0
"""A search that is over sooner shows no progress."""

PLAIN_FORMS = dict(zip("·×−–—…≤≥→«»█▉▊▋▌▍▎▏┊µ", '*x---~<>>""########|u', strict=True))
"""What stands for a character on a terminal that cannot show it; one character for one, so that columns stay aligned."""


class Meter:
    """A progress bar on standard error, from PATIENCE_S on and only if a person is looking."""

    def __init__(self, shown: bool) -> None:
        self.begun = time.monotonic()
        self.shown = shown and sys.stderr is not None and sys.stderr.isatty()
        self.bar: Any = None

    def __enter__(self) -> Meter:
        return self

    def __call__(self, stage: str, share: float) -> None:
        if not self.shown or time.monotonic() - self.begun < PATIENCE_S:
            return
        if self.bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self.bar.add_task(stage, total=1.0)
            self.bar.start()
        self.bar.update(self.bar.task_ids[0], description=stage, completed=share)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def say(sentence: str) -> None:
    """One line on standard error, whatever the sentence quotes; one that starts with a blank belongs to the line before."""
    if sys.stderr is None:  # closed by the caller; print would fall back on standard output
        return
    prefix = "  " if sentence.startswith(" ") else "paraplan: "
    head, _, example = sentence.partition("\n")  # what follows a line break is an example to copy
    print(prefix + " ".join(head.split()) + ("\n" + example if example else ""), file=sys.stderr)


def interrupted(arguments: Sequence[str] | None) -> int:
    """Says that a command was interrupted before it had anything to tell, where the arguments ask for JSON as a document too."""
    say("interrupted")
    if "--json" in (sys.argv[1:] if arguments is None else arguments) and sys.stdout is not None:
        try:
            print('{\n  "error": "interrupted",\n  "reasons": ["nothing was found by then"]\n}', flush=True)
        except OSError:
            drop_output()
    return INTERRUPTED


def flushed(status: int) -> int:
    """Flushes here rather than at the interpreter's exit, where a closed pipe would be reported as an ignored exception."""
    sys.stdout.flush()
    return status


def drop_output() -> None:
    """Sends what is left in the buffer of standard output nowhere: its reader has gone, or its disk is full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def plain_form(error: UnicodeError) -> tuple[str, int]:
    """Error handler of the encoder: characters that the terminal lacks are written as their plain forms."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN_FORMS.get(character, "?") for character in error.object[error.start : error.end]), error.end
