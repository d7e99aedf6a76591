"""Sections of what was asked beside the plan: the front, changed hardware, scenarios."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from ...search_spaces.layout import Layout
from ..aims import MEANT, best_in
from ..result import FrontCertificate, FrontPoint, Plan, Refined, Regret, Robust, Sensitivity, Threshold, WhatIf
from . import wording
from .drawing import GOOD, LABEL, STRONG, grid, section

DEGREES = ("tp", "cp", "pp", "dp", "ep", "etp", "vpp", "micro_batch")
CHOICES = ("schedule", "optimizer_sharding", "recompute", "offload", "rank_order", "cp_type")


def further_sections(plan: Plan) -> Iterator[RenderableType]:
    """Those of the answers that the plan holds."""
    if plan.front_certificate is not None:
        yield _front(plan.front or (), plan.front_certificate)
    if plan.goodput is not None:
        from .sizing import goodput_section

        yield goodput_section(plan.goodput)
    if plan.sensitivity is not None:
        yield _table(plan.sensitivity, plan.plan.layout)
        yield _thresholds(plan.sensitivity, plan.plan.layout)
    if plan.robust is not None:
        yield _robust(plan.robust)
    if plan.refined is not None:
        yield _refined(plan.refined)


def degrees(layout: Layout) -> str:
    """«tp 4 · pp 2 · dp 8», micro-batch, recompute and offload behind: what a layout is told from its neighbours by."""
    parts = [f"{name.replace('micro_batch', 'mb')} {getattr(layout, name)}" for name in DEGREES if getattr(layout, name) > 1]
    recompute = layout.recompute.removeprefix("selective:")
    chosen = {"recompute": recompute, "offload": layout.offload}
    return " ".join([*parts, *(f"{name} {value}" for name, value in chosen.items() if value != "none")]) or "one device"


def differences(first: Layout, other: Layout) -> str:
    """What the other layout chooses differently: «tp 2, recompute none»."""
    found = [
        f"{name.replace('micro_batch', 'mb').replace('optimizer_', '').replace('_', ' ')} {getattr(other, name)}"
        for name in (*DEGREES, *CHOICES)
        if getattr(first, name) != getattr(other, name)
    ]
    return ", ".join(found).replace("selective:", "") or "other stages"


def aim_head(name: str, certificate: FrontCertificate) -> str:
    """«peak memory GiB»: what stands over the figures of an aim."""
    return f"{MEANT.get(name, name)} {certificate.units[name]}".strip()


def aim_figure(name: str, value: float) -> str:
    """A figure of an aim without its unit."""
    return f"{value:,.0f}" if name == "devices" else wording.significant(value)


def _front(points: tuple[FrontPoint, ...], certificate: FrontCertificate) -> Group:
    """Every shown layout with its aims, and the devices of its job where these differ; marked ones stand out."""
    aims = certificate.aims
    given = [point.devices_used + point.devices_idle for point in points]
    told = len(set(given)) > 1 and "devices" not in aims
    heads = [*(["devices"] if told else []), *(aim_head(name, certificate) for name in aims)]
    table = grid(*["right"] * len(heads), "wrap", "wrap")
    table.add_row(*(Text(text, style=LABEL) for text in (*heads, "layout", "")))
    for point, count in zip(points, given, strict=True):
        style = STRONG if point.marks else ""
        figures = [*([f"{count:,}"] if told else []), *(aim_figure(name, point.aims[name]) for name in aims)]
        marks = Text(", ".join(point.marks), style=GOOD)
        table.add_row(*(Text(figure, style=style) for figure in figures), Text(degrees(point.layout)), marks)
    method = "exact" if certificate.method == "exact" else "NSGA-II, not proved"
    said = (
        f"{wording.count(certificate.size, 'layout')} on the front, in {wording.seconds(certificate.seconds)}. "
        f"Covered: {certificate.covers}"
    )
    if not points:
        return section(best_in(aims[0]).capitalize(), Text(said, style=LABEL), note=Text(method, style=LABEL))
    within = f"no other is better than a shown one by more than {wording.percent(certificate.within)} in any aim. "
    knee = "The knee's largest shortfall is least, each aim scaled from its least to its greatest value shown. "
    below = Text((f"{len(points)} shown: {within}" if certificate.within else "") + knee + said, style=LABEL)
    return section("Front", table, below, note=Text(method, style=LABEL))


def _table(found: Sensitivity, layout: Layout) -> Group:
    table = grid("left", "right", "right", "wrap")
    table.add_row(*(Text(text, style=LABEL) for text in ("change", "best step", "against now", "layout")))
    for row in found.table:
        table.add_row(*map(Text, _what_if(row, layout)))
    return section("On other hardware", table, note=Text("each row is a search of its own", style=LABEL))


def _what_if(row: WhatIf, layout: Layout) -> tuple[str, str, str, str]:
    if row.step_time_s is None or row.difference is None or row.layout is None:
        return row.change, wording.NONE, wording.NONE, "nothing fits"
    same = "the same" if row.same_layout else differences(layout, row.layout)
    return row.change, wording.seconds(row.step_time_s, 4), wording.change(row.difference), same


def _thresholds(found: Sensitivity, layout: Layout) -> Group:
    table = grid("left", "right", "right", "wrap")
    table.add_row(*(Text(text, style=LABEL) for text in ("what changes", "tried to", "wins up to", "then")))
    for row in found.thresholds:
        holds = wording.NONE if row.holds_to is None else _value(row, row.holds_to)
        then = "no other" if row.changes_at is None else "nothing fits" if row.layout is None else differences(layout, row.layout)
        table.add_row(Text(row.name), Text(_value(row, row.end)), Text(holds), Text(then))
    return section("Where another layout wins", table, note=Text("three digits, searched on both sides", style=LABEL))


def _value(row: Threshold, value: float) -> str:
    if row.unit == "×":
        return f"×{wording.significant(value)}"
    return f"{wording.signed(wording.significant(value))} {row.unit}"


def _robust(found: Robust) -> Group:
    """Both winners with their worst scenario, then who else comes close."""
    table = grid("left", "right", "right", "right", "wrap", "wrap")
    heads = ("", "nominal", "worst regret", "mean", "worst in", "layout")
    table.add_row(*(Text(text, style=LABEL) for text in heads))
    same = found.nominal.layout == found.robust.layout
    for name, row, style in (("fastest", found.nominal, ""), ("robust", found.robust, STRONG)):
        table.add_row(*(Text(cell, style=style) for cell in (name, *_regret(row))))
    shown = {degrees(row.layout) for row in (found.nominal, found.robust)}
    others = {degrees(row.layout): row for row in reversed(found.candidates) if degrees(row.layout) not in shown}
    for row in list(reversed(others.values()))[:2]:
        table.add_row(*(Text(cell, style=LABEL) for cell in ("next", *_regret(row))))
    verdict = "The fastest layout is also the robust one." if same else "The robust layout is not the fastest."
    tried = f"{wording.count(len(found.scenarios), 'scenario')}: nominal, each figure in doubt at its low and high, joint draws."
    said = f"{verdict} Least worst regret of {wording.count(found.tried, 'layout')} in {tried}"
    return section("Robust", table, Text(said, style=LABEL), note=Text("regret: over the best of each scenario", style=LABEL))


def _regret(row: Regret) -> tuple[str, str, str, str, str]:
    worst = "does not fit" if row.worst is None else wording.percent(row.worst)
    mean = wording.NONE if row.mean is None else wording.percent(row.mean)
    return wording.seconds(row.step_time_s), worst, mean, row.worst_scenario, degrees(row.layout)


def _refined(found: Refined) -> Group:
    """What the study gained, the knobs that it moved, and what it looked at."""
    parts: list[RenderableType] = [Text(_gain(found), style=STRONG if found.moved else "")]
    if found.gain and found.noise is not None and found.gain < found.noise:
        parts.append(Text(f"{wording.told_apart(found.noise)}: run both."))
    if found.moved:
        table = grid("left", "wrap", "wrap")
        table.add_row(*(Text(text, style=LABEL) for text in ("moved", "plan", "refined")))
        for each in found.moved:
            values = (text.removeprefix("selective:") for text in (each.before, each.after))
            table.add_row(each.knob.replace("_", " ").replace("optimizer ", ""), *values)
        parts.append(table)
    if found.imbalances:
        parts.append(_by_imbalance(found))
    parts.extend(_precision_words(found))
    if found.caution:
        parts.append(Text(found.caution, style=STRONG))
    kept = f"{wording.count(found.trials, 'sample')}, {found.repaired:,} of them illegal and moved to the nearest legal layout"
    tried = f"{wording.count(found.priced, 'layout')} priced, of which {found.unfit:,} do not fit"
    ended = "Stopped early: " if found.stopped else ""
    parts.append(Text(f"{ended}{kept}; {tried}. Looked at: {found.covers}", style=LABEL))
    return section("Refined", *parts, note=Text("Optuna, not proved", style=LABEL))


def _gain(found: Refined) -> str:
    """Both figures of the objective: «step time 12.9 s, 3.7 % less than the plan's 13.4 s»."""
    now = None if found.refined_s is None else wording.seconds(found.refined_s, 4)
    if now is None:
        return f"{found.objective}: nothing that was tried fits under all of them"
    if found.start_s is None:
        return f"{found.objective}: {now}, where the plan does not fit"
    if not found.gain:
        return f"{found.objective} {now}: nothing better than the plan was found"
    return f"{found.objective} {now}, {wording.percent(found.gain)} less than the plan's {wording.seconds(found.start_s, 4)}"


def _precision_words(found: Refined) -> Iterator[RenderableType]:
    """What each permitted precision reached."""
    if found.precision is None:
        return
    each = ((one.precision, one.refined_s) for one in found.precisions)
    reached = (f"{name} {'nothing that fits' if least is None else wording.seconds(least, 4)}" for name, least in each)
    yield Text(f"Best by precision: {', '.join(reached)}.")


def _by_imbalance(found: Refined) -> RenderableType:
    table = grid("left", "right", "right")
    table.add_row(*(Text(text, style=LABEL) for text in ("expert imbalance", "plan", "refined")))
    for row in found.imbalances:
        times = (wording.NONE if value is None else wording.seconds(value, 4) for value in (row.start_s, row.refined_s))
        table.add_row(wording.significant(row.imbalance), *times)
    return table
