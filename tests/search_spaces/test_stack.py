"""What a stack record accepts, and what the shipped ones say of their frameworks."""

from __future__ import annotations

from typing import Any

import pytest
from paraplan.search_spaces.inputs import catalog_names, load_stack
from paraplan.search_spaces.libraries import megatron_core
from paraplan.search_spaces.stack import Stack
from pydantic import ValidationError

MEGATRON = load_stack("megatron-lm")


def changed(**changes: Any) -> Stack:
    return Stack.model_validate(MEGATRON.model_dump() | changes)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("schedules", ["1f1b", "2f2b"], "'2f2b' is not one of gpipe"),
        ("cp_types", ["ring"], "'ring' is not one of p2p"),
        ("optimizer_shardings", ["zero4"], "'zero4' is not one of none"),
        ("recompute_modules", ["attention"], "'attention' is not one of core_attn"),
        ("rank_orders", [], "at least 1 item"),
        ("precisions", ["fp7"], "Input should be 'bf16'"),
        ("efficiency", 0, "greater than 0"),
        ("overlap", {"tp": 1.5}, "less than or equal to 1"),
        ("vocab_divisor", 0, "greater than 0"),
    ],
)
def test_words_outside_the_vocabulary_are_refused(field: str, value: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        changed(**{field: value})


def test_empty_module_list_means_no_selective_recompute() -> None:
    assert changed(recompute_modules=[]).recompute_modules == ()


@pytest.mark.parametrize("name", catalog_names("stacks"))
def test_catalog_stack_is_consistent(name: str) -> None:
    stack = load_stack(name)
    assert stack.name == name
    assert "even" in stack.split_forms
    assert "bf16" in stack.precisions
    assert ("interleaved" in stack.schedules) or stack.overlap.pp_interleaved == 0
    assert stack.overlap.fsdp > 0 or not {"zero3", "hsdp"} & set(stack.optimizer_shardings)
    assert stack.optimizer_offload or stack.overlap.offload == 0
    assert stack.host_floor_dense_s.value <= stack.host_floor_moe_s.value


def test_what_megatron_core_012_lacks() -> None:
    """mcore 0.12.1 rejects KV heads that TP does not divide, and knows no layout string; so does MindSpeed-LLM, built on it."""
    for name in ("megatron-lm-0.12", "mindspeed-llm"):
        stack = load_stack(name)
        assert not stack.kv_replication
        assert "layout" not in stack.split_forms
    assert MEGATRON.kv_replication and "layout" in MEGATRON.split_forms


def test_groups_of_micro_batches_are_megatrons() -> None:
    assert changed(microbatch_group=6).microbatch_group == 6
    with pytest.raises(ValidationError, match="only megatron-lm, megatron-bridge, mindspeed-llm are told"):
        Stack.model_validate(load_stack("torchtitan").model_dump() | {"microbatch_group": 6})


def test_buckets_of_megatron_core_hold_what_its_configuration_says() -> None:
    """40 million parameters, or a million for every replica where that is more (DistributedDataParallelConfig.bucket_size)."""
    buckets = megatron_core().gradient_buckets
    assert (buckets.least, buckets.each_replica) == (40_000_000, 1_000_000)
