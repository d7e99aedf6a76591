"""Who a process is, so that another can tell whether it still runs: its machine, and its number with the moment it began."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine() -> str:
    """This machine since it was started, and what counts processes on it: containers have numbers of their own."""
    return "/".join((platform.node(), _read("/proc/sys/kernel/random/boot_id"), _link("/proc/self/ns/pid")))


def process(number: int | None = None) -> str:
    """A process of this machine, by default this one; the moment it began tells it from a later one of the same number."""
    own = os.getpid() if number is None else number
    return f"{own} {_begun(own)}"


def runs(name: str) -> bool:
    """Whether a process of this machine, as `process` named it, still runs."""
    number = int(name.partition(" ")[0])
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's, which runs
        pass
    return process(number) == name and _state(number) != "Z"


def _begun(number: int) -> str:
    """Clock ticks from the machine's start; empty where /proc is not Linux's."""
    fields = _stat(number)
    return fields[19] if fields else ""


def _state(number: int) -> str:
    fields = _stat(number)
    return fields[0] if fields else ""


def _stat(number: int) -> list[str]:
    """Fields of /proc/N/stat from the state on; the name before it may hold blanks and brackets."""
    return _read(f"/proc/{number}/stat").rpartition(")")[2].split()


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
