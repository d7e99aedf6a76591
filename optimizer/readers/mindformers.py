"""mindformers: its YAML, with parallel_config, runner_config and the model's own config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...search_spaces.documents import parse_document
from ...search_spaces.errors import InputError
from ...search_spaces.huggingface import from_mapping
from ...search_spaces.model import ModelSpec
from .dialects import knobs_of
from .job import Finding, Job, SplitWish
from .options import misspelt, whole
from .structured import Document

FRAMEWORK = "mindformers"
OFFSETS = "mindformers parallel_core/training_graph/transformer/utils.py"
CP_TYPES = {"colossalai_cp": "p2p", "ulysses_cp": "a2a", "hybrid_cp": "a2a+p2p"}
SCHEDULES = {"1f1b": "1f1b", "gpipe": "gpipe", "zero_bubble_v": "zb-v", "seqpipe": "1f1b", "seqvpp": "1f1b", "seqsmartvpp": "1f1b"}
MODEL = "model.model_config"
EARLIER = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "kv_channels": "head_dim",
    "moe_router_score_function": "scoring_func",
}
"""Field of earlier versions or of the framework's own → of a config.json."""
BALANCED = {True: "noaux_tc", False: "group_limited_greedy"}
"""Whether experts have a bias that balances them (moe_router_enable_expert_bias) → topk_method of a config.json."""
DEGREES = {
    "tp": "model_parallel",
    "cp": "context_parallel",
    "pp": "pipeline_stage",
    "dp": "data_parallel",
    "ep": "expert_parallel",
}
"""Columns and how `parallel_config` spells them."""
NOT_TRAINING = ("predict", "eval", "export")
FAMILIES = {"LlamaConfig": "llama", "LlamaForCausalLM": "llama"}
"""Class of earlier versions, whose files have no model_type → model_type."""
PLAIN = (
    *("seed", "output_dir", "load_checkpoint", "trainer", "train_dataset", "callbacks", "processor", "context", "use_parallel"),
    *("load_ckpt", "runner_config.epochs", "runner_config.sink_", "micro_batch_interleave_num"),
    *("run_mode", "lr_schedule", "optimizer.", "runner_wrapper", "metric", "profile", "auto_t", "remote", "src_", "resume", "eval"),
    *(
        "train_precision",
        "do_eval",
        "infer",
        "monitor",
        "print_separate",
        "balanced_load",
        "use_legacy",
        "pretrained",
        "generation",
    ),
    *(
        "only_save",
        "init_start",
        "lr_scale",
        "layer_scale",
        "layer_decay",
        "filepath_prefix",
        "autotune",
        "ignore_data",
        "transform_",
    ),
    *("moe_config.aux_loss", "moe_config.routing", "moe_config.router", "moe_config.enable_sdrop", "moe_config.use_fused"),
    *("moe_config.balance", "moe_config.topk_bias"),
    *("recompute_config.", "parallel.", "swap_config.", "parallel_config.vocab_emb_dp", "parallel_config.gradient", "model.arch"),
)


SHAPELESS = (
    *("type", "params_dtype", "softmax_compute", "rotary_dtype", "layernorm_compute", "param_init", "batch_size", "bos_token"),
    *("eos_token", "pad_token", "ignore_token", "max_", "use_past", "is_", "rope_", "theta", "initializer_", "rms_norm_eps"),
    *("router_", "seq_", "do_sample", "top_p", "hidden_act", "hidden_dropout", "attention_dropout", "add_bias_linear"),
    *("gated_linear_unit", "use_flash", "position_embedding", "multi_latent", "qk_layernorm", "routed_scaling", "moe_aux"),
    *("moe_router_", "moe_grouped_gemm", "moe_token_dispatcher", "moe_permute", "norm_topk", "aux_", "checkpoint_name"),
    *("transformers_version", "architectures", "auto_map", "torch_dtype", "repetition_penalty", "top_k", "extend_method"),
    *("emb_dropout", "rotary_", "scaling_factor", "qkv_has_bias", "qkv_concat", "compute_in_2d", "fine_grain", "use_attn_mask"),
    *("use_ring_attention", "embedding_init", "residual_dtype", "input_sliced", "use_contiguous", "use_cache"),
)
"""Beginnings of a model's fields by which its size is no other; all that an export writes are among them."""
MODEL_PLAIN = (*(name for name in knobs_of(FRAMEWORK) if name.startswith(MODEL)), *(f"{MODEL}.{name}" for name in SHAPELESS))


def read(text: str, where: str, devices: int | None = None) -> Job:
    """The job of a mindformers YAML. InputError where it has no parallel_config."""
    data = parse_document(text, where, aliases=True)
    doc = _of_training(data, where)
    said: list[str] = []
    degrees = _degrees(doc, said)
    interleaves = doc.flag("parallel.pipeline_config.pipeline_interleave") or False
    vpp = degrees["vpp"] = doc.whole(f"{MODEL}.pp_interleave_num") or 1
    global_batch = _global_batch(doc, degrees, said)
    grid = degrees["tp"] * degrees["cp"] * degrees["pp"] * degrees["dp"]
    if devices is None:
        said.append(f"{grid} devices: the product of its degrees")
    findings: list[Finding] = []
    schedule = _schedule(doc, vpp, said, findings)
    if vpp > 1 and not interleaves:
        findings.append(
            Finding("C064b", f"pp_interleave_num is {vpp}, but pipeline_config.pipeline_interleave is not on.", "", FRAMEWORK)
        )
    sizes, placed = _sizes(doc), _experts(doc, data.get("moe_config"))
    degrees["etp"] = degrees["tp"] if placed else 1
    back = schedule == "zb-v"
    split = _offsets(doc.get(f"{MODEL}.offset"), sizes.get("layers"), degrees["pp"], vpp, where, findings, back)
    cp_type, states = _cp_type(doc, findings), _states(doc)
    sharded = doc.flag("parallel.enable_parallel_optimizer") or False
    doc.get("parallel.parallel_optimizer_config.optimizer_weight_shard_size")
    swapped = doc.flag("swap_config.swap", "optimizer.swap") or False
    sp = _sequence_parallel(doc, degrees["tp"], said)
    doc.skip(*PLAIN)
    model, unread = _model(data, where, doc)
    said += [unread] if unread else []
    doc.skip(*(MODEL_PLAIN if model is not None else (f"{MODEL}.",)))
    recompute, redone, told = _recompute(data.get("recompute_config"), split, sizes.get("layers"), degrees["pp"] * vpp, back)
    return Job(
        format=FRAMEWORK,
        framework=FRAMEWORK,
        degrees=degrees,
        choices={
            "sequence_parallel": "true" if sp else "false",
            "cp_type": cp_type,
            "schedule": schedule,
            "optimizer_sharding": "zero1" if sharded else "none",
            "recompute": recompute,
            "offload": "optimizer:1" if swapped else "none",
        },
        devices=devices or grid,
        global_batch=global_batch,
        seq_len=doc.whole(f"{MODEL}.seq_length", "train_dataset.seq_length"),
        precision=_precision(doc.text(f"{MODEL}.compute_dtype")),
        vocab_size=doc.whole(f"{MODEL}.vocab_size"),
        model=model,
        sizes=sizes,
        split=split,
        redone=redone,
        stack_changes=placed | states,
        written=doc.written,
        findings=tuple(findings),
        assumptions=(*said, *told),
        unmodelled=doc.unmodelled(FRAMEWORK),
        no_model=unread,
        unknown=doc.unknown,
    )


def _of_training(data: dict[str, Any], where: str) -> Document:
    if not isinstance(data.get("parallel_config"), dict):
        raise InputError(f"{where}: parallel_config is missing; give a training YAML of {FRAMEWORK}")
    doc = Document(data, where)
    mode = doc.text("run_mode")
    if mode in NOT_TRAINING:
        raise InputError(f"{where}: run_mode = {mode} is no training job; give the YAML of a training run")
    return doc


def _degrees(doc: Document, said: list[str]) -> dict[str, int]:
    given = {column: doc.whole(f"parallel_config.{name}") for column, name in DEGREES.items()}
    said += [f"{column} 1: parallel_config.{DEGREES[column]} is not given" for column, value in given.items() if value is None]
    return {column: value or 1 for column, value in given.items()}


def _global_batch(doc: Document, degrees: dict[str, int], said: list[str]) -> int:
    """Sequences of a step; the micro-batch joins the degrees."""
    degrees["micro_batch"] = doc.whole("runner_config.batch_size") or 1
    count = doc.whole("parallel_config.micro_batch_num") or 1
    accumulated = doc.whole("runner_config.gradient_accumulation_steps") or 1
    global_batch = degrees["micro_batch"] * count * accumulated * degrees["dp"]
    said.append(f"global batch {global_batch}: batch_size · micro_batch_num · gradient_accumulation_steps · data_parallel")
    return global_batch


def _schedule(doc: Document, vpp: int, said: list[str], findings: list[Finding]) -> str:
    """The order of passes; the sequence pipelines are taken for the one that they refine, a name of none for 1F1B."""
    scheduler = doc.text("parallel.pipeline_config.pipeline_scheduler") or "1f1b"
    if scheduler not in SCHEDULES:
        near = misspelt(scheduler, SCHEDULES, least=0.5)
        sentence = f"pipeline_scheduler = {scheduler} is not one of {', '.join(SCHEDULES)}{near}."
        findings.append(Finding("C078", sentence, "the framework refuses other names", "mindspore parallel/auto_parallel.py"))
    schedule = "interleaved" if vpp > 1 and scheduler != "zero_bubble_v" else SCHEDULES.get(scheduler, "1f1b")
    if scheduler in ("seqpipe", "seqvpp", "seqsmartvpp"):
        said.append(f"pipeline_scheduler {scheduler} is judged as {schedule}")
    return schedule


def _cp_type(doc: Document, findings: list[Finding]) -> str:
    algorithm = doc.text("parallel_config.context_parallel_algo") or "colossalai_cp"
    if algorithm not in CP_TYPES:
        near = misspelt(algorithm, CP_TYPES, least=0.5)
        sentence = f"context_parallel_algo = {algorithm[:40]} is not one of {', '.join(CP_TYPES)}{near}."
        findings.append(Finding("P015", sentence, "the framework refuses other names", FRAMEWORK))
    return CP_TYPES.get(algorithm, CP_TYPES["colossalai_cp"])


def _sequence_parallel(doc: Document, tp: int, said: list[str]) -> bool:
    """Whether SP is on; models by class take it for nothing where there is no TP."""
    sp = doc.flag("parallel_config.use_seq_parallel") or False
    if sp and tp == 1 and doc.get(f"{MODEL}.model_type") is None:
        said.append("use_seq_parallel does nothing at model_parallel 1: models by class, without a model_type, take it so")
        return False
    return sp


class Asked(dict[str, object]):
    """Fields that know which of them were asked for."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        super().__init__(fields)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def _model(data: Mapping[str, Any], where: str, doc: Document) -> tuple[ModelSpec | None, str]:
    """The model of model_config, whose fields are those of a config.json or their earlier names; or why it cannot be made of it.

    Models by class have their experts in a section of their own, moe_config: every layer's, each as wide as the dense part. Fields
    that the model is made of are taken from the document.
    """
    section = data.get("model")
    own = section.get("model_config") if isinstance(section, dict) else None
    if not isinstance(own, dict):
        return None, ""
    arch = section.get("arch") if isinstance(section, dict) else None
    classes = [own.get("type"), arch.get("type") if isinstance(arch, dict) else None]
    own = {**own, "intermediate_size": _width(own.get)}
    renamed: dict[str, object] = {EARLIER.get(str(name), str(name)): value for name, value in own.items() if value is not None}
    named = own.get("model_type") or next((FAMILIES[each] for each in classes if each in FAMILIES), None)
    if named is None:
        return None, "the model is not read: model_config has no model_type"
    if isinstance(biased := own.get("moe_router_enable_expert_bias"), bool):
        renamed["topk_method"] = BALANCED[biased]
    fields = Asked({"max_position_embeddings": own.get("seq_length"), **renamed, "model_type": named})
    experts = data.get("moe_config")
    if isinstance(experts, dict) and named == "llama" and (experts.get("expert_num") or 1) > 1:
        if experts.get("shared_expert_num"):
            return None, "the model is not read: moe_config has shared experts, whose width it does not say"
        chosen = experts.get("num_experts_chosen") or 1
        doc.skip("moe_config.expert_num", "moe_config.num_experts_chosen")
        fields |= {"model_type": "mixtral", "num_local_experts": experts["expert_num"], "num_experts_per_tok": chosen}
    trainer = data.get("trainer")
    name = trainer.get("model_name") if isinstance(trainer, dict) else None
    try:
        return from_mapping(fields, str(name or named), f"{where}: model.model_config", f"{FRAMEWORK} YAML"), ""
    except InputError as error:
        return None, f"the model is not read: {error}"
    finally:
        doc.taken |= {f"{MODEL}.{name}" for name in own if EARLIER.get(str(name), str(name)) in fields.names}


def _width(get: Callable[[str], Any]) -> int | None:
    """The feed-forward width; that which models by class work out where none is given (models/llama/llama_layer.py)."""
    given, hidden, multiplier, unit = map(get, ("intermediate_size", "hidden_size", "ffn_dim_multiplier", "multiple_of"))
    unit = unit or 256
    if given is not None or get("model_type") is not None or type(hidden) is not int or type(unit) is not int:
        return given if type(given) is int else None
    wide = int((float(multiplier) + 0.01) * 4 * hidden) if isinstance(multiplier, int | float) else 4 * hidden
    return -(-int(2 * wide / 3) // unit) * unit


BY_CLASS = {"experts_across_tp": False, "expert_tensor_parallel": True}


def _experts(doc: Document, section: Any) -> dict[str, Any]:
    """Where models by class, which have experts in a section of their own, put them: over replicas, each cut over TP ranks, unless
    they say otherwise.
    """
    by_class = doc.get(f"{MODEL}.model_type") is None
    if not by_class or not isinstance(section, dict) or (section.get("expert_num") or 1) == 1:
        return {}
    gathered = doc.flag("moe_config.use_allgather_dispatcher") or False
    return {} if gathered or doc.whole("moe_config.expert_model_parallel") is not None else BY_CLASS


def _states(doc: Document) -> dict[str, Any]:
    """Bytes per parameter of weights kept in 16 bits: gradients are accumulated in clones of them, both moments are FP32, and no
    other weight is there (mindformers wrapper/wrapper.py, core/optim/optim.py and adamw.py).
    """
    halved = doc.text(f"{MODEL}.param_init_type", f"{MODEL}.params_dtype") in ("float16", "bfloat16")
    return {"gradient_bytes": 2, "optimizer_bytes": 8.0} if halved else {}


def _sizes(doc: Document) -> dict[str, int]:
    """What the model's config says of its shape; the rest of the model needs a MODEL beside it."""
    layers = doc.whole(f"{MODEL}.num_layers", f"{MODEL}.num_hidden_layers")
    mtp = doc.whole(f"{MODEL}.mtp_num_layers", f"{MODEL}.mtp_depth", f"{MODEL}.num_nextn_predict_layers", least=0) or 0
    heads = doc.whole(f"{MODEL}.num_heads", f"{MODEL}.num_attention_heads")
    kv = doc.whole(f"{MODEL}.n_kv_heads", f"{MODEL}.num_key_value_heads")
    mla = bool(doc.get(f"{MODEL}.kv_lora_rank", f"{MODEL}.multi_latent_attention"))
    experts = doc.whole("moe_config.expert_num", f"{MODEL}.n_routed_experts", f"{MODEL}.num_experts", least=0)
    found = {
        "layers": layers,
        "blocks": layers + mtp if layers else None,
        "mtp_layers": mtp if layers else None,
        "heads": heads,
        "kv_heads": 0 if mla else kv or heads,
        "kv_heads_multiple": 0 if mla else kv or heads,
        "experts": experts if experts is None or experts > 1 else 0,
        "mlp_width": doc.whole(f"{MODEL}.intermediate_size") or _width(lambda name: doc.get(f"{MODEL}.{name}")),
    }
    return {name: value for name, value in found.items() if value is not None}


def _offsets(
    given: Any, layers: int | None, pp: int, vpp: int, where: str, findings: list[Finding], back: bool = False
) -> SplitWish:
    """Layers per chunk: an even share and what `offset` adds to it, one list of pp numbers per interleave, by stage; where the
    model goes `back` up the stages a token passes the second from its end.
    """
    if given is None or given == 0 or layers is None:
        return SplitWish()
    rounds = given if isinstance(given, list) and given and isinstance(given[0], list) else [given]
    flat = [list(each) if isinstance(each, list) else [each] for each in rounds]
    if len(flat) != vpp or any(len(each) != pp for each in flat):
        shape = f"{len(flat)} × {len(flat[0])}"
        findings.append(
            Finding("C071", f"offset has the shape {shape}, pp_interleave_num × pipeline_stage is {vpp} × {pp}.", "", OFFSETS)
        )
        return SplitWish(free=True)
    numbers = [whole(value, f"{where}: offset", -10_000) for each in _passed(flat, back) for value in each]
    base, rest = divmod(layers, pp * vpp)
    if sum(numbers) != rest:
        findings.append(
            Finding(
                "C071",
                f"offset adds {sum(numbers)} layers to pp·vpp = {pp * vpp} chunks of {base}, {layers} layers leave {rest}.",
                "the chunks hold every layer once",
                OFFSETS,
            )
        )
        return SplitWish(free=True)
    counts = tuple(base + number for number in numbers)
    if min(counts) < 0:
        findings.append(Finding("C071", f"offset leaves a chunk {min(counts)} layers.", "", OFFSETS))
        return SplitWish(free=True)
    return SplitWish(counts=counts)


def _passed(rows: list[list[Any]], back: bool) -> list[list[Any]]:
    """Rows by chunk of columns by stage, in the order that a token passes them."""
    return [row[::-1] if back and number % 2 else row for number, row in enumerate(rows)]


def _recompute(
    given: Any, split: SplitWish, layers: int | None, chunks: int, back: bool = False
) -> tuple[str, tuple[int, ...], list[str]]:
    """Whole layers: all, or the first so many of every chunk, with the depth of each where not one gives the listed numbers."""
    if not isinstance(given, Mapping):
        return "none", (), []
    full, selective = given.get("recompute"), given.get("select_recompute")
    if full is True:
        return "full", (), []
    if full:
        rows = [row if isinstance(row, list) else [row] for row in full] if isinstance(full, list) else []
        depths = [each for row in _passed(rows, back and all(len(row) > 1 for row in rows)) for each in row]
        if not depths or not all(type(each) is int and each >= 0 for each in depths):
            return "full", (), [f"recompute_config.recompute = {str(full)[:40]} is priced as full recompute of every layer"]
        held = split.counts or ((layers // chunks,) * chunks if layers else ())
        deepest = max(depths)
        if [min(deepest, count) for count in held] == depths or (not held and set(depths) == {deepest}):
            return (f"full:block:{deepest}" if deepest else "none"), (), []
        if len(depths) == chunks and deepest:
            return f"full:block:{deepest}", tuple(depths), []
        told = f"recompute of {full} layers is priced as that of the first {deepest} of every chunk"
        return f"full:block:{deepest}", (), [told]
    return "none", (), ["select_recompute is priced as no recompute"] if selective else []


def _precision(text: str | None) -> str:
    return "fp16" if text in ("float16", "fp16") else "bf16"
