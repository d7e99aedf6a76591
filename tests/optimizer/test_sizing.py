"""Sizes of runs and clusters side by side: arithmetic by hand, and plans that agree with what is asked of each alone."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
from paraplan.cost_models.checkpoint import Failures
from paraplan.cost_models.reliability import server_size
from paraplan.optimizer import comparing, endurance, sizing, training_run
from paraplan.optimizer.cli import main
from paraplan.optimizer.comparing import Field, Row, Side, _assumptions, compare, in_words, overtake, read_prices
from paraplan.optimizer.device_counts import MOST_PLANS, counts, likely
from paraplan.optimizer.interrupts import stoppable
from paraplan.optimizer.reports.sizing import render_compared
from paraplan.optimizer.result import Goodput, PricedLayout
from paraplan.optimizer.sizing import _Found, size
from paraplan.optimizer.training_run import Run, Tried, amount, arithmetic, attempt, sized
from paraplan.search_spaces.cluster import Figure
from paraplan.search_spaces.errors import Infeasible, InputError
from paraplan.search_spaces.inputs import MOST_DEVICES, catalog_names, load_cluster, load_model
from paraplan.search_spaces.scaling import scaled
from rich.console import Console

SMALL = ("llama-3.2-3b", "hgx-h100", 2e11, 3.0, 64, 4096)


def test_the_arithmetic_of_a_hundred_trillion_parameters() -> None:
    """10¹⁴ · 10¹³: 6·10²⁷ FLOPs, at 300 TFLOP/s 2·10¹³ device-seconds, 2.3·10⁸ device-days: 7.7 million devices for 30 days."""
    told = {line.name: line.value for line in arithmetic(1e14, 1e13, 30.0, 3e14)}
    assert told["FLOPs"] == pytest.approx(6e27)
    assert told["device-seconds"] == pytest.approx(2e13)
    assert told["device-days"] == pytest.approx(2.3148e8, rel=1e-4)
    assert told["devices"] == pytest.approx(7.716e6, rel=1e-4)


@pytest.mark.parametrize(("text", "value"), [("10T", 1e13), ("300B", 3e11), ("1.5G", 1.5e9), ("1e13", 1e13), ("2P", 2e15)])
def test_amounts(text: str, value: float) -> None:
    assert amount(text, "--tokens") == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "T", "10 TB", "-1T", "0", "10X", "nan", "1e999", "٣T"])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(InputError, match="--tokens"):
        amount(text, "--tokens")


@pytest.mark.parametrize("name", catalog_names("clusters"))
def test_counts_are_whole_units(name: str) -> None:
    cluster = load_cluster(name)
    supernode = next(level.size or 1 for level in cluster.levels if level.name == cluster.supernode)
    found = counts(cluster)
    assert list(found) == sorted(set(found))
    assert supernode in found or (cluster.max_devices or supernode) < supernode
    assert all(count % min(server_size(cluster), supernode) == 0 for count in found)
    assert all(b <= 1.25 * a for a, b in pairwise(found) if a >= 8 * server_size(cluster))


def test_a_run_gets_the_least_count_that_is_in_time() -> None:
    """The chosen count is in time, the whole server below is not, and the days are those of its own plan."""
    run = sized(*SMALL)
    found = size(run, target_mfu=0.4, repair_days=2.0)
    assert found.chosen.days is not None and found.chosen.days <= run.days
    assert found.short == found.chosen.devices - 8
    below = attempt(run, found.short)
    assert below.days is None or below.days > run.days
    alone = attempt(run, found.chosen.devices)
    assert alone.plan is not None and alone.goodput is not None
    tokens_a_day = 64 * 4096 / alone.plan.step_time_s * alone.goodput.goodput * 86400
    assert found.chosen.days == pytest.approx(2e11 / tokens_a_day, rel=1e-3)
    needed = next(line.value for line in found.lines if line.name == "devices")
    assert needed == pytest.approx(found.chosen.devices * found.chosen.days / run.days, rel=1e-3)
    assert found.spare_servers is not None and found.spare_servers <= 1
    assert found.spare_supernodes is None  # an HGX server is its own supernode
    assert not any("--repair-days" in said for said in found.assumptions)  # given


def test_repairs_take_what_the_cluster_says_unless_that_is_given() -> None:
    """The cluster's figure is told with its grade; where neither says it there are no spares, and why is told."""
    run = sized(*SMALL)
    own = run.cluster.failures.repair_days
    assert own is not None
    told = sizing._assumptions(run, None, {"server": 1}, own)
    assert told == (f"what fails is away for {own.value:g} days ({own.grade}): --repair-days says otherwise",)
    assert sizing._assumptions(run, None, {"server": 1}, Figure.model_validate(2.0)) == ()
    assert "how long repairs" in sizing._assumptions(run, None, {}, None)[0]


def stepping(days: Callable[[int], float], idle: int = 0) -> Callable[..., Tried]:
    """Stands in for plans: so many days, from 9 tenths to 11 tenths of them; `idle` devices of a count have no use."""

    def tried(run: Run, devices: int, layouts: int = 1) -> Tried:
        plan = PricedLayout.model_construct(devices_used=devices - idle, devices_idle=idle)
        return Tried(devices=devices, days=days(devices), days_interval=(0.9 * days(devices), 1.1 * days(devices)), plan=plan)

    return tried


def searched(
    monkeypatch: pytest.MonkeyPatch,
    attempt: Callable[..., Tried],
    days: float = 10.0,
    cluster: str = "hgx-h100",
    target_mfu: float | None = None,
) -> _Found:
    """What `size` finds of stand-ins, without the arithmetic that real plans would be shown with."""
    monkeypatch.setattr(training_run, "attempt", attempt)
    monkeypatch.setattr(sizing, "_sized", lambda run, found, mfu, repair: found)
    return cast(_Found, size(sized("llama-3.1-70b", cluster, 1e12, days, 13440, 4096), target_mfu=target_mfu))


def test_every_whole_unit_between_the_first_counts_is_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """8,240 device-days in 10 days: 824 devices, though the first counts are 768 and 960; 920 are in time 1.1 times slower."""
    found = searched(monkeypatch, stepping(lambda devices: 8240 / devices))
    assert (found.chosen.devices, found.short) == (824, 816)
    assert found.sure is not None and 907 <= found.sure.devices <= 1024
    assert len(found.tried) <= MOST_PLANS


def test_devices_that_a_plan_leaves_idle_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Days step down at multiples of 7 servers alone; what is tried between leaves up to six servers idle."""

    def tried(run: Run, devices: int, layouts: int = 1) -> Tried:
        useful = max(devices // 56 * 56, 56)
        return stepping(lambda count: 8240 / useful, devices - useful)(run, devices)

    found = searched(monkeypatch, tried)
    assert found.chosen.devices == 840
    assert found.short in (832, 824)


def test_a_count_that_divides_its_supernodes_beats_larger_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Racks of 72 of which 64 are used do a fifth more a device: 448 are 7 · 64, and larger counts than that are too slow."""

    def days(devices: int) -> float:
        return 3800 / devices if devices % 64 == 0 else 4700 / devices

    found = searched(monkeypatch, stepping(days), days=8.5, cluster="gb200-nvl72")
    assert days(480) > 8.5  # the next count of the ladder
    assert found.chosen.devices == 448
    assert found.least <= 3800 / 8.5 / 1.2
    assert found.short == 444


@pytest.mark.parametrize("name", ["hgx-h100", "gb200-nvl72", "cloudmatrix-384", "atlas-960-superpod"])
def test_likely_counts_are_few_and_keep_those_that_powers_of_two_tile(name: str) -> None:
    for least in (512, 16384):
        found = likely(load_cluster(name), least, 5 * least // 4)
        assert len(found) <= 10
        assert all(least <= a < b < 5 * least // 4 for a, b in pairwise(found))
    assert {832, 896, 960, 1024, 1088, 1152} <= set(likely(load_cluster("gb200-nvl72"), 800, 1200))


def test_a_count_found_slow_does_not_keep_a_smaller_one_from_being_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan of 560 leaves idle is dropped, though 480 and 500, whose spreads do not divide, are too slow."""

    def tried(run: Run, devices: int, layouts: int = 1) -> Tried:
        used = 396 if devices >= 540 or devices == 396 else devices
        return stepping(lambda count: 9.0 if used == 396 else 10 + 2000 / count, devices - used)(run, devices)

    found = searched(monkeypatch, tried, cluster="gb200-nvl72")
    assert found.chosen.devices == 396


def test_counts_are_planned_on_any_spread_over_supernodes() -> None:
    """A plan for 136 GPUs in racks of 72 uses 64 of each: it takes no more time than one for 128."""
    run = sized("qwen3-30b-a3b", "gb200-nvl72", 1e12, 30, 256, 4096)
    more, fewer = attempt(run, 136), attempt(run, 128)
    assert more.plan is not None and fewer.plan is not None
    assert more.plan.devices_used == 128
    assert more.days == pytest.approx(fewer.days, rel=1e-6)


def test_of_the_fastest_layouts_the_one_that_gets_furthest_with_failures_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    effective = {1.0: 1.2, 1.1: 1.15, 1.3: 1.35}
    told = {step: Goodput.model_construct(effective_step_s=seconds) for step, seconds in effective.items()}
    monkeypatch.setattr(endurance, "goodput_of", lambda failures, layout, fastest=None: told[layout.step_time_s])
    layouts = [PricedLayout.model_construct(step_time_s=step) for step in effective]
    best, goodput = endurance.furthest(cast(Failures, None), layouts)
    assert (best.step_time_s, goodput.effective_step_s) == (1.1, 1.15)


def test_a_count_beyond_the_largest_that_is_planned_is_told_by_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Infeasible) as raised:
        searched(monkeypatch, stepping(lambda devices: 1e9 / devices))
    needed, able = raised.value.reasons[:2]
    assert needed == (
        f"about 100,000,000 devices would, were they as efficient as {MOST_DEVICES:,} devices, the most that were tried since "
        "no larger job is planned"
    )
    assert able == f"those take {1e9 / MOST_DEVICES:.3g} days, failures included, or see {MOST_DEVICES * 1e4:.3g} tokens in 10 days"
    assert any(line.startswith("FLOPs: 6·N·D = 6 · ") for line in raised.value.reasons)
    assert any(line.startswith("devices: ") and line.endswith(" = 1e+08") for line in raised.value.reasons)
    with pytest.raises(Infeasible) as raised:
        searched(monkeypatch, lambda run, devices: Tried(devices=devices, reason="nothing fits"), days=1e-4, target_mfu=0.5)
    assert raised.value.reasons[0].endswith("nothing fits")
    assert "6·N·D takes at least 48," in raised.value.reasons[1]
    assert "rate: of a device at its peak = 9.89e+14 FLOP/s" in raised.value.reasons
    assert raised.value.reasons[-1].startswith("devices: were MFU 50 % of 989 TFLOP/s at every size, and nothing failed = 9.7")


def test_days_are_given_at_the_ends_of_the_step_and_of_the_failures() -> None:
    """The step's own ends; 0.30 or 0.10 failures of a die a year in place of 0.17, and the storage and restarts at theirs."""
    run = sized("llama-3.2-3b", "cloudmatrix-384", 2e11, 30.0, 64, 4096)
    found = attempt(run, 32)
    assert found.plan is not None and found.days is not None and found.days_interval is not None
    for day, step, rate, restart in zip(found.days_interval, found.plan.step_time_interval_s, (0.1, 0.3), (180, 1000), strict=True):
        bare = run.steps * step / 86400
        lost = rate * 32 / (365.25 * 86400) * restart  # the restarts alone
        assert bare * (1 + lost) < day < bare * (1 + lost + 5e-4)
    assert found.days_interval[0] < found.days < found.days_interval[1]


def test_a_mixture_is_counted_by_what_a_token_uses() -> None:
    model = load_model("deepseek-v3")
    assert model.active_parameters(embedding=False) == pytest.approx(36.6e9, rel=0.01)
    assert model.parameters() == pytest.approx(671e9, rel=0.01)


def test_a_batch_that_keeps_too_few_devices_busy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that get no faster by more devices, and jobs that nothing fits into."""
    monkeypatch.setattr(training_run, "attempt", lambda run, devices, layouts=1: Tried(devices=devices, days=40.0))
    with pytest.raises(Infeasible) as raised:
        size(sized("llama-3.2-3b", "hgx-h100", 2e11, 1.0, 1, 1024))
    assert "the fastest takes 40 days" in " ".join(raised.value.reasons)
    assert "a batch of 1 sequences" in " ".join(raised.value.reasons)
    monkeypatch.setattr(training_run, "attempt", lambda run, devices: Tried(devices=devices, reason="nothing fits"))
    with pytest.raises(Infeasible) as raised:
        size(sized("llama-3.2-3b", "hgx-h100", 2e11, 1.0, 1, 1024))
    assert "nothing fits" in " ".join(raised.value.reasons)


@pytest.mark.parametrize("name", ["deepseek-v3", "moe-1.8t", "llama-3.1-405b", "gpt3-175b"])
def test_scaled_models_have_the_size_asked_for(name: str) -> None:
    """Within a tenth, wider and deeper, with the same experts and head size."""
    model = load_model(name)
    for target in (5e10, 5e11, 2e12):
        grown = scaled(model, target)
        assert grown.parameters() == pytest.approx(target, rel=0.1)
        assert (grown.hidden_size > model.hidden_size) == (grown.num_layers > model.num_layers)
        assert set(grown.layer_kinds) == set(model.layer_kinds)
    with pytest.raises(InputError, match="do not grow by one factor"):
        scaled(load_model("nemotron-h-56b"), 1e12)


def side(name: str, per_device: float) -> Side:
    return Side(cluster=name, devices=10, supernode=8, tokens_per_s=10 * per_device)


def at_sizes(*premium: float | None) -> list[Row]:
    """Rows of 100B, 400B, 1,600B, …: cluster b makes so many times the tokens of a; at 0 only a has a plan, at infinity only b."""

    def sides(ratio: float | None) -> tuple[Side, ...]:
        neither = [Side(cluster=name, devices=10, supernode=8) for name in "ab"]
        a = neither[0] if ratio in (None, math.inf) else side("a", 100.0)
        b = neither[1] if ratio in (None, 0.0) else side("b", 100.0 * (1.0 if ratio == math.inf else ratio or 0.0))
        return a, b

    return [Row(parameters=10**11 * 4**place, active_parameters=1, sides=sides(ratio)) for place, ratio in enumerate(premium)]


def test_one_overtakes_another_between_two_sizes() -> None:
    """1.0×, 1.1× and 1.3× as many tokens at 100B, 400B and 1,600B: at 1.2 times the price half way in the logarithm, 800B."""
    rows, ratios = at_sizes(1.0, 1.1, 1.3), (1.0, 1.1, 1.3)
    found = overtake(rows, 0, 1, {"a": 1.0, "b": 1.2})
    assert found.premium == pytest.approx(ratios)
    assert found.verdict == "b is the cheaper one from 800B on, its device-hour costing 1.20 times as much"
    moved = {ratio: cheaper[0].least for ratio, cheaper in found.by_ratio}  # between 1.0 and 1.3
    assert list(moved) == pytest.approx([1.03, 1.09, 1.15, 1.21, 1.27])
    assert moved[1.15] == pytest.approx(4e11 * 4**0.25)  # a quarter of the way from 400B to 1,600B
    assert list(moved.values()) == sorted(moved.values(), key=lambda size: size or 0.0)
    assert "at no size" in overtake(rows, 0, 1, {"a": 1.0, "b": 2.0}).verdict
    assert "at every size" in overtake(rows, 0, 1, {"a": 1.0, "b": 0.9}).verdict
    assert not overtake(rows, 0, 1, {"a": 1.0}).priced


@pytest.mark.parametrize(
    ("premium", "where"),
    [
        ((1.0, 1.2, 1.0), "from 200B to 800B"),
        ((1.2, 1.0, 1.2), "up to 200B and from 800B on"),
        ((1.2, 1.0, 1.0), "up to 200B"),
        ((1.0, 1.0, 1.2, 1.0, 1.2), "from 800B to 3.2T and from 12.8T on"),
        ((1.0, 1.1, 1.0), "at 400B"),
        ((None, 1.2, 1.0), "from 400B to 800B"),  # nothing is known below 400B
        ((1.2, None, 1.2), "up to 100B and from 1.6T on"),
        ((1.2, 1.2, None), "up to 400B"),
        ((0.0, 1.2, 1.0), "from 400B to 800B"),
        ((1.2, 0.0, 1.2), "up to 100B and from 1.6T on"),
        ((1.0, 1.0, math.inf), "from 1.6T on"),
        ((1.0, 1.2, math.inf), "from 200B on"),
        ((math.inf, 1.0, 1.0), "up to 100B"),
        ((1.0, math.inf, 0.0), "at 400B"),
        ((1.2, 1.2), "at every size"),
        ((1.0, 1.0), "at no size"),
    ],
)
def test_the_sizes_at_which_one_is_cheaper_have_both_their_ends(premium: tuple[float | None, ...], where: str) -> None:
    """At 1.1 times the price, half way between 1.0 and 1.2."""
    found = overtake(at_sizes(*premium), 0, 1, {"a": 1.0, "b": 1.1})
    assert where in found.verdict
    assert in_words(found.cheaper) == where


@pytest.mark.parametrize(
    ("premium", "said"),
    [
        ((1.0, math.inf, math.inf), "from somewhere between 100B and 400B on only b has a plan"),
        ((0.0, 1.0, 1.2), "up to somewhere between 100B and 400B only a has a plan"),
        ((1.0, math.inf, 1.0), "from somewhere between 100B and 400B to somewhere between 400B and 1.6T only b has a plan"),
        ((math.inf, math.inf), "b and a have no size at which both have a plan; at every size only b has a plan"),
    ],
)
def test_sizes_at_which_only_one_has_a_plan_are_told(premium: tuple[float, ...], said: str) -> None:
    found = overtake(at_sizes(*premium), 0, 1, {})
    assert found.verdict.endswith(said)
    assert all(each is None or math.isfinite(each) for each in found.premium)


def test_every_cluster_of_the_catalog_has_an_example_price() -> None:
    file = Path(__file__).parents[2] / "results" / "field-claims" / "prices.yaml"
    assert sorted(read_prices([str(file)])) == sorted(catalog_names("clusters"))


def test_every_two_clusters_are_set_against_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_side", lambda model, field, place, *_: side(field.clusters[place].name, 1.0))
    names = ("hgx-h100", "mi300x", "gb200-nvl72")
    field = Field(tuple(map(load_cluster, names)), (8, 8, 72), {})
    found = compare(load_model("llama-3.2-3b"), field, 16, 4096, sizes=(2e9, 4e9))
    assert [(each.first, each.second) for each in found.overtakes] == [names[:2], names[::2], names[1:]]


def test_a_cluster_without_a_price_or_a_power_is_named() -> None:
    """No rated power of a 910C die has been published."""
    clusters = tuple(map(load_cluster, ("hgx-h100", "cloudmatrix-384", "mi300x")))
    said = "\n".join(_assumptions(Field(clusters, (64, 64, 64), {"hgx-h100": 2.0})))
    assert "no price of cloudmatrix-384, mi300x: --price cloudmatrix-384=…" in said
    assert "no energy of cloudmatrix-384: no rated power of ascend-910c-die is known" in said
    assert "no energy" not in "\n".join(_assumptions(Field(clusters[::2], (64, 64), {})))


def test_prices(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text("hgx-h100: 2.5\nmi300x: 2\n")
    assert read_prices([str(file), "hgx-h100=3"], ["hgx-h100"]) == {"hgx-h100": 3.0}
    for wrong in ("hgx-h100=free", "hgx-h100=-1", "hgx-h100=nan", "other=1"):
        with pytest.raises(InputError, match="--price"):
            read_prices([wrong], ["hgx-h100"])
    file.write_text("hgx-h100: cheap\n")
    with pytest.raises(
        InputError, match=r"^prices .*prices\.yaml: hgx-h100 = 'cheap' is not the price of a device-hour, such as 2\.5"
    ):
        read_prices([str(file)], field="prices")


def test_the_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = ["--global-batch", "16", "--seq-len", "4096", "--price", "hgx-h100=2"]
    where = ["--clusters", "hgx-h100,mi300x", "--devices", "8", *batch]
    assert main(["compare", "llama-3.2-3b", *where, "--price", "mi300x=1.5", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    for each in document["rows"][0]["sides"]:
        plan, price = each["plan"], {"hgx-h100": 2.0, "mi300x": 1.5}[each["cluster"]]
        hours = 1e6 / (plan["tokens_per_s_per_device"] * each["goodput"]) / 3600
        assert each["price"] == pytest.approx(hours * price, rel=1e-6)
        assert each["kwh"] == pytest.approx(hours * {"hgx-h100": 0.7, "mi300x": 0.75}[each["cluster"]], rel=1e-6)
    asked = ["size", SMALL[0], "--cluster", SMALL[1], "--tokens", "200B", "--days", "3", "--global-batch", "64", *batch[2:4]]
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["compare", "llama-3.2-3b", *where, "--sizes", "2B,4B", "-q"]) == 0
    shown = capsys.readouterr().out
    assert "mi300x against hgx-h100" in shown and max(map(len, shown.splitlines())) <= 80
    figures = re.findall(r"[\d.]+ (?:s|ms|%)", shown)
    monkeypatch.setenv("COLUMNS", "40")  # the terminal breaks lines: no figure is pressed
    assert main(["compare", "llama-3.2-3b", *where, "--sizes", "2B,4B", "-q"]) == 0
    assert re.findall(r"[\d.]+ (?:s|ms|%)", capsys.readouterr().out) == figures
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*asked, "-q"]) == 0
    shown = capsys.readouterr().out
    assert "device-seconds" in shown and "Failures" in shown and "Young: " in shown
    assert "at the ends of the intervals of the step and failures" in shown and "e^((T + save)/M)" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert main([*asked[:6], "soon", *asked[7:]]) == 2
    assert main(["compare", "llama-3.2-3b", "--clusters", "hgx-h100,mi300x", "--devices", "8,8,8", *batch]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--clusters hgx-h100,hgx-h100 --devices 8", "--clusters hgx-h100,hgx-h100: hgx-h100 is given twice"),
        ("--clusters hgx-h100,mi300x --devices 8,x", "--devices 8,x: 'x' is not a whole number"),
        ("--clusters hgx-h100,mi300x --devices 8 --sizes 3B,3G", "--sizes 3B,3G: 3e+09 is given twice"),
        ("--clusters hgx-h100,mi300x --devices 8 --price hgx-h100=1,mi300x=2", "repeat --price, once for each"),
    ],
)
def test_lists_of_compare_name_their_option(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "llama-3.2-3b", "--global-batch", "16", "--seq-len", "4096", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_small_figures_of_a_sizing_are_not_rounded_away(capsys: pytest.CaptureFixture[str]) -> None:
    """An hour is no 0.0 days, and 0.05 devices are not 0: the count that is chosen is the next whole unit."""
    asked = ["size", "llama-3.2-3b", "--cluster", "hgx-h100", "--tokens", "1e9", "--days", "10", "--global-batch", "16"]
    assert main([*asked, "--seq-len", "4096", "--quiet"]) == 0
    told = capsys.readouterr().out
    needed = next(line for line in told.splitlines() if "8 devices:" in line)
    assert " min, " in needed and "0.0 days" not in told
    counted = next(line for line in told.splitlines() if line.strip().startswith("devices ") and "=" in line)
    assert 0 < float(counted.rpartition("=")[2]) < 1
    assert "rounded" in counted


def broken_off_at(number: int, call: Callable[..., object], swallowed: bool) -> Callable[..., object]:
    """A call that an interrupt meets the so-manieth time: raised there, or swallowed by a search that ends with what it has."""
    calls = iter(range(number))

    def broken(*given: object, **named: object) -> object:
        found = call(*given, **named)
        if next(calls, None) is not None:
            return found
        with stoppable() if swallowed else nullcontext():
            raise KeyboardInterrupt
        return found

    return broken


@pytest.mark.parametrize("swallowed", [False, True])
def test_an_interrupted_comparison_keeps_what_is_planned(monkeypatch: pytest.MonkeyPatch, swallowed: bool) -> None:
    """Of two sizes on two clusters three plans are there: the fourth is named, and nothing is compared but whole sizes."""
    monkeypatch.setattr(comparing, "plan", broken_off_at(3, comparing.plan, swallowed))
    field = Field((load_cluster("hgx-h100"), load_cluster("hgx-h200")), (16, 16), {})
    found = compare(load_model("llama-3.2-3b"), field, 32, 4096, sizes=(3e9, 4e9))
    planned = [[side.plan is not None for side in row.sides] for row in found.rows]
    assert planned == [[True, True], [True, False]] and not found.overtakes
    (left,) = found.unanswered
    assert re.fullmatch(r"llama-3\.2-3b.* on hgx-h200 was not planned: interrupted before", left), left
    assert found.rows[1].sides[1].reason == "was not planned: interrupted before"
    rendered = io.StringIO()
    render_compared(found, Console(file=rendered, width=100))
    assert "hgx-h200: was not planned: interrupted before" in rendered.getvalue()


def test_a_comparison_interrupted_at_once_has_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "plan", broken_off_at(0, comparing.plan, swallowed=True))
    with pytest.raises(KeyboardInterrupt):
        compare(load_model("llama-3.2-3b"), Field((load_cluster("hgx-h100"),), (16,), {}), 32, 4096)


@pytest.mark.parametrize("swallowed", [False, True])
def test_an_interrupted_sizing_keeps_the_least_count_in_time(monkeypatch: pytest.MonkeyPatch, swallowed: bool) -> None:
    run = sized(*SMALL)
    whole = size(run)
    order = [count.devices for count in sorted(whole.tried, key=lambda one: one.devices)]
    answers = []
    for number in range(len(order) + 1):
        with monkeypatch.context() as patch:
            patch.setattr(training_run, "attempt", broken_off_at(number, training_run.attempt, swallowed))
            try:
                answers.append(size(run))
            except KeyboardInterrupt:
                assert number == 0
            except Infeasible as error:
                assert str(error.summary).startswith("interrupted") and len(error.reasons) == number
    assert answers[-1].chosen.devices == whole.chosen.devices
    for found in answers:
        assert found.chosen.days is not None and found.chosen.days <= run.days
        assert found.chosen.devices == min(one.devices for one in found.tried if one.days is not None and one.days <= run.days)
        assert found.unanswered or len(found.tried) == len(whole.tried)
