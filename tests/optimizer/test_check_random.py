"""Random plans of every target: what is exported for it is read back as the same layout, with no rule broken, at the same price."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from paraplan.optimizer.checking.checker import check
from paraplan.optimizer.checking.group_check import read_and_check
from paraplan.optimizer.evaluation import evaluate
from paraplan.optimizer.exporters import EXPORTERS, export
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.optimizer.planner import plan as make_plan
from paraplan.optimizer.readers import read_job
from paraplan.optimizer.result import Plan
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.inputs import build_problem, load_model
from paraplan.search_spaces.layout import Split

sys.path.insert(0, str(Path(__file__).parents[1] / "exporters"))
from random_plans import plan as drawn
from random_plans import plans

DENSE, LATENT, MOE = ("llama-3.1-70b", 256, 1024, 8192), ("deepseek-v3", 512, 4096, 4096), ("qwen3-235b-a22b", 512, 2048, 4096)
GPT, MIXTRAL = ("gpt3-175b", 384, 1536, 2048), ("mixtral-8x22b", 128, 512, 8192)
CASES: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "megatron-lm": ("megatron-lm", "hgx-h100", (DENSE, LATENT, MOE, GPT, MIXTRAL)),
    "megatron-bridge": ("megatron-bridge", "hgx-h100", (DENSE, LATENT, MOE, GPT, MIXTRAL)),
    "mindspeed-llm": ("mindspeed-llm", "cloudmatrix-384", (DENSE, LATENT, MOE, MIXTRAL)),
    "mindformers": ("mindformers", "cloudmatrix-384", (LATENT, MOE)),
    "torchtitan": ("torchtitan", "hgx-h100", (DENSE, LATENT, MOE)),
    "deepspeed": ("deepspeed", "hgx-h100", (DENSE, MOE, GPT, MIXTRAL)),
    "job": ("megatron-lm", "hgx-h100", (DENSE, LATENT, MOE)),
}
"""Target → stack, cluster and problems that plans are drawn from."""
NOT_IN_ITS_FILES = {"deepspeed": ("model", "seq_len"), "job": ("model", "stack")}
"""What the files of a target do not hold, and the caller gives."""


def given_for(target: str, plan: Plan, folder: Path) -> dict[str, Any]:
    """The inputs that stand beside the configuration; the model's own file where the target writes one."""
    model = folder / "model.json" if (folder / "model.json").exists() else load_model(plan.problem.model.name)
    known = {"model": model, "seq_len": plan.problem.workload.seq_len, "stack": plan.problem.stack}
    return {name: known[name] for name in NOT_IN_ITS_FILES.get(target, ())}


def without_synonyms(plan: Plan) -> dict[str, Any]:
    """The layout's columns that mean something: without a ring its kind, without a pipeline its schedule."""
    layout, stack = plan.plan.layout, plan.problem.stack
    kept = layout.model_dump(exclude={"overlap"})
    if layout.cp == 1:
        del kept["cp_type"]
    if layout.pp == 1:
        del kept["schedule"]
    gathered = layout.pp > 1 and layout.optimizer_sharding == "zero2" and stack.footprint.gathered_stages
    if layout.optimizer_sharding == f"hsdp:{layout.dp * layout.cp}" or gathered:
        kept["optimizer_sharding"] = "zero3"
    return kept


@pytest.mark.parametrize("target", CASES)
def test_random_plans_are_read_back(target: str, tmp_path: Path) -> None:
    stack, cluster, problems = CASES[target]
    for number, plan in enumerate(plans(1 + len(problems), 17, stack, cluster, problems)):
        layout = plan.plan.layout
        if target == "job" and layout.tp > 8:
            continue  # a job that names its supernodes is to keep TP inside one
        if layout.tp < 8 and 8 % layout.tp:
            continue  # a plan may be asked to let TP straddle servers; of a job that does, nobody said so (C141)
        folder = tmp_path / str(number)
        written = export(plan, target, folder)
        job = read_job(folder / written[0].name)
        assert job.devices == layout.devices and not job.unknown
        found = check(job, cluster=cluster, best=False, **given_for(target, plan, folder))
        assert not found.broken
        assert found.priced is not None, found.unpriced
        expected = without_synonyms(plan)
        assert {name: value for name, value in found.priced.layout.model_dump().items() if name in expected} == expected
        if (layout.pp, layout.schedule) == (1, "gpipe"):
            continue  # priced as holding all micro-batches, which nothing runs
        alone = plan.problem.model_copy(update={"devices": layout.devices})
        priced, _ = evaluate(alone, layout, replayed=False)
        assert found.priced.step_time_s == pytest.approx(priced.step_time_s, rel=1e-6)
        assert found.priced.memory.peak_gib == pytest.approx(priced.memory.peak_gib, rel=1e-6)


def test_a_job_says_where_mtp_layers_are_and_what_its_model_is(tmp_path: Path) -> None:
    """MTP layers alone before a bare loss, on one chunk a stage and on two; a model that no catalog has."""
    unknown = load_model("deepseek-v3").model_copy(update={"name": "ours", "vocab_size": 150_000})
    problem = build_problem(unknown, "hgx-h100", 512, 4096, 4096, "megatron-lm")
    for pp, vpp, cuts in ((16, 1, (*range(0, 53, 4), 61, 62, 62)), (8, 2, (*range(0, 53, 4), 61, 62, 62))):
        layout = complete(problem, parse_layout(f"pp={pp},vpp={vpp},ep=8"))
        layout = layout.model_copy(update={"stages": Split(pp, vpp, cuts).stages(61, layout.recompute)})
        assert [chunk.mtp for stage in layout.stages for chunk in stage.chunks if chunk.loss] == [0]
        export(drawn(problem, layout), "job", tmp_path)
        found = check(read_job(tmp_path / "job.yaml"), cluster="hgx-h100", stack="megatron-lm", best=False)
        assert not found.broken
        assert found.priced is not None, found.unpriced
        assert found.priced.layout.stages == layout.stages
        priced, _ = evaluate(problem, layout, replayed=False)
        assert found.priced.step_time_s == pytest.approx(priced.step_time_s, rel=1e-6)


@pytest.mark.parametrize("mtp", ([0, 1], [1, 0, 0], "one"))
def test_mtp_layers_of_a_job_follow_its_decoder_layers(mtp: Any, tmp_path: Path) -> None:
    strategy = {"tensor_parallel": 8, "pipeline_parallel": 3, "layers_per_stage": [20, 20, 21], "mtp_layers_per_stage": mtp}
    (tmp_path / "job.yaml").write_text(json.dumps({"task": {"model": "deepseek-v3", "strategy": strategy}}), encoding="utf-8")
    with pytest.raises(InputError, match="mtp_layers_per_stage"):
        read_job(tmp_path / "job.yaml")


def test_exported_groups_are_right(tmp_path: Path) -> None:
    for number, plan in enumerate(plans(6, 19, "megatron-lm", "hgx-h100", (DENSE, LATENT, MOE))):
        file, *_ = export(plan, "groups", tmp_path / str(number))
        layout = plan.plan.layout
        sizes = {name: getattr(layout, name) for name in ("tp", "cp", "pp", "dp", "ep", "etp")}
        found = read_and_check(file, sizes, layout.devices, None)
        assert found.ok, found
        assert {each.dimension for each in found.dimensions} == {"tp", "cp", "pp", "dp", "ep", "etp", "edp"}


ODD = {
    "megatron-lm": ("llama-3.1-8b", "hgx-h100", 12, 48),
    "megatron-bridge": ("qwen3-30b-a3b", "gb200-nvl72", 72, 288),
    "mindspeed-llm": ("deepseek-v3", "cloudmatrix-384", 384, 768),
    "mindformers": ("qwen3-8b", "cloudmatrix-384", 100, 800),
    "torchtitan": ("qwen3-30b-a3b", "hgx-h100", 36, 72),
    "deepspeed": ("llama-3.1-8b", "hgx-a100", 20, 80),
}
"""Framework → model, cluster, devices and batch, most of which leave the last server part empty."""


@pytest.mark.parametrize("framework", ODD)
def test_a_plan_for_a_framework_can_be_handed_to_it(framework: str, tmp_path: Path) -> None:
    """Whatever the search may choose for a framework, its exporter says; and what is started runs on all the plan's devices."""
    model, cluster, devices, batch = ODD[framework]
    found = make_plan(build_problem(model, cluster, devices, batch, 4096, framework=framework), time_limit_s=60)
    folder = tmp_path / framework
    export(found, framework, folder)
    job = read_job(folder / f"{framework}.sh")
    assert job.devices == found.plan.layout.devices
    checked = check(job, cluster=cluster, best=False, **given_for(framework, found, folder))
    assert not checked.broken and checked.fit is not None and checked.fit.over_gib <= 0


def test_every_target_is_here() -> None:
    assert {*CASES, "groups"} == set(EXPORTERS)
