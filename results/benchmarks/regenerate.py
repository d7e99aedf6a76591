"""Times the search and the price of layouts and writes the files beside it: python results/benchmarks/regenerate.py [NAME …]

Without names all are written: pricing, search, growth, imports, fronts. Seconds are those of the machine at hand; what holds
elsewhere are the ratios within one run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.bounds import frame_bounds
from paraplan.optimizer.evolution import GENERATIONS, SAMPLED
from paraplan.optimizer.pareto import EXACT_LAYOUTS
from paraplan.optimizer.search import Search
from paraplan.optimizer.writing import write_file
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import Problem

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import fronts  # noqa: E402
import pricing  # noqa: E402

REPEATS = 3


@dataclass(frozen=True)
class Case:
    """One problem of the catalog, as the command names it."""

    model: str
    cluster: str
    devices: int
    global_batch: int
    seq_len: int
    stack: str | None = None
    offload_to: str | None = None

    @property
    def problem(self) -> Problem:
        numbers = self.devices, self.global_batch, self.seq_len
        return build_problem(self.model, self.cluster, *numbers, self.stack, offload_to=self.offload_to)

    @property
    def name(self) -> str:
        asked = (f", {self.stack}" if self.stack else "") + (f", offload to {self.offload_to}" if self.offload_to else "")
        return f"{self.model}, {self.devices:,} × {self.cluster}{asked}"

    @property
    def words(self) -> list[str]:
        options = {"cluster": self.cluster, "devices": self.devices, "global-batch": self.global_batch, "seq-len": self.seq_len}
        options |= {name: value for name, value in (("stack", self.stack), ("offload-to", self.offload_to)) if value}
        return ["plan", self.model, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


EVERY_SWITCH = Case("gpt3-175b", "hgx-a100", 4096, 1536, 2048, "megatron-bridge", "host")
"""TP overlap, which its stack has, DP overlap, offload of optimizer states and of activations beside every other choice."""
SEARCHED = (
    Case("gpt3-175b", "hgx-a100", 4096, 1536, 2048),
    EVERY_SWITCH,
    Case("deepseek-v3", "hgx-h800", 2048, 15360, 4096),
    Case("deepseek-v3", "cloudmatrix-384", 1536, 15360, 4096),
    Case("llama-3.1-405b", "three-tier-h100", 16384, 2048, 8192),
    Case("moe-10t", "hgx-b300", 16384, 16384, 8192),
    Case("moe-10t", "atlas-960-superpod", 15360, 15360, 8192),
    Case("moe-10t", "cloudmatrix-384", 131072, 65536, 8192),
    Case("moe-10t", "atlas-950-superpod", 131072, 61440, 8192),
)
GROWING = {
    name: tuple(Case(name, "cloudmatrix-384", devices, 8 * devices, 4096) for devices in counts)
    for name, counts in (
        ("gpt-oss-120b", (64, 128, 256, 1024, 4096, 16384, 65536, 131072)),
        ("deepseek-v3", (256, 1024, 4096, 16384, 65536, 131072)),  # its states do not fit into fewer
    )
}
"""What a model is planned on, from the fewest dies that hold it."""


def timed(words: Sequence[str]) -> tuple[list[float], str, float]:
    """Wall seconds of a command in new processes, what it printed, and its peak memory in MiB."""
    seconds, out, peak = [], "", 0.0
    for _ in range(REPEATS):
        begun = time.perf_counter()
        with subprocess.Popen([sys.executable, "-m", "paraplan.optimizer.cli", *words], stdout=subprocess.PIPE, text=True) as run:
            out = run.stdout.read() if run.stdout else ""
            _, _, usage = os.wait4(run.pid, 0)
        seconds.append(time.perf_counter() - begun)
        peak = usage.ru_maxrss / 1024
    return seconds, out, peak


def tightness(problem: Problem) -> float:
    """Bound over step of a problem's best frame."""
    space, model = Space(problem), CostModel(problem)
    bound, _ = frame_bounds(model, space)
    best = Search(space, model, 1).run().best[0]
    here = np.all([column == getattr(best.layout, name) for name, column in space.frames.columns.items()], axis=0)
    return float(bound[here][0]) / best.step_time_s


def search_page() -> str:
    names = "problem | legal layouts | scored | cut by bound | cut by memory | search s | whole command s | peak MiB | bound / step"
    lines = [f"| {names} |", "|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    measured = {case: timed([*case.words, "--json"]) for case in SEARCHED}  # before this process grows by searches of its own
    for case, (each, out, peak) in measured.items():
        certificate = json.loads(out)["certificate"]
        assert certificate["status"] == "optimal"
        counts = (f"{certificate[name]:,}" for name in ("legal", "scored", "cut_by_bound", "cut_by_memory"))
        figures = (f"{certificate['seconds']:.2f}", f"{median(each):.2f}", f"{peak:.0f}", f"{tightness(case.problem):.2f}")
        lines.append(f"| {' | '.join((case.name, *counts, *figures))} |")
    space = json.loads(measured[EVERY_SWITCH][1])["certificate"]["space"]
    seconds = {case: median(each) for case, (each, _, _) in measured.items()}
    help_s = median(timed(["--help"])[0])
    ratios = ", ".join(f"{seconds[case] / help_s:.0f}" for case in SEARCHED)
    return "\n".join(
        [
            "# Search, proof included",
            "",
            "`python results/benchmarks/regenerate.py search` writes this page: `paraplan plan MODEL --cluster NAME --devices N "
            "--global-batch B --seq-len S` in a new process, one core, the median of three runs. The default space, but where "
            "`--stack` and `--offload-to` are named; every status `optimal`. Bound over step: of the best frame, the bound that "
            "the frame was ordered by.",
            "",
            *lines,
            "",
            f"The space of {EVERY_SWITCH.name}, in the words of its certificate: {space}.",
            "",
            f"In units of `paraplan --help` ({help_s:.2f} s): {ratios}.",
            "",
        ]
    )


def growth_page() -> str:
    tables = [text for name, cases in GROWING.items() for text in (f"## {name}", "", *growth(cases), "")]
    return "\n".join(
        [
            "# Growth with the cluster",
            "",
            "`python results/benchmarks/regenerate.py growth` writes this page: models on more and more dies of CloudMatrix384, "
            "eight sequences a die, enumeration, bounds and proof included, one core.",
            "",
            *tables,
        ]
    )


def growth(cases: Sequence[Case]) -> Iterator[str]:
    """A table of layouts and seconds, each also in those of the first case."""
    yield "| devices | legal layouts | search s | layouts, of the first | seconds, of the first |"
    yield "|---:|---:|---:|---:|---:|"
    first: tuple[int, float] | None = None
    for case in cases:
        times, legal = [], 0
        for _ in range(REPEATS):
            begun = time.perf_counter()
            space = Space(case.problem)
            found = Search(space, CostModel(case.problem), 5).run()
            times.append(time.perf_counter() - begun)
            legal = found.counts.legal
        seconds = median(times)
        first = first or (legal, seconds)
        yield f"| {case.devices:,} | {legal:,} | {seconds:.2f} | {legal / first[0]:.2f} | {seconds / first[1]:.2f} |"


def pricing_page() -> str:
    problem = build_problem("gpt3-175b", "hgx-a100", 4096, 4096, 2048)
    table = pricing.shuffled_layouts(problem, pricing.LAYOUTS)
    rates = [pricing.layouts_per_second(problem, table) for _ in range(REPEATS)]
    stages = float(np.mean(table.pp))
    return "\n".join(
        [
            "# Layouts priced per second",
            "",
            f"`python results/benchmarks/regenerate.py pricing` writes this page. {len(table):,} random legal layouts of GPT-3 "
            f"175B on 4,096 A100 in shuffled order, {stages:.1f} even stages in the mean, the first ones a layer longer where they "
            "do not divide: step time and the peak memory of every stage, per second of one core's time, factor tables built "
            "inside the timing; interleaved schedules from below in closed form, as the search prices all but its finalists.",
            "",
            f"{median(rates):,.0f} layouts/s (three runs: {', '.join(f'{rate:,.0f}' for rate in sorted(rates))}), "
            f"{median(rates) * stages:,.0f} stages/s.",
            "",
        ]
    )


def imports_page() -> str:
    lines = ["| command | seconds | of python -c pass |", "|---|---:|---:|"]
    bare = []
    for _ in range(2 * REPEATS):
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        bare.append(time.perf_counter() - begun)
    for words in (["--help"], ["plan", "--help"], ["catalog"], ["catalog", "models"]):
        seconds = median(timed(words)[0])
        lines.append(f"| paraplan {' '.join(words)} | {seconds:.2f} | {seconds / median(bare):.1f} |")
    head = ["# Start-up", "", "`python results/benchmarks/regenerate.py imports` writes this page; medians of three runs.", ""]
    return "\n".join([*head, *lines, ""])


def fronts_page() -> str:
    lines = [
        "| problem and aims | legal | exact front | exact s | sampled | generations | share of its volume | of its points | s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in fronts.cases():
        found = fronts.measured(case)
        exact = f"| {case.name} | {found.layouts:,} | {found.points} | {found.seconds:.1f} "
        for each in found.evolved:
            figures = f"| {each.sampled:,} | {each.generations} | {each.volume:.3f} | {each.met} | {each.seconds:.1f} |"
            lines.append(exact + figures)
            exact = "| | | | "
    return "\n".join(
        [
            "# Fronts by listing and by NSGA-II",
            "",
            "`python results/benchmarks/regenerate.py fronts` writes this page. The exact front of every problem beside what "
            "NSGA-II finds from the same start, with a population of 64. Volume: what a front dominates up to a tenth beyond the "
            f"worst figures of the exact one. Plans list up to {EXACT_LAYOUTS:,} layouts; beyond, they sample {SAMPLED:,} and "
            f"breed {GENERATIONS} generations. Seconds of one processor.",
            "",
            *lines,
            "",
        ]
    )


PAGES: dict[str, Callable[[], str]] = {
    "pricing": pricing_page,
    "search": search_page,
    "growth": growth_page,
    "imports": imports_page,
    "fronts": fronts_page,
}


def main(names: Sequence[str]) -> None:
    """Several pages in a process each: a child's peak memory is never counted below its parent's."""
    if len(names) == 1:
        write_file(HERE / f"{names[0]}.md", PAGES[names[0]]())
        return
    for name in names:
        subprocess.run([sys.executable, __file__, name], check=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(PAGES))
