"""torchtitan's own verdict on exported modules: its config parser, its model configuration, and its meshes on torch's fake backend.

    python tests/exporters/torchtitan_proof.py --plans 200

needs torch and torchtitan 0.3.0. Kernels of triton, which its models import, are stood in for: none is run.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parent))

import torch.distributed as dist  # noqa: E402
from paraplan.optimizer.exporters.torchtitan import MODULE, files  # noqa: E402
from paraplan.optimizer.result import Plan  # noqa: E402
from proving import Verdict, judge, options, report  # noqa: E402
from random_plans import plans  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

PROBLEMS = (
    ("llama-3.1-70b", 256, 1024, 8192),
    ("qwen3-235b-a22b", 512, 2048, 4096),
    ("llama-3.1-405b", 512, 1024, 8192),
    ("qwen3-30b-a3b", 64, 512, 4096),
    ("deepseek-v3", 512, 4096, 4096),
    ("qwen3-32b", 64, 64, 65536),
)
VARIABLES = {
    "DATASET": "c4",
    "TOKENIZER_PATH": "/t",
    "CHECKPOINT_DIR": "/c",
    "TRAIN_ITERS": "10",
    "LR": "1e-4",
    "SAVE_INTERVAL": "5",
}


class Kernels(ModuleType):
    """The names of a module of GPU kernels, none of which a configuration runs; the module itself asks for triton."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
sys.modules.setdefault(KERNELS, Kernels(KERNELS))


def accepts(plan: Plan) -> None:
    """Raises what torchtitan raises on the module written for a plan."""
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed import ParallelDims

    layout = plan.plan.layout
    os.environ |= VARIABLES
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"{MODULE}.py").write_text(files(plan)[f"{MODULE}.py"])
        sys.path.insert(0, folder)
        sys.modules.pop(MODULE, None)
        importlib.invalidate_caches()
        try:
            config = ConfigManager().parse_args(["--module", MODULE, "--config", "planned"])
        finally:
            sys.path.remove(folder)
    type(config).__post_init__(config)
    config.model_spec.model.update_from_config(config=config)
    parallelism = config.parallelism
    world(layout.devices)
    dims = ParallelDims(
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=parallelism.data_parallel_shard_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        pp=parallelism.pipeline_parallel_degree,
        ep=parallelism.expert_parallel_degree,
        world_size=layout.devices,
    )
    dims.build_mesh()
    batch = config.training.global_batch_size, config.training.local_batch_size * layout.dp
    assert batch[0] % batch[1] == 0, f"global_batch_size {batch[0]} is no multiple of {batch[1]}"
    if layout.pp > 1:
        check_schedule(config, layout.pp)


def check_schedule(config: object, pp: int) -> None:
    """Chunks as torchtitan's pipeline counts them, and every module of the model in exactly one."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    parallelism = config.parallelism  # type: ignore[attr-defined]
    parts = parallelism.module_fqns_per_model_part
    single = issubclass(get_schedule_class(parallelism.pipeline_parallel_schedule), PipelineScheduleSingle)
    assert len(parts) % pp == 0 and (len(parts) == pp) == single, f"{len(parts)} chunks on {pp} stages"
    layers = [f"layers.{n}" for n in range(len(config.model_spec.model.layers))]  # type: ignore[attr-defined]
    assert [name for part in parts for name in part] == ["tok_embeddings", *layers, "norm", "lm_head"]


def world(size: int) -> None:
    if dist.is_initialized():
        if dist.get_world_size() == size:
            return
        dist.destroy_process_group()
    dist.init_process_group(backend="fake", store=FakeStore(), rank=0, world_size=size)


def prove(count: int, seed: int) -> Verdict:
    """How many of so many legal plans are accepted, and what the others were refused for."""
    return judge(plans(count, seed, "torchtitan", "hgx-h100", PROBLEMS), accepts)


def main() -> int:
    given = options(__doc__, 200).parse_args()
    return report(prove(given.plans, given.seed), given.plans)


if __name__ == "__main__":
    sys.exit(main())
