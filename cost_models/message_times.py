"""How long the messages of layers take: each is worked out once, however many operators of a table's pieces send it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..search_spaces.groups import groups
from ..search_spaces.layout import Bools, Floats, LayoutTable
from .crossing import Crossing
from .network import Exchange, Network
from .operation import Message

DIMENSIONS = ("tp", "cp", "ep", "etp")


@dataclass(frozen=True)
class MessageTimes:
    """Messages of the n rows of a table, where `at` says how the groups of each dimension sit.

    `dedup`: a token travels once to a unit, however many of its experts are there.
    """

    network: Network
    at: dict[str, Crossing]
    dedup: bool
    _known: dict[tuple[Any, ...], Floats] = field(default_factory=dict)

    @classmethod
    def of(cls, network: Network, table: LayoutTable, dedup: bool) -> MessageTimes:
        """With the groups of a table."""
        return cls(network, {name: network.crossing(groups(table, name)) for name in DIMENSIONS}, dedup)

    def once_s(self, message: Message) -> Floats:
        """Seconds of a message that is sent once, (n,); not to be written to."""
        key = (message.dimension, message.collective, message.routing, message.copy_bytes, np.asarray(message.bytes).tobytes())
        if key not in self._known:
            at = self.at[message.dimension]
            spoken = ((at.size > 1.0) & (np.asarray(message.bytes) > 0.0)).any()
            self._known[key] = self._message_s(message, at) if spoken else np.zeros(len(at.size))
        return self._known[key]

    def leaves(self, message: Message) -> Bools:
        """Rows whose message leaves the supernode, (n,)."""
        return np.asarray((self.at[message.dimension].outermost > self.network.supernode) & (np.asarray(message.bytes) > 0))

    def _message_s(self, message: Message, at: Crossing) -> Floats:
        net = self.network
        if message.routing is not None:
            kernel: Exchange | None = None
            if self.dedup:
                kernel = "moe_dispatch" if message.collective == "dispatch" else "moe_combine"
            return net.exchange_s(at, message.bytes, message.routing, kernel, message.copy_bytes)
        collectives: dict[str, Callable[[Crossing, Floats], Floats]] = {
            "all_to_all": net.all_to_all_s,
            "ring": net.ring_pass_s,
            "all_gather": net.all_gather_s,
            "reduce_scatter": net.reduce_scatter_s,
            "all_reduce": net.all_reduce_s,
        }
        return collectives[message.collective](at, message.bytes)
