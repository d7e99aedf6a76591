"""The files of the frameworks that are configured by a file: what stands in them, and what is refused instead of bent."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from paraplan.optimizer.exporters import render
from paraplan.optimizer.exporters.deepspeed import FILE as DEEPSPEED
from paraplan.optimizer.exporters.job import FILE as JOB
from paraplan.optimizer.exporters.knobs import Code, Settings
from paraplan.optimizer.exporters.megatron_bridge import FILE as BRIDGE
from paraplan.optimizer.exporters.megatron_bridge import settings as bridge_settings
from paraplan.optimizer.exporters.megatron_lm import flags
from paraplan.optimizer.exporters.mindformers import FILE as MINDFORMERS
from paraplan.optimizer.exporters.mindformers import document
from paraplan.optimizer.exporters.torchtitan import MODULE as TORCHTITAN
from paraplan.optimizer.exporters.torchtitan import settings as torchtitan_settings
from paraplan.optimizer.result import Plan
from paraplan.search_spaces.errors import Infeasible, InputError
from paraplan.search_spaces.inputs import load_model, load_stack
from paraplan.search_spaces.model import ModelSpec
from syrupy.assertion import SnapshotAssertion

MakePlan = Callable[..., Plan]

ON_ASCEND = {"cluster": "cloudmatrix-384", "stack": "mindformers"}
DEEPSEEK = {"tp": 2, "pp": 16, "dp": 64, "ep": 64, "num_microbatches": 32, "counts": (4,) * 15 + (2,)}
INTERLEAVED = {"pp": 4, "vpp": 2, "schedule": "interleaved", "num_microbatches": 16}
SHOWN: dict[str, tuple[str, str, dict[str, Any]]] = {
    BRIDGE: ("megatron-bridge", "llama", {"tp": 8, "dp": 4, "counts": (9, 10, 10, 11, 10, 10, 10, 10), **INTERLEAVED}),
    f"{TORCHTITAN}.py": (
        "torchtitan",
        "llama",
        {"stack": "torchtitan", "tp": 8, "dp": 4, "optimizer_sharding": "hsdp:2", "counts": (10,) * 8, **INTERLEAVED},
    ),
    DEEPSPEED: (
        "deepspeed",
        "qwen",
        {"stack": "deepspeed", "dp": 64, "ep": 16, "optimizer_sharding": "zero3", "recompute": "full"},
    ),
    MINDFORMERS: ("mindformers", "qwen", {**ON_ASCEND, "tp": 4, "pp": 4, "dp": 16, "ep": 16, "counts": (23, 24, 24, 23)}),
    JOB: ("job", "deepseek", DEEPSEEK),
}


def values(settings: Settings) -> dict[str, Any]:
    return {setting.name: setting.value for setting in settings}


@pytest.mark.parametrize("file", SHOWN)
def test_file(make_plan: MakePlan, file: str, snapshot: SnapshotAssertion) -> None:
    framework, model, layout = SHOWN[file]
    assert render(make_plan(model, **layout), framework)[file] == snapshot


@pytest.mark.parametrize("file", [BRIDGE, f"{TORCHTITAN}.py"])
def test_python_is_python_and_names_stay_in_comments(make_plan: MakePlan, models: dict[str, ModelSpec], file: str) -> None:
    framework, model, layout = SHOWN[file]
    named = models[model].model_copy(update={"name": "llama\n__import__('os').system('touch pwned')\u2028x = 1"})
    tree = ast.parse(render(make_plan(named, **layout), framework)[file])
    assert not any(isinstance(node, ast.Name) and node.id == "__import__" for node in ast.walk(tree))


# --- Megatron-Bridge ---------------------------------------------------------------------------------------------------------


def test_bridge_says_what_megatron_lm_says(make_plan: MakePlan) -> None:
    """Options of the launch script and fields of the program agree wherever they bear one name."""
    plan = make_plan("deepseek", recompute="selective:mla_up_proj+layernorm", **DEEPSEEK)
    fields = {name.split(".")[-1]: value for name, value in values(bridge_settings(plan)).items()}
    alike = 0
    for option, *words in flags(plan):
        field = option[2:].replace("-", "_")
        if field not in fields or isinstance(fields[field], Code):
            continue
        mine = fields[field] if isinstance(fields[field], list) else [fields[field]]
        assert [str(value) for value in mine] == (words or ["True"]), option
        alike += 1
    assert alike > 30


@pytest.mark.parametrize(("vocab", "written"), [(151936, 151936), (151669, 152064)])
def test_bridge_is_given_a_vocabulary_that_tp_divides(make_plan: MakePlan, vocab: int, written: int) -> None:
    """Its training loop takes a size as it is: what TP 4 does not divide is written padded to whole 128 · 4."""
    spec = load_model("llama-3.1-8b").model_copy(update={"vocab_size": vocab})
    assert values(bridge_settings(make_plan(spec, tp=4, dp=8)))["model.vocab_size"] == written


def test_bridge_is_told_the_kernel_of_the_loss_that_was_priced(make_plan: MakePlan) -> None:
    """Its models fuse the loss by Megatron-Core's own kernel unless told otherwise, which keeps logits in FP32."""
    plan = make_plan("llama", tp=4, dp=8)
    assert "model.cross_entropy_fusion_impl" not in values(bridge_settings(plan)), "priced with Megatron-Core's"
    problem = plan.problem.model_copy(update={"stack": load_stack("megatron-bridge")})
    told = values(bridge_settings(plan.model_copy(update={"problem": problem})))
    assert told["model.cross_entropy_fusion_impl"] == "te" and told["model.cross_entropy_loss_fusion"] is True


def test_bridge_sets_what_the_launch_script_leaves_to_megatron_lm(make_plan: MakePlan) -> None:
    found = values(bridge_settings(make_plan("llama", tp=8, dp=4, counts=(10,) * 8, **INTERLEAVED)))
    assert found["model.pipeline_dtype"] == "torch.bfloat16" and found["model.overlap_p2p_comm"] is True
    assert found["model.batch_p2p_comm"] is False, "Megatron-Core overlaps p2p or batches it"
    assert found["model.virtual_pipeline_model_parallel_size"] == 2
    assert found["optimizer.use_distributed_optimizer"] is found["ddp.use_distributed_optimizer"] is True
    assert found["model.share_embeddings_and_output_weights"] is False and found["model.vocab_size"] == 128256
    assert found["mixed_precision"] == "bf16_mixed" and found["mixed_precision.grad_reduce_in_fp32"] is True
    fp8 = values(bridge_settings(make_plan("llama", tp=8, dp=8, precision="fp8")))
    assert fp8["mixed_precision"] == "bf16_with_fp8_subchannel_scaling_mixed"


def test_bridge_data_path_follows_the_version(make_plan: MakePlan) -> None:
    plan = make_plan("llama", tp=8)
    assert "blend=([os.environ['DATA_PATH']], None)" in render(plan, "megatron-bridge", "0.3")[BRIDGE]
    assert "data_path=[os.environ['DATA_PATH']]" in render(plan, "megatron-bridge", "0.6")[BRIDGE]


def test_bridge_learns_as_many_positions_as_tokens(make_plan: MakePlan) -> None:
    with pytest.raises(Infeasible, match=r"learns as many positions as seq_len, 1024; gpt3-175b has 2048"):
        bridge_settings(make_plan("gpt", tp=8, seq_len=1024))


# --- torchtitan --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "qwen3-30b-a3b", "qwen3-235b-a22b"])
def test_torchtitan_ships_the_catalog_s_models(make_plan: MakePlan, name: str) -> None:
    found = values(torchtitan_settings(make_plan(load_model(name), stack="torchtitan", dp=8, optimizer_sharding="zero3")))
    assert found["training.global_batch_size"] == 64 and found["training.local_batch_size"] == 1
    assert found["parallelism.data_parallel_shard_degree"] == 8


def test_torchtitan_counts_tokens_after_0_3(make_plan: MakePlan) -> None:
    plan = make_plan("llama", stack="torchtitan", tp=8, dp=4, optimizer_sharding="zero2", counts=(10,) * 8, **INTERLEAVED)
    found = values(torchtitan_settings(plan, "main"))
    assert found["training.num_tokens_per_microbatch_per_dp_rank"] == 4096
    assert found["training.num_tokens_per_train_step"] == 64 * 4096
    assert found["parallelism.num_pp_microbatches"] == 16 and "training.local_batch_size" not in found


def test_torchtitan_trains_mtp_only_where_it_can(make_plan: MakePlan) -> None:
    plan = make_plan("deepseek", stack="torchtitan", dp=64, ep=64, optimizer_sharding="zero3")
    assert "num_mtp_layers=1" in render(plan, "torchtitan")[f"{TORCHTITAN}.py"]


def test_torchtitan_quantises_experts_too(make_plan: MakePlan) -> None:
    def text(model: str) -> str:
        plan = make_plan(model, stack="torchtitan", dp=64, optimizer_sharding="zero3", precision="fp8")
        return render(plan, "torchtitan")[f"{TORCHTITAN}.py"]

    assert "Float8LinearConverter.Config" in text("llama") and "Experts" not in text("llama")
    assert "Float8GroupedExpertsConverter.Config" in text("qwen")


# --- MindSpore Transformers --------------------------------------------------------------------------------------------------


def test_mindformers_offset_of_the_shipped_deepseek_file(make_plan: MakePlan) -> None:
    """configs/deepseek3/pretrain_deepseek3_671b.yaml has this offset for 61 layers, 8 stages of 2 chunks."""
    layout = {"tp": 4, "dp": 16, "ep": 32, "pp": 8, "vpp": 2, "schedule": "interleaved", "num_microbatches": 32}
    plan = make_plan("deepseek", **ON_ASCEND, **layout, counts=(4,) * 15 + (2,), recompute="full:block:2")
    found = document(plan)
    assert found["model"]["model_config"]["offset"] == [[1] * 8, [1] * 7 + [-2]]
    assert found["recompute_config"]["recompute"] == [[2] * 8, [2] * 7 + [1]]
    assert found["parallel"]["pipeline_config"] == {"pipeline_interleave": True, "pipeline_scheduler": "1f1b"}
    config = found["parallel_config"]
    assert config["data_parallel"] * config["model_parallel"] * config["pipeline_stage"] == 512


def test_mindformers_v_shape_runs_back_up(make_plan: MakePlan) -> None:
    layout = {"dp": 8, "pp": 2, "vpp": 2, "schedule": "zb-v", "num_microbatches": 8}
    plan = make_plan("qwen", **ON_ASCEND, **layout)
    counts = (24, 24, 23, 23)
    stages = [
        {"stage": 0, "chunks": [{"layers": (0, 23), "embedding": True}, {"layers": (71, 93), "loss": True}]},
        {"stage": 1, "chunks": [{"layers": (24, 47)}, {"layers": (48, 70)}]},
    ]
    changed = plan.plan.layout.model_validate(plan.plan.layout.model_dump() | {"stages": stages})
    found = document(plan.model_copy(update={"plan": plan.plan.model_copy(update={"layout": changed})}))
    assert sum(counts) == 94
    assert found["model"]["model_config"]["offset"] == [[1, 1], [0, 0]]
    assert found["parallel"]["pipeline_config"]["pipeline_scheduler"] == "zero_bubble_v"


# --- DeepSpeed and the job file ----------------------------------------------------------------------------------------------


def test_a_prediction_names_the_stack_that_it_is_of(make_plan: MakePlan) -> None:
    """Files for another framework say that its time and memory are not what the plan predicts."""
    plan = make_plan("qwen", dp=64, ep=16, sequence_parallel=False)
    assert plan.problem.stack.framework == "megatron-lm"
    own, other, job = render(plan, "megatron-lm"), render(plan, "deepspeed"), render(plan, "job")
    for text in (own["megatron-lm.sh"], own["megatron-lm.md"], other["deepspeed.sh"], other["deepspeed.md"], job[JOB]):
        assert f"Predicted for the stack {plan.problem.stack.name}: " in text.replace("\n# ", " ")
    assert "no prediction" not in own["megatron-lm.md"] + job[JOB]
    assert "That is no prediction for DeepSpeed" in other["deepspeed.md"]


def test_what_training_hangs_on_stands_on_the_page_and_in_the_script(make_plan: MakePlan) -> None:
    """Optimizer, rope scaling, padding of the vocabulary, type of accumulated gradients: set without being asked, or not set."""
    for framework, plan, words in (
        ("mindformers", make_plan("qwen", **ON_ASCEND, dp=16), ("AdamW with betas [0.9, 0.95]", "no rope_scaling")),
        ("mindspeed-llm", make_plan("llama", **{**ON_ASCEND, "stack": "mindspeed-llm"}, tp=8, dp=8), ("no rope_scaling",)),
        ("megatron-lm", make_plan("llama", tp=8, dp=8), ("128256 tokens is padded to 129024", "no rope_scaling")),
        ("megatron-lm", make_plan("llama", stack="megatron-bridge", tp=8, dp=8), ("(--grad-reduce-in-bf16)",)),
        (
            "megatron-bridge",
            make_plan("llama", stack="megatron-bridge", tp=8, dp=8),
            ("reduced in bf16 (mixed_precision.grad_reduce_in_fp32 = False)", "takes fp32"),
        ),
        ("deepspeed", make_plan("qwen", stack="deepspeed", dp=64, ep=16), ("accumulate in bf16",)),
        ("deepspeed", make_plan("qwen", dp=64, ep=16, sequence_parallel=False), ("accumulate in fp32",)),
    ):
        files = render(plan, framework)
        for word in words:
            assert word in files[f"{framework}.md"] and word in files[f"{framework}.sh"].replace("\n# ", " "), (framework, word)


def test_gradients_of_two_bytes_have_the_type_of_the_computation(make_plan: MakePlan) -> None:
    for precision, kept in (("bf16", "bf16"), ("fp16", "fp16")):
        plan = make_plan("qwen", stack="deepspeed", dp=64, ep=16, precision=precision)
        assert json.loads(render(plan, "deepspeed")[DEEPSPEED])["data_types"]["grad_accum_dtype"] == kept


def test_deepspeed_says_what_the_program_must_do(make_plan: MakePlan) -> None:
    plan = make_plan("llama", stack="deepspeed", pp=4, dp=8, optimizer_sharding="zero1", recompute="full", counts=(20,) * 4)
    files = render(plan, "deepspeed")
    assert json.loads(files[DEEPSPEED])["pipeline"] == {"stages": 4, "partition": "uniform"}
    assert "num_stages=4" in files["deepspeed.md"] and "every layer is checkpointed" in files["deepspeed.md"]
    assert json.loads(files["model.json"])["hidden_size"] == 8192
    assert "export SEQ_LEN=4096" in files["deepspeed.sh"]


def test_job_counts_supernodes(make_plan: MakePlan) -> None:
    plan = make_plan("deepseek", cluster="cloudmatrix-384", stack="mindspeed-llm", **DEEPSEEK)
    task = yaml.safe_load(render(plan, "job")[JOB])["task"]
    resource = task["resource"]
    assert resource["supernode"] * resource["accelerator_per_node"] >= 2048 and resource["supernode"] == 3
    strategy = task["strategy"]
    degrees = ("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel")
    assert [strategy[name] for name in degrees] == [2, 16, 64, 1]
    with pytest.raises(InputError, match="leave it out"):
        render(plan, "job", "2.0")


# --- refusals ----------------------------------------------------------------------------------------------------------------

TITAN = {"stack": "torchtitan", "optimizer_sharding": "zero3"}


@pytest.mark.parametrize(
    ("framework", "model", "layout", "words"),
    [
        ("torchtitan", "gpt", {**TITAN, "tp": 8, "seq_len": 2048}, "ships no model of the shape of gpt3-175b"),
        ("torchtitan", "llama", {"stack": "torchtitan", "tp": 8, "dp": 2}, "zero1: FSDP shards gradients too; plan with zero2"),
        ("torchtitan", "llama", {**TITAN, "tp": 4, "cp": 2, "dp": 2, "cp_type": "p2p"}, "cp type p2p; it has allgather"),
        ("torchtitan", "llama", {**TITAN, "dp": 8, "recompute": "full:block:3"}, "all layers or none; plan with recompute=full"),
        ("torchtitan", "qwen", {**TITAN, "tp": 2, "dp": 4, "ep": 2, "etp": 2}, "etp 2: .* plan with etp=1"),
        ("torchtitan", "deepseek", {**TITAN, "pp": 2, "dp": 8, "counts": (31, 31)}, "trains MTP with neither"),
        ("torchtitan", "llama", {**TITAN, "dp": 8, "offload": "optimizer:1"}, "takes weights and gradients along"),
        ("torchtitan", "llama", {**TITAN, "cluster": "atlas-800t-a2", "dp": 8}, "runs on GPUs"),
        ("torchtitan", "llama", {**TITAN, "dp": 4, "pp": 2, "rank_order": "tp-cp-ep-pp-dp"}, "pipelines are outermost"),
        ("deepspeed", "llama", {"stack": "deepspeed", "pp": 2, "dp": 4, "optimizer_sharding": "zero2"}, "take zero1 at most"),
        ("deepspeed", "llama", {"stack": "deepspeed", "dp": 8, "optimizer_sharding": "hsdp:4"}, "plan with zero3"),
        ("deepspeed", "llama", {"stack": "deepspeed", "tp": 2, "cp": 2, "dp": 2, "cp_type": "a2a"}, "beside data parallelism only"),
        ("deepspeed", "llama", {"stack": "deepspeed", "tp": 2, "dp": 4}, "plan with sequence_parallel=false"),
        ("deepspeed", "llama", {"stack": "deepspeed", "dp": 8, "precision": "fp8"}, "precision fp8: it has bf16 and fp16"),
        ("deepspeed", "llama", {"stack": "deepspeed", "pp": 2, "dp": 4, "counts": (39, 41)}, "its partition is uniform"),
        ("deepspeed", "qwen", {"stack": "deepspeed", "tp": 2, "ep": 4, "dp": 4, "offload": "optimizer:1"}, "no offload"),
        ("mindformers", "llama", {**ON_ASCEND, "tp": 8}, "neither as DeepSeek-V3 nor as Qwen3"),
        ("mindformers", "qwen", {"tp": 4, "dp": 2}, "trains on Ascend"),
        ("mindformers", "qwen", {**ON_ASCEND, "dp": 16, "cp": 2, "ep": 32}, "does not divide dp·tp = 16"),
        ("mindformers", "qwen", {**ON_ASCEND, "dp": 16, "recompute": "selective:mlp"}, "plan with full:block:K"),
        ("mindformers", "qwen", {**ON_ASCEND, "dp": 16, "optimizer_sharding": "zero3"}, "plan with none or zero1"),
        ("mindformers", "qwen", {**ON_ASCEND, "dp": 8, "pp": 2, "num_microbatches": 1, "counts": (47, 47)}, "one per stage"),
        ("megatron-bridge", "llama", {"tp": 8, "dp": 8, "schedule": "gpipe"}, "it has 1f1b and interleaved"),
        ("job", "llama", {"tp": 8, "dp": 8, "edp": 1}, "etp·ep·edp·pp is 1"),
    ],
)
def test_what_cannot_be_said_is_refused(
    make_plan: MakePlan, framework: str, model: str, layout: dict[str, Any], words: str
) -> None:
    with pytest.raises(Infeasible, match=words):
        render(make_plan(model, **layout), framework)


@pytest.mark.parametrize(
    ("framework", "layout", "part", "change", "words"),
    [
        ("mindformers", ON_ASCEND, "mixer", {"rotary_fraction": 0.5}, "of a head: its training graphs turn all"),
        ("torchtitan", TITAN, "mixer", {"rotary_fraction": 0.5}, "ships no model of the shape"),
        ("torchtitan", TITAN, "mlp", {"normalized_top_k": False}, "ships no model of the shape"),
    ],
)
def test_a_model_that_only_weighs_and_turns_otherwise_is_another(
    make_plan: MakePlan,
    models: dict[str, ModelSpec],
    framework: str,
    layout: dict[str, Any],
    part: str,
    change: dict[str, Any],
    words: str,
) -> None:
    (name, kind), *_ = models["qwen"].kinds.items()
    assert render(make_plan("qwen", **layout, dp=16), framework)
    changed = kind.model_copy(update={part: getattr(kind, part).model_copy(update=change)})
    with pytest.raises(Infeasible, match=words):
        render(make_plan(models["qwen"].model_copy(update={"kinds": {name: changed}}), **layout, dp=16), framework)
