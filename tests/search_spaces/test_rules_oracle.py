"""Legal and illegal layouts that people met or that frameworks reject, written by hand and not derived from the rules.

Comments name the public thread that a case comes from; [ran] marks what a framework's own code was made to accept or reject.
"""

from __future__ import annotations

import math

import pytest
from paraplan.search_spaces.inputs import build_problem, load_stack
from paraplan.search_spaces.layer_kinds import Attention, DenseMlp, LatentAttention, LayerKind, LinearAttention, Mamba2, MoeMlp
from paraplan.search_spaces.layout import Layout, Problem, Split
from paraplan.search_spaces.model import ModelSpec, Mtp
from paraplan.search_spaces.rules import violations
from paraplan.search_spaces.stack import Stack

EVEN_ONLY = "nanotron"  # cuts stages evenly
FIRST_LAST = "megatron-lm-0.12"  # even, or with a first and last stage of their own
ANY_CUT = "megatron-lm"  # any layout string


def dense(layers: int = 32, heads: int = 64, kv_heads: int = 64, width: int = 24576, **more: object) -> ModelSpec:
    kind = LayerKind(mixer=Attention(heads=heads, kv_heads=kv_heads, head_dim=128), mlp=DenseMlp(width=width))
    return spec({"dense": kind}, (f"{layers}*dense",), **more)


def moe(layers: int = 48, heads: int = 64, kv_heads: int = 64, experts: int = 128, width: int = 768, **more: object) -> ModelSpec:
    kind = LayerKind(
        mixer=Attention(heads=heads, kv_heads=kv_heads, head_dim=128), mlp=MoeMlp(experts=experts, top_k=8, width=width)
    )
    return spec({"moe": kind}, (f"{layers}*moe",), **more)


def latent(layers: int = 61, heads: int = 128, experts: int = 256, **more: object) -> ModelSpec:
    mixer = LatentAttention(heads=heads, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    kind = LayerKind(mixer=mixer, mlp=MoeMlp(experts=experts, top_k=8, width=2048, shared_width=2048))
    return spec({"moe": kind}, (f"{layers}*moe",), **more)


def spec(kinds: dict[str, LayerKind], layers: tuple[str, ...], **more: object) -> ModelSpec:
    return ModelSpec.model_validate(
        {
            "name": "tiny",
            "hidden_size": 4096,
            "vocab_size": 32000,
            "max_position_embeddings": 131072,
            "kinds": kinds,
            "layers": layers,
            **more,
        }
    )


def on(
    model: ModelSpec, devices: int, stack: str | Stack, batch: int, seq_len: int = 4096, cluster: str = "hgx-h100", **more: object
) -> Problem:
    return build_problem(model, cluster, devices, batch, seq_len, stack, **more)  # type: ignore[arg-type]


def broken(problem: Problem, **choices: object) -> set[str]:
    """Ids of the rules that a layout breaks; num_microbatches follows from the batch unless it is given."""
    dp, micro = int(str(choices.get("dp", 1))), int(str(choices.get("micro_batch", 1)))
    filled = {"num_microbatches": max(1, problem.workload.global_batch // (dp * micro)), **choices}
    if "interleaved" not in filled and int(str(choices.get("vpp", 1))) > 1:
        filled.setdefault("schedule", "interleaved")
    return {violation.rule for violation in violations(problem, Layout.model_validate(filled))}


def stack_with(**fields: object) -> Stack:
    """Megatron-LM as a user's own file may change it."""
    return Stack.model_validate(load_stack(ANY_CUT).model_dump() | fields)


def stages(counts: list[int], layers: int, vpp: int = 1) -> tuple[object, ...]:
    """Stages that hold so many layers (MTP included), chunk by chunk of the virtual pipeline."""
    cuts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return Split(len(counts) // vpp, vpp, tuple(cuts)).stages(layers, "none")


# Even and uneven stages


def test_thirty_layers_do_not_go_evenly_into_four_stages() -> None:  # Megatron-LM 1304
    even = on(dense(layers=30), 32, EVEN_ONLY, 64)
    assert {pp for pp in range(1, 31) if not broken(even, pp=pp)} == {1, 2, 3, 5, 6, 10, 15, 30}
    assert broken(even, pp=4) == {"C060"}
    uneven = on(dense(layers=30), 32, FIRST_LAST, 64)
    for counts in ([7, 8, 8, 7], [8, 7, 7, 8]):
        assert not broken(uneven, pp=4, stages=stages(counts, 30))
    assert broken(uneven, pp=4, stages=stages([7, 7, 7, 7], 30)) == {"C063a"}  # two layers lost


def test_a_stage_that_does_not_hold_all_layers_is_illegal_without_a_pipeline_too() -> None:  # Megatron-LM 1778
    problem = on(dense(layers=20), 8, FIRST_LAST, 8)
    assert broken(problem, pp=1, stages=stages([1], 20)) == {"C063a"}
    assert not broken(problem, pp=1, stages=stages([20], 20))


def test_last_stage_of_deepseek_over_four_stages() -> None:  # radixark/miles 1102
    problem = on(latent(), 32, FIRST_LAST, 64)
    assert not broken(problem, pp=4, stages=stages([16, 16, 16, 13], 61))
    assert not broken(problem, pp=4, stages=stages([15, 15, 15, 16], 61))
    assert broken(problem, pp=4, stages=stages([17, 15, 14, 15], 61)) == {"C063b"}  # middle stages differ
    assert not broken(on(latent(), 32, ANY_CUT, 64), pp=4, stages=stages([17, 15, 14, 15], 61))


def test_deepseek_with_mtp_needs_a_layout() -> None:  # Megatron-Bridge 1549
    model = latent(mtp=Mtp(layers=1, kind="moe"))
    problem = on(model, 1024, ANY_CUT, 1024)
    counts = [4, *[4] * 14, 2]  # the last holds one layer and the MTP layer
    assert not broken(problem, pp=16, stages=stages(counts, 61))
    assert not broken(problem, pp=8, vpp=2, stages=stages(counts, 61, vpp=2))
    assert not broken(problem, pp=4, vpp=4, stages=stages(counts, 61, vpp=4))
    even = on(latent(), 1024, EVEN_ONLY, 1024)
    assert [pp for pp in range(1, 62) if "C060" not in broken(even, pp=pp)] == [1, 61]


def test_forty_six_layers() -> None:  # ms-swift 5737
    even = on(dense(layers=46), 64, EVEN_ONLY, 64)
    assert [pp for pp in range(1, 47) if "C060" not in broken(even, pp=pp)] == [1, 2, 23, 46]
    assert not broken(on(dense(layers=46), 64, FIRST_LAST, 64), pp=4, stages=stages([11, 12, 12, 11], 46))


def test_experts_of_a_stage_do_not_exceed_its_devices() -> None:  # ms-swift 5737
    small = on(moe(layers=46), 32, ANY_CUT, 16)
    assert broken(small, tp=8, pp=4, ep=16) == {"C002"}
    assert not broken(small, tp=8, pp=4, ep=8)
    assert not broken(on(moe(layers=46), 64, ANY_CUT, 16), tp=8, pp=4, dp=2, ep=16, micro_batch=2)


def test_ninety_four_layers_with_a_short_last_stage() -> None:  # SkyRL 1000
    model = moe(layers=94, kv_heads=4, experts=128, width=1536)
    problem = on(model, 32, FIRST_LAST, 64)
    assert not broken(problem, tp=4, pp=4, dp=2, ep=8, stages=stages([26, 26, 26, 16], 94))
    assert not broken(problem, tp=4, pp=4, dp=2, ep=8, stages=stages([30, 30, 30, 4], 94))
    assert broken(problem, tp=8, pp=4, ep=8) == {"C021b", "C021c"}
    assert "C060" in broken(on(model, 32, EVEN_ONLY, 64), tp=4, pp=4, dp=2)


def test_seventy_eight_layers() -> None:  # ms-swift 9191
    even = on(dense(layers=78), 512, EVEN_ONLY, 64)
    assert [pp for pp in range(1, 79) if "C060" not in broken(even, pp=pp)] == [1, 2, 3, 6, 13, 26, 39, 78]
    uneven = on(moe(layers=78, experts=256), 512, FIRST_LAST, 64)
    assert not broken(uneven, tp=4, pp=8, dp=16, ep=8, recompute="full", stages=stages([10] * 7 + [8], 78))


def test_eighty_layers_in_chunks() -> None:  # Megatron-Bridge 3107
    problem = on(dense(layers=80), 32, EVEN_ONLY, 64)
    legal = [vpp for vpp in range(1, 81) if "C060" not in broken(problem, tp=4, pp=4, dp=2, vpp=vpp)]
    assert legal == [1, 2, 4, 5, 10, 20]


def test_layer_counts_that_frameworks_were_made_to_reject() -> None:  # [ran] 66 layers over 8; 64 over 7
    assert "C060" in broken(on(dense(layers=66), 64, EVEN_ONLY, 64), pp=8)
    assert "C060" in broken(on(dense(layers=64), 64, EVEN_ONLY, 64), pp=7)
    assert "C060" not in broken(on(dense(layers=64), 64, EVEN_ONLY, 64), pp=8)


def test_a_list_of_layers_has_no_chunks() -> None:  # MindSpeed-LLM num-layer-list
    stack = load_stack("mindspeed-llm").model_copy(update={"split_forms": ("even", "layer_list")})
    problem = on(dense(layers=30), 32, stack, 64, cluster="atlas-800t-a2")
    assert not broken(problem, pp=4, stages=stages([7, 9, 8, 6], 30))
    assert "C060" in broken(problem, pp=4, vpp=2)


def test_an_offset_has_chunks_and_may_leave_head_and_tail_without_layers() -> None:  # mindformers, shape (pp_interleave_num, pp)
    problem = on(dense(layers=30), 32, "mindformers", 64, cluster="atlas-800t-a2")
    assert not broken(problem, pp=4, stages=stages([0, 15, 15, 0], 30))
    assert not broken(problem, pp=4, vpp=2)


def test_stages_are_at_most_as_many_as_layers() -> None:  # MindSpeed refuses a chunk of no-ops only
    problem = on(dense(layers=6), 64, "mindspeed-llm", 64, cluster="atlas-800t-a2")
    assert not broken(problem, pp=6) and broken(problem, pp=7) == {"C140"}
    assert broken(problem, pp=4, vpp=2) == {"C140"}


def test_embedding_and_loss_can_be_stages_of_their_own() -> None:  # Megatron-LM, Llama-3 405B's layout string
    problem = on(dense(layers=6), 64, "megatron-lm", 64)
    assert not broken(problem, pp=8) and broken(problem, pp=9) == {"C140"}
    assert not broken(problem, pp=4, vpp=2)


# Grids of experts


def test_experts_times_stages_beyond_the_world() -> None:  # slime 1818
    problem = on(moe(), 8, ANY_CUT, 8)
    assert broken(problem, tp=2, pp=2, dp=2, ep=8) == {"C002"}
    assert [ep for ep in (1, 2, 4, 8, 16) if not broken(problem, tp=2, pp=2, dp=2, ep=ep)] == [1, 2, 4]


def test_expert_groups_may_span_tp_and_dp() -> None:  # slime 1662
    old = on(moe(kv_heads=2, experts=256), 8, "megatron-lm-0.12", 8)
    assert not broken(old, tp=2, dp=4, ep=8)
    assert "C021c" in broken(old, tp=4, dp=2, ep=8) and "C021c" in broken(old, tp=8, ep=8)
    assert not broken(on(moe(kv_heads=2, experts=256), 8, "megatron-lm", 8), tp=4, dp=2, ep=8)


def test_etp_that_falls_back_to_tp() -> None:  # Megatron-Bridge 546
    problem = on(moe(kv_heads=4), 4, ANY_CUT, 4, fix="etp=1|4")
    assert not broken(problem, tp=4, ep=4, etp=1)
    assert broken(problem, tp=4, ep=4, etp=4) == {"C002"}


def test_ep_may_exceed_dp() -> None:  # Megatron-LM 5958
    problem = on(moe(experts=256, kv_heads=2), 32, ANY_CUT, 64)
    assert [ep for ep in range(1, 65) if not broken(problem, cp=16, dp=2, ep=ep)] == [1, 2, 4, 8, 16, 32]


def test_twenty_four_devices() -> None:  # ml-cookbook 116
    problem = on(latent(layers=78, heads=64), 24, ANY_CUT, 24)
    legal = [ep for ep in range(1, 25) if not broken(problem, dp=24, ep=ep)]
    assert legal == [1, 2, 4, 8]
    assert broken(problem, dp=24, ep=24) == {"C080c"}
    assert not broken(problem, dp=8, pp=3, ep=8)
    assert not broken(on(latent(layers=78, heads=64), 32, ANY_CUT, 32), dp=32, ep=32)


def test_expert_products_that_frameworks_were_made_to_reject() -> None:  # [ran]
    model = latent(layers=64, experts=768, heads=128)
    problem = on(model, 12288, ANY_CUT, 768)
    assert not broken(problem, pp=16, dp=768, ep=384)
    assert "C002" in broken(on(latent(layers=64, experts=512), 12288, ANY_CUT, 768), pp=16, dp=768, ep=512)
    assert "C080c" in broken(on(latent(layers=64), 12288, ANY_CUT, 768), pp=16, dp=768, ep=48)


def test_pp_inside_dp_needs_equal_data_parallel_sizes() -> None:  # [ran] tp8 ep8 etp1 accepted
    problem = on(moe(), 64, ANY_CUT, 64, fix="etp=1|2")
    inner = {"tp": 8, "pp": 2, "dp": 4, "rank_order": "tp-cp-ep-pp-dp"}
    assert not broken(problem, **inner, ep=8)
    assert broken(problem, **inner, ep=4) == {"C004a"}
    assert not broken(problem, **inner, ep=4, etp=2)
    assert not broken(problem, **{**inner, "pp": 1}, ep=4)  # one stage: nothing to agree on
    ring = {"cp": 2, "pp": 2, "rank_order": "tp-cp-ep-pp-dp"}
    assert broken(on(dense(), 8, ANY_CUT, 8), **ring) == {"C004b"}


def test_ascend_kernels_take_128_experts() -> None:  # ms-swift 7374
    problem = on(moe(experts=512), 16, "mindspeed-llm", 16, cluster="atlas-800t-a2")
    assert "P004" in broken(problem, dp=16, ep=2)
    assert not broken(problem, dp=16, ep=4)


# Shapes


def test_heads_and_kv_heads() -> None:  # [ran] on 0.12.1, 0.16.1
    model = dense(heads=96, kv_heads=8)
    assert "C020" in broken(on(model, 64, "megatron-lm", 64), tp=64)
    assert not broken(on(model, 64, "megatron-lm", 64), tp=16)
    assert "C021c" in broken(on(model, 64, "megatron-lm-0.12", 64), tp=16)
    assert "C021a" in broken(on(model, 64, "megatron-lm", 64), tp=12)  # neither divides the other
    assert "C021b" in broken(on(model, 64, "torchtitan", 64), tp=16, optimizer_sharding="zero3")


def test_widths() -> None:
    assert "C022a" in broken(on(dense(width=24580), 8, ANY_CUT, 8), tp=8)
    assert "C022b" in broken(on(moe(width=766), 8, ANY_CUT, 8), tp=8, etp=4)
    assert "C022b" not in broken(on(moe(width=766), 8, ANY_CUT, 8), tp=8, etp=2)


def test_linear_heads_are_divided_by_tp_and_cp() -> None:
    mixer = LinearAttention(kind="gated_delta_net", key_heads=16, value_heads=32, key_head_dim=128, value_head_dim=128)
    model = spec({"l": LayerKind(mixer=mixer, mlp=DenseMlp(width=8192))}, ("8*l",))
    problem = on(model, 64, ANY_CUT, 64)
    assert not broken(problem, tp=8, cp=2)
    assert broken(problem, tp=8, cp=4) == {"C026a"}
    groups = spec({"m": LayerKind(mixer=Mamba2(heads=64, head_dim=64, state_size=128, groups=8, conv_kernel=4))}, ("8*m",))
    assert not broken(on(groups, 64, ANY_CUT, 64), tp=8) and broken(on(groups, 64, ANY_CUT, 64), tp=16) == {"C026b"}


def test_quantised_widths_and_tokens() -> None:
    narrow = on(dense(width=2880), 8, ANY_CUT, 8, precision="fp8")  # 2880 / 8 = 360 is no multiple of 16
    assert broken(narrow, tp=8) == {"C120a"} and not broken(narrow, tp=4)
    tokens = on(dense(), 8, ANY_CUT, 8, seq_len=24, precision="fp8")
    assert broken(tokens) == {"C120c"} and not broken(tokens, micro_batch=2)


# Sequence


@pytest.mark.parametrize(
    ("tp", "cp", "shortest"), [(1, 2, 4), (2, 2, 4), (4, 2, 8), (8, 4, 32), (3, 2, 12), (8, 1, 8)]
)  # NeMo-RL 3563
def test_shortest_sequence_that_tp_and_cp_divide(tp: int, cp: int, shortest: int) -> None:
    assert shortest == cp * math.lcm(2 if cp > 1 else 1, tp)
    lengths = [s for s in range(1, 65) if not broken(on(dense(heads=24, kv_heads=24), 32, ANY_CUT, 8, seq_len=s), tp=tp, cp=cp)]
    assert lengths == [s for s in range(1, 65) if s % shortest == 0]


def test_all_to_all_cp_stops_at_the_heads() -> None:  # prime-rl 3042, DeepSpeed 4674
    llama = on(dense(heads=48, kv_heads=48), 64, "deepspeed", 64, seq_len=65536)
    legal = [cp for cp in (1, 2, 4, 8, 16, 32, 64) if not broken(llama, cp=cp, cp_type="a2a")]
    assert legal == [1, 2, 4, 8, 16]
    two_kv_heads = on(dense(heads=32, kv_heads=2), 64, "megatron-lm", 64, seq_len=65536)
    assert [cp for cp in (1, 2, 4, 8) if not broken(two_kv_heads, cp=cp, cp_type="a2a")] == [1, 2]
    replicated = on(dense(heads=32, kv_heads=2), 64, "mindspeed-llm", 64, seq_len=65536, cluster="atlas-800t-a2")
    assert not broken(replicated, cp=8, cp_type="a2a")


def test_all_to_all_cp_asks_less_of_the_sequence_on_ascend() -> None:
    odd = {"cp": 4, "cp_type": "a2a"}
    assert not broken(on(dense(), 8, "mindspeed-llm", 8, seq_len=4100, cluster="atlas-800t-a2"), **odd)
    assert broken(on(dense(), 8, "megatron-lm", 8, seq_len=4100), **odd) == {"C042b"}


def test_hybrid_cp_needs_a_ring_of_groups() -> None:  # [ran]
    problem = on(dense(), 64, "mindformers", 64, cluster="atlas-800t-a2")
    assert "C045" in broken(problem, cp=2, cp_type="a2a+p2p")
    assert not broken(problem, cp=4, cp_type="a2a+p2p")


# Pipelines and micro-batches


def test_canonical_invariants_one_by_one() -> None:  # Megatron-LM 5766
    d, m = on(dense(), 8, ANY_CUT, 8), on(moe(), 8, ANY_CUT, 8)
    pairs = [
        (d, {"tp": 2, "pp": 2, "cp": 4}, {"tp": 2, "pp": 2, "cp": 2}, "C001"),
        (d, {"vpp": 2}, {"vpp": 2, "pp": 2}, "C064a"),
        (d, {"sequence_parallel": True}, {"sequence_parallel": True, "tp": 2}, "C040"),
        (on(dense(heads=12, kv_heads=12), 8, ANY_CUT, 8), {"tp": 8}, {"tp": 4}, "C020"),
        (on(dense(heads=24, kv_heads=6), 8, ANY_CUT, 8), {"tp": 4}, {"tp": 2}, "C021a"),
        (d, {"ep": 2, "dp": 2}, {"dp": 2}, "C080a"),
        (m, {"ep": 8, "pp": 2, "dp": 4}, {"ep": 4, "pp": 2, "dp": 4}, "C002"),
        (m, {"tp": 2, "sequence_parallel": False}, {"tp": 2}, "C081"),
        (d, {"etp": 2, "tp": 2}, {"tp": 2}, "C080b"),
        (d, {"dp": 3}, {"dp": 4}, "C029"),
        (d, {"micro_batch": 3}, {"micro_batch": 4}, "C029"),
    ]
    for problem, wrong, right, rule in pairs:
        assert rule in broken(problem, **wrong), (rule, wrong)
        assert not broken(problem, **right), (rule, right)


def test_interleaving_with_too_few_micro_batches() -> None:  # NeMo 14288
    model = dense(layers=48)
    assert "C030a" in broken(on(model, 48, ANY_CUT, 3), pp=6, vpp=2)
    assert not broken(on(model, 48, ANY_CUT, 6), pp=6, vpp=2)


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("group", [0, 2, 3, 4, 5, 6, 7, 8, 12])
def test_groups_of_interleaved_micro_batches(group: int, told: bool) -> None:
    """Megatron-Core's get_schedule_table: the last group is full, or has at least as many micro-batches as there are stages. A job
    that is not told its groups runs those of pp; a planner tells it any.
    """

    def run_in(each: int, pp: int, m: int) -> bool:
        groups = [min(each, m - first) for first in range(0, m, each)]
        return pp <= each <= m and groups[-1] >= pp

    def runs(pp: int, m: int) -> bool:
        asked = [group] if group else range(pp, m + 1) if told else [pp]
        return any(run_in(each, pp, m) for each in asked) and (group > 0 or told or m % pp == 0)

    problem = on(dense(layers=48), 64, stack_with(microbatch_group=group, sets_microbatch_group=told), 720720)
    shapes = [(pp, m) for pp in (2, 3, 4, 6) for m in range(1, 26)]
    found = {shape for shape in shapes if "C030a" not in broken(problem, pp=shape[0], vpp=2, num_microbatches=shape[1])}
    assert found == {shape for shape in shapes if runs(*shape)}
    m = 5 if told and not group else 25
    (said,) = (
        violation.sentence
        for violation in violations(problem, Layout(pp=6, vpp=2, num_microbatches=m, schedule="interleaved"))
        if violation.rule == "C030a"
    )
    assert "with schedule = interleaved" in said and (f"the group of {group} micro-batches" in said or not group)


def test_micro_batches_against_stages_by_framework() -> None:  # torchtitan 775
    def megatron(m: int, told: bool = True, **more: object) -> set[str]:
        return broken(on(dense(), 8, stack_with(sets_microbatch_group=told), m), pp=4, **more)

    def titan(m: int, **more: object) -> set[str]:
        return broken(on(dense(), 8, "torchtitan", m), pp=4, optimizer_sharding="zero3", **more)

    assert [m for m in (3, 5, 8, 10, 11, 12) if not megatron(m, told=False, vpp=2)] == [8, 12]  # [ran] 5 over 4
    assert [m for m in (3, 5, 8, 10, 11, 12) if not megatron(m, vpp=2)] == [5, 8, 10, 11, 12]
    assert [m for m in (3, 10, 11) if not titan(m, vpp=2)] == [3, 10]
    assert not megatron(3) and titan(3) == {"C033"}


def test_v_shaped_schedules() -> None:  # [ran]
    problem = on(dense(layers=32), 16, "mindspeed-llm", 16, cluster="atlas-800t-a2")
    v = {"schedule": "dualpipev", "pp": 8}
    assert not broken(problem, **v)
    assert "C032a" in broken(problem, **v, dp=2)  # 8 micro-batches, 16 needed
    assert "C075c" in broken(problem, **v, cp=2)
    assert "C075a" in broken(problem, schedule="dualpipev")
    tied = on(dense(layers=32, tied_embeddings=True), 16, "mindspeed-llm", 16, cluster="atlas-800t-a2")
    assert "C075c" in broken(tied, **v)


def test_interleaved_means_several_chunks() -> None:
    problem = on(dense(), 8, ANY_CUT, 8)
    assert "C064c" in broken(problem, pp=2, schedule="interleaved")
    assert "C064b" in broken(problem, pp=2, vpp=2, schedule="1f1b")


def test_measured_layout_of_a_small_deepseek() -> None:  # Megatron-LM 6311: "Ett|(tt|)*6mL" over 4 stages
    model = latent(layers=14, mtp=Mtp(layers=1, kind="moe"))
    problem = on(model, 64, ANY_CUT, 256)
    layout = {"pp": 4, "vpp": 2, "dp": 16, "ep": 16, "stages": stages([2, 2, 2, 2, 2, 2, 2, 1], 14, vpp=2)}
    assert not broken(problem, **layout)
    assert not broken(problem, **layout, recompute="full:uniform:1") - {"C063a"}


def test_deepspeed_pipelines_shard_states_only() -> None:
    problem = on(dense(), 8, "deepspeed", 8)
    assert not broken(problem, pp=2, optimizer_sharding="zero1")
    assert broken(problem, pp=2, optimizer_sharding="zero2") == {"C077"}


def test_torchtitan_mtp() -> None:
    problem = on(latent(layers=12, mtp=Mtp(layers=1, kind="moe")), 8, "torchtitan", 8)
    assert not broken(problem, dp=8, optimizer_sharding="zero3")
    assert broken(problem, cp=2, cp_type="allgather", dp=4, optimizer_sharding="zero3") == {"C049"}


def test_mtp_and_cp_before_megatron_lm_0_14() -> None:  # [ran]
    model = latent(layers=12, mtp=Mtp(layers=1, kind="moe"))
    assert not broken(on(model, 16, ANY_CUT, 16), cp=2, dp=8, ep=8)
    assert broken(on(model, 16, FIRST_LAST, 16), cp=2, dp=8, ep=8) == {"C068"}


def test_torchtitan_has_no_ring() -> None:
    problem = on(dense(), 8, "torchtitan", 8)
    assert not broken(problem, cp=2, cp_type="allgather", dp=4, optimizer_sharding="zero3")
    assert broken(problem, cp=2, cp_type="p2p", dp=4, optimizer_sharding="zero3") == {"C049b"}
    assert not broken(problem, cp=2, cp_type="allgather", dp=4, optimizer_sharding="hsdp:4")
    assert broken(problem, cp=4, cp_type="allgather", dp=2, optimizer_sharding="hsdp:2") == {"C013b"}


@pytest.mark.parametrize(
    ("attention", "cp_type", "refused"),
    [
        ({"window": 128}, "p2p", {"C044d"}),
        ({"window": 128}, "allgather", set()),
        ({"window": 128}, "a2a", set()),
        ({"window": 128, "chunked": True}, "p2p", set()),  # not a window of Transformer Engine's
        ({"sinks": True}, "p2p", {"C044e"}),
        ({"sinks": True}, "allgather", {"C044e"}),
        ({"window": 128, "sinks": True}, "a2a", set()),
    ],
)
@pytest.mark.parametrize("framework", [ANY_CUT, "megatron-bridge-2025"])
def test_windows_and_sinks_choose_the_kind_of_cp(
    framework: str, attention: dict[str, object], cp_type: str, refused: set[str]
) -> None:
    """attn_forward_func_with_cp asserts both (TransformerEngine 1.13 to 2.9 for windows, from 2.8 for sinks)."""
    mixer = Attention.model_validate({"heads": 64, "kv_heads": 8, "head_dim": 64, **attention})
    model = spec({"dense": LayerKind(mixer=mixer, mlp=DenseMlp(width=24576))}, ("24*dense",))
    assert broken(on(model, 8, framework, 8), cp=8, cp_type=cp_type) == refused
    assert not broken(on(model, 8, framework, 8), dp=8, cp_type=cp_type)


def test_deepspeed_sequence_groups_and_autotp() -> None:
    d, m = on(dense(), 8, "deepspeed", 8), on(moe(), 8, "deepspeed", 8)
    assert not broken(d, cp=2, cp_type="a2a", dp=4)
    assert broken(d, tp=2, cp=2, cp_type="a2a", dp=2) == {"C044c"}
    assert not broken(m, tp=2, dp=4, ep=4)
    assert broken(m, tp=2, dp=4, ep=4, offload="optimizer:1") == {"C093b"}
    assert broken(m, dp=8, offload="optimizer:1", optimizer_sharding="none") == {"C111b"}


def test_mindformers_spreads_experts_over_dp_and_tp() -> None:
    problem = on(moe(experts=128), 16, "mindformers", 16, cluster="cloudmatrix-384")
    assert not broken(problem, cp=2, dp=8, ep=8)
    assert broken(problem, cp=2, dp=8, ep=16) == {"C012"}


def test_models_by_class_of_mindformers_spread_experts_over_dp_and_cp() -> None:
    """dp·cp // ep ranks hold one expert, each cut by tp (llama_layer.py): with dp 1 and tp 8, EP 4 leaves none."""
    new = on(moe(experts=8), 16, "mindformers", 16, cluster="cloudmatrix-384", fix="etp=1|4|8")
    by_class = {"experts_across_tp": False, "expert_tensor_parallel": True}
    own = new.model_copy(update={"stack": new.stack.model_copy(update=by_class)})
    assert not broken(new, tp=8, pp=2, dp=1, ep=4)
    assert broken(own, tp=8, pp=2, dp=1, ep=4, etp=8) == {"C002", "C012b"}
    assert broken(own, tp=4, cp=2, dp=2, ep=4) == {"C012c"}
    assert not broken(own, tp=4, cp=2, dp=2, ep=4, etp=4)


def test_mindspore_runs_gpipe_on_interleaved_chunks() -> None:  # [ran]
    problem = on(dense(), 16, "mindformers", 16, cluster="cloudmatrix-384")
    assert not broken(problem, pp=2, dp=8, schedule="1f1b")
    assert broken(problem, pp=2, dp=8, schedule="gpipe") == {"C031b"}


def test_experts_with_biases_are_not_cut() -> None:  # [ran]
    kind = LayerKind(mixer=Attention(heads=64, kv_heads=8, head_dim=64), mlp=MoeMlp(experts=128, top_k=4, width=2880, bias=True))
    problem = on(spec({"moe": kind}, ("36*moe",)), 16, ANY_CUT, 16, fix="etp=1|2")
    assert not broken(problem, tp=2, dp=8, ep=8)
    assert broken(problem, tp=2, dp=8, ep=4, etp=2) == {"C028"}


# Recompute, sharding and what a stack has


def test_recompute() -> None:  # [ran]
    d, m, mla = on(dense(), 8, ANY_CUT, 8), on(moe(), 8, ANY_CUT, 8), on(latent(), 8, ANY_CUT, 8)
    assert not broken(d, recompute="full") and not broken(d, recompute="full:uniform:1")
    assert broken(d, recompute="full:uniform:33") == {"C100c", "C100e"}
    # of 32 layers, chunks of 16 are four units of 4, and three of 5 with one over
    assert not broken(d, pp=2, dp=4, recompute="full:uniform:4")
    assert broken(d, pp=2, dp=4, recompute="full:uniform:5") == broken(d, pp=2, dp=4, recompute="full:uniform:32") == {"C100e"}
    assert broken(d, recompute="selective:mla_up_proj") == {"C101a"}
    assert not broken(mla, recompute="selective:mla_up_proj+shared_experts")
    assert broken(d, recompute="selective:moe_act") == {"C101b"} and not broken(m, recompute="selective:moe_act")
    assert broken(m, recompute="selective:shared_experts") == {"C101c"}
    assert "stack recompute" in broken(on(latent(), 8, "megatron-lm-0.12", 8), recompute="selective:shared_experts")


def test_shardings_and_stacks() -> None:
    megatron = on(dense(), 8, "megatron-lm", 8)
    assert broken(megatron, dp=8, optimizer_sharding="zero3") == {"stack sharding"}  # plain Megatron stops at ZeRO-1
    titan = on(dense(), 8, "torchtitan", 8)
    assert not broken(titan, dp=8, optimizer_sharding="hsdp:4")
    assert broken(titan, dp=8, optimizer_sharding="hsdp:3") == {"C013"}
    assert broken(megatron, schedule="zb-h1", pp=2) == {"stack schedule"}
    assert broken(megatron, cp=4, cp_type="a2a+p2p") == {"stack cp_type"}
    assert not broken(megatron, cp=1, cp_type="a2a+p2p")  # of no meaning without CP
    assert broken(on(dense(), 8, "nanotron", 8), offload="optimizer:1") == {"P002"}
    assert not broken(megatron, offload="optimizer:1", optimizer_sharding="zero1")
    assert broken(megatron, offload="optimizer:1", optimizer_sharding="none") == {"C111"}


# Placement


def test_tensor_parallel_groups_straddle_supernodes_unless_they_are_kept_inside() -> None:
    heads = dense(heads=144, kv_heads=144, width=144 * 128)
    kept, free = (
        on(heads, 216, ANY_CUT, 24, seq_len=4608, cluster="gb200-nvl72", **more) for more in ({"inside": "supernode:tp"}, {})
    )
    assert broken(kept, tp=16) == set()  # one rack holds the job
    assert broken(kept, tp=16, dp=8) == {"inside supernode tp"} and not broken(free, tp=16, dp=8)  # 72 is no multiple of 16
    assert not broken(kept, tp=8, dp=24) and broken(kept, tp=144)


def test_inside_a_supernode_counts_the_devices_in_use() -> None:
    model = moe(experts=144, width=768)
    full = on(model, 144, ANY_CUT, 144, cluster="gb200-nvl72", inside="supernode:ep")
    inside = "inside supernode ep"
    assert not broken(full, dp=144, ep=36) and not broken(full, dp=144, ep=72)
    assert broken(full, dp=144, ep=16) == {inside}  # 72 is no multiple of 16: a group lies across two racks
    assert broken(full, dp=144, ep=144) == {inside}
    half = on(model, 128, ANY_CUT, 128, cluster="gb200-nvl72", inside="supernode:ep")  # 2 racks of 64
    assert not broken(half, dp=128, ep=16)


def test_idle_devices_are_legal() -> None:
    assert not broken(on(dense(), 10, ANY_CUT, 8), tp=8)
    assert broken(on(dense(), 10, ANY_CUT, 8), tp=8, dp=2) == {"C001"}
