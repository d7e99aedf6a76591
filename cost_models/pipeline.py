"""The price of a pipeline schedule for many layouts at once, and bounds that never exceed it.

Rows share pp, vpp and schedule. The step of a schedule is the longest path through its passes. `recurrence_s` is the price: it
replays the schedule of `timeline` for all rows together and, where there are many micro-batches, only its two ends. `admissible_s`
takes the longest of a few paths in closed form, `bound_s` the least that any partition of the work can reach.

Stages may come one by one, (n, pp·vpp), or with vpp = 1 as runs of equal consecutive stages, (n, runs) with `run_lengths`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .timeline import (
    BACKWARD,
    FORWARD,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    SIMULATED,
    Floats,
    Ints,
    build_schedule,
    check_schedule,
    source_of,
)

Number = float | int | npt.NDArray[np.float64] | npt.NDArray[np.int64]

BLOCK_ROWS = 2048
"""Rows that are replayed together: their state stays in the cache."""
REPLAYED_GROUPS = 12
"""Groups of pp micro-batches of an interleaved schedule that are replayed; beyond, a further group costs what the last two did."""

MOST_STARTS = 8
"""Micro-batches from which a cycle of the middle may start; a long cycle can lose a fraction of its edges' time, once per step."""


@dataclass(frozen=True, eq=False)
class PipelineTime:
    """One step's pipeline, (n,) each: total_s = busy_s + p2p_s + bubble_s.

    `critical_stage` is the stage on the longest path in closed form and `busy_s` its m·(f + b); `p2p_s` is what would be saved if
    edges took no time; `bubble_s` is the rest.
    """

    total_s: Floats
    critical_stage: Ints
    busy_s: Floats
    p2p_s: Floats
    bubble_s: Floats


def in_flight(schedule: str, pp: int, vpp: int, num_microbatches: Number, stage: Number) -> Ints:
    """Most (micro-batch, chunk) activations that a stage holds at once; broadcasts (Korthikanti et al., arXiv 2205.05198)."""
    m, s = np.asarray(num_microbatches, dtype=np.int64), np.asarray(stage, dtype=np.int64)
    if schedule == GPIPE:
        return m + 0 * s
    if schedule == ONE_F_ONE_B:
        return np.minimum(pp - s, m)
    if schedule == INTERLEAVED:
        return np.minimum(m * vpp, 2 * (pp - 1 - s) + (vpp - 1) * pp + 1)
    raise ValueError(f"schedule {schedule!r} is not one of {', '.join(SIMULATED)}")


def price(
    schedule: str,
    pp: int,
    vpp: int,
    forward_s: Floats,
    backward_s: Floats,
    p2p_s: Number,
    num_microbatches: Number,
    run_lengths: Ints | None = None,
) -> PipelineTime:
    """Time of the pipeline and its split. Shapes as in `recurrence_s`; replays twice where p2p_s is not zero."""
    forward, backward, p2p, m = _rows(pp, vpp, forward_s, backward_s, p2p_s, num_microbatches, run_lengths)
    total = recurrence_s(schedule, pp, vpp, forward, backward, p2p, m)
    exposed = np.zeros_like(total)
    if (slow := p2p > 0).any():
        exposed[slow] = total[slow] - recurrence_s(schedule, pp, vpp, forward[slow], backward[slow], 0.0, m[slow])
    critical = np.argmax(_paths_s(schedule, pp, vpp, forward, backward, p2p, m), axis=1)
    work = (forward + backward).reshape(-1, vpp, pp).sum(axis=1)
    busy = m * work[np.arange(len(m)), critical]
    return PipelineTime(total, critical, busy, exposed, total - busy - exposed)


def recurrence_s(
    schedule: str,
    pp: int,
    vpp: int,
    forward_s: Floats,
    backward_s: Floats,
    p2p_s: Number,
    num_microbatches: Number,
    run_lengths: Ints | None = None,
) -> Floats:
    """Seconds from the first forward to the last backward, (n,): the price of a pipeline.

    `forward_s`, `backward_s` (n, pp·vpp) seconds per virtual chunk, or (n, runs) with `run_lengths` (runs,) or (n, runs) stages
    each; `p2p_s` seconds per edge and `num_microbatches`, scalars or (n,). Exact for GPipe (a flow shop of equal jobs), for 1F1B
    without p2p, and wherever the whole schedule is replayed: m < 4·pp, or m ≤ REPLAYED_GROUPS·pp when interleaved.
    """
    forward, backward, p2p, m = _rows(pp, vpp, forward_s, backward_s, p2p_s, num_microbatches, run_lengths)
    for count in np.unique(m).tolist():
        check_schedule(schedule, pp, vpp, count)
    if schedule == GPIPE:
        return _gpipe_s(pp, forward, backward, p2p, m)
    total = np.empty(len(m))
    limit = REPLAYED_GROUPS * pp if schedule == INTERLEAVED else 4 * pp - 1
    for count in np.unique(np.minimum(m, limit + 1)).tolist():
        rows = np.flatnonzero(m == count if count <= limit else m > limit)
        for block in (rows[i : i + BLOCK_ROWS] for i in range(0, len(rows), BLOCK_ROWS)):
            f, b, c = np.ascontiguousarray(forward[block].T), np.ascontiguousarray(backward[block].T), p2p[block]
            if count <= limit:
                total[block] = _replay(schedule, pp, vpp, count, f, b, c)
            elif schedule == INTERLEAVED:
                total[block] = _extended(pp, vpp, m[block], f, b, c)
            else:
                total[block] = _joined(pp, m[block], f, b, c)
    return total


def admissible_s(
    schedule: str,
    pp: int,
    vpp: int,
    forward_s: Floats,
    backward_s: Floats,
    p2p_s: Number,
    num_microbatches: Number,
    run_lengths: Ints | None = None,
) -> Floats:
    """Longest of the paths in closed form, (n,) seconds: never above the simulated step. Shapes as in `recurrence_s`.

    Within a run of equal stages the paths are looked at on its last stage and on the first that can turn twice, m > pp−s: but for
    whole numbers of loops they are linear in between.
    """
    if run_lengths is None or schedule == GPIPE:
        forward, backward, p2p, m = _rows(pp, vpp, forward_s, backward_s, p2p_s, num_microbatches, run_lengths)
        return np.asarray(_paths_s(schedule, pp, vpp, forward, backward, p2p, m).max(axis=1))
    lengths = np.asarray(run_lengths, dtype=np.int64)
    if schedule != ONE_F_ONE_B or (lengths.sum(axis=-1) != pp).any():
        raise ValueError(f"run_lengths must add up to pp ({pp}) and the schedule be gpipe or 1f1b, not {schedule}")
    # One (n,) column per run: numpy is several times faster along the long axis than across a handful of runs.
    f, b = np.asarray(forward_s, dtype=np.float64).T, np.asarray(backward_s, dtype=np.float64).T
    fb = f + b
    total = sum(fb[r] * lengths[..., r] for r in range(len(fb)))
    best = np.zeros(f.shape[1])
    prefix: Floats = np.zeros(f.shape[1])
    first = 0 * lengths[..., 0]
    for r, length in enumerate(np.moveaxis(lengths, -1, 0)):
        last = np.maximum(length - 1, 0)
        places = [last] if (length <= 1).all() else [np.clip(pp + 1 - np.asarray(num_microbatches) - first, 0, last), last]
        for place in places:
            # An empty run costs nothing and stands on the next one's first stage.
            at, empty = np.minimum(first + place, pp - 1), length == 0
            paths = stage_paths_s(prefix + place * fb[r], f[r], b[r], total, at, pp, num_microbatches, p2p_s)
            best = np.maximum(best, np.where(empty, 0.0, paths) if empty.any() else paths)
        prefix = prefix + length * fb[r]
        first = first + length
    return best


def paths_s(
    schedule: str,
    pp: int,
    vpp: int,
    forward_s: Floats,
    backward_s: Floats,
    p2p_s: Number,
    num_microbatches: Number,
    closed_form: bool = False,
) -> Floats:
    """Longest path through each stage, (n, pp) seconds: those in closed form, raised alike until the longest is `recurrence_s`.

    `closed_form` leaves them as they are: never above the price, and much cheaper.
    """
    forward, backward, p2p, m = _rows(pp, vpp, forward_s, backward_s, p2p_s, num_microbatches, None)
    paths = _paths_s(schedule, pp, vpp, forward, backward, p2p, m)
    if closed_form:
        return paths
    total = recurrence_s(schedule, pp, vpp, forward, backward, p2p, m)
    return np.asarray(paths + (total - paths.max(axis=1))[:, None])


def stage_paths_s(
    prefix_fb: Number, forward: Number, backward: Number, total_fb: Number, stage: Number, pp: Number, m: Number, p2p_s: Number
) -> Floats:
    """Longest path of 1F1B that turns at one stage, seconds; broadcasts. A lower bound on the step, whatever the other stages are.

    `prefix_fb` is Σ(f+b) before the stage, `forward` and `backward` its own, `total_fb` Σ(f+b) of the pipeline. With w warm-up
    forwards, X = f+b and the loop Y = X + suffix + edges, the paths are: (A) through prefix, then all of the stage; (B), (C) the
    first or last micro-batch through the whole pipeline, else the stage; (D) both, or as many loops Y as fit, each of which moves
    pp−s micro-batches on. Loops through the prefix move s+1 micro-batches on and can replace as many X inside A to D.
    Convex in the loads and dependent only on the stage's own cut points, so that a partition can be optimised against it.
    """
    # In floats: whole numbers stay exact in them, and dividing integers takes several times longer.
    stage, pp, m = (np.asarray(each, dtype=np.float64) for each in (stage, pp, m))
    x = np.asarray(forward) + np.asarray(backward)
    steps, behind = m - 1.0, pp - 1.0 - stage
    lead = prefix_fb + 2.0 * stage * p2p_s
    whole = total_fb + 2.0 * (pp - 1.0) * p2p_s
    gain = whole - lead - (behind + 1.0) * x
    loops = np.floor(steps / (behind + 1.0))
    once = np.minimum(loops, 1.0)
    steady = steps * x
    # (C) over (B) where the forwards are the longer ones: the warm-up passes are lost from one of the two.
    turned = whole + steady - np.minimum(steps, behind) * np.minimum(forward, backward)
    twice = whole + once * (steady + gain)
    # Forwards after the first backward, but for one, in whole turns through the prefix.
    turns = np.floor(np.maximum(steps - behind - 1.0, 0.0) / (stage + 1.0))
    front = turns * np.maximum(lead - stage * x, 0.0)
    best = np.maximum(np.maximum(lead + steady + x, turned), twice) + front
    return np.asarray(np.maximum(best, twice + (loops - once) * np.maximum(gain, 0.0)), dtype=np.float64)


def bound_s(
    schedule: str, pp: Number, vpp: Number, total_fb_s: Number, max_block_s: Number, p2p_s: Number, num_microbatches: Number
) -> Floats:
    """Least step of any partition of `total_fb_s` (Σ(f+b) per micro-batch) whose largest block is `max_block_s`; broadcasts.

    1F1B, W = total, G = T − W, S = Σ of later stages. Path (D) says x_s ≤ (G − S_s)/(m−1−w_s), so G − S_{s−1} ≥ (G − S_s)·
    (m−2−w_s)/(m−1−w_s); from the last stage to the first the factors telescope to W ≤ G·pp/(m−1) where m > pp: the equal
    partition is the best one. Edges add 2c to every step of that induction, and full turns of the pipeline, pp micro-batches each,
    can precede it. For m ≤ pp: the mean of (B) and (C), W + (m−1−w_s/2)·x_s, averaged over s with weights 1/(m−1−w_s/2).
    A stage holds the largest block, and that mean bounds it too. GPipe: W + (m−1)(max f + max b), maxima at least the means.
    Interleaved: m·W/pp, one micro-batch through all chunks, and the largest block m times.
    """
    w, block = np.asarray(total_fb_s, dtype=np.float64), np.asarray(max_block_s, dtype=np.float64)
    m, c = np.asarray(num_microbatches), np.asarray(p2p_s, dtype=np.float64)
    pp, vpp = np.asarray(pp), np.asarray(vpp)
    through = w + 2 * (pp * vpp - 1) * c
    if schedule == INTERLEAVED:
        return np.asarray(np.maximum(through, m * np.maximum(w / pp, block)))
    if schedule == GPIPE:
        return np.asarray(through + (m - 1) * np.maximum(w / pp, block))
    if schedule != ONE_F_ONE_B:
        raise ValueError(f"schedule {schedule!r} is not one of {', '.join(SIMULATED)}")
    steps = np.maximum(m - 1, 0)
    largest = np.maximum(through + (steps - np.minimum(pp - 1, steps) / 2) * block, m * block)
    turns, rest = steps // pp, steps % pp
    harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, 2 * int(np.max(pp, initial=1)) + 1))])
    edges = (pp - 1) - rest * (harmonic[pp + rest - 1] - harmonic[rest])
    many = through + w * steps / pp + 2 * c * (np.maximum(turns - 1, 0) * (pp - 1) + (pp + rest) / pp * edges)
    # Few micro-batches: Σ over stages of 1/(m−1−w/2) with w = min(pp−1−s, m−1), which is 2·Σ 1/(2(m−1)−w).
    short = np.clip(steps, 1, np.maximum(pp - 1, 1))
    inverse = 2 * (harmonic[2 * short] - harmonic[short - 1]) + 2 * (pp - 1 - short) / short
    few = through + np.where(steps > 0, w / inverse, 0.0)
    return np.asarray(np.maximum(largest, np.where(m > pp, many, few)))


def _rows(
    pp: int, vpp: int, forward_s: Floats, backward_s: Floats, p2p_s: Number, num_microbatches: Number, run_lengths: Ints | None
) -> tuple[Floats, Floats, Floats, Ints]:
    """The inputs as (n, pp·vpp), (n, pp·vpp), (n,), (n,)."""
    forward, backward = np.asarray(forward_s, dtype=np.float64), np.asarray(backward_s, dtype=np.float64)
    if run_lengths is not None:
        lengths = np.broadcast_to(np.asarray(run_lengths, dtype=np.int64), forward.shape)
        if vpp > 1 or (lengths.sum(axis=1) != pp).any():
            raise ValueError(f"run_lengths must add up to pp ({pp}), with vpp 1")
        run = (np.arange(pp) >= np.cumsum(lengths, axis=1)[:, :, None]).sum(axis=1)
        forward, backward = np.take_along_axis(forward, run, axis=1), np.take_along_axis(backward, run, axis=1)
    if forward.shape != backward.shape or forward.ndim != 2 or forward.shape[1] != pp * vpp:
        raise ValueError(f"forward_s {forward.shape} and backward_s {backward.shape} must both be (n, {pp * vpp})")
    rows = len(forward)
    p2p = np.broadcast_to(np.asarray(p2p_s, dtype=np.float64), (rows,))
    return forward, backward, p2p, np.broadcast_to(np.asarray(num_microbatches, dtype=np.int64), (rows,))


def _paths_s(schedule: str, pp: int, vpp: int, forward: Floats, backward: Floats, p2p: Floats, m: Ints) -> Floats:
    """(n, pp) longest path in closed form at each stage."""
    if schedule == GPIPE:
        longest = _gpipe_s(pp, forward, backward, p2p, m)[:, None]
        slack = forward.max(axis=1, keepdims=True) + backward.max(axis=1, keepdims=True) - forward - backward
        return np.asarray(longest - (m[:, None] - 1) * (slack - slack.min(axis=1, keepdims=True)))
    if schedule == INTERLEAVED:
        return _interleaved_paths_s(pp, vpp, forward, backward, p2p, m)
    fb = forward + backward
    prefix = np.cumsum(fb, axis=1) - fb
    total = fb.sum(axis=1, keepdims=True)
    return stage_paths_s(prefix, forward, backward, total, np.arange(pp), pp, m[:, None], p2p[:, None])


def _gpipe_s(pp: int, forward: Floats, backward: Floats, p2p: Floats, m: Ints) -> Floats:
    """All forwards, then all backwards: two flow shops of m equal jobs, Σ + (m−1)·max each."""
    through = (forward + backward).sum(axis=1) + 2 * (pp - 1) * p2p
    return np.asarray(through + (m - 1) * (forward.max(axis=1) + backward.max(axis=1)))


def _interleaved_paths_s(pp: int, vpp: int, forward: Floats, backward: Floats, p2p: Floats, m: Ints) -> Floats:
    """Paths (A) to (D) of `stage_paths_s` at the level of chunks, (n, pp)."""
    f, b = forward.reshape(-1, vpp, pp), backward.reshape(-1, vpp, pp)
    fb, stage = f + b, np.arange(pp)
    c, count = p2p[:, None], m[:, None]
    work = count * fb.sum(axis=1)
    before = np.cumsum(fb, axis=2)[:, 0] - fb[:, 0]
    after = fb[:, -1].sum(axis=1, keepdims=True) - np.cumsum(fb, axis=2)[:, -1]
    after_b = b[:, -1].sum(axis=1, keepdims=True) - np.cumsum(b, axis=2)[:, -1]
    before_b = np.cumsum(b, axis=2)[:, 0] - b[:, 0]
    # Forwards of each chunk up to the first backward; by symmetry the backwards after the last forward.
    head = 2 * (pp - 1 - stage) + (vpp - 1) * pp + 1
    turns = np.array([[max(0, min(pp, h - v * pp)) + max(0, h - (vpp + v) * pp) for h in head.tolist()] for v in range(vpp)])
    turns = np.minimum(turns, count[:, :, None])
    head_f, tail_b = (f * turns).sum(axis=1), (b * turns).sum(axis=1)
    all_f, all_b = forward.sum(axis=1, keepdims=True), backward.sum(axis=1, keepdims=True)
    last = pp * vpp - 1
    direct = before + work + 2 * stage * c
    start = all_f + after_b + before_b + work - head_f + (last + pp - 1) * c
    end = all_b + (after - after_b) + (before - before_b) + work - tail_b + (last + pp - 1) * c
    both = all_f + all_b + after + work - head_f - tail_b + (2 * last + 2 * (pp - 1 - stage)) * c
    both = np.where(count * vpp > head, both, 0.0)
    return np.asarray(np.maximum(np.maximum(direct, start), np.maximum(end, both)))


@lru_cache(maxsize=128)
def _program(schedule: str, pp: int, vpp: int, num_microbatches: int) -> tuple[int, tuple[tuple[int, int, int, int, int], ...]]:
    """Number of message slots, and per pass (stage, kind, chunk, slot read, slot written); −1 for none. Slots are used again."""
    order = build_schedule(schedule, pp, vpp, num_microbatches)
    kind, chunk, microbatch = order.kind.tolist(), order.chunk.tolist(), order.microbatch.tolist()
    last = pp * vpp - 1
    sent: dict[tuple[int, int, int], int] = {}
    unused: list[int] = []
    slots = 0
    passes = []
    for stage, p in order.passes():
        k, c, i = kind[stage][p], chunk[stage][p], microbatch[stage][p]
        source = source_of(k, c, last)
        read = write = -1
        if source is not None and source[1] != c:
            read = sent.pop((*source, i))
            unused.append(read)
        if c != (last if k == FORWARD else 0):
            if not unused:
                unused.append(slots)
                slots += 1
            write = sent[k, c, i] = unused.pop()
        passes.append((stage, k, c, read, write))
    return slots, tuple(passes)


def _ends(
    schedule: str, pp: int, vpp: int, num_microbatches: int, forward: Floats, backward: Floats, p2p: Floats
) -> Iterator[tuple[int, int, Floats]]:
    """(stage, kind, end of the pass (n,)) for every pass of the schedule; chunks are rows: (pp·vpp, n). The end is overwritten."""
    slots, passes = _program(schedule, pp, vpp, num_microbatches)
    rows = forward.shape[1]
    free = [np.zeros(rows) for _ in range(pp)]
    message = [np.empty(rows) for _ in range(slots)]
    durations = (list(forward), list(backward))
    for stage, kind, chunk, read, write in passes:
        end = free[stage]
        if read >= 0:
            np.maximum(end, message[read], out=end)
        end += durations[kind][chunk]
        if write >= 0:
            np.add(end, p2p, out=message[write])
        yield stage, kind, end


def _replay(schedule: str, pp: int, vpp: int, num_microbatches: int, forward: Floats, backward: Floats, p2p: Floats) -> Floats:
    """(n,) step of the whole schedule; the last pass to end is the last backward of stage 0."""
    end: Floats = np.zeros(0)
    for stage, _, here in _ends(schedule, pp, vpp, num_microbatches, forward, backward, p2p):
        if stage == 0:
            end = here
    return end


def _extended(pp: int, vpp: int, m: Ints, forward: Floats, backward: Floats, p2p: Floats) -> Floats:
    """(n,) interleaved step of many groups: one more costs what the last two replayed did, and no less than the fullest stage.

    Two, because chunks that differ can lock stages into a rhythm of two groups.
    """
    replayed = _replay(INTERLEAVED, pp, vpp, REPLAYED_GROUPS * pp, forward, backward, p2p)
    group = (replayed - _replay(INTERLEAVED, pp, vpp, (REPLAYED_GROUPS - 2) * pp, forward, backward, p2p)) / 2
    fullest = pp * (forward + backward).reshape(vpp, pp, -1).sum(axis=0).max(axis=0)
    return np.asarray(replayed + (m // pp - REPLAYED_GROUPS) * np.maximum(group, fullest))


def _joined(pp: int, m: Ints, forward: Floats, backward: Floats, p2p: Floats) -> Floats:
    """(n,) 1F1B step of m ≥ 4·pp micro-batches from its first and last 2·pp.

    Reversed in time 1F1B is 1F1B with f and b exchanged, so both ends meet at a forward of some stage. In between, the longest path
    goes round one cycle: a stage alone, or up through stages s … s+L−1 and back, which moves L micro-batches on and takes their
    Σ(f+b) + 2(L−1)·p2p. Without p2p no such loop beats its slowest stage.
    """
    work = forward + backward
    head = _idle_s(pp, forward, backward, p2p, FORWARD)
    tail = _idle_s(pp, backward, forward, p2p, BACKWARD)
    reach = pp if (p2p > 0).any() else 1
    best = np.zeros(len(m))
    for count in np.unique(m).tolist():
        rows = m == count
        x, h, t, c = work[:, rows], head[:, :, rows], tail[:, :, rows], p2p[rows]
        longest = np.zeros(x.shape[1])
        for length, gain in _cycles(x, c, reach):
            stages = np.arange(pp + 1 - length)
            alone = count * x[stages]
            for early in range(min(length, MOST_STARTS)):
                # Micro-batches between the two ends, made a multiple of the cycle by letting the tail begin `late` sooner.
                between = count + early + pp - 4 * pp - stages
                late = -between % length
                loops = (between + late) // length
                path = alone + h[early, stages] + t[late, stages] + loops[:, None] * gain
                np.maximum(longest, path.max(axis=0), out=longest)
        best[rows] = longest
    return best


def _cycles(work: Floats, p2p: Floats, reach: int) -> Iterator[tuple[int, Floats]]:
    """(length L, gain (pp+1−L, n) over L micro-batches on the cycle's first stage alone), for L = 1 … reach."""
    pp = len(work)
    run = np.concatenate([np.zeros((1, work.shape[1])), np.cumsum(work, axis=0)])
    for length in range(1, reach + 1):
        yield length, run[length:] - run[: pp + 1 - length] + 2 * (length - 1) * p2p - length * work[: pp + 1 - length]


def _idle_s(pp: int, forward: Floats, backward: Floats, p2p: Floats, kind: int) -> Floats:
    """(pp, pp, n) idle seconds of each stage before the end of a pass, for k = 0 … pp−1 (first axis).

    The pass is the forward of micro-batch 2·pp−1−k, or the backward that follows it.
    """
    count = 2 * pp
    idle = np.empty((pp, pp, forward.shape[1]))
    done = [[0, 0] for _ in range(pp)]
    for stage, here, end in _ends(ONE_F_ONE_B, pp, 1, count, forward, backward, p2p):
        done[stage][here] += 1
        forwards, backwards = done[stage]
        steady = forwards - backwards == pp - stage - (here == BACKWARD)
        if here == kind and steady and count - forwards < pp:
            np.subtract(end, forwards * forward[stage] + backwards * backward[stage], out=idle[count - forwards, stage])
    return idle
