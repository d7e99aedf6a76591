"""verl's launch scripts: the layout of its Megatron actor, which is judged and has no price."""

from __future__ import annotations

import pytest
from paraplan.optimizer.checking.checker import Checked, check
from paraplan.optimizer.readers import read_text
from paraplan.search_spaces.errors import InputError

START = "python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer trainer.nnodes=4 trainer.n_gpus_per_node=8 "
ACTOR = "actor_rollout_ref.actor.megatron"
MODEL = "actor_rollout_ref.model.path=$HOME/models/Qwen3-30B-A3B-Instruct-2507 "


def judged(*degrees: str, more: str = "") -> Checked:
    keys = " ".join(f"{ACTOR}.{degree}" for degree in degrees)
    return check(read_text(f"#!/bin/bash\n{START}{MODEL}{keys} {more}", "grpo.sh"), best=False)


def test_an_actor_is_laid_out_as_its_keys_say() -> None:
    """Over the trainer's devices, with what a Megatron engine has by default; the model is that of the path."""
    recompute = f"+{ACTOR}.override_transformer_config.recompute_granularity=full"
    recompute += f" +{ACTOR}.override_transformer_config.recompute_method=uniform"
    recompute += f" +{ACTOR}.override_transformer_config.recompute_num_layers=1"
    degrees = ("tensor_model_parallel_size=4", "pipeline_model_parallel_size=2", "expert_model_parallel_size=8")
    found = judged(*degrees, "expert_tensor_parallel_size=1", more=recompute)
    assert found.format == "verl" and found.model == "qwen3-30b-a3b" and found.devices == 32 and found.legal
    assert [found.given[name] for name in ("tp", "pp", "dp", "ep", "etp")] == [4, 2, 4, 8, 1]
    assert found.given["sequence_parallel"] == "on" and found.given["optimizer_sharding"] == "zero1"
    assert found.given["recompute"] == "full" and not found.unknown and not found.may_change_model
    assert found.priced is None and "trains on what it generates" in found.unpriced[0]


def test_what_breaks_rules_is_told_with_legal_degrees() -> None:
    """EP 16 on pp 4 needs ETP 1, which Megatron-Core takes for TP where it is left out; SP is off without TP."""
    left_out = judged("tensor_model_parallel_size=2", "pipeline_model_parallel_size=4", "expert_model_parallel_size=8")
    assert {each.rule for each in left_out.broken} == {"C002"} and {"etp": 1} in left_out.nearest_columns
    assert judged("tensor_model_parallel_size=1", "pipeline_model_parallel_size=5").broken[0].rule == "C001"
    assert judged("tensor_model_parallel_size=1", "pipeline_model_parallel_size=1").given["sequence_parallel"] == "off"


def test_engines_that_are_not_megatrons_are_refused() -> None:
    fsdp = f"{START} actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    with pytest.raises(InputError, match="lays out no Megatron engine"):
        read_text(fsdp, "grpo.sh")


def test_the_supervised_trainer_is_started_by_torchrun() -> None:
    text = "torchrun --nnodes=2 --nproc_per_node=8 -m verl.trainer.sft_trainer engine=megatron engine.tensor_model_parallel_size=2 "
    found = check(read_text(f"{text} engine.pipeline_model_parallel_size=2 model.path=Qwen/Qwen3-8B", "sft.sh"), best=False)
    assert found.devices == 16 and found.given["dp"] == 4 and found.model == "qwen3-8b" and found.legal
