"""What runs offload, from their sources' words to a share of the activations: layers counted, modules weighed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from paraplan.cost_models.run_files import read_runs
from paraplan.cost_models.run_layouts import job_of
from paraplan.cost_models.run_models import read_shapes
from paraplan.cost_models.run_offload import SAVED_BY
from paraplan.cost_models.runs import Run
from paraplan.cost_models.step import CostModel
from paraplan.optimizer import build_problem
from paraplan.search_spaces.layout import Layout, LayoutTable, parse_offload

MEASURED = Path(__file__).parents[1] / "measured"
DENSE = "korthikanti-t5-22b-full"


def share(cells: dict[str, str], name: str = DENSE) -> float:
    """Share of the activations that leave the device in a run of the sample with some cells changed."""
    run = next(run for run in read_runs(MEASURED / "runs_sample.csv") if run.id == name)
    job = job_of(Run({**run.cells, "recompute": "none", **cells}, run.id), read_shapes(MEASURED / "models.json"))
    return parse_offload(job.layout.offload)[1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("none", 0.0),
        ("activations", 1.0),
        ("activations:0.3", 0.3),
        ("optimizer:1+activations:0.25", 0.25),
        ("activations cpu_offloading_num_layers=12", 0.25),  # of 48 layers
        ("activations cpu_offloading_num_layers=90", 1.0),
    ],
)
def test_layers_and_our_own_words_are_shares(words: str, expected: float) -> None:
    assert share({"offload": words}) == pytest.approx(expected)


def test_layers_are_those_of_a_stage() -> None:
    cells = {"pp": "2", "dp": "", "num_accelerators": "16"}
    assert share({"offload": "cpu_offloading_num_layers=12", **cells}) == pytest.approx(0.5)  # of 24


def test_swapped_attention_leaves_what_an_mlp_saves() -> None:
    """A GPT layer saves 34·s·b·h bytes with dropout masks (arXiv 2205.05198, equation 1), 32 without them.

    Of those the MLP holds 16: its GEMMs' input of 4·h in BF16 (8) and the activation's (8). Ours keeps norms' and residuals' inputs
    as the paper does and a flash kernel's log-sum-exp, 4 bytes for each head and token.
    """
    h, heads = 6144, 64
    kept = 2 + 2 + 6 + 2 + 4 * heads / h + 2 + 2 + 16
    cells = {"software": "Megatron-LM", "tp": "1", "dp": "8", "micro_batch": "1", "global_batch": "8"}
    assert share({"offload": "swap-attention", **cells}) == pytest.approx(1 - 16 / kept, rel=1e-3)


def test_modules_of_experts_weigh_what_their_operators_save() -> None:
    """In BF16 an expert layer keeps for each routed token its input h, the gated GEMM's output 2·w and the activation's w."""
    cells = {"model": "qwen3-30b-a3b", "num_accelerators": "8", "tp": "1", "ep": "8", "dp": "", "global_batch": "64"}
    cells |= {"sp": "", "software": "Megatron-Core v0.16", "vpp": ""}
    h, w = 2048, 768
    inputs = share({"offload": "fine-grained activations:expert_fc1", **cells})
    gated = share({"offload": "fine-grained activations: moe_act", **cells})
    whole = share({"offload": "fine-grained activations:fused_group_mlp", **cells})
    assert gated / inputs == pytest.approx(2 * w / h, rel=1e-5)
    assert whole / inputs == pytest.approx((h + 3 * w) / h, rel=1e-5)
    both = share({"offload": "fine-grained activations:expert_fc1+moe_act", "recompute": "selective:moe_act", **cells})
    assert both > inputs + gated  # of less, since what is recomputed is not kept


def test_every_named_operator_is_one_that_some_model_has() -> None:
    known = {"layer_input"}
    for name in ("llama-3.1-8b", "deepseek-v3", "gpt-oss-120b", "qwen3-30b-a3b"):
        problem = build_problem(name, "hgx-h100", devices=8, global_batch=8, seq_len=4096)
        layers = CostModel(problem).layers
        layout = Layout(tp=1, cp=1, pp=1, dp=8, ep=1, etp=1, edp=8, vpp=1, micro_batch=1, num_microbatches=1)
        f = layers.factors(LayoutTable.from_layouts([layout]))
        known |= {op.name for block in layers.blocks for op in layers.operators(block, f)}
    assert {name for names in SAVED_BY.values() for name in names} <= known
