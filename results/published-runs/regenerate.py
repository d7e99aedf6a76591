"""Prices published runs that no figure was fitted to: python results/published-runs/regenerate.py

GPT models on A100 (fp16, sequence 2048) with the stack `megatron-lm-2022`. SC21's step times follow from its TFLOP/s with its
own FLOP formula.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from statistics import mean

from paraplan.optimizer import build_problem, evaluate
from paraplan.search_spaces import Layout, ModelSpec
from paraplan.search_spaces.layer_kinds import Attention, DenseMlp, LayerKind

HERE = Path(__file__).parent


def predicted_s(run: Mapping[str, str]) -> float:
    """Predicted step time of a row of runs.csv, seconds."""
    devices, global_batch, dp = int(run["devices"]), int(run["global_batch"]), int(run["dp"])
    problem = build_problem(_gpt(run), "hgx-a100", devices, global_batch, 2048, stack="megatron-lm-2022", precision="fp16")
    vpp, micro_batch = int(run["vpp"]), int(run["micro_batch"])
    layout = Layout(
        tp=int(run["tp"]),
        pp=int(run["pp"]),
        vpp=vpp,
        dp=dp,
        schedule="interleaved" if vpp > 1 else "1f1b",
        micro_batch=micro_batch,
        num_microbatches=global_batch // (dp * micro_batch),
        sequence_parallel=run["sequence_parallel"] == "1",
        optimizer_sharding="none",
        recompute=run["recompute"],
    )
    return evaluate(problem, layout)[0].step_time_s


def runs() -> list[dict[str, str]]:
    """The rows of runs.csv."""
    with (HERE / "runs.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Writes the table of predicted beside measured step times."""
    lines = [
        "# Published runs",
        "",
        "`python results/published-runs/regenerate.py` prices these; the figures of their stack are the documented ones.",
        "",
    ]
    lines += ["| run | devices | layout | recompute | measured | predicted | error |", "|---|---|---|---|---|---|---|"]
    errors: dict[str, list[float]] = {}
    for run in runs():
        measured, predicted = float(run["measured_step_time_s"]), predicted_s(run)
        error = predicted / measured - 1.0
        errors.setdefault(run["source"], []).append(error)
        layout = f"tp {run['tp']} pp {run['pp']} vpp {run['vpp']} dp {run['dp']}"
        shape = f"{run['source']}, {run['layers']} layers of {run['hidden_size']}"
        lines.append(
            f"| {shape} | {run['devices']} | {layout} | {run['recompute']} | {measured:.2f} s | {predicted:.2f} s | {error:+.1%} |"
        )
    lines.append("")
    for source, found in errors.items():
        size = [abs(error) for error in found]
        lines.append(
            f"{source}: mean error {mean(size):.1%}, largest {max(size):.1%}, bias {mean(found):+.1%} over {len(found)} runs.\n"
        )
    (HERE / "README.md").write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


def _gpt(run: Mapping[str, str]) -> ModelSpec:
    hidden, heads = int(run["hidden_size"]), int(run["heads"])
    mixer = Attention(heads=heads, kv_heads=heads, head_dim=hidden // heads, qkv_bias=True, out_bias=True)
    return ModelSpec(
        name=f"gpt-{run['layers']}x{hidden}",
        hidden_size=hidden,
        vocab_size=51200,
        max_position_embeddings=2048,
        kinds={"dense": LayerKind(mixer=mixer, mlp=DenseMlp(width=4 * hidden, gated=False, bias=True))},
        layers=(f"{run['layers']}*dense",),
        tied_embeddings=True,
        learned_positions=True,
        norm="layer",
    )


if __name__ == "__main__":
    main()
