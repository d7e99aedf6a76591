"""Rules on what chunks hold, where TP groups lie, and what fits into a device."""

from __future__ import annotations

from ..conditions import any_of, at_most, divides
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
    Rule(
        "C141",
        "a TP group lies in one supernode or fills whole ones",
        "definition",
        "topology",
        any_of(
            divides("tp", "supernode"),
            divides("tp", "supernode_size"),
            divides("supernode", "tp"),
            at_most("devices_used", "supernode"),
        ),
    ),
    Rule("P010", "the fullest stage fits into a device", "definition", "memory", at_most("peak_bytes", "usable_bytes")),
)
