"""Hand-written plans: architectures as published, layouts as people run them; predictions are only there to be printed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paraplan.optimizer.result import Plan
from paraplan.search_spaces.inputs import load_cluster, load_stack
from paraplan.search_spaces.layout import Layout, Problem, Split
from paraplan.search_spaces.model import Attention, DenseMlp, LatentAttention, LayerKind, ModelSpec, MoeMlp, Mtp, RopeScaling
from paraplan.search_spaces.workload import Workload

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the builder lies beside them
from random_plans import plan as planned

MLA = LatentAttention(heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
DEEPSEEK_MOE = MoeMlp(
    experts=256,
    top_k=8,
    width=2048,
    shared_width=2048,
    router_expert_bias=True,
    routing_groups=8,
    routing_groups_topk=4,
    score_function="sigmoid",
    routed_scaling_factor=2.5,
)
LLAMA = Attention(heads=64, kv_heads=8, head_dim=128)
QWEN = Attention(heads=64, kv_heads=4, head_dim=128, qk_norm="head")
GPT = Attention(heads=96, kv_heads=96, head_dim=128, qkv_bias=True, out_bias=True)
SINKS = {"qkv_bias": True, "out_bias": True, "sinks": True}
OSS = Attention(heads=64, kv_heads=8, head_dim=64, **SINKS)
OSS_MOE = MoeMlp(
    experts=128, top_k=4, width=2880, bias=True, clamped=True, clamp_limit=7.0, gate_offset=1.0, router_linear_bias=True
)

MODELS = {
    "deepseek": ModelSpec(
        name="deepseek-v3",
        hidden_size=7168,
        vocab_size=129280,
        max_position_embeddings=163840,
        kinds={
            "dense": LayerKind(mixer=MLA, mlp=DenseMlp(width=18432)),
            "moe": LayerKind(mixer=MLA, mlp=DEEPSEEK_MOE),
        },
        layers=("3*dense", "58*moe"),
        mtp=Mtp(layers=1, kind="moe"),
        norm_epsilon=1e-6,
        rope_theta=10000.0,
        rope_scaling=RopeScaling(rope_type="yarn", factor=40, original_max_position_embeddings=4096, mscale_all_dim=1.0),
    ),
    "llama": ModelSpec(
        name="llama-3.1-70b",
        hidden_size=8192,
        vocab_size=128256,
        max_position_embeddings=131072,
        kinds={"dense": LayerKind(mixer=LLAMA, mlp=DenseMlp(width=28672))},
        layers=("80*dense",),
    ),
    "gpt": ModelSpec(
        name="gpt3-175b",
        hidden_size=12288,
        vocab_size=51200,
        max_position_embeddings=2048,
        kinds={"dense": LayerKind(mixer=GPT, mlp=DenseMlp(width=49152, gated=False, bias=True))},
        layers=("96*dense",),
        tied_embeddings=True,
        learned_positions=True,
        norm="layer",
    ),
    "qwen": ModelSpec(
        name="qwen3-235b-a22b",
        hidden_size=4096,
        vocab_size=151936,
        max_position_embeddings=40960,
        kinds={"moe": LayerKind(mixer=QWEN, mlp=MoeMlp(experts=128, top_k=8, width=1536))},
        layers=("94*moe",),
    ),
    "gpt-oss": ModelSpec(
        name="gpt-oss-120b",
        hidden_size=2880,
        vocab_size=201088,
        max_position_embeddings=131072,
        kinds={
            "sliding": LayerKind(mixer=OSS.model_copy(update={"window": 128}), mlp=OSS_MOE),
            "full": LayerKind(mixer=OSS, mlp=OSS_MOE),
        },
        layers=("18*(sliding full)",),
    ),
}

MakePlan = Callable[..., Plan]


@pytest.fixture
def models() -> dict[str, ModelSpec]:
    """The architectures, by family."""
    return MODELS


@pytest.fixture
def make_plan() -> MakePlan:
    """A plan from a model, a cluster, a stack and the layout's degrees; `counts` cuts the blocks (MTP layers last) into chunks."""
    return _make_plan


def _make_plan(
    model: str | ModelSpec,
    cluster: str = "hgx-h100",
    stack: str = "megatron-lm",
    counts: tuple[int, ...] | None = None,
    seq_len: int = 4096,
    precision: str = "bf16",
    stack_changes: dict[str, Any] | None = None,
    **degrees: Any,
) -> Plan:
    spec = MODELS[model] if isinstance(model, str) else model
    chosen = load_stack(stack)
    chosen = type(chosen).model_validate(chosen.model_dump() | (stack_changes or {}))
    layout = Layout(**{"num_microbatches": 8, **degrees})
    if "edp" not in degrees:
        layout = layout.model_copy(update={"edp": layout.devices // (layout.etp * layout.ep * layout.pp)})
    if counts:
        cuts = [0]
        for count in counts:
            cuts.append(cuts[-1] + count)
        split = Split(layout.pp, layout.vpp, tuple(cuts))
        layout = layout.model_copy(update={"stages": split.stages(spec.num_layers, layout.recompute)})
    problem = Problem(
        model=spec,
        cluster=load_cluster(cluster),
        devices=layout.devices,
        stack=chosen,
        workload=Workload(
            global_batch=layout.micro_batch * layout.num_microbatches * layout.dp, seq_len=seq_len, precision=precision
        ),
    )
    return planned(problem, layout)
