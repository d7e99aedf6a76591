"""The one table of knobs: how each framework, from which version on, spells what a plan decides.

Read off torchtitan 0.3.0, DeepSpeed 0.19.8 and MindSpore Transformers 2.1.0; the Megatron family has its part of the table in
`megatron_spellings`. To teach a framework a knob, add an entry; to add a framework, a table and an entry of FRAMEWORKS.
"""

from __future__ import annotations

from dataclasses import dataclass

from .megatron_spellings import MEGATRON_BRIDGE, MEGATRON_LM, MINDSPEED_LLM
from .spelling import Code, Spelling, Spellings

# --- torchtitan ---------------------------------------------------------------------------------------------------------------

TORCHTITAN: dict[str, tuple[Spelling, ...]] = {
    "tp": (Spelling("parallelism.tensor_parallel_degree"),),
    "cp": (Spelling("parallelism.context_parallel_degree"),),
    "pp": (Spelling("parallelism.pipeline_parallel_degree"),),
    "ep": (Spelling("parallelism.expert_parallel_degree"),),
    "sequence_parallel": (Spelling("parallelism.enable_sequence_parallel"),),
    "replicas": (Spelling("parallelism.data_parallel_replicate_degree"),),
    "shards": (Spelling("parallelism.data_parallel_shard_degree"),),
    "reshard": (Spelling("parallelism.fsdp_reshard_after_forward"),),
    "schedule": (
        Spelling(
            "parallelism.pipeline_parallel_schedule",
            values={
                "gpipe": "GPipe",
                "1f1b": "1F1B",
                "interleaved": "Interleaved1F1B",
                "zb-v": "ZBVZeroBubble",
                "dualpipev": "DualPipeV",
            },
            only=("gpipe", "1f1b", "interleaved", "zb-v", "dualpipev"),
        ),
    ),
    "stages": (Spelling("parallelism.module_fqns_per_model_part", many=True),),
    "micro_batch": (Spelling("parallelism.pipeline_parallel_microbatch_size", until=(0, 4)),),
    "local_batch": (Spelling("training.local_batch_size", until=(0, 4)),),
    "global_batch": (Spelling("training.global_batch_size", until=(0, 4)),),
    "seq_len": (Spelling("training.seq_len", until=(0, 4)), Spelling("training.max_context_length", since=(0, 4))),
    "micro_batch_tokens": (Spelling("training.num_tokens_per_microbatch_per_dp_rank", since=(0, 4)),),
    "step_tokens": (Spelling("training.num_tokens_per_train_step", since=(0, 4)),),
    "pipeline_micro_batches": (Spelling("parallelism.num_pp_microbatches", since=(0, 4)),),
    "optimizer_offload": (Spelling("training.enable_cpu_offload"),),
    "overlap_tp": (Spelling("compile.enable_async_tensor_parallel"),),
    "no_cuda_graphs": (Spelling("training.disable_cuda_graphs"),),
    "compile": (Spelling("compile.enable"),),
    "compiled": (Spelling("compile.components", many=True),),
    "recompute": (Spelling("activation_checkpoint", values={"full": Code("FullAC.Config()"), "none": None}),),
    "steps": (Spelling("training.steps"),),
    "checkpoints": (Spelling("checkpoint.enable"),),
    "save": (Spelling("checkpoint.folder"),),
    "save_interval": (Spelling("checkpoint.interval"),),
    "tokenizer": (Spelling("hf_assets_path"),),
    "data_path": (Spelling("dataloader.dataset"),),
    "cp_type": (Spelling("parallelism.context_parallel_load_balancer", values={"allgather": "headtail"}, only=("allgather",)),),
}

# --- DeepSpeed: keys of its JSON file -----------------------------------------------------------------------------------------

DEEPSPEED: dict[str, tuple[Spelling, ...]] = {
    "global_batch": (Spelling("train_batch_size"),),
    "micro_batch": (Spelling("train_micro_batch_size_per_gpu"),),
    "accumulation": (Spelling("gradient_accumulation_steps"),),
    "bf16": (Spelling("bf16.enabled"),),
    "fp16": (Spelling("fp16.enabled"),),
    "gradient_type": (Spelling("data_types.grad_accum_dtype"),),
    "zero_stage": (
        Spelling(
            "zero_optimization.stage",
            values={"none": 0, "zero1": 1, "zero2": 2, "zero3": 3},
            only=("none", "zero1", "zero2", "zero3"),
        ),
    ),
    "overlap_gradients": (Spelling("zero_optimization.overlap_comm"),),
    "optimizer_offload": (Spelling("zero_optimization.offload_optimizer.device", on="cpu"),),
    "pinned": (Spelling("zero_optimization.offload_optimizer.pin_memory"),),
    "optimizer_offload_fraction": (Spelling("zero_optimization.offload_optimizer.ratio"),),
    "tp": (Spelling("tensor_parallel.autotp_size"),),
    "cp": (Spelling("sequence_parallel_size"),),
    "cp_type": (Spelling("sequence_parallel", only=("a2a",)),),
    "expert_parallel": (Spelling("expert_parallel.enabled"),),
    "ep": (Spelling("expert_parallel.autoep_size"),),
    "etp": (Spelling("expert_parallel.expert_tensor_parallel_size", only=("1",)),),
    "pp": (Spelling("pipeline.stages"),),
    "schedule": (Spelling("pipeline.schedule", only=("1f1b",)),),
    "partition": (Spelling("pipeline.partition"),),
    "recompute": (Spelling("activation_checkpointing.number_checkpoints"),),
}

# --- MindSpore Transformers: keys of its YAML file ----------------------------------------------------------------------------

MINDFORMERS: dict[str, tuple[Spelling, ...]] = {
    "dp": (Spelling("parallel_config.data_parallel"),),
    "tp": (Spelling("parallel_config.model_parallel"),),
    "cp": (Spelling("parallel_config.context_parallel"),),
    "pp": (Spelling("parallel_config.pipeline_stage"),),
    "ep": (Spelling("parallel_config.expert_parallel"),),
    "num_microbatches": (Spelling("parallel_config.micro_batch_num"),),
    "sequence_parallel": (Spelling("parallel_config.use_seq_parallel"),),
    "cp_type": (
        Spelling(
            "parallel_config.context_parallel_algo",
            values={"p2p": "colossalai_cp", "a2a": "ulysses_cp", "a2a+p2p": "hybrid_cp"},
            only=("p2p", "a2a", "a2a+p2p"),
        ),
    ),
    "cp_hierarchy": (Spelling("parallel_config.ulysses_degree_in_cp"),),
    "micro_batch": (Spelling("runner_config.batch_size"),),
    "accumulation": (Spelling("runner_config.gradient_accumulation_steps"),),
    "zero1": (Spelling("parallel.enable_parallel_optimizer"),),
    "shards": (Spelling("parallel.parallel_optimizer_config.optimizer_weight_shard_size"),),
    "interleaved": (Spelling("parallel.pipeline_config.pipeline_interleave"),),
    "schedule": (
        Spelling(
            "parallel.pipeline_config.pipeline_scheduler",
            values={"interleaved": "1f1b", "zb-v": "zero_bubble_v"},
            only=("1f1b", "interleaved", "zb-v"),
        ),
    ),
    "vpp": (Spelling("model.model_config.pp_interleave_num"),),
    "offset": (Spelling("model.model_config.offset"),),
    "recompute": (Spelling("recompute_config.recompute"),),
    "optimizer_offload": (Spelling("optimizer.swap"),),
    "seq_len": (Spelling("model.model_config.seq_length"),),
    "data_seq_len": (Spelling("train_dataset.data_loader.config.seq_length"),),
}


@dataclass(frozen=True)
class Framework:
    """How its makers write a framework's name, and its own table."""

    title: str
    spellings: Spellings


FRAMEWORKS: dict[str, Framework] = {
    "megatron-lm": Framework("Megatron-LM", MEGATRON_LM),
    "megatron-bridge": Framework("Megatron-Bridge", MEGATRON_BRIDGE),
    "mindspeed-llm": Framework("MindSpeed-LLM", MINDSPEED_LLM),
    "mindformers": Framework("MindSpore Transformers", MINDFORMERS),
    "torchtitan": Framework("torchtitan", TORCHTITAN),
    "job": Framework("a scheduler", {}),
    "groups": Framework("torch.distributed", {}),
    "deepspeed": Framework("DeepSpeed", DEEPSPEED),
}
