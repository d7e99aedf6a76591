"""User words become records here; whatever is wrong comes back as one sentence."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paraplan.search_spaces.cluster import ClusterSpec, Figure
from paraplan.search_spaces.documents import MAX_BYTES, field_path, parse_document, read_document, to_record
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.flags import Comparison, parse_clause
from paraplan.search_spaces.inputs import (
    KINDS,
    Kind,
    build_problem,
    catalog_entry,
    catalog_names,
    framework_stack,
    load_accelerator,
    load_cluster,
    load_model,
    load_stack,
    parse_constraint,
    parse_fix,
    parse_forbid,
    parse_inside,
    stands_in,
)
from paraplan.search_spaces.layout import Problem
from paraplan.search_spaces.limits import user_rules
from paraplan.search_spaces.model import Attention, DenseMlp, LayerKind, ModelSpec, MoeMlp
from paraplan.search_spaces.stack import Stack
from pydantic import BaseModel

HARDWARE: tuple[Kind, ...] = ("accelerators", "clusters", "stacks")
NAMED_CLUSTERS = {
    *("hgx-a100", "hgx-h100", "hgx-h800", "hgx-h200", "hgx-b200", "hgx-b300", "gb200-nvl72", "gb300-nvl72"),
    *("atlas-800t-a2", "cloudmatrix-384", "atlas-950-superpod", "atlas-950-superpod-8192", "atlas-960-superpod"),
    *("mi300x", "mi355x", "three-tier-h100"),
}

ATTENTION = Attention(heads=8, kv_heads=8, head_dim=128)
DENSE = ModelSpec(
    name="tiny",
    hidden_size=1024,
    vocab_size=1000,
    max_position_embeddings=4096,
    kinds={"dense": LayerKind(mixer=ATTENTION, mlp=DenseMlp(width=4096))},
    layers=("8*dense",),
)
MOE = DENSE.model_copy(update={"kinds": {"dense": LayerKind(mixer=ATTENTION, mlp=MoeMlp(experts=8, top_k=2, width=512))}})


def problem(**changes: Any) -> Problem:
    return build_problem(**{"model": DENSE, "cluster": "hgx-h100", "devices": 16, "global_batch": 64, "seq_len": 4096} | changes)


def refusal(**changes: Any) -> str:
    with pytest.raises(InputError) as caught:
        problem(**changes)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def figures(record: BaseModel, path: str = "") -> Iterator[tuple[str, Figure]]:
    """Every Figure inside a record, with its path."""
    for name in type(record).model_fields:
        value = getattr(record, name)
        for key, item in (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple) else [("", value)]
        ):
            if isinstance(item, Figure):
                yield f"{path}{name} {key}".strip(), item
            elif isinstance(item, BaseModel):
                yield from figures(item, f"{path}{name} {key} ")


# The catalog


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in HARDWARE for name in catalog_names(kind)])
def test_every_catalog_file_loads_and_says_where_its_figures_come_from(kind: Kind, name: str) -> None:
    record = catalog_entry(kind, name)
    assert record.model_dump()["name"] == name
    found = dict(figures(record))
    assert found
    for path, figure in found.items():
        assert figure.source, path
        assert figure.grade != "given", path
        assert figure.grade != "assumed" or (figure.low is not None and figure.high is not None), path


def test_catalog_has_the_named_clusters() -> None:
    assert set(catalog_names("clusters")) >= NAMED_CLUSTERS


@pytest.mark.parametrize("name", catalog_names("clusters"))
def test_catalog_cluster_is_usable(name: str) -> None:
    cluster = load_cluster(name)
    stack = load_stack(cluster.default_stack)
    assert set(stack.precisions) & set(cluster.accelerator.peak_flops)
    assert {level.efficiency_profile for level in cluster.levels} == {"scale-up", "scale-out"}
    rates = [level.bandwidth_bytes_per_s.value for level in cluster.levels]
    assert rates == sorted(rates, reverse=True)
    latencies = [level.latency_s.value for level in cluster.levels]
    assert latencies == sorted(latencies)
    assert cluster.failures.restart_s is not None and cluster.failures.repair_days is not None and cluster.storage is not None
    known = [cluster.failures.device_per_year, cluster.failures.server_per_year, cluster.failures.supernode_per_year]
    assert any(known)
    published = ("h100" in name and "96gb" not in name) or "a100" in name
    assert {figure.grade for figure in known if figure} == {"measured" if published else "assumed"}


def test_failure_rates_give_back_what_they_were_taken_from() -> None:
    """419 interruptions of 16,384 H100 in 54 days; between 2.34 and 6.50 failures per 1,000 node-days of A100 servers."""
    h100, a100 = load_cluster("hgx-h100").failures.device_per_year, load_cluster("hgx-a100").failures.server_per_year
    assert h100 is not None and h100.value * 16_384 * 54 / 365.25 == pytest.approx(419, rel=0.005)
    assert a100 is not None and a100.low is not None and a100.high is not None
    assert (1000 * a100.low / 365.25, 1000 * a100.high / 365.25) == pytest.approx((2.34, 6.50), rel=0.01)
    assert a100.value / 365.25 * 1000 == pytest.approx((2 * 6.50 + 2.34) / 3, rel=0.01)


def test_totals_that_vendors_print() -> None:
    """The per-device figures add up to what data sheets print for whole systems."""
    cloudmatrix = load_cluster("cloudmatrix-384")
    assert 768 * cloudmatrix.accelerator.peak_flops["fp16"].value == pytest.approx(289e15, rel=0.01)  # arXiv 2506.12708
    assert 768 * cloudmatrix.accelerator.memory_bandwidth_bytes_per_s.value == pytest.approx(1229e12, rel=0.01)
    nvl72 = load_cluster("gb200-nvl72")
    assert 72 * 2 * nvl72.levels[1].bandwidth_bytes_per_s.value == pytest.approx(130e12, rel=0.01)
    superpod = load_cluster("atlas-950-superpod")
    assert 1024 * 2 * superpod.levels[1].bandwidth_bytes_per_s.value == pytest.approx(1.72e15, rel=0.01)
    announced = load_cluster("atlas-950-superpod-8192")
    assert 8192 * announced.accelerator.peak_flops["fp8"].value == pytest.approx(8e18, rel=0.01)
    assert 15488 * load_accelerator("ascend-960").peak_flops["fp4"].value == pytest.approx(60e18, rel=0.05)


def test_usable_memory_of_an_80_gb_card() -> None:
    """Reports of what a framework sees of 80 GB never pass 79.4 GiB."""
    for name in ("a100-80gb-sxm", "h100-80gb-sxm"):
        assert 79.0 < load_accelerator(name).memory_bytes.value / 2**30 < 79.4


def test_an_unknown_name_gets_its_near_matches() -> None:
    with pytest.raises(InputError, match="'hgx-h10' is neither in the catalog nor a file; did you mean 'hgx-h100'"):
        load_cluster("hgx-h10")
    with pytest.raises(InputError, match="'racks' is not one of models, accelerators"):
        catalog_names("racks")  # type: ignore[arg-type]
    assert KINDS == ("models", "accelerators", "clusters", "stacks")


@pytest.mark.parametrize("name", ["", "x" * 5000, "a\0b", "no/such/name"])
def test_a_name_that_can_be_no_file(name: str) -> None:
    with pytest.raises(InputError, match="neither in the catalog nor a file"):
        load_cluster(name)


@pytest.mark.parametrize("name", ["no/such/file.yaml", "file.JSON", "./hgx-h100", "/hgx-h100", "../hgx-h100", "~/hgx-h100"])
def test_what_looks_like_a_path_is_told_to_be_missing(name: str) -> None:
    with pytest.raises(InputError) as raised:
        load_cluster(name)
    assert str(raised.value) == f"cluster: {name}: there is no such file"


def test_a_catalog_entry_is_read_once() -> None:
    load_cluster("gb300-nvl72")
    start = time.perf_counter()
    load_cluster("gb300-nvl72")
    assert time.perf_counter() - start < 0.001


# Files

CLUSTER_FILE = """
name: mine
accelerator: h100-80gb-sxm
levels:
  - {name: server, size: 8, bandwidth_bytes_per_s: 450e9, latency_s: 2e-6, efficiency_profile: scale-up}
  - {name: core, bandwidth_bytes_per_s: 25e9, latency_s: 5e-6, oversubscription: 2}
supernode: server
host_link: {bandwidth_bytes_per_s: 50e9, memory_bandwidth_bytes_per_s: 50e9, memory_bytes_per_device: 250e9}
default_stack: megatron-lm
communicator_bytes: 0.2e9
context_bytes: 0.8e9
"""
ACCELERATOR = "{name: mine, vendor: amd, peak_flops: {bf16: 1e15}, memory_bytes: 100e9, memory_bandwidth_bytes_per_s: 4e12}"


def written(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_user_cluster_names_its_accelerator_or_holds_it(tmp_path: Path) -> None:
    assert load_cluster(written(tmp_path, CLUSTER_FILE)).accelerator == load_accelerator("h100-80gb-sxm")
    inline = CLUSTER_FILE.replace("h100-80gb-sxm", ACCELERATOR)
    assert load_cluster(str(written(tmp_path, inline))).accelerator.memory_bytes.value == 100e9
    written(tmp_path, ACCELERATOR, "chip.yaml")
    beside = CLUSTER_FILE.replace("h100-80gb-sxm", "chip.yaml")
    assert load_cluster(written(tmp_path, beside)).accelerator.name == "mine"


def test_a_model_file_holds_a_modelspec(tmp_path: Path) -> None:
    text = """
name: tiny
hidden_size: 1024
vocab_size: 1000
max_position_embeddings: 4096
kinds: {dense: {mixer: {kind: attention, heads: 8, kv_heads: 8, head_dim: 128}, mlp: {kind: mlp, width: 4096}}}
layers: ["8*dense"]
"""
    assert load_model(written(tmp_path, text)) == DENSE
    with pytest.raises(InputError, match="'no-such-model' is neither in the catalog nor a file"):
        load_model("no-such-model")
    with pytest.raises(InputError, match="head_dim = 0: must be greater than 0"):
        load_model(written(tmp_path, text.replace("head_dim: 128", "head_dim: 0")))


def test_a_record_passes_through() -> None:
    cluster = load_cluster("mi300x")
    assert load_cluster(cluster) is cluster


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("size: 8", "size: 0", "levels[0].size = 0: must be greater than 0"),
        ("size: 8", "sise: 8", "levels[0].sise is not a known key; did you mean 'size'?"),
        ("450e9", "450", "450 GB/s is 450e9"),
        ("450e9", "-1", "must be greater than or equal to 0"),
        ("450e9", ".nan", "levels[0].bandwidth_bytes_per_s = nan is not a finite number"),
        ("supernode: server", "supernode: rack", "supernode 'rack' must name a level with a size: server"),
        ("h100-80gb-sxm", "h100", "accelerator: 'h100' is neither in the catalog nor a file"),
        ("default_stack: megatron-lm\n", "", "default_stack is missing"),
        ("context_bytes: 0.8e9", "frozen_layers: 2", "asks for frozen parameters, which paraplan does not price"),
        ("scale-up", "scale-up, kind: mesh", "must be 'switched', 'full_mesh', 'ring' or 'torus'"),
    ],
)
def test_a_wrong_cluster_file_is_one_sentence(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = written(tmp_path, CLUSTER_FILE.replace(old, new))
    with pytest.raises(InputError) as caught:
        load_cluster(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- 1\n- 2\n", "holds a list of 2 where a mapping"),
        ("just text", "holds 'just text' where a mapping"),
        ("a: [1", "is not valid YAML"),
        ("a: 1\n---\nb: 2\n", "is not valid YAML"),
        ("a: !!python/object/apply:os.system ['true']\n", "has the tag tag:yaml.org,2002:python/object/apply:os.system"),
        ("a: !thing 3\n", "has the tag !thing"),
        (BOMB, "uses the alias \\*a"),
        ("a: 1\na: 2\n", "key 'a' appears twice"),
        ("a: {b: .inf}\n", "a.b = inf is not a finite number"),
        ("1: x\n", "key 1 in the document is not text"),
        ("a: 2026-13-45\n", "holds a value that cannot be read"),
        ("a: " + "[" * 500, "nested too deeply"),
        ("a: " + "[" * 100_000, "nesting depth"),
        ("a: \x07\n", "is not valid YAML"),
    ],
)
def test_what_yaml_may_not_hold(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_document(text, "f.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("{", "is not valid JSON"),
        ('{"a": NaN}', "NaN is not a finite number"),
        ('{"a": 1e999}', "a = inf is not a finite number"),
        ('{"a": 1, "a": 2}', "key 'a' appears twice"),
        ("[1]", "where a mapping"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "cannot be read"),
    ],
)
def test_what_json_may_not_hold(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_document(text, "f.json", as_json=True)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        read_document(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        read_document(tmp_path / "missing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not UTF-8 text"):
        read_document(tmp_path / "binary.yaml")
    with pytest.raises(InputError, match="at most 4,000,000 are read"):
        read_document(written(tmp_path, "a: 1\n" + "#" * MAX_BYTES))


@given(st.text(max_size=200))
def test_any_text_is_a_mapping_or_a_sentence(text: str) -> None:
    try:
        assert isinstance(parse_document(text, "f.yaml"), dict)
    except InputError as error:
        assert str(error).startswith("f.yaml: ") and "\n" not in str(error)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda x: st.lists(x) | st.dictionaries(st.text(max_size=9), x),
    )
)
def test_any_value_in_place_of_a_record_is_a_sentence(data: Any) -> None:
    with pytest.raises(InputError) as caught:
        to_record(ClusterSpec, data, "f.yaml")
    assert str(caught.value).startswith("f.yaml: ") and "pydantic" not in str(caught.value)


def test_field_path() -> None:
    assert field_path(("levels", 0, "latency_s", "value")) == "levels[0].latency_s.value"


# Flags


def test_fix_brings_values_to_their_normal_form() -> None:
    assert parse_fix("tp=8,pp=16") == {"tp": ("8",), "pp": ("16",)}
    assert parse_fix("tp = 4|08, recompute=selective") == {"tp": ("4", "8"), "recompute": ("selective:core_attn",)}
    assert parse_fix({"micro-batch": 1, "tp": [4, 8], "sequence_parallel": True}) == {
        "micro_batch": ("1",),
        "tp": ("4", "8"),
        "sequence_parallel": ("true",),
    }
    assert parse_fix("mb=2,sp=on,pp_schedule=1f1b") == {
        "micro_batch": ("2",),
        "sequence_parallel": ("true",),
        "schedule": ("1f1b",),
    }
    assert parse_fix("") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp", "is not COLUMN=VALUE"),
        ("tp=", "tp has no value"),
        ("tp=0", "tp = '0' must be a whole number of at least 1"),
        ("tp=-1", "must be a whole number"),
        ("tp=1.5", "must be a whole number"),
        ("tp=" + "9" * 5000, "must be a whole number"),
        ("tp=²", "must be a whole number"),
        ("tpp=8", "'tpp' is not a column; did you mean 'tp'"),
        ("mbs=1", "did you mean 'micro_batch'"),
        ("tensor-model-parallel-size=8", "did you mean 'tp'"),
        ("--pipeline_parallel_degree=8", "did you mean 'pp'"),
        ("expert_tensor_parallel_size=2", "did you mean 'etp'"),
        ("dp_size=2", "did you mean 'dp'"),
        ("num_layers_per_virtual_pipeline_stage=2", "did you mean 'vpp'"),
        ("zero_stage=1", "did you mean 'optimizer_sharding'"),
        ("gbs=8", "it is given with --global-batch"),
        ("tp=8,,pp=2", "item 2 of 'tp=8,,pp=2' is empty"),
        ("tp=8,", "item 2 of 'tp=8,' is empty"),
        ("tp=8,tp=4", "write tp=8\\|4"),
        ("sp=on|off", "sequence_parallel takes one value; without any it is on wherever"),
        ("recompute=some", "recompute 'some' is not none, full"),
        ("schedule=2f2b", "schedule = '2f2b' must be one of gpipe"),
        ("optimizer_sharding=hsdp", "is not none, zero1"),
        ("offload=optimizer:3", "with F from 0 to 1"),
        ("lora_rank=8", "LoRA and other adapters, which paraplan does not price"),
        ("sample_packing=true", "packed sequences"),
        ("freeze_embedding=true", "frozen parameters"),
    ],
)
def test_fix_refuses_in_words(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_fix(text)


def test_forbid_and_constraint_are_each_others_opposite() -> None:
    assert parse_forbid("pp > 16, tp*cp≥64") == ("pp>16", "tp*cp>=64")
    assert parse_constraint("tp*cp <= 64") == ("tp*cp>64",)
    assert parse_forbid(["recompute=full"]) == ("recompute==full",)
    assert parse_constraint("dp == 4*ep") == ("dp!=4*ep",)
    assert parse_forbid("pp>8 and (vpp>1 or recompute==full)") == ("pp>8 and (vpp>1 or recompute==full)",)
    assert parse_constraint("pp == 8 or vpp == 1") == ("pp!=8 and vpp!=1",)
    assert parse_constraint("not (pp>8 and vpp>1)") == ("pp>8 and vpp>1",)
    assert parse_constraint("pp>8 or vpp>2 and tp>1") == ("pp<=8 and (vpp<=2 or tp<=1)",)


@pytest.mark.parametrize(
    "text",
    [
        "pp",
        "pp>",
        ">16",
        "pp>>16",
        "pq>1",
        "pp>x y",
        "pp>1e3",
        "recompute>full",
        "pp>-1",
        "import os>1",
        "(pp>1",
        "pp>1)",
        "pp>1 and",
        "or pp>1",
        "not",
        "pp>1 tp>2",
        "(pp>1)(tp>2)",
        "()",
    ],
)
def test_what_is_no_comparison(text: str) -> None:
    with pytest.raises(InputError, match="forbid"):
        parse_forbid(text)


@given(
    left=st.lists(st.sampled_from(["tp", "pp", "dp"]) | st.integers(0, 999), min_size=1, max_size=3),
    op=st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
    right=st.integers(0, 10**6),
)
def test_a_comparison_reads_back_and_negates_twice_to_itself(left: list[str | int], op: str, right: int) -> None:
    comparison = Comparison(tuple(left), op, (right,))
    assert parse_clause(str(comparison)) == comparison
    assert comparison.negated.negated == comparison


def test_inside() -> None:
    assert parse_inside("supernode:tp,sp,ep") == {"supernode": ("tp", "ep")}  # SP runs over the TP group
    assert parse_inside(["server:tp", "supernode:ep"]) == {"server": ("tp",), "supernode": ("ep",)}
    assert parse_inside({"supernode": ("cp",)}) == {"supernode": ("cp",)}
    for text in ("supernode", "supernode:", ":tp", "supernode:xp"):
        with pytest.raises(InputError, match="inside"):
            parse_inside(text)


# Problems


def test_a_problem_says_what_it_assumed() -> None:
    words = "; ".join(problem(model=MOE, seq_len=8192, cluster="atlas-960-superpod").assumptions)
    for part in (
        "stack mindspeed-llm (mindspeed-llm core_v0.12.1), the default of atlas-960-superpod",
        "etp = 1",
        "sequence parallelism is on wherever tp > 1 and tp·cp divides the sequence",
        "seq_len 8192 is beyond the 4096 positions of tiny",
        "atlas-960-superpod is announced hardware",
        "ascend-960 peak_flops.bf16 = 1 PFLOP/s (0.9 to 1.06): half of the announced FP8 rate",
        "all parameters trained",
    ):
        assert part in words


def test_what_the_user_says_is_not_called_an_assumption() -> None:
    given = problem(model=MOE, stack="torchtitan", fix="etp=2,sequence_parallel=true,offload=none")
    words = "; ".join(given.assumptions)
    assert given.workload.fix["etp"] == ("2",)
    for part in ("default of", "etp = 1", "wherever tp > 1", "host_link"):
        assert part not in words


def test_etp_is_one_for_experts_only() -> None:
    assert problem(model=MOE).workload.fix == {"etp": ("1",)}
    assert problem().workload.fix == {}


def test_inside_uses_the_clusters_own_level_names() -> None:
    assert problem(inside="supernode:tp,ep").workload.inside == {"server": ("tp", "ep")}
    assert problem(cluster="gb200-nvl72", inside="supernode:ep;server:tp").workload.inside == {
        "supernode": ("ep",),
        "server": ("tp",),
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": 0}, "devices = 0: must be a whole number of at least 1"),
        ({"devices": 1.5}, "devices = 1.5"),
        ({"cluster": "atlas-950-superpod-8192", "devices": 600_000}, "has at most 524288"),
        ({"global_batch": 0}, "global_batch = 0: must be greater than 0"),
        ({"seq_len": -4096}, "seq_len = -4096: must be greater than 0"),
        ({"precision": "int8"}, "precision = 'int8': must be 'bf16', 'fp16', 'fp8' or 'fp4'"),
        ({"precision": "fp8", "cluster": "hgx-a100"}, "a100-80gb-sxm has bf16, fp16"),
        ({"precision": "fp4", "cluster": "hgx-b200", "stack": "torchtitan"}, "stack torchtitan has bf16, fp8"),
        ({"inside": "pod:tp"}, "'pod' is not a level of hgx-h100: server, scale-out or supernode"),
        ({"memory_margin": 1.0}, "memory_margin = 1 must be at least 0 and less than 1"),
        ({"expert_imbalance": float("inf")}, "must be less than or equal to 1000"),
        ({"expert_imbalance": 0.5}, "must be greater than or equal to 1"),
        ({"stack": "torchtitan", "framework": "deepspeed"}, "give one of the two"),
        ({"framework": "megatron"}, "did you mean 'megatron-lm'"),
        ({"framework_version": "0.12"}, "needs a framework"),
        ({"framework": "megatron-lm", "framework_version": "0.3"}, "there is 0.1, 0.12, 0.16"),
    ],
)
def test_a_problem_refuses_in_one_sentence(changes: dict[str, Any], words: str) -> None:
    assert words in refusal(**changes)


def test_a_framework_and_version_choose_the_stack() -> None:
    assert framework_stack("megatron-lm").name == "megatron-lm"
    assert framework_stack("megatron-lm", "0.12.1").name == "megatron-lm-0.12"
    assert framework_stack("torchtitan", "0.3").name == "torchtitan"  # of several that run 0.3, the one that is named for it
    assert problem(framework="mindspeed-llm", framework_version="0.12").stack.name == "mindspeed-llm"
    newest = framework_stack("torchtitan", "main")
    assert (newest.name, newest.version) == ("torchtitan", "main")


@pytest.mark.parametrize(
    ("framework", "version", "name", "told"),
    [
        ("megatron-lm", "v0.16.1", "megatron-lm", ""),
        ("megatron-lm", "0.16rc1", "megatron-lm", ""),
        ("megatron-lm", "core_r0.14.0", "megatron-lm-0.12", "priced as the catalog's stack of 0.12"),
        ("megatron-lm", "0.19.2", "megatron-lm", "priced as the catalog's stack of 0.16"),
        ("megatron-bridge", "v0.4.2", "megatron-bridge", "priced as the catalog's stack of 2026-08"),
        ("megatron-bridge", "25.04", "nemo-25", ""),
        ("mindspeed-llm", "26.0", "mindspeed-llm", "priced as the catalog's stack of core_v0.12.1"),
        ("mindformers", "r2.1.0", "mindformers", ""),
        ("deepspeed", "0.19.8", "deepspeed", ""),
    ],
)
def test_a_release_is_priced_as_the_stack_before_it(framework: str, version: str, name: str, told: str) -> None:
    """However a release is written, the rules and options are its own, and it is told whose figures price it."""
    stack = problem(framework=framework, framework_version=version).stack
    assert stack.name == name
    assert told in " ".join(problem(framework=framework, framework_version=version).assumptions)
    assert stack.version == version if told else not stands_in(stack, version)


def test_records_and_names_give_the_same_problem() -> None:
    stack: Stack = load_stack("megatron-lm")
    by_name = problem(stack="megatron-lm")
    assert problem(stack=stack, cluster=load_cluster("hgx-h100")) == by_name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp**2 < 4", "there is \\* between factors"),
        ("tp / 2 < 4", "there is \\* between factors"),
        ("tp % 2 == 0", "<, <=, >, >=, == and != between products"),
        ("tp*recompute == 4", "recompute .* is text"),
        ("4 == schedule", "schedule .* is text"),
        ("tp < = 4", "is not a comparison"),
        ("width > 4", "not a column.*recompute.*rank_order"),
        ("99999999999 > tp", "too large a number; at most 9 digits"),
    ],
)
def test_what_rules_are_not_made_of_is_told_with_what_they_are(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_constraint(text)


def test_a_chain_compares_its_neighbours() -> None:
    assert parse_constraint("2 <= tp < 8 or not 1 < pp <= 4 <= vpp") == parse_constraint(
        "(2 <= tp and tp < 8) or not (1 < pp and pp <= 4 and 4 <= vpp)"
    )


@pytest.mark.parametrize("text", ["tp=2|3|", "tp=|2", "tp=2||3"])
def test_an_alternative_left_empty_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="nothing on one side of"):
        parse_fix(text)


def test_products_are_exact_or_refused() -> None:
    """64 factors of 8 are 2^192, which 64 bits hold as 0; four grids' worth of columns are far from any limit."""
    huge = build_problem("llama-3.1-8b", "hgx-h100", 8, 32, 4096, constraint="*".join(["tp"] * 64) + " >= 2")
    with pytest.raises(InputError, match=r"may exceed 2\^50"):
        list(user_rules(huge))
    with pytest.raises(InputError, match=r"may exceed 2\^50"):
        list(user_rules(build_problem("llama-3.1-8b", "hgx-h100", 8, 32, 4096, forbid="999999999*999999999 > tp or pp > 2")))
    wide = build_problem("llama-3.1-8b", "hgx-h100", 16384, 16384, 4096, constraint="tp*cp*pp*dp*micro_batch <= 16384*16384")
    assert any(rule.scope == "user" for rule in user_rules(wide))


def test_what_no_framework_is_told_is_refused_beside_a_named_one() -> None:
    asked = ("llama-3.1-8b", "hgx-h100", 16, 64, 4096)
    with pytest.raises(InputError, match="offload-to = peers: megatron-lm has no option for it"):
        build_problem(*asked, framework="megatron-lm", offload_to="peers")
    assert build_problem(*asked, "megatron-lm", offload_to="peers").workload.offload_to == "peers"
