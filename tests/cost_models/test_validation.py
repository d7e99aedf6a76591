"""Measured runs: what their words mean, how they are priced, and how far off that is. The sample's rows carry their sources."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from paraplan.cost_models.details import detail
from paraplan.cost_models.memory import verdict
from paraplan.cost_models.profile import load_profile
from paraplan.cost_models.run_exclusions import EXCLUSIONS, exclusions
from paraplan.cost_models.run_files import read_runs
from paraplan.cost_models.run_layouts import Job, job_of
from paraplan.cost_models.run_models import model_spec, read_shapes
from paraplan.cost_models.run_splits import even_counts, split_of
from paraplan.cost_models.run_statistics import Statistics, average_ranks, errors, median_interval, regret, spearman
from paraplan.cost_models.runs import HYBRID, VOCABULARY, Run, Unpriceable, meaning
from paraplan.cost_models.step import CostModel
from paraplan.cost_models.validation import Outcome, Validation, outcomes_of, summarize, validate
from paraplan.optimizer import InputError
from paraplan.optimizer.cli import main
from paraplan.optimizer.reports.validation import worst
from paraplan.search_spaces.inputs import catalog_names, load_model
from paraplan.search_spaces.layout import Recompute, parse_offload, parse_sharding

MEASURED = Path(__file__).parents[1] / "measured"
SAMPLE = MEASURED / "runs_sample.csv"
WHOLE = Path(__file__).parents[3] / "shared" / "measured" / "runs.csv"
KEYS = (
    *("id", "split", "predicted_step_time_s", "measured_step_time_s", "predicted_peak_gib", "measured_peak_gib"),
    *("predicted_oom", "memory_verdict", "status", "skipped"),
)
MORE = ("counted", "why_not_counted", "stack", "accelerator", "interval", "notes")


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    return {run.id: run for run in read_runs(SAMPLE)}


@pytest.fixture(scope="module")
def found() -> Validation:
    return validate(SAMPLE)


def job(run: Run, **cells: str) -> Job:
    """The run's job with some cells changed."""
    return job_of(Run({**run.cells, **cells}, run.id), read_shapes(MEASURED / "models.json"))


# --- the vocabulary ------------------------------------------------------------------------------------------------------------


def test_every_stack_and_cluster_of_the_vocabulary_is_in_the_catalog() -> None:
    stacks = {word.meaning.removeprefix("~") for word in VOCABULARY if word.column == "stack"} - {"default"}
    assert stacks <= set(catalog_names("stacks"))
    clusters = {word.meaning.split()[0] for word in VOCABULARY if word.column == "accelerator" and word.meaning[0] not in "!\\"}
    assert {name for name in clusters if "\\" not in name} <= set(catalog_names("clusters"))


@pytest.mark.parametrize(
    ("column", "cell", "expected"),
    [
        ("precision", "mxfp8", "fp8 fp8"),
        ("precision", "MXFP8 (E4M3)", "fp8 fp8"),
        ("precision", "fp8 e4m3 blockwise", "fp8 fp8"),
        ("precision", "fp8_mx", "fp8 fp8"),
        ("precision", "fp8-cs", "fp8 fp8_tensor"),
        ("precision", "float8", "fp8 fp8_tensor"),
        ("precision", "mixed bf16", "bf16 bf16"),
        ("precision", "NVFP4", "fp4 fp4"),
        ("precision", "", "bf16 bf16"),
        ("recompute", "", "none"),
        ("recompute", "full(block,32)", "full:block:32"),
        ("recompute", "full(block,1)+recompute-activation-function", "full:block:1"),
        ("recompute", "selective:moe_act+layernorm", "selective:moe_act+layernorm"),
        ("cp_type", "ring", "p2p"),
        ("precision", "BF16 + FP8", "fp8 fp8_tensor"),
        ("recompute", "off", "none"),
        ("recompute", "full (uniform, 1)", "full:uniform:1"),
        ("recompute", "block:8", "full:block:8"),
        ("recompute", "full_recompute", "full"),
        ("recompute", "activation checkpointing", "full"),
        ("recompute", "selective (core attention)", "selective:core_attn"),
        ("recompute", "mlp", "selective:mlp"),
        ("cp_type", "zigzag ring attention", "p2p"),
        ("cp_type", "all_gather", "allgather"),
        ("optimizer_sharding", "ZeRO stage 2", "zero2"),
        ("optimizer_sharding", "zero-1 (distributed optimizer)", "zero1"),
        ("optimizer_sharding", "3.0", "zero3"),
        ("optimizer_sharding", "NO_SHARD", "none"),
        ("optimizer_sharding", "fully_shard", "zero3"),
        ("optimizer_sharding", "hsdp(16)", "hsdp:16"),
        ("offload", "swap_optimizer", "optimizer:1"),
        ("offload", "no", "none"),
        ("pp_schedule", "1F1B (non-interleaved)", "1f1b"),
        ("pp_schedule", "1f1b-interleaved", "interleaved"),
        ("pp_schedule", "ZBVZeroBubble", "zb-v"),
        ("routing", "dgxc causal halved", "balanced"),
        ("routing", "mindspeed-llm forced nothing", "free"),
        ("doubt", "mindformers", "0.15"),
        ("doubt", "my own", "0"),
        ("cp_type", "a2a(ulysses)", "a2a"),
        ("optimizer_sharding", "", "blank"),
        ("offload", "optimizer (CPU AdamW)", "optimizer:1"),
        ("moe_dispatcher", "flex:hybridep", "flex"),
        ("flex_backend", "flex:deepep", "deepep"),
        ("flex_backend", "alltoall", ""),
        ("compiled", "4 GPUs per node; torch.compile=False; grad_accum=4", "no"),
        ("compiled", "4 GPUs per node; torch.compile=True", "yes"),
        ("overlap.tp", "tp+grad-reduce+param-gather+p2p", "on"),
        ("overlap.tp", "grad-reduce+param-gather", "off"),
        ("overlap.tp", "none (vanilla TP)", "off"),
        ("overlap.dp_parameters", "grad-reduce+shared-expert", "off"),
        ("flops", "model; causal NOT halved", "whole"),
        ("flops", "model; causal attention halved (Bridge flop_utils)", "halved"),
        ("flops", "hardware (recompute counted); causal NOT halved", "whole hardware"),
    ],
)
def test_words_mean(column: str, cell: str, expected: str) -> None:
    assert meaning(column, cell) == expected


@pytest.mark.parametrize(
    ("column", "cell"), [("accelerator", "TPUv6e"), ("accelerator", "abacus"), ("precision", "fp7"), ("recompute", "some")]
)
def test_words_without_a_price_are_a_reason(column: str, cell: str) -> None:
    with pytest.raises(Unpriceable):
        meaning(column, cell)


def test_meanings_are_words_that_layouts_know() -> None:
    for word in VOCABULARY:
        if "\\" in word.meaning or word.meaning.startswith("!"):
            continue
        if word.column == "recompute" and word.meaning.startswith(("none", "full", "selective")):
            Recompute.parse(word.meaning)
        if word.column == "optimizer_sharding" and word.meaning not in ("blank", HYBRID):
            parse_sharding(word.meaning)
        if word.column == "offload" and not word.meaning.startswith("activations of"):
            parse_offload(word.meaning)


def test_whole_vocabulary_of_the_published_table_is_covered() -> None:
    if not WHOLE.exists():
        pytest.skip("the table of all published runs is not here")
    reasons = [str(o) for o in _reasons(read_runs(WHOLE))]
    assert not [reason for reason in reasons if "not known" in reason or "does not hold together" in reason]


def _reasons(every: Iterable[Run]) -> Iterable[Unpriceable]:
    shapes = read_shapes(WHOLE.parent / "models.json")
    for run in every:
        try:
            job_of(run, shapes)
        except Unpriceable as reason:
            yield reason


# --- from a row to a layout ----------------------------------------------------------------------------------------------------


def test_blank_sharding_is_zero1_for_megatron_and_zero3_for_fsdp(runs: dict[str, Run]) -> None:
    assert job(runs["dgxc-v25.02-llama3.1-405b-proxy-42l-h100-192-fp8-gbs252"]).layout.optimizer_sharding == "zero1"
    assert job(runs["titan-t1-0"], optimizer_sharding="").layout.optimizer_sharding == "zero3"


def test_layout_string_in_the_notes_sets_the_stages(runs: dict[str, Run]) -> None:
    stages = job(runs["mbridge-26.06-deepseek-v3-mtp1-gb300-256-mxfp8-tp1pp2cp1ep32-gbs4096"]).layout.stages
    last = stages[1].chunks[-1]
    assert [len(stage.chunks) for stage in stages] == [8, 8]
    assert stages[0].chunks[0].layers == (0, 3)
    assert (last.layers, last.mtp, last.loss) == ((60, 60), 1, True)


def test_domain_size_is_the_size_of_the_supernode(runs: dict[str, Run]) -> None:
    cluster = job(runs["kempner-mfu-14"]).problem.cluster
    assert {level.name: level.size for level in cluster.levels}[cluster.supernode] == 4


def test_modules_are_listed_with_commas_too(runs: dict[str, Run]) -> None:
    assert job(runs["korthikanti-t5-22b-full"], recompute="selective: core_attn, mlp").layout.recompute == "selective:core_attn+mlp"


def test_hybrid_sharding_without_a_size_stays_in_a_supernode(runs: dict[str, Run]) -> None:
    """128 devices in servers of 8: shards over the 4 of a server that TP 2 leaves, or over all where one server is all."""
    cells = {"optimizer_sharding": "HYBRID_SHARD", "dp": "", "tp": "2", "global_batch": "256"}
    many = job(runs["titan-t1-0"], **{**cells, "num_accelerators": "128"}).layout
    assert (many.dp, many.optimizer_sharding) == (64, "hsdp:4")
    assert job(runs["titan-t1-0"], **cells).layout.optimizer_sharding == "zero3"


@pytest.mark.parametrize(
    ("words", "schedule", "ends"),
    [
        ("ZB-H1", "zb-h1", [(0, 11), (84, 95)]),
        ("DualPipe", "dualpipe", [(0, 11), (84, 95)]),
        ("DualPipeV", "dualpipev", [(0, 5), (42, 47)]),
        ("zbv", "zb-v", [(0, 5), (42, 47)]),
    ],
)
def test_schedules_of_split_backwards_are_priced(
    runs: dict[str, Run], words: str, schedule: str, ends: list[tuple[int, int]]
) -> None:
    """GPT-3 175B on 8 stages; a V puts the first and the last chunk on the first stage."""
    run = Run({**runs["korthikanti-t5-175b-full"].cells, "pp_schedule": words, "vpp": ""}, "split")
    outcome = outcomes_of([run], read_shapes(MEASURED / "models.json"))[0]
    assert outcome.job is not None
    layout = outcome.job.layout
    assert layout.schedule == schedule
    assert [layout.stages[stage].chunks[0].layers for stage in (0, 7)] == ends
    assert layout.stages[0].chunks[-1].loss == schedule.endswith("v")
    expected = detail(CostModel(outcome.job.problem, load_profile(outcome.job.problem.cluster.accelerator.name)), layout)
    assert outcome.predicted_step_time_s == pytest.approx(expected.step_time_s, rel=1e-9)
    assert outcome.fullest_gib == pytest.approx(max(sum(terms.values()) for terms in expected.stage_bytes) / 2**30, rel=1e-9)


def test_selective_without_modules_is_core_attention_or_half_of_the_layers(runs: dict[str, Run]) -> None:
    megatron = job(runs["korthikanti-t5-22b-full"], recompute="selective").layout
    titan = job(runs["titan-t1-0"], recompute="selective").layout
    assert (megatron.recompute, titan.recompute) == ("selective:core_attn", "full:block:16")
    mindformers = job(runs["korthikanti-t5-22b-full"], recompute="selective", software="MindFormers", family="mine").layout
    assert mindformers.recompute == "none"


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"micro_batch": ""}, "missing field: micro_batch"),
        ({"micro_batch": "three"}, "micro_batch is not a number"),
        ({"micro_batch": "1.5"}, "micro_batch is not a whole number"),
        ({"dp": "7"}, "dp inconsistent"),
        ({"dp": "", "num_accelerators": "100"}, "the number of devices is not a multiple of"),
        ({"global_batch": "63", "micro_batch": "2"}, "micro-batches are not integral"),
        ({"model": "nobody-7b"}, "unknown model shape: nobody-7b"),
        ({"precision": "fp8"}, "a100-80gb-sxm has no fp8 rate"),
        ({"pp_schedule": "Hanayo"}, "schedule that is not priced: hanayo"),
        ({"notes": "LoRA finetuning"}, "LoRA"),
        ({"cp_type": "hybrid"}, "cp_type that is not priced"),
        ({"num_accelerators": "8192", "tp": "1", "pp": "8192", "vpp": "", "pp_schedule": "1f1b", "dp": "1"}, "more stages than"),
        ({"accelerator": ""}, "missing field: accelerator"),
        ({"accelerator": "N/A"}, "missing field: accelerator"),
        ({"tp": "7", "num_accelerators": "56"}, "tp does not divide the attention heads"),
        (
            {"model": "qwen3-30b-a3b", "num_accelerators": "192", "ep": "3", "dp": "", "global_batch": "192"},
            "ep does not divide the experts",
        ),
        ({"accelerator": "Abacus 9000"}, "accelerator not in the catalog: abacus-9000"),
        ({"accelerator": "H100 PCIe"}, "accelerator on PCIe cards"),
        ({"precision": "TF32"}, "precision that is not priced: tf32"),
        ({"offload": "tensor swapping"}, "activation offload in words"),
        ({"offload": "fine-grained activations: nobody"}, "offload of a module that is not priced: nobody"),
        ({"offload": "swap-attention"}, "offload of single modules beside full recompute"),
        ({"notes": "with activation offloading of half of the layers"}, "activation offload"),
        ({"recompute": f"full[{'9' * 5000}]"}, "recompute in words that are not priced"),
        ({"num_accelerators": "999999999", "dp": ""}, "more devices than"),
    ],
)
def test_rows_that_cannot_be_priced_say_why(runs: dict[str, Run], cells: dict[str, str], reason: str) -> None:
    with pytest.raises(Unpriceable, match=reason):
        job(runs["korthikanti-t5-175b-full"], **cells)


def test_a_run_that_does_not_tell_its_precision_was_in_bf16(runs: dict[str, Run]) -> None:
    known, blank = (job(runs["korthikanti-t5-175b-full"], precision=cell) for cell in ("bf16", ""))
    assert blank.problem == known.problem and blank.layout == known.layout
    assert set(blank.notes) - set(known.notes) == {"precision is not told: BF16 assumed"}


def test_scales_of_rows_are_cast_for_every_gemm_and_gathered_in_bf16(runs: dict[str, Run]) -> None:
    by_tensor, by_row = (job(runs["titan-t1-0"], precision=words).problem.stack for words in ("fp8-ds", "fp8-rowwise"))
    assert (by_tensor.fp8_cast_bytes, by_tensor.fp8_gathers) == (0.0, True)
    assert (by_row.fp8_cast_bytes, by_row.fp8_gathers) == (5.0, False)


def test_four_devices_on_a_board_are_joined_in_pairs(runs: dict[str, Run]) -> None:
    run = runs["kempner-mfu-14"]
    board, whole = (job(run, domain_size=size).problem.cluster.levels[0] for size in ("4", "8"))
    assert (board.kind, board.size, board.in_network_reduction) == ("full_mesh", 4, False)
    assert (whole.kind, whole.size, whole.in_network_reduction) == ("switched", 8, True)


def test_notes_tell_of_eager_kernels_and_of_a_fused_dispatch(runs: dict[str, Run]) -> None:
    for notes in ("torch.compile=False", "FSDP eager; selective AC"):
        eager = job(runs["titan-t1-0"], notes=notes).problem.stack
        assert set(eager.eager_kernels) == {"norm", "activation", "rotary", "loss"}
    words = {"model": "qwen3-30b-a3b", "num_accelerators": "64", "ep": "8", "dp": "", "global_batch": "64", "cuda_graphs": ""}
    words |= {"software": "Megatron-Bridge v0.1.0rc4", "moe_dispatcher": ""}
    jobs = [job(runs["korthikanti-t5-175b-full"], **words, notes=notes) for notes in ("(dropless)", "(tokendrop)")]
    assert [one.problem.stack.moe_dispatcher for one in jobs] == ["flex", "alltoall"]


MOE = {"model": "qwen3-30b-a3b", "num_accelerators": "64", "ep": "8", "dp": "", "global_batch": "64"}


def test_a_blank_dispatcher_is_the_stacks_own_but_where_the_columns_are_a_recipes(runs: dict[str, Run]) -> None:
    words = {**MOE, "software": "Megatron-Bridge v0.3.0", "moe_dispatcher": "", "cuda_graphs": "none"}
    own, recipe = (
        job(runs["korthikanti-t5-175b-full"], **words, notes=n) for n in ("", "graphs/dispatcher from recipe x at tag y")
    )
    assert [one.problem.stack.moe_dispatcher for one in (own, recipe)] == ["flex", "alltoall"]
    assert [note for note in recipe.notes if note not in own.notes] == [
        "moe_dispatcher is not told: alltoall assumed, as the row's recipe has it"
    ]


def test_experts_that_tp_extends_are_not_cut_by_it(runs: dict[str, Run]) -> None:
    """TP 8 and EP 4 of 32 ranks each: MindSpeed cuts every expert in eight, or spreads whole ones over all 32."""
    words = {**MOE, "tp": "4", "pp": "1", "vpp": "", "software": "MindSpeed-LLM", "pp_schedule": ""}
    cut, spread = (job(runs["korthikanti-t5-175b-full"], **words, notes=notes) for notes in ("", "TP-extend-EP"))
    assert [(one.layout.ep, one.layout.etp, one.layout.edp) for one in (cut, spread)] == [(8, 4, 2), (32, 1, 2)]
    assert "experts lie over TP ranks too: ep 32, etp 1" in spread.notes


def test_an_attention_kernel_that_software_names_is_priced_whatever_the_family(runs: dict[str, Run]) -> None:
    """Megatron-DeepSpeed after BLOOM's is taken for that, with the interval of a stack that nobody measured."""
    words = {"precision": "bf16", "family": "mine"}
    softwares = ("Megatron-DeepSpeed 2022", "Megatron-DeepSpeed 2024", "Megatron-DeepSpeed 2024 (FlashAttention-2)")
    told = [job(runs["korthikanti-t5-175b-full"], **words, software=software) for software in softwares]
    assert {one.problem.stack.name for one in told} == {"megatron-deepspeed-bf16"}
    assert [one.stack_told for one in told] == [True, False, False]
    assert [one.problem.stack.attention_kernel for one in told] == ["unfused", "unfused", "flash"]


@pytest.mark.parametrize(
    ("device", "precision", "said"),
    [
        ("H100", "mxfp8", ["mxfp8: h100-80gb-sxm has no MX formats; priced as scales of larger blocks"]),
        ("B200", "mxfp8", []),
        ("H100", "fp8-blockwise", []),
        ("H100", "fp8-cs", ["fp8-cs: delayed and current scaling are priced alike"]),
    ],
)
def test_what_an_fp8_recipe_has_no_price_for_is_said(runs: dict[str, Run], device: str, precision: str, said: list[str]) -> None:
    found = job(runs["korthikanti-t5-175b-full"], accelerator=device, precision=precision, domain_size="8")
    assert [note for note in found.notes if note.startswith(precision)] == said


def test_the_worst_rows_show_how_far_off_they_are(runs: dict[str, Run]) -> None:
    times = ((3e-4, 1.0), (0.47, 1.0), (250.0, 1.0))
    run = runs["korthikanti-t5-175b-full"]
    off = [Outcome(run, predicted_step_time_s=predicted, measured_step_time_s=measured) for predicted, measured in times]
    shown = {line[1] for line in worst(summarize(off), of_each=3)}
    assert shown == {"0.0003", "0.47", "250"}


def test_an_unknown_family_is_priced_with_a_stack_of_its_software(runs: dict[str, Run]) -> None:
    new = job(runs["korthikanti-t5-175b-full"], family="somebody", software="Megatron-LM of our own")
    assert new.problem.stack.name == "megatron-lm"
    other = job(runs["korthikanti-t5-175b-full"], family="somebody", software="")
    assert other.problem.stack.name == other.problem.cluster.default_stack


@pytest.mark.parametrize(
    ("layers", "chunks", "expected"),
    [(8, 4, [2, 2, 2, 2]), (94, 48, [1, *[2] * 46, 1]), (61, 16, [*[4] * 15, 1]), (78, 12, [*[7] * 11, 1]), (9, 8, [2, *[1] * 7])],
)
def test_even_counts(layers: int, chunks: int, expected: list[int]) -> None:
    assert even_counts(layers, chunks) == expected
    assert sum(expected) == layers


def test_nanotron_deals_out_blocks_by_matrix_products() -> None:
    model = load_model("llama-3.1-8b")
    counts = split_of(model, 4, 1, "by compute", "").counts
    assert sum(counts) == 32
    assert counts[-1] < counts[0], "the head's 128k vocabulary weighs as much as two layers"


def test_balanced_parameters_take_layers_off_both_ends() -> None:
    model = load_model("llama-3.1-8b")  # embedding and head weigh 2.4 layers each
    counts = split_of(model, 4, 1, "by parameters", "").counts
    assert sum(counts) == 32
    assert max(counts[0], counts[-1]) < min(counts[1:3])


def test_site_of_bigscience_has_half_a_link_per_device(runs: dict[str, Run]) -> None:
    name = next(name for name, run in runs.items() if run.family == "bigscience" and "A100" in run.accelerator)
    outermost = job(runs[name]).problem.cluster.levels[-1]
    assert outermost.bandwidth_bytes_per_s.value / outermost.devices_per_nic == 6.25e9


def test_shapes_cover_mla_moe_and_mtp() -> None:
    shapes = read_shapes(MEASURED / "models.json")
    model = model_spec("deepseek-v3-mtp1", shapes, 4096)
    assert model.parameters() == pytest.approx(671e9, rel=0.01)
    assert model.layer_kinds.count("dense") == 3 and model.mtp is not None


# --- prices --------------------------------------------------------------------------------------------------------------------


def test_rows_cost_what_evaluate_says(runs: dict[str, Run], found: Validation) -> None:
    for name in ("korthikanti-t5-175b-selective-core-attn", "simumax-b200-deepseekv2-tp1-ep8-pp1-dp8-l4-mbc4-cef"):
        one = job(runs[name])
        expected = detail(CostModel(one.problem, load_profile(one.accelerator)), one.layout)
        row = next(o for o in found.outcomes if o.run.id == name)
        peak = max(sum(terms.values()) for terms in expected.stage_bytes) / 2**30
        assert row.predicted_step_time_s == pytest.approx(expected.step_time_s, rel=1e-9)
        assert row.fullest_gib == pytest.approx(peak, rel=1e-9)


def test_a_peak_is_predicted_as_its_source_measured_it(found: Validation) -> None:
    """Allocated: without communicators, of the first stage where rank 0 logs; reserved: with the cache; device: with all else."""
    gib = 2**30
    for name, how in (
        ("nt-8p86b-n4-dp2-tp4-pp4-mbs2-ga64-z1", "first stage"),
        ("titan-t1-0", "reserved"),
        ("bs-prequel-92-g384-dp8-tp4-pp12-mbs4", "device"),
        ("simumax-b200-llama3-405b-l4-tp4-pp1-dp2-mbc4-cef", "allocated"),
    ):
        row = next(o for o in found.outcomes if o.run.id == name)
        assert row.job is not None
        stages = detail(CostModel(row.job.problem, load_profile(row.job.accelerator)), row.job.layout).stage_bytes
        allocated = [(sum(terms.values()) - terms["communicators"]) / gib for terms in stages]
        expected = allocated[0] if how == "first stage" else max(allocated)
        expected *= {"reserved": 1.05, "device": 1.16}.get(how, 1.0)
        if how == "device":
            expected += stages[0]["communicators"] / gib + 0.8
        assert row.predicted_peak_gib == pytest.approx(expected, rel=1e-9), name


def test_mfu_only_rows_get_a_step_time_by_the_familys_convention(found: Validation) -> None:
    row = next(o for o in found.outcomes if o.run.id == "msllm-v2_0_0-llama2-7b-pretrain-mfu")
    tokens, flops_per_token = 128 * 4096, 6 * 6.6e9 + 12 * 32 * 4096 * 4096
    assert row.measured_step_time_s == pytest.approx(tokens * flops_per_token / (8 * 0.69 * 313e12), rel=0.03)


def test_json_has_the_fixed_keys_and_no_others(found: Validation) -> None:
    document = json.loads(found.to_json())
    assert set(document) == {"rows", "families"}
    assert {tuple(row) for row in document["rows"]} == {(*KEYS, *MORE)}
    assert [row["id"] for row in document["rows"]] == [run.id for run in read_runs(SAMPLE)]
    skipped = [row for row in document["rows"] if row["skipped"]]
    assert skipped and all(row["predicted_step_time_s"] is None and row["predicted_oom"] is None for row in skipped)


def test_structural_rules_are_listed_and_never_read_an_error(found: Validation) -> None:
    assert found.excluded("dgxc") == {"vpp-unknown": 1}
    assert len({rule.id for rule in EXCLUSIONS}) == len(EXCLUSIONS)
    assert all(re.fullmatch(r"[a-z0-9-]+", rule.id) for rule in EXCLUSIONS)


def test_a_run_that_its_source_calls_a_regression_is_not_counted(runs: dict[str, Run]) -> None:
    said = job(runs["korthikanti-t5-175b-full"], notes="footnote: known regression/unoptimised mapping (see doc)")
    assert "known-regression" in exclusions(said)
    assert "known-regression" not in exclusions(job(runs["korthikanti-t5-175b-full"], notes="regression tests pass"))


@pytest.mark.parametrize(
    ("family", "split", "median", "worst_spearman"),
    # Aleph Alpha's eight rows are of its 13B model: two stages of it cost more, and its gradients less, than those of the 30B one.
    [("korthikanti", "fit", 0.02, None), ("korthikanti", "test", 0.055, None), ("aleph-alpha", "test", 0.08, 0.4)],
)
def test_error_on_the_sample_has_not_grown(
    found: Validation, family: str, split: str, median: float, worst_spearman: float | None
) -> None:
    cell = next(c for c in found.cells if (c.family, c.slice, c.split) == (family, "counted", split))
    assert cell.statistics.time is not None and cell.statistics.time.median <= median
    if worst_spearman is not None:
        assert cell.statistics.ranking is not None and (cell.statistics.ranking.spearman_least or 0.0) >= worst_spearman


@pytest.mark.parametrize(("family", "median"), [("simumax", 0.01), ("torchtitan", 0.03), ("kempner", 0.02), ("nanotron", 0.12)])
def test_memory_has_not_grown_worse(found: Validation, family: str, median: float) -> None:
    cell = next(c for c in found.cells if (c.family, c.slice) == (family, "counted") and c.statistics.memory.peak)
    assert cell.statistics.memory.peak is not None and cell.statistics.memory.peak.median <= median


def test_runs_that_ran_out_are_told(found: Validation) -> None:
    ended = [o for o in found.outcomes if o.run.status == "oom" and not o.skipped]
    assert len(ended) >= 6 and all(o.predicted_oom for o in ended)


@pytest.fixture(scope="module")
def memory_cells() -> dict[tuple[str, str], Statistics]:
    """Statistics of memory of all published runs that say something of it, by family and split."""
    if not WHOLE.is_file():
        pytest.skip("the measured runs are not here")
    runs = [run for run in read_runs(WHOLE) if run.text("measured_peak_mem_gib") or run.family == "aleph-alpha"]
    cells = summarize(outcomes_of(runs, read_shapes(WHOLE.parent / "models.json"))).cells
    return {(c.family, c.split): c.statistics for c in cells if c.slice == RECORDED.get(c.family, ("counted",))[0]}


RECORDED = {
    "simumax": ("counted", 0.02),
    "nanotron": ("pp 1, tp ≤ 8", 0.05),
    "kempner": ("counted", 0.05),
    "torchtitan": ("counted", 0.05),
}
"""The slice of a family, and the median error of its peaks that was recorded when the model was made, rounded up."""


@pytest.mark.parametrize("split", ["fit", "test"])
@pytest.mark.parametrize("family", RECORDED)
def test_recorded_errors_of_peak_memory_have_not_grown(
    memory_cells: dict[tuple[str, str], Statistics], family: str, split: str
) -> None:
    peak = memory_cells[family, split].memory.peak
    assert peak is not None and peak.median <= RECORDED[family][1]


@pytest.mark.parametrize(("split", "precision", "recall", "sure_accuracy"), [("fit", 0.96, 0.99, 0.98), ("test", 0.96, 0.94, 0.94)])
def test_recorded_verdicts_on_published_runs_have_not_grown_worse(
    memory_cells: dict[tuple[str, str], Statistics], split: str, precision: float, recall: float, sure_accuracy: float
) -> None:
    """The boolean on every row, those within the band of doubt too; outside it, verdicts are nearly always right."""
    told = memory_cells["aleph-alpha", split].memory
    assert told.precision is not None and told.precision >= precision
    assert told.recall is not None and told.recall >= recall
    assert told.sure_accuracy is not None and told.sure_accuracy >= sure_accuracy
    assert told.unsure is not None and told.unsure <= 0.2


# --- statistics ----------------------------------------------------------------------------------------------------------------


def test_ties_share_their_mean_rank_whatever_the_order_of_rows() -> None:
    assert average_ranks(np.array([3.0, 1.0, 1.0, 2.0])).tolist() == [4.0, 1.5, 1.5, 3.0]
    assert spearman(np.ones(4), np.arange(4.0)) is None
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([10.0, 30.0, 20.0])) == pytest.approx(0.5)


def test_regret_of_a_tie_is_the_mean_of_those_tied() -> None:
    measured = np.array([1.0, 2.0, 3.0])
    assert regret(np.array([5.0, 5.0, 9.0]), measured) == pytest.approx(0.5)
    assert regret(np.ones(3), measured) == pytest.approx(1.0)  # a constant MFU: any layout, at random
    assert regret(measured, measured) == 0.0


def test_errors_and_bias() -> None:
    summary = errors([(1.1, 1.0), (0.9, 1.0), (None, 1.0), (2.0, 1.0)])
    assert summary is not None
    assert (summary.rows, summary.median) == (3, pytest.approx(0.1))
    assert summary.bias == pytest.approx(np.log(1.1))
    assert errors([]) is None


def test_near_the_limit_nobody_knows() -> None:
    """85 % of the free memory is still a fit: that is as far as a plan goes by default."""
    assert [verdict(peak, 100.0) for peak in (85.0, 85.01, 114.9, 115.1)] == ["fits", "unsure", "unsure", "oom"]
    assert [verdict(peak, 100.0) for peak in (80.0, 90.0, 110.0, 120.0)] == ["fits", "unsure", "unsure", "oom"]


# --- the command ---------------------------------------------------------------------------------------------------------------


def test_the_command_prints_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(SAMPLE), "--json"]) == 0
    assert {row["id"] for row in json.loads(capsys.readouterr().out)["rows"]} == {run.id for run in read_runs(SAMPLE)}


def test_the_command_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(SAMPLE)]) == 0
    printed = capsys.readouterr().out
    for title in ("Step time, counted rows", "Memory, counted rows", "Worst rows", "Not priced", "Priced but not counted"):
        assert title in printed


def test_a_bad_file_is_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["validate", str(tmp_path / "none.csv")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_interval_of_a_median_counts_groups_not_rows(runs: dict[str, Run]) -> None:
    """Eight rows off by 1 to 8 %: alone each says its own, in two groups of four only the two halves vary."""
    run = runs["korthikanti-t5-175b-full"]

    def off(groups: list[str]) -> tuple[float, float] | None:
        rows = [
            Outcome(Run({**run.cells, "group": group}, run.id), predicted_step_time_s=1.0 + place / 100, measured_step_time_s=1.0)
            for place, group in enumerate(groups, start=1)
        ]
        return median_interval(rows)

    alone, halves = off(list("abcdefgh")), off(list("aaaabbbb"))
    assert alone is not None and 0.02 <= alone[0] <= 0.03 and 0.06 <= alone[1] <= 0.07
    # A quarter of all draws takes the first group twice, a quarter the second: their medians are the ends.
    assert halves == pytest.approx((0.02, 0.06))
    assert off(["a"] * 8) is None


# --- files ---------------------------------------------------------------------------------------------------------------------


def test_a_table_without_shapes_has_a_reason_per_row(tmp_path: Path) -> None:
    copy = tmp_path / "runs.csv"
    copy.write_bytes(SAMPLE.read_bytes())
    priced = [o for o in validate(copy).outcomes if not o.skipped]
    assert {o.run.text("model") for o in priced} <= {"deepseek-v3-mtp1", "llama3-70b", "llama3.1-8b", *catalog_names("models")}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no column"),
        (b"id,model\n1,2\n", "has no column 'accelerator'"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"id,model,accelerator,num_accelerators,seq_len,global_batch,micro_batch,tp,pp,precision,tp\n", "'tp' more than once"),
    ],
)
def test_a_file_that_is_no_table_of_runs_is_one_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_bytes(content)
    with pytest.raises(InputError, match=words):
        validate(bad)


def test_hostile_cells_are_a_reason_not_a_traceback(tmp_path: Path, runs: dict[str, Run]) -> None:
    base = dict(runs["korthikanti-t5-175b-full"].cells)
    columns = ("tp", "pp", "vpp", "cp", "ep", "dp", "micro_batch", "global_batch", "num_accelerators", "seq_len", "domain_size")
    values = ("0", "-1", "nan", "inf", "1e300", "1e9", "x", "", "3")
    rows = [base | {"id": f"{column}={value}", column: value} for column in columns for value in values]
    path = tmp_path / "runs.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(base))
        writer.writeheader()
        writer.writerows(rows)
    (tmp_path / "models.json").write_bytes((MEASURED / "models.json").read_bytes())
    assert len(validate(path).outcomes) == len(rows)
