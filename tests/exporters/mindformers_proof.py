"""MindSpore Transformers' own verdict on exported files: its loader, its parallel and model configurations, its split of layers.

    python tests/exporters/mindformers_proof.py --plans 100

needs mindspore 2.10 and mindformers 2.1.0 (both run on a CPU; pip install --no-deps mindformers, then what it asks for).
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from itertools import accumulate
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
os.environ.setdefault("LOG_MF_PATH", tempfile.mkdtemp())  # its logs would lie in this folder otherwise

PROBLEMS = (("deepseek-v3", 512, 7680, 4096), ("qwen3-235b-a22b", 512, 2048, 4096), ("qwen3-30b-a3b", 64, 512, 4096))
FILLED = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-4}


def accepts(plan: Any) -> None:
    """Raises what MindSpore Transformers raises on the file written for a plan."""
    import mindspore
    from mindformers.core.parallel_config import build_parallel_config
    from mindformers.models.deepseek3.configuration_deepseek_v3 import DeepseekV3Config
    from mindformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from mindformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from mindformers.parallel_core.training_graph.transformer.utils import LayerSetting
    from mindformers.tools.register import MindFormerConfig
    from paraplan.optimizer.exporters.knobs import Dialect
    from paraplan.optimizer.exporters.mindformers import FILE, FRAMEWORK, MindFormersRequest, files

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, FILE)
        path.write_text(files(plan)[FILE], "utf-8")
        config = MindFormerConfig(str(path))
    layout = plan.plan.layout
    build_parallel_config(config)
    given = config.parallel_config
    assert given.data_parallel * given.model_parallel * given.context_parallel * given.pipeline_stage == layout.devices
    model = dict(config.model.model_config)
    model |= {name: value for name, value in FILLED.items() if name in model}
    kinds = {"deepseek_v3": DeepseekV3Config, "qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig}
    kind = kinds[model.pop("model_type")]
    model["parallel_config"] = given
    converted = kind(**model).convert_to_transformer_config(is_mla_model=kind is DeepseekV3Config)
    spec = plan.problem.model
    assert converted.num_layers == spec.num_layers and converted.hidden_size == spec.hidden_size
    assert converted.pipeline_model_parallel_size == layout.pp and converted.expert_model_parallel_size == layout.ep
    moe = next(spec.kinds[name].mlp for name in spec.moe_kinds)
    assert (converted.num_moe_experts, converted.moe_router_topk, converted.moe_ffn_hidden_size) == (
        moe.experts,
        moe.top_k,
        moe.width,
    )
    assert (converted.mtp_num_layers or 0) == (spec.mtp.layers if spec.mtp else 0)
    if layout.pp > 1:
        mindspore.set_auto_parallel_context(pipeline_config=dict(config.parallel.pipeline_config))
        found = LayerSetting(spec.num_layers, model["offset"], given, model["pp_interleave_num"])
        check_layers(found.layer_list.tolist(), layout)
        check_recompute(found, MindFormersRequest(plan, Dialect(FRAMEWORK, ())))


def check_layers(rows: list[list[int]], layout: Any) -> None:
    """Layers of every chunk as the framework counts them; of a V shape's second row it lists the last stage first."""
    from paraplan.optimizer.exporters.splits import layer_count

    for number, row in enumerate(rows):
        back = layout.schedule == "zb-v" and number == 1
        counts = [layer_count(stage.chunks[number]) for stage in layout.stages]
        assert row == (counts[::-1] if back else counts), f"chunk {number}: {row}, planned {counts}"


def check_recompute(setting: Any, asked: Any) -> None:
    """Layers that the framework redoes as a whole are the first of every chunk, to its planned depth."""
    firsts = [0, *accumulate(asked.counts)]
    planned = {layer for first, depth in zip(firsts, asked.depths, strict=False) for layer in range(first, first + depth)}
    redone = {layer for layer in range(setting.num_layers) if setting._check_layer_rule(layer)}
    assert redone == planned, f"redoes layers {sorted(redone)}, planned {sorted(planned)}"


def main() -> int:
    from proving import judge, options, report
    from random_plans import plans

    given = options(__doc__, 100).parse_args()
    return report(judge(plans(given.plans, given.seed, "mindformers", "cloudmatrix-384", PROBLEMS), accepts), given.plans)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
