"""The report at the terminal: what it says, that it fits its width, and that it is plain text when piped."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from paraplan.optimizer.reports import wording
from paraplan.optimizer.reports.comparison import compare
from paraplan.optimizer.reports.drawing import print_sections, section
from paraplan.optimizer.reports.terminal import render, render_layout
from paraplan.optimizer.result import Plan
from paraplan.search_spaces.layout import Split
from rich.console import Console
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the sample lies beside them
from sample_plan import sample_plan, sample_priced, sample_problem


def shown(plan: Plan, width: int, colour: bool = False) -> str:
    stream = io.StringIO()
    render(plan, Console(file=stream, width=width, force_terminal=colour, color_system="truecolor" if colour else None))
    return stream.getvalue()


def with_layout(**changes: object) -> Plan:
    plan = sample_plan()
    priced = plan.plan.model_copy(update={"layout": plan.plan.layout.model_copy(update=changes)})
    return plan.model_copy(update={"plan": priced})


@pytest.mark.parametrize("width", [80, 100, 132, 160, 240])
def test_no_line_is_wider_than_the_terminal_or_ends_in_blanks(width: int) -> None:
    for line in shown(sample_plan(), width).splitlines():
        assert len(line) <= width
        assert line == line.rstrip()


@pytest.mark.parametrize(
    "words",
    [
        "sample-671b on 2,048 × h800",
        "15,360 sequences of 4,096 tokens",
        "tp 1   cp 1   pp 16   dp 128   ep 64   etp 1   edp 2",
        "1 × 120 a step",
        "stage 0       3 dense + 1 moe + embedding",
        "stages 1–14   4 moe",
        "stage 15      1 moe + 1 MTP + loss",
        "mla_up_proj + mlp",
        "27.2–34.1 s",
        "25.9 %",
        "27.4 % full",
        "of 78.4 GiB free",
        "a plan takes up to 73.7 of 78.4 GiB free",
        "46.9 % leaves the supernode",
        "No layout of the space is faster",
        "1,284,310 legal layouts: 2,211 scored, 1,201,740 cut",
        "2.1× cross-supernode",
        "−6.5 GiB headroom",
        "etp = 1: experts are spread over devices whole",
    ],
)
def test_the_report_says(words: str) -> None:
    assert words in shown(sample_plan(), 80)


def test_optimal_says_in_the_same_breath_of_which_cuts_where_that_is_known_better_than_the_step() -> None:
    plan = sample_plan()
    assert "within" not in shown(plan, 100).partition("Certificate")[2].splitlines()[0]
    best_case = plan.plan.step_time_s / plan.plan.step_time_interval_s[0] - 1.0
    for gap, said in ((0.9 * best_case, True), (1.1 * best_case, False)):
        known = {"any_cuts_lower_bound_s": plan.plan.step_time_s / (1.0 + gap), "any_cuts_gap": gap}
        told = plan.model_copy(update={"certificate": plan.certificate.model_copy(update=known)})
        first, _, text = shown(told, 100).partition("Certificate")[2].partition("\n")
        assert "optimal over the cuts of the space" in first
        assert (f"; of any cuts within {gap:.1%}".replace("%", " %") in first) == said
        assert (f"the plan takes {gap:.1%} longer".replace("%", " %") in " ".join(text.split())) == said


def test_piped_it_has_no_escapes_and_on_a_terminal_it_has() -> None:
    assert "\x1b" not in shown(sample_plan(), 80)
    assert "\x1b[" in shown(sample_plan(), 80, colour=True)


def test_terms_of_the_breakdown_come_longest_first_and_small_ones_together() -> None:
    text = shown(sample_plan(), 80).partition("Where the time goes")[2]
    places = [text.index(f"\n  {name} ") for name in ("backward", "forward", "ep", "bubble", "recompute", "rest")]
    assert places == sorted(places)
    assert "dp, pp, host, optimizer" in text


def test_names_are_never_read_as_markup() -> None:
    plan = sample_plan()
    model = plan.problem.model.model_copy(update={"name": "[red]x[/red] :smile:"})
    problem = plan.problem.model_copy(update={"model": model})
    assert "[red]x[/red] :smile: on" in shown(plan.model_copy(update={"problem": problem}), 80)


def test_a_feasible_plan_says_how_far_off_it_may_be() -> None:
    plan = sample_plan()
    open_end = plan.certificate.model_copy(update={"status": "feasible", "lower_bound_s": 29.0, "gap": 0.0431})
    text = shown(plan.model_copy(update={"certificate": open_end}), 80)
    assert "Not proved: a layout could be as fast as 29.0 s; the plan takes 4.3 % longer." in text
    unknown = open_end.model_copy(update={"lower_bound_s": None, "gap": None})
    text = shown(plan.model_copy(update={"certificate": unknown}), 80)
    assert "Not proved. No bound is known of how fast a layout could be." in text


def test_a_layout_that_does_not_fit_shows_by_how_much() -> None:
    memory = sample_priced().memory
    first = memory.stages[0]
    full = first.model_copy(update={"peak_gib": 126.4, "terms_gib": {**first.terms_gib, "activations": 88.1}})
    memory = memory.model_copy(update={"peak_gib": 126.4, "verdict": "oom", "stages": (full, *memory.stages[1:])})
    stream = io.StringIO()
    render_layout(sample_problem(), sample_priced().model_copy(update={"memory": memory}), Console(file=stream, width=80))
    text = stream.getvalue()
    assert "48.0 over 78.4 GiB free" in text
    assert "Memory  oom" in text
    assert max(map(len, text.splitlines())) <= 80


def test_idle_devices_are_named() -> None:
    plan = sample_plan()
    priced = plan.plan.model_copy(update={"devices_used": 2000, "devices_idle": 48})
    assert "48 of 2,048 devices stay idle" in shown(plan.model_copy(update={"plan": priced}), 80)


def test_what_a_layout_does_not_use_is_left_out() -> None:
    assert "cp type" not in shown(sample_plan(), 80)
    assert "cp type" in shown(with_layout(cp=2, dp=64, edp=2), 80)


def test_chunks_of_different_sizes_and_their_own_recompute_are_told() -> None:
    stages = Split(2, 2, (0, 20, 40, 50, 62)).stages(61, "none")
    own = stages[0].chunks[0].model_copy(update={"recompute": "full"})
    changed = (stages[0].model_copy(update={"chunks": (own, stages[0].chunks[1])}), stages[1])
    text = shown(with_layout(pp=2, vpp=2, recompute="none", stages=changed), 120)
    assert "3 dense + 27 moe + embedding  (chunks of 20 + 10), recompute full" in text


def test_many_different_stages_are_counted_past_the_first() -> None:
    cuts = [0]
    for stage in range(30):
        cuts.append(cuts[-1] + 1 + stage % 2)
    text = shown(with_layout(pp=31, stages=Split(31, 1, (*cuts, 62)).stages(61, "none")), 80)
    assert "more stages" in text


def test_without_alternatives_or_traffic_it_says_so() -> None:
    plan = sample_plan()
    alone = plan.plan.model_copy(update={"traffic_gib": {}, "cross_supernode_share": 0.0})
    text = shown(plan.model_copy(update={"alternatives": (), "plan": alone}), 80)
    assert "no other frame is legal" in text
    assert "no two devices talk" in text


def test_comparison_names_losses_first_and_the_largest_gain() -> None:
    plan = sample_plan()
    found = compare(plan.problem, plan.plan, plan.alternatives[0])
    assert found.losses == ("+8.5 % ep", "−6.5 GiB headroom")
    assert found.gains == ("−6.0 % bubble",)
    assert found.slower == pytest.approx(0.0241, abs=1e-4)
    assert compare(plan.problem, plan.plan, plan.plan).losses == ()


def test_comparison_names_other_choices() -> None:
    plan = sample_plan()
    layout = plan.plan.layout.model_copy(update={"recompute": "full", "offload": "optimizer:1"})
    other = plan.plan.model_copy(update={"layout": layout})
    assert compare(plan.problem, plan.plan, other).changes == ("recompute full", "offload optimizer:1")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.012345, "0.0123"), (1.234, "1.23"), (9.996, "10.0"), (999.6, "1,000"), (1234, "1,230"), (-5, "−5.00")],
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert wording.significant(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 s"), (12.34, "12.3 s"), (0.9996, "1.00 s"), (0.5, "500 ms"), (0.00234, "2.34 ms"), (4e-5, "40.0 µs")]
)
def test_durations_choose_their_unit(value: float, text: str) -> None:
    assert wording.seconds(value) == text


def test_other_figures() -> None:
    assert wording.gib(61.23) == "61.2 GiB"
    assert wording.gib(1234.5) == "1,230 GiB"
    assert wording.gib(0.01) == "<0.05 GiB"
    assert wording.percent(0.4321) == "43.2 %"
    assert wording.percent(0.0002) == "<0.1 %"
    assert (wording.change(-0.05), wording.change(0.0312), wording.change(-2e-5)) == ("−5.0 %", "+3.1 %", "±0 %")
    assert wording.signed(wording.gib(3)) == "+3.0 GiB"
    assert wording.times(2.13) == "2.1×"
    assert wording.count(1, "layout") == "1 layout"
    assert wording.ranges([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7–8"
    assert wording.interval(0.8, 1.2) == "0.800–1.20 s"
    assert wording.interval(0.0012, 0.0034) == "1.20–3.40 ms"


def test_traffic_that_one_of_two_layouts_keeps_inside_is_spoken_of() -> None:
    problem, outside = sample_problem(), sample_priced()
    inside = outside.model_copy(update={"traffic_gib": {"server": {"ep": 383.0}}, "cross_supernode_share": 0.0})
    assert any("where there was none" in phrase for phrase in compare(problem, inside, outside).losses)
    assert "no cross-supernode traffic" in compare(problem, outside, inside).gains


def test_no_line_breaks_between_a_figure_and_its_unit() -> None:
    """At any width: the sentence is shown whole, and no line begins with a unit."""
    sentence = "cut in other ways it takes 12.1 s, 27.9 % more, with 3.0 GiB over and 5.2 ms of 450 GB/s"
    for width in range(20, 80):
        stream = io.StringIO()
        print_sections(Console(file=stream, width=width), [section("Certificate", Text(sentence))], width)
        lines = [line.strip() for line in stream.getvalue().splitlines()]
        assert " ".join(lines[1:]).strip() == sentence
        assert not any(line.startswith(("s,", "%", "GiB", "ms", "GB/s")) for line in lines)
