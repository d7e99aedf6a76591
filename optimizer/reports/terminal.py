"""A plan as a planner reads it at a terminal: what was chosen, what it costs, what holds it up, and what else there is.

Everything is drawn from 80 columns upwards; from WIDE columns on, sections stand side by side. Text never goes through rich's
markup, so that a name such as "[red]" stays what it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...cost_models.intervals import COVERAGE
from ...cost_models.memory import GIB
from ...search_spaces.layout import Layout, Problem, Recompute, Stage
from ...search_spaces.quantities import free_bytes
from ..aims import FEWER_DEVICES, MEANT, STEP_TIME, best_in
from ..result import Certificate, Memory, Plan, PricedLayout, StageMemory, Tie
from . import wording
from .comparison import MOST_LOSSES, Comparison, compare
from .drawing import BAD, DOUBT, EIGHTHS, GOOD, INDENT, LABEL, STRONG, WIDE, bar, bullets, grid, print_sections, section, width_of
from .further import aim_figure, aim_head, further_sections
from .supernode import slow_words, supernode_sections

SHOWN_STAGES = 8
FOLDED = 0.01
"""Terms of the breakdown below this share of the step are shown together."""
CUTS_PROVED = 1e-5
"""Gap below which the cuts of a plan are called the best there are."""

VERDICTS = {"fits": GOOD, "unsure": DOUBT, "oom": BAD}
LIMIT = "┊"
COMPUTE, COMMUNICATION, WAITING = "cyan", "blue", "yellow"
TERM_STYLES = {
    **dict.fromkeys(("forward", "backward", "recompute", "optimizer"), COMPUTE),
    **dict.fromkeys(("tp", "cp", "ep", "pp", "dp", "offload"), COMMUNICATION),
    **dict.fromkeys(("bubble", "host"), WAITING),
}
DEGREES = ("tp", "cp", "pp", "dp", "ep", "etp", "edp", "vpp")
OF_EXPERTS = ("ep", "etp", "edp")
"""Degrees that a dense model has not."""
FRAME = ("tp", "cp", "pp", "dp", "ep", "etp", "vpp", "micro_batch")
SAME_GIB = 0.05
TRAFFIC_ORDER = ("tp", "cp", "ep", "etp", "pp", "dp", "edp", "offload")


def render(plan: Plan, console: Console) -> None:
    """Prints the whole plan."""
    width = width_of(console)
    head, figures, *sections = _priced(plan.problem, plan.plan, width)
    print_sections(console, [head, figures, *slow_words(plan), *sections], width)
    print_sections(console, [_alternatives(plan, width), *supernode_sections(plan), *further_sections(plan)], width)
    print_sections(
        console,
        [_certificate(plan), _assumptions(plan.assumptions)],
        width,
    )


def render_layout(problem: Problem, priced: PricedLayout, console: Console, broken: Sequence[str] = ()) -> None:
    """Prints one layout with everything that is predicted about it, first of all the rules that it breaks."""
    width = width_of(console)
    head, *sections = _priced(problem, priced, width)
    illegal = [_illegal(broken)] if broken else []
    print_sections(console, [head, *illegal, *sections, _assumptions(problem.assumptions)], width)


def _illegal(broken: Sequence[str]) -> Group:
    """The rules that a layout breaks, and what its price is worth then."""
    note = f"breaks {wording.count(len(broken), 'rule')}; what follows is what it would cost"
    return Group(Text.assemble(("NOT LEGAL", f"{STRONG} {BAD}"), "  ", (note, LABEL)), Padding(bullets(broken), (0, 0, 0, INDENT)))


def _priced(problem: Problem, priced: PricedLayout, width: int) -> list[RenderableType]:
    """The sections about one layout, in pairs where there is room for two."""
    wide = width >= WIDE
    half = (width - 2 * INDENT) // 2 if wide else width
    free_gib = free_bytes(problem.cluster) / GIB
    sections = [
        _layout(problem, priced.layout),
        _time(priced, half),
        _memory(priced.memory, free_gib, half),
        _traffic(problem, priced),
    ]
    head: list[RenderableType] = [_headline(problem, priced), _figures(priced, free_gib)]
    if not wide:
        return [*head, *sections]
    return [*head, *(_side_by_side(left, right, half) for left, right in zip(sections[::2], sections[1::2], strict=True))]


def _side_by_side(left: RenderableType, right: RenderableType, half: int) -> Table:
    table = Table.grid(padding=(0, INDENT, 0, 0))
    table.add_column(width=half)
    table.add_column(width=half)
    table.add_row(left, right)
    return table


# --- what it is --------------------------------------------------------------------------------------------------------------


def _headline(problem: Problem, priced: PricedLayout) -> Group:
    model, cluster, stack, work = problem.model, problem.cluster, problem.stack, problem.workload
    given = priced.devices_used + priced.devices_idle  # more than the problem's where those of some supernodes are left out
    title = Text.assemble(
        (f"{model.name} on {given:,} × {cluster.accelerator.name}", STRONG),
        "   ",
        (f"{wording.count(work.global_batch, 'sequence')} of {work.seq_len:,} tokens a step", ""),
    )
    where = Text(f"cluster {cluster.name} · stack {stack.name} {stack.version} · {work.precision}", style=LABEL)
    if not priced.devices_idle:
        return Group(title, where)
    return Group(title, where, Text(f"{priced.devices_idle:,} of {given:,} devices stay idle", style=DOUBT))


def _figures(priced: PricedLayout, free_gib: float) -> Table:
    """The four figures that are looked for first, each with its companion below."""
    memory = priced.memory
    held = f"{wording.amount(over)} over" if (over := memory.peak_gib - free_gib) > 0 else "of"
    interval = f"{100 * COVERAGE:.0f} %: {wording.interval(*priced.step_time_interval_s)}"
    table = grid("left", "left", "left", "left", gap=3)
    columns = (
        ("step time", wording.seconds(priced.step_time_s), interval),
        (
            "tokens/s per device",
            wording.significant(priced.tokens_per_s_per_device),
            f"{wording.significant(priced.model_tflops_per_device)} TFLOP/s",
        ),
        ("MFU, causal", wording.percent(priced.mfu), f"{wording.percent(priced.mfu_full_attention)} full"),
        ("peak memory", wording.gib(memory.peak_gib), f"{held} {wording.gib(free_gib)} free"),
    )
    for row, style in enumerate((LABEL, STRONG, LABEL)):
        table.add_row(*(Text(column[row], style=style) for column in columns))
    if memory.verdict != "fits":
        table.add_row(*[Text()] * 3, Text(f"memory: {memory.verdict}", style=VERDICTS[memory.verdict]))
    return table


def _layout(problem: Problem, layout: Layout) -> Group:
    names = [name for name in DEGREES if problem.model.is_moe or name not in OF_EXPERTS]
    frame = Text("   ").join(Text.assemble((f"{name} ", LABEL), (str(getattr(layout, name)), STRONG)) for name in names)
    choices = grid("left", "wrap", "left", "wrap", gap=3)
    entries = list(_choices(layout))
    rows = -(-len(entries) // 2)
    for row in range(rows):
        pair = (entries[row], entries[row + rows] if row + rows < len(entries) else ("", ""))
        choices.add_row(*(cell for name, value in pair for cell in (Text(name, style=LABEL), Text(value))))
    return section("Layout", frame, Text(), choices, Text(), _stages(problem, layout))


def _choices(layout: Layout) -> Iterable[tuple[str, str]]:
    """What a layout chooses beside its degrees; what has no effect at these degrees is left out."""
    interleaved = f", {layout.vpp} chunks a stage" if layout.vpp > 1 else ""
    yield "micro-batch", f"{layout.micro_batch} × {layout.num_microbatches:,} a step"
    yield "schedule", layout.schedule + interleaved
    yield "recompute", _recompute(layout.recompute)
    yield "sharding", layout.optimizer_sharding
    yield "offload", layout.offload.replace("+", " + ")
    yield "rank order", layout.rank_order
    if layout.tp > 1:
        yield "sequence par.", "on" if layout.sequence_parallel else "off"
    if layout.cp > 1:
        yield "cp type", layout.cp_type


def _recompute(text: str) -> str:
    return " + ".join(Recompute.parse(text).module_names) or text


def _stages(problem: Problem, layout: Layout) -> Table:
    """Stages that hold the same are one line; past SHOWN_STAGES lines the rest is counted."""
    kinds = problem.model.layer_kinds
    table = grid("left", "wrap", gap=3)
    runs = [(words, [stage.stage for stage in run]) for words, run in groupby(layout.stages, lambda s: _holds(s, kinds, layout))]
    for words, numbers in runs[:SHOWN_STAGES]:
        table.add_row(Text(f"stage{'s' * (len(numbers) > 1)} {wording.ranges(numbers)}", style=LABEL), Text(words))
    left = sum(len(numbers) for _, numbers in runs[SHOWN_STAGES:])
    if left:
        table.add_row(Text(), Text(f"and {wording.count(left, 'more stage')}", style=LABEL))
    return table


def _holds(stage: Stage, kinds: Sequence[str], layout: Layout) -> str:
    """«3 dense + 1 moe + embedding», with the chunks in brackets where they differ in size."""
    counts: dict[str, int] = {}
    sizes = []
    for chunk in stage.chunks:
        held = kinds[chunk.layers[0] : chunk.layers[1] + 1] if chunk.layers else ()
        sizes.append(len(held) + chunk.mtp)
        for kind in held:
            counts[kind] = counts.get(kind, 0) + 1
    parts = [f"{number} {kind}" for kind, number in counts.items()]
    mtp = sum(chunk.mtp for chunk in stage.chunks)
    parts += [f"{mtp} MTP"] * (mtp > 0)
    parts += ["embedding"] * any(chunk.embedding for chunk in stage.chunks)
    parts += ["loss"] * any(chunk.loss for chunk in stage.chunks)
    text = " + ".join(parts) or "nothing"
    if len(set(sizes)) > 1:
        text += f"  (chunks of {' + '.join(map(str, sizes))})"
    own = dict.fromkeys(chunk.recompute for chunk in stage.chunks if chunk.recompute != layout.recompute)
    return text + "".join(f", recompute {_recompute(recompute)}" for recompute in own)


# --- what it costs -----------------------------------------------------------------------------------------------------------


def _time(priced: PricedLayout, width: int) -> Group:
    """Terms of the breakdown, longest first, as bars; the small ones folded into one line."""
    total = priced.step_time_s
    ordered = sorted(((name, value) for name, value in priced.breakdown_s.items() if value > 0), key=lambda item: -item[1])
    shown = [(name, value) for name, value in ordered if value >= FOLDED * total]
    folded = [(name, value) for name, value in ordered if value < FOLDED * total]
    longest = max((value for _, value in shown), default=total)
    room = width - INDENT - 32
    table = grid("left", "right", "right", "left")
    for name, value in shown:
        drawn = Text(bar(value / longest * room), style=TERM_STYLES.get(name, WAITING))
        table.add_row(Text(name), Text(wording.seconds(value)), Text(wording.percent(value / total), style=LABEL), drawn)
    if folded:
        rest = sum(value for _, value in folded)
        names = Text(", ".join(name for name, _ in folded), style=LABEL)
        table.add_row(Text("rest"), Text(wording.seconds(rest)), Text(wording.percent(rest / total), style=LABEL), names)
    kinds = Text("  ").join(Text(*kind) for kind in (("compute", COMPUTE), ("communication", COMMUNICATION), ("waiting", WAITING)))
    return section("Where the time goes", table, note=Text("exposed:  ", style=LABEL).append_text(kinds))


def _memory(memory: Memory, free_gib: float, width: int) -> Group:
    """The fullest stage, term after term, each bar starting where the last one ended, against what is free on a device."""
    fullest = max(memory.stages, key=lambda stage: stage.peak_gib)
    style = VERDICTS[memory.verdict]
    cells = width - INDENT - 26
    scale = cells / max(free_gib, memory.peak_gib)
    kept = memory.usable_gib < free_gib - SAME_GIB
    limits = [min(cells - 1, round(gib * scale)) for gib in ((memory.usable_gib, free_gib) if kept else (free_gib,))]
    table = grid("left", "right", "left")
    start = 0.0
    for name, value in fullest.terms_gib.items():
        if value > 0:
            drawn = _segment(round(start * scale), round((start + value) * scale), cells, limits, COMPUTE)
            table.add_row(Text(name), Text(wording.amount(value)), drawn)
        start += value
    whole = _segment(0, round(start * scale), cells, limits, style)
    table.add_row(Text("peak", style=STRONG), Text(wording.gib(fullest.peak_gib), style=STRONG), whole)
    limit = f"{LIMIT} {f'a plan takes up to {wording.amount(memory.usable_gib)} of ' if kept else ''}{wording.gib(free_gib)} free"
    table.add_row(Text(), Text(), Text(limit.rjust(cells), style=LABEL))
    where = f"  stage {fullest.stage} is the fullest{_others(memory.stages, fullest)}"
    return section("Memory", table, note=Text.assemble((memory.verdict, style), (where, LABEL)))


def _segment(start: int, end: int, cells: int, limits: Sequence[int], style: str) -> Text:
    """Cells start…end filled; the limits stay visible through a bar that passes them."""
    text = Text()
    for cell in range(cells):
        filled = start <= cell < end
        text.append(LIMIT if cell in limits else EIGHTHS[-1] if filled else " ", style=style if filled else LABEL)
    return text


def _others(stages: Sequence[StageMemory], fullest: StageMemory) -> str:
    rest = [stage.peak_gib for stage in stages if stage.stage != fullest.stage]
    if not rest:
        return ""
    low, high = wording.amount(min(rest)), wording.amount(max(rest))
    return f", the others hold {low if low == high else f'{low}–{high}'} GiB"


def _traffic(problem: Problem, priced: PricedLayout) -> Group:
    """GiB per used device and step by level and dimension, and how long that keeps its links in use; what lies beyond the supernode
    is marked.
    """
    levels = [level.name for level in problem.cluster.levels if priced.traffic_gib.get(level.name)]
    names = [name for name in TRAFFIC_ORDER if any(priced.traffic_gib[level].get(name) for level in levels)]
    if not names:
        return section("Traffic", Text("none: no two devices talk to each other", style=LABEL))
    order = [level.name for level in problem.cluster.levels]
    outside = order[order.index(problem.cluster.supernode) + 1 :]
    table = grid("left", *["right"] * (len(names) + 2), gap=2 if len(names) > 5 else 3)
    table.add_row(Text(), *(Text(name, style=LABEL) for name in (*names, "all", "in use")))
    for level in levels:
        found = priced.traffic_gib[level]
        cells = [wording.amount(found.get(name, 0.0)) if found.get(name) else wording.NONE for name in names]
        total = Text(wording.amount(sum(found.values())), style=STRONG)
        used = wording.percent(priced.level_utilisation[level]) if level in priced.level_utilisation else wording.NONE
        table.add_row(Text(level), *map(Text, cells), total, Text(used))
    share = f"GiB per device and step; {wording.percent(priced.cross_supernode_share)} leaves the supernode"
    share += f" ({', '.join(level for level in levels if level in outside)})" if set(levels) & set(outside) else ""
    for link in priced.level_utilisation.keys() - set(order):
        share += f"; offload: {wording.percent(priced.level_utilisation[link])} of the {link} in use"
    return section("Traffic", table, note=Text(share, style=LABEL))


# --- why this one ------------------------------------------------------------------------------------------------------------


def _alternatives(plan: Plan, width: int) -> Group:
    """The plan and the next best frames, with what each gives up and gains; only the degrees in which they differ are shown.

    Where another aim than the step time leads, its figures stand first, and how much more of it each takes.
    """
    if not plan.alternatives:
        elsewhere = "none on so many devices; the front shows those on others"
        none = elsewhere if _led_by(plan) in FEWER_DEVICES else "none: no other frame is legal and fits"
        return section("Alternatives", Text(none, style=LABEL))
    priced = (plan.plan, *plan.alternatives)
    columns = [name for name in FRAME if len({getattr(one.layout, name) for one in priced}) > 1]
    heads, figures = _figures_beside(plan)
    table = grid(*["right"] * (len(columns) + len(heads)), "wrap", gap=2 if width < WIDE else 3)
    names = [name.replace("micro_batch", "mb") for name in columns]
    table.add_row(*(Text(name, style=LABEL) for name in (*names, *heads, "gives up, and for what")))
    for one in priced:
        cells = [*(str(getattr(one.layout, name)) for name in columns), *figures(one)]
        if one is plan.plan:
            table.add_row(*(Text(cell, style=STRONG) for cell in (*cells, "the plan")))
            continue
        found = compare(plan.problem, plan.plan, one)
        tied = any(plan.alternatives[tie.alternative] is one for tie in plan.ties)
        trade = Text.assemble(("tie", DOUBT), ": ", _trade(found)) if tied else _trade(found)
        table.add_row(*map(Text, cells), trade)
    body: list[RenderableType] = [table, *([Text(_tie_sentence(plan.ties))] if plan.ties else [])]
    return section("Alternatives", *body, note=Text("degrees not shown are the plan's", style=LABEL))


def _figures_beside(plan: Plan) -> tuple[tuple[str, ...], Callable[[PricedLayout], tuple[str, ...]]]:
    """Heads of the figures by which layouts stand beside the plan, and those of a layout."""
    led, own = _led_by(plan), plan.plan

    def more(value: float, than: float) -> str:
        return wording.change(value / than - 1.0) if than else ""

    def fast(one: PricedLayout) -> tuple[str, ...]:
        slower = "" if one is own else more(one.step_time_s, own.step_time_s)
        return wording.seconds(one.step_time_s), slower

    def little(one: PricedLayout) -> tuple[str, ...]:
        value, least = (one.aims or {})[led], (own.aims or {})[led]
        return aim_figure(led, value), "" if one is own else more(value, least), wording.seconds(one.step_time_s)

    if not led or plan.front_certificate is None:
        return ("step time", "slower"), fast
    return (aim_head(led, plan.front_certificate), "more", "step time"), little


def _tie_sentence(ties: Sequence[Tie]) -> str:
    """What the predictions cannot tell apart, and what would tell the nearest of it."""
    first, count = ties[0], wording.count(len(ties), "alternative")
    if not first.noise:
        return f"{count} with as much {MEANT.get(first.aim, first.aim)} as the plan: {first.decided_by}."
    may = "be as fast" if first.aim == STEP_TIME else f"lie as low in {MEANT.get(first.aim, first.aim)}"
    return f"{wording.told_apart(first.noise)}: {count} may {may}. Beside the nearest, {first.decided_by}."


def _trade(found: Comparison) -> Text:
    text = Text(", ".join((*found.losses[:MOST_LOSSES], *found.changes)))
    if not text and not found.gains:
        return Text("nothing of note", style=LABEL)
    if found.gains:
        text.append("; " if text else "").append("for " + found.gains[0], style=GOOD)
    return text


def _led_by(plan: Plan) -> str:
    """The aim that the plan makes least, where it is another than the step time; else blank."""
    first = plan.front_certificate.aims[0] if plan.front_certificate else STEP_TIME
    return "" if first == STEP_TIME else first


def _certificate(plan: Plan) -> Group:
    """What was proved of the aim that leads, and of the step time, what the events of the schedule say, and what else was asked
    and is not answered.
    """
    certificate, led = plan.certificate, _led_by(plan)
    optimal, unknown = certificate.status == "optimal", certificate.gap is None
    bound, gap = wording.seconds(certificate.lower_bound_s or 0.0), wording.percent(certificate.gap or 0.0)
    anyhow = _any_cuts_gap(plan)
    if unknown:
        verdict = f"{_aim_verdict(plan) if led else 'Not proved.'} No bound is known of how fast a layout could be."
    elif led and not optimal:
        verdict = f"{_aim_verdict(plan)} No layout is faster than {bound}; the plan takes {gap} longer."
    elif optimal:
        none = "No layout of the space is faster by the cost model"
        verdict = f"{none}: the bound is {bound}, the gap {gap}{_anyhow(certificate, anyhow)}."
    else:
        verdict = f"Not proved: a layout could be as fast as {bound}; the plan takes {gap} longer{_anyhow(certificate, anyhow)}."
    counts = _counted(certificate, whole=optimal or bool(led))
    body = [Text(f"{verdict} {counts}"), *(Text(sentence) for sentence in _cuts(certificate))]
    body += [Text(sentence) for sentence in _simulated(plan.plan, plan.alternatives)]
    body += [Text(f"{asked[:1].upper()}{asked[1:]}.", style=DOUBT) for asked in plan.unanswered]
    if certificate.beyond:
        body.append(Text(f"Beyond the space: {'; '.join(certificate.beyond)}."))
    body.append(Text(f"Space: {certificate.space}", style=LABEL))
    status = f"of the step time: {_status(certificate, anyhow)}" if led else _status(certificate, anyhow)
    return section("Certificate", *body, note=Text(status, style=GOOD if optimal else DOUBT))


def _counted(certificate: Certificate, whole: bool) -> str:
    """How many layouts there are and what became of them, as far as that is told; `whole`: all were looked at."""
    legal, seconds = wording.count(certificate.legal, "legal layout"), wording.seconds(certificate.seconds)
    if certificate.scored is None:
        return f"{legal}, scored, cut by the bound or cut by memory in {seconds}."
    cut = f"{certificate.cut_by_bound:,} cut by the bound{'' if whole else ' or not looked at'}"
    return f"{legal}: {certificate.scored:,} scored, {cut}, {certificate.cut_by_memory:,} cut by memory, in {seconds}."


def _aim_verdict(plan: Plan) -> str:
    """What is known of the aim that leads, where that is not the step time."""
    found = plan.front_certificate
    assert found is not None
    name, own = found.aims[0], plan.plan.aims or {}
    if found.lower_bound is not None and found.gap is not None:
        if found.gap < CUTS_PROVED:
            return f"No layout has less of the {MEANT.get(name, name)} than the plan."
        bound = f"{aim_figure(name, found.lower_bound)} {found.units[name]}"
        return (
            f"No layout's {MEANT.get(name, name)} lies below {bound}: the plan's {aim_figure(name, own[name])} is "
            f"{wording.percent(found.gap)} above that."
        )
    proved = found.method == "exact" and not found.stopped
    how = "of all layouts, as its section above says" if proved else "that was found, not proved"
    return f"The plan has the {best_in(name)} {how}."


def _any_cuts_gap(plan: Plan) -> float | None:
    """How much longer the plan takes than layouts could however they are cut, as a share of that; None where the bound on these
    lies below all that the step may take by its interval, and so says less.
    """
    bound_s = plan.certificate.any_cuts_lower_bound_s
    return plan.certificate.any_cuts_gap if bound_s is not None and bound_s >= plan.plan.step_time_interval_s[0] else None


def _status(certificate: Certificate, anyhow: float | None) -> str:
    """The status, with what it leaves out: how layers are cut is proved best of the ways that the space names only."""
    all_cuts = certificate.any_cuts_gap is None or certificate.any_cuts_gap < CUTS_PROVED
    if certificate.status != "optimal" or all_cuts:
        return certificate.status
    beyond = "" if anyhow is None else f"; of any cuts within {wording.percent(anyhow)}"
    return f"{certificate.status} over the cuts of the space{beyond}"


def _anyhow(certificate: Certificate, anyhow: float | None) -> str:
    """What layouts could take however they are cut, as the end of a sentence on those of the space."""
    if anyhow is None:
        return ""
    if anyhow < CUTS_PROVED:
        return "; nor is any faster that is cut in another way than the space says"
    bound, gap = wording.seconds(certificate.any_cuts_lower_bound_s or 0.0), wording.percent(anyhow)
    return f"; none of the space's can be faster than {bound} if cut in other ways than it says: the plan takes {gap} longer"


def _cuts(certificate: Certificate) -> Iterator[str]:
    """What other ways to cut the plan's layers into chunks could gain."""
    if certificate.cuts_gap is None or certificate.cuts_lower_bound_s is None:
        return
    if certificate.cuts_gap < CUTS_PROVED:
        yield "No other way to cut this layout's layers is faster (CP-SAT)."
        return
    gap = wording.percent(certificate.cuts_gap)
    yield f"Other cuts of this layout's layers, outside the space, could make it {gap} faster at most."


def _simulated(priced: PricedLayout, others: Sequence[PricedLayout]) -> Iterator[str]:
    """How long the schedules take event by event, and which alternative is faster so."""
    simulated = priced.simulated_step_time_s
    if simulated is None:
        return
    off = wording.change(simulated / priced.step_time_s - 1.0)
    yield f"Event by event, the schedule takes {wording.seconds(simulated)} ({off})."
    times = [other.simulated_step_time_s or math.inf for other in others]
    least = min(times, default=math.inf)
    if least < simulated:
        yield f"Alternative {times.index(least) + 1} takes {wording.seconds(least)} so: faster than the plan."


def _assumptions(assumptions: Sequence[str]) -> Group:
    return section("Assumptions", bullets(assumptions) if assumptions else Text("none", style=LABEL))
