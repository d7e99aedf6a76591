"""Writes README.md and the pictures beside it: python results/timeline/regenerate.py (half a minute)."""

from __future__ import annotations

from pathlib import Path

from paraplan.optimizer.evaluation import evaluate
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.optimizer.reports.canvas import svg
from paraplan.optimizer.reports.pipeline_picture import pipeline_picture
from paraplan.optimizer.step_timeline import step_timeline
from paraplan.search_spaces.inputs import build_problem

HERE = Path(__file__).parent
JOBS = {
    "DeepSeek-V3, 1,536 dies of CloudMatrix384, mindspeed-llm, `tp=2,pp=8,ep=32,recompute=full`": (
        ("deepseek-v3", "cloudmatrix-384", 1536, 15360, 4096, "mindspeed-llm", "bf16"),
        "tp=2,pp=8,ep=32,recompute=full",
        ("1f1b", "interleaved,vpp=2", "dualpipev"),
    ),
    "Llama-3.1-70B, 256 H100, torchtitan, `tp=8,pp=8,optimizer_sharding=zero2`": (
        ("llama-3.1-70b", "hgx-h100", 256, 128, 4096, "torchtitan", "bf16"),
        "tp=8,pp=8,optimizer_sharding=zero2",
        ("1f1b", "interleaved,vpp=2", "zb-v", "dualpipev"),
    ),
    "DeepSeek-V3, 2,048 H800 in FP8, megatron-bridge's dispatch, `pp=16,ep=64,recompute=selective:layernorm+mla_up_proj+moe_act`": (
        ("deepseek-v3", "hgx-h800", 2048, 15360, 4096, "megatron-bridge", "fp8"),
        "pp=16,ep=64,recompute=selective:layernorm+mla_up_proj+moe_act",
        ("1f1b", "dualpipe"),
    ),
}
PICTURES = {"1f1b": 0, "dualpipev": 0, "zb-v": 1}
HEAD = """# One step, pass by pass

`python results/timeline/regenerate.py` writes this page and its pictures; `paraplan timeline PLAN.json -o FILE` draws any plan.

The schedules of some jobs, each priced by `evaluate`. “waits” is the mean share of the pipeline's time that stages do nothing;
“ep” what the exchange of tokens adds to the step.

| job | schedule | step | waits | ep | peak memory |
|---|---|---:|---:|---:|---:|
"""
TAIL = """
DeepSeek-V3's own run, the last two rows, took 19.9 s a step (180K H800-hours per trillion tokens, arXiv 2412.19437, with
everything in); it used DualPipe. The memory of its row is more than an H800 has: the run kept moments in BF16, where this stack
keeps FP32, and what is kept for weight gradients here is an upper bound. MindSpeed-LLM computes weight gradients with their
input's unless told otherwise, so its DualPipeV waits more and holds less than torchtitan's would.

"""


def main() -> None:
    rows = []
    for number, (job, (asked, words, schedules)) in enumerate(JOBS.items()):
        problem = build_problem(*asked)
        for schedule in schedules:
            priced, _ = evaluate(problem, complete(problem, parse_layout(f"{words},schedule={schedule}")))
            step = step_timeline(problem, priced.layout)
            waits, exchange = float(step.idle_share.mean()), priced.breakdown_s["ep"]
            rows.append(
                f"| {job} | {priced.layout.schedule} | {priced.step_time_s:.3g} s | {waits:.1%} | {exchange:.2g} s | "
                f"{priced.memory.peak_gib:.1f} GiB |"
            )
            if PICTURES.get(priced.layout.schedule) == number:
                (HERE / f"{priced.layout.schedule}.svg").write_text(svg(pipeline_picture(step)), encoding="utf-8")
    pictures = "".join(f"![{name}]({name}.svg)\n\n" for name in PICTURES)
    (HERE / "README.md").write_text(HEAD + "\n".join(rows) + "\n" + TAIL + pictures.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
