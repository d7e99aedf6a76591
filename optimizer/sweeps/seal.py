"""The seal of a stored result: a digest of all that was written of it, by which one that was damaged later is known.

SQLite finds a broken page, not a changed byte in a text or a plan. Results of stores from before there were seals have none: they
count as sound where they can be read.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from typing import Any

from .grid import Point, key_of

SEALED = ("status", "reason", "record", "document", "digest", "version", "seconds", "ended")
"""Columns that a seal covers, beside the point's key, which is itself a digest of what was asked."""


def seal_of(key: str, values: Mapping[str, Any]) -> str:
    """The seal of a point's result, given as the values of its columns."""
    found = hashlib.blake2b(key.encode(), digest_size=16)
    for name in SEALED:
        value = values[name]
        part = value if isinstance(value, bytes) else repr(value).encode()
        found.update(f"|{name} {len(part)} ".encode() + part)
    return found.hexdigest()


def is_sound(row: Mapping[str, Any]) -> bool:
    """Whether a row of a store that has been finished holds what was written; `seal` may be missing or none."""
    if row["state"] != "done" or key_of(row["asked"]) != row["key"]:
        return False
    seal = row.get("seal")
    return _is_readable(row["record"], row["document"]) if seal is None else seal == seal_of(row["key"], row)


def name_of(row: Mapping[str, Any]) -> str:
    """The point of a row in words, or by its key where what was asked is itself damaged."""
    if key_of(row["asked"]) != row["key"]:
        return f"the point {row['key']}"
    point = Point.from_json(row["asked"])
    return (
        f"{point.model} on {point.devices:,} devices of {point.cluster}, batch {point.global_batch:,}, "
        f"{point.seq_len:,} tokens, {point.precision} (point {row['key']})"
    )


def _is_readable(record: str, document: bytes | None) -> bool:
    try:
        figures, plan = json.loads(record), {} if document is None else json.loads(zlib.decompress(document))
    except (ValueError, zlib.error):
        return False
    return isinstance(figures, dict) and isinstance(plan, dict)
