"""Scripts that another names, found where it lies: beside it, or below one of the folders around it. Only their text is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...search_spaces.documents import MAX_BYTES
from .shell_values import UNSET

MOST_AROUND = 6
"""Folders around a script's own in which the one it is started from may be."""
LONGEST = 250


def found_beside(folders: Sequence[Path], word: str) -> Path | None:
    """The file that a word names, seen from the folders of the scripts that name it; None where there is none.

    Of a path whose beginning has no value in the script, what stands behind it counts; of an absolute one, only its name.
    """
    unset, plain = word.rfind(UNSET), word[word.rfind(UNSET) + 1 :]
    if len(word) > LONGEST or not plain.strip("/") or (unset >= 0 and not plain.startswith("/")):
        return None
    if plain.startswith(("/", "~")) and unset < 0:
        plain = plain.rpartition("/")[2]
    names = (folder / plain.lstrip("/") for own in folders for folder in (own, *list(own.parents)[:MOST_AROUND]))
    beside = plain.rpartition("/")[2]
    return next((path for path in (*names, *(own / beside for own in folders)) if path.is_file()), None)


def text_of(path: Path | str) -> str | None:
    """The text of a file; None where it is none, or larger than any script."""
    if len(str(path)) > LONGEST * MOST_AROUND or UNSET in str(path) or "\n" in str(path):
        return None
    file = Path(path)
    if not file.is_file() or file.stat().st_size > MAX_BYTES:
        return None
    return file.read_text(encoding="utf-8", errors="replace")
