"""Options of Megatron-LM that contradict each other: it stops on each of these, and starts on what stands beside it.

Read off validate_args of megatron/training/arguments.py and the checks of TransformerConfig and OptimizerConfig.
"""

from __future__ import annotations

import pytest
from paraplan.optimizer.checking.checked import Checked
from paraplan.optimizer.checking.checker import check
from paraplan.optimizer.readers import read_text

DENSE = "--bf16 --num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 4096 --use-distributed-optimizer"
MOE = f"{DENSE} --num-experts 8 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
ALLGATHER = MOE.replace("alltoall", "allgather")
TP_OVERLAP = "--tp-comm-overlap --sequence-parallel"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LEARNED = f"{DENSE} --position-embedding-type learned_absolute"
ACT = "--recompute-granularity selective --recompute-modules moe_act"
STAGES = f"{DENSE} --pipeline-model-parallel-size 2"
LAYOUT = "--pipeline-model-parallel-layout 'Et*4|t*4L'"
BIASED = "--moe-router-enable-expert-bias"
SHARED = f"{MOE} --moe-shared-expert-intermediate-size 512 {ACT.replace('moe_act', 'shared_experts')}"
MLA = f"{DENSE} --multi-latent-attention"
CP = f"{DENSE} --context-parallel-size 2 --cp-comm-type"
PADDED = f"{MOE} --moe-pad-expert-input-to-capacity"
TORCH_FSDP = (
    f"{DENSE.removesuffix('--use-distributed-optimizer')} --use-torch-fsdp2 --untie-embeddings-and-output-weights "
    "--no-gradient-accumulation-fusion"
)


def judged(line: str, framework: str = "megatron-lm") -> Checked:
    return check(read_text(f"torchrun pretrain_gpt.py {line}", "job.sh", form=framework), best=False)


def rules(line: str, framework: str = "megatron-lm") -> list[str]:
    return [each.rule for each in judged(line, framework).broken]


@pytest.mark.parametrize(
    ("rule", "wrong", "right"),
    [
        ("C101", f"{DENSE} {ACT.replace('moe_act', 'core_atn')}", f"{DENSE} {ACT.replace('moe_act', 'core_attn')}"),
        ("C083", f"{MOE} {BIASED}", f"{MOE} {BIASED} --moe-router-score-function sigmoid"),
        ("C101", f"{SHARED} --moe-shared-expert-overlap", SHARED),
        ("C022", f"{MOE} --moe-shared-expert-intermediate-size 0", MOE),
        ("C100e", f"{STAGES} {FULL.replace('layers 1', 'layers 3')}", f"{STAGES} {FULL.replace('layers 1', 'layers 2')}"),
        ("C043", f"{DENSE} --max-position-embeddings 2048", f"{DENSE} --max-position-embeddings 4096"),
        ("C024", f"{DENSE.replace('-heads 8', '-heads 6')}", f"{DENSE.replace('-heads 8', '-heads 6')} --kv-channels 128"),
        ("C021", f"{DENSE} --group-query-attention --num-query-groups 3", f"{DENSE} --num-query-groups 3"),
        ("C082", f"{MOE} --moe-router-topk 9", f"{MOE} --moe-router-topk 8"),
        ("C082", f"{DENSE} --num-experts 1", f"{DENSE} --num-experts 1 --moe-router-topk 1"),
        ("C082", f"{MOE} --moe-router-num-groups 3 --moe-router-group-topk 1", f"{MOE} --moe-router-num-groups 3"),
        (
            "C082",
            f"{MOE} --moe-router-num-groups 4 --moe-router-group-topk 5",
            f"{MOE} --moe-router-num-groups 4 --moe-router-group-topk 4",
        ),
        ("C068", f"{LEARNED} --mtp-num-layers 1", f"{LEARNED} --mtp-num-layers 1 --use-rotary-position-embeddings"),
        ("C121", f"{DENSE} --fp8-param-gather", f"{DENSE} --fp8-param-gather --fp8-format hybrid"),
        (
            "C121",
            f"{DENSE.replace('--use-distributed-optimizer', '')} --fp8-param-gather --fp8-format hybrid",
            f"{TORCH_FSDP} --fp8-param-gather",
        ),
        ("C121", f"{DENSE} --fp8-format hybrid --fp4-format e2m1", f"{DENSE} --fp4-format e2m1"),
        ("C130", f"{DENSE} {TP_OVERLAP}", f"{DENSE} {TP_OVERLAP} --tensor-model-parallel-size 2"),
        ("C083", f"{ALLGATHER} --moe-shared-expert-overlap", f"{MOE} --moe-shared-expert-overlap"),
        ("C083", f"{MOE} --moe-enable-deepep", f"{MOE.replace('alltoall', 'flex')} --moe-enable-deepep"),
        ("C123", f"{DENSE} --exp-avg-dtype bf16", f"{DENSE} --exp-avg-dtype bf16 --use-precision-aware-optimizer"),
        ("C101", f"{MOE} {ACT}", f"{MOE} {ACT} --moe-grouped-gemm"),
        ("C108", f"{DENSE} --use-megatron-fsdp", f"{DENSE} --use-megatron-fsdp --ckpt-format fsdp_dtensor"),
        ("C063", f"{STAGES} {LAYOUT} --decoder-first-pipeline-num-layers 4", f"{STAGES} --decoder-first-pipeline-num-layers 4"),
        ("C063", f"{STAGES} {LAYOUT} --decoder-last-pipeline-num-layers 4", f"{STAGES} {LAYOUT}"),
        ("C063", f"{STAGES} {LAYOUT} --account-for-embedding-in-pipeline-split", f"{STAGES} {LAYOUT}"),
        ("C063", f"{STAGES} {LAYOUT} --account-for-loss-in-pipeline-split", f"{STAGES} {LAYOUT}"),
        (
            "C062",
            f"{STAGES} --decoder-first-pipeline-num-layers 4 --account-for-loss-in-pipeline-split",
            f"{STAGES} --decoder-first-pipeline-num-layers 4",
        ),
        ("C044d", f"{CP} p2p --window-size '(127,0)'", f"{CP} p2p --window-size '(-1,0)'"),
        ("C044d", f"{CP} p2p --window-size '(127,0)'", f"{CP} all_gather --window-size '(127,0)'"),
        ("C044e", f"{CP} all_gather --softmax-type learnable", f"{CP} a2a --softmax-type learnable"),
        ("C044e", f"{CP} p2p --softmax-type off-by-one", f"{CP} p2p --softmax-type vanilla"),
        ("C046", f"{CP} p2p a2a", f"{CP} p2p p2p p2p a2a a2a a2a a2a a2a"),
        ("C046", f"{CP} p2p a2a", f"{CP.replace('size 2', 'size 1')} p2p a2a"),
        ("C086", f"{MOE} --moe-layer-freq '([0]*1+[1]*8)'", f"{MOE} --moe-layer-freq '([0]*1+[1]*7)'"),
        ("C021", f"{MLA} --group-query-attention", f"{MLA} --num-query-groups 8"),
        ("C025", f"{MLA} --rotary-interleaved", f"{DENSE} --rotary-interleaved"),
        ("C083", PADDED, f"{PADDED} --moe-expert-capacity-factor 1.0"),
        ("C107", f"{TORCH_FSDP} --pipeline-model-parallel-size 2", TORCH_FSDP),
        ("C107", f"{TORCH_FSDP} --use-distributed-optimizer", TORCH_FSDP),
        ("C107", TORCH_FSDP.replace("--untie-embeddings-and-output-weights", ""), TORCH_FSDP),
        ("C103", f"{DENSE} --cpu-offloading-num-layers 2 {FULL}", f"{DENSE} --cpu-offloading-num-layers 0 {FULL}"),
        (
            "C102",
            f"{DENSE} --distribute-saved-activations {FULL}",
            f"{DENSE} --distribute-saved-activations {FULL} --tensor-model-parallel-size 2",
        ),
        (
            "C064",
            f"{DENSE} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
            f"{DENSE} --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
        ),
    ],
)
def test_what_contradicts_is_refused(rule: str, wrong: str, right: str) -> None:
    assert rule in rules(wrong)
    assert rule not in rules(right)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ((" --expert-model-parallel-size 2", ""), "needs ep > 1"),
        (("alltoall", "allgather"), "not allgather"),
        (("--bf16", "--bf16 --pipeline-model-parallel-size 2"), "needs chunks of stages"),
        (("--bf16", f"--bf16 {FULL}"), "full recompute"),
        (("--bf16", "--bf16 --moe-shared-expert-overlap"), "--moe-shared-expert-overlap"),
        (("--bf16", "--bf16 --mtp-num-layers 2"), "more than one MTP layer"),
    ],
)
def test_paired_passes_ask_much_of_a_job(changed: tuple[str, str], words: str) -> None:
    line = f"{MOE} --overlap-moe-expert-parallel-comm"
    assert "C084" not in rules(line)
    found = [each.sentence for each in judged(line.replace(*changed)).broken if each.rule == "C084"]
    assert len(found) == 1 and words in found[0]


def test_hybrid_cp_is_told_how_wide_its_levels_are() -> None:
    line = f"{DENSE} --context-parallel-size 4 --cp-comm-type a2a+p2p"
    (missing,) = judged(line).broken
    assert missing.rule == "C045" and "--hierarchical-context-parallel-sizes" in missing.sentence
    (wrong,) = judged(f"{line} --hierarchical-context-parallel-sizes 2 4").broken
    assert wrong.rule == "C045" and "multiply to 8, CP's size is 4" in wrong.sentence and "Megatron-LM" in wrong.source
    assert not rules(f"{line} --hierarchical-context-parallel-sizes 2 2")


@pytest.mark.parametrize(("line", "rule"), [(f"{MOE} {BIASED}", "C083"), (f"{DENSE} {TP_OVERLAP}", "C130")])
def test_mindspeed_takes_what_megatron_refuses(line: str, rule: str) -> None:
    """A bias beside softmax (features_manager/moe/moe_router.py); MC2 without TP, which is off unless its code is changed."""
    assert rule in rules(line)
    assert rule not in rules(line.replace("--tp-comm-overlap", "--use-ascend-mc2"), "mindspeed-llm")


@pytest.mark.parametrize(
    ("option", "refused"),
    [
        ("--overlap-grad-reduce", True),
        ("--num-layers-per-virtual-pipeline-stage 2", True),
        ("--swap-attention", True),
        ("--overlap-p2p-communication", False),
    ],
)
def test_dualpipev_excludes_what_it_schedules_itself(option: str, refused: bool) -> None:
    """validate_args of MindSpeed's dualpipev_feature.py."""
    line = f"{STAGES} --untie-embeddings-and-output-weights {option}"
    assert ("C074" in rules(f"{line} --schedules-method dualpipev", "mindspeed-llm")) == refused
    assert "C074" not in rules(line, "mindspeed-llm")


@pytest.mark.parametrize(("connections", "refused"), [("1", True), ("8", False)])
@pytest.mark.parametrize("ahead", ["export CUDA_DEVICE_MAX_CONNECTIONS={}\n", "CUDA_DEVICE_MAX_CONNECTIONS={} "])
def test_fsdp_refuses_a_single_queue(ahead: str, connections: str, refused: bool) -> None:
    """validate_args asserts that the variable is not 1, for Megatron's FSDP and PyTorch's."""
    for options in (f"{DENSE} --use-megatron-fsdp --ckpt-format fsdp_dtensor", TORCH_FSDP, DENSE):
        text = f"{ahead.format(connections)}torchrun pretrain_gpt.py {options}"
        found = check(read_text(text, "job.sh", form="megatron-lm"), best=False).broken
        assert ("C108" in [each.rule for each in found]) == (refused and options != DENSE)


@pytest.mark.parametrize(
    ("options", "device", "rules_broken", "words"),
    [
        ("--fp8-format hybrid --fp8-recipe mxfp8", "hgx-h100", ["C122"], "needs Blackwell or later"),
        ("--fp8-format hybrid --fp8-recipe mxfp8", "hgx-b200", [], ""),
        ("--fp8-format hybrid --fp8-recipe blockwise", "hgx-h100", [], ""),
        ("--fp4-format e2m1", "hgx-h100", ["C122"], "fp4 does not run on h100-80gb-sxm, which has bf16, fp16, fp8"),
    ],
)
def test_gemms_are_in_a_format_that_the_device_has(options: str, device: str, rules_broken: list[str], words: str) -> None:
    """Transformer Engine's check_mxfp8_support asks for compute capability 10.0; the rest of the job is judged all the same."""
    text = f"torchrun --nproc-per-node 8 pretrain_gpt.py {DENSE} {options} --global-batch-size 8 --micro-batch-size 1"
    found = check(read_text(text, "job.sh", form="megatron-lm"), "qwen3-0.6b", device, best=False)
    assert [each.rule for each in found.broken] == rules_broken
    assert all(words in each.sentence for each in found.broken)


@pytest.mark.parametrize(
    ("framework", "option", "named"),
    [
        ("megatron-lm", "--cp-comm-type", "--cp-comm-type ring is not one of p2p, all_gather, a2a"),
        ("mindspeed-llm", "--context-parallel-algo", "ring is not one of megatron_cp_algo, kvallgather_cp_algo, ulysses_cp_algo"),
    ],
)
def test_a_kind_of_cp_that_there_is_not_is_named(framework: str, option: str, named: str) -> None:
    """The rest of the job is judged; without CP nothing asks for the kind, and it is only told."""
    (found,) = judged(f"{DENSE} {option} ring --context-parallel-size 2", framework).broken
    assert found.rule == "C046" and named in found.sentence
    alone = judged(f"{DENSE} {option} ring", framework)
    assert not alone.broken and any(named in said for said in alone.advice)


def test_recompute_activations_is_selective_whatever_else_is_given() -> None:
    """It overwrites the granularity, so that a method beside it is refused."""
    found = judged(f"{DENSE} --recompute-activations {FULL}")
    assert [each.rule for each in found.broken] == ["C100"] and "selective recompute takes no" in found.broken[0].sentence
    assert judged(f"{DENSE} --recompute-activations --recompute-granularity full").given["recompute"] == "selective:core_attn"


def test_a_bf16_job_gathers_two_bytes_of_a_weight() -> None:
    for more, expected in (("", None), ("--fp8-format hybrid", 1)):
        job = read_text(f"torchrun pretrain_gpt.py {DENSE} --fp8-param-gather {more}", "job.sh", form="megatron-lm")
        assert job.stack_changes.get("gathered_weight_bytes") == expected


def test_what_another_file_may_hold_is_no_refusal() -> None:
    found = judged(f"{DENSE} --fp8-param-gather $MORE_ARGS")
    assert not found.broken and any("--fp8-param-gather needs" in said for said in found.advice)


def test_groups_of_queries_without_their_switch_do_nothing() -> None:
    assert any("--num-query-groups 2 does nothing" in said for said in judged(f"{DENSE} --num-query-groups 2").advice)


def test_a_misspelt_option_is_told_which_was_meant() -> None:
    assert judged(f"{DENSE} --sequnce-parallel --tensor-model-paralel-size 2").unknown == (
        "--sequnce-parallel (did you mean --sequence-parallel?)",
        "--tensor-model-paralel-size 2 (did you mean --tensor-model-parallel-size?)",
    )
    assert judged(f"{DENSE} --sequence-paralell").unknown == ("--sequence-paralell (did you mean --sequence-parallel?)",)


def test_chunks_that_rest_on_an_open_number_of_layers_are_told() -> None:
    line = DENSE.replace("--num-layers 8", "--num-layers ${L[$SIZE]} --pipeline-model-parallel-size 2")
    found = judged(f"{line} --num-layers-per-virtual-pipeline-stage 3")
    assert any(each.startswith("--num-layers-per-virtual-pipeline-stage 3") for each in found.unresolved)
    assert not any("virtual" in each for each in judged(line).unresolved)
