"""Activations that a stage keeps in the memory of another of its pipeline (BPipe: Kim et al., ICML 2023, "Memory-balanced pipeline
parallelism").

Under 1F1B stage s has pp − s micro-batches in flight, so that s and pp−1−s have pp + 1 between them: the fuller sends a share of
what it saves to the emptier, which has it until the backward pass, rank by rank with all their other coordinates alike. The share
is what the layout says, and no more than makes the two hold as many micro-batches. Interleaved stages have 2(pp−1−s) chunks more in
flight than the last; their pairs are charged the peaks of both, which need not come at once.
"""

from __future__ import annotations

import numpy as np

from ..search_spaces.groups import groups, unit_of
from ..search_spaces.layout import SCHEDULES, Floats, Ints, Layout, LayoutTable, Problem, parse_offload
from .pipeline import in_flight
from .timeline import INTERLEAVED, ONE_F_ONE_B

LENDING = (ONE_F_ONE_B, INTERLEAVED)
"""Schedules whose early stages have more in flight than their late ones."""
Number = int | Ints


def lends(problem: Problem) -> bool:
    """Whether offloaded activations go to other devices of the pipeline."""
    return problem.workload.offload_to == "peers"


def is_lent(problem: Problem, layout: Layout) -> bool:
    """Whether stages of a layout keep activations on each other's devices."""
    return lends(problem) and parse_offload(layout.offload)[1] > 0


def lent_share(
    pp: Number, num_microbatches: Number, stage: Number, most: Floats, schedule: str = ONE_F_ONE_B, vpp: int = 1
) -> Floats:
    """Share of its activations that a stage keeps with its partner, at `most`; broadcasts. Half of what it has more in flight."""
    if not most.any():
        return np.zeros(1)
    own, other = (in_flight(schedule, pp, vpp, num_microbatches, each) for each in (stage, pp - 1 - stage))
    return np.asarray(np.minimum(most, np.maximum(own - other, 0) / (2.0 * own)))


def own_in_flight(pp: Number, num_microbatches: Number, stage: Number, most: Floats) -> Floats:
    """Micro-batches of its own that a stage of 1F1B has on its device at its fullest, in whole stages; broadcasts."""
    held = in_flight(ONE_F_ONE_B, pp, 1, num_microbatches, stage)
    return np.asarray(held * (1.0 - lent_share(pp, num_microbatches, stage, most)))


def held_in_flight(pp: Number, num_microbatches: Number, stage: Number, most: Floats) -> Floats:
    """The same with those of a partner that saves alike."""
    own, partner = own_in_flight(pp, num_microbatches, stage, most), pp - 1 - stage
    if not most.any():
        return own
    lent = lent_share(pp, num_microbatches, partner, most) * in_flight(ONE_F_ONE_B, pp, 1, num_microbatches, partner)
    return np.asarray(own + lent)


def most_lent(table: LayoutTable) -> Floats:
    """The largest share that any stage lends, (n,): the first's."""
    most = np.zeros(len(table))
    for name in LENDING:
        rows = np.flatnonzero(table.schedule == SCHEDULES.index(name))
        for vpp in np.unique(table.vpp[rows]).tolist():
            some = rows[table.vpp[rows] == vpp]
            most[some] = lent_share(table.pp[some], table.num_microbatches[some], 0, table.activation_offload[some], name, vpp)
    return most


def with_partners(kept: Floats, shares: Floats) -> Floats:
    """What stages (…, pp) of so much hold once each has lent its share to its partner."""
    lent = kept * shares
    return np.asarray(kept - lent + lent[..., ::-1])


def partners_across(table: LayoutTable, row: int, sizes: tuple[int, ...]) -> Floats:
    """Share of every stage's ranks whose partner's lies in the same unit of a level and in another of the one inside, (levels, pp).

    `sizes` as in `Problem.allocated_sizes`; counted rank by rank for one row.
    """
    of, pp = groups(table.take(np.array([row])), "pp"), int(table.pp[row])
    stride, ranks = int(of.stride[0]), np.arange(int(table.devices[row]))
    stage = ranks // stride % pp
    partner = ranks + (pp - 1 - 2 * stage) * stride
    units = [(1, *sizes), *(sizes[level:] for level in range(len(sizes)))]
    apart = np.array([unit_of(ranks, of_level) != unit_of(partner, of_level) for of_level in units])
    between = np.array([np.bincount(stage, weights=each, minlength=pp) for each in apart[:-1] & ~apart[1:]])
    return np.asarray(between / np.bincount(stage, minlength=pp))
