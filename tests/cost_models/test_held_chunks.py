"""What interleaved stages hold of each of their chunks, beside the order of their passes."""

from __future__ import annotations

import numpy as np
import pytest
from paraplan.cost_models.loads import saved_by_turns
from paraplan.cost_models.pipeline import held_by_chunk, in_flight
from paraplan.cost_models.schedules import build_schedule
from paraplan.cost_models.timeline import FORWARD


@pytest.mark.parametrize("pp", [2, 3, 5])
@pytest.mark.parametrize("vpp", [2, 4])
@pytest.mark.parametrize("turns", [1, 2, 3, 6])
def test_the_moments_told_are_those_at_which_a_stage_holds_most(pp: int, vpp: int, turns: int) -> None:
    order, sizes = build_schedule("interleaved", pp, vpp, turns * pp), np.random.default_rng(pp * vpp).uniform(0.2, 2.0, (8, vpp))
    for stage in range(pp):
        held, most = np.zeros(vpp), np.zeros(8)
        for kind, chunk in zip(order.kind[stage].tolist(), order.chunk[stage].tolist(), strict=True):
            held[chunk // pp] += 1 if kind == FORWARD else -1
            most = np.maximum(most, sizes @ held)
        told = (held_by_chunk(pp, vpp, turns * pp, stage) @ sizes.T).max(axis=0)
        assert told == pytest.approx(most)
        charged = saved_by_turns(sizes, np.full(8, turns * pp), pp, vpp, np.array([stage]))[:, 0]
        flight = float(in_flight("interleaved", pp, vpp, turns * pp, stage)) / vpp
        assert charged * flight == pytest.approx(most)
