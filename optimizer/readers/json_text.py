"""JSON as DeepSpeed reads it: comments and a comma behind the last item are allowed, as they are in Hjson."""

from __future__ import annotations

import re

TEXT = r'"(?:[^"\\\n]|\\.)*"'
COMMENT = re.compile(rf"{TEXT}|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
TRAILING = re.compile(rf"{TEXT}|,(?=\s*[}}\]])")


def plain_json(text: str) -> str:
    """The text without comments and trailing commas; lines stay where they are."""
    return TRAILING.sub(_lines_only, COMMENT.sub(_lines_only, text))


def _lines_only(match: re.Match[str]) -> str:
    """A text in quotes as it is; of anything else the line ends."""
    found = match.group()
    return found if found.startswith('"') else "\n" * found.count("\n")
