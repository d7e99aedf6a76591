"""DeepSpeed's own verdict on exported files: its configuration class, and its rules for folding experts over AutoTP.

    DS_ACCELERATOR=cpu python tests/exporters/deepspeed_proof.py --plans 300

needs torch and deepspeed 0.19.8. Its shared-memory collectives, which it would compile first, are left out: none is run.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parent))

import deepspeed  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.module_inject.auto_ep_folding import build_folding_spec, validate_folding_global  # noqa: E402
from deepspeed.runtime.config import DeepSpeedConfig  # noqa: E402
from paraplan.optimizer.exporters.deepspeed import FILE, files  # noqa: E402
from paraplan.optimizer.result import Plan  # noqa: E402
from proving import Verdict, judge, options, report  # noqa: E402
from random_plans import plans  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # the package's own attribute `torch` is PyTorch

PROBLEMS = (
    ("llama-3.1-70b", 256, 1024, 8192),
    ("qwen3-235b-a22b", 512, 2048, 4096),
    ("mixtral-8x22b", 128, 512, 8192),
    ("gpt3-175b", 384, 1536, 2048),
)
KNOWN = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
    "data_types",
    "zero_optimization",
    "tensor_parallel",
    "sequence_parallel_size",
    "expert_parallel",
    "pipeline",
    "activation_checkpointing",
}
"""Top-level keys: DeepSpeed takes any other in silence."""


class Units:
    """The model-parallel unit of a program with AutoTP or a pipeline, as far as the configuration asks it."""

    def __init__(self, dp: int) -> None:
        self._dp = dp

    def get_data_parallel_world_size(self) -> int:
        return self._dp


def accepts(plan: Plan) -> None:
    """Raises what DeepSpeed raises on the file written for a plan."""
    layout = plan.plan.layout
    written = json.loads(files(plan)[FILE])
    assert set(written) <= KNOWN, f"unknown keys: {set(written) - KNOWN}"
    world(layout.devices)
    units = Units(layout.dp) if layout.tp * layout.pp > 1 else None
    config = DeepSpeedConfig(written, mpu=units)
    assert config.gradient_accumulation_steps == layout.num_microbatches
    assert config.train_batch_size == plan.problem.workload.global_batch
    assert config.zero_optimization_stage == ("none", "zero1", "zero2", "zero3").index(layout.optimizer_sharding)
    if layout.ep > 1:
        spec = build_folding_spec(
            world_size=layout.devices, tp_size=layout.tp, ep_size=layout.ep, etp_size=layout.etp, pp_size=layout.pp
        )
        offload = bool(written.get("zero_optimization", {}).get("offload_optimizer"))
        validate_folding_global(spec, zero_stage=config.zero_optimization_stage, sp_size=layout.cp, zero_offload_optimizer=offload)


def world(size: int) -> None:
    if dist.is_initialized():
        if dist.get_world_size() == size:
            return
        dist.destroy_process_group()
        deepspeed.comm.comm.cdb = None
    dist.init_process_group(backend="fake", store=FakeStore(), rank=0, world_size=size)
    deepspeed.init_distributed(dist_backend="fake", verbose=False)


def prove(count: int, seed: int) -> Verdict:
    """How many of so many legal plans are accepted, and what the others were refused for."""
    return judge(plans(count, seed, "deepspeed", "hgx-h100", PROBLEMS), accepts)


def main() -> int:
    given = options(__doc__, 300).parse_args()
    return report(prove(given.plans, given.seed), given.plans)


if __name__ == "__main__":
    sys.exit(main())
