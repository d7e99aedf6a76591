"""Schedules on one problem, priced alike."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from paraplan.cost_models.profile import load_profile
from paraplan.cost_models.step import CostModel
from paraplan.optimizer import build_problem, evaluate
from paraplan.optimizer.evaluation import with_default_stages
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.optimizer.recutting import proved
from paraplan.optimizer.reports import wording
from paraplan.optimizer.reports.validation import markdown
from paraplan.optimizer.step_timeline import step_timeline


@dataclass(frozen=True)
class Job:
    """A problem, a layout without its schedule, and the schedules that are tried."""

    asked: tuple[str, str, int, int, int, str, str]
    words: str
    schedules: tuple[str, ...]


JOBS = (
    Job(
        ("llama-3.1-70b", "hgx-h100", 256, 128, 4096, "torchtitan", "bf16"),
        "tp=8,pp=8,optimizer_sharding=zero3",
        ("gpipe", "1f1b", "interleaved,vpp=2", "interleaved,vpp=5", "interleaved,vpp=10", "zb-h1", "zb-v", "dualpipe", "dualpipev"),
    ),
    Job(
        ("deepseek-v3", "cloudmatrix-384", 1536, 15360, 4096, "mindspeed-llm", "bf16"),
        "tp=2,pp=8,ep=32,recompute=full",
        ("gpipe", "1f1b", "interleaved,vpp=2", "interleaved,vpp=4", "dualpipe", "dualpipev"),
    ),
)


def schedules() -> str:
    """The section on schedules."""
    parts = [
        "## Schedules",
        "“waits” is the mean share of the pipeline's time in which stages do nothing, of the replay; “bubble” is the price's, of "
        "the stage that ends last. Interleaved chunks are cut as a plan cuts its own layout, the others as `evaluate` does. Where "
        "weight gradients follow apart, GEMMs keep inputs and gradients of outputs until then: under SP the rank's share of an "
        "input that TP gathers, but the whole gradient of a row-parallel output. That is 4 + 28/t of the 32·s·b·h of a plain layer "
        "(arXiv 2401.10241), whose saved activations come to 32/t: without TP ZB-H1 holds about what 1F1B does, with it more.",
    ]
    for job in JOBS:
        problem = build_problem(*job.asked)
        model = CostModel(problem, load_profile(problem.cluster.accelerator.priced_as))
        rows, steps, peaks, waits = [], {}, {}, {}
        runs = problem.stack.schedules

        def own(name: str, runs: tuple[str, ...] = runs) -> bool:
            return name.partition(",")[0] in runs

        for schedule in job.schedules:
            print(f"scheduling {job.asked[0]} {schedule}", file=sys.stderr, flush=True)
            layout = complete(problem, parse_layout(f"{job.words},schedule={schedule}"))
            if layout.schedule == "interleaved":
                layout = proved(model, with_default_stages(model, layout)).layout
            priced, _ = evaluate(problem, layout)
            waits[schedule] = float(step_timeline(problem, priced.layout).idle_share.mean())
            steps[schedule], peaks[schedule] = priced.step_time_s, priced.memory.peak_gib
            rows.append(
                (
                    schedule if own(schedule) else f"{schedule} (not run by it)",
                    wording.seconds(priced.step_time_s),
                    wording.seconds(priced.simulated_step_time_s or priced.step_time_s),
                    wording.percent(waits[schedule]),
                    wording.percent(priced.breakdown_s["bubble"] / priced.step_time_s),
                    wording.seconds(priced.breakdown_s["ep"]),
                    f"{wording.gib(priced.memory.peak_gib)}, {priced.memory.verdict}",
                )
            )
        m = complete(problem, parse_layout(job.words)).num_microbatches
        fastest, leanest, least = (min(filter(own, each), key=lambda name: each[name]) for each in (steps, peaks, waits))
        parts += [
            f"{job.asked[0]}, {job.asked[2]:,} × {job.asked[1]}, {job.asked[5]}, `{job.words}`, {m} micro-batches:",
            markdown(("schedule", "step", "replay", "waits", "bubble", "ep", "peak"), rows),
            f"Of those that {problem.stack.name} runs, the fastest is {fastest}, "
            f"{wording.percent(1.0 - steps[fastest] / steps['1f1b'])} shorter than 1f1b, at "
            f"{peaks[fastest] / peaks['1f1b']:.2f} of its peak; {least} waits least, {leanest} holds least.",
        ]
    return "\n\n".join(parts) + "\n"
