"""Flags of MindSpeed-LLM: no-op layers, its own names, and what its Megatron 0.12 base leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from paraplan.optimizer.exporters.mindspeed_llm import flags
from paraplan.optimizer.result import Plan
from paraplan.search_spaces.errors import Infeasible
from paraplan.search_spaces.model import ModelSpec

MakePlan = Callable[..., Plan]
Options = dict[str, tuple[str, ...]]

DUALPIPE: dict[str, Any] = {
    "tp": 2,
    "pp": 8,
    "dp": 48,
    "ep": 32,
    "vpp": 2,
    "schedule": "dualpipev",
    "num_microbatches": 80,
    "counts": (4,) * 15 + (2,),
}


@pytest.fixture
def ascend(make_plan: MakePlan) -> MakePlan:
    """A plan on CloudMatrix384 with the MindSpeed-LLM stack."""

    def make(model: str | ModelSpec, **changes: Any) -> Plan:
        return make_plan(model, **{"cluster": "cloudmatrix-384", "stack": "mindspeed-llm", **changes})

    return make


def options(plan: Plan, version: str | None = None) -> Options:
    found = flags(plan, version)
    names = [flag[0] for flag in found]
    assert len(names) == len(set(names)), "no option is given twice"
    return {name: tuple(values) for name, *values in found}


def test_deepseek_as_the_shipped_script_runs_it(ascend: MakePlan) -> None:
    """61 layers and 3 no-ops over DualPipeV's 16 chunks, as in MindSpeed-LLM's 671B recipe."""
    found = options(ascend("deepseek", overlap={"ep": 0.5}, recompute="full:block:8", offload="optimizer:1", **DUALPIPE))
    expected: Options = {
        "--num-layers": ("64",),
        "--noop-layers": ("61,62,63",),
        "--schedules-method": ("dualpipev",),
        "--moe-fb-overlap": (),
        "--swap-optimizer": (),
        "--first-k-dense-replace": ("3",),
        "--moe-layer-freq": ("1",),
        "--spec": ("mindspeed_llm.tasks.models.spec.deepseek_spec", "layer_spec"),
        "--recompute-method": ("block",),
        "--recompute-num-layers": ("4",),
        "--expert-tensor-parallel-size": ("1",),
        "--global-batch-size": ("3840",),
        "--use-distributed-optimizer": (),
    }
    assert {name: found.get(name) for name in expected} == expected
    absent = {"--overlap-grad-reduce", "--num-layers-per-virtual-pipeline-stage", "--pipeline-model-parallel-layout"}
    assert not absent & found.keys(), "DualPipeV excludes them"


def test_interleaving_counts_layers_not_chunks(ascend: MakePlan) -> None:
    found = options(ascend("llama", tp=8, pp=2, dp=4, vpp=4, schedule="interleaved", counts=(10,) * 8))
    assert found["--num-layers-per-virtual-pipeline-stage"] == ("10",)
    assert "--num-virtual-stages-per-pipeline-rank" not in found


def test_noops_inside_chunks_move_the_dense_layers(ascend: MakePlan) -> None:
    """Chunks of 2, 4, … layers: the third dense layer gets id 4, so MoE begins at 5; ids count the no-ops in."""
    found = options(ascend("deepseek", tp=2, pp=4, dp=32, ep=32, vpp=4, schedule="interleaved", counts=(2, *[4] * 14, 4)))
    assert found["--num-layers"] == ("64",)
    assert found["--noop-layers"] == ("2,3,63",)
    assert found["--first-k-dense-replace"] == ("5",)
    assert found["--num-layers-per-virtual-pipeline-stage"] == ("4",)


def test_stages_of_a_uniform_model_are_listed(ascend: MakePlan) -> None:
    found = options(ascend("llama", tp=8, pp=4, dp=4, counts=(19, 21, 21, 19)))
    assert found["--num-layer-list"] == ("19,21,21,19",)
    assert found["--num-layers"] == ("80",)
    assert not {"--noop-layers", "--num-layers-per-virtual-pipeline-stage"} & found.keys()


def test_uneven_chunks_of_a_uniform_model_are_padded(ascend: MakePlan) -> None:
    found = options(ascend("qwen", tp=4, pp=4, dp=8, ep=32, vpp=3, schedule="interleaved", counts=(8,) * 11 + (6,)))
    assert (found["--num-layers"], found["--noop-layers"]) == (("96",), ("94,95",))
    assert (found["--first-k-dense-replace"], found["--moe-layer-freq"]) == (("-1",), ("-1",)), "as its Qwen3-235B script says"
    assert found["--spec"] == ("mindspeed_llm.tasks.models.spec.qwen3_spec", "layer_spec")


def test_empty_chunks_need_the_layout_string_of_26_1(ascend: MakePlan) -> None:
    plan = ascend("deepseek", tp=2, pp=8, dp=32, ep=32, vpp=2, schedule="interleaved", counts=(5, *[4] * 14, 1))
    with pytest.raises(Infeasible, match=r"26\.1 takes other splits as a layout string"):
        flags(plan, "26.0")
    assert options(plan, "26.1")["--pipeline-model-parallel-layout"] == ("Et*5|(tttt|)*14mL",)


@pytest.mark.parametrize(
    ("cp_type", "algorithm", "extra"),
    [
        ("p2p", "megatron_cp_algo", {"--use-cp-send-recv-overlap": ()}),
        ("a2a", "ulysses_cp_algo", {}),
        ("allgather", "kvallgather_cp_algo", {}),
        ("a2a+p2p", "hybrid_cp_algo", {"--ulysses-degree-in-cp": ("4",)}),
    ],
)
def test_context_parallel_algorithms(ascend: MakePlan, cp_type: str, algorithm: str, extra: Options) -> None:
    found = options(ascend("llama", tp=2, cp=8, dp=8, cp_type=cp_type))
    assert found["--context-parallel-algo"] == (algorithm,)
    assert {name: found.get(name) for name in extra} == extra
    assert "--cp-comm-type" not in found


def test_selective_recompute_has_its_own_options(ascend: MakePlan) -> None:
    found = options(ascend("deepseek", **{**DUALPIPE, "recompute": "selective:layernorm+mla_up_proj+moe_act"}))
    assert {"--recompute-norm", "--recompute-mla-up-proj", "--recompute-activation-function"} <= found.keys()
    assert "--recompute-granularity" not in found


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ("llama", {"cluster": "hgx-h100", "tp": 8, "dp": 8}, "runs on Ascend"),
        ("llama", {"tp": 16, "dp": 4}, "tp 16 does not divide 8 KV heads"),
        ("llama", {"tp": 8, "dp": 8, "optimizer_sharding": "zero3"}, "has none and zero1"),
        ("llama", {"tp": 8, "dp": 8, "offload": "optimizer:0.5"}, "moves all optimizer states or none"),
        ("llama", {"tp": 8, "dp": 8, "offload": "activations:0.5"}, "no option moves a share"),
        ("llama", {"tp": 8, "dp": 8, "recompute": "selective:mlp"}, "but not mlp"),
        ("gpt-oss", {"dp": 64, "ep": 8}, "its router has no bias"),
        ("deepseek", {**DUALPIPE, "num_microbatches": 15}, r"at least 2·pp = 16"),
        ("deepseek", {**DUALPIPE, "dp": 24, "cp": 2}, "cp 1"),
        ("deepseek", {**DUALPIPE, "vpp": 1, "counts": (8,) * 7 + (6,)}, "runs 2 chunks per stage, the layout lists 1"),
        ("deepseek", {"tp": 2, "pp": 32, "dp": 16, "ep": 8, "counts": (1, *[2] * 30, 1)}, "needs a layer in every chunk"),
        ("deepseek", {"tp": 2, "pp": 21, "dp": 16, "ep": 8, "counts": (3,) * 20 + (2,)}, "dense layers only"),
    ],
)
def test_what_it_cannot_run(ascend: MakePlan, model: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Infeasible, match=words):
        flags(ascend(model, **changes))


def test_clamped_gates_are_refused_not_dropped(ascend: MakePlan, models: dict[str, ModelSpec]) -> None:
    """No option of its Megatron backend clamps what gates: a plain SwiGLU would train another model."""
    kind = models["qwen"].kinds["moe"]
    assert kind.mlp is not None
    clamped = kind.model_copy(update={"mlp": kind.mlp.model_copy(update={"clamped": True})})
    given = models["qwen"].model_copy(update={"kinds": {"moe": clamped}})
    with pytest.raises(Infeasible, match="cannot express activation clamp"):
        flags(ascend(given, dp=64, ep=8))
