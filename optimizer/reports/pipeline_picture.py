"""A step as a picture: a row per stage, time to the right, waiting left blank, and below what stages hold over time.

Where a step has too many passes to tell apart, its beginning and its end are drawn to one scale, and what lies between is left out
and said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...cost_models.schedules import BACKWARD, DUALPIPE, FORWARD, INPUT, WEIGHT, Floats, stage_chunks
from ..step_timeline import HIDDEN, StepTimeline
from . import wording
from .canvas import Box, Label, Line, Scene, text_width

WIDTH, LEFT, RIGHT, TOP = 1680.0, 76.0, 128.0, 104.0
CUT_WIDTH = 30.0
MOST_PASSES = 120
"""Passes of a stage that are told apart across the picture's width."""
ROW_HEIGHTS = ((4, 46.0), (8, 38.0), (16, 26.0), (32, 18.0), (1 << 30, 12.0))
"""Height of a row by the number of stages up to which it holds."""
MEMORY_HEIGHT, AXIS_HEIGHT = 190.0, 44.0
LEAST_WIDTH = 2.0
"""Pixels below which passes of one kind that follow on each other are drawn as one box."""
SMALLEST_NUMBER = 7.0
LARGEST_NUMBER = 11.0
TICKS = 8

WAITING = "#f2efe8"
FORWARD_COLOUR, BACKWARD_COLOUR, WEIGHT_COLOUR, RECOMPUTE_COLOUR = "#3f7fc4", "#e08a3c", "#9467a8", "#cfae2f"
COLOURS = {FORWARD: FORWARD_COLOUR, BACKWARD: BACKWARD_COLOUR, INPUT: BACKWARD_COLOUR, WEIGHT: WEIGHT_COLOUR}
AROUND = {"dp": "#3b8f74", "optimizer": "#444a55", "offload": "#8c6d3f", "host": "#b5b5b5"}
CURVES = ("#c0392b", "#2c5f9e", "#2e8b57", "#8e6bbf")
GREY, FAINT = "#666666", "#d9d9d9"
WORDS = {FORWARD: "forward", BACKWARD: "backward", INPUT: "input gradient", WEIGHT: "weight gradient"}


@dataclass(frozen=True)
class Window:
    """A stretch of time, seconds, and where it is drawn."""

    start_s: float
    end_s: float
    left: float
    right: float

    @property
    def scale(self) -> float:
        """Pixels per second."""
        return (self.right - self.left) / (self.end_s - self.start_s)

    def x(self, time_s: float) -> float:
        """Where a moment lies, kept within the window."""
        return self.left + (min(max(time_s, self.start_s), self.end_s) - self.start_s) * self.scale


def pipeline_picture(step: StepTimeline) -> Scene:
    """The picture of a step."""
    pp = step.layout.pp
    height = next(height for most, height in ROW_HEIGHTS if pp <= most)
    rows_end = TOP + pp * height
    scene = Scene(WIDTH, rows_end + AXIS_HEIGHT + MEMORY_HEIGHT + 34.0)
    windows = _windows(step)
    _header(scene, step, windows)
    for stage in range(pp):
        _row(scene, step, stage, TOP + stage * height, height, windows)
    _axis(scene, windows, rows_end)
    _memory(scene, step, windows, rows_end + AXIS_HEIGHT)
    for window in windows[:-1]:
        _cut(scene, window.right, rows_end, rows_end + AXIS_HEIGHT + MEMORY_HEIGHT)
    return scene


# --- what is shown -----------------------------------------------------------------------------------------------------------


def _windows(step: StepTimeline) -> tuple[Window, ...]:
    """The whole step, or its head and its tail: fill and drain and a few passes of the steady state beside each."""
    line, end, right = step.pipeline, step.step_s, WIDTH - RIGHT
    stages = range(step.layout.pp)
    passes = max(int((line.stage == stage).sum()) for stage in stages)
    mean = float(line.busy_s.max()) / passes
    if passes <= MOST_PASSES:
        return (Window(0.0, end, LEFT, right),)
    forwards = line.kind == FORWARD
    filled = max(float(line.end_s[~forwards & (line.stage == stage)].min()) for stage in stages)
    draining = min(float(line.start_s[forwards & (line.stage == stage)].max()) for stage in stages)
    beside = max(16.0, (MOST_PASSES * mean - filled - (line.step_s - draining)) / (2.0 * mean)) * mean
    head, tail = filled + beside, end - (draining - beside)
    if head + tail > 0.9 * end:
        return (Window(0.0, end, LEFT, right),)
    middle = LEFT + (right - LEFT - CUT_WIDTH) * head / (head + tail)
    return Window(0.0, head, LEFT, middle), Window(end - tail, end, middle + CUT_WIDTH, right)


def _header(scene: Scene, step: StepTimeline, windows: Sequence[Window]) -> None:
    layout, problem = step.layout, step.problem
    names = ("tp", "cp", "pp", "dp", *(["ep"] if problem.model.is_moe else []), "vpp")
    degrees = " · ".join(f"{name} {getattr(layout, name)}" for name in names)
    title = f"{problem.model.name} on {layout.devices:,} × {problem.cluster.accelerator.name}: {layout.schedule}, {degrees}"
    waits = list(dict.fromkeys(wording.percent(float(share)) for share in (step.idle_share.min(), step.idle_share.max())))
    said = (
        f"step {wording.seconds(step.step_s)}, {layout.num_microbatches:,} micro-batches of {layout.micro_batch}, numbered from 0; "
        f"stages wait {' to '.join(waits)} of the pipeline's {wording.seconds(step.pipeline.step_s)}"
    )
    if len(windows) > 1:
        gap = windows[1].start_s - windows[0].end_s
        said += f"; {wording.seconds(gap)} of steady state ({wording.percent(gap / step.step_s)} of the step) left out at the cut"
    scene.labels.append(Label(LEFT, 30.0, title, 17.0, bold=True))
    scene.labels.append(Label(LEFT, 53.0, said, 13.0, GREY))
    x = LEFT
    for name, colour in _legend(step):
        scene.boxes.append(Box(x, 69.0, 14.0, 12.0, colour))
        scene.labels.append(Label(x + 19.0, 79.0, name, 12.0))
        x += 19.0 + text_width(name, 12.0) + 18.0
    scene.labels.append(Label(WIDTH - RIGHT + 10.0, TOP - 6.0, "waits", 11.0, GREY))


def _legend(step: StepTimeline) -> Iterator[tuple[str, str]]:
    line = step.pipeline
    split = bool((line.kind == WEIGHT).any())
    yield "forward", FORWARD_COLOUR
    if split:
        whole = bool((line.kind == BACKWARD).any())
        yield "backward, or its input gradient alone" if whole else "input gradient", BACKWARD_COLOUR
        yield "weight gradient", WEIGHT_COLOUR
    else:
        yield "backward", BACKWARD_COLOUR
    if step.recompute_s.any():
        yield "recompute", RECOMPUTE_COLOUR
    shown = {kind for stage in range(line.schedule.pp) for words, kind, *_ in step.around(stage) if words != HIDDEN}
    for name in AROUND:
        if name in shown:
            yield name, AROUND[name]
    yield "waiting", WAITING
    if len(stage_chunks(line.schedule.name, line.schedule.pp, line.schedule.vpp)) > 1:
        words = "the copy of the other direction" if line.schedule.name == DUALPIPE else "a stage's later chunks"
        yield f"paler: {words}", _paler(FORWARD_COLOUR, 0.45)


# --- stages ------------------------------------------------------------------------------------------------------------------


def _row(scene: Scene, step: StepTimeline, stage: int, top: float, height: float, windows: Sequence[Window]) -> None:
    gap = 1.0 if height < 20 else 3.0
    inner = height - gap
    name_size = min(12.0, height - 1.0)
    scene.labels.append(Label(LEFT - 8.0, top + inner / 2 + 0.36 * name_size, f"stage {stage}", name_size, anchor="end"))
    idle = wording.percent(float(step.idle_share[stage]))
    scene.labels.append(Label(WIDTH - RIGHT + 10.0, top + inner / 2 + 0.36 * name_size, idle, name_size, GREY))
    line = step.pipeline
    mine = np.flatnonzero(line.stage == stage)
    turns = stage_chunks(line.schedule.name, line.schedule.pp, line.schedule.vpp)[:, stage].tolist()
    pale = {chunk: 0.55 * turn / max(1, len(turns) - 1) if len(turns) > 1 else 0.0 for turn, chunk in enumerate(turns)}
    for window in windows:
        scene.boxes.append(Box(window.left, top, window.right - window.left, inner, WAITING))
        seen = mine[(line.end_s[mine] > window.start_s) & (line.start_s[mine] < window.end_s)].tolist()
        place = 0
        while place < len(seen):
            event, beside = seen[place], place + 1 < len(seen) and bool(line.paired[seen[place + 1]])
            run = 1 if beside or line.paired[event] else _run(step, seen[place:], window)
            half = inner / 2 if beside or line.paired[event] else inner
            below = top + half if line.paired[event] else top
            _pass(scene, step, seen[place : place + run], window, below, half, pale[int(line.chunk[event])])
            place += run
        _around(scene, step, stage, window, top, inner)


def _run(step: StepTimeline, events: Sequence[int], window: Window) -> int:
    """How many of the passes, from the first on, are one box: those too narrow to tell apart that follow on and are alike."""
    line, first = step.pipeline, events[0]
    most = LEAST_WIDTH / window.scale
    alike = 1
    for event in events[1:]:
        same = line.kind[event] == line.kind[first] and line.chunk[event] == line.chunk[first] and not line.paired[event]
        waited = line.start_s[event] - line.end_s[events[alike - 1]]
        if not same or line.end_s[event] - line.start_s[event] > most or waited > 0.1 * most:
            break
        alike += 1
    return alike


def _pass(scene: Scene, step: StepTimeline, events: Sequence[int], window: Window, top: float, height: float, pale: float) -> None:
    line, event = step.pipeline, events[0]
    kind, chunk, i = int(line.kind[event]), int(line.chunk[event]), int(line.microbatch[event])
    start, end = float(line.start_s[event]), float(line.end_s[events[-1]])
    x, right = window.x(start), window.x(end)
    edge = 0.6 if right - x > 3.0 else 0.0
    which = f"micro-batch {i}" if len(events) == 1 else f"{len(events)} micro-batches from {i} on"
    hint = (
        f"stage {int(line.stage[event])}, {WORDS[kind]} of {which}, chunk {chunk}: "
        f"{wording.seconds(end - start)} from {wording.seconds(start, 4)}"
    )
    scene.boxes.append(Box(x, top, right - x - edge, height, _paler(COLOURS[kind], pale), hint))
    if len(events) > 1:
        return
    again = float(step.recompute_s[chunk])
    if kind in (BACKWARD, INPUT) and again > 0 and not line.paired[event]:
        until = window.x(start + again)
        scene.boxes.append(Box(x, top, max(0.0, until - x - edge), height, _paler(RECOMPUTE_COLOUR, pale), hint))
    size = min(LARGEST_NUMBER, height * 0.72, (right - x - 2.0) / (0.62 * len(str(i))))
    if size >= SMALLEST_NUMBER:
        colour = "#ffffff" if pale < 0.4 else "#222222"
        scene.labels.append(Label((x + right) / 2, top + height / 2 + 0.36 * size, str(i), round(size, 1), colour, "middle"))


def _around(scene: Scene, step: StepTimeline, stage: int, window: Window, top: float, height: float) -> None:
    """What follows the passes of a stage."""
    for words, kind, start, end in step.around(stage):
        x, right = window.x(start), window.x(end)
        if right > x and words != HIDDEN:
            hint = f"stage {stage}, {words}: {wording.seconds(end - start)} from {wording.seconds(start, 4)}"
            scene.boxes.append(Box(x, top, right - x, height, AROUND[kind], hint))


# --- axes and memory ---------------------------------------------------------------------------------------------------------


def _axis(scene: Scene, windows: Sequence[Window], top: float) -> None:
    """Ticks of one step in all windows."""
    shown = sum(window.end_s - window.start_s for window in windows)
    tick = _round_step(shown / TICKS)
    cuts = [window.right + CUT_WIDTH / 2.0 for window in windows[:-1]]
    for window in windows:
        first = math.ceil(window.start_s / tick - 1e-9)
        for number in range(first, math.floor(window.end_s / tick + 1e-9) + 1):
            x, text = window.x(number * tick), _time(number * tick, tick)
            scene.lines.append(Line(((x, top), (x, top + 5.0)), GREY))
            room = [abs(x - cut) for cut in cuts]
            if min(room, default=WIDTH) > text_width(text, 11.0) / 2.0 + CUT_WIDTH / 2.0:
                scene.labels.append(Label(x, top + 18.0, text, 11.0, GREY, "middle"))


def _memory(scene: Scene, step: StepTimeline, windows: Sequence[Window], top: float) -> None:
    """What the first, the last, a middle and the fullest stage hold, against what is usable."""
    curves = {stage: step.memory_gib(stage) for stage in range(step.layout.pp)}
    peaks = {stage: float(gib.max()) for stage, (_, gib) in curves.items()}
    fullest = max(peaks, key=lambda stage: peaks[stage])
    stages = list(dict.fromkeys((fullest, 0, step.layout.pp - 1, step.layout.pp // 2)))
    most = 1.08 * max(step.usable_gib, peaks[fullest])
    bottom = top + MEMORY_HEIGHT

    def y(gib: float) -> float:
        return bottom - gib / most * MEMORY_HEIGHT

    scene.labels.append(Label(LEFT - 8.0, top - 6.0, "GiB", 11.0, GREY, "end"))
    tick = _round_step(most / 5)
    for number in range(math.floor(most / tick) + 1):
        scene.labels.append(Label(LEFT - 8.0, y(number * tick) + 4.0, f"{number * tick:g}", 11.0, GREY, "end"))
        scene.lines += [Line(((w.left, y(number * tick)), (w.right, y(number * tick))), FAINT) for w in windows]
    scene.lines += [Line(((w.left, y(step.usable_gib)), (w.right, y(step.usable_gib))), "#222222", 1.2, True) for w in windows]
    heights = [(y(step.usable_gib), "#222222", f"{wording.amount(step.usable_gib)} usable")]
    for stage, colour in reversed(list(zip(stages, CURVES, strict=False))):
        for window in windows:
            scene.lines.append(Line(_stairs(*curves[stage], window, y), colour, 1.4))
        heights.append((y(peaks[stage]), colour, f"stage {stage}: {wording.amount(peaks[stage])}"))
    spread = 15.0
    at = -math.inf
    for height, colour, text in sorted(heights):
        at = max(height + 4.0, at + spread)
        scene.labels.append(Label(WIDTH - RIGHT + 10.0, at, text, 11.0, colour))
    scene.labels.append(Label(LEFT, bottom + 22.0, _memory_words(stages, step.layout.pp), 12.0, GREY))


def _memory_words(stages: Sequence[int], pp: int) -> str:
    """Which stages are shown, the fullest first, of how many."""
    apart = len(stages) == len(CURVES)
    some = "the first, a middle, the last and the fullest stage" if apart else "the first, a middle and the last stage"
    shown = some if len(stages) < pp else "every stage" if pp > 1 else "the stage"
    fullest = f"; stage {stages[0]} is the fullest" if pp > 1 else ""
    return f"Memory of {shown} over time, with its peak at the right{fullest}."


def _stairs(times: Floats, gib: Floats, window: Window, y: Callable[[float], float]) -> list[tuple[float, float]]:
    """A curve that keeps each value until the next change, within a window."""
    begun = max(0, int(np.searchsorted(times, window.start_s, side="right")) - 1)
    ended = int(np.searchsorted(times, window.end_s, side="right"))
    points: list[tuple[float, float]] = []
    for when, held in zip(times[begun:ended].tolist(), gib[begun:ended].tolist(), strict=True):
        x = window.x(when)
        if points:
            points.append((x, points[-1][1]))
        points.append((x, y(held)))
    return [*points, (window.right, points[-1][1])]


def _cut(scene: Scene, x: float, rows_end: float, bottom: float) -> None:
    """The place where time was left out."""
    for side in (x + 6.0, x + CUT_WIDTH - 6.0):
        scene.lines.append(Line(((side, TOP - 4.0), (side, rows_end)), GREY, 1.0, True))
        scene.lines.append(Line(((side, rows_end + AXIS_HEIGHT), (side, bottom)), GREY, 1.0, True))
    scene.labels.append(Label(x + CUT_WIDTH / 2, rows_end + 18.0, "⋯", 14.0, GREY, "middle"))


def _paler(colour: str, share: float) -> str:
    """A colour mixed with white."""
    channels = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(each + (255 - each) * share):02x}" for each in channels)


def _round_step(value: float) -> float:
    """The next larger of 1, 2, 2.5 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(each * power for each in (1.0, 2.0, 2.5, 5.0, 10.0) if each * power >= value * (1 - 1e-9))


def _time(value: float, tick: float) -> str:
    """A moment as exact as its axis."""
    unit, size = ("s", 1.0) if tick >= 0.1 else ("ms", 1e-3) if tick >= 1e-4 else ("µs", 1e-6)
    return f"{value / size:.6g} {unit}"
