"""Every row of a table of runs is priced or told why not: hand-written ones of an unknown family, junk, and damaged files."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest
from paraplan.cost_models.run_clusters import device_words
from paraplan.cost_models.run_files import COLUMNS, NEEDED, columns_of, read_runs
from paraplan.cost_models.run_layouts import job_of
from paraplan.cost_models.run_models import ALIASES, CATALOG_NAMES, model_of, plain, unread
from paraplan.cost_models.run_statistics import ended
from paraplan.cost_models.runs import Run, Unpriceable, meaning
from paraplan.cost_models.validation import Outcome, Validation, validate
from paraplan.optimizer.cli import main
from paraplan.search_spaces.inputs import catalog_names, load_stack
from paraplan.search_spaces.model import Attention

MEASURED = Path(__file__).parents[1] / "measured"
UNKNOWN = MEASURED / "unknown_family" / "runs.csv"
WHOLE = Path(__file__).parents[3] / "shared" / "measured" / "runs.csv"
Row = dict[str, Any]
FUSED_TP = load_stack("mindspeed-llm").fused_tp
BASE = {
    "id": "base",
    "family": "newlab",
    "model": "llama-3.1-8b",
    "accelerator": "H100",
    "num_accelerators": "16",
    "precision": "bf16",
    "seq_len": "8192",
    "micro_batch": "1",
    "global_batch": "128",
    "tp": "2",
    "pp": "1",
    "software": "Megatron-Core v0.13",
    "measured_step_time_s": "6.1",
    "status": "ok",
}


def run(**cells: str) -> Run:
    return Run({**BASE, **cells}, BASE["id"])


def table(path: Path, rows: list[dict[str, str]]) -> Path:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def told(path: Path) -> list[Row]:
    rows: list[Row] = json.loads(validate(path).to_json())["rows"]
    return rows


# --- rows of an unknown family, each with what should become of it --------------------------------------------------------------


@pytest.fixture(scope="module")
def unknown() -> Validation:
    return validate(UNKNOWN)


@pytest.fixture(scope="module")
def rows(unknown: Validation) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for row in json.loads(unknown.to_json())["rows"]:
        found.setdefault(row["id"], row)
    return found


@pytest.mark.parametrize(
    ("name", "stack", "note"),
    [
        ("alias", "megatron-lm", "model: meta-llama/Llama-3.1-8B-Instruct is taken to be llama-3.1-8b"),
        ("nearest-stack", "torchtitan", "stack torchtitan assumed, the nearest that is known: torchtune 0.5"),
        ("default-stack", "megatron-lm", "stack megatron-lm assumed, the default of hgx-h100: HomeBrew 1.0"),
        ("own-shape", "megatron-lm", "model: its shape is that of the row's own columns"),
        ("milliseconds", "megatron-lm", "very slow for one step: 9100 s is an MFU of 0.00037"),
        ("row 13", "megatron-lm", "no id: named after its line"),
        ("row 13", "megatron-lm", "measured_peak_mem_gib is not above 0: not used"),
        ("dp-without-ep", "megatron-lm", "dp is taken to leave ep out: with it the grid is the devices"),
    ],
)
def test_what_was_assumed_of_a_row_stands_beside_it(rows: dict[str, Row], name: str, stack: str, note: str) -> None:
    row = rows[name]
    assert (row["stack"], row["accelerator"], row["counted"], row["why_not_counted"]) == (stack, "h100-80gb-sxm", True, None)
    assert note in row["notes"]
    assert row["interval"][0] < row["predicted_step_time_s"] < row["interval"][1]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no-shape", "unknown model shape: newlab-90b"),
        ("no-accelerator", "accelerator not in the catalog: abacus-9000"),
        ("grid", "dp inconsistent: tp·cp·pp·dp is not the number of devices"),
    ],
)
def test_a_row_that_cannot_be_priced_names_what_is_missing(rows: dict[str, Row], name: str, reason: str) -> None:
    row = rows[name]
    assert (row["skipped"], row["why_not_counted"], row["counted"]) == (reason, reason, False)
    assert row["predicted_step_time_s"] is row["stack"] is row["interval"] is None


def test_an_mfu_alone_is_a_step_time_of_model_flops_with_attention_halved(rows: dict[str, Row]) -> None:
    """41.5 % of 989.4 TFLOP/s; 6 FLOPs per weight but the embedding's, and 6·L·h·s for attention."""
    per_token = 6 * (8.030e9 - 128256 * 4096) + 6 * 32 * 4096 * 8192
    row = rows["mfu-only"]
    assert row["measured_step_time_s"] == pytest.approx(128 * 8192 * per_token / (16 * 0.415 * 989.4e12), rel=0.01)
    assert "measured_mfu is read as a percentage: 41.5" in row["notes"]
    assert "step time from TFLOP/s or MFU: model FLOPs without recompute, causal attention halved, assumed" in row["notes"]


def test_memory_alone_is_priced(rows: dict[str, Row]) -> None:
    """8 G parameters with 18 bytes each do not fit on one device of 80 GB; a peak without a time is compared."""
    oom, peak = rows["oom-only"], rows["peak-only"]
    assert (oom["status"], oom["predicted_oom"], oom["counted"], oom["measured_step_time_s"]) == ("oom", True, True, None)
    assert (peak["status"], peak["measured_peak_gib"], peak["counted"]) == ("ok", 40.5, True)
    assert peak["predicted_peak_gib"] == pytest.approx(40.5, rel=0.4)


def test_a_speed_above_the_peak_and_a_repeated_row_are_shown_but_not_counted(unknown: Validation) -> None:
    assert unknown.excluded("newlab") == {"beyond-peak": 1, "repeated": 1}
    last = next(o for o in reversed(unknown.outcomes) if o.run.id == "alias")
    assert last.notes[0] == "id is given to more than one row"
    assert (last.why_not_counted or "").startswith("repeated: ")
    rows = {c.split: c.statistics.time.rows for c in unknown.cells if c.slice == "counted" and c.statistics.time}
    assert rows == {"fit": 1, "test": 7}


def test_what_is_not_believed_is_not_fitted(tmp_path: Path) -> None:
    from paraplan.cost_models.calibration import calibrate

    odd = [
        {"id": "fast", "measured_step_time_s": "0.0061"},
        {"id": "other recipe", "notes": "recipe x at tag v1 does not match row (mbs:recipe=4)"},
        {"id": "offload", "notes": "with optimizer state offloading"},
        {"id": "lost", "model": "nobody-7b"},
    ]
    given = [{**BASE, "split": "fit", "notes": "", **cells} for cells in ({}, *odd)]
    found = calibrate(table(tmp_path / "runs.csv", given))
    assert [each.rows for each in found] == [1]
    assert [reason.partition(":")[0] for reason in found.unused] == [
        *("beyond-peak", "recipe-mismatch", "offload-untold", "unknown model shape")
    ]


def test_the_terminal_says_what_became_of_the_rows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["validate", str(UNKNOWN)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("15 rows: 12 priced, 10 of them counted; 3 not priced\n")
    skipped = next(o for o in validate(UNKNOWN).outcomes if o.skipped)
    assert skipped.run.id in printed.partition("Not priced")[2].partition("Priced but not counted")[0]
    for words in ("Running out of memory, all rows that say", "Assumed or odd", "alarms: share of those that ran"):
        assert words in printed
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= 80


# --- words ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        ("NVIDIA H100 80GB HBM3", "hgx-h100"),
        ("H100 SXM5", "hgx-h100"),
        ("A100-SXM4-80GB", "hgx-a100"),
        ("A100-SXM4-40GB", "hgx-a100-40gb"),
        ("NVIDIA GB200 NVL72", "gb200-nvl72"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Huawei Ascend 910B3", "atlas-800t-a2"),
        ("910C", "cloudmatrix-384"),
        ("H20", "hgx-h20"),
        ("A800-SXM4-80GB", "hgx-a800"),
        ("Atlas 900 A2 PoDc", "atlas-800t-a2"),
        ("Ascend-910_93", "cloudmatrix-384"),
    ],
)
def test_accelerators_are_known_by_their_vendors_words(text: str, cluster: str) -> None:
    assert meaning("accelerator", device_words(text)).split()[0] == cluster


@pytest.mark.parametrize("text", ["A100 PCIe 80GB", "H100 NVL", "H20-3e 141GB", "RTX 4090", "Gaudi 2"])
def test_other_accelerators_are_not_taken_for_known_ones(text: str) -> None:
    with pytest.raises(Unpriceable):
        meaning("accelerator", device_words(text))


@pytest.mark.parametrize(
    ("software", "sharding", "accelerator", "stack"),
    [
        ("GPT-NeoX 2.0", "zero1", "A100", "megatron-deepspeed"),
        ("LitGPT", "", "H100", "torchtitan"),
        ("FlagScale", "", "H100", "megatron-lm"),
        ("HF Transformers + Accelerate", "zero3", "A100", "deepspeed"),
        ("Colossal-AI", "zero2", "H100", "deepspeed"),
        ("Colossal-AI", "zero1", "H100", "megatron-lm"),
        ("PyTorch FSDP", "zero3", "H100", "torchtitan"),
        ("mystery", "zero3", "H100", "torchtitan"),
        ("mystery", "SHARD_GRAD_OP", "H100", "torchtitan"),
        ("", "zero3", "H100", "megatron-lm"),
        ("mystery", "", "Ascend 910B", "mindspeed-llm"),
        ("Overlapper", "", "H100", "megatron-lm"),
    ],
)
def test_software_that_is_not_known_falls_to_the_nearest_stack(software: str, sharding: str, accelerator: str, stack: str) -> None:
    job = job_of(run(software=software, optimizer_sharding=sharding, accelerator=accelerator), {})
    assert job.problem.stack.name == stack
    assert job.notes[0].startswith(f"stack {stack} assumed")


@pytest.mark.parametrize(
    ("software", "notes", "eager"),
    [
        ("Hugging Face transformers, FSDP", "", True),
        ("PyTorch FSDP", "", True),
        ("PyTorch FSDP", "torch.compile", False),
        ("PyTorch FSDP", "not compiled", True),
        ("torchtitan 0.3", "", False),
        ("torchtitan 0.3", "torch.compile=false", True),
    ],
)
def test_pytorch_runs_modules_as_they_are_unless_told_otherwise(software: str, notes: str, eager: bool) -> None:
    job = job_of(run(software=software, optimizer_sharding="zero3", accelerator="H100", notes=notes), {})
    assert ("activation" in job.problem.stack.eager_kernels) == eager


@pytest.mark.parametrize("software", ["NeMo 25.04 container", "Megatron-LM", "Megatron-Bridge v0.3", "Primus Megatron"])
def test_megatron_with_sharded_parameters_is_its_own_fsdp(software: str) -> None:
    job = job_of(run(software=software, optimizer_sharding="zero3", accelerator="H100"), {})
    assert job.problem.stack.name == "megatron-fsdp"


def test_known_software_is_not_called_assumed() -> None:
    for software in ("Megatron-LM", "NeMo 25.02", "torchtitan", "DeepSpeed 0.16", "MindSpeed-LLM"):
        assert job_of(run(software=software), {}).notes == ()


def test_frameworks_keep_their_ways_in_other_families() -> None:
    nanotron = job_of(run(software="nanotron v0.5", pp="4", tp="1"), {})
    assert nanotron.memory == "allocated first"
    assert len({stage.chunks[0].layers[1] - stage.chunks[0].layers[0] for stage in nanotron.layout.stages}) > 1


@pytest.mark.parametrize(
    ("release", "model", "tp_hidden", "eager", "attention"),
    [
        ("9ff89b87 (2024-03-17)", "llama-3.1-8b", 0.0, ("activation", "rotary"), "flash"),
        ("9ff89b87 (2024-03-17)", "bloom-7b", 0.0, ("activation", "rotary"), "unfused"),
        ("2f32c76b (2024-04-09)", "bloom-7b", 0.0, ("activation", "rotary"), "flash"),
        ("b2915bd2 (2024-04-26)", "llama-3.1-8b", FUSED_TP, (), "flash"),
        ("b2915bd2 (2024-04-26)", "mixtral-8x7b", FUSED_TP / 2, (), "flash"),
        ("v1.0.0 (2024-12)", "llama-3.1-8b", FUSED_TP, (), "flash"),
        ("v2.0.0 (2025-03)", "llama-3.1-8b", 0.0, (), "flash"),
    ],
)
def test_modellink_runs_the_kernels_of_its_releases_scripts(
    release: str, model: str, tp_hidden: float, eager: tuple[str, ...], attention: str
) -> None:
    shapes = {"bloom-7b": {"num_layers": 2, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 250880}}
    stack = job_of(run(software=f"MindSpeed-LLM/ModelLink {release}", model=model, ep="1"), shapes).problem.stack
    assert stack.name == "mindspeed-llm"
    assert (stack.overlap.tp, stack.eager_kernels, stack.attention_kernel) == (tp_hidden, eager, attention)


@pytest.mark.parametrize(
    ("words", "attention"),
    [
        *(
            (f"with {name}", "flash")
            for name in ("FlashAttention", "flash-attn", "flash_attn 2.5.8", "Flash Attention 3", "FA2", "FA-3")
        ),
        *((f"{no} FlashAttention-2", "unfused") for no in ("no", "w/o", "without", "not using", "disabled", "non-")),
        *((f"use_flash_attn={no}", "unfused") for no in ("False", "false", "0", "off")),
        *((f"FlashAttention {no}", "unfused") for no in ("disabled", "off", "not used", "(disabled)", "turned off", "unavailable")),
        ("FA2 off", "unfused"),
        *((f"{kind} attention", "unfused") for kind in ("unfused", "eager", "naive", "math")),
        ("--attention-backend unfused", "unfused"),
        ("use_flash_attn=1", "flash"),
        ("Flash-attached storage", ""),
        ("ALFA2", ""),
        ("", ""),
    ],
)
def test_flash_attention_is_read_as_people_put_it(words: str, attention: str) -> None:
    for built_with, its_own in (("Megatron-LM", "flash"), ("Megatron-LM 2021", "unfused")):
        stack = job_of(run(software=f"{built_with}, {words}"), {}).problem.stack
        assert stack.attention_kernel == (attention or its_own)


@pytest.mark.parametrize(
    ("software", "stack", "counted"),
    [
        ("Megatron-Core r0.8.0", "megatron-lm-0.12", "whole"),
        ("Megatron-LM core_r0.8", "megatron-lm-0.12", "whole"),
        ("Megatron-LM v0.10", "megatron-lm-0.12", "whole"),
        ("mcore 0.11", "megatron-lm-0.12", "whole"),
        ("Megatron-LM core_r0.12", "megatron-lm-0.12", "~halved"),
        ("Megatron-Core 0.14", "megatron-lm", "~halved"),
    ],
)
def test_releases_of_megatron_core_are_read_as_people_put_them(software: str, stack: str, counted: str) -> None:
    """Its FLOPs count attention whole before core_r0.12."""
    assert job_of(run(software=software), {}).problem.stack.name == stack
    assert meaning("flops", f"own | {software}") == counted


@pytest.mark.parametrize(
    ("text", "status"),
    [("", "ok"), ("OK", "ok"), ("CUDA out of memory", "oom"), ("OOM", "oom"), ("crashed", "fail"), ("room", "fail")],
)
def test_how_a_run_ended(text: str, status: str) -> None:
    assert run(status=text).status == status


def test_a_row_that_measured_nothing_and_says_nothing_is_not_counted(tmp_path: Path) -> None:
    (row,) = told(table(tmp_path / "runs.csv", [{**BASE, "measured_step_time_s": "", "status": ""}]))
    assert (row["status"], row["counted"], row["why_not_counted"]) == ("unknown", False, "nothing to compare with: status unknown")


# --- models ---------------------------------------------------------------------------------------------------------------------


def test_aliases_lead_to_the_catalog() -> None:
    assert {*ALIASES.values(), *CATALOG_NAMES.values()} <= set(catalog_names("models"))
    assert all(plain(name) == name for name in ALIASES)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Llama-3-70B", "llama-3.1-70b"),
        ("meta-llama/Meta-Llama-3.1-405B", "llama-3.1-405b"),
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"),
        ("Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("Qwen3_235B_A22B", "qwen3-235b-a22b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
    ],
)
def test_models_are_found_under_other_names(name: str, model: str) -> None:
    assert model_of(run(model=name), {}, 4096)[0].name == model


def test_mistral_7b_looks_back_on_4096_tokens() -> None:
    shape = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 14336}
    shapes = dict.fromkeys(("mistral-7b", "llama2-7b"), shape)
    mixers = [model_of(run(model=name), shapes, 32768)[0].kinds["dense"].mixer for name in shapes]
    assert [mixer.window for mixer in mixers if isinstance(mixer, Attention)] == [4096, None]


@pytest.mark.parametrize("name", ["llama-3.1-9b", "qwen3", "b", "-", "deepseek"])
def test_a_name_that_is_merely_alike_is_not_taken(name: str) -> None:
    with pytest.raises(Unpriceable, match=f"unknown model shape: {name}"):
        model_of(run(model=name), {}, 4096)


@pytest.mark.parametrize("shape", [[], 3, {"num_layers": 10**12, "hidden_size": 64}, {"mla": [1]}, {"num_layers": float("nan")}])
def test_a_shape_that_is_none_costs_its_rows_alone(shape: object, tmp_path: Path) -> None:
    (tmp_path / "models.json").write_text(json.dumps({"odd": shape}), encoding="utf-8")
    first, second = told(table(tmp_path / "runs.csv", [{**BASE, "model": "odd"}, {**BASE, "id": "b"}]))
    assert "odd" in first["skipped"] and second["counted"]


# --- measured figures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "note"),
    [
        ({"measured_tokens_per_s_per_device": "5000"}, "step time and tokens/s disagree"),
        ({"measured_peak_mem_gib": "70000"}, "measured_peak_mem_gib is more than the device has"),
        ({"measured_tokens_per_s_per_device": "1e-300"}, "measured_tokens_per_s_per_device is beyond anything measured: not used"),
        ({"measured_mfu": "high"}, "measured_mfu is not a number: not used"),
        ({"measured_step_time_s": "six", "measured_tokens_per_s_per_device": "10700"}, "measured_step_time_s is not a number"),
        (
            {"measured_step_time_s": "", "measured_mfu": "0.4", "flops_convention": "hardware; no attention term"},
            "no step time from",
        ),
    ],
)
def test_a_figure_that_is_odd_or_unusable_is_told(cells: dict[str, str], note: str, tmp_path: Path) -> None:
    (row,) = told(table(tmp_path / "runs.csv", [{**BASE, **cells}]))
    assert row["counted"] and [said for said in row["notes"] if said.startswith(note)]


def test_nan_is_a_blank_in_columns_of_words_and_of_numbers(tmp_path: Path) -> None:
    blank = ("sp", "cp", "cp_type", "vpp", "pp_schedule", "ep", "dp", "optimizer_sharding", "recompute", "offload", "domain_size")
    rows = [{**BASE, **dict.fromkeys(blank, word)} for word in ("", "NaN")]
    left, right = (told(table(tmp_path / f"{place}.csv", [row])) for place, row in enumerate(rows))
    assert left == right and left[0]["counted"]


@pytest.mark.parametrize(("text", "value"), [("12,345.5", 12345.5), ("~5.2", 5.2), ("45.2 %", 45.2), ("1,2", None), ("5 s", None)])
def test_numbers_may_be_decorated(text: str, value: float | None) -> None:
    if value is not None:
        assert run(measured_mfu=text).number("measured_mfu") == value
        return
    with pytest.raises(Unpriceable, match="measured_mfu is not a number"):
        run(measured_mfu=text).number("measured_mfu")


def test_false_alarms_are_counted_where_every_run_ran() -> None:
    outcomes = [
        Outcome(run(), predicted_oom=guess, memory_verdict="oom" if guess else "fits") for guess in (True, False, False, False)
    ]
    found = ended(outcomes)
    assert (found.rows, found.oom, found.predicted) == (4, 0, 1)
    assert (found.precision, found.recall, found.false_alarms, found.sure_accuracy) == (0.0, None, 0.25, 0.75)
    assert ended([]).precision is None


# --- files ----------------------------------------------------------------------------------------------------------------------

HEADER = ",".join(("id", *NEEDED, "precision", "notes"))
GOOD = ",llama-3.1-8b,H100,16,8192,128,1,2,1,bf16,"


@pytest.mark.parametrize(
    ("line", "defect", "note"),
    [
        (f"a{GOOD}x,9,9", "more cells than the header", ""),
        ("a,llama-3.1-8b,H100", "", "fewer cells than the header"),
        (f"a{GOOD}x,,", "", ""),
        (f"a{GOOD}\udcff", "", "not UTF-8 text"),
        (f"a{GOOD}{'x' * 140_000}", "not a row of CSV", ""),
        ('a,"' + "\n" * 60 + f'"{GOOD[1:]}', "row of more than 50 lines", ""),
        (f"{GOOD}x", "", "no id"),
    ],
)
def test_a_damaged_row_leaves_the_others_alone(line: str, defect: str, note: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_bytes(f"{HEADER}\nfirst{GOOD}\n{line}\n\nlast{GOOD}\n".encode("utf-8", "surrogateescape"))
    found = read_runs(path)
    assert [found[0].id, found[2].id, len(found)] == ["first", "last", 3]
    assert found[1].defect.startswith(defect) and bool(found[1].defect) == bool(defect)
    assert note in "".join(found[1].notes) and bool(found[1].notes) == bool(note)
    json.dumps(found[1].cells, ensure_ascii=False).encode()


def test_junk_in_any_field_is_a_reason_or_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Published rows with one to three fields mutated: none aborts the others, and every one is accounted for."""
    if not WHOLE.is_file():
        pytest.skip("the measured runs are not here")
    with WHOLE.open(encoding="utf-8", newline="") as file:
        published = list(csv.DictReader(file))
    rng = random.Random(20)
    mutated = [dict(row) for row in rng.sample(published, 75)]
    for row in mutated:
        for column in rng.choices(list(row), k=rng.randint(1, 3)):
            row[column] = rng.choice((*JUNK, rng.choice(published)[column]))
    path = table(tmp_path / "runs.csv", mutated)
    (tmp_path / "models.json").write_bytes((WHOLE.parent / "models.json").read_bytes())
    assert main(["validate", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["rows"]
    assert len(found) == len(mutated)
    for row, given in zip(found, mutated, strict=True):
        assert row["id"] == given["id"].strip() or (not given["id"].strip() and row["id"].startswith("row "))
        assert row["counted"] == (row["why_not_counted"] is None)
        if row["skipped"] is None:
            assert 0 < row["predicted_step_time_s"] < 1e9 and row["predicted_peak_gib"] > 0 and row["stack"]
        else:
            assert row["predicted_step_time_s"] is None and row["predicted_oom"] is None and not row["counted"]
    assert sum(row["skipped"] is None for row in found) > len(found) / 4


JUNK = (
    *(
        "",
        " ",
        "junk",
        "[/b]",
        "名前🚀",
        "1e308",
        "-1",
        "0",
        "nan",
        "inf",
        "9" * 400,
        "999999999",
        "3.7",
        "NA",
        "-",
        "1,024",
        "\x00",
    ),
    *(
        "E(t*9999)*9999|L",
        "full:block:999999",
        "full[3, 3]",
        "optimizer:0.3",
        "hsdp:7",
        "H20",
        "GB300",
        "oom",
        "fit",
        "2",
        "64",
        "a" * 5000,
    ),
)


def test_framework_stands_for_software_and_other_columns_are_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = {name: value for name, value in BASE.items() if name != "software"}
    given = [{**cells, "id": name, "framework": "NeMo 25.02", "recompte": "full", "colour": "red"} for name in ("a", "b")]
    path = table(tmp_path / "runs.csv", given)
    (outcome, _) = validate(path).outcomes
    assert outcome.job is not None and outcome.job.problem.stack.name == "nemo-25"
    assert main(["validate", str(path)]) == 0
    note = capsys.readouterr().err
    assert note.count("\n") == 1 and "'framework'" not in note and "'colour'" in note
    assert "'recompte' (did you mean 'recompute'?)" in note
    assert main(["validate", str(path), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_every_column_of_the_format_is_known() -> None:
    header = columns_of(MEASURED / "runs_sample.csv")
    assert unread(header) == () and unread(["id", "colour"]) == ("colour",)


@pytest.mark.parametrize("command", ["validate", "calibrate"])
def test_help_lists_the_columns_that_are_needed_and_where_all_are(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert [name for name in (*NEEDED, "results/validation/vocabulary.md") if name not in printed] == []
    page = (Path(__file__).parents[2] / "results" / "validation" / "vocabulary.md").read_text(encoding="utf-8")
    assert [name for name in COLUMNS if f"`{name}`" not in page] == []
