"""Megatron-Core's own verdict on exported settings: its configuration classes, and its process groups on torch's fake backend.

    python tests/exporters/megatron_core_proof.py --plans 1000 --illegal 300

runs the full proof that the suite samples; it needs torch and megatron-core 0.16.1.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core import utils as core_utils  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.fusions.fused_bias_geglu import quick_gelu  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.transformer.enums import AttnBackend  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402
from packaging.version import Version  # noqa: E402
from paraplan.optimizer.exporters.knobs import Settings  # noqa: E402
from paraplan.optimizer.exporters.megatron_bridge import settings  # noqa: E402
from paraplan.optimizer.exporters.python_file import sections  # noqa: E402
from paraplan.optimizer.exporters.spelling import Code  # noqa: E402
from paraplan.optimizer.result import Plan  # noqa: E402
from paraplan.search_spaces.rules import violations  # noqa: E402
from proving import Verdict, judge, options, report  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

core_utils._te_version = Version("2.9.0")  # settings that ask for a Transformer Engine are to be judged, not the machine
NAMES = {"torch": torch, "AttnBackend": AttnBackend, "quick_gelu": quick_gelu}
NEEDS_TE = {"apply_rope_fusion", "moe_permute_fusion"}
"""What asks for Transformer Engine, which has no CPU build."""


def accepts(exported: Settings) -> None:
    """Raises what Megatron-Core raises on the settings of Megatron-Bridge."""
    found = sections(exported)
    check_model(found["model"])
    check_optimizer(found)
    check_groups(found)


def check_model(model: Mapping[str, Any]) -> None:
    latent = bool(model.get("multi_latent_attention"))
    kind = MLATransformerConfig if latent else TransformerConfig
    known = {field.name for field in fields(kind)} - NEEDS_TE
    given = {name: plain(value) for name, value in model.items() if name in known}
    kind(bf16=True, params_dtype=torch.bfloat16, **given)


def check_optimizer(found: Mapping[str, Mapping[str, Any]]) -> None:
    known = {field.name for field in fields(DistributedDataParallelConfig)}
    ddp = found.get("ddp", {})
    assert set(ddp) <= known, f"no fields of DistributedDataParallelConfig: {set(ddp) - known}"
    DistributedDataParallelConfig(grad_reduce_in_fp32=found["mixed_precision"]["grad_reduce_in_fp32"], **ddp)
    OptimizerConfig(bf16=True, **{name: plain(value) for name, value in found.get("optimizer", {}).items()})


def check_groups(found: Mapping[str, Mapping[str, Any]]) -> dict[str, list[int]]:
    """Process groups of rank 0; the world has as many ranks as the batch of the plan says."""
    model = found["model"]
    hierarchy = model.get("hierarchical_context_parallel_sizes")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=model["tensor_model_parallel_size"],
        pipeline_model_parallel_size=model["pipeline_model_parallel_size"],
        virtual_pipeline_model_parallel_size=model.get("virtual_pipeline_model_parallel_size"),
        context_parallel_size=model["context_parallel_size"],
        expert_model_parallel_size=model["expert_model_parallel_size"],
        expert_tensor_parallel_size=model["expert_tensor_parallel_size"],
        hierarchical_context_parallel_sizes=hierarchy,
        order="tp-cp-ep-pp-dp" if found.get("dist", {}).get("use_tp_pp_dp_mapping") else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )
    return {
        "tp": dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group()),
        "ep": dist.get_process_group_ranks(parallel_state.get_expert_model_parallel_group()),
        "pp": dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group()),
        "dp": dist.get_process_group_ranks(parallel_state.get_data_parallel_group()),
    }


def plain(value: Any) -> Any:
    """A value of the Python file as Python reads it."""
    return eval(value, dict(NAMES)) if isinstance(value, Code) else value


def world(size: int) -> None:
    """Makes this process rank 0 of so many fake ones."""
    if dist.is_initialized():
        if dist.get_world_size() == size:
            return
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    dist.init_process_group(backend="fake", store=FakeStore(), rank=0, world_size=size)


def prove(count: int, seed: int) -> Verdict:
    """How many of so many legal plans are accepted, and what the others were refused for."""
    from random_plans import plans

    def judged(plan: Plan) -> None:
        world(plan.plan.layout.devices)
        accepts(settings(plan))

    return judge(plans(count, seed), judged)


def disprove(count: int, seed: int) -> tuple[int, int, list[str]]:
    """Of so many layouts of any kind: how many Megatron-Core refuses, how many our rules do, and what only it refuses."""
    from random_plans import PROBLEMS, any_layouts, space

    theirs, ours, only = 0, 0, []
    for number, case in enumerate(PROBLEMS):
        problem = space("megatron-lm", "hgx-h100", *case).problem
        for layout in any_layouts(-(-count // len(PROBLEMS)), seed + number, problem):
            broken = violations(problem, layout)
            reason = refusal(problem, layout)
            ours, theirs = ours + bool(broken), theirs + bool(reason)
            if reason and not broken:
                only.append(f"{problem.model.name} {layout}: {reason}")
    return theirs, ours, only


def refusal(problem: Any, layout: Any) -> str | None:
    """What Megatron-Core says of a layout that the exporter is not asked about: degrees straight into its own classes."""
    from paraplan.search_spaces.layout import FULL_BLOCK, FULL_UNIFORM, SELECTIVE, Recompute
    from paraplan.search_spaces.model import LatentAttention

    spec = problem.model
    mixer = next(spec.kinds[name].mixer for name in spec.layer_kinds)
    moe = next((spec.kinds[name].mlp for name in spec.moe_kinds), None)
    recompute = Recompute.parse(layout.recompute)
    model: dict[str, Any] = {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": mixer.heads,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sequence_parallel,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "pipeline_dtype": torch.bfloat16,
        "add_bias_linear": bool(moe and moe.bias),
        "multi_latent_attention": isinstance(mixer, LatentAttention),
        **({} if isinstance(mixer, LatentAttention) else {"num_query_groups": mixer.kv_heads}),
        **({"num_moe_experts": moe.experts, "moe_grouped_gemm": True} if moe else {}),
    }
    if recompute.mode == SELECTIVE:
        model |= {"recompute_granularity": "selective", "recompute_modules": list(recompute.module_names)}
    if recompute.mode in (FULL_BLOCK, FULL_UNIFORM):
        depth = min(recompute.layers, spec.num_layers)
        model |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": depth}
    world(layout.devices)
    try:
        check_model(model)
        check_groups({"model": model})
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:160]}"
    return None


def main() -> int:
    parser = options(__doc__, 1000)
    parser.add_argument("--illegal", type=int, default=300)
    given = parser.parse_args()
    status = report(prove(given.plans, given.seed), given.plans)
    theirs, ours, only = disprove(given.illegal, given.seed)
    print(f"any layouts: {theirs} refused by megatron-core, {ours} by our rules, {len(only)} by megatron-core alone")
    for line in only[:20]:
        print(f"  {line}")
    return status or int(bool(only))


if __name__ == "__main__":
    sys.exit(main())
