"""Flags of Megatron-LM for published architectures, their legality, and what is refused instead of bent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from paraplan.optimizer.exporters.megatron_lm import environment, flags
from paraplan.optimizer.result import Plan
from paraplan.search_spaces.errors import Infeasible
from paraplan.search_spaces.layout import Chunk, Stage
from paraplan.search_spaces.model import (
    Attention,
    CompressedAttention,
    DenseMlp,
    LayerKind,
    LinearAttention,
    Mamba2,
    ModelSpec,
    MoeMlp,
)

MakePlan = Callable[..., Plan]
Options = dict[str, tuple[str, ...]]

DEEPSEEK = {"tp": 2, "pp": 16, "dp": 64, "ep": 64, "num_microbatches": 32, "counts": (4,) * 15 + (2,)}
LLAMA = {"tp": 8, "pp": 4, "dp": 4}


def options(plan: Plan, version: str | None = "0.16") -> Options:
    found = flags(plan, version)
    names = [flag[0] for flag in found]
    assert len(names) == len(set(names)), "no option is given twice"
    return {name: tuple(values) for name, *values in found}


def test_buckets_of_gradients_go_with_their_overlap(make_plan: MakePlan) -> None:
    bucket = {"gradient_bucket": 80_000_000}
    assert options(make_plan("llama", optimizer_sharding="zero1", stack_changes=bucket, **LLAMA))["--ddp-bucket-size"] == (
        "80000000",
    )
    assert "--ddp-bucket-size" not in options(make_plan("llama", optimizer_sharding="zero1", **LLAMA))
    exposed = make_plan("llama", optimizer_sharding="zero1", stack_changes=bucket, overlap={"dp_gradients": 0.0}, **LLAMA)
    assert "--ddp-bucket-size" not in options(exposed)


def test_deepseek(make_plan: MakePlan) -> None:
    found = options(make_plan("deepseek", cluster="hgx-h800", recompute="selective:mla_up_proj+layernorm", **DEEPSEEK))
    expected: Options = {
        "--num-layers": ("61",),
        "--hidden-size": ("7168",),
        "--ffn-hidden-size": ("18432",),
        "--multi-latent-attention": (),
        "--q-lora-rank": ("1536",),
        "--kv-lora-rank": ("512",),
        "--qk-head-dim": ("128",),
        "--qk-pos-emb-head-dim": ("64",),
        "--v-head-dim": ("128",),
        "--qk-layernorm": (),
        "--normalization": ("RMSNorm",),
        "--swiglu": (),
        "--disable-bias-linear": (),
        "--untie-embeddings-and-output-weights": (),
        "--padded-vocab-size": ("129280",),
        "--num-experts": ("256",),
        "--moe-router-topk": ("8",),
        "--moe-ffn-hidden-size": ("2048",),
        "--moe-shared-expert-intermediate-size": ("2048",),
        "--moe-layer-freq": ("([0]*3+[1]*58)",),
        "--moe-router-score-function": ("sigmoid",),
        "--moe-router-enable-expert-bias": (),
        "--moe-router-num-groups": ("8",),
        "--moe-router-group-topk": ("4",),
        "--moe-router-topk-scaling-factor": ("2.5",),
        "--moe-token-dispatcher-type": ("alltoall",),
        "--mtp-num-layers": ("1",),
        "--tensor-model-parallel-size": ("2",),
        "--pipeline-model-parallel-size": ("16",),
        "--expert-model-parallel-size": ("64",),
        "--expert-tensor-parallel-size": ("1",),
        "--sequence-parallel": (),
        "--pipeline-model-parallel-layout": ("Etttt|(tttt|)*14tmL",),
        "--micro-batch-size": ("1",),
        "--global-batch-size": ("2048",),
        "--use-distributed-optimizer": (),
        "--overlap-grad-reduce": (),
        "--overlap-param-gather": (),
        "--recompute-granularity": ("selective",),
        "--recompute-modules": ("layernorm", "mla_up_proj"),
        "--bf16": (),
    }
    assert {name: found.get(name) for name in expected} == expected
    assert "--group-query-attention" not in found
    assert "--num-virtual-stages-per-pipeline-rank" not in found


def test_llama(make_plan: MakePlan) -> None:
    plan = make_plan(
        "llama", cp=2, vpp=5, schedule="interleaved", num_microbatches=16, counts=(4,) * 20, recompute="full:block:2", **LLAMA
    )
    found = options(plan)
    assert found["--num-query-groups"] == ("8",)
    assert found["--num-virtual-stages-per-pipeline-rank"] == ("5",)
    assert "--pipeline-model-parallel-layout" not in found, "an even split needs no layout string"
    assert found["--cp-comm-type"] == ("p2p",)
    assert (found["--recompute-method"], found["--recompute-num-layers"]) == (("block",), ("2",))
    assert found["--expert-tensor-parallel-size"] == ("1",), "always written: left out it becomes TP"
    assert not any(name.startswith("--moe") for name in found)


def test_gpt(make_plan: MakePlan) -> None:
    found = options(make_plan("gpt", tp=8, pp=8, dp=4, counts=(12,) * 8, seq_len=2048))
    assert found["--position-embedding-type"] == ("learned_absolute",)
    assert found["--normalization"] == ("LayerNorm",)
    absent = {"--disable-bias-linear", "--swiglu", "--untie-embeddings-and-output-weights", "--qk-layernorm"}
    assert not (absent | {"--group-query-attention"}) & found.keys()


def test_gpt_oss_mixes_windows_sinks_and_biases(make_plan: MakePlan) -> None:
    found = options(make_plan("gpt-oss", dp=64, ep=8))
    assert found["--window-size"] == ("(127,0)",)
    assert found["--window-attn-skip-freq"] == ("([1]*1+[0]*1)*18",)
    assert found["--softmax-type"] == ("learnable",)
    assert "--disable-bias-linear" not in found
    assert "--swiglu" not in found and {"--quick-geglu", "--activation-func-clamp-value", "--glu-linear-offset"} <= found.keys()
    assert (found["--activation-func-clamp-value"], found["--glu-linear-offset"]) == (("7.0",), ("1.0",))
    with pytest.raises(Infeasible, match=r"came with 0\.15"):
        flags(make_plan("gpt-oss", dp=64, ep=8), "0.14")


def test_gates_are_clamped_where_the_model_says(make_plan: MakePlan, models: dict[str, ModelSpec]) -> None:
    """A model file of before the limit was kept in it says only that they are: then the limit is asked for, not guessed."""
    for limit in (10.0, None):
        changed = {"clamp_limit": limit}
        kinds = {n: k.model_copy(update={"mlp": k.mlp.model_copy(update=changed)}) for n, k in models["gpt-oss"].kinds.items()}
        plan = make_plan(models["gpt-oss"].model_copy(update={"kinds": kinds}), dp=64, ep=8)
        if limit:
            assert options(plan)["--activation-func-clamp-value"] == ("10.0",)
        else:
            with pytest.raises(Infeasible, match="clamp_limit"):
                options(plan)


def test_linear_attention_of_qwen3_next(make_plan: MakePlan) -> None:
    moe = MoeMlp(experts=512, top_k=10, width=512, shared_width=512, shared_gate=True)
    linear = LinearAttention(
        kind="gated_delta_net", key_heads=16, value_heads=32, key_head_dim=128, value_head_dim=128, conv_kernel=4
    )
    model = ModelSpec(
        name="qwen3-next",
        hidden_size=2048,
        vocab_size=151936,
        max_position_embeddings=262144,
        kinds={
            "linear": LayerKind(mixer=linear, mlp=moe),
            "full": LayerKind(mixer=Attention(heads=16, kv_heads=2, head_dim=256, qk_norm="head", output_gate=True), mlp=moe),
        },
        layers=("12*(linear linear linear full)",),
    )
    found = options(make_plan(model, dp=64, ep=16))
    assert found["--experimental-attention-variant"] == ("gated_delta_net",)
    assert found["--linear-attention-freq"] == ("([1]*3+[0]*1)*12",)
    assert {"--attention-output-gate", "--moe-shared-expert-gate"} <= found.keys()
    with pytest.raises(Infeasible, match=r"0\.12"):
        flags(make_plan(model, dp=64, ep=16), "0.12")


def test_sparse_attention(make_plan: MakePlan, models: dict[str, ModelSpec]) -> None:
    kinds = {
        name: LayerKind(
            mixer=kind.mixer.model_copy(update={"indexer_heads": 64, "indexer_head_dim": 128, "indexer_topk": 2048}), mlp=kind.mlp
        )
        for name, kind in models["deepseek"].kinds.items()
        if kind.mixer
    }
    model = models["deepseek"].model_copy(update={"kinds": kinds})
    found = options(make_plan(model, **DEEPSEEK))
    assert found["--experimental-attention-variant"] == ("dsa",)
    assert found["--dsa-indexer-topk"] == ("2048",)
    assert "--no-rope-fusion" in found, "DSA refuses the fused kernel"
    with_cp = make_plan(model, **{**DEEPSEEK, "dp": 32, "cp": 2, "cp_type": "allgather"})
    assert options(with_cp, "0.19")["--cp-comm-type"] == ("all_gather",)
    with pytest.raises(Infeasible, match="sparse attention with cp 2"):
        flags(with_cp, "0.16")


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 1, "dp": 64},
    {"tp": 1, "pp": 4, "dp": 16, "counts": (20,) * 4},
    {"tp": 8, "pp": 4, "dp": 4, "counts": (19, 21, 21, 19)},
    {"tp": 8, "pp": 2, "dp": 4, "rank_order": "tp-cp-ep-pp-dp"},
    {"tp": 4, "cp": 4, "dp": 4, "cp_type": "a2a+p2p"},
    {"tp": 8, "dp": 8, "optimizer_sharding": "zero3"},
    {"tp": 8, "dp": 8, "optimizer_sharding": "none", "sequence_parallel": False},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_flags_keep_the_framework_s_rules(make_plan: MakePlan, layout: dict[str, Any]) -> None:
    """C003, C014, C040, C051, C062, C100, C106, C108 of the rule catalogue."""
    plan = make_plan("llama", **layout)
    found, env = options(plan), environment(plan)
    assert "--expert-tensor-parallel-size" in found
    assert ("--sequence-parallel" in found) <= (int(found["--tensor-model-parallel-size"][0]) > 1)
    assert len({"--pipeline-model-parallel-layout", "--num-virtual-stages-per-pipeline-rank"} & found.keys()) <= 1
    assert not {"--pipeline-model-parallel-layout", "--decoder-first-pipeline-num-layers"} <= found.keys()
    if "--overlap-param-gather" in found:
        assert {"--use-distributed-optimizer", "--overlap-grad-reduce"} <= found.keys()
    if found.get("--cp-comm-type") == ("a2a+p2p",):
        inner, outer = map(int, found["--hierarchical-context-parallel-sizes"])
        assert inner * outer == plan.plan.layout.cp and 8 // plan.plan.layout.tp % inner == 0
    if "--use-megatron-fsdp" in found:
        assert found["--ckpt-format"] == ("fsdp_dtensor",) and env == {"CUDA_DEVICE_MAX_CONNECTIONS": None}
    elif plan.plan.layout.tp * plan.plan.layout.cp > 1:
        assert env == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_blackwell_needs_no_single_queue(make_plan: MakePlan) -> None:
    assert environment(make_plan("llama", cluster="gb200-nvl72", tp=4, dp=16)) == {}


def test_order_with_pipelines_inside_replicas_keeps_both_grids_alike(make_plan: MakePlan) -> None:
    found = options(make_plan("llama", tp=4, cp=2, pp=2, dp=4, rank_order="tp-cp-ep-pp-dp"))
    assert "--use-tp-pp-dp-mapping" in found
    assert found["--expert-tensor-parallel-size"] == ("8",), "no experts here: ETP·EP = TP·CP makes the pipelines equal"


def test_first_and_last_stage_before_layout_strings(make_plan: MakePlan) -> None:
    found = options(make_plan("llama", counts=(19, 21, 21, 19), **LLAMA), "0.12")
    assert (found["--decoder-first-pipeline-num-layers"], found["--decoder-last-pipeline-num-layers"]) == (("19",), ("19",))
    with pytest.raises(Infeasible, match=r"19, 22, 20, 19 layers are not so; megatron-lm 0\.13 has layout strings"):
        flags(make_plan("llama", counts=(19, 22, 20, 19), **LLAMA), "0.12")


def test_hybrid_sharding(make_plan: MakePlan) -> None:
    found = options(make_plan("llama", dp=64, optimizer_sharding="hsdp:8"))
    assert found["--num-distributed-optimizer-instances"] == ("8",)
    assert found["--data-parallel-sharding-strategy"] == ("optim_grads_params",)
    with pytest.raises(Infeasible, match="3 does not divide dp·cp = 64"):
        flags(make_plan("llama", dp=64, optimizer_sharding="hsdp:3"))


def test_offload(make_plan: MakePlan) -> None:
    found = options(make_plan("llama", tp=8, dp=8, offload="optimizer:0.5"))
    assert found["--optimizer-offload-fraction"] == ("0.5",)
    assert {"--optimizer-cpu-offload", "--use-precision-aware-optimizer"} <= found.keys()
    assert options(make_plan("llama", tp=8, dp=8, offload="activations:0.5"))["--cpu-offloading-num-layers"] == ("40",)


@pytest.mark.parametrize(
    ("precision", "cluster", "version", "expected"),
    [
        ("fp16", "hgx-a100", "0.16", {"--fp16": ()}),
        ("fp8", "hgx-h100", "0.16", {"--bf16": (), "--fp8-format": ("e4m3",), "--fp8-recipe": ("blockwise",)}),
        ("fp8", "hgx-h100", "0.12", {"--bf16": (), "--fp8-format": ("hybrid",), "--fp8-recipe": ("tensorwise",)}),
        ("fp8", "gb200-nvl72", "0.16", {"--bf16": (), "--fp8-format": ("e4m3",), "--fp8-recipe": ("mxfp8",)}),
        ("fp4", "gb200-nvl72", "0.16", {"--bf16": (), "--fp4-format": ("e2m1",)}),
    ],
)
def test_precision(make_plan: MakePlan, precision: str, cluster: str, version: str, expected: Options) -> None:
    found = options(make_plan("llama", cluster=cluster, tp=4, dp=16, precision=precision), version)
    names = {"--bf16", "--fp16", "--fp8-format", "--fp8-recipe", "--fp4-format"}
    assert {name: found[name] for name in names & found.keys()} == expected


def test_optimizer_state_and_gradient_types_follow_the_stack(make_plan: MakePlan) -> None:
    changes = {"optimizer_bytes": 8.0, "gradient_bytes": 2}
    found = options(make_plan("llama", tp=8, dp=8, stack_changes=changes))
    assert found["--exp-avg-dtype"] == ("bf16",) and "--grad-reduce-in-bf16" in found
    with pytest.raises(Infeasible, match="10 bytes of optimizer state"):
        flags(make_plan("llama", tp=8, dp=8, stack_changes={"optimizer_bytes": 10.0}))


def test_tp_overlap_is_said_where_the_plan_counts_on_it(make_plan: MakePlan) -> None:
    """It needs sequence parallelism, as Megatron's own check says."""
    for tp, share, said in ((4, 0.6, True), (4, 0.0, False), (1, 0.6, False)):
        found = options(make_plan("qwen", tp=tp, pp=2, dp=64 // tp, ep=16, counts=(47, 47), overlap={"tp": share}))
        assert ("--tp-comm-overlap" in found) == said
        assert not said or "--sequence-parallel" in found


def test_ep_overlap_only_where_megatron_allows_it(make_plan: MakePlan) -> None:
    overlap = {"overlap": {"ep": 0.6}}
    interleaved = make_plan(
        "qwen", tp=4, pp=2, dp=16, ep=32, vpp=47, schedule="interleaved", num_microbatches=8, counts=(1,) * 94, **overlap
    )
    assert "--overlap-moe-expert-parallel-comm" in options(interleaved)
    plain = make_plan("qwen", tp=4, pp=2, dp=16, ep=32, counts=(47, 47), **overlap)
    assert "--overlap-moe-expert-parallel-comm" not in options(plain)


# --- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        ("llama", {"tp": 8, "dp": 8, "schedule": "dualpipev", "vpp": 2}, "schedule dualpipev"),
        ("llama", {"tp": 8, "dp": 8, "pp": 4, "schedule": "zb-h1"}, "schedule zb-h1"),
        (
            "llama",
            {"tp": 8, "pp": 4, "dp": 4, "vpp": 5, "schedule": "interleaved", "num_microbatches": 3},
            "as many micro-batches as pp 4",
        ),
        ("llama", {"tp": 8, "pp": 3, "dp": 8}, "80 layers over pp·vpp = 3 chunks"),
        ("llama", {"tp": 3, "dp": 8}, "3 does not divide 64 heads"),
        ("llama", {"tp": 8, "dp": 8, "ep": 2, "edp": 32}, "on a model without experts"),
        ("llama", {"tp": 8, "dp": 8, "edp": 1}, "etp·ep·edp·pp is 1, tp·cp·pp·dp is 64"),
        ("llama", {"tp": 8, "pp": 2, "dp": 4, "offload": "activations:0.5"}, "with pp 1 and no recompute"),
        ("llama", {"tp": 1, "dp": 64, "optimizer_sharding": "none", "offload": "optimizer:1"}, "needs optimizer_sharding zero1"),
        ("qwen", {"tp": 4, "dp": 16, "ep": 16, "sequence_parallel": False}, "needs sequence_parallel"),
        ("qwen", {"tp": 4, "dp": 12, "ep": 48}, "48 does not divide 128 experts"),
        ("gpt-oss", {"tp": 2, "dp": 32, "ep": 8, "etp": 2}, "biases need etp 1"),
        ("llama", {"tp": 8, "cp": 2, "dp": 4, "cp_type": "a2a+p2p"}, "no part of cp 2"),
        ("llama", {"tp": 8, "pp": 2, "dp": 4, "rank_order": "tp-cp-ep-pp-dp", "optimizer_sharding": "zero3"}, "does not go with"),
    ],
)
def test_what_the_layout_asks_too_much(make_plan: MakePlan, model: str, layout: dict[str, Any], words: str) -> None:
    with pytest.raises(Infeasible, match=words):
        flags(make_plan(model, **layout))


def test_kv_heads_below_tp_depend_on_the_version(make_plan: MakePlan) -> None:
    plan = make_plan("llama", tp=16, dp=4)
    with pytest.raises(Infeasible, match="tp 16 does not divide 8 KV heads"):
        flags(plan, "0.15")
    assert options(plan)["--tensor-model-parallel-size"] == ("16",)


def test_mtp_and_cp_depend_on_the_version(make_plan: MakePlan) -> None:
    plan = make_plan("deepseek", cp=2, dp=8, ep=8)
    with pytest.raises(Infeasible, match=r"MTP layers with cp 2: it trains them so from 0\.14 on"):
        flags(plan, "0.13")
    assert options(plan, "0.14")["--mtp-num-layers"] == ("1",)


def test_all_problems_are_said_at_once(make_plan: MakePlan) -> None:
    with pytest.raises(Infeasible) as caught:
        flags(make_plan("llama", cluster="atlas-800t-a2", tp=8, dp=8, schedule="gpipe"))
    assert len(caught.value.reasons) == 2
    assert all(reason in str(caught.value) for reason in caught.value.reasons)


def test_gpu_framework_on_ascend(make_plan: MakePlan) -> None:
    with pytest.raises(Infeasible, match="runs on GPUs"):
        flags(make_plan("llama", cluster="cloudmatrix-384", tp=8, dp=8))


ATTENTION = Attention(heads=32, kv_heads=8, head_dim=128)
MLP = DenseMlp(width=14336)
MOE = MoeMlp(experts=8, top_k=2, width=4096, normalized_top_k=False)
STRANGE: list[tuple[dict[str, LayerKind], str]] = [
    (
        {
            "a": LayerKind(
                mixer=CompressedAttention(
                    heads=64, head_dim=512, rope_head_dim=64, q_lora_rank=1024, o_lora_rank=1024, o_groups=8, window=128
                ),
                mlp=MLP,
            )
        },
        "use compressed attention",
    ),
    (
        {"a": LayerKind(mixer=Mamba2(heads=64, head_dim=64, state_size=128, groups=8, conv_kernel=4)), "b": LayerKind(mlp=MLP)},
        "have no feed-forward part",
    ),
    ({"a": LayerKind(mixer=ATTENTION, mlp=MLP), "b": LayerKind(mixer=ATTENTION, mlp=DenseMlp(width=4096))}, "2 sizes of dense MLP"),
    ({"a": LayerKind(mixer=ATTENTION, mlp=MLP, norms=4)}, "4 norms where Megatron builds 2"),
    ({"a": LayerKind(mixer=ATTENTION.model_copy(update={"out_bias": True}), mlp=MLP)}, "biases are neither"),
    ({"a": LayerKind(mixer=ATTENTION.model_copy(update={"qk_norm": "width"}), mlp=MLP)}, "whole projection"),
    ({"a": LayerKind(mixer=ATTENTION, mlp=MLP, extra_parameters=7)}, "7 weights that no part"),
    ({"a": LayerKind(mixer=ATTENTION, mlp=MOE.model_copy(update={"score_function": "sigmoid"}))}, "sigmoids as they are"),
    ({"a": LayerKind(mixer=ATTENTION, mlp=MOE.model_copy(update={"top_k": 1, "normalized_top_k": True}))}, "say normalized_top_k"),
    (
        {
            "a": LayerKind(mixer=ATTENTION.model_copy(update={"window": 128}), mlp=MLP),
            "b": LayerKind(mixer=ATTENTION.model_copy(update={"window": 512}), mlp=MLP),
        },
        "windows of several sizes",
    ),
]


@pytest.mark.parametrize(("kinds", "words"), STRANGE, ids=[words for _, words in STRANGE])
def test_models_that_megatron_does_not_build(make_plan: MakePlan, kinds: dict[str, LayerKind], words: str) -> None:
    model = ModelSpec(
        name="strange", hidden_size=4096, vocab_size=32000, max_position_embeddings=8192, kinds=kinds, layers=tuple(kinds) * 4
    )
    with pytest.raises(Infeasible, match=words):
        flags(make_plan(model, tp=8, dp=8))


# --- recompute that differs between stages -----------------------------------------------------------------------------------


def with_recompute(plan: Plan, depths: tuple[str, ...]) -> Plan:
    layout = plan.plan.layout
    stages = tuple(
        Stage(stage=stage.stage, chunks=tuple(Chunk(**{**dict(chunk), "recompute": depth}) for chunk in stage.chunks))
        for stage, depth in zip(layout.stages, depths, strict=True)
    )
    priced = plan.plan.model_copy(update={"layout": layout.model_copy(update={"stages": stages})})
    return plan.model_copy(update={"plan": priced})


def test_one_depth_may_serve_stages_of_different_length(make_plan: MakePlan) -> None:
    plan = make_plan("llama", counts=(19, 22, 22, 17), **LLAMA)
    found = options(with_recompute(plan, ("full:block:19", "full:block:20", "full:block:20", "full")))
    assert (found["--recompute-method"], found["--recompute-num-layers"]) == (("block",), ("20",))


@pytest.mark.parametrize("depths", [("full:block:9", "full:block:3", "none", "none"), ("selective:mlp", "none", "none", "none")])
def test_recompute_by_stage_is_refused(make_plan: MakePlan, depths: tuple[str, ...]) -> None:
    with pytest.raises(Infeasible, match="recompute differs between stages"):
        flags(with_recompute(make_plan("llama", counts=(20,) * 4, **LLAMA), depths))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": (1, 19)}, "stages list 79 layers; they must be the 80"),
        ({"layers": (20, 39)}, "in order"),
        ({"embedding": False}, "embedding belongs to the first chunk"),
        ({"mtp": 1}, "stages list 1 MTP layers; llama-3.1-70b has 0"),
        ({"loss": True}, "loss belongs to the last chunk"),
    ],
)
def test_stages_that_are_not_the_model_are_refused(make_plan: MakePlan, change: dict[str, Any], words: str) -> None:
    plan = make_plan("llama", counts=(20,) * 4, **LLAMA)
    first, *others = plan.plan.layout.stages
    changed = Stage(stage=0, chunks=(Chunk(**{**dict(first.chunks[0]), **change}),))
    layout = plan.plan.layout.model_copy(update={"stages": (changed, *others)})
    with pytest.raises(Infeasible, match=words):
        flags(plan.model_copy(update={"plan": plan.plan.model_copy(update={"layout": layout})}))


def test_stages_with_different_numbers_of_chunks_are_refused(make_plan: MakePlan) -> None:
    plan = make_plan("llama", counts=(20,) * 4, **LLAMA)
    first, *others = plan.plan.layout.stages
    layout = plan.plan.layout.model_copy(update={"stages": (Stage(stage=0, chunks=first.chunks * 2), *others)})
    with pytest.raises(Infeasible, match="every stage must hold the same number"):
        flags(plan.model_copy(update={"plan": plan.plan.model_copy(update={"layout": layout})}))


def test_full_recompute_reaches_every_layer(make_plan: MakePlan) -> None:
    found = options(make_plan("llama", counts=(20,) * 4, recompute="full", **LLAMA))
    assert (found["--recompute-method"], found["--recompute-num-layers"]) == (("uniform",), ("1",))
