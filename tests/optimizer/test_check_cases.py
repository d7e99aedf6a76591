"""Jobs as people ran them into trouble, with what is right about each: worked out by hand, not by the rules."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from paraplan.optimizer.checking.checked import Change
from paraplan.optimizer.checking.checker import check
from paraplan.optimizer.readers import read_text
from paraplan.optimizer.reports.check import render_check
from paraplan.search_spaces.inputs import load_stack
from paraplan.search_spaces.model import Attention, DenseMlp, LayerKind, ModelSpec
from rich.console import Console

from .check_samples import LLAMA_7B, LLAMA_70B, checked, job, legal, line, rules, states, terms

SHARDED_ONLY = {"use-distributed-optimizer": True}
SHARDED = {**SHARDED_ONLY, "sequence-parallel": True}


# --- stages ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "pp", "divisors"),
    [
        (30, 4, (1, 2, 3, 5, 6, 10, 15, 30)),
        (46, 4, (1, 2, 23, 46)),
        (78, 8, (1, 2, 3, 6, 13, 26, 39, 78)),
        (61, 4, (1, 61)),
    ],
)
def test_layers_that_stages_do_not_divide(layers: int, pp: int, divisors: tuple[int, ...]) -> None:
    """A floor would drop 30 mod 4 = 2 layers without a word."""
    found = checked(layers=layers, heads=32, pp=pp)
    assert "C060" in rules(found)
    assert legal(found, "C060", "pp") == divisors


@pytest.mark.parametrize(
    ("layers", "pp", "ends", "stages"),
    [
        (30, 4, {"first": 7, "last": 7}, (7, 8, 8, 7)),
        (30, 4, {"first": 8, "last": 8}, (8, 7, 7, 8)),
        (61, 4, {"last": 13}, (16, 16, 16, 13)),
        (46, 4, {"first": 11, "last": 11}, (11, 12, 12, 11)),
        (78, 8, {"last": 8}, (10,) * 7 + (8,)),
        (94, 4, {"last": 16}, (26, 26, 26, 16)),
        (94, 4, {"last": 4}, (30, 30, 30, 4)),
        (94, 4, {"first": 23, "last": 23}, (23, 24, 24, 23)),
        (20, 1, {"last": 20}, (20,)),
        (6, 4, {"account-for-embedding-in-pipeline-split": True, "account-for-loss-in-pipeline-split": True}, (1, 2, 2, 1)),
    ],
)
def test_uneven_stages(layers: int, pp: int, ends: dict[str, Any], stages: tuple[int, ...]) -> None:
    found = checked(layers=layers, heads=32, pp=pp, **ends)
    assert not rules(found)
    assert found.stages == stages


@pytest.mark.parametrize(
    ("layers", "pp", "ends", "said"),
    [
        (61, 4, {"last": 15}, "13 or 16 in the last stage would"),
        (61, 4, {"last": 14}, "13 or 16 in the last stage would"),
        (20, 1, {"last": 1}, "1 of the 20 layers"),
        (61, 8, {"account-for-embedding-in-pipeline-split": True, "account-for-loss-in-pipeline-split": True}, "63"),
        (30, 4, {"first": 7, "account-for-loss-in-pipeline-split": True}, "only one"),
    ],
)
def test_stages_that_leave_layers_out(layers: int, pp: int, ends: dict[str, Any], said: str) -> None:
    found = checked(layers=layers, heads=32, pp=pp, **ends)
    assert rules(found) & {"C060", "C061"}
    assert said in " ".join(each.sentence for each in found.broken)


@pytest.mark.parametrize(("pp", "vpp"), [(16, 1), (8, 2), (4, 4)])
def test_one_layout_string_on_three_pipelines(pp: int, vpp: int) -> None:
    """4 + 14·4 + 1 = 61 decoders and the MTP layer with the loss, in 16 chunks."""
    found = checked(layers=61, heads=128, pp=pp, layout="'Et*4|(tttt|)*14tmL'", mtp_num_layers=1)
    assert not rules(found)
    assert found.given["vpp"] == vpp
    assert found.stages == (4,) * 15 + (2,)


def test_mtp_and_loss_weigh_a_layer_of_the_last_stage() -> None:
    """61 decoders and one MTP layer on 8 stages: 7, six times 8, then 6 with MTP and loss."""
    found = checked(layers=61, heads=128, pp=8, layout="'Et*7|(t*8|)*6t*6mL'", mtp_num_layers=1)
    assert not rules(found)
    assert found.stages == (7, *(8,) * 6, 7)


def test_a_layout_string_with_another_number_of_layers() -> None:
    assert "C063a" in rules(checked(layers=60, heads=128, pp=4, layout="'Et*4|(tttt|)*14tmL'", mtp_num_layers=1))


def test_a_layout_string_gives_the_chunks() -> None:
    """2 + 6·2 = 14 decoders in 8 chunks on 4 stages; 16 experts' ranks on 4 stages are 64 devices; 256 / 16 = 16 micro-batches."""
    values = {"layers": 14, "heads": 128, "pp": 4, "ep": 16, "experts": 256, "layout": "'Ett|(tt|)*6mL'", "mtp-num-layers": 1}
    found = checked(world=64, gbs=256, mbs=1, **values)
    assert not rules(found)
    assert (found.given["vpp"], found.given["num_microbatches"], found.given["dp"]) == (2, 16, 16)


def test_chunks_of_an_80_layer_model() -> None:
    found = checked(layers=80, heads=64, pp=4, vpp=3)
    assert legal(found, "C060", "vpp") == (1, 2, 4, 5, 10, 20)


@pytest.mark.parametrize(
    ("options", "mtp", "printed"),
    [("", 0, "16+16+16+13\n"), ("--mtp-num-layers 1", 1, "16+16+16+13 (1 MTP layer more)"), ("--mtp-num-layers 0", 0, "+13\n")],
)
def test_mtp_layers_are_those_that_are_asked_for(options: str, mtp: int, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A config.json has an MTP layer; Megatron builds it only where its option says so."""
    text = line(options, pp=4, last=13, ep=8, experts=256, mbs=1, gbs=640, seq=4096)
    found = check(read_text(text, "job", devices=128), "deepseek-r1", "hgx-h100", best=False)
    assert found.problem is not None and (found.problem.model.mtp is not None) is bool(mtp)
    assert found.mtp == (0, 0, 0, mtp)
    assert any(said.startswith("no MTP layers, where deepseek-r1 has 1") for said in found.assumptions) is not bool(mtp)
    render_check(found, "job", Console(width=100))
    assert printed in capsys.readouterr().out


def test_layers_of_many_chunks_are_folded(capsys: pytest.CaptureFixture[str]) -> None:
    text = "tp=1,pp=4,vpp=8,stages=" + "+".join([*["3"] * 17, *["2"] * 14, "1"])
    found = check(text, "llama-3.1-70b", "hgx-h100", devices=8, global_batch=64, seq_len=4096, best=False)
    render_check(found, "job", Console(width=100))
    printed = capsys.readouterr().out
    assert "layers per chunk 17 × 3, 14 × 2, 1\n" in printed and "2+2" not in printed
    parts = [[f"layers.{layer}" for layer in range(first, first + 5)] for first in range(0, 80, 5)]
    for listed in (f"layers_per_chunk: {[5] * 16}", f"module_fqns_per_model_part = {json.dumps(parts)}", f"stages={'5+' * 15}5"):
        one = Change(column="stages", before="no list", after=listed)
        render_check(found.model_copy(update={"best": found.priced, "changes": (one,)}), "job", Console(width=100))
        name = listed.partition("5")[0].partition("[")[0]
        assert f"add {name}16 × 5 layers (as it is written: --json)" in capsys.readouterr().out


# --- experts -----------------------------------------------------------------------------------------------------------------


def test_expert_grid_larger_than_the_job() -> None:
    """1·8·2 = 16 is not a part of 8."""
    found = checked(world=8, tp=2, pp=2, ep=8, etp=1, experts=64, layers=48, heads=32, seq=4096, sequence_parallel=True)
    assert "C002" in rules(found)
    assert legal(found, "C002", "ep") == (1, 2, 4)
    assert {"ep": 4} in found.nearest_columns


@pytest.mark.parametrize(("etp", "broken"), [("model.expert_tensor_parallel_size=1", False), ("", True)])
def test_expert_tensor_parallelism_left_out_is_tp(etp: str, broken: bool) -> None:
    degrees = "model.tensor_model_parallel_size=4 model.expert_model_parallel_size=4 model.sequence_parallel=true"
    found = check(read_text(f"run_recipe.py {degrees} model.num_moe_experts=128 {etp}", "job", devices=4), best=False)
    assert ("C002" in rules(found)) is broken
    assert any("etp 4" in said for said in found.assumptions) is broken


def test_ep_is_not_bound_to_dp() -> None:
    """EP 32 on CP 16 · DP 2: the expert grid is 32 devices, whatever DP is."""
    for ep in (1, 2, 4, 8, 16, 32):
        assert not rules(checked(world=32, cp=16, ep=ep, experts=256, layers=48, heads=32, seq=32768)), ep
    found = checked(world=32, cp=16, ep=64, experts=256, layers=48, heads=32, seq=32768)
    assert legal(found, "C002", "ep") == (1, 2, 4, 8, 16, 32)


def test_experts_on_24_devices() -> None:
    """24 does not divide 256; the common divisors are 1, 2, 4 and 8; PP 3 · EP 8 = 24 with 78 / 3 = 26 layers a stage."""
    found = checked(world=24, ep=24, experts=256, layers=78, heads=64)
    assert "C080c" in rules(found)
    assert {value for change in found.nearest_columns for value in change.values()} <= {1, 2, 4, 8}
    assert not rules(checked(world=24, pp=3, ep=8, experts=256, layers=78, heads=64))


def test_experts_of_46_layers_on_32_devices() -> None:
    found = checked(world=32, tp=8, pp=4, ep=16, etp=1, experts=128, layers=46, heads=96, gbs=16, mbs=2, sequence_parallel=True)
    assert {"C002", "C060"} <= rules(found)
    assert max(legal(found, "C002", "ep")) == 8


@pytest.mark.parametrize(("ep", "broken"), [(2, True), (4, False)])
def test_experts_per_rank_of_fused_kernels(ep: int, broken: bool) -> None:
    found = checked(form="mindspeed-llm", world=64, ep=ep, experts=512, layers=48, heads=16)
    assert ("P004" in rules(found)) is broken


@pytest.mark.parametrize(
    ("cluster", "options", "stack", "broken"),
    [
        ("atlas-800t-a2", {}, "mindspeed-llm", True),
        ("atlas-800t-a2", {"framework": "megatron-lm"}, "megatron-lm", False),
        ("hgx-h100", {}, "megatron-lm", False),
    ],
)
def test_megatron_script_on_ascend_is_run_by_mindspeed(
    tmp_path: Path, cluster: str, options: dict[str, Any], stack: str, broken: bool
) -> None:
    """256 experts a rank are more than Ascend's fused kernels take, whoever the script was written for; asked for, it stays."""
    script = tmp_path / "pretrain.sh"
    script.write_text(line(ep=2, experts=512, layers=48, heads=16))
    found = check(script, cluster=cluster, devices=64, best=False, **options)
    assert found.stack == stack and ("P004" in rules(found)) is broken
    assert any("run by MindSpeed-LLM" in said for said in found.assumptions) is broken


# --- attention ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "version", "broken"), [(2, "0.12", False), (4, "0.12", True), (8, "0.12", True), (4, "0.16", False)]
)
def test_kv_heads_before_they_were_replicated(tp: int, version: str, broken: bool) -> None:
    values = {"tp": tp, "ep": 8, "etp": 1, "experts": 256, "layers": 40, "heads": 16, "seq": 4096, "sequence-parallel": True}
    found = checked("--group-query-attention --num-query-groups 2", world=8, options={"framework_version": version}, **values)
    assert ("C021c" in rules(found)) is broken
    if broken:
        assert legal(found, "C021c", "tp") == (1, 2)


def test_sequence_parallel_attention_over_48_heads() -> None:
    """48 heads over 64 ranks: 16 is the largest power of two that divides both."""
    spec = ModelSpec(
        name="forty-eight",
        hidden_size=6144,
        vocab_size=32000,
        max_position_embeddings=4096,
        kinds={"dense": LayerKind(mixer=Attention(heads=48, kv_heads=48, head_dim=128), mlp=DenseMlp(width=16384))},
        layers=("60*dense",),
    )
    text = '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "sequence_parallel_size": 64}'
    found = check(read_text(text, "ds.json", devices=64), spec, seq_len=4096, global_batch=64, best=False)
    assert "C044a" in rules(found)
    assert max(legal(found, "C044a", "cp")) == 16


@pytest.mark.parametrize(("cp", "broken"), [(2, False), (4, True), (8, True)])
def test_sequence_parallel_attention_over_two_kv_heads(cp: int, broken: bool) -> None:
    """Where KV heads are not replicated, all-to-all over heads ends at their number."""
    found = checked("--group-query-attention --num-query-groups 2 --cp-comm-type a2a", world=8, cp=cp, layers=4, heads=32, seq=4096)
    assert ("C044b" in rules(found)) is broken


@pytest.mark.parametrize("tp", [4, 8])
def test_the_vision_tower_s_heads_are_not_the_model_s(tp: int, tmp_path: Path) -> None:
    """64 heads and 8 KV heads of the language model, whatever the vision tower beside it has."""
    text = {"model_type": "qwen2", "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 4, "hidden_size": 8192}
    text |= {"intermediate_size": 29568, "vocab_size": 151674, "max_position_embeddings": 32768}
    config = {"model_type": "internvl", "text_config": text, "vision_config": {"num_attention_heads": 25, "num_hidden_layers": 45}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    found = check(f"tp={tp}", tmp_path, devices=8, best=False)
    assert not rules(found) and not any("give MODEL" in said for said in found.not_judged)


@pytest.mark.parametrize(("tp", "cp", "least"), [(1, 2, 4), (2, 2, 4), (4, 2, 8), (8, 4, 32), (3, 2, 12), (8, 1, 8)])
def test_least_sequence(tp: int, cp: int, least: int) -> None:
    """cp·lcm(2, tp); without CP, tp."""
    values = {"tp": tp, "cp": cp, "layers": 4, "heads": 24, "hidden-size": 48, "ffn-hidden-size": 96, "sequence-parallel": tp > 1}
    assert not rules(checked(seq=least, world=tp * cp, **{k: v for k, v in values.items() if v is not False}))
    for shorter in range(1, least):
        assert rules(checked(seq=shorter, world=tp * cp, **{k: v for k, v in values.items() if v is not False})), shorter


# --- batch and schedules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "values", "share"),
    [
        (32, {"tp": 8, "pp": 2, "gbs": 2, "mbs": 1, "layers": 80}, "50.0 %"),  # (2−1)/1 of the work, half the step
        (512, {"tp": 4, "pp": 8, "gbs": 64, "mbs": 1, "layers": 80}, "63.6 %"),  # 4 of 11 slots are used
        (64, {"tp": 8, "pp": 4, "gbs": 16, "mbs": 2, "layers": 48}, "42.9 %"),  # 3/7
    ],
)
def test_pipelines_with_few_micro_batches(world: int, values: dict[str, int], share: str) -> None:
    found = checked(world=world, heads=64, **values)
    assert not rules(found)
    assert f"({share} of the step)" in " ".join(found.advice)


@pytest.mark.parametrize(("micro_batch", "count"), [(16, 8), (8, 16), (4, 32)])
def test_larger_micro_batches_widen_the_bubble(micro_batch: int, count: int) -> None:
    """At a fixed global batch of 256 on DP 2 the bubble is (p−1)/m of the work: 1/8, 1/16 and 1/32."""
    values = {"tp": 2, "pp": 2, "mbs": micro_batch, "gbs": 256, "seq": 2048, **SHARDED}
    found = checked(LLAMA_7B, world=8, options={"cluster": "hgx-b200"}, **values)
    assert found.given["num_microbatches"] == count and found.priced is not None
    spent = found.priced.breakdown_s
    assert spent["bubble"] / (spent["forward"] + spent["backward"] + spent["tp"]) == pytest.approx(1 / count, rel=0.05)


def test_interleaving_with_few_micro_batches() -> None:
    found = checked(world=6, pp=6, vpp=2, gbs=3, mbs=1, layers=24, heads=32)
    assert "C030a" in rules(found)
    assert {"global_batch": 6} in found.nearest_columns


@pytest.mark.parametrize(("batch", "group", "broken"), [(10, 5, set()), (10, 0, {"C030a"}), (11, 5, {"C030a"}), (14, 5, set())])
def test_interleaving_in_groups(batch: int, group: int, broken: set[str]) -> None:
    """A group of five on four stages: two whole ones, or a third of four; one micro-batch left over would not fill the stages."""
    flag = f"--microbatch-group-size-per-virtual-pipeline-stage {group}" if group else ""
    values = {"tp": 2, "pp": 4, "vpp": 2, "gbs": batch, "mbs": 1, "seq": 2048, **SHARDED}
    found = checked(f"{LLAMA_7B} {flag}", world=8, options={"cluster": "hgx-h100"}, **values)
    assert rules(found) == broken and not found.unknown
    if not broken:
        assert found.priced is not None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--recompute-in-bubble", ()),
        ("--recompute-in-bubble --recompute-granularity full --recompute-method block --recompute-num-layers 3", ("layers 3 out",)),
        ("--recompute-in-bubble --recompute-in-advance", ("--recompute-in-advance", "--recompute-num-layers")),
        ("--recompute-in-bubble --swap-attention --no-overlap-p2p-communication", ("--no-overlap-p2p", "--swap-attention")),
        ("--recompute-in-advance --recompute-granularity full --recompute-method block --recompute-num-layers 1", ()),
        ("--recompute-in-advance --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", ("block",)),
        ("--recompute-in-advance --optimize-send-recv-comm", ("--optimize-send-recv-comm", "--recompute-num-layers")),
    ],
)
def test_recompute_apart_from_backward_passes(flags: str, said: tuple[str, ...]) -> None:
    """C076; MindSpeed takes it with interleaved chunks only, told as layers of each."""
    values = {"pp": 4, "gbs": 16, "mbs": 1, "layers": 32, "heads": 32, "seq": 2048}
    found = checked(f"{flags} --num-layers-per-virtual-pipeline-stage 4", form="mindspeed-llm", world=4, **values)
    sentences = [each.sentence for each in found.broken if each.rule == "C076"]
    assert len(sentences) == len(said) and all(any(word in text for text in sentences) for word in said), sentences
    unpriced = [each for each in found.assumptions if "--recompute-in-bubble is not priced" in each]
    assert len(unpriced) == ("--recompute-in-bubble" in flags)
    plain = checked(flags, form="mindspeed-llm", world=4, **values)
    assert any(each.rule == "C076" and "needs pp > 1" in each.sentence for each in plain.broken)


def test_recompute_before_the_gradient_narrows_the_bubble() -> None:
    """Chunks of one layer: what waits for a gradient is the backward alone. In chunks of two MindSpeed turns it off."""
    values = {"tp": 2, "pp": 4, "gbs": 8, "mbs": 1, "seq": 2048, **SHARDED}
    flags = "--recompute-granularity full --recompute-method block --recompute-num-layers"

    def bubble(depth: int, more: str = "") -> float:
        text = f"{LLAMA_7B} {flags} {depth} --num-layers-per-virtual-pipeline-stage {depth} {more}"
        found = checked(text, form="mindspeed-llm", world=8, options={"cluster": "atlas-800t-a2"}, **values)
        assert found.priced is not None and not found.broken
        return float(found.priced.breakdown_s["bubble"])

    assert 0.0 < bubble(1, "--recompute-in-advance") < 0.9 * bubble(1)
    assert bubble(2, "--recompute-in-advance") == pytest.approx(bubble(2), rel=1e-9)


@pytest.mark.parametrize("flag", ["", "--overlap-moe-expert-parallel-comm"])
def test_paired_passes_hide_the_exchange_of_tokens(flag: str) -> None:
    values = {"pp": 2, "vpp": 2, "ep": 4, "gbs": 32, "mbs": 1, "seq": 4096, **SHARDED_ONLY}
    text = f"{QWEN3_30B} --moe-token-dispatcher-type alltoall {flag}"
    found = checked(text, world=8, options={"cluster": "hgx-h200"}, **values)
    assert found.priced is not None
    hidden = found.priced.layout.overlap.get("ep", 0.0)
    assert hidden == (load_stack("megatron-bridge-ep-overlap").overlap.ep if flag else 0.0)


@pytest.mark.parametrize(
    ("schedule", "pp", "count", "broken"),
    [
        ("1F1B", 4, 3, {"C033"}),
        ("1F1B", 4, 4, set()),
        ("Interleaved1F1B", 4, 10, set()),
        ("Interleaved1F1B", 4, 3, set()),
        ("Interleaved1F1B", 4, 11, {"C030b"}),
    ],
)
def test_torchtitan_counts_rounds(schedule: str, pp: int, count: int, broken: set[str]) -> None:
    text = (
        f'[parallelism]\npipeline_parallel_degree = {pp}\npipeline_parallel_schedule = "{schedule}"\n'
        f"[training]\nlocal_batch_size = {count}\nseq_len = 4096\n"
    )
    assert rules(check(read_text(text, "titan.toml", devices=pp), best=False)) == broken


@pytest.mark.parametrize(
    ("values", "broken"), [({}, set()), ({"gbs": 14}, {"C032a"}), ({"layers": 40}, {"C075b"}), ({"cp": 2}, {"C075c"})]
)
def test_dualpipev(values: dict[str, int], broken: set[str]) -> None:
    """2·pp micro-batches at least, equal chunks, no CP and an untied head; its two chunks are no interleaving."""
    given = {"pp": 8, "layers": 32, "heads": 32, "mbs": 1, "gbs": 16, "seq": 4096, **values}
    flags = "--schedules-method dualpipev --untie-embeddings-and-output-weights"
    assert rules(checked(flags, form="mindspeed-llm", world=8 * given.get("cp", 1), **given)) == broken


def test_megatron_runs_fewer_micro_batches_than_stages() -> None:
    assert not rules(checked(world=4, pp=4, gbs=3, mbs=1, layers=8, heads=8))


# --- vocabulary --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "tp", "divisor", "padded"),
    [(151669, 4, 1, 151672), (151669, 4, 128, 152064), (250682, 8, 1, 250688), (50257, 2, 1, 50258)],
)
def test_vocabulary_that_tp_does_not_divide(vocab: int, tp: int, divisor: int, padded: int) -> None:
    values = {"padded-vocab-size": vocab, "make-vocab-size-divisible-by": divisor}
    found = checked(tp=tp, layers=8, heads=32, **values)
    assert "C023" in rules(found)
    assert f"{padded} would" in " ".join(each.sentence for each in found.broken)
    assert "C023" not in rules(checked(tp=tp, layers=8, heads=32, **{**values, "padded-vocab-size": padded}))


def test_the_vocabulary_is_padded_to_whole_rows_per_rank() -> None:
    """32,002 tokens on TP 2 with a divisor of 128 are held as ⌈32002/256⌉·256 = 32,256."""
    bare = LLAMA_7B.replace("--vocab-size 32000", "")
    values = {"world": 8, "tp": 2, "mbs": 1, "gbs": 8, "seq": 2048, "options": {"cluster": "hgx-b200"}, **SHARDED}
    divisor = "--make-vocab-size-divisible-by 128"
    padded, exact = (checked(f"{bare} {divisor} --vocab-size {size}", **values) for size in (32002, 32256))
    assert terms(padded)["weights"] == terms(exact)["weights"]
    smaller = checked(f"{bare} {divisor} --vocab-size 32000", **values)
    assert terms(padded)["weights"] - terms(smaller)["weights"] == pytest.approx(2 * 256 * 4096 / 2 * 2 / 2**30)


# --- models that options describe --------------------------------------------------------------------------------------------

QWEN3_30B = (
    "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --kv-channels 128 --group-query-attention "
    "--num-query-groups 4 --num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8 --swiglu --disable-bias-linear "
    "--qk-layernorm --untie-embeddings-and-output-weights --normalization RMSNorm --position-embedding-type rope "
    "--padded-vocab-size 151936"
)
QWEN3_600M = (
    "--num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16 --kv-channels 128 --group-query-attention "
    "--num-query-groups 8 --swiglu --disable-bias-linear --qk-layernorm --normalization RMSNorm --position-embedding-type rope "
    "--padded-vocab-size 151936"
)


@pytest.mark.parametrize(("options", "parameters"), [(QWEN3_30B, 30.53e9), (QWEN3_600M, 596e6), (LLAMA_7B, 6.74e9)])
def test_sizes_of_models_in_options(options: str, parameters: float) -> None:
    """Experts have their own width, heads their own size."""
    spec = job(options).model
    assert spec is not None
    assert spec.parameters() == pytest.approx(parameters, rel=2e-3)


# --- memory ------------------------------------------------------------------------------------------------------------------

H100 = {"cluster": "hgx-h100"}


def test_unsharded_optimizer_fills_a_70b_job() -> None:
    """69 B over TP 8 · PP 2 at 18 bytes a weight is 72 GiB of 79: sharding the optimizer is what helps."""
    found = checked(LLAMA_70B, world=128, tp=8, pp=2, mbs=1, gbs=512, seq=4096, sequence_parallel=True, options=H100)
    assert found.fit is not None and not found.ok
    assert states(found) == pytest.approx(68.98e9 / 16 * 18 / 2**30, rel=0.03)
    assert found.fit.term == "optimizer"
    sharded = (("no --use-distributed-optimizer", "--use-distributed-optimizer"),)
    assert [mend.peak_gib < found.fit.free_gib for mend in found.fit.mends if mend.changes == sharded] == [True]


@pytest.mark.parametrize("seq", [64, 2048])
def test_7b_on_40_gb_without_sharding(seq: int) -> None:
    """121 GB of states do not depend on the sequence; TP 2 with a sharded optimizer takes 30."""
    on = {"cluster": "hgx-a100-40gb"}
    found = checked(LLAMA_7B, world=8, mbs=1, gbs=8, seq=seq, options=on)
    assert found.fit is not None and found.fit.verdict == "oom"
    assert checked(LLAMA_7B, world=8, tp=2, mbs=1, gbs=8, seq=seq, **SHARDED, options=on).ok


def test_full_recompute_computes_four_passes_for_three() -> None:
    """296.5 TFLOP/s of useful work on TP 8 · PP 8 · DP 2 are 395 of computed: 4/3, which closes the gap to a run without."""
    whole = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 5}
    values = {"tp": 8, "pp": 8, "mbs": 1, "gbs": 512, "seq": 4096, **SHARDED}
    found = checked(LLAMA_70B, world=128, options=H100, **values, **whole)
    assert found.priced is not None and found.priced.hfu / found.priced.mfu == pytest.approx(4 / 3, rel=0.02)


DEEPSEEK_OF_14_LAYERS = (
    "--num-layers 14 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --multi-latent-attention "
    "--q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 256 "
    "--moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --mtp-num-layers 1 --swiglu "
    "--disable-bias-linear --qk-layernorm --untie-embeddings-and-output-weights --normalization RMSNorm "
    "--position-embedding-type rope --padded-vocab-size 129280 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
)


def test_what_full_recompute_trades_on_a_deepseek_of_14_layers() -> None:
    """Measured on 64 H100: 225.1 and 184.2 TFLOP/s a device, 0.82 of the speed (four passes for three would be 0.75) for 0.88 of
    the peak: most of it is states."""
    hidden = {"overlap-grad-reduce": True, "overlap-param-gather": True, **SHARDED_ONLY}
    values = {"tp": 1, "pp": 4, "ep": 16, "mbs": 1, "gbs": 256, "seq": 2048, "layout": "'Ett|(tt|)*6mL'", **hidden}
    whole = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    bare, redone = (checked(DEEPSEEK_OF_14_LAYERS, world=64, options=H100, **values, **more).priced for more in ({}, whole))
    assert bare is not None and redone is not None
    assert bare.model_tflops_per_device == pytest.approx(225.1, rel=0.15)
    assert redone.model_tflops_per_device == pytest.approx(184.2, rel=0.15)
    assert bare.step_time_s / redone.step_time_s == pytest.approx(0.818, rel=0.15)
    assert redone.memory.peak_gib / bare.memory.peak_gib == pytest.approx(0.876, rel=0.15)


def test_two_48_gb_cards_hold_states_of_6b_weights_at_most() -> None:
    """16 bytes · 6e9 / PP 2 = 48 GB without any sharding, before activations."""
    sizes = "--num-layers 32 --hidden-size 3968 --num-attention-heads 31 --vocab-size 50257 --use-cpu-initialization"
    found = checked(sizes, world=2, pp=2, mbs=1, gbs=2, seq=1024, fp16=True, options={"cluster": "hgx-b200"})
    spec = job(sizes).model
    assert spec is not None and spec.parameters() == pytest.approx(6.26e9, rel=0.02)
    assert states(found) * 2**30 > 48e9


def test_stages_of_one_layer_differ_by_embedding_and_head() -> None:
    """What the first and the last stage hold more is V·h at the bytes of a weight's states; the fullest stage is one of them."""
    sizes = "--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --vocab-size 50304 --untie-embeddings-and-output-weights"
    found = checked(sizes, world=4, pp=4, mbs=1, gbs=4, seq=1024, options={"cluster": "hgx-b200"})
    assert found.fit is not None and found.fit.stage in (0, 3)
    held = [states(found, stage) for stage in range(4)]
    table = 50304 * 2048 * 18 / 2**30
    assert held[0] - held[1] == pytest.approx(table, rel=0.06) and held[3] - held[2] == pytest.approx(table, rel=0.06)


def test_the_same_layout_on_more_devices() -> None:
    """TP 2 at micro-batch 4: on 2 devices nothing shares the optimizer, on 4 two replicas do."""
    values = {"tp": 2, "mbs": 4, "gbs": 8, "seq": 4096, **SHARDED}
    two, four = (checked(LLAMA_7B, world=world, options={"cluster": "hgx-a100"}, **values) for world in (2, 4))
    assert not two.ok
    assert four.ok
    assert terms(two)["optimizer"] == pytest.approx(2 * terms(four)["optimizer"])


def test_experts_of_a_30b_model_on_one_node() -> None:
    """EP 8 on 8 devices shares expert states with nobody: 71 GiB of 79 before activations; on 32 devices it fits."""
    values = {"ep": 8, "etp": 1, "mbs": 1, "seq": 4096, "use-distributed-optimizer": True}
    one, four = (checked(QWEN3_30B, world=world, gbs=64, options=H100, **values) for world in (8, 32))
    assert not one.ok and four.ok
    assert states(one) == pytest.approx(71.4, rel=0.03)


def test_ep_does_not_divide_activations() -> None:
    values = {"etp": 1, "mbs": 1, "gbs": 64, "seq": 4096, "use-distributed-optimizer": True}
    two, eight = (checked(QWEN3_30B, world=64, ep=ep, options={"cluster": "hgx-b200"}, **values) for ep in (2, 8))
    assert terms(two)["activations"] == pytest.approx(terms(eight)["activations"])


def test_tp_halves_activations_whatever_etp() -> None:
    """With sequence parallelism every token's activations lie on one rank of TP. Experts split over ETP hold as much within
    themselves, of more tokens; their inputs, top-k of h each, are gathered over ETP, here 1.1 times as many on the fullest rank,
    and Megatron-LM's own dispatcher gathers what 128 experts get of the peer's 2,048 tokens with them, in FP32."""
    values = {"ep": 2, "mbs": 1, "gbs": 64, "seq": 4096, **SHARDED}
    once, half, split = (
        terms(checked(QWEN3_30B, world=64, tp=tp, etp=etp, options={"cluster": "hgx-b200"}, **values))["activations"]
        for tp, etp in ((1, 1), (2, 1), (2, 2))
    )
    assert half == pytest.approx(once / 2, rel=0.02)
    inputs, routing = 1.1 * 8 * 2048 * 2048 * 2, 2048 * 128 * 4
    assert split - half == pytest.approx(48 * (inputs + routing) / 2**30, rel=0.01)


def test_first_stage_holds_twice_the_micro_batches_of_the_last() -> None:
    values = {"tp": 8, "pp": 2, "mbs": 1, "gbs": 512, "seq": 4096, **SHARDED}
    found = checked(LLAMA_70B, world=256, options={"cluster": "hgx-a100"}, **values)
    assert terms(found)["activations"] / terms(found, 1)["activations"] == pytest.approx(2.0, rel=0.1)


def test_chunks_change_what_the_first_stage_holds() -> None:
    """1 + (p−1)/(p·v): 1.15 with 5 chunks of 4 stages, 1.075 with 10."""
    values = {"tp": 4, "pp": 4, "mbs": 1, "gbs": 64, "seq": 4096, **SHARDED}
    five, ten = (terms(checked(LLAMA_70B, world=32, vpp=vpp, options=H100, **values))["activations"] for vpp in (5, 10))
    assert five / ten == pytest.approx(1.15 / 1.075, rel=0.01)


def test_tied_embeddings_are_held_twice() -> None:
    """By the first and by the last stage of a pipeline, V·h each; the model counts them once."""
    found = checked(QWEN3_600M, world=4, options=H100, tp=1, pp=4, mbs=1, gbs=8, seq=2048)
    word = 151936 * 1024 * 2 / 2**30
    for stage in (0, 3):
        assert terms(found, stage)["weights"] - terms(found, 1)["weights"] == pytest.approx(word, rel=0.02)
    assert found.fit is not None and found.fit.stage in (0, 3)


@pytest.mark.parametrize(
    ("pp", "ep", "gib"),
    [(2, 8, 26.44 + 1.9), (2, 16, 13.22 + 1.9), (4, 8, 13.22 * 24 / 23.5 + 0.9)],
    ids=["as run", "EP 16", "PP 4"],
)
def test_expert_weights_of_a_235b_model_per_device(pp: int, ep: int, gib: float) -> None:
    """94·128·3·4096·1536 / (EP 8 · PP 2) · 2 B = 26.44 GiB, and some 1.9 GiB of the rest; half of it on twice the ranks."""
    ends = {"first": 23, "last": 23} if pp == 4 else {}
    values = {"tp": 4, "pp": pp, "ep": ep, "etp": 1, "mbs": 1, "gbs": 16, "seq": 1024, **SHARDED, **ends}
    found = checked(world=32, options={"model": "qwen3-235b-a22b", "cluster": "hgx-b200"}, **values)
    assert terms(found, 1)["weights"] == pytest.approx(gib, rel=0.06)


def test_logits_of_a_large_vocabulary() -> None:
    """4096·248320·4 B = 3.79 GiB in FP32: so much more, and what goes with it, for twice the sequence; half on TP 2."""

    def transient(tp: int, seq: int) -> float:
        options = LLAMA_7B.replace("--vocab-size 32000", "--vocab-size 248320")
        found = checked(options, world=8, tp=tp, mbs=1, gbs=8, seq=seq, options={"cluster": "hgx-b200"}, **SHARDED_ONLY)
        return terms(found)["transient"]

    once = 4096 * 248320 * 4 / 2**30
    grown = transient(1, 8192) - transient(1, 4096)
    assert once == pytest.approx(3.79, abs=0.005) and once <= grown <= 3 * once
    assert transient(2, 8192) - transient(2, 4096) == pytest.approx(grown / 2)


def test_sharded_states_fall_with_the_devices() -> None:
    """16 B · 30.53e9 / N: from 8 to 16 devices 28.4 GiB less, to 32 another 14.2, to 64 another 7.1."""
    model = "[model]\nname = 'qwen3'\nflavor = '30B-A3B'\n"
    text = f"{model}[parallelism]\nexpert_parallel_degree = 8\n[training]\nlocal_batch_size = 1\nseq_len = 4096\n"
    jobs = [read_text(text, "titan.toml", devices=devices) for devices in (8, 16, 32, 64)]
    held = [states(check(job, cluster="hgx-b200", best=False)) for job in jobs]
    assert [before - after for before, after in pairwise(held)] == pytest.approx([28.4, 14.2, 7.1], rel=0.03)


def test_context_parallelism_shrinks_a_long_sequence() -> None:
    values = {"ep": 4, "etp": 1, "mbs": 1, "gbs": 8, "seq": 98304, "use-distributed-optimizer": True}
    recompute = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    on = {"cluster": "hgx-a100"}
    two, four = (terms(checked(QWEN3_30B, world=8, cp=cp, options=on, **values, **recompute)) for cp in (2, 4))
    assert sum(four.values()) < sum(two.values())
    assert four["activations"] == pytest.approx(two["activations"] / 2, rel=0.05)


def test_attention_that_is_not_fused_grows_with_the_square() -> None:
    def activations(seq: int, **more: str) -> float:
        values = {"tp": 8, "mbs": 1, "gbs": 1, "seq": seq, **SHARDED, **more}
        return terms(checked(LLAMA_7B, world=8, options={"cluster": "hgx-b200"}, **values))["activations"]

    assert activations(16384) / activations(8192) == pytest.approx(2.0, rel=0.05)
    assert activations(16384, attention_backend="unfused") / activations(8192, attention_backend="unfused") > 3.0


def test_offloaded_states_on_the_host() -> None:
    """12 bytes of states and 4 of gradients · 30.53e9 = 489 GB over 8 devices, 56.9 GiB each."""
    values = {"ep": 8, "etp": 1, "mbs": 1, "gbs": 64, "seq": 4096, "use-distributed-optimizer": True}
    offload = {"optimizer-cpu-offload": True, "use-precision-aware-optimizer": True}
    found = checked(QWEN3_30B, world=8, options=H100, **values, **offload)
    assert any("take 56.9 GiB for each device" in said for said in found.advice)


# --- invariants, each broken once and mended ---------------------------------------------------------------------------------

PRECISE = {"use-precision-aware-optimizer": True}
BASE = {"tp": 2, "pp": 2, "cp": 2, "layers": 8, "heads": 8, "seq": 4096, "mbs": 1, "gbs": 16, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("rule", "wrong", "right"),
    [
        ("C001", {"tp": 3, "heads": 12}, {"tp": 2, "heads": 12}),
        ("C064a", {"pp": 1, "vpp": 2}, {"pp": 2, "vpp": 2}),
        ("C020", {"tp": 4, "heads": 6}, {"tp": 2, "heads": 6}),
        ("C080a", {"ep": 2}, {"ep": 2, "experts": 8, "etp": 1}),
        ("C080c", {"ep": 4, "experts": 6, "etp": 1}, {"ep": 2, "experts": 6, "etp": 1}),
        ("C081", {"experts": 8, "ep": 2, "etp": 1, "sequence_parallel": False}, {"experts": 8, "ep": 2, "etp": 1}),
        ("C029", {"gbs": 15}, {"gbs": 16}),
        ("C121", {"fp16": True}, {}),
        ("C062", {"vpp": 2, "num-layers-per-virtual-pipeline-stage": 2}, {"vpp": 2}),
        ("C105", {**SHARDED, "optimizer-cpu-offload": True}, {**SHARDED, "optimizer-cpu-offload": True, **PRECISE}),
        ("C106", {"overlap-param-gather": True, **SHARDED}, {"overlap-param-gather": True, "overlap-grad-reduce": True, **SHARDED}),
        ("C100", {"recompute-granularity": "full"}, {"recompute-granularity": "selective"}),
    ],
)
def test_invariants(rule: str, wrong: dict[str, Any], right: dict[str, Any]) -> None:
    def found(values: dict[str, Any]) -> set[str]:
        return rules(checked(world=16, **{k: v for k, v in {**BASE, **values}.items() if v is not False}))

    assert rule in found(wrong)
    assert not found(right)


@pytest.mark.parametrize(
    ("more", "broken"),
    [
        ("model.vocab_size=151669", True),
        ("model.vocab_size=151669 model.should_pad_vocab=true", True),
        ("model.vocab_size=151672", False),
    ],
)
def test_vocabulary_that_bridge_is_given_is_not_padded(more: str, broken: bool) -> None:
    """151669 = 4 · 37917 + 1; the training loop pads a tokenizer's vocabulary only."""
    found = check(read_text(f"run_recipe.py model.tensor_model_parallel_size=4 {more}", "job", devices=8), best=False)
    assert rules(found) == ({"C023"} if broken else set())
    assert not broken or "4 does not divide the vocabulary 151669; 151672 would" in found.broken[0].sentence


def test_a_grid_is_named_by_its_degrees() -> None:
    """TP 16 of 1,152 devices in racks of 72: neither is a part of the other."""
    found = checked(layers=8, heads=32, tp=16, world=1152, options={"cluster": "gb200-nvl72"})
    (broken,) = (each for each in found.broken if each.rule == "C141")
    assert "and tp·cp·pp·dp = 1152 is more than" in broken.sentence and "devices_used" not in broken.sentence


@pytest.mark.parametrize(("tp", "told"), [(2, True), (3, False)])
def test_shares_on_the_host_need_replicas_that_are_whole(tp: int, told: bool) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "tensor_parallel": {"autotp_size": tp}}
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    job = read_text(json.dumps({**config, "train_batch_size": 8, "zero_optimization": zero}), "ds.json", devices=8)
    found = check(job, "llama-3.1-8b", "hgx-h100", seq_len=4096, best=False)
    assert any("on the host" in said for said in found.advice) is told
