"""DeepSpeed: its JSON. The world size is not in it, nor is the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...search_spaces.documents import did_you_mean, parse_document
from ...search_spaces.errors import InputError
from .job import Finding, Job
from .json_text import plain_json
from .structured import Document

FRAMEWORK = "deepspeed"
CONFIG = "deepspeed/runtime/config.py"
ZERO = "deepspeed/runtime/zero/config.py"
GROUPS = "deepspeed/utils/groups.py"
KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
PLAIN = (
    *("optimizer.", "scheduler.", "gradient_clipping", "prescale", "steps_per_print", "wall_clock", "dump_state", "flops_profiler"),
    *("pipeline.", "activation_checkpointing."),
    *("aio.", "comms_logger", "tensorboard", "wandb", "csv_monitor", "zero_allow", "data_efficiency"),
    *("communication_data_type", "sparse_gradients", "checkpoint", "data_types.", "compile", "fp16.", "bf16.", "bfloat16."),
    "zero_optimization.",
)
STAGE3 = (
    *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters"),
    *("max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold"),
    *("use_all_reduce_for_fetch_params", "allgather_sequential"),
)
"""Fields that DeepSpeed takes with "stage3_" before them and without."""
UNPRICED = (
    *("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "zenflow"),
    "offload_optimizer.super_offload",
)
"""Fields that change time or memory and no price is for."""
FIELDS: Mapping[str, frozenset[str]] = {
    "": frozenset(
        (
            *("stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce"),
            *("allgather_partitions", "allgather_bucket_size", "overlap_comm", "compute_grad_norm", "load_from_fp32_weights"),
            *("elastic_checkpoint", "offload_param", "offload_optimizer", "zenflow", "sub_group_size", "cpu_offload_param"),
            *("cpu_offload_use_pin_memory", "cpu_offload", "stage3_gather_fp16_weights_on_model_save"),
            *("ignore_unused_parameters", "legacy_stage1", "round_robin_gradients", "parameter_alignment"),
            *("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights"),
            *("zero_quantized_gradients", "memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply"),
            *("log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory", "leaf_module"),
            *STAGE3,
            *(f"stage3_{name}" for name in STAGE3),
        )
    ),
    "offload_param": frozenset(("device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory")),
    "offload_optimizer": frozenset(
        (
            *("device", "nvme_path", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "fast_init", "ratio"),
            *("super_offload", "cpuadam_cores_perc"),
        )
    ),
}
"""Section of zero_optimization → all fields that it has: those of DeepSpeed 0.19.8 (runtime/zero/config.py, offload_config.py)."""


def read(text: str, where: str, devices: int | None = None) -> Job:
    """The job of a DeepSpeed JSON on so many devices. InputError for JSON that is no such config."""
    data = parse_document(plain_json(text), where, as_json=True)
    if not {*KEYS, "zero_optimization", "bf16", "fp16", "tensor_parallel"} & data.keys():
        raise InputError(f"{where}: has neither {KEYS[0]} nor zero_optimization; give a DeepSpeed config")
    doc = Document(data, where)
    auto = tuple(f"{path} = auto" for path, value in doc.values.items() if value == "auto")
    doc.values = {path: value for path, value in doc.values.items() if value != "auto"}
    tp = doc.whole("tensor_parallel.autotp_size", least=0) or 1
    cp = doc.whole("sequence_parallel_size") or 1
    ep = doc.whole("expert_parallel.autoep_size") or 1 if doc.flag("expert_parallel.enabled") is not False else 1
    etp = doc.whole("expert_parallel.expert_tensor_parallel_size") or 1
    pp = doc.whole("pipeline.stages") or 1
    checkpointed = doc.whole("activation_checkpointing.number_checkpoints")
    findings: list[Finding] = []
    stage = _stage(doc, auto, where, findings)
    dp = _replicas(tp * cp * pp, pp, devices, findings)
    total, micro, steps = (doc.whole(key) for key in KEYS)
    said: list[str] = []
    total, micro = _batches(total, micro, steps, dp, findings, said)
    findings += _unknown_fields(data["zero_optimization"]) if isinstance(data.get("zero_optimization"), dict) else []
    offloaded = _device(doc, "offload_optimizer", findings) or ("cpu" if doc.flag("zero_optimization.cpu_offload") else "none")
    ratio = doc.get("zero_optimization.offload_optimizer.ratio")
    _offload_rules(doc, stage, offloaded, ratio, findings)
    if doc.flag("fp16.enabled") and doc.flag("bf16.enabled", "bfloat16.enabled"):
        findings.append(Finding("C121", "fp16 and bf16 are both enabled; enable one.", "they exclude each other", CONFIG))
    _second_copy(doc, stage, devices, findings, said)
    if offloaded == "nvme":
        said.append("optimizer states on NVMe are priced as in host memory")
    asked = (f"zero_optimization.{name}" for name in UNPRICED)
    said += [f"{path.partition('.')[2]} is not priced" for path in asked if doc.under(path) or doc.flag(path)]
    doc.skip(*PLAIN)
    return Job(
        format=FRAMEWORK,
        framework=FRAMEWORK,
        degrees={"tp": tp, "cp": cp, "ep": ep, "etp": etp, "vpp": 1, "pp": pp, **({"micro_batch": micro} if micro else {})},
        choices={
            "sequence_parallel": "false",
            "cp_type": "a2a",
            "schedule": "1f1b",
            "optimizer_sharding": ("none", "zero1", "zero2", "zero3")[stage],
            "recompute": "full" if checkpointed else "none",
            "offload": f"optimizer:{_share(ratio)}" if offloaded != "none" and _share(ratio) != "0" else "none",
        },
        devices=devices,
        global_batch=total,
        precision="fp16" if doc.flag("fp16.enabled") else "bf16",
        written=doc.written,
        findings=tuple(findings),
        assumptions=(*said, *_defaults(doc, pp, checkpointed)),
        unmodelled=doc.unmodelled(FRAMEWORK),
        unknown=doc.unknown,
        unresolved=auto,
    )


def _defaults(doc: Document, pp: int, checkpointed: int | None) -> Iterator[str]:
    """What is taken where nothing is said."""
    if pp == 1:
        yield "pp 1: pipeline.stages is not given; a pipeline is in the code that trains"
    if not checkpointed:
        yield "no recompute: activation_checkpointing.number_checkpoints is not given"
    if not _some_precision(doc):
        yield "bf16: neither fp16 nor bf16 is enabled"


def _stage(doc: Document, auto: Sequence[str], where: str, findings: list[Finding]) -> int:
    """The ZeRO stage, the last where there is none of the number. InputError where it is left to the program."""
    if "zero_optimization.stage = auto" in auto:
        raise InputError(f"{where}: zero_optimization.stage is auto, which only the code that trains can tell; write 0, 1, 2 or 3")
    stage = doc.whole("zero_optimization.stage", least=0) or int(doc.get("zero_optimization") is True)
    if stage > 3:
        findings.append(
            Finding("P015", f"zero_optimization.stage = {stage} is not one of 0, 1, 2, 3.", "ZeRO has no other", CONFIG)
        )
    return min(stage, 3)


def _replicas(each: int, pp: int, devices: int | None, findings: list[Finding]) -> int | None:
    """Replicas of so many devices each; None where they are not whole or nobody says how many devices there are."""
    if devices is None:
        return None
    if devices % each:
        product = "autotp_size · sequence_parallel_size" + (" · pipeline.stages" if pp > 1 else "")
        findings.append(Finding("C007", f"{product} = {each} does not divide the {devices} devices.", "", CONFIG))
        return None
    return devices // each


def _second_copy(doc: Document, stage: int, devices: int | None, findings: list[Finding], said: list[str]) -> None:
    """ZeRO++'s second copy of the weights, sharded within groups that must divide the devices."""
    secondary = doc.whole("zero_optimization.zero_hpz_partition_size", least=0) or 1
    if stage == 3 and devices is not None and devices % min(secondary, devices):
        sentence = f"zero_hpz_partition_size {secondary} does not divide the {devices} devices."
        findings.append(Finding("C111", sentence, "ranks are cut into groups that each hold the weights whole", GROUPS))
    if secondary > 1:
        said.append(f"zero_hpz_partition_size {secondary}: the second copy of the weights is not priced")


def _unknown_fields(zero: Mapping[str, Any]) -> list[Finding]:
    """Fields of zero_optimization that DeepSpeed has not, which it refuses there, though nowhere else."""
    found = []
    for section, known in FIELDS.items():
        held = zero.get(section) if section else zero
        for name in (name for name in held if name not in known) if isinstance(held, Mapping) else ():
            path = ".".join(part for part in ("zero_optimization", section, str(name)) if part)
            sentence = f"{path} is no field of DeepSpeed's ZeRO{did_you_mean(str(name), sorted(known))}."
            found.append(Finding("C111", sentence, "its configuration takes no extra fields", ZERO))
    return found


def _some_precision(doc: Document) -> bool:
    return bool(doc.flag("fp16.enabled") or doc.flag("bf16.enabled", "bfloat16.enabled"))


def _batches(
    total: int | None, micro: int | None, steps: int | None, dp: int | None, findings: list[Finding], said: list[str]
) -> tuple[int | None, int | None]:
    """train_batch_size = micro · steps · dp: what two of the three leave of the third."""
    if dp is None:
        return total, micro
    if total is None and micro is not None:
        said.append(f"train_batch_size {micro * (steps or 1) * dp}: micro-batch · accumulation steps · replicas")
        return micro * (steps or 1) * dp, micro
    if total is not None and micro is None and total % (dp * (steps or 1)) == 0:
        said.append(f"train_micro_batch_size_per_gpu {total // (dp * (steps or 1))}: what train_batch_size leaves")
        return total, total // (dp * (steps or 1))
    if total is not None and micro is not None and steps is not None and micro * steps * dp != total:
        findings.append(
            Finding(
                "C029",
                f"train_batch_size {total} is not micro-batch {micro} · accumulation {steps} · {dp} replicas = "
                f"{micro * steps * dp}; leave gradient_accumulation_steps out, or set one of the three.",
                "DeepSpeed checks the product",
                CONFIG,
            )
        )
    return total, micro


def _device(doc: Document, section: str, findings: list[Finding]) -> str | None:
    """Where a section keeps what it moves; None where it does not say so, or names no place that there is."""
    key = f"zero_optimization.{section}.device"
    device = doc.text(key)
    if device in (None, "none", "cpu", "nvme"):
        return device
    findings.append(Finding("P015", f"{key} = {device[:40]!r} is not one of none, cpu, nvme.", "DeepSpeed has no other", CONFIG))
    return None


def _offload_rules(doc: Document, stage: int, device: str, ratio: object, findings: list[Finding]) -> None:
    parameters = _device(doc, "offload_param", findings) or "none"
    if parameters != "none" and stage < 3:
        findings.append(
            Finding("C111", f"offload_param needs ZeRO stage 3; the stage is {stage}.", "only stage 3 shards parameters", ZERO)
        )
    if device != "none" and stage == 0:
        findings.append(Finding("C111", "offload_optimizer needs ZeRO stage 1, 2 or 3; the stage is 0.", "", ZERO))
    if device != "none" and ratio is not None and _share(ratio) != "1" and stage != 3:
        findings.append(Finding("C111", f"offload_optimizer.ratio {ratio} needs ZeRO stage 3; the stage is {stage}.", "", ZERO))


def _share(ratio: object) -> str:
    try:
        value = 1.0 if ratio is None else float(str(ratio))
    except ValueError:
        return "1"
    return f"{min(max(value, 0.0), 1.0):g}"
