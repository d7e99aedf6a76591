"""A step as a trace that Perfetto and chrome://tracing open: one process per stage, with its passes, messages and memory.

The format is Chrome's trace-event JSON: complete events ("X") with microseconds `ts` and `dur`, counters ("C"), names as metadata
("M"). Slices of one thread never overlap but where one lies inside another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from typing import Any

import numpy as np

from ...cost_models.schedules import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT
from ..step_timeline import StepTimeline

MICROSECONDS = 1e6
PASSES = {FORWARD: "forward", BACKWARD: "backward", INPUT: "input gradient", WEIGHT: "weight gradient"}
COMPUTE, STATES, FIRST_LANE = range(3)
"""Threads of a stage: its passes, what is done for states once per step, then as many for messages as overlap."""

Event = dict[str, Any]
Slice = tuple[float, float, str]


def chrome_trace(step: StepTimeline, progress: Callable[[float], None] = lambda share: None) -> str:
    """The trace as one JSON document, an event a line; `progress` hears which share of the stages is done."""
    events = (json.dumps(event, separators=(",", ":"), ensure_ascii=False) for event in _events(step, progress))
    about = {
        "simulated_step_time_s": step.step_s,
        "model": step.problem.model.name,
        "cluster": step.problem.cluster.name,
        "devices": step.problem.devices,
        "layout": step.layout.model_dump(exclude={"stages", "overlap"}),
    }
    head = f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about, ensure_ascii=False)},"traceEvents":['
    return head + "\n" + ",\n".join(events) + "\n]}\n"


def _events(step: StepTimeline, progress: Callable[[float], None]) -> Iterator[Event]:
    for stage in range(step.layout.pp):
        progress(stage / step.layout.pp)
        lanes = _lanes(_messages(step, stage))
        yield from _names(stage, len(lanes))
        yield from _passes(step, stage)
        for lane, sent in enumerate(lanes):
            yield from (_slice(stage, FIRST_LANE + lane, name, "p2p", start, end) for start, end, name in sent)
        yield from _around(step, stage)
        yield from _memory(step, stage)


def _names(stage: int, lanes: int) -> Iterator[Event]:
    threads = ["passes", "states", *(["p2p", *(f"p2p {lane + 2}" for lane in range(lanes - 1))] if lanes else [])]
    yield {"ph": "M", "pid": stage, "tid": 0, "name": "process_name", "args": {"name": f"stage {stage}"}}
    yield {"ph": "M", "pid": stage, "tid": 0, "name": "process_sort_index", "args": {"sort_index": stage}}
    for thread, name in enumerate(threads):
        yield {"ph": "M", "pid": stage, "tid": thread, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": stage, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _passes(step: StepTimeline, stage: int) -> Iterator[Event]:
    """Every pass; a pair is one slice, and the recompute of a backward one inside it."""
    line = step.pipeline
    mine = np.flatnonzero(line.stage == stage).tolist()
    for place, event in enumerate(mine):
        if line.paired[event]:
            continue
        following = mine[place + 1] if place + 1 < len(mine) and line.paired[mine[place + 1]] else None
        both = [event] if following is None else [event, following]
        name = " beside ".join(f"{PASSES[int(line.kind[one])]} {int(line.microbatch[one])}" for one in both)
        chunks = [int(line.chunk[one]) for one in both]
        about = {"micro-batch": [int(line.microbatch[one]) for one in both], "chunk": chunks}
        start, end = float(line.start_s[event]), float(line.end_s[event])
        yield _slice(stage, COMPUTE, name, "pair" if following is not None else "pass", start, end, about)
        again = float(step.recompute_s[chunks[-1]])
        if following is None and line.kind[event] in (BACKWARD, INPUT) and again > 0:
            yield _slice(stage, COMPUTE, "recompute", "recompute", start, start + again)


def _messages(step: StepTimeline, stage: int) -> list[Slice]:
    """What a stage sends to others: start, end and name of each."""
    if step.p2p_s <= 0:
        return []
    line, order = step.pipeline, step.pipeline.schedule
    last, m = order.chunks - 1, order.num_microbatches
    holder = np.full((len(KINDS), order.chunks, m), -1, dtype=np.int64)
    holder[line.kind, line.chunk, line.microbatch] = line.stage
    back = np.maximum(holder[BACKWARD], holder[INPUT])
    found = []
    for event in np.flatnonzero((line.stage == stage) & (line.kind != WEIGHT)).tolist():
        forward, chunk, i = bool(line.kind[event] == FORWARD), int(line.chunk[event]), int(line.microbatch[event])
        if chunk == (last if forward else 0):
            continue
        taker = int(holder[FORWARD, chunk + 1, i]) if forward else int(back[chunk - 1, i])
        if taker != stage:
            end = float(line.end_s[event])
            found.append((end, end + step.p2p_s, f"{'activation' if forward else 'gradient'} {i} to stage {taker}"))
    return sorted(found)


def _lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """The slices, in order of start, dealt to as few lanes as keep them from overlapping."""
    lanes: list[list[Slice]] = []
    free: list[tuple[float, int]] = []
    for start, end, name in slices:
        lane = heappop(free)[1] if free and free[0][0] <= start else len(lanes)
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append((start, end, name))
        heappush(free, (end, lane))
    return lanes


def _around(step: StepTimeline, stage: int) -> Iterator[Event]:
    """What is done for states, hidden behind passes or not, and the host's part of the step."""
    for words, kind, begin, end in step.around(stage):
        yield _slice(stage, STATES, words, kind, begin, end)


def _memory(step: StepTimeline, stage: int) -> Iterator[Event]:
    times, amounts = step.memory_gib(stage)
    for when, gib in zip(times.tolist(), amounts.tolist(), strict=True):
        yield {"ph": "C", "pid": stage, "name": "memory", "ts": when * MICROSECONDS, "args": {"GiB": round(gib, 6)}}


def _slice(stage: int, thread: int, name: str, kind: str, start: float, end: float, about: Event | None = None) -> Event:
    event: Event = {"ph": "X", "pid": stage, "tid": thread, "name": name, "cat": kind}
    event |= {"ts": start * MICROSECONDS, "dur": (end - start) * MICROSECONDS}
    return event if about is None else event | {"args": about}
