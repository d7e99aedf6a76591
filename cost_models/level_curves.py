"""A profile's curves of one collective, level by level of a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..search_spaces.cluster import Level
from ..search_spaces.layout import Bools, Floats
from .profile import Fitted, Profile


@dataclass(frozen=True)
class LevelCurves:
    """Figures of one collective on every level, (levels,); how often it passes through memory is the innermost one's to say."""

    half_bytes: Floats  # what is left of them on an oversubscribed link
    gamma: Floats
    efficiency: Floats
    launch_s: Floats
    hop_s: Floats  # the library's whole hop where it was measured, else the level's latency
    hop_measured: Bools
    local_cost: Floats
    sm_bytes_per_s: Floats  # of a kernel that crosses the level; where that is not known, as within it, and inf without a limit
    handling_bytes: Floats
    passes: float


def level_curves(levels: Sequence[Level], profile: Profile, collective: str, plain: str) -> LevelCurves:
    """The curve of every level's fabric for a collective; where a fabric has none of that name, its `plain` one.

    A hop without a measured time takes the level's latency; an oversubscribed link needs that much smaller a message.
    """
    known = [profile.collective_curves(level.efficiency_profile) for level in levels]
    curves = [
        own.get(collective) or own.get(plain) or profile.collective_curve(level.efficiency_profile, plain)
        for own, level in zip(known, levels, strict=True)
    ]
    hop = np.array([c.hop_latency_s.value if c.hop_latency_s else np.nan for c in curves])
    copying = [next((c for c in curves[index::-1] if c.sm_bytes_per_s), None) for index in range(len(curves))]
    return LevelCurves(
        np.array([c.half_bytes.value for c in curves]) / np.array([level.oversubscription for level in levels]),
        np.array([c.gamma.value if isinstance(c.gamma, Fitted) else c.gamma for c in curves]),
        np.array([c.efficiency.value for c in curves]),
        np.array([c.launch_s.value for c in curves]),
        np.where(np.isnan(hop), np.array([level.latency_s.value for level in levels]), hop),
        ~np.isnan(hop),
        np.array([c.local_cost.value if c.local_cost else 0.0 for c in curves]),
        np.array([c.sm_bytes_per_s.value if c and c.sm_bytes_per_s else np.inf for c in copying]),
        np.array([c.handling_bytes.value if c and c.handling_bytes else 0.0 for c in copying]),
        curves[0].passes,
    )
