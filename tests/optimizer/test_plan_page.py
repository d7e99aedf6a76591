"""paraplan report: a plan written down says what the terminal says, and opens without a network."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from paraplan.optimizer import build_problem, plan
from paraplan.optimizer.cli import main
from paraplan.optimizer.result import Plan
from paraplan.search_spaces import ModelSpec
from paraplan.search_spaces.inputs import load_model


@pytest.fixture(scope="module")
def found() -> Plan:
    """A pipeline of a model whose name a browser must not take for a tag."""
    named: ModelSpec = load_model("llama-3.1-8b").model_copy(update={"name": "<b>llama"})
    return plan(build_problem(named, "hgx-h100", 16, 64, 4096, fix="pp=2"), top=2)


@pytest.fixture(scope="module")
def plan_file(found: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    file.write_text(found.to_json(), encoding="utf-8")
    return file


def written(plan_file: Path, name: str) -> str:
    out = plan_file.parent / name
    assert main(["report", str(plan_file), "-o", str(out), "--quiet"]) == 0
    return out.read_text(encoding="utf-8")


def test_the_text_is_what_plan_prints_with_its_stages(found: Plan, plan_file: Path) -> None:
    text = written(plan_file, "plan.txt")
    for section in ("Layout", "Where the time goes", "Memory", "Traffic", "Certificate", "Assumptions", "Stages"):
        assert re.search(f"^{section}", text, re.MULTILINE), section
    assert f"{found.plan.memory.peak_gib:.1f} GiB" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text


def test_the_page_holds_text_and_pictures_and_asks_for_nothing_from_elsewhere(found: Plan, plan_file: Path) -> None:
    page = written(plan_file, "plan.html")
    assert page.count("<svg") == 2
    assert f"{found.plan.memory.peak_gib:.1f} GiB" in page
    assert not re.search(r"(src|href)=[\"'](?!#)|url\(|@import", page)
    assert "<b>llama" not in page
    assert "&lt;b&gt;llama" in page


def test_the_picture_is_well_formed(plan_file: Path) -> None:
    assert ElementTree.fromstring(written(plan_file, "plan.svg")).tag.endswith("svg")


def test_other_endings_and_other_documents_are_refused_in_one_sentence(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(plan_file), "-o", "plan.pdf"]) == 2
    assert "give a name that ends in .html, .svg, .txt" in capsys.readouterr().err
    other = plan_file.parent / "other.json"
    other.write_text("{}", encoding="utf-8")
    assert main(["report", str(other), "-o", str(other.parent / "page.html")]) == 2
    assert "other.json" in capsys.readouterr().err
    assert not (other.parent / "page.html").exists()


def test_a_device_is_no_place_to_write_to(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = plan_file.parent / "full.html"
    link.symlink_to("/dev/full")
    assert main(["report", str(plan_file), "-o", str(link)]) == 2
    assert "is a device or a pipe" in capsys.readouterr().err
    assert not list(plan_file.parent.glob(".paraplan-*"))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("plan", "layout", "stages", 1, "chunks", 0, "layers"), [20, 31], "starts at layer 20"),
        (("plan", "layout", "micro_batch"), 10**30, "micro_batch"),
        (("problem", "devices"), 15, "15 devices"),
    ],
)
def test_an_edited_plan_is_refused_in_one_sentence(
    found: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: tuple[str | int, ...], value: object, said: str
) -> None:
    document = json.loads(found.to_json())
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    file = tmp_path / "edited.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    assert main(["report", str(file), "-o", str(tmp_path / "page.txt")]) == 2
    printed = capsys.readouterr().err
    assert said in printed and "edited.json" in printed and "defect" not in printed
