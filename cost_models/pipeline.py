"""The price of a pipeline schedule for many layouts at once, and bounds that never exceed it.

Rows share pp, vpp and schedule. `stage_ends_s` is the price: when every stage ends its last backward pass. Of GPipe and 1F1B it is
the longest path in closed form; the interleaved schedule of `timeline` is replayed for all rows together, with a closed form from
below beside it. `bound_s` is the least that any partition of the work can reach.

Stages may come one by one, (n, pp·vpp), or with vpp = 1 as runs of equal consecutive stages, (n, runs) with `run_lengths`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .interleaved_replay import REPLAYED_GROUPS, extended, replay_program, whole_program
from .one_f_one_b import last_backward_ends_s
from .timeline import GPIPE, INTERLEAVED, ONE_F_ONE_B, WHOLE, Floats, Ints, check_schedule

Number = float | int | npt.NDArray[np.float64] | npt.NDArray[np.int64]

BLOCK_ROWS = 2048
"""Rows that are replayed together: their state stays in the cache."""


@dataclass(frozen=True, eq=False)
class PipelineTime:
    """One step's pipeline, (n,) each: total_s = busy_s + p2p_s + bubble_s.

    `critical_stage` is the fullest stage and `busy_s` its m·(f + b); `p2p_s` is what would be saved if edges took no time;
    `bubble_s` is the rest.
    """

    total_s: Floats
    critical_stage: Ints
    busy_s: Floats
    p2p_s: Floats
    bubble_s: Floats


def in_flight(schedule: str, pp: int | Ints, vpp: int, num_microbatches: Number, stage: Number) -> Ints:
    """Most (micro-batch, chunk) activations that a stage holds at once; broadcasts (Korthikanti et al., arXiv 2205.05198).

    Where Megatron-Core pairs passes to hide the exchange of tokens, one more forward warms up and none is added: layer by layer the
    forward of a pair saves what its backward frees (its TransformerModelChunkSchedulePlan.run).
    """
    m, s = np.asarray(num_microbatches, dtype=np.int64), np.asarray(stage, dtype=np.int64)
    if schedule == GPIPE:
        return np.asarray(m + 0 * s)
    if schedule == ONE_F_ONE_B:
        return np.asarray(np.minimum(pp - s, m))
    if schedule == INTERLEAVED:
        return np.asarray(np.minimum(m * vpp, 2 * (pp - 1 - s) + (vpp - 1) * pp + 1))
    raise ValueError(f"schedule {schedule!r} is not one of {', '.join(WHOLE)}")


@lru_cache(maxsize=512)
def held_by_chunk(pp: int, vpp: int, num_microbatches: int, stage: int) -> Ints:
    """What an interleaved stage holds of each of its chunks at the moments when it may hold most, (moments, vpp) micro-batches.

    Forwards take pp micro-batches through one chunk, then through the next; backwards likewise from the last chunk on. From the end
    of the warm-up one backward follows each forward: between turns what is held is linear, so its most is where one of them turns.
    """
    total = num_microbatches * vpp
    first = int(in_flight(INTERLEAVED, pp, vpp, num_microbatches, stage))
    steps = min(total - first, pp * vpp)
    moments = {0, steps, *range(0, steps, pp), *range(-first % pp, steps, pp)}
    after = np.array(sorted(moments), dtype=np.int64)
    chunk = np.arange(vpp)

    def passed(count: Ints) -> Ints:
        """Of the first `count` passes those of each chunk, in the order of forwards."""
        groups, rest = np.divmod(count, pp * vpp)
        return np.asarray(groups[:, None] * pp + np.clip(rest[:, None] - chunk * pp, 0, pp))

    return np.asarray(passed(first + after) - passed(after)[:, ::-1])


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
    """Time of the pipeline and its split. Shapes as in `stage_ends_s`; priced twice where p2p_s is not zero."""
    forward, backward, p2p, m, _ = _rows(pp, vpp, forward_s, backward_s, p2p_s, num_microbatches, run_lengths)
    total = recurrence_s(schedule, pp, vpp, forward, backward, p2p, m, run_lengths)
    exposed = np.zeros_like(total)
    if (slow := p2p > 0).any():
        lengths = None if run_lengths is None else np.broadcast_to(run_lengths, forward.shape)[slow]
        exposed[slow] = total[slow] - recurrence_s(schedule, pp, vpp, forward[slow], backward[slow], 0.0, m[slow], lengths)
    work = (forward + backward) * (1 if run_lengths is None else np.asarray(run_lengths) > 0)
    work = work if vpp == 1 else work.reshape(-1, vpp, pp).sum(axis=1)
    fullest = np.argmax(work, axis=1)
    busy = m * work[np.arange(len(m)), fullest]
    if run_lengths is not None:
        first = np.broadcast_to(np.cumsum(run_lengths, axis=-1) - run_lengths, forward.shape)
        fullest = first[np.arange(len(m)), fullest]
    return PipelineTime(total, fullest, busy, exposed, total - busy - exposed)


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
    """Seconds from the first forward to the last backward, (n,): the end of the first stage. Shapes as in `stage_ends_s`."""
    return np.asarray(
        stage_ends_s(schedule, pp, vpp, forward_s, backward_s, p2p_s, num_microbatches, run_lengths).max(axis=1, initial=0.0)
    )


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
    """Longest of the paths in closed form, (n,) seconds: never above the simulated step. Shapes as in `stage_ends_s`."""
    ends = stage_ends_s(schedule, pp, vpp, forward_s, backward_s, p2p_s, num_microbatches, run_lengths, closed_form=True)
    return np.asarray(ends.max(axis=1, initial=0.0))


def stage_ends_s(
    schedule: str,
    pp: int,
    vpp: int,
    forward_s: Floats,
    backward_s: Floats,
    p2p_s: Number,
    num_microbatches: Number,
    run_lengths: Ints | None = None,
    closed_form: bool = False,
) -> Floats:
    """Seconds from the start until each stage ends its last backward pass, (n, pp); that of stage 0 ends the pipeline.

    `forward_s`, `backward_s` (n, pp·vpp) seconds per virtual chunk; `p2p_s` seconds per edge and `num_microbatches`, scalars or
    (n,). With `run_lengths` (runs,) or (n, runs) stages come as runs of equal ones, (n, runs) seconds of one stage each, and so do
    ends: those of every run's first stage, its last to end; −inf for runs of none. Exact for GPipe, for 1F1B without p2p or of
    equal stages (`one_f_one_b`), and for interleaved schedules of up to REPLAYED_GROUPS·pp micro-batches; with more these go on by
    the last cycle, a few edges off where two stages are almost as slow. Otherwise 1F1B is below the simulation by less than 1 %;
    `closed_form` has interleaved ones from below too.
    """
    forward, backward, p2p, m, lengths = _rows(pp, vpp, forward_s, backward_s, p2p_s, num_microbatches, run_lengths)
    uneven = np.unique(m[m % pp > 0]).tolist() if schedule == INTERLEAVED else []
    for count in (int(m.min(initial=pp)), *uneven):
        check_schedule(schedule, pp, vpp, count)
    if schedule == INTERLEAVED:
        ends = _interleaved_below_s if closed_form else _interleaved_ends_s
        return ends(pp, vpp, forward, backward, p2p, m)
    return (_gpipe_ends_s if schedule == GPIPE else last_backward_ends_s)(pp, lengths, forward, backward, p2p, m)


def stage_paths_s(
    prefix_fb: Number, forward: Number, backward: Number, total_fb: Number, stage: Number, pp: Number, m: Number, p2p_s: Number
) -> Floats:
    """Longest path of 1F1B that turns at one stage, seconds; broadcasts. A lower bound on the step, whatever the other stages are.

    All of these paths pass the stage's last backward and go on to the first stage, so that it ends that pass as much earlier as the
    stages before it need at least for theirs.

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
        raise ValueError(f"schedule {schedule!r} is not one of {', '.join(WHOLE)}")
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
) -> tuple[Floats, Floats, Floats, Ints, Ints]:
    """Seconds as (n, pp·vpp) or (n, runs), p2p and micro-batches (n,), and the lengths of runs, 1 where none are given."""
    forward, backward = np.asarray(forward_s, dtype=np.float64), np.asarray(backward_s, dtype=np.float64)
    lengths = np.ones(pp * vpp, dtype=np.int64) if run_lengths is None else np.asarray(run_lengths, dtype=np.int64)
    if run_lengths is not None and (vpp > 1 or (lengths.sum(axis=-1) != pp).any()):
        raise ValueError(f"run_lengths must add up to pp ({pp}), with vpp 1")
    if forward.shape != backward.shape or forward.ndim != 2 or forward.shape[1] != lengths.shape[-1]:
        raise ValueError(f"forward_s {forward.shape} and backward_s {backward.shape} must both be (n, {lengths.shape[-1]})")
    rows = len(forward)
    p2p = np.broadcast_to(np.asarray(p2p_s, dtype=np.float64), (rows,))
    return forward, backward, p2p, np.broadcast_to(np.asarray(num_microbatches, dtype=np.int64), (rows,)), lengths


def _gpipe_ends_s(pp: int, lengths: Ints, forward: Floats, backward: Floats, p2p: Floats, m: Ints) -> Floats:
    """All forwards, then all backwards: two flow shops of m equal jobs, Σ + (m−1)·max each; the second goes as far as one's own."""
    there, first = lengths > 0, np.cumsum(lengths, axis=-1) - lengths
    turns, c = (m - 1)[:, None], p2p[:, None]
    f, b = np.where(there, forward, 0.0), np.where(there, backward, 0.0)
    down = np.cumsum((b * lengths)[:, ::-1], axis=1)[:, ::-1] + turns * np.maximum.accumulate(b[:, ::-1], axis=1)[:, ::-1]
    up = (f * lengths).sum(axis=1, keepdims=True) + turns * f.max(axis=1, keepdims=True)
    return np.where(there, up + down + (2 * (pp - 1) - first) * c, -np.inf)


def _interleaved_below_s(pp: int, vpp: int, forward: Floats, backward: Floats, p2p: Floats, m: Ints) -> Floats:
    """Paths through each stage's last backward, less what goes on from there: the backwards of the first chunks before it."""
    f, b = (np.ascontiguousarray(each.T).reshape(vpp, pp, -1) for each in (forward, backward))
    ends = _interleaved_paths_s(f, b, p2p, m)
    for stage in range(pp - 2, -1, -1):  # the last path through any later stage passes the first
        np.maximum(ends[stage], ends[stage + 1], out=ends[stage])
    for stage, before in enumerate(_before(b[0])):  # a stage ends as much before the first as those before it need
        ends[stage] -= before + stage * p2p
    return ends.T


def _interleaved_ends_s(pp: int, vpp: int, forward: Floats, backward: Floats, p2p: Floats, m: Ints) -> Floats:
    """The schedule replayed, whole or as far as it has to be."""
    ends = np.empty((len(m), pp))
    limit = REPLAYED_GROUPS * pp
    for count in np.unique(np.minimum(m, limit + 1)).tolist():
        rows = np.flatnonzero(m == count if count <= limit else m > limit)
        for block in (rows[i : i + BLOCK_ROWS] for i in range(0, len(rows), BLOCK_ROWS)):
            f, b, c = np.ascontiguousarray(forward[block].T), np.ascontiguousarray(backward[block].T), p2p[block]
            if count <= limit:
                ends[block] = replay_program(whole_program(INTERLEAVED, pp, vpp, count), pp, f, b, c)[0].T
            else:
                ends[block] = extended(pp, vpp, m[block], f, b, c).T
    return ends


def _interleaved_paths_s(f: Floats, b: Floats, c: Floats, m: Ints) -> Floats:
    """Paths (A) to (D) of `stage_paths_s` at the level of chunks, (pp, n), from seconds of chunks (vpp, pp, n)."""
    vpp, pp, _ = f.shape
    stage = np.arange(pp)[:, None]
    # Forwards of each chunk up to the first backward; by symmetry the backwards after the last forward.
    head, chunk = 2 * (pp - 1 - stage) + (vpp - 1) * pp + 1, np.arange(vpp)[:, None, None]
    turns = np.minimum(head - chunk * pp, pp).clip(0) + (head - (vpp + chunk) * pp).clip(0)  # (vpp, pp, 1)
    count, last = m.astype(np.float64), pp * vpp - 1
    work, head_f, tail_b = np.zeros_like(f[0]), np.zeros_like(f[0]), np.zeros_like(f[0])
    for each_f, each_b, most in zip(f, b, turns.astype(np.float64), strict=True):
        held = np.minimum(most, count)
        work += each_f
        work += each_b
        head_f += each_f * held
        tail_b += each_b * held
    work *= count
    first_f, first_b, after_f, after_b = _before(f[0]), _before(b[0]), _after(f[-1]), _after(b[-1])
    all_f, all_b = _total(f), _total(b)
    begun, ended = all_f - head_f, all_b - tail_b
    direct = first_f + first_b + 2.0 * stage * c
    start = begun + after_b + first_b + (last + pp - 1) * c
    end = ended + after_f + first_f + (last + pp - 1) * c
    both = begun + ended + after_f + after_b + 2.0 * (last + (pp - 1 - stage)) * c
    both[count * vpp <= head] = 0.0
    longest = np.maximum(np.maximum(direct, start), np.maximum(end, both))
    return np.asarray(longest + work)


def _before(seconds: Floats) -> Floats:
    """Of the stages before each, (stages, n)."""
    found = np.zeros_like(seconds)
    for stage in range(1, len(seconds)):
        np.add(found[stage - 1], seconds[stage - 1], out=found[stage])
    return found


def _after(seconds: Floats) -> Floats:
    """Of the stages after each, (stages, n)."""
    return _before(seconds[::-1])[::-1]


def _total(seconds: Floats) -> Floats:
    """Of all chunks and stages, (n,)."""
    return np.asarray(seconds.reshape(-1, seconds.shape[-1]).sum(axis=0))
