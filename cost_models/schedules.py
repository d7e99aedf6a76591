"""Pipeline schedules as exact orders: which pass every stage runs after which, and what it holds meanwhile.

A stage holds one chunk of the model, several in turns (`interleaved`), the two ends of a V (`zb-v`, `dualpipev`) or one of each of
two copies (`dualpipe`). A backward pass is whole, or split into one for the gradient of its input, which the stage before waits
for, and one for those of its weights, which nobody waits for. `timeline` replays a schedule, `replay` prices it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from ..search_spaces.vocabulary import V_SHAPED

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

GPIPE, ONE_F_ONE_B, INTERLEAVED = WHOLE = ("gpipe", "1f1b", "interleaved")
"""Schedules whose backward passes are whole: their price has a closed form from below."""
REMEMBERED_PASSES = 1 << 13
"""Passes up to which a schedule is kept for when it is asked for again, in less than a MiB: plans replay longer ones once."""
ZB_H1, ZB_V, DUALPIPE, DUALPIPEV = SPLIT = ("zb-h1", "zb-v", "dualpipe", "dualpipev")
"""Schedules that split backward passes, in some places or in all."""
PAIRED = (DUALPIPE, DUALPIPEV)
"""Schedules whose steady state is pairs of a forward and a backward."""
MIRRORED = (ZB_V, DUALPIPE, DUALPIPEV)
"""Schedules whose stages hold one chunk of the first half of the model and its mirror image in the second."""
KINDS = FORWARD, BACKWARD, INPUT, WEIGHT = range(4)
"""A forward, a whole backward, one for the input's gradient alone, one for the weights' gradients alone."""
NONE = -1

Pass = tuple[int, int, int, bool]
"""Kind, chunk, micro-batch, and whether it runs together with the pass before it."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """The order of passes on every stage.

    `kind`, `chunk`, `microbatch` and `paired` are (pp, longest order): position p of stage s runs that kind of pass of that chunk
    of the model for that micro-batch, together with the pass before it where it is `paired`. Shorter orders end with kind NONE.
    """

    name: str
    pp: int
    vpp: int
    num_microbatches: int
    kind: Ints
    chunk: Ints
    microbatch: Ints
    paired: Bools

    @property
    def chunks(self) -> int:
        """Chunks that the model is cut into."""
        return self.pp * self.vpp

    def in_flight(self, stage: int) -> int:
        """Most (micro-batch, chunk) activations that a stage holds at once, counted off its order: whole until their backward, and
        what a weight gradient needs of them until that.
        """
        kind = self.kind[stage]
        change = (kind == FORWARD).astype(np.int64) - ((kind == BACKWARD) | (kind == WEIGHT))
        return int(np.cumsum(change).max())

    def held(self, stage: int) -> Ints:
        """What a stage holds at its fullest, (k, 2·chunks of the stage): whole activations of each of its chunks, in the order of
        `stage_chunks`, then what is kept for weight gradients of each. No row has as much as another of everything.
        """
        return _held(self, stage)

    @cached_property
    def wires(self) -> tuple[Ints, Ints]:
        """Numbers of the message that every position takes and of the one it makes, (pp, longest order) each, −1 for none.

        Forwards and backwards of every chunk and micro-batch make one; weight gradients none, and what they take is on their stage.
        """
        m, chunks = self.num_microbatches, self.chunks
        forward = self.kind == FORWARD
        makes = (~forward * chunks + self.chunk) * m + self.microbatch
        turns = ~forward & (self.chunk == chunks - 1)
        takes = np.where(turns, makes - chunks * m, makes + np.where(forward, -m, m))
        silent = (self.kind == WEIGHT) | (self.kind == NONE)
        return np.where(silent | (forward & (self.chunk == 0)), NONE, takes), np.where(silent, NONE, makes)

    @cached_property
    def sequence(self) -> tuple[Ints, Ints]:
        """Stage and position of every pass, each after the passes it waits for, (passes,) each."""
        stage, begin, end = np.array(list(self._runs()), dtype=np.int64).reshape(-1, 3).T
        length = end - begin
        return np.repeat(stage, length), np.arange(length.sum()) - np.repeat(np.cumsum(length) - length - begin, length)

    def groups(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(stage, its one or two positions that run together), each after what it waits for. ValueError: stages wait in a ring."""
        paired, length = self.paired.tolist(), self.kind.shape[1]
        for stage, p, end in self._runs():
            while p < end:
                both = p + 1 < length and paired[stage][p + 1]
                yield stage, (p, p + 1) if both else (p,)
                p += 1 + both

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """(stage, a position, the one behind the last that follows without waiting), each after what it waits for."""
        takes, makes = (each.tolist() for each in self.wires)
        lengths = (self.kind != NONE).sum(axis=1).tolist()
        beside = self.paired.tolist() if self.paired.any() else None
        done = bytearray(2 * self.chunks * self.num_microbatches + 1)  # the last one, which −1 writes, belongs to no message
        position = [0] * self.pp
        stages = list(range(self.pp))
        while stages:
            moved = False
            for stage in stages:
                first = p = position[stage]
                taken, made, length = takes[stage], makes[stage], lengths[stage]
                while p < length and (taken[p] < 0 or done[taken[p]]):
                    if beside is not None and p + 1 < length and beside[stage][p + 1]:
                        if taken[p + 1] >= 0 and not done[taken[p + 1]]:
                            break
                        done[made[p]] = 1
                        p += 1
                    done[made[p]] = 1
                    p += 1
                if p > first:
                    position[stage], moved = p, True
                    yield stage, first, p
            stages = [stage for stage in stages if position[stage] < lengths[stage]]
            if stages and not moved:
                raise ValueError(f"schedule {self.name}: stages {stages} wait for each other")

    def passes(self) -> Iterator[tuple[int, int]]:
        """(stage, position) of every pass, each after the passes it waits for."""
        for stage, together in self.groups():
            yield from ((stage, p) for p in together)


def build_schedule(
    name: str,
    pp: int,
    vpp: int,
    num_microbatches: int,
    group: int | None = None,
    overlapped: bool = False,
    whole: bool = False,
) -> Schedule:
    """The order of passes of a schedule; ValueError says why there is none.

    `gpipe` (arXiv 1811.06965), `1f1b` and `interleaved` (arXiv 2104.04473), `zb-h1` and `zb-v` (arXiv 2401.10241, 2405.15362),
    `dualpipe` (arXiv 2412.19437) and `dualpipev` (its two directions folded onto one copy of the model). `group` micro-batches go
    through a chunk of the interleaved schedule before the next chunk takes them: pp as a rule, Megatron-Core's
    `microbatch_group_size_per_vp_stage`. `overlapped` pairs every forward of the steady state with a backward, behind which the
    other's exchange of tokens hides, after one more forward of warm-up (Megatron-Core's `overlap_moe_expert_parallel_comm`).
    With `whole` backwards a schedule that would split some computes their weight gradients at once.
    """
    build = _remembered if 2 * pp * vpp * num_microbatches <= REMEMBERED_PASSES else _built
    return build(name, pp, vpp, num_microbatches, group, overlapped, whole)


def _built(name: str, pp: int, vpp: int, num_microbatches: int, group: int | None, overlapped: bool, whole: bool) -> Schedule:
    check_schedule(name, pp, vpp, num_microbatches, group)
    if overlapped and name not in (ONE_F_ONE_B, INTERLEAVED):
        raise ValueError(f"schedule {name!r} cannot be overlapped by choice; 1f1b and interleaved can")
    m = num_microbatches
    if name in WHOLE:
        return Schedule(name, pp, vpp, m, *_whole_orders(name, pp, vpp, m, group or pp, overlapped))
    if name == ZB_H1:
        orders = [_zb_h1(pp, m, stage) for stage in range(pp)]
    elif name == ZB_V:
        orders = [_zb_v(pp, m, stage) for stage in range(pp)]
    elif name == DUALPIPEV:
        orders = [_two_way(_Order((stage, 2 * pp - 1 - stage), (0, 0)), stage, pp, m) for stage in range(pp)]
    else:
        orders = [_dualpipe(pp, m, stage) for stage in range(pp)]
    if whole:
        orders = [[(BACKWARD if one[0] == INPUT else one[0], *one[1:]) for one in each if one[0] != WEIGHT] for each in orders]
    longest = max(map(len, orders))
    filled = np.array([[*order, *[(NONE, NONE, NONE, False)] * (longest - len(order))] for order in orders], dtype=np.int64)
    kind, chunk, microbatch, paired = np.moveaxis(filled, -1, 0).copy()
    return Schedule(name, pp, vpp, m, kind, chunk, microbatch, paired.astype(bool))


_remembered = lru_cache(maxsize=128)(_built)


def usual_schedule(name: str, pp: int, vpp: int, num_microbatches: int, split_backward: bool, asked: int = 0) -> Schedule:
    """The order in which a stack runs a schedule: in the groups that it is `asked` for or micro-batches leave, and two-way ones
    with whole backwards where it does not split them.
    """
    group = group_size(name, pp, num_microbatches, asked)
    return build_schedule(name, pp, vpp, num_microbatches, group, whole=name in PAIRED and not split_backward)


def check_schedule(name: str, pp: int, vpp: int, num_microbatches: int, group: int | None = None) -> None:
    """ValueError says why there is no such schedule."""
    m = num_microbatches
    if name not in WHOLE + SPLIT:
        raise ValueError(f"schedule {name!r} is not one of {', '.join(WHOLE + SPLIT)}")
    if pp < 1 or m < 1:
        raise ValueError(f"pp {pp} and num_microbatches {m} must be at least 1")
    if (vpp > 1) != (name == INTERLEAVED) and name not in V_SHAPED:
        raise ValueError(f"schedule {name!r} with vpp {vpp}: interleaved needs vpp > 1, V-shaped ones 2, the others vpp = 1")
    if name in V_SHAPED and vpp != 2:
        raise ValueError(f"schedule {name!r} with vpp {vpp}: a V-shaped schedule has two chunks on every stage")
    if group is not None and name != INTERLEAVED:
        raise ValueError(f"schedule {name!r} has no groups of micro-batches; interleaved has")
    if vpp > 1 and name == INTERLEAVED:
        _check_groups(pp, m, group)
    if name in SPLIT and pp == 1:
        raise ValueError(f"schedule {name!r} needs pp > 1")
    if name in PAIRED and m < 2 * pp:
        raise ValueError(f"{name} needs at least 2·pp = {2 * pp} micro-batches, not {m}")
    if name == DUALPIPE and (pp % 2 or m % 2):
        raise ValueError(f"dualpipe needs an even pp and an even number of micro-batches, not pp {pp} and {m}")


def _check_groups(pp: int, m: int, group: int | None) -> None:
    """What Megatron-Core's schedules.py asks of groups: whole ones, or a last one of at least pp."""
    if group is None and (pp == 1 or m % pp):
        raise ValueError(f"interleaved needs pp > 1 and num_microbatches ({m}) a multiple of pp ({pp}), or a group that suits")
    size = group or pp
    if not _in_groups(pp, m, size):
        raise ValueError(f"a group of {size} micro-batches must be between pp ({pp}) and {m}, and leave none or at least pp over")


def _in_groups(pp: int, m: int, size: int) -> bool:
    return min(pp, m) <= size <= m and not 0 < m % size < pp


def group_size(name: str, pp: int, num_microbatches: int, asked: int = 0) -> int | None:
    """Micro-batches in each group of the interleaved schedule: as many as are `asked` for where they go into such, else pp; where
    that leaves some over the fewest that leave none or at least pp, all where they are fewer. None: pp, or there are none.

    Megatron-Core's schedules.py takes such groups. Where the ⌊m/pp⌋ rounds of PyTorch's torch/distributed/pipelining/schedules.py
    are equal, they are these: no smaller group makes do with as many.
    """
    if name != INTERLEAVED:
        return None
    if asked not in (0, pp) and _in_groups(pp, num_microbatches, asked):
        return asked
    if num_microbatches % pp == 0:
        return None
    return next((size for size in range(pp, num_microbatches) if _in_groups(pp, num_microbatches, size)), num_microbatches)


def stage_chunks(name: str, pp: int, vpp: int) -> Ints:
    """Chunks of the model that every stage holds, (chunks of a stage, pp)."""
    stages = np.arange(pp)
    if name in V_SHAPED:
        return np.stack([stages, 2 * pp - 1 - stages])
    if name == DUALPIPE:
        return np.stack([stages, pp - 1 - stages])
    return np.arange(pp * vpp).reshape(vpp, pp)


def stage_share(name: str) -> float:
    """Share of the micro-batches that each chunk of a stage works through: half where they come from both ends."""
    return 0.5 if name == DUALPIPE else 1.0


def loss_stages(name: str, pp: int, vpp: int) -> Bools:
    """Which stages compute the loss, (pp,)."""
    return np.asarray((stage_chunks(name, pp, vpp) == pp * vpp - 1).any(axis=0))


@lru_cache(maxsize=4096)
def _held(schedule: Schedule, stage: int) -> Ints:
    kind, chunk = schedule.kind[stage], schedule.chunk[stage]
    columns = []
    for added, taken in (((FORWARD,), (BACKWARD, INPUT)), ((INPUT,), (WEIGHT,))):
        for one in stage_chunks(schedule.name, schedule.pp, schedule.vpp)[:, stage]:
            change = np.isin(kind, added).astype(np.int64) - np.isin(kind, taken)
            columns.append(np.cumsum(np.where(chunk == one, change, 0)))
    return _largest(np.stack(columns, axis=1))


def _largest(rows: Ints) -> Ints:
    """Rows that no other row reaches in every column."""
    rows = np.unique(rows, axis=0)[::-1]
    kept: list[Ints] = []
    for row in rows[np.argsort(-rows.sum(axis=1), kind="stable")]:
        if not any((other >= row).all() for other in kept):
            kept.append(row)
    return np.array(kept)


# --- orders ------------------------------------------------------------------------------------------------------------------


def _whole_orders(name: str, pp: int, vpp: int, m: int, group: int, overlapped: bool) -> tuple[Ints, Ints, Ints, Bools]:
    """Warm-up forwards, one forward and one backward in turns, the backwards that are left, on every stage.

    Warm-up: all m; pp−1−s; and 2·(pp−1−s) + (vpp−1)·group. Where passes are paired, one more, so that no two depend on each other.
    """
    firsts = range(0, m, group) if vpp > 1 else (0,)
    turns = [(v, i) for first in firsts for v in range(vpp) for i in range(first, min(first + group, m) if vpp > 1 else m)]
    turn, (v, i) = np.arange(m * vpp), np.array(turns, dtype=np.int64).T
    stage = np.arange(pp)[:, None]
    behind = pp - 1 - stage
    usual = {GPIPE: 0 * stage + m, ONE_F_ONE_B: behind, INTERLEAVED: 2 * behind + (vpp - 1) * group}[name]
    warm_up = np.minimum(m * vpp, usual + overlapped)
    forward = np.broadcast_to(np.where(turn < warm_up, turn, 2 * turn - warm_up), (pp, m * vpp))
    together = np.broadcast_to(turn < m * vpp - warm_up, (pp, m * vpp))
    backward = np.where(together, warm_up + 2 * turn + 1, m * vpp + turn)
    kind, chunk, microbatch = (np.empty((pp, 2 * m * vpp), dtype=np.int64) for _ in range(3))
    paired = np.zeros((pp, 2 * m * vpp), dtype=bool)
    for at, of, taken in ((forward, FORWARD, v), (backward, BACKWARD, vpp - 1 - v)):
        kind[stage, at], chunk[stage, at], microbatch[stage, at] = of, taken * pp + stage, i
    paired[stage, backward] = together & overlapped
    return kind, chunk, microbatch, paired


class _Order:
    """A stage's order as it is built: passes count micro-batches up for each of the stage's chunks; owed weight gradients queue."""

    def __init__(self, chunks: Sequence[int], first: Sequence[int]) -> None:
        self.passes: list[Pass] = []
        self._chunks = chunks
        self._forwards, self._backwards = list(first), list(first)
        self._owed: deque[tuple[int, int]] = deque()

    def forward(self, slot: int) -> None:
        self.passes.append((FORWARD, self._chunks[slot], self._forwards[slot], False))
        self._forwards[slot] += 1

    def backward(self, slot: int, split: bool = False, paired: bool = False) -> None:
        """A whole backward, or one for the input that leaves the weights owing."""
        chunk, i = self._chunks[slot], self._backwards[slot]
        self.passes.append((INPUT if split else BACKWARD, chunk, i, paired))
        self._backwards[slot] += 1
        if split:
            self._owed.append((chunk, i))

    def both(self, forward: int, backward: int) -> None:
        """A forward of one chunk and a backward of another at the same time."""
        self.forward(forward)
        self.backward(backward, paired=True)

    def weight(self, chunk: int | None = None) -> None:
        """The weight gradients owed longest, of one chunk or of any."""
        owed = next(one for one in self._owed if chunk is None or one[0] == chunk)
        self._owed.remove(owed)
        self.passes.append((WEIGHT, *owed, False))

    def owed(self) -> int:
        return len(self._owed)


def _zb_h1(pp: int, m: int, stage: int) -> list[Pass]:
    """1F1B whose weight gradients follow `stage` micro-batches behind, so that every stage holds pp of them (2401.10241, 3.1)."""
    order = _Order((stage,), (0,))
    warm_up = min(m, pp - 1 - stage)
    for _ in range(warm_up):
        order.forward(0)
    for i in range(m):
        if i < m - warm_up:
            order.forward(0)
        order.backward(0, split=True)
        if order.owed() > stage:
            order.weight()
    while order.owed():
        order.weight()
    return order.passes


def _zb_v(pp: int, m: int, stage: int) -> list[Pass]:
    """Two chunks in a V that fill each other's bubbles when forward and both backwards take equally long (2405.15362, 4).

    Passes of micro-batches beyond the last are left out.
    """
    down, up = stage, 2 * pp - 1 - stage
    order, count = _Order((down, up), (0, 0)), max(2 * pp - 1, m)

    def split(slot: int) -> None:
        order.backward(slot, split=True)
        order.weight((down, up)[slot])

    for _ in range(2 * (pp - stage) - 1):
        order.forward(0)
    for _ in range(stage):
        order.forward(1)
        order.forward(0)
    for _ in range(pp - stage):
        order.forward(1)
        split(1)
    begun = 2 * pp - 1 - stage
    for i in range(count - pp):
        if begun + i < count:
            order.forward(0)
        split(0)
        order.forward(1)
        split(1)
    for _ in range(stage):
        order.backward(0, split=True)
        order.backward(1, split=True)
    for _ in range(pp - stage):
        order.backward(0, split=True)
        order.weight(down)
    for _ in range(stage):
        order.weight(up)
    while order.owed():
        order.weight(down)
    return [one for one in order.passes if one[2] < m]


def _dualpipe(pp: int, m: int, stage: int) -> list[Pass]:
    """Two copies of the model run in opposite directions; half of the micro-batches enter at either end.

    The direction whose entrance is the nearer one comes first, so the stages of both halves mirror each other.
    """
    down, up = (stage, 0), (pp - 1 - stage, m // 2)
    near, far = (down, up) if stage < pp // 2 else (up, down)
    return _two_way(_Order((near[0], far[0]), (near[1], far[1])), min(stage, pp - 1 - stage), pp // 2, m // 2)


def _two_way(order: _Order, place: int, turn: int, m: int) -> list[Pass]:
    """DualPipe's eight steps on the stage `place` stages from the nearer entrance, where `turn` stages lie before the middle and m
    micro-batches enter (deepseek-ai/DualPipe dualpipe.py, dualpipev.py).
    """
    inside = turn - 1 - place
    for _ in range(2 * inside):
        order.forward(0)
    for _ in range(place + 1):
        order.forward(0)
        order.forward(1)
    for _ in range(inside):
        order.backward(1, split=True)
        order.weight()
        order.forward(1)
    for i in range(m - 2 * turn + place + 1):
        if i == 0 and inside == 0:
            order.forward(0)
            order.backward(1)
        else:
            order.both(0, 1)
        order.both(1, 0)
    for _ in range(inside):
        order.backward(1)
        order.both(1, 0)
    for i in range(2 * (place + 1)):  # the later half leaves its weight gradients for the bubble
        order.backward(1 - i % 2, split=i > place)
    for _ in range(inside):
        order.weight()
        order.backward(0, split=True)
    while order.owed():
        order.weight()
    return order.passes
