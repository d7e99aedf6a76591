"""Options that take one of a few words: what a framework refuses before anything runs is no legal job."""

from __future__ import annotations

import pytest
from paraplan.optimizer.exporters.megatron_spellings import MEGATRON_LM
from paraplan.optimizer.readers import read_text
from paraplan.optimizer.readers.option_words import WORDS

JOB = "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 8 --num-layers 32 --micro-batch-size 1 {}"


def broken(options: str) -> list[str]:
    return [each.sentence for each in read_text(JOB.format(options), "job.sh").findings if each.rule == "P015"]


@pytest.mark.parametrize("option", WORDS["megatron-lm"])
def test_every_word_is_taken_and_no_other(option: str) -> None:
    for word in WORDS["megatron-lm"][option]:
        assert not broken(f"--{option} {word}") and not broken(f"--{option.replace('-', '_')} {word}")
    (said,) = broken(f"--{option} mistaken")
    assert said.startswith(f"--{option} mistaken is not one of ")


@pytest.mark.parametrize(
    ("command", "framework"),
    [
        ("python run.py --recipe llama31_70b_pretrain_config model.tensor_model_parallel_size=8 {}={}", "megatron-bridge"),
        ("torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b --{} {}", "torchtitan"),
    ],
)
def test_fields_take_their_words_and_no_other(command: str, framework: str) -> None:
    for field, words in WORDS[framework].items():
        for word in (*words, "None", "mistaken"):
            found = [each.sentence for each in read_text(command.format(field, word), "job.sh").findings if each.rule == "P015"]
            assert len(found) == (word == "mistaken"), (field, word)


def test_what_was_meant_is_said() -> None:
    assert broken("--moe-token-dispatcher-type all2all") == [
        "--moe-token-dispatcher-type all2all is not one of allgather, alltoall, flex, alltoall_seq; "
        "did you mean 'alltoall' or 'alltoall_seq'?"
    ]
    assert broken("--recompute-granularity part") and not broken("--recompute-granularity $HOW")
    assert len(broken("--moe-router-load-balancing-type aux_loss seq_aux_los")) == 1


def test_exports_say_only_such_words() -> None:
    for spellings in MEGATRON_LM.values():
        for spelling in spellings:
            words = WORDS["megatron-lm"].get(spelling.text.lstrip("-"))
            assert words is None or set((spelling.values or {}).values()) <= set(words)


def test_a_fork_may_know_more_words() -> None:
    """Options that Megatron-LM has not mark a parser of another's: what it takes is told, and breaks nothing."""
    job = read_text(JOB.format("--zz-own-option 1 --normalization rmsnorm"), "job.sh")
    assert job.unknown and not [each for each in job.findings if each.rule == "P015"]
    assert "--normalization rmsnorm is not one of LayerNorm, RMSNorm" in " ".join(each.sentence for each in job.advice)


def test_switches_take_no_value_and_other_options_need_one() -> None:
    assert broken("--bf16 2") == ["--bf16 takes no value, and 2 stands behind it: leave 2 out."]
    assert broken("--ckpt-format") == ["--ckpt-format has no value: give one, or leave the option out."]
    assert broken("--rotary-scaling-factor large") == ["--rotary-scaling-factor large is not a number."]
    assert not broken("--bf16 $MORE") and not broken("--rotary-scaling-factor 40.0") and not broken("--mscale 1e0")
