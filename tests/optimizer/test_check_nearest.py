"""Random jobs that break rules, in every format: what check proposes, made word for word in their configuration, is legal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import yaml
from paraplan.optimizer.checking.checked import Checked
from paraplan.optimizer.checking.checker import check
from paraplan.optimizer.readers import read_text

from .applying import made
from .check_samples import LLAMA_7B, checked, rules
from .test_check import drawn
from .test_check_changes import DENSE, ON_ASCEND, SPARSE

MODEL = "qwen3-30b-a3b"
DEVICES, BATCH, LENGTH = 48, 96, 4096
CHUNKS = "num-layers-per-virtual-pipeline-stage"


def degrees(drawn: Random) -> dict[str, int]:
    """Of all degrees some that do not go with 48 layers, 4 groups of 32 heads, 128 experts, 48 devices or a batch of 96."""
    found = {"tp": drawn.choice((1, 2, 3, 4, 6, 8)), "pp": drawn.choice((1, 2, 3, 4, 5, 7)), "cp": drawn.choice((1, 1, 2))}
    found |= {"ep": drawn.choice((1, 2, 4, 6, 8, 32)), "micro_batch": drawn.choice((1, 2, 3, 5, 7))}
    return found | {"vpp": drawn.choice((1, 1, 2, 5)) if found["pp"] > 1 else 1}


def megatron(form: str, drawn: Random) -> str:
    d, model = degrees(drawn), drawn.choice((DENSE, SPARSE.replace(" --expert-model-parallel-size 8", "")))
    experts = f"--expert-model-parallel-size {d['ep']}" if "experts" in model else ""
    layers = f"--{CHUNKS} {drawn.choice((1, 2, 3, 5, 16))}"
    chunks = drawn.choice((f"--num-virtual-stages-per-pipeline-rank {d['vpp']}", layers))
    return (
        f"torchrun {model} {experts} --tensor-model-parallel-size {d['tp']} --pipeline-model-parallel-size {d['pp']} "
        f"--context-parallel-size {d['cp']} --micro-batch-size {d['micro_batch']} {chunks if d['vpp'] > 1 else ''} "
        f"--global-batch-size {BATCH} {'--sequence-parallel' if d['tp'] > 1 and drawn.random() < 0.8 else ''}"
    )


def bridge(drawn: Random) -> str:
    d = degrees(drawn)
    words = {
        "model.tensor_model_parallel_size": d["tp"],
        "model.pipeline_model_parallel_size": d["pp"],
        "model.context_parallel_size": d["cp"],
        "model.expert_model_parallel_size": d["ep"],
        "model.virtual_pipeline_model_parallel_size": d["vpp"] if d["vpp"] > 1 else "null",
        "model.sequence_parallel": str(d["tp"] > 1).lower(),
        "train.micro_batch_size": d["micro_batch"],
        "train.global_batch_size": BATCH,
        "model.seq_length": LENGTH,
    }
    return f"run_recipe.py {' '.join(f'{key}={value}' for key, value in words.items())}"


def mindformers(drawn: Random) -> str:
    d = degrees(drawn)
    parallel = {"model_parallel": d["tp"], "pipeline_stage": d["pp"], "context_parallel": d["cp"], "expert_parallel": d["ep"]}
    batch = {"data_parallel": drawn.choice((1, 2, 3, 4)), "micro_batch_num": drawn.choice((3, 4, 8))}
    data: dict[str, Any] = {
        "runner_config": {"batch_size": d["micro_batch"]},
        "parallel": {"pipeline_config": {"pipeline_interleave": d["vpp"] > 1}},
        "parallel_config": {**parallel, **batch, "use_seq_parallel": d["tp"] > 1},
        "model": {"model_config": {"seq_length": LENGTH, "pp_interleave_num": d["vpp"]}},
    }
    return yaml.safe_dump(data)


def torchtitan_fields(drawn: Random) -> dict[str, Any]:
    d = degrees(drawn)
    named = {"tensor": d["tp"], "pipeline": d["pp"], "context": d["cp"], "expert": d["ep"]}
    fields: dict[str, Any] = {f"parallelism.{name}_parallel_degree": value for name, value in named.items()}
    if d["pp"] > 1:
        fields["parallelism.pipeline_parallel_schedule"] = "1F1B" if d["vpp"] == 1 else "Interleaved1F1B"
    return {**fields, "training.local_batch_size": 4, "training.global_batch_size": BATCH, "training.seq_len": LENGTH}


def torchtitan(drawn: Random) -> str:
    words = " ".join(f"--{name} {value}" for name, value in torchtitan_fields(drawn).items())
    return f"torchrun --module qwen3 --config qwen3_30b_a3b {words} --training.disable_cuda_graphs"


def torchtitan_toml(drawn: Random) -> str:
    fields = {"model.name": "qwen3", "model.flavor": "30B-A3B", **torchtitan_fields(drawn)}
    sections = {name.partition(".")[0]: {} for name in fields}
    for name, value in fields.items():
        sections[name.partition(".")[0]][name.partition(".")[2]] = value
    lines = [(f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in own.items())) for name, own in sections.items()]
    return "\n".join(line for section in lines for line in section)


def torchtitan_program(drawn: Random) -> str:
    lines = [f"    config.{name} = {value!r}" for name, value in torchtitan_fields(drawn).items()]
    head = ["def planned():", "    config = qwen3_30b_a3b()", "    config.model_spec = model_registry('30B-A3B')"]
    return "\n".join([*head, *lines, "    return config", ""])


def deepspeed(drawn: Random) -> str:
    d = degrees(drawn)
    return json.dumps(
        {
            "train_batch_size": drawn.choice((BATCH, 100)),
            "train_micro_batch_size_per_gpu": d["micro_batch"],
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "tensor_parallel": {"autotp_size": d["tp"]},
            "sequence_parallel_size": d["cp"],
            "pipeline": {"stages": d["pp"]},
            **({"expert_parallel": {"enabled": True, "autoep_size": d["ep"]}} if d["ep"] > 1 else {}),
            **({"gradient_accumulation_steps": 4} if drawn.random() < 0.5 else {}),
        }
    )


def job_yaml(drawn: Random) -> str:
    d = degrees(drawn)
    strategy: dict[str, Any] = {
        "tensor_parallel": d["tp"],
        "pipeline_parallel": d["pp"],
        "context_parallel": d["cp"],
        "expert_parallel": d["ep"],
        "virtual_pipeline_parallel": d["vpp"],
        "micro_batch_size": d["micro_batch"],
        "global_batch_size": BATCH,
        "seq_len": LENGTH,
    }
    if drawn.random() < 0.5:
        strategy["data_parallel"] = drawn.choice((1, 2, 4, 6))
    return yaml.safe_dump({"task": {"model": MODEL, "resource": {"accelerators": DEVICES}, "strategy": strategy}})


def layout_words(drawn: Random) -> str:
    found = degrees(drawn) | ({"dp": drawn.choice((1, 2, 4, 6))} if drawn.random() < 0.5 else {})
    return ",".join(f"{name}={value}" for name, value in found.items())


JOBS: dict[str, Callable[[Random], str]] = {
    "megatron-lm": lambda drawn: megatron("megatron-lm", drawn),
    "mindspeed-llm": lambda drawn: megatron("mindspeed-llm", drawn),
    "megatron-bridge": bridge,
    "mindformers": mindformers,
    "torchtitan": torchtitan,
    "torchtitan toml": torchtitan_toml,
    "torchtitan program": torchtitan_program,
    "deepspeed": deepspeed,
    "job": job_yaml,
    "paraplan": layout_words,
}
IN_FILE = ("megatron-lm", "mindspeed-llm", "torchtitan", "torchtitan toml", "torchtitan program", "job")
"""Formats whose files say the model, or its figures."""


def judged(form: str, text: str, batch: int = BATCH, length: int = LENGTH) -> Checked:
    given: dict[str, Any] = {"global_batch": batch} if form == "paraplan" else {}
    given |= {"seq_len": length} if form in ("paraplan", "deepspeed", "megatron-lm", "mindspeed-llm") else {}
    cluster = "cloudmatrix-384" if form in ON_ASCEND else "hgx-h100"
    job = read_text(text, "job", form=form.split()[0], devices=DEVICES)
    return check(job, None if form in IN_FILE else MODEL, cluster, best=False, **given)


def after(form: str, text: str, words: tuple[str, ...]) -> Checked:
    """The job with a proposal made; what the caller gave is given anew where the proposal changes it."""
    given = {"global batch": BATCH, "sequence length": LENGTH}
    for name in given:
        given[name] = next((int(word.split()[-1]) for word in words if word.startswith(name)), given[name])
    said = [word for word in words if not word.startswith(tuple(given))]
    return judged(form, made(form, text, said), given["global batch"], given["sequence length"])


@pytest.mark.parametrize("form", JOBS)
def test_what_is_near_is_legal(form: str) -> None:
    proposals = 0
    for seed in range(3):
        text = JOBS[form](Random(f"{form} {seed}"))
        found = judged(form, text)
        assert bool(found.broken) or not found.nearest
        for words, change in zip(found.nearest, found.nearest_columns, strict=True):
            assert words and all(words), (text, change)
            again = after(form, text, words)
            assert not again.broken, (text, change, words, [each.sentence for each in again.broken])
            proposals += 1
    assert proposals >= 3


def layers_per_chunk(depth: int, layers: int = 32, world: int = 32, pp: int = 4) -> Checked:
    more = LLAMA_7B.replace("--num-layers 32", f"--num-layers {layers}")
    return checked(more, world=world, tp=2, pp=pp, gbs=128, mbs=1, seq=4096, sequence_parallel=True, **{CHUNKS: depth})


@pytest.mark.parametrize(("depth", "nearest"), [(3, (2, 4, 1)), (16, (4,))])
def test_layers_per_chunk_that_do_not_divide(depth: int, nearest: tuple[int, ...]) -> None:
    """A stage's 8 layers in chunks of 3 or 16: those near that divide 8 are proposed, each with the option that says it."""
    found = layers_per_chunk(depth)
    (broken,) = found.broken
    assert broken.rule == "C060"
    assert f"1, 2, 4 would, as would leaving --{CHUNKS} out" in broken.sentence
    assert [words for words in found.nearest if len(words) == 1] == [(f"--{CHUNKS} {value}",) for value in nearest]


def test_layers_that_no_chunk_divides() -> None:
    """31 layers on four stages: 7, then three times 8, and no chunks."""
    found = layers_per_chunk(2, layers=31)
    assert rules(found) == {"C060"} and "7 in the first and 8 in the last stage (7+8+8+8)" in found.broken[0].sentence
    first = "--decoder-first-pipeline-num-layers 7", "--decoder-last-pipeline-num-layers 8", f"no --{CHUNKS}"
    assert found.nearest[0] == first


def test_what_is_enough_is_not_proposed_with_more() -> None:
    """A stage of its own at each end does without chunks; fewer stages or another micro-batch on top mend no more."""
    assert layers_per_chunk(2, layers=33).nearest_columns == ({"vpp": 1},)


@pytest.mark.parametrize("form", ["megatron-lm", "mindspeed-llm"])
def test_processes_of_a_grid_that_does_not_come_out(form: str) -> None:
    """TP 2 · PP 3 of 40 devices: the job starts 40 processes, however few its unfinished grid would take."""
    degrees = {"tp": 2, "pp": 3, "gbs": 120, "mbs": 1, "seq": 4096, "sequence_parallel": True}
    cluster = "cloudmatrix-384" if form in ON_ASCEND else "hgx-h100"
    found = checked(LLAMA_7B, world=40, form=form, options={"cluster": cluster, "best": True}, **degrees)
    assert "C001" in rules(found) and found.best is not None and found.changes
    said = " ".join(f"{each.before} {each.after}" for each in found.changes)
    assert found.best.layout.devices == 40 and "processes" not in said


def test_too_few_micro_batches_to_interleave() -> None:
    """3 micro-batches on 6 stages: without chunks they run, and with a batch of 6 they do so in chunks."""
    degrees = {"tp": 4, "pp": 6, "vpp": 2, "gbs": 3, "mbs": 1, "seq": 4096, "layers": 48, "heads": 32, "sequence_parallel": True}
    found = checked(world=24, **degrees)
    assert rules(found) == {"C030a"}
    assert found.nearest[:2] == (("no --num-virtual-stages-per-pipeline-rank",), ("--global-batch-size 6",))


SIZED = LLAMA_7B.replace("--num-layers 32", "")
SMALL_EXPERTS = "--hidden-size 2048 --ffn-hidden-size 6144 --moe-ffn-hidden-size 768 --vocab-size 32000"
LISTED = (
    {"more": SIZED, "world": 8, "layers": 30, "pp": 4},
    {"more": LLAMA_7B, "world": 4, "pp": 4, "tp": 2},
    {"more": LLAMA_7B, "world": 8, "tp": 2, "cp": 4, "seq": 4100},
    {"more": LLAMA_7B, "world": 36, "tp": 18, "sequence_parallel": True},
    {"more": LLAMA_7B, "world": 64, "tp": 2, "pp": 8, "gbs": 10},
    {"more": SMALL_EXPERTS, "world": 24, "ep": 24, "experts": 256, "layers": 48, "heads": 32},
    {"more": LLAMA_7B, "world": 24, "tp": 3, "pp": 5, "mbs": 3, "gbs": 64},
)


@pytest.mark.parametrize("values", LISTED)
def test_values_that_are_listed_are_legal_with_the_rest_as_it_is(values: dict[str, Any]) -> None:
    """Each value of one column, set in the job, mends its rule and breaks none that was met."""
    given = {"gbs": 48, "mbs": 1, "seq": 4096, **values}
    found = checked(**given)
    assert found.broken
    option = {"micro_batch": "mbs", "global_batch": "gbs", "seq_len": "seq", "cp_type": "cp-comm-type"}
    for each in found.broken:
        for column, listed in each.legal.items():
            for value in listed:
                again = checked(**{**given, option.get(column, column): value})
                assert rules(again) <= rules(found) - {each.rule}, (each.rule, column, value)


@pytest.mark.parametrize(
    ("values", "rule", "column", "listed", "said"),
    [
        (LISTED[0], "C060", "pp", (1, 2), "; 1 or 2 would"),
        (LISTED[5], "C080c", "ep", (1, 2, 4, 8), "; 4 or 8 would"),
        (LISTED[3], "C020", "tp", (1, 2, 4), "; 2 or 4 would"),
    ],
)
def test_a_sentence_names_the_nearest_of_those(
    values: dict[str, Any], rule: str, column: str, listed: tuple[int, ...], said: str
) -> None:
    found = checked(**{"gbs": 72, "mbs": 1, "seq": 4096, **values})
    (broken,) = (each for each in found.broken if each.rule == rule)
    assert broken.legal[column] == listed and not broken.alone
    assert said in broken.sentence


@pytest.mark.parametrize(("more", "listed"), [("", False), ("pipeline_parallel_layers_per_stage = 11", True)])
def test_torchtitan_cuts_its_own_stages(more: str, listed: bool) -> None:
    """TP 16 of 8 KV heads: with TP 8 on 8 stages its usual cut holds, unless layers per stage ask for another number of chunks."""
    degrees = "tensor_parallel_degree = 16\npipeline_parallel_degree = 4\ndata_parallel_shard_degree = 3"
    parallelism = f'[parallelism]\n{degrees}\npipeline_parallel_schedule = "Interleaved1F1B"\n{more}'
    training = "[training]\nlocal_batch_size = 8\nseq_len = 8192"
    text = f'[model]\nname = "llama3"\nflavor = "70B"\n{training}\n{parallelism}'
    found = check(read_text(text, "job.toml", form="torchtitan"), best=False)
    (deeper,) = (words for words, made in zip(found.nearest, found.nearest_columns, strict=True) if made == {"tp": 8, "pp": 8})
    assert any("module_fqns" in word for word in deeper) == listed


def few_micro_batches(heads: int) -> Checked:
    """A MindFormers job of 2 micro-batches on 4 stages of 128 devices, dp 4 · tp 8, with a global batch of 8."""
    degrees = {"data_parallel": 4, "model_parallel": 8, "pipeline_stage": 4, "micro_batch_num": 2, "use_seq_parallel": True}
    sizes = {"type": "LlamaConfig", "seq_length": 4096, "hidden_size": 5120, "num_layers": 40, "num_heads": heads}
    rest = {"vocab_size": 32000, "intermediate_size": 13824}
    data = {"parallel_config": degrees, "runner_config": {"batch_size": 1}, "model": {"model_config": {**sizes, **rest}}}
    return check(read_text(yaml.safe_dump(data), "job.yaml", form="mindformers"), best=False)


def test_what_keeps_the_batch_comes_first() -> None:
    """TP 16 on 2 replicas trains the same 8 sequences, so it is told before the single keys that train more."""
    found = few_micro_batches(heads=32)
    assert rules(found) == {"C031"}
    assert found.nearest_columns[0] == {"tp": 16, "dp": 2}
    assert all("global_batch" not in each for each in found.nearest_columns[:2])


def test_a_batch_that_no_key_names_is_told_where_it_changes() -> None:
    """Of 40 heads TP 16 is none: what is left are more micro-batches, which are more sequences."""
    text = drawn(few_micro_batches(heads=40), 120)
    assert "micro_batch_num: 4 (global batch 8 → 16)" in text
    assert "(global batch" not in drawn(checked(LLAMA_7B, world=64, pp=8, tp=2, gbs=10, mbs=1), 120)


FAILING = re.compile(r"([\d,]+) (?:does not divide|is not a multiple of) .*; (.*) would")


def test_a_value_that_fails_is_no_remedy() -> None:
    """Degrees and batches at random: no sentence offers the value that it finds wrong, though another column could mend it."""
    drawn, offers = Random(7), 0
    for _ in range(14):
        grid = {name: drawn.choice((1, 2, 3, 4, 6, 8)) for name in ("tp", "cp", "pp")}
        own = {"mbs": drawn.choice((1, 2, 3)), "gbs": drawn.choice((62, 64, 96)), "vpp": drawn.choice((1, 2, 3)), **grid}
        more = SPARSE if drawn.random() < 0.5 else DENSE
        for each in checked(more, world=48, sequence_parallel=True, **own).broken:
            said = FAILING.search(each.sentence)
            if said is not None:
                assert said[1] not in re.findall(r"[\d,]*\d", said[2]), each.sentence
                offers += 1
    assert offers > 5


@pytest.mark.parametrize(
    ("values", "rule", "said"),
    [
        (
            {"world": 3, "pp": 3, "vpp": 2, "gbs": 62, "layers": 36},
            "C030a",
            "; num_microbatches = 60 or 63 would do, as would --microbatch-group-size-per-virtual-pipeline-stage 7.",
        ),
        ({"world": 24, "cp": 3, "tp": 8, "seq": 8192}, "C041", "cp·tp = 24 does not divide the sequence length 8192; 8 would."),
    ],
)
def test_a_remedy_leaves_the_rest_of_its_rule(values: dict[str, Any], rule: str, said: str) -> None:
    found = checked(SIZED, **{"mbs": 1, "gbs": 48, "seq": 4096, "layers": 32, "sequence_parallel": True, **values})
    (broken,) = (each for each in found.broken if each.rule == rule)
    assert said in broken.sentence


def test_values_that_mend_one_rule_and_break_another_are_said_to() -> None:
    """TP 1 divides the 32 heads, and leaves three replicas that do not divide a batch of 4."""
    found = checked(LLAMA_7B, world=3, tp=3, gbs=4, mbs=1, seq=4096)
    (broken,) = (each for each in found.broken if each.rule == "C020")
    assert broken.legal == {} and broken.alone == {"tp": (1,)}
    assert "would" not in broken.sentence


@pytest.mark.parametrize(
    ("layout", "framework", "rule", "legal", "nearest"),
    [
        ("tp=2,pp=4,vpp=2,schedule=zb-v", "megatron-lm", "stack schedule", ("interleaved",), {"schedule": "interleaved"}),
        ("tp=2,pp=4,optimizer_sharding=zero3", "megatron-lm", "stack sharding", ("zero1", "none"), {"optimizer_sharding": "zero1"}),
        ("tp=2,optimizer_sharding=none", "torchtitan", "stack sharding", ("zero2", "zero3"), {"optimizer_sharding": "zero2"}),
        ("strategy: {tensor_parallel: 2, schedule: gpipe}", "deepspeed", "stack schedule", ("1f1b",), {"schedule": "1f1b"}),
    ],
)
def test_a_word_that_the_framework_lacks(
    layout: str, framework: str, rule: str, legal: tuple[str, ...], nearest: dict[str, str]
) -> None:
    """It is illegal by the rule that binds a plan, told with the words that are legal, and the nearest makes it legal."""
    job = read_text(layout, "layout")
    found = check(job, "llama-3.1-8b", devices=16, framework=framework, best=False)
    (broken,) = found.broken
    assert broken.rule == rule and broken.legal == {next(iter(nearest)): legal}
    assert " it." in broken.sentence and found.nearest_columns[0] == nearest
    again = check(read_text(made(job.format, layout, found.nearest[0]), "layout"), "llama-3.1-8b", framework=framework, best=False)
    assert again.legal


BROKEN_ALONE = [
    ("P002", "nanotron", "llama-3.1-8b", "tp=2,pp=4,offload=optimizer:0.5", {"offload": "none"}),
    ("P011", "megatron-lm-0.12", "llama-3.1-8b", "tp=2,offload=optimizer:1+activations:0.5", {"offload": "optimizer:1"}),
    ("C103b", "megatron-lm", "deepseek-v2-lite", "ep=2,recompute=selective:moe_act,offload=activations:0.5", {"offload": "none"}),
    ("C064c", "megatron-lm", "llama-3.1-8b", "tp=2,schedule=interleaved", {"schedule": "1f1b"}),
    ("C100c", "megatron-lm", "llama-3.1-8b", "tp=2,recompute=full:uniform:100", {"recompute": "full:uniform:32"}),
    ("C100d", "torchtitan", "llama-3.1-8b", "pp=4,recompute=full:block:2", {"recompute": "full"}),
    ("C101a", "mindspeed-llm", "llama-3.1-8b", "recompute=selective:mla_up_proj", {"recompute": "none"}),
    ("C101b", "megatron-bridge", "llama-3.1-8b", "recompute=selective:layernorm+moe_act", {"recompute": "selective:layernorm"}),
    ("stack recompute", "mindformers", "llama-3.1-8b", "recompute=selective:core_attn+layernorm", {"recompute": "none"}),
    ("C069", "torchtitan", "llama-3.2-3b", "tp=2,pp=4,vpp=2", {"pp": 1, "vpp": 1}),
    ("P004", "mindspeed-llm", "qwen3-next-80b-a3b", "tp=2,pp=4,recompute=full", {"pp": 2, "ep": 4}),
]


@pytest.mark.parametrize(("rule", "stack", "model", "layout", "nearest"), BROKEN_ALONE)
def test_a_rule_that_is_broken_alone_is_mended_by_what_is_near(
    rule: str, stack: str, model: str, layout: str, nearest: dict[str, str | int]
) -> None:
    """The nearest is a word where a word mends it, else degrees that go together; each that is listed leaves no rule broken."""

    def judge(text: str) -> Checked:
        return check(read_text(text, "layout"), model, stack=stack, devices=8, global_batch=64, seq_len=4096, best=False)

    found = judge(layout)
    assert [each.rule for each in found.broken] == [rule]
    assert found.nearest_columns[0] == nearest
    for words in found.nearest:
        assert not judge(made("paraplan", layout, words)).broken, words


def test_layers_between_checkpoints_that_do_not_divide_a_chunk() -> None:
    depth = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 3}
    found = checked(LLAMA_7B, world=8, pp=4, gbs=64, mbs=1, seq=4096, **depth)
    assert rules(found) == {"C100e"}
    assert found.nearest[0] == ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",)


FSDP = {"use-megatron-fsdp": True, "ckpt-format": "fsdp_dtensor"}


def test_a_framework_has_what_its_own_options_ask_for() -> None:
    """FSDP in a launch script is no other framework's, though Megatron-LM's usual stack does not price it."""
    fsdp = checked(LLAMA_7B, world=8, options={"framework": "megatron-lm"}, mbs=1, **FSDP)
    assert fsdp.given["optimizer_sharding"] == "zero3" and not rules(fsdp)
