"""A plan as the YAML file of MindSpore Transformers, and the script that starts it with msrun.

Its training graphs are those of DeepSeek-V3 and Qwen3; other architectures are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...search_spaces.layout import FULL_UNIFORM, SELECTIVE
from ...search_spaces.model import Attention, DenseMlp, LatentAttention, LayerKind, ModelSpec, MoeMlp, RopeScaling
from ..result import Plan
from .documents import nested
from .folder import folder
from .knobs import Settings
from .launch import SAVE_INTERVAL, TOTAL, Script, Variable, commented, launch_script, norm_epsilon, origin, rotary_base
from .request import PIPELINES_OUTERMOST, Laid, Request, mtp_layers, request

FRAMEWORK = "mindformers"
FILE = "mindformers.yaml"
SCRIPT = "mindformers.sh"

VARIABLES = {
    "train_dataset.data_loader.config.data_path": Variable("DATA_PATH", "prefix of the tokenised data"),
    "train_dataset.data_loader.config.eod": Variable("EOD_ID", "id of the token that ends a document", kind=int),
    "output_dir": Variable("CHECKPOINT_DIR", "where checkpoints are written"),
    "lr_schedule.learning_rate": Variable("LR", "learning rate", kind=float),
}
MOE_VARIABLES = {
    "model.model_config.moe_router_load_balancing_type": Variable("MOE_LOAD_BALANCING", "kind of balancing loss"),
    "model.model_config.moe_aux_loss_coeff": Variable("MOE_AUX_LOSS_COEFF", "weight of the balancing loss", kind=float),
}
STEPS = Variable("TRAIN_ITERS", "number of steps", kind=int)

FILL = """\
import os, sys
import yaml
with open(sys.argv[1], encoding="utf-8") as file:
    config = yaml.safe_load(file)
def put(path, value):
    *sections, key = path.split(".")
    place = config
    for section in sections:
        place = place[section]
    place[key] = value
"""
"""Reads the file and sets a key in it; the script's own lines follow."""

BASE: dict[str, Any] = {
    "seed": 42,
    "run_mode": "train",
    "use_parallel": True,
    "use_legacy": False,
    "load_checkpoint": "",
    "load_ckpt_format": "safetensors",
    "auto_trans_ckpt": False,
    "resume_training": False,
    "trainer": {"type": "CausalLanguageModelingTrainer"},
    "runner_config": {"epochs": 1, "sink_mode": True, "sink_size": 1},
    "optimizer": {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1.0e-8, "weight_decay": 0.1},
    "lr_schedule": {"type": "ConstantWarmUpLR", "warmup_ratio": 0.0, "total_steps": -1},
    "train_dataset": {
        "data_loader": {
            "type": "BlendedMegatronDatasetDataLoader",
            "datasets_type": "GPTDataset",
            "shuffle": False,
            "config": {
                "seed": 1234,
                "split": "1, 0, 0",
                "eod_mask_loss": False,
                "reset_position_ids": False,
                "create_attention_mask": False,
                "reset_attention_mask": False,
                "create_compressed_eod_mask": False,
                "pad": -1,
            },
        },
        "drop_remainder": True,
    },
    "context": {"mode": 0, "device_target": "Ascend", "jit_config": {"jit_level": "O0"}},
    "micro_batch_interleave_num": 1,
    "parallel": {
        "parallel_mode": 1,
        "gradients_mean": False,
        "enable_alltoall": True,
        "search_mode": "sharding_propagation",
        "strategy_ckpt_config": {"save_file": "./ckpt_strategy.ckpt", "only_trainable_params": False},
    },
    "recompute_config": {"select_recompute": False},
    "callbacks": [{"type": "MFLossMonitor"}],
    "runner_wrapper": {"type": "MFTrainOneStepCell", "scale_sense": 1.0, "use_clip_grad": True},
}
"""What every plan has, as in the files that the project ships."""


class MindFormersRequest(Request):
    """A plan for a framework that takes a list of how many layers each chunk redoes."""

    redoes_by_chunk = True


def document(plan: Plan, version: str | None = None) -> dict[str, Any]:
    """The YAML file's contents, with None where the script fills in a variable; Infeasible says what cannot be expressed."""
    return _document(request(MindFormersRequest, plan, FRAMEWORK, version, _problems))


def files(plan: Plan, version: str | None = None) -> dict[str, str]:
    """mindformers.sh and mindformers.yaml; Infeasible as for `document`."""
    import yaml

    asked = request(MindFormersRequest, plan, FRAMEWORK, version, _problems)
    left = _left_open(asked)
    batch = asked.problem.workload.global_batch
    lines = [f"put({path!r}, {v.kind.__name__}(os.environ[{v.name!r}]))" for path, v in left.items() if v.name != "DATA_PATH"]
    fill = [
        *FILL.splitlines(),
        "put('train_dataset.data_loader.config.data_path', ['1', os.environ['DATA_PATH']])",
        f"put('train_dataset.data_loader.sizes', [int(os.environ['TRAIN_ITERS']) * {batch}, 0, 0])",
        *lines,
        "config['train_dataset_task'] = {'type': 'CausalLanguageModelDataset', 'dataset_config': config['train_dataset']}",
        'with open(sys.argv[2], "w", encoding="utf-8") as file:',
        "    yaml.safe_dump(config, file, sort_keys=False)",
    ]
    script = Script(
        launcher=(
            f'msrun --worker_num "${{{TOTAL}}}" --local_worker_num "${{NPROC_PER_NODE}}"',
            '--node_rank "${NODE_RANK}" --master_addr "${MASTER_ADDR}" --master_port "${MASTER_PORT}"',
            '--log_dir "${CHECKPOINT_DIR}/logs" --join True --cluster_time_out 7200',
        ),
        command=('"${MINDFORMERS_PATH}/run_mindformer.py" --config "${RUN_CONFIG}"',),
        variables=[
            *left.values(),
            STEPS,
            Variable("MINDFORMERS_PATH", "folder of MindSpore Transformers", "."),
            Variable(
                "RUN_CONFIG",
                "where the filled file is written",
                "${CHECKPOINT_DIR}/mindformers-${NODE_RANK}.yaml",
            ),
        ],
        before=('mkdir -p "${CHECKPOINT_DIR}"', f'python3 - "${{HERE}}/{FILE}" "${{RUN_CONFIG}}" <<\'PYTHON\'', *fill, "PYTHON"),
        notes=[*_notes(asked), "load the CANN environment (set_env.sh) first"],
    )
    steps = (
        f"Install {asked.speaks.title} on every server and set MINDFORMERS_PATH to its folder.",
        f"Set the variables that the top of {SCRIPT} lists; `bash {SCRIPT}` names all that are missing.",
        f"Run `NODE_RANK=N MASTER_ADDR=… bash {SCRIPT}` on every server, N as in hosts.csv; it fills {FILE} in and starts msrun.",
    )
    head = "\n".join(commented([origin(asked)]))
    written = f"{head}\n{yaml.safe_dump(_document(asked), sort_keys=False, allow_unicode=True, width=112, default_flow_style=None)}"
    return folder(asked, {SCRIPT: launch_script(asked, script), FILE: written}, steps, script.notes)


def _notes(asked: Request) -> Iterator[str]:
    """What the file sets of training without being asked, and what of the model it does not."""
    optimizer, schedule = BASE["optimizer"], BASE["lr_schedule"]
    yield (
        f"the plan does not decide the optimizer: {FILE} has {optimizer['type']} with betas {optimizer['betas']}, eps "
        f"{optimizer['eps']:g} and weight_decay {optimizer['weight_decay']:g}, and {schedule['type']} with warmup_ratio "
        f"{schedule['warmup_ratio']:g}; its sections optimizer and lr_schedule change them"
    )
    scaling = asked.spec.rope_scaling
    if scaling is None:
        yield (
            "rotary positions are not scaled, as the model's description has no rope_scaling: where its config.json has one, give "
            "that in the description and export again"
        )
    elif reason := _scaling_obstacle(asked.spec, scaling):
        yield f"rope_scaling {scaling.rope_type} of the model is not set, and positions turn as if there were none: {reason}"


# --- what cannot be exported -------------------------------------------------------------------------------------------------


def _problems(asked: Request) -> Iterator[str]:
    layout, spec = asked.layout, asked.spec
    if asked.problem.cluster.accelerator.vendor != "huawei":
        yield f"MindSpore Transformers trains on Ascend, not on {asked.problem.cluster.accelerator.name}"
    if _architecture(spec) is None:
        yield f"{spec.name} is built neither as DeepSeek-V3 nor as Qwen3, which are what it trains"
    if turned := {mixer.rotary_fraction for kind in spec.kinds.values() if isinstance(mixer := kind.mixer, Attention)} - {1.0}:
        yield f"rotary embedding turns {min(turned):g} of a head: its training graphs turn all of it"
    if layout.cp > 1 and layout.cp_type == "a2a+p2p" and layout.cp % 2:
        yield f"cp_type a2a+p2p with cp {layout.cp}: it needs an even cp"
    if layout.pp > 1 and layout.schedule not in ("1f1b", "interleaved", "zb-v"):
        yield f"schedule {layout.schedule}: with a chunk per stage it has 1f1b, with two or more interleaved and zb-v"
    if layout.pp > 1 and layout.num_microbatches < layout.pp:
        yield f"{layout.num_microbatches} micro-batches on pp {layout.pp}: it needs one per stage at least"
    if layout.rank_order != PIPELINES_OUTERMOST:
        yield f"rank order {layout.rank_order}: its pipelines are outermost; plan with {PIPELINES_OUTERMOST}"
    if layout.etp > 1:
        yield f"etp {layout.etp}: its experts are not cut by TP; plan with etp=1"
    if layout.dp * layout.tp % layout.ep:
        yield f"ep {layout.ep} does not divide dp·tp = {layout.dp * layout.tp}, over which it spreads experts"
    if layout.optimizer_sharding not in ("none", "zero1"):
        yield f"optimizer_sharding {layout.optimizer_sharding}: its parallel optimizer is zero1; plan with none or zero1"
    if not asked.mtp_with_loss or mtp_layers(spec) > 1:
        yield f"{mtp_layers(spec)} MTP layers: it has one at most, in the stage of the loss"
    filled = asked.counts[1:] if layout.schedule == "zb-v" else asked.counts[1:-1]
    if min(filled, default=1) < 1:
        yield "a chunk without layers: only the first and the last may have none, and of a V shape the first"
    parted = [words for words, recompute in asked.planned_recompute.items() if recompute.mode in (SELECTIVE, FULL_UNIFORM)]
    if parted:
        yield f"recompute {parted[0]}: it recomputes whole layers, the first of every stage; plan with full:block:K, full or none"
    if asked.offload[1] or asked.offload[0] not in (0.0, 1.0):
        yield f"offload {layout.offload}: optimizer.swap moves all optimizer states or none"
    if asked.precision not in ("bf16", "fp16"):
        yield f"precision {asked.precision}: it has bf16 and fp16"


def _architecture(spec: ModelSpec) -> str | None:
    """Which of its training graphs builds the model."""
    kinds = [spec.kinds[name] for name in dict.fromkeys(spec.layer_kinds)]
    plain = spec.norm == "rms" and not spec.learned_positions and spec.final_norm and spec.residual_streams == 1
    if not plain or any(kind.norms != 2 or kind.extra_parameters or not _plain_mlp(kind) for kind in kinds):
        return None
    mixers = {kind.mixer for kind in kinds}
    mixer = mixers.pop()
    moe = [isinstance(spec.kinds[name].mlp, MoeMlp) for name in spec.layer_kinds]
    if mixers or len({kind.mlp for kind in kinds}) > 2:
        return None
    if isinstance(mixer, LatentAttention) and any(moe) and moe == sorted(moe):
        return None if mixer.indexer_heads or mixer.qkv_bias or mixer.out_bias else "deepseek_v3"
    if (
        not isinstance(mixer, Attention)
        or mixer.qk_norm != "head"
        or mixer.window
        or mixer.out_bias
        or mixer.output_gate
        or mixer.sinks
    ):
        return None
    if all(moe):
        shared = any(isinstance(kind.mlp, MoeMlp) and kind.mlp.shared_width for kind in kinds)
        return None if shared else "qwen3_moe"
    return None if any(moe) else "qwen3"


def _plain_mlp(kind: LayerKind) -> bool:
    return kind.mlp is not None and kind.mlp.gated and not kind.mlp.bias


# --- the file ----------------------------------------------------------------------------------------------------------------


def _document(asked: Request) -> dict[str, Any]:
    left = _left_open(asked)
    found = nested(_settings(asked), BASE | {"trainer": {**BASE["trainer"], "model_name": asked.spec.name}})
    found["model"]["model_config"] = {**_model(asked), **found["model"]["model_config"]}
    found["callbacks"] = [
        *BASE["callbacks"],
        {"type": "CheckpointMonitor", "save_checkpoint_steps": SAVE_INTERVAL, "checkpoint_format": "safetensors"},
    ]
    for path in left:
        *sections, key = path.split(".")
        place = found
        for section in sections:
            place = place[section]
        place[key] = None
    return found


def _settings(asked: Request) -> Settings:
    length = asked.problem.workload.seq_len
    return [*layout_settings(asked), asked.speaks.set("seq_len", length), asked.speaks.set("data_seq_len", length)]


def layout_settings(asked: Laid) -> Settings:
    """Every key that a layout decides."""
    layout, speaks = asked.layout, asked.speaks
    pipelined, ring = layout.pp > 1, layout.cp > 1
    return [
        *(speaks.set(name, getattr(layout, name)) for name in ("dp", "tp", "cp", "pp", "ep", "micro_batch")),
        speaks.set("num_microbatches", layout.num_microbatches if pipelined else 1),
        speaks.set("accumulation", 1 if pipelined else layout.num_microbatches),
        speaks.set("sequence_parallel", layout.sequence_parallel),
        *speaks.sets(
            cp_type=layout.cp_type if ring else None,
            cp_hierarchy=layout.cp // 2 if ring and layout.cp_type == "a2a+p2p" else None,
        ),
        # MindSpore takes both keys or neither
        *([speaks.set("interleaved", layout.vpp > 1), speaks.set("schedule", layout.schedule)] if pipelined else []),
        speaks.set("zero1", layout.optimizer_sharding == "zero1"),
        *speaks.sets(shards=-1 if layout.optimizer_sharding == "zero1" else None),
        speaks.set("vpp", layout.vpp),
        speaks.set("offset", _offset(asked)),
        speaks.set("recompute", _recompute(asked)),
        speaks.set("optimizer_offload", asked.offload[0] > 0),
    ]


def _rounds(asked: Laid, values: list[int]) -> list[list[int]]:
    """Values of chunks in the order that a token passes them, as rows by chunk of columns by stage."""
    pp = asked.layout.pp
    rows = [values[at : at + pp] for at in range(0, len(values), pp)]
    return [row[::-1] if asked.layout.schedule == "zb-v" and number % 2 else row for number, row in enumerate(rows)]


def _offset(asked: Laid) -> int | list[int] | list[list[int]]:
    """Layers of every chunk over the even share, rounded down: one for each stage, in rows by chunk where there are several."""
    each = asked.layers // len(asked.counts)
    rows = _rounds(asked, [count - each for count in asked.counts])
    if not any(any(row) for row in rows):
        return 0
    return rows if asked.layout.vpp > 1 else rows[0]


def _left_open(asked: Request) -> dict[str, Variable]:
    """What the plan leaves open: key → the variable that carries it."""
    shape = {"rms_norm_eps": norm_epsilon(asked.spec), "rope_theta": rotary_base(asked.spec, kind=float)}
    return {
        **VARIABLES,
        **{f"model.model_config.{name}": variable for name, variable in shape.items()},
        **(MOE_VARIABLES if asked.spec.is_moe else {}),
    }


def _recompute(asked: Laid) -> bool | list[int] | list[list[int]]:
    """Whether all layers, or how many of every chunk."""
    if not any(asked.depths):
        return False
    if asked.depths == asked.counts and asked.layout.schedule != "zb-v":
        return True
    rows = _rounds(asked, list(asked.depths))
    return rows if asked.layout.vpp > 1 else rows[0]


def _model(asked: Request) -> dict[str, Any]:
    spec = asked.spec
    kinds = [spec.kinds[name] for name in spec.layer_kinds]
    mixer = kinds[0].mixer
    dense = next((kind.mlp for kind in kinds if isinstance(kind.mlp, DenseMlp)), None)
    moe = next((kind.mlp for kind in kinds if isinstance(kind.mlp, MoeMlp)), None)
    architecture = _architecture(spec) or ""
    names = {"deepseek_v3": "DeepseekV3ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
    computed = "float16" if asked.precision == "fp16" else "bfloat16"
    found: dict[str, Any] = {
        "model_type": architecture,
        "architectures": [names[architecture]],
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": asked.problem.workload.vocab_size or spec.vocab_size,
        "intermediate_size": dense.width if dense else moe.width if moe else 0,
        "max_position_embeddings": max(spec.max_position_embeddings, asked.problem.workload.seq_len),
        "tie_word_embeddings": spec.tied_embeddings,
        "hidden_act": "silu",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "use_flash_attention": asked.stack.attention_kernel == "flash",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": "float32",
        "compute_dtype": computed,
        "layernorm_compute_dtype": "float32",
        "softmax_compute_dtype": "float32",
        "rotary_dtype": "float32",
    }
    return {**found, **_attention(mixer), **_scaling(spec), **(_experts(architecture, moe, kinds) if moe else {}), **_mtp(spec)}


def _attention(mixer: Any) -> dict[str, Any]:
    if isinstance(mixer, LatentAttention):
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "num_attention_heads": mixer.heads,
            "q_lora_rank": mixer.q_lora_rank,
            **{name: getattr(mixer, name) for name in sizes},
        }
    return {
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "attention_bias": mixer.qkv_bias,
        "position_embedding_type": "rope",
    }


def _scaling(spec: ModelSpec) -> dict[str, Any]:
    """What stretches rotary positions; latent attention is told also that nothing does, as its own factor is 40.

    Keys as parallel_core/transformer_config.py takes them from a config.json.
    """
    scaling = spec.rope_scaling
    if scaling is not None and _scaling_obstacle(spec, scaling) is None:
        keys = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        return {"rope_scaling": {"type": scaling.rope_type, **{key: getattr(scaling, key) for key in keys}}}
    return {"rotary_scaling_factor": 1.0} if _latent(spec) else {}


def _latent(spec: ModelSpec) -> bool:
    return isinstance(spec.kinds[spec.layer_kinds[0]].mixer, LatentAttention)


def _scaling_obstacle(spec: ModelSpec, scaling: RopeScaling) -> str | None:
    """Why its training graphs do not turn positions so, or None."""
    if scaling.rope_type != "yarn" or not _latent(spec):
        return "its training graphs have YaRN, of latent attention, and no other kind"
    if scaling.lacking:
        return f"the model's description has no {scaling.lacking}"
    if scaling.attention_factor is not None:
        return "it computes YaRN's factor of queries and keys itself, and cannot be given attention_factor"
    if not scaling.truncate:
        return "it ends YaRN's range at whole dimensions (truncate: true)"
    if scaling.mscale != scaling.mscale_all_dim:
        return f"it scales the softmax by mscale {scaling.mscale:g} instead of mscale_all_dim {scaling.mscale_all_dim:g}"
    return None


def _experts(architecture: str, moe: MoeMlp, kinds: list[LayerKind]) -> dict[str, Any]:
    latent = architecture == "deepseek_v3"
    found = {
        "n_routed_experts" if latent else "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.width,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_score_function": moe.score_function,
        "moe_router_enable_expert_bias": moe.router_expert_bias,
        "norm_topk_prob": moe.normalized_top_k,
        "routed_scaling_factor": moe.routed_scaling_factor,
    }
    if not latent:
        return {**found, "router_dense_type": "float32"}  # DeepSeek-V3's router is so by itself
    dense_first = sum(isinstance(kind.mlp, DenseMlp) for kind in kinds)
    return {
        **found,
        "n_shared_experts": moe.shared_width // moe.width,
        "first_k_dense_replace": dense_first,
        "n_group": moe.routing_groups,
        "topk_group": moe.routing_groups_topk,
    }


def _mtp(spec: ModelSpec) -> dict[str, Any]:
    return {"num_nextn_predict_layers": mtp_layers(spec)} if spec.mtp else {}
