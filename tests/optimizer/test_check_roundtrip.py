"""What export writes, check reads back: the same layout, at the same price."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from paraplan.optimizer.checking.checker import check
from paraplan.optimizer.evaluation import evaluate
from paraplan.optimizer.exporters import render
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.optimizer.readers import Job, read_job, read_text
from paraplan.optimizer.result import Plan
from paraplan.optimizer.step_timeline import step_timeline
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layer_kinds import Attention, Mixer
from paraplan.search_spaces.layout import Layout, Split

from .sample_plan import sample_plan

PLANS: list[tuple[str, str, str, int, int, str, tuple[int, ...]]] = [
    ("megatron-lm", "llama-3.1-8b", "hgx-h100", 16, 32, "tp=2,pp=2,recompute=selective:layernorm+mlp", ()),
    ("megatron-lm", "llama-3.1-70b", "hgx-h100", 64, 256, "tp=8,pp=4,vpp=5,recompute=full", (4,) * 20),
    ("megatron-lm", "llama-3.1-70b", "hgx-h100", 64, 256, "tp=8,pp=4,recompute=full:block:3", (21, 20, 20, 19)),
    (
        "megatron-lm",
        "llama-3.1-70b",
        "hgx-h100",
        64,
        256,
        "tp=4,cp=2,pp=4,vpp=5,cp_type=allgather,recompute=full:block:2",
        (4,) * 20,
    ),
    ("megatron-lm", "llama-3.1-70b", "hgx-h200", 64, 256, "tp=4,pp=4,optimizer_sharding=none,micro_batch=2", ()),
    ("megatron-lm", "llama-3.1-405b", "gb200-nvl72", 288, 288, "tp=8,pp=9,recompute=full:uniform:2", (14,) * 9),
    ("megatron-lm", "llama-3.1-8b", "hgx-h100", 32, 32, "tp=2,pp=4,rank_order=tp-cp-ep-pp-dp", ()),
    ("megatron-lm", "qwen3-30b-a3b", "hgx-h100", 32, 64, "tp=1,pp=2,ep=8,recompute=selective:moe_act", ()),
    (
        "megatron-lm",
        "qwen3-235b-a22b",
        "hgx-h100",
        256,
        512,
        "tp=4,pp=8,ep=8,offload=optimizer:0.5",
        (11, 12, 12, 12, 12, 12, 12, 11),
    ),
    ("megatron-lm", "qwen3-235b-a22b", "hgx-h100", 256, 512, "tp=4,pp=8,ep=8,etp=2", (11, 12, 12, 12, 12, 12, 12, 11)),
    ("megatron-lm", "deepseek-v3", "hgx-h800", 512, 1024, "tp=2,pp=16,ep=16,recompute=selective:mla_up_proj", (4,) * 15 + (2,)),
    ("megatron-lm", "gpt-oss-120b", "hgx-h100", 64, 64, "tp=2,pp=4,ep=8", ()),
    ("mindspeed-llm", "llama-3.1-70b", "atlas-800t-a2", 64, 256, "tp=8,pp=4,recompute=full:block:3", (21, 20, 20, 19)),
    ("mindspeed-llm", "llama-3.1-70b", "atlas-800t-a2", 64, 256, "tp=8,pp=4,vpp=5,recompute=full", (4,) * 20),
    ("mindspeed-llm", "qwen3-235b-a22b", "cloudmatrix-384", 128, 256, "tp=4,pp=4,ep=8", (23, 24, 24, 23)),
    ("mindspeed-llm", "deepseek-v3", "cloudmatrix-384", 768, 768, "tp=2,pp=16,ep=8,offload=optimizer:1", (4,) * 14 + (3, 3)),
]


def planned(
    framework: str,
    model: str,
    cluster: str,
    devices: int,
    batch: int,
    text: str,
    counts: tuple[int, ...],
    version: str | None = None,
) -> Plan:
    """A plan of a layout that is given, with its price, of the model as it is exported: Bridge alone is told gpt-oss's YaRN."""
    given = parse_layout(text)
    fix = f"etp={given['etp']}" if "etp" in given else ""
    problem = build_problem(model, cluster, devices, batch, 4096, framework=framework, framework_version=version, fix=fix)
    if framework != "megatron-bridge":
        kinds = {name: kind.model_copy(update={"mixer": _plain(kind.mixer)}) for name, kind in problem.model.kinds.items()}
        problem = problem.model_copy(update={"model": problem.model.model_copy(update={"kinds": kinds})})
    layout = complete(problem, given)
    chunks = counts or (problem.model.num_layers // layout.pp,) * layout.pp
    cuts = [0]
    for count in chunks:
        cuts.append(cuts[-1] + count)
    cuts[-1] = problem.model.num_layers + (problem.model.mtp.layers if problem.model.mtp else 0)
    stages = Split(layout.pp, layout.vpp, tuple(cuts)).stages(problem.model.num_layers, layout.recompute)
    priced, _ = evaluate(problem, layout.model_copy(update={"stages": stages}))
    return sample_plan().model_copy(update={"problem": problem, "plan": priced, "alternatives": ()})


def _plain(mixer: Mixer) -> Mixer:
    return mixer.model_copy(update={"scaled_rotary": False}) if isinstance(mixer, Attention) else mixer


def bare(layout: Layout) -> dict[str, Any]:
    """A layout without what follows from its stack."""
    return layout.model_dump(exclude={"overlap"})


@pytest.mark.parametrize(("framework", "model", "cluster", "devices", "batch", "text", "counts"), PLANS)
def test_export_is_read_back(
    framework: str, model: str, cluster: str, devices: int, batch: int, text: str, counts: tuple[int, ...]
) -> None:
    plan = planned(framework, model, cluster, devices, batch, text, counts)
    script = next(text for name, text in render(plan, framework).items() if name.endswith(".sh"))
    job = read_text(script, "exported.sh")
    assert job.format == framework
    assert not job.unknown
    found = check(job, cluster=cluster, best=False)
    assert found.priced is not None, (found.unpriced, found.broken)
    assert bare(found.priced.layout) == bare(plan.plan.layout)
    assert (found.devices, found.global_batch, found.seq_len) == (devices, batch, 4096)
    assert found.legal, found.broken
    assert found.priced.step_time_s == pytest.approx(plan.plan.step_time_s, rel=1e-6)
    assert found.priced.memory.peak_gib == pytest.approx(plan.plan.memory.peak_gib, rel=1e-6)


@pytest.mark.parametrize(
    ("framework", "model", "cluster", "said"),
    [
        ("megatron-lm", "deepseek-v2-lite", "hgx-h100", "--moe-router-pre-softmax"),
        ("megatron-bridge", "deepseek-v2-lite", "hgx-h100", "moe_router_pre_softmax=True"),
        ("mindspeed-llm", "deepseek-v2-lite", "atlas-800t-a2", "--moe-router-pre-softmax"),
        ("mindspeed-llm", "qwen3-30b-a3b", "atlas-800t-a2", "--norm-topk-prob"),
        ("mindformers", "qwen3-30b-a3b", "atlas-800t-a2", "norm_topk_prob: true"),
        ("mindformers", "deepseek-v2-lite", "atlas-800t-a2", "norm_topk_prob: false"),
        ("megatron-lm", "qwen3-30b-a3b", "hgx-h100", ""),  # softmax over the chosen experts is its default
        ("mindspeed-llm", "deepseek-v3", "atlas-800t-a2", ""),  # sigmoids are always divided by their sum
        ("megatron-lm", "glm-4.5-air", "hgx-h100", "--rotary-percent 0.5"),
        ("megatron-bridge", "glm-4.5-air", "hgx-h100", "rotary_percent=0.5"),
        ("mindspeed-llm", "glm-4.5-air", "atlas-800t-a2", "--rotary-percent 0.5"),
    ],
)
def test_how_experts_are_weighed_and_heads_turned_is_read_back(framework: str, model: str, cluster: str, said: str) -> None:
    devices = 256 if model == "deepseek-v3" else 32
    plan = planned(framework, model, cluster, devices, 2 * devices, "tp=1,ep=8", ())
    words = ("pre-softmax", "pre_softmax", "norm-topk", "norm_topk", "rotary-percent", "rotary_percent")
    name, text = next((name, text) for name, text in render(plan, framework).items() if _read(text, name) is not None)
    assert said in text and [word for word in words if word in text] == [word for word in words if word in said]
    job, devised = read_text(text, name, devices=devices), plan.problem.model
    assert job.model is not None and not job.unknown
    assert job.model.kinds["moe"] == devised.kinds["moe"]


def test_a_program_says_all_of_a_model_of_clamped_experts_and_mixed_windows() -> None:
    plan = planned("megatron-bridge", "gpt-oss-120b", "hgx-h100", 64, 64, "tp=2,pp=4,ep=8", ())
    program = render(plan, "megatron-bridge")["megatron_bridge_plan.py"]
    job = read_text(program, "exported.py", devices=64)
    assert not (job.unknown or job.unresolved)
    found = check(job, cluster="hgx-h100", best=False)
    assert found.priced is not None and found.priced.step_time_s == pytest.approx(plan.plan.step_time_s, rel=1e-6)


def test_positions_by_yarn_cost_what_the_catalog_says_of_them() -> None:
    """A script of plain positions that says yarn is priced as the model that has its factors."""
    plan = planned("megatron-lm", "gpt-oss-120b", "hgx-h100", 64, 64, "tp=2,pp=4,ep=8", ())
    script = next(text for name, text in render(plan, "megatron-lm").items() if name.endswith(".sh"))
    assert "--position-embedding-type rope" in script
    scaled = check(
        read_text(script.replace("--position-embedding-type rope", "--position-embedding-type yarn"), "yarn.sh"),
        cluster="hgx-h100",
        best=False,
    )
    known, _ = evaluate(build_problem("gpt-oss-120b", "hgx-h100", 64, 64, 4096, framework="megatron-lm"), plan.plan.layout)
    assert scaled.priced is not None and scaled.priced.step_time_s == pytest.approx(known.step_time_s, rel=1e-6)
    assert scaled.priced.step_time_s > plan.plan.step_time_s


def test_the_script_beside_a_program_says_its_processes(tmp_path: Path) -> None:
    plan = planned("megatron-bridge", "llama-3.1-8b", "hgx-h100", 16, 64, "tp=2,pp=2,micro_batch=2", ())
    for name, text in render(plan, "megatron-bridge").items():
        (tmp_path / name).write_text(text)
    assert read_job(tmp_path / "megatron_bridge_plan.py").devices == 16
    (tmp_path / "megatron-bridge.sh").unlink()
    assert read_job(tmp_path / "megatron_bridge_plan.py").devices is None


VERSIONS = [
    ("megatron-lm", "llama-3.1-8b", "hgx-h100", ("0.12", "0.16", "main"), "tp=2,pp=2,micro_batch=2"),
    ("mindspeed-llm", "llama-3.1-8b", "atlas-800t-a2", ("core_v0.12.1", "main"), "tp=2,pp=2,micro_batch=2"),
    ("megatron-bridge", "llama-3.1-8b", "hgx-h100", ("2026-08", "main"), "tp=2,pp=2,micro_batch=2"),
    ("mindformers", "qwen3-8b", "atlas-800t-a2", ("2.1", "main"), "tp=2,pp=2"),
    ("torchtitan", "llama-3.1-8b", "hgx-h100", ("0.3", "main"), "tp=2,micro_batch=2"),
    ("torchtitan", "llama-3.1-8b", "hgx-h100", ("0.3", "main"), "tp=2,pp=2,micro_batch=2,recompute=full"),
    ("deepspeed", "llama-3.1-8b", "hgx-h100", ("0.19", "main"), "tp=2,micro_batch=2,sequence_parallel=false"),
    ("job", "llama-3.1-8b", "hgx-h100", (None,), "tp=2,pp=2"),
]


@pytest.mark.parametrize(
    ("framework", "model", "cluster", "version", "text"),
    [(*named, version, text) for *named, versions, text in VERSIONS for version in versions],
)
def test_every_version_that_is_written_is_read(framework: str, model: str, cluster: str, version: str | None, text: str) -> None:
    """Of what decides the layout nothing is left out or read as a default, and check takes the version that export took."""
    plan = planned("megatron-lm" if framework == "job" else framework, model, cluster, 16, 64, text, (), version)
    files = render(plan, framework, version).items()
    configured = [(name, text) for name, text in files if name.endswith((".py", ".json", ".yaml", ".sh"))]
    job, wanted = next(filter(None, (_read(text, name) for name, text in configured))), plan.plan.layout
    assert not job.unknown
    software = {"framework_version": version} if version else {"stack": "megatron-lm"}
    found = check(job, plan.problem.model, cluster, devices=16, global_batch=64, seq_len=4096, best=False, **software)
    assert found.legal and found.priced is not None, (found.broken, found.unpriced)
    columns = ("tp", "pp", "dp", "num_microbatches", "micro_batch")
    assert [found.given[name] for name in columns] == [getattr(wanted, name) for name in columns]
    if framework != "job":
        assert (job.global_batch, job.seq_len or 4096) == (64, 4096)
        assert found.priced.step_time_s == pytest.approx(plan.plan.step_time_s, rel=1e-6)


def _read(text: str, name: str) -> Job | None:
    """The job of an exported file; None for one that holds none, such as a script that only starts the others."""
    try:
        return read_text(text, name)
    except InputError:
        return None


@pytest.mark.parametrize(
    ("words", "micro", "batch", "broken"),
    [
        ("--training.num_tokens_per_train_step 1048576", 2, 256, None),
        ("--training.num_tokens_per_train_step -1", 2, 64, None),
        ("", 2, 64, None),
        ("--training.num_tokens_per_train_step 300000", 2, 73, "C029"),
    ],
)
def test_batches_in_tokens(words: str, micro: int, batch: int, broken: str | None) -> None:
    """Versions of torchtitan after 0.3: 8,192 tokens are two sequences of 4,096, which 32 replicas take at a time."""
    job = read_text(
        "torchrun --nproc_per_node 64 -m torchtitan.train --module llama3 --config llama3_8b --training.max_context_length 4096 "
        f"--parallelism.tensor_parallel_degree 2 --training.num_tokens_per_microbatch_per_dp_rank 8192 {words}",
        "job",
    )
    assert (job.degrees["micro_batch"], job.global_batch, job.seq_len, job.unknown) == (micro, batch, 4096, ())
    assert {each.rule for each in job.findings} == ({broken} if broken else set())


@pytest.mark.parametrize(
    ("framework", "cluster", "batch", "group", "said"),
    [
        ("megatron-lm", "hgx-h100", 16, 6, "--microbatch-group-size-per-virtual-pipeline-stage 6"),
        ("mindspeed-llm", "atlas-800t-a2", 16, 6, "--microbatch-group-size-per-virtual-pipeline-stage 6"),
        ("megatron-bridge", "hgx-h100", 16, 6, "microbatch_group_size_per_vp_stage=6"),
        ("megatron-lm", "hgx-h100", 11, 0, "--microbatch-group-size-per-virtual-pipeline-stage 6"),
        ("megatron-bridge", "hgx-h100", 11, 0, "microbatch_group_size_per_vp_stage=6"),
    ],
)
def test_groups_of_micro_batches_are_read_back(framework: str, cluster: str, batch: int, group: int, said: str) -> None:
    """On four stages groups of six, six and four, which the stack is asked for, or of six and five, the fewest that 11 go into: the
    job is told so, and priced so.
    """
    problem = build_problem("llama-3.1-8b", cluster, 8, batch, 4096, framework=framework)
    problem = problem.model_copy(update={"stack": problem.stack.model_copy(update={"microbatch_group": group})})
    priced, broken = evaluate(problem, complete(problem, parse_layout("tp=2,pp=4,vpp=2,schedule=interleaved")))
    assert not broken and priced.step_time_s == pytest.approx(priced.simulated_step_time_s, rel=1e-9)
    step = step_timeline(problem, priced.layout)
    assert step.pipeline.schedule.in_flight(0) == 2 * 3 + 6 + 1  # forwards up to the first backward
    for stage, told in enumerate(priced.memory.stages):
        assert step.memory_gib(stage)[1].max() == pytest.approx(told.peak_gib, rel=0.01)
    plan = sample_plan().model_copy(update={"problem": problem, "plan": priced, "alternatives": ()})
    name, text = next((name, text) for name, text in render(plan, framework).items() if said in text)
    found = check(read_text(text, name), problem.model, cluster=cluster, devices=8, best=False)
    assert found.legal and found.priced is not None and not found.unknown
    assert found.priced.step_time_s == pytest.approx(priced.step_time_s, rel=1e-6)
    assert found.priced.memory.peak_gib == pytest.approx(priced.memory.peak_gib, rel=1e-6)


def test_recompute_ahead_of_the_gradient_is_read_back() -> None:
    """32 layers in chunks of one; a stack that waits for the gradient takes longer."""
    asked = build_problem("llama-3.1-8b", "atlas-800t-a2", 8, 8, 4096, framework="mindspeed-llm")
    ahead = asked.model_copy(update={"stack": asked.stack.model_copy(update={"recompute_ahead": True})})
    layout = complete(ahead, parse_layout("tp=2,pp=4,vpp=8,schedule=interleaved,recompute=full"))
    stages = Split(4, 8, tuple(range(33))).stages(32, "full")
    layout = layout.model_copy(update={"stages": stages})
    (priced, broken), (waiting, _) = (evaluate(problem, layout) for problem in (ahead, asked))
    assert not broken and priced.step_time_s == pytest.approx(priced.simulated_step_time_s, rel=1e-9)
    assert priced.step_time_s < waiting.step_time_s * 0.999
    plan = sample_plan().model_copy(update={"problem": ahead, "plan": priced, "alternatives": ()})
    script = next(text for name, text in render(plan, "mindspeed-llm").items() if name.endswith(".sh"))
    assert "--recompute-in-advance" in script
    found = check(read_text(script, "exported.sh"), ahead.model, cluster="atlas-800t-a2", best=False)
    assert found.legal and found.priced is not None, (found.broken, found.unpriced)
    assert found.priced.step_time_s == pytest.approx(priced.step_time_s, rel=1e-6)
