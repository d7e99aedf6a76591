"""How the tokens of a MoE layer spread over units of devices: what dispatch has to send, and combine to bring back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..search_spaces.layout import Floats


@dataclass(frozen=True)
class Routing:
    """A token goes to `top_k` distinct ones of `experts`, every set as likely as any other.

    Node-limited routing draws them from `limit` of the `groups` that experts are dealt to in equal runs (arXiv 2412.19437, 2.1.2).
    Of the supernodes that a token would so go to it goes to the share `crossing`, where experts chosen together sit together.
    """

    top_k: int
    experts: int
    limit: int | None = None
    groups: int = 1
    crossing: float = 1.0

    def units_hit(self, units: Floats) -> Floats:
        """Of `units` (…) that hold the experts in equal runs, how many hold at least one of a token's, on average."""
        each = self.experts / np.maximum(units, 1.0)
        if self.limit is None or self.limit >= self.groups:
            return np.asarray(units * (1.0 - missed(float(self.experts), each, self.top_k)))
        group = self.experts / self.groups
        open_experts = self.limit * group
        within = units * self.limit / self.groups * (1.0 - missed(open_experts, each, self.top_k))  # groups over several units
        several = np.maximum(np.rint(each / group), 1.0)  # groups of a unit that holds more than one
        spared = np.zeros_like(each)
        for opened in range(self.limit + 1):
            chance = drawn(self.groups, self.limit, several, opened)
            spared += chance * missed(open_experts, np.minimum(opened * group, open_experts), self.top_k)
        return np.where(each < group, within, units * (1.0 - spared))


def missed(total: float, part: Floats | float, draws: int) -> Floats:
    """Chance that `draws` without replacement from `total` take none of a `part` of them: Π (1 − part/(total − i)), (…)."""
    left = np.ones_like(np.asarray(part, dtype=np.float64))
    for draw in range(draws):
        left = left * np.maximum(1.0 - part / max(total - draw, 1e-9), 0.0)
    return np.asarray(left)


def drawn(total: int, draws: int, marked: Floats, found: int) -> Floats:
    """Chance that `draws` without replacement from `total`, of which some are `marked` (…), take exactly `found` marked ones.

    Hypergeometric; marked draws first, times the orders in which they may come.
    """
    chance = np.ones_like(marked)
    for draw in range(draws):
        free = marked - draw if draw < found else total - marked - (draw - found)
        chance = chance * np.maximum(free, 0.0) / (total - draw)
    orders = 1.0
    for step in range(found):
        orders *= (draws - step) / (step + 1)
    return np.asarray(chance * orders)
