"""Runs that their users reported with few figures: what follows from them holds here, and why no more is held to.

27B with LoRA on eight H200, full recompute (baseten/ml-cookbook 105): 28.4, 49.5 and, as extrapolated, 91.7 GiB at 128, 256 and 512
thousand tokens. Held to: linear in the tokens, and 6.3 GiB of BF16 weights on each device. Not the GiB: adapters are not priced.

93 layers with a residual carried beside the activations (ROCm/Megatron-LM 162): 224.0 MiB a pass on 8,192 tokens of width 7,168.
Held to: a stage sends half of that. No model described here carries such a residual. 141.1 GiB of states for 19.25e9 parameters,
7.87 bytes each, hang on the replicas of the run, which are not told.

512 experts on 64 GB200 (marin 7332): 6.05, 12.56, 13.66 and 14.39 % MFU at EP 1, 8, 16 and 64. Held to: the ranking, and that EP 1
is less than half as fast. Not the figures: neither the width of the experts nor the batch is told.

16B of DeepSeek's on eight B200 (torchtitan 1993), nothing recomputed, layers compiled but what dispatches and combines tokens: with
four sequences of 4,096 tokens two thirds of the memory, of 6,144 tokens 88 %, of 8,192 none. Held to: these, within a twentieth.
Not the limit on H100 (torchtitan 1789): there some operators are recomputed and others not, which no layout here tells apart.

7B on eight A100 (InternLM 22): 93.5 TFLOP/s over PCIe, 188.0 over NVLink. Held to: NVLink within a fifth and a ratio around a half.
Not 0.497 itself: what a device got of PCIe is not told; 8 GB/s would make 0.50.
"""

from __future__ import annotations

from typing import Any

import pytest
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.assumptions import cut_assumptions
from paraplan.optimizer.evaluation import evaluate
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.optimizer.result import PricedLayout
from paraplan.search_spaces.cluster import ClusterSpec
from paraplan.search_spaces.inputs import build_problem, load_cluster
from paraplan.search_spaces.model import ModelSpec


def priced(
    model: str | ModelSpec, cluster: str | ClusterSpec, devices: int, batch: int, seq: int, text: str, **stack: Any
) -> PricedLayout:
    problem = build_problem(model, cluster, devices, batch, seq, **stack)
    return evaluate(problem, complete(problem, parse_layout(text)), replayed=False)[0]


def by_hand(name: str, layers: int, vocab: int, mixer: dict[str, Any], mlp: dict[str, Any]) -> ModelSpec:
    """A model of equal layers of width 4,096."""
    kinds = {"layer": {"mixer": {"kind": "attention", "head_dim": 128, "heads": 32, **mixer}, "mlp": mlp}}
    return ModelSpec.model_validate(
        {
            "name": name,
            "hidden_size": 4096,
            "vocab_size": vocab,
            "max_position_embeddings": 4096,
            "kinds": kinds,
            "layers": [f"{layers}*layer"],
            "source": "written for the test",
        }
    )


def test_memory_under_full_recompute_is_linear_in_the_tokens() -> None:
    """A second doubling adds twice what the first does, as 91.7 − 49.5 = 2 · (49.5 − 28.4) GiB."""
    found = [
        priced("gemma-3-27b", "hgx-h200", 8, 1, tokens, "tp=8,recompute=full", framework="megatron-lm").memory.stages[0]
        for tokens in (131_072, 262_144, 524_288)
    ]
    one, two, four = (stage.peak_gib for stage in found)
    assert four - two == pytest.approx(2 * (two - one), rel=0.01)
    assert all(stage.terms_gib["weights"] == pytest.approx(6.3, rel=0.01) for stage in found)


@pytest.mark.parametrize("ep", [1, 8])
@pytest.mark.parametrize(("seq", "sequences", "share"), [(4096, 4, 2 / 3), (6144, 4, 0.88), (4096, 8, None), (8192, 4, None)])
def test_torchtitans_experts_leave_what_they_send_back(ep: int, seq: int, sequences: int, share: float | None) -> None:
    """Two thirds and 88 % of a B200 were taken, twice the tokens ran out, on EP 8 too. Combining keeps 4 bytes a value."""
    text = f"tp=1,pp=1,ep={ep},micro_batch={sequences},optimizer_sharding=zero3"
    memory = priced("deepseek-v2-lite", "hgx-b200", 8, 8 * sequences, seq, text, framework="torchtitan").memory
    if share is None:
        assert memory.peak_gib > memory.capacity_gib
    else:
        assert memory.peak_gib / memory.capacity_gib == pytest.approx(share, rel=0.05)


def test_what_a_stage_sends_of_a_micro_batch() -> None:
    """8,192 · 7,168 · 2 bytes are 112.0 MiB; forward and back, two stages send as much each, of two micro-batches 224.0."""
    found = priced("kimi-k2", "hgx-h200", 64, 64, 8192, "tp=1,pp=2,ep=32,micro_batch=1,schedule=1f1b", framework="megatron-lm")
    assert found.layout.num_microbatches == 2
    assert sum(level.get("pp", 0.0) for level in found.traffic_gib.values()) * 1024 == pytest.approx(224.0, rel=1e-6)


@pytest.mark.parametrize("width", [768, 1024, 1536])
def test_many_experts_want_many_groups(width: int) -> None:
    """On 64 devices of one NVL72; without EP every device gathers and runs all 512 experts."""
    mlp = {"kind": "moe", "experts": 512, "top_k": 8, "width": width}
    model = by_hand("many-experts", 32, 128_256, {"kv_heads": 8}, mlp)
    text = "tp=1,pp=1,ep={},micro_batch=2,optimizer_sharding=zero3,recompute=full"
    mfu = [priced(model, "gb200-nvl72", 64, 512, 4096, text.format(ep), framework="torchtitan").mfu for ep in (1, 8, 16, 64)]
    assert mfu == sorted(mfu)
    assert mfu[0] < mfu[1] / 2


def test_a_server_without_nvlink() -> None:
    """ZeRO-1 over eight devices, four micro-batches of two sequences; through shared PCIe 4.0 a device has 6 to 12.5 GB/s."""
    model = by_hand("dense-7b", 32, 103_168, {"kv_heads": 32}, {"kind": "mlp", "width": 11_008})
    nvlink = load_cluster("hgx-a100")
    text = "tp=1,pp=1,micro_batch=2,optimizer_sharding=zero1"
    fast, *slow = (
        priced(model, cluster, 8, 64, 2048, text, stack="internevo").model_tflops_per_device
        for cluster in (nvlink, *(inside(nvlink, rate) for rate in (12.5e9, 8e9, 6e9)))
    )
    assert fast == pytest.approx(188.0, rel=0.2)
    assert 0.7 > slow[0] / fast > slow[1] / fast > slow[2] / fast > 0.4


def test_stages_that_nobody_gave_are_told_with_what_equal_ones_would_take() -> None:
    """Mixtral 8x22B in stages that fit takes a fourth longer than in equal ones, which do not; of these nothing is said."""
    problem = build_problem("mixtral-8x22b", "hgx-h100", 128, 512, 4096, "megatron-bridge")
    cut, equal = (
        evaluate(problem, complete(problem, parse_layout(f"pp=4,ep=8{stages}")), replayed=False)[0]
        for stages in ("", ",stages=14+14+14+14")
    )
    assert cut.step_time_s > 1.2 * equal.step_time_s
    (told,) = cut_assumptions(CostModel(problem), cut)
    assert f"would take {equal.step_time_s:.3g} s and {equal.memory.peak_gib:.1f} GiB" in told
    assert not list(cut_assumptions(CostModel(problem), equal))


def inside(cluster: ClusterSpec, rate: float) -> ClusterSpec:
    """The cluster with another bandwidth within its servers, in bytes per second of each device."""
    server, *beyond = cluster.levels
    given = server.bandwidth_bytes_per_s.model_copy(update={"value": rate, "low": None, "high": None})
    return cluster.model_copy(update={"levels": (server.model_copy(update={"bandwidth_bytes_per_s": given}), *beyond)})
