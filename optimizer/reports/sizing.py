"""Clusters side by side, and how many devices a run needs, as they are drawn at a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from ..comparing import Compared, Overtake, Row, Side, in_words
from ..device_counts import MORE
from ..result import Goodput, Line
from ..sizing import Sizing
from ..training_run import Tried
from . import wording
from .drawing import BAD, DOUBT, GOOD, LABEL, STRONG, WIDE, grid, print_sections, section, width_of
from .further import degrees

EXACT = 100.0
"""Below it a line of the arithmetic keeps its decimals."""


def render_compared(found: Compared, console: Console) -> None:
    """Prints a table for every size, and at which sizes one cluster is cheaper than another."""
    width = width_of(console)
    batch = f"{wording.count(found.global_batch, 'sequence')} of {found.seq_len:,} tokens a step"
    title = f"{found.model}   {batch}   {found.precision}"
    sections: list[RenderableType] = [Text(title, style=STRONG)]
    sections += [_row(row, width, many=len(found.rows) > 1) for row in found.rows]
    sections += [_overtake(found.rows, each) for each in found.overtakes]
    sections.append(_notes("Assumptions", found.assumptions))
    sections += [section("Left out", *(Text(f"{each}.", style=DOUBT) for each in found.unanswered))] if found.unanswered else []
    print_sections(console, sections, width)


def render_sizing(found: Sizing, console: Console) -> None:
    """Prints the count, the arithmetic in lines, what failures take and all counts that were tried."""
    width = width_of(console)
    best = found.chosen.plan
    assert best is not None and found.chosen.days is not None  # what is chosen is in time
    title = f"{found.model} on {found.cluster}   {wording.large(found.tokens)} tokens in {found.days:g} days"
    used = "" if best.devices_idle == 0 else f", of which {best.devices_idle:,} idle"
    answer = f"{found.chosen.devices:,} devices{used}: {_days(found.chosen.days)}, {wording.count(found.steps, 'step')} of "
    answer += f"{wording.seconds(best.step_time_s)}, MFU {wording.percent(best.mfu)}"
    needed = [Text(answer), Text(degrees(best.layout)), Text(_doubt(found))]
    sections: list[RenderableType] = [Text(title, style=STRONG), section("Needed", *needed)]
    sections.append(section("The arithmetic", _lines(found.lines)))
    if found.chosen.goodput is not None:
        sections.append(goodput_section(found.chosen.goodput, _spares(found)))
        sections.append(section("The arithmetic of failures", _lines(found.failure_lines)))
    note = Text("each with its own best plan", style=LABEL)
    sections.append(section("Tried", _tried(found.tried, found), Text(_untried(found), style=LABEL), note=note))
    sections.append(_notes("Assumptions", found.assumptions))
    sections += [section("Left out", *(Text(f"{each}.", style=DOUBT) for each in found.unanswered))] if found.unanswered else []
    print_sections(console, sections, width)


def _doubt(found: Sizing) -> str:
    """The days at both ends of what is uncertain, and the count that is in time even at the far one."""
    interval = found.chosen.days_interval
    assert interval is not None  # what is chosen has a plan
    failing = " and failures" if found.chosen.goodput is not None else ""
    low, high = (_days(end) for end in interval)
    said = f"{low} to {high} at the ends of the intervals of the step{failing}"
    if found.sure is None:
        return f"{said}; no count tried is in time at the late end"
    if found.sure.devices == found.chosen.devices:
        return f"{said}: in time at the late end too"
    return f"{said}; {found.sure.devices:,} devices, the first tried that are, are in time at the late end too"


def _untried(found: Sizing) -> str:
    """Which smaller counts were not tried, and why."""
    units = "devices" if found.unit == 1 else f"whole units of {found.unit:,} devices"
    said = f"counts are {units}; with fewer than {found.least:,} a device would have to do {MORE:g} times what it did in any plan"
    between = 0 if found.short is None else (found.chosen.devices - found.short) // found.unit - 1
    if between < 1:
        return said
    return f"{said}; the {between:,} between {found.short:,} and {found.chosen.devices:,} were not tried"


def _spares(found: Sizing) -> str:
    """How many spares of what cover those that are being repaired; empty where failures or repairs are not known."""
    units = (("server", found.spare_servers), ("supernode", found.spare_supernodes))
    known = " and ".join(wording.count(count, unit) for unit, count in units if count is not None)
    if not known or found.repair_days is None:
        return ""
    away = "a day" if found.repair_days == 1 else f"{found.repair_days:g} days"
    covers = "covers" if known in ("1 server", "1 supernode") else "cover"
    return f"{known} {covers} those in repair, {away} each, 99 % of the time"


def goodput_section(found: Goodput, spares: str = "") -> RenderableType:
    """What failures and checkpoints make of the time of a layout."""
    table = grid("left", "wrap")
    lost = wording.percent(1.0 - found.goodput)
    rows = [
        ("goodput", f"{wording.percent(found.goodput)}: {lost} goes to saves, lost work and restarts"),
        ("step", f"{wording.seconds(found.effective_step_s)} with failures"),
        ("failures", f"one every {span(found.mtbf_s)}, {wording.significant(found.failures_per_day, 2)} a day"),
        (
            "checkpoint",
            f"{wording.significant(found.checkpoint_tb)} TB; the fullest device copies {wording.gib(found.saved_gib)} to the "
            f"{found.tier} in {wording.seconds(found.save_s)}, storage has it {span(found.drain_s)} later",
        ),
        ("interval", f"a save every {span(found.interval_s)} is best{_textbook(found)}"),
        ("coming back", f"{span(found.back_s)} from a failure to the next step"),
    ]
    if found.fastest_effective_s is not None:
        rows.insert(2, ("fastest", f"the layout with the shortest step takes {wording.seconds(found.fastest_effective_s, 4)} so"))
    if spares:
        rows.append(("spares", spares))
    for name, words in rows:
        table.add_row(Text(name, style=LABEL), Text(words))
    return section("Failures", table)


def _textbook(found: Goodput) -> str:
    """What the approximations say; the best is longer than they are where a save takes longer to drain."""
    if found.young_interval_s is None or found.daly_interval_s is None:
        return ""
    drains = ", no sooner than the last one has drained" if found.interval_s == found.drain_s else ""
    return f" (Young: {span(found.young_interval_s)}, Daly: {span(found.daly_interval_s)}){drains}"


def span(seconds: float) -> str:
    """A duration of any length: 45 s, 12 min, 3.4 h, 12 days."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{wording.significant(seconds / size, 2)} {unit}"
    return wording.seconds(seconds, 2)


def _ends(one: Tried) -> str:
    """Least and most days."""
    assert one.days_interval is not None  # it has a plan
    return " to ".join(wording.significant(days) for days in one.days_interval)


def _days(days: float) -> str:
    """Days, or what is shorter where there is less than one."""
    return f"{days:.2f} days" if days >= 1.0 else span(86400.0 * days)


def _row(row: Row, width: int, many: bool) -> RenderableType:
    size = f"{wording.large(row.parameters)} parameters, {wording.large(row.active_parameters)} active"
    priced = any(side.price is not None for side in row.sides)
    heads = ["cluster", "devices", "step", "MFU", "tokens/s", "goodput", "crosses", "price" if priced else "device-h", "kWh"]
    table = grid("left", *["right"] * 8, *(["wrap"] if width >= WIDE else []), gap=2 if width >= WIDE else 1)
    table.add_row(*(Text(head, style=LABEL) for head in (*heads, *(["layout"] if width >= WIDE else []))))
    best = min((_cost(side) for side in row.sides if side.plan is not None), default=None)
    for side in row.sides:
        cells = _cells(side, priced)
        style = GOOD if side.plan is not None and _cost(side) == best and len(row.sides) > 1 else ""
        layout = [Text(degrees(side.plan.layout) if side.plan else "")] if width >= WIDE else []
        table.add_row(*(Text(cell, style=style) for cell in cells), *layout)
    body: list[RenderableType] = [table]
    body += [Text(f"{side.cluster}: {side.reason}", style=BAD) for side in row.sides if side.plan is None]
    if width < WIDE:
        body += [Text(f"{side.cluster}: {degrees(side.plan.layout)}", style=LABEL) for side in row.sides if side.plan and not many]
    unit = "price" if priced else "device-hours"
    return section(
        size, *body, note=Text(f"{unit} and kWh per million tokens, failures included; crosses: leaves the supernode", style=LABEL)
    )


def _cells(side: Side, priced: bool) -> list[str]:
    if side.plan is None:
        return [side.cluster, f"{side.devices:,}", *[wording.NONE] * 7]
    cost = side.price if priced else side.device_hours
    return [
        side.cluster,
        f"{side.devices:,}",
        wording.seconds(side.plan.step_time_s),
        wording.percent(side.plan.mfu),
        wording.large(side.tokens_per_s or 0.0),
        wording.NONE if side.goodput is None else wording.percent(side.goodput),
        wording.percent(side.plan.cross_supernode_share),
        wording.NONE if cost is None else wording.significant(cost),
        wording.NONE if side.kwh is None else wording.significant(side.kwh),
    ]


def _cost(side: Side) -> float:
    return side.price if side.price is not None else side.device_hours or 0.0


def _overtake(rows: Sequence[Row], found: Overtake) -> RenderableType:
    table = grid("right", "right")
    table.add_row(Text("parameters", style=LABEL), Text("may cost, a device-hour", style=LABEL))
    for row, premium in zip(rows, found.premium, strict=True):
        planned = [side.cluster for side in row.sides if side.plan is not None and side.cluster in (found.first, found.second)]
        style = GOOD if premium is not None and premium >= found.price_ratio else ""
        told = f"{premium:.2f}×" if premium is not None else f"only {planned[0]}" if planned else wording.NONE
        table.add_row(Text(wording.large(row.parameters)), Text(told, style=style))
    note = Text("between sizes by straight lines over their logarithm", style=LABEL)
    return section(f"{found.second} against {found.first}", table, Text(f"{found.verdict}."), *_by_ratio(found), note=note)


def _by_ratio(found: Overtake) -> list[RenderableType]:
    """At which sizes the second one is the cheaper one, over prices."""
    if not found.by_ratio:
        return []
    table = grid("right", "wrap")
    table.add_row(Text("were its device-hour", style=LABEL), Text("it would be the cheaper one", style=LABEL))
    for ratio, cheaper in found.by_ratio:
        table.add_row(Text(f"{ratio:.2f}×"), Text(in_words(cheaper)))
    return [Text(""), table]


def _lines(lines: Sequence[Line]) -> RenderableType:
    table = grid("left", "wrap", "right", "left", gap=2)
    for line in lines:
        exact = line.value < EXACT and line.value != round(line.value)  # a count of devices that is no whole one, say
        value = wording.significant(line.value) if exact else f"{line.value:,.0f}" if line.value < 1e7 else f"{line.value:.3g}"
        table.add_row(Text(line.name, style=LABEL), Text(line.expression), Text(f"= {value}"), Text(line.unit))
    return table


def _tried(tried: Sequence[Tried], found: Sizing) -> RenderableType:
    table = grid("right", "right", "right", "right", "right", "right", "wrap")
    table.add_row(*(Text(head, style=LABEL) for head in ("devices", "step", "MFU", "goodput", "takes", "at the ends", "")))
    for one in tried:
        if one.plan is None or one.days is None:
            table.add_row(Text(f"{one.devices:,}"), *[Text(wording.NONE)] * 5, Text(one.reason, style=BAD))
            continue
        style = STRONG if one.devices == found.chosen.devices else ""
        goodput = wording.NONE if one.goodput is None else wording.percent(one.goodput.goodput)
        cells = (
            f"{one.devices:,}",
            wording.seconds(one.plan.step_time_s),
            wording.percent(one.plan.mfu),
            goodput,
            _days(one.days),
            _ends(one),
        )
        idle = f"{one.plan.devices_idle:,} idle" if one.plan.devices_idle else ""
        mark = Text("in time", style=GOOD) if one.days <= found.days else Text("too slow", style=LABEL)
        table.add_row(*(Text(cell, style=style) for cell in cells), mark.append(f"  {idle}" if idle else ""))
    return table


def _notes(title: str, notes: Sequence[str]) -> RenderableType:
    table = grid("left", "wrap", gap=1)
    for note in notes or ("none",):
        table.add_row(Text("·", style=LABEL), Text(note))
    return section(title, table)
