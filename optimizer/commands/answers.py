"""What a command has to say, and its refusals; exit status 0 done, 1 no legal layout or an illegal one, 2 bad input."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...search_spaces.errors import InputError

DONE, NO_LAYOUT, BAD_INPUT, DEFECT, PIPE_CLOSED = 0, 1, 2, 70, 141


@dataclass(frozen=True)
class Answer:
    """What a command has to say: `show` writes the result to standard output, `notes` are sentences for standard error."""

    show: Callable[[], None]
    notes: tuple[str, ...] = ()
    status: int = DONE


def sentences(summary: str, reasons: Sequence[str]) -> tuple[str, ...]:
    """The summary and, indented below it, the reasons that it does not give itself."""
    return (summary, *(f"  {reason}" for reason in reasons if reason not in summary))


def refusal(summary: str, reasons: Sequence[str], as_json: bool, **more: Any) -> Answer:
    """No legal layout: the reasons as sentences on standard error or, asked for JSON, as a document on standard output."""
    if as_json:
        document = json.dumps({"error": summary, "reasons": list(reasons), **more}, indent=2, ensure_ascii=False)
        return Answer(lambda: print(document), status=NO_LAYOUT)
    return Answer(lambda: None, sentences(summary, reasons), NO_LAYOUT)


def document(found: dict[str, Any]) -> Callable[[], None]:
    """What shows a result as one JSON document."""
    return lambda: print(json.dumps(found, indent=2, ensure_ascii=False, default=str))


def wanted(out: Path | None, as_json: bool) -> None:
    """InputError where a command is asked for neither a file nor a document."""
    if out is None and not as_json:
        raise InputError("--out is missing: name what to write, or ask for --json")


def offered(flag: str, value: str, values: Sequence[str]) -> None:
    """InputError for a value that is none of these."""
    if value not in values:
        from ...search_spaces.documents import did_you_mean

        raise InputError(f"{flag} {value!r} is not offered{did_you_mean(value, values) or '; there is ' + ', '.join(values)}")


def at_least_one(flag: str, value: int) -> None:
    if value < 1:
        raise InputError(f"{flag} {value}: must be at least 1")
