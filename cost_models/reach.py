"""How far measurements of token exchanges between supernodes reach, and by how much longer those beyond may take."""

from __future__ import annotations

import numpy as np

from ..search_spaces.groups import groups
from ..search_spaces.layout import Layout, LayoutTable
from .network import Network

MEASURED_SUPERNODES = 4
"""Servers between which exchanges were measured to hold the rate that is priced (results/collectives, DeepEP on H100)."""
CONGESTED = 2.2
"""Times as long as priced that exchanges between eight servers took on one of three networks: under a spine oversubscribed 3.1:1,
for the 4/7 of their traffic that left a leaf (results/collectives, from ai-dynamo/aiconfigurator at 095f58a51).
"""


def unmeasured_supernodes(network: Network, layout: Layout) -> int:
    """Supernodes between which a layout's tokens are exchanged, if more than were measured; 0 where not, or where the cluster says
    how far the links between supernodes are oversubscribed.
    """
    if any(level.oversubscription > 1 for level in network.levels[network.supernode + 1 :]):
        return 0
    at = network.crossing(groups(LayoutTable.from_layouts([layout]), "ep"))
    touched = int(np.rint(at.size / at.members[network.supernode])[0])
    return touched if touched > MEASURED_SUPERNODES else 0


def congestion_s(network: Network, layout: Layout, exposed_s: float) -> float:
    """Seconds by which a step may take longer than priced, `exposed_s` of it exchanges of tokens, if its network is congested."""
    return exposed_s * (CONGESTED - 1.0) if unmeasured_supernodes(network, layout) else 0.0
