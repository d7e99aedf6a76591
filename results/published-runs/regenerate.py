"""Prices published runs that no figure was fitted to: python results/published-runs/regenerate.py

runs.csv: GPT models on A100 (fp16, sequence 2048) with the stack `megatron-lm-2022`. SC21's step times follow from its TFLOP/s
with its own FLOP formula. unseen.csv: runs of families that are in no table of fitted ones, as `paraplan validate` takes them.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median

from paraplan.cost_models.validation import Outcome, validate
from paraplan.optimizer import build_problem, evaluate
from paraplan.search_spaces import Layout, ModelSpec
from paraplan.search_spaces.layer_kinds import Attention, DenseMlp, LayerKind

HERE = Path(__file__).parent
UNSEEN = """What `paraplan validate results/published-runs/unseen.csv` says with the figures that ship: raw transfer to
stacks, or to pairs of stack and accelerator, that no fit has seen. One to three runs of one's own say more:
`paraplan calibrate --site`."""
SHORT = """InternEvo with optimizer states over all replicas sends every rank's weights in a broadcast of its own, one after
the other, some 3 ms for each rank; they are priced as one gather, which is far too fast from 256 devices on."""


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


def unseen() -> dict[tuple[str, str], list[Outcome]]:
    """Priced rows of unseen.csv by family and accelerator."""
    found: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in validate(HERE / "unseen.csv").outcomes:
        found.setdefault((outcome.run.family, outcome.run.accelerator), []).append(outcome)
    return found


def error_of(outcome: Outcome) -> float:
    """Predicted over measured step time, less one."""
    assert outcome.predicted_step_time_s is not None, outcome.skipped
    assert outcome.measured_step_time_s is not None, outcome.run.id
    return outcome.predicted_step_time_s / outcome.measured_step_time_s - 1.0


def main() -> None:
    """Writes the tables of predicted beside measured step times."""
    lines = ["# Published runs", "", "`python results/published-runs/regenerate.py` prices these; no figure was fitted to any.", ""]
    lines += [*_megatron(), *_unseen()]
    (HERE / "README.md").write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


def _megatron() -> list[str]:
    lines = ["## GPT on A100 with Megatron-LM of 2021 and 2022", "", "The figures of their stack are the documented ones.", ""]
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
    return lines


def _unseen() -> list[str]:
    """What a stack that nobody measured here, or one on an accelerator that it was not measured on, is predicted with."""
    families = unseen()
    lines = ["## Families that no fit has seen", "", UNSEEN, ""]
    lines += ["| family | accelerator | stack | runs | median error | largest | bias |", "|---|---|---|---|---|---|---|"]
    for (family, accelerator), found in families.items():
        errors = [error_of(each) for each in found]
        size = [abs(error) for error in errors]
        stacks = ", ".join(sorted({each.job.problem.stack.name for each in found if each.job is not None}))
        row = f"{median(size):.1%} | {max(size):.1%} | {median(errors):+.1%}"
        lines.append(f"| {family} | {accelerator} | {stacks} | {len(found)} | {row} |")
    lines += ["", SHORT, "", "| run | devices | layout | measured | predicted | error |", "|---|---|---|---|---|---|"]
    for outcome in (each for found in families.values() for each in found):
        run = outcome.run
        layout = " ".join(
            f"{name} {run.text(name)}" for name in ("tp", "cp", "pp", "vpp", "ep", "dp") if run.text(name) not in ("", "1")
        )
        times = f"{outcome.measured_step_time_s:.2f} s | {outcome.predicted_step_time_s:.2f} s"
        lines.append(f"| {run.id} | {run.text('num_accelerators')} | {layout} | {times} | {error_of(outcome):+.1%} |")
    lines += [
        "",
        "Sources: " + "; ".join(sorted({each.run.text("source") for found in families.values() for each in found})) + ".",
        "",
    ]
    return lines


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
