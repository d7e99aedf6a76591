"""Rules on what chunks hold, and what fits into a device."""

from __future__ import annotations

from ..conditions import at_most
from .rule import Rule
from .terms import CHUNKS

PLACEMENTS: tuple[Rule, ...] = (
    Rule(
        "C140",
        "every chunk holds a layer, the embedding, the loss, or the MTP layers, which share one",
        "definition",
        "arithmetic",
        at_most(CHUNKS, "most_chunks"),
    ),
    Rule("P010", "the fullest stage fits into a device", "definition", "memory", at_most("peak_bytes", "usable_bytes")),
)
