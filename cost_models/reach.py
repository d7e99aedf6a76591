"""How far measurements of token exchanges between supernodes reach, and by how much longer those beyond may take."""

from __future__ import annotations

import numpy as np

from ..search_spaces.groups import groups
from ..search_spaces.layout import Layout, LayoutTable
from .exchanges import exchanges
from .network import Network


def unmeasured_supernodes(network: Network, layout: Layout) -> int:
    """Supernodes between which a layout's tokens are exchanged, if more than were measured; 0 where not, or where the cluster says
    how far the links between supernodes are oversubscribed.
    """
    if any(level.oversubscription > 1 for level in network.levels[network.supernode + 1 :]):
        return 0
    at = network.crossing(groups(LayoutTable.from_layouts([layout]), "ep"))
    touched = int(np.rint(at.size / at.members[network.supernode])[0])
    return touched if touched > exchanges().measured_supernodes.value else 0


def congestion_s(network: Network, layout: Layout, exposed_s: float) -> float:
    """Seconds by which a step may take longer than priced, `exposed_s` of it exchanges of tokens, if its network is congested."""
    return exposed_s * (exchanges().congested.value - 1.0) if unmeasured_supernodes(network, layout) else 0.0
