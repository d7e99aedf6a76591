"""Committed pages of results say what their own tables hold."""

from __future__ import annotations

import csv
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from paraplan.optimizer.sweeps.table import TEXT

RESULTS = Path(__file__).parents[2] / "results"


def script(name: str) -> ModuleType:
    """The script that writes a page; scripts there are no package."""
    spec = importlib.util.spec_from_file_location(f"results_{name}", RESULTS / name / "regenerate.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def value(name: str, text: str) -> Any:
    if not text:
        return None
    if name in TEXT or name.startswith("option "):
        return text
    return float(text) if "." in text or "e" in text else int(text)


SWEEPS = script("sweeps")


@pytest.mark.parametrize("sweep", SWEEPS.SWEEPS, ids=lambda sweep: sweep.name)
def test_the_page_of_sweeps_says_what_its_tables_hold(sweep: Any) -> None:
    """Its sentences, made from the committed table once more: those that explain it stop where it no longer says so."""
    with (RESULTS / "sweeps" / f"{sweep.name}.csv").open() as stream:
        rows = [{name: value(name, text) for name, text in row.items()} for row in csv.DictReader(stream)]
    page = (RESULTS / "sweeps" / "README.md").read_text()
    for line in sweep.learnt(rows):
        assert line in page


def test_the_page_of_goodput_shows_a_layout_that_failures_choose() -> None:
    """By its own table: the best layout is not the same in every row, and where it is another it beats the fastest one."""
    page = (RESULTS / "goodput" / "README.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| a ")]
    first, moved = rows[0], [row for row in rows if row[1:3] != rows[0][1:3]]
    assert moved and first[7] == "the same"
    for words, dies, layout, step, _, _, effective, fastest in moved:
        assert float(effective.split()[0]) < float(fastest.split()[0]) and float(step.split()[0]) > float(first[3].split()[0])
        assert f"Where it is {words}, the best has {dies} dies" in " ".join(page.split()) and layout in page


def test_the_page_of_goodput_is_not_written_where_failures_choose_nothing() -> None:
    goodput = script("goodput")
    die = goodput.Answer("a die", 784, "tp 4", 20.0, 0.97, 1e5, 20.6, None, 100)
    other = replace(die, words="a supernode", dies=768, layout="tp 2", step_s=21.0, effective_s=21.5, fastest_s=22.0)
    said = " ".join(goodput.page([die, other]).split())
    assert "the best has 768 dies, and 16 are idle: tp 2. Its step is 5.0% longer" in said and "22.00 s, 2.3% more" in said
    with pytest.raises(AssertionError, match="nothing to show"):
        goodput.page([die, replace(die, words="a supernode")])


def test_the_page_of_supernodes_tells_what_is_enough_from_what_is_flat() -> None:
    """Racks of 72 that spare a ninth of the devices are slower than the smaller supernodes that are enough."""
    script("supernode")
    sizes = sys.modules["sizes"]

    def priced(step_s: float, used: int = 4608) -> SimpleNamespace:
        return SimpleNamespace(step_time_s=step_s, devices_used=used, mfu=0.4)

    by_size = {size: priced(10.0) for size in sizes.SIZES} | {8: priced(12.0), 72: priced(11.5, 4096)}
    job = sizes.Found("moe-1.8t", 4608, priced(12.0), priced(12.5), by_size, priced(12.65), by_size[72])
    assert (job.good[0], job.flat_from) == (16, 128)
    assert job.row[6:8] == ("1.200", "1.043 (512)") and job.row[-4:] == ("0.949", "1.043 (512)", "16", "128")
    assert "less than supernodes of 64 for moe-1.8t (0.95× against 1.20×)" in sizes._all_used([job])
    assert sizes._part_used([job]) == "Leaving eight of each idle gains for moe-1.8t (1.10×), in spite of fewer devices."


def test_the_page_of_a_table_of_runs_holds_the_columns_and_words_that_are_read() -> None:
    """As the code has them now: it is the one place that lists them all."""
    assert (RESULTS / "validation" / "vocabulary.md").read_text(encoding="utf-8") == script("validation").vocabulary()


@pytest.mark.parametrize("command", ["why plan.json"])
def test_readme_shows_what_the_command_printed(command: str) -> None:
    """Its sample leaves out the title, blank lines and the end of what is on the page of answers."""
    shown = _printed(RESULTS.parent / "README.md", command)
    printed = iter(_printed(RESULTS / "answers" / "README.md", command))
    assert len(shown) > 5 and all(line in printed for line in shown), "README is to be copied from results/answers anew"


def _printed(page: Path, command: str) -> list[str]:
    """The lines that a page shows below a command, blank ones left out."""
    text = page.read_text(encoding="utf-8").partition(f"$ paraplan {command}\n")[2].partition("```")[0]
    return [line for line in text.splitlines() if line.strip()]


def test_what_follows_from_replayed_tuning_is_read_off_its_table() -> None:
    page = script("tune")
    family = {
        "paraplan tune": (9.0, 2.0, 1.0, 0.5, 0.0),
        "without calibration": (9.0, 2.0, 1.5, 0.5, 0.0),
        "predictions alone": (9.0, 8.0, 1.0, 0.5, 0.0),
        "TPE told the predictions": (9.0, 1.0, 2.0, 0.6, 0.0),
        "TPE": (30.0, 20.0, 10.0, 5.0, 1.0),
        "random": (40.0, 30.0, 20.0, 10.0, 5.0),
    }
    close = {name: (10.0 * place, 50.0, 50.0, 50.0, 99.0 - place) for place, name in enumerate(family)}
    first = {name: page.Regrets(means, close[name]) for name, means in family.items()}
    worse = {**first, "paraplan tune": page.Regrets((9.0, 8.5, 1.0, 0.5, 0.0), close["paraplan tune"])}
    words = " ".join(" ".join(page.conclusions({"one": first, "other": worse})).split())
    assert "the best in 20 % (one), 20 % (other) of groups; a random pick is that in 50 % (one), 50 % (other)" in words
    assert "of TPE alone in 95 % (one), 95 % (other)" in words
    assert "After 2 runs, learning lowers the mean regret on one (8.0 % to 2.0 %); raises it on other (8.0 % to 8.5 %)" in words
    assert "After 5 runs, learning leaves it as it is on one (0.5 % to 0.5 %), other" in words
    assert "changes the mean regret by +6.5 points at most, on other after 2 runs" in words
    assert "than the loop on one after 2 runs; on other after 2 runs, and TPE alone than TPE told the predictions nowhere" in words
