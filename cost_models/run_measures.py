"""What a run measured: its step time from whichever column tells it, its peak, and what is odd about them.

A cell that holds no usable figure is named in a note and stands for a blank; a row of which nothing usable is left is no run.
"""

from __future__ import annotations

from ..search_spaces.layout import Floats
from .details import MEMORY_TERMS
from .memory import GIB
from .run_layouts import Job
from .runs import MEASURED, PEAK, Run, Unpriceable, meaning

COMMUNICATORS = MEMORY_TERMS.index("communicators")
HARDWARE_FACTOR = 4.0 / 3.0  # FLOPs of hardware over model where every layer is recomputed: four passes for three
PERCENT = (1.5, 100.0)
"""A measured MFU between the two is read as a percentage."""
LEAST_MFU = 1e-3
"""Below it a step time is told: milliseconds, or the time of several steps, look like that."""
AGREE = 0.1
"""Relative difference from which step time and tokens/s of one row are told to disagree; tables round by less."""
FORMULAS = {
    "halved": "model FLOPs without recompute, causal attention halved",
    "whole": "model FLOPs without recompute, attention whole",
    "whole hardware": "FLOPs with recompute, attention whole",
}


def refuse_unmeasured(run: Run) -> None:
    """Unpriceable for a row that ran and whose measured figures are all unusable; a row that gives none is not refused."""
    given = [column for column in (*MEASURED, PEAK) if run.text(column)]
    reasons = [reason for column in given if (reason := _unusable(run, column))]
    if reasons and len(reasons) == len(given) and run.status == "ok":
        raise Unpriceable(reasons[0])


def odd_figures(run: Run) -> tuple[str, ...]:
    """Notes on measured figures that are not used because they are none."""
    return tuple(f"{reason}: not used" for column in (*MEASURED, PEAK) if (reason := _unusable(run, column)))


def printed_step_s(run: Run) -> float | None:
    """Step time as printed, for rows that cannot be priced."""
    return _figure(run, MEASURED[0])


def peak_gib(job: Job) -> tuple[float | None, tuple[str, ...]]:
    """The measured peak; a figure above what the device has is told and not used."""
    found, capacity = _figure(job.run, PEAK), job.problem.cluster.accelerator.memory_bytes.value / GIB
    if found is not None and found > capacity:
        return None, (f"{PEAK} is more than the device has: {found:g} over {capacity:.0f}, not used",)
    return found, ()


def as_measured_gib(job: Job, stages: Floats) -> float:
    """The figure that the source measured, from bytes by term and stage (terms, pp).

    NCCL and HCCL take their buffers from the device themselves: the framework's allocator does not count them.
    """
    how, where = job.memory.split()
    buffers = stages[COMMUNICATORS]
    peaks = stages.sum(axis=0) - buffers
    if how != "allocated":
        peaks = peaks * job.problem.stack.reserved_over_allocated.value
    if how == "device":
        peaks = peaks + buffers + job.problem.cluster.context_bytes.value / GIB
    return float(peaks[0] if where == "first" else peaks.max())


def step_time_s(job: Job, flops: tuple[float, float]) -> tuple[float | None, tuple[str, ...]]:
    """Step time as printed, or from tokens/s, or from TFLOP/s or MFU by the family's own FLOP formula, with notes; None where none.

    `flops`: model FLOPs of one step with causal attention halved, and counted whole.
    """
    run, problem = job.run, job.problem
    if run.status != "ok":
        return None, ()
    printed, speed = _figure(run, MEASURED[0]), _figure(run, MEASURED[1])
    tokens = problem.workload.global_batch * problem.workload.seq_len
    told = tokens / (speed * problem.devices) if speed else None
    if printed and told:
        apart = printed / told - 1.0
        words = f"step time and tokens/s disagree: {printed:g} s against {told:.4g} s, the former is used"
        return printed, (words,) if abs(apart) > AGREE else ()
    if printed or told:
        return printed or told, ()
    return _from_rate(job, flops)


def implied_mfu(job: Job, seconds: float, flops: float) -> tuple[float, tuple[str, ...]]:
    """MFU that a step time implies for so many model FLOPs, and a note where it is hardly one of a step in seconds."""
    problem = job.problem
    peak = problem.cluster.accelerator.peak_flops[problem.workload.precision].value
    mfu = flops / (problem.devices * peak * seconds)
    if mfu < LEAST_MFU:
        return mfu, (f"very slow for one step: {seconds:g} s is an MFU of {mfu:.2g}",)
    return mfu, ()


def _from_rate(job: Job, flops: tuple[float, float]) -> tuple[float | None, tuple[str, ...]]:
    """Step time from TFLOP/s or MFU."""
    run, problem = job.run, job.problem
    rate, notes = (_figure(run, MEASURED[2]) or 0.0) * 1e12, []
    if not rate:
        mfu = _figure(run, MEASURED[3]) or 0.0
        if PERCENT[0] < mfu <= PERCENT[1]:
            notes.append(f"measured_mfu is read as a percentage: {mfu:g}")
            mfu /= 100.0
        rate = mfu * problem.cluster.accelerator.peak_flops[problem.workload.precision].value
    if not rate:
        return None, tuple(notes)
    convention = run.text("flops_convention")
    try:
        found = meaning("flops", convention or f"{run.family} | {run.text('software')}")
    except Unpriceable as reason:
        return None, (*notes, f"no step time from TFLOP/s or MFU: {reason}")
    words = found.removeprefix("~")
    assumed = ", assumed" if found.startswith("~") else ""
    counted = flops[1] if words.startswith("whole") else flops[0]
    recomputed = HARDWARE_FACTOR if "hardware" in words and job.layout.recompute.startswith("full") else 1.0
    notes.append(f"step time from TFLOP/s or MFU: {FORMULAS[words]}{assumed}")
    return counted * recomputed / (rate * problem.devices), tuple(notes)


def _unusable(run: Run, column: str) -> str:
    """Why a measured cell holds no figure; empty where it does, or is blank."""
    try:
        run.measure(column)
    except Unpriceable as reason:
        return str(reason)
    return ""


def _figure(run: Run, column: str) -> float | None:
    return None if _unusable(run, column) else run.measure(column)
