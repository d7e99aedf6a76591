"""Every legality rule, stated once: data with an id, a reason and a source, built from the primitives of `conditions`.

Ids C… are numbered by topic: 0xx grids, 02x shapes, 03x batch, 04x sequence, 06x pipeline, 08x experts, 10x recompute and sharding,
12x precision, 14x placement. P… are the planner's own. A letter marks the parts of one rule. To add a rule, add one entry to the
table of its topic.
"""

from __future__ import annotations

from .batches import BATCHES
from .experts import EXPERTS
from .grids import GRIDS
from .pipelines import PIPELINES
from .placements import PLACEMENTS
from .precisions import PRECISIONS
from .rule import Frameworks, Rule, Scope, in_range
from .sequences import SEQUENCES
from .shapes import SHAPES
from .states import STATES
from .terms import PARALLEL_STATE

__all__ = ["PARALLEL_STATE", "RULES", "Frameworks", "Rule", "Scope", "in_range"]

RULES: tuple[Rule, ...] = (
    *GRIDS,
    *SHAPES,
    *BATCHES,
    *SEQUENCES,
    *PIPELINES,
    *EXPERTS,
    *STATES,
    *PRECISIONS,
    *PLACEMENTS,
)
