"""What a judgement rests on: the job's own assumptions, not the search's, and beside the verdict what makes the model doubtful."""

from __future__ import annotations

import io

import pytest
from paraplan.optimizer.checking.checker import Checked, check
from paraplan.optimizer.reports.check import render_check
from rich.console import Console

from .check_samples import LLAMA_7B, checked, job, rules

GOOD = {"mbs": 1, "gbs": 16, "seq": 2048, "use-distributed-optimizer": True}
MLA = "--multi-latent-attention --kv-lora-rank 512 --q-lora-rank 1536 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128"
MOE = (
    "--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 8192 --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --vocab-size 32000 --num-experts 8 --moe-router-topk 2 "
    "--moe-token-dispatcher-type alltoall"
)


def drawn(found: Checked) -> str:
    stream = io.StringIO()
    render_check(found, "job.sh", Console(file=stream, width=200, color_system=None))
    return stream.getvalue()


def test_assumptions_of_the_search_are_none_of_the_jobs() -> None:
    """A job with SP off is not told that it is on; the best layout is looked for with it, and that is said so."""
    said = "sequence parallelism is on wherever tp > 1 and tp·cp divides the sequence"
    plain = check(job(LLAMA_7B, world=8, tp=2, **GOOD), cluster="hgx-h100", best=False)
    assert plain.given["sequence_parallel"] == "off" and not any(said in each for each in plain.assumptions)
    best = check(job(LLAMA_7B, world=8, tp=2, **GOOD), cluster="hgx-h100")
    assert [each for each in best.assumptions if said in each] == [f"in the search for the best layout, {said}"]


def test_experts_that_are_split_are_not_said_to_be_whole() -> None:
    found = check(job(MOE, world=8, tp=2, etp=2, ep=2, **GOOD, **{"sequence-parallel": True}), cluster="hgx-h100", best=False)
    assert found.given["etp"] == 2 and not any("etp = 1" in each for each in found.assumptions)


@pytest.mark.parametrize("width", ["", "--moe-ffn-hidden-size 1024"])
def test_experts_of_a_width_that_is_not_given_are_doubted_beside_the_verdict(width: str) -> None:
    found = check(job(f"{MOE} {width}", world=8, ep=8, **GOOD), cluster="hgx-h100", best=False)
    doubt = "experts as wide as the feed-forward layer: --moe-ffn-hidden-size is not given"
    assert found.fit is not None and found.doubts == (() if width else (doubt,))
    assert (f"may be wrong: {doubt}" in drawn(found).partition("Fits")[2].partition("GiB by stage")[0]) == (not width)


def test_an_option_that_may_change_the_model_is_told_beside_the_verdict() -> None:
    found = check(job(f"{LLAMA_7B} --moe-shape-twisting", world=8, tp=2, **GOOD), cluster="hgx-h100", best=False)
    assert "may be wrong: 1 option that may change the model" in drawn(found).partition("Fits")[2].partition("GiB by stage")[0]


@pytest.mark.parametrize(("more", "modules"), [(LLAMA_7B, "none"), (MOE, "selective:moe_act")])
def test_activation_functions_computed_anew_break_no_rule_of_a_dense_model(more: str, modules: str) -> None:
    """MindSpeed-LLM takes the option for either; only that of experts is priced."""
    found = checked(f"{more} --recompute-activation-function", world=8, form="mindspeed-llm", **GOOD)
    assert found.given["recompute"] == modules and "C101b" not in rules(found)
    told = any("--recompute-activation-function is priced as if it were not given" in each for each in found.assumptions)
    assert told == (modules == "none")


def test_the_indexer_of_mindspeed_has_defaults() -> None:
    """mindspeed_llm dsa_indexer_feature.py: 64 heads of 128, 2,048 tokens; what is given replaces them."""
    text = f"{MOE} {MLA} --moe-ffn-hidden-size 1024 --enable-dsa-indexer"
    model = job(text, form="mindspeed-llm").model
    assert model is not None
    mixer = model.kinds["moe"].mixer.model_dump()
    assert [mixer[name] for name in ("indexer_heads", "indexer_head_dim", "indexer_topk")] == [64, 128, 2048]
    given = job(f"{text} --index-n-heads 32", form="mindspeed-llm").model
    assert given is not None and given.kinds["moe"].mixer.model_dump()["indexer_heads"] == 32


def test_options_that_make_no_model_leave_the_rules_to_be_judged() -> None:
    """A token cannot go to 9 of 8 experts; that tp does not divide the heads is told all the same."""
    found = checked(MOE.replace("topk 2", "topk 9"), world=8, form="megatron-lm", tp=3, **GOOD)
    assert "C020" in rules(found) and found.model is None
    assert any(each.startswith("the model is not read, as its options do not fit together") for each in found.assumptions)
