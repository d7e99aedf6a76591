"""Writes the reference plans: python results/reference-plans/regenerate.py

One file per problem: the command, how the plan compares with the layout published for such a run (priced by the same model),
the report.
"""

from __future__ import annotations

import io
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from paraplan.optimizer import Plan, PricedLayout, build_problem, evaluate, plan
from paraplan.optimizer.reports.terminal import render
from paraplan.search_spaces import Infeasible, Layout, Problem
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """A problem, and the layout published for it with where it stands and what of it cannot be priced yet."""

    name: str
    model: str
    cluster: str
    devices: int
    global_batch: int
    seq_len: int
    published: Layout | None = None
    source: str = ""
    precision: str = "bf16"

    @property
    def problem(self) -> Problem:
        return build_problem(self.model, self.cluster, self.devices, self.global_batch, self.seq_len, precision=self.precision)

    @property
    def command(self) -> str:
        words = ["paraplan", "plan", self.model, "--cluster", self.cluster, "--devices", str(self.devices)]
        words += ["--global-batch", str(self.global_batch), "--seq-len", str(self.seq_len)]
        return shlex.join([*words, "--precision", self.precision] if self.precision != "bf16" else words)


CASES = (
    Case("deepseek-v3-on-two-cloudmatrix", "deepseek-v3", "cloudmatrix-384", 1536, 15360, 4096),
    Case("moe-1.8t-on-4-cloudmatrix", "moe-1.8t", "cloudmatrix-384", 3072, 6144, 4096),
    Case(
        "dense-1t-on-3072-a100",
        "megatron-1t",
        "hgx-a100",
        3072,
        3072,
        2048,
        Layout(tp=8, pp=64, dp=6, num_microbatches=512, recompute="full"),
        "Narayanan et al. 2021 (arXiv 2104.04473, table 1): TP 8 × PP 64 × DP 6 with full recompute, 502 petaFLOP/s measured",
    ),
    Case(
        "deepseek-v3-on-2048-h800",
        "deepseek-v3",
        "hgx-h800",
        2048,
        15360,
        4096,
        Layout(pp=16, dp=128, ep=64, num_microbatches=120, recompute="selective:layernorm+mla_up_proj"),
        "DeepSeek-V3 report (arXiv 2412.19437, section 3.2): PP 16, EP 64, ZeRO-1, norms and MLA up-projections recomputed; "
        "its DualPipe and its node-deduplicating dispatch are priced as 1F1B and plain all-to-all, its bf16 moments as fp32",
        "fp8",
    ),
    Case(
        "deepseek-v3-on-256-gb200",
        "deepseek-v3",
        "gb200-nvl72",
        256,
        2048,
        4096,
        Layout(pp=4, vpp=4, schedule="interleaved", dp=64, ep=64, num_microbatches=32, recompute="selective:mla_up_proj"),
        "Megatron-Bridge's recipe for 256 GB200: PP 4, VPP 4, EP 64, MLA up-projection recomputed",
    ),
    Case(
        "deepseek-v3-on-512-cloudmatrix-dies",
        "deepseek-v3",
        "cloudmatrix-384",
        512,
        3840,
        4096,
        Layout(tp=2, pp=8, dp=32, ep=32, num_microbatches=120, recompute="full:block:8", offload="optimizer:1"),
        "MindSpeed-LLM's script for 512 dies of Atlas A3: TP 2, PP 8, EP 32, 8 layers recomputed per stage, optimizer swapped; its "
        "DualPipeV with overlapped dispatch is priced as 1F1B without",
    ),
    Case(
        "kimi-k2-on-512-h100",
        "kimi-k2",
        "hgx-h100",
        512,
        4096,
        4096,
        Layout(tp=2, pp=16, dp=16, ep=32, num_microbatches=256, recompute="selective:layernorm+mla_up_proj"),
        "Megatron-Bridge's recipe for 512 H100: TP 2, PP 16, EP 32",
    ),
    Case("moe-10t-on-one-atlas-960", "moe-10t", "atlas-960-superpod", 15488, 15488, 4096),
    Case(
        "moe-10t-on-15360-of-atlas-960",
        "moe-10t",
        "atlas-960-superpod",
        15360,
        15360,
        4096,
        source="No layout has been published. 15,488 = 2⁷·11² shares only 2⁷ with the 512 experts; 8,192, 12,288, 14,336 and "
        "15,360 devices are equally fast per device, and this is the largest of them.",
    ),
    Case("moe-10t-on-two-atlas-960", "moe-10t", "atlas-960-superpod", 30976, 30976, 4096),
    Case("moe-10t-on-16-atlas-950", "moe-10t", "atlas-950-superpod", 16384, 16384, 4096),
)


def main() -> None:
    """Plans every case and writes its file."""
    lines = ["# Reference plans", "", "Regenerate with `python results/reference-plans/regenerate.py`.", ""]
    lines += ["| plan | step time | MFU | tokens/s per device | layout |", "|---|---|---|---|---|"]
    for case in CASES:
        found = plan(case.problem)
        report = io.StringIO()
        found = found.model_copy(update={"certificate": found.certificate.model_copy(update={"seconds": 0.0})})
        render(found, Console(file=report, width=100))
        parts = [
            f"# {case.name}",
            _fenced(case.command),
            _comparison(case, found.plan),
            _fenced(_timeless(report.getvalue().rstrip())),
        ]
        (HERE / f"{case.name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        best = found.plan
        row = f"{best.step_time_s:.3g} s | {best.mfu:.1%} | {best.tokens_per_s_per_device:,.0f} | {_degrees(best.layout)}"
        lines.append(f"| [{case.name}]({case.name}.md) | {row} |")
        if case is CASES[0]:
            _picture(found, case.command)
        print(lines[-1], flush=True)
    (HERE / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _picture(found: Plan, command: str) -> None:
    """The report, down to its certificate, as a terminal shows it."""
    printed = io.StringIO()
    render(found, Console(width=80, file=printed, force_terminal=True, color_system="truecolor"))
    lines = printed.getvalue().split("\n")
    end = next(number for number, line in enumerate(lines) if "Assumptions" in line)
    recorder = Console(record=True, width=80, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    recorder.print(Text.from_ansi(f"$ {command}\n\n" + "\n".join(lines[:end]).rstrip()))
    (HERE / "terminal.svg").write_text(_timeless(recorder.export_svg(title="paraplan")), encoding="utf-8")


def _timeless(report: str) -> str:
    """A report without how long the search took, the one figure that differs from run to run."""
    return re.sub(r",(\s|&#160;)+in(\s|&#160;)+0(\s|&#160;)+s\.", ".", report)


def _fenced(text: str) -> str:
    return f"```\n{text}\n```"


def _comparison(case: Case, best: PricedLayout) -> str:
    if case.published is None:
        return case.source or "No layout has been published for this problem."
    try:
        priced, broken = evaluate(case.problem, case.published)
    except Infeasible as error:
        return f"{case.source}: {error.summary}; {' '.join(error.reasons)}"
    slower = priced.step_time_s / best.step_time_s - 1.0
    verdict = f"{priced.step_time_s:.3g} s ({slower:+.1%} on the plan below), {priced.memory.peak_gib:.1f} GiB at its peak"
    return f"{case.source}. Priced by this model: {verdict}{'; ' + ' '.join(broken).rstrip('.') if broken else ''}."


def _degrees(layout: Layout) -> str:
    shown = {name: getattr(layout, name) for name in ("tp", "cp", "pp", "dp", "ep", "vpp", "micro_batch")}
    return ", ".join(f"{name} {value}" for name, value in shown.items() if value > 1)


if __name__ == "__main__":
    main()
