"""Where experts go, as it is drawn at a terminal: the fullest rank by layer, and what the step takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.text import Text

from ..expert_placement import ExpertPlacement, LayerPlacement
from . import wording
from .drawing import DOUBT, GOOD, LABEL, STRONG, grid, print_sections, section, width_of
from .imbalance import steps_section

SHOWN_LAYERS = 12
"""Layers listed; of more, those that are fullest today."""


def render_experts(found: ExpertPlacement, console: Console) -> None:
    """Prints the placement."""
    width = width_of(console)
    sections = [_headline(found), _ways(found), _layers(found), steps_section(found.steps), _assumptions(found)]
    print_sections(console, sections, width)


def _headline(found: ExpertPlacement) -> RenderableType:
    experts = found.map
    copies = f" and {wording.count(found.redundant, 'copy').replace('copys', 'copies')}" if found.redundant else ""
    title = Text(
        f"{wording.count(experts.logical_experts, 'expert')}{copies} of {found.model} on {found.ep} EP ranks, "
        f"{experts.slots_per_rank} on each",
        style=STRONG,
    )
    place = wording.count(found.supernodes, "supernode")
    kept = f" · {found.groups_kept} routing groups kept together" if found.groups_kept else ""
    where = Text(f"an EP group touches {place}{kept}", style=LABEL)
    gain = Text.assemble(
        "The fullest rank has ",
        (_over_mean(found.today), STRONG),
        " the mean today, and ",
        (_over_mean(found.placed), GOOD),
        f" as placed (mean over {wording.count(len(found.layers), 'layer')}).",
    )
    if found.supernodes == 1:
        return Group(title, where, Text(), gain)
    return Group(title, where, Text(), gain, Text(_crosses(found)))


def _over_mean(load: float) -> str:
    return f"{load:.3f}×" if load < 10 else f"{wording.significant(load)}×"


def _crosses(found: ExpertPlacement) -> str:
    today, placed, even = map(wording.percent, (found.today_across, found.across, found.even_across))
    said = f"Tokens go once to each other supernode that has one of their experts: {today} of their top-k copies today, "
    said += f"{placed} as placed, {even} if all experts were chosen evenly"
    apart = [(each.today_apart, each.apart) for each in found.layers if each.today_apart is not None and each.apart is not None]
    if not apart:
        return f"{said}{_least(found)}."
    today, placed = map(wording.percent, np.mean(apart, axis=0).tolist())
    between = [_mean_between([getattr(each, name) for each in found.layers]) for name in ("today_across_between", "across_between")]
    return (
        f"{said}. Estimated from pairs, which leave open {between[0]} today and {between[1]} as placed; of the pairs of experts "
        f"that a token chose {today} are apart today and {placed} as placed."
    )


def _least(found: ExpertPlacement) -> str:
    """What crosses at least, mean over layers; nothing where that is not known of all."""
    least = [each.across_least for each in found.layers if each.across_least is not None]
    if len(least) < len(found.layers):
        return ""
    return f"; with the fullest rank as it is placed, at least {wording.percent(float(np.mean(least)))} by this estimate"


def _mean_between(bounds: Sequence[tuple[float, float] | None]) -> str:
    """«8.1 to 12.4 %», mean over the layers that have bounds."""
    least, most = np.mean([each for each in bounds if each is not None], axis=0).tolist()
    return f"{100 * least:.1f} to {wording.percent(most)}"


def _ways(found: ExpertPlacement) -> RenderableType:
    """A row per way of placing, over all layers, and what keeping routing groups together costs."""
    kept = found.groups_kept > 0
    apart, together = ("not kept", "kept together") if kept else ("", "")
    ways = {
        "in order, as today": ("today", together),
        "round-robin": ("round_robin", apart),
        "longest first (LPT)": ("longest_first", apart),
        "greedy like EPLB": ("balanced", together),
        "placed": ("placed", together),
        "bound": ("bound", together),
    }
    if kept:
        ways["LPT and swaps"] = ("ungrouped", apart)
    table = grid("left", "right", "right", "left")
    table.add_row(*(Text(head, style=LABEL) for head in ("", "mean", "worst layer", "routing groups" if kept else "")))
    for name, (field, groups) in ways.items():
        figures = np.array([getattr(each, field) for each in found.layers], dtype=float)
        style = GOOD if name == "placed" else ""
        cells = (Text(f"{figures.mean():.3f}", style=style), Text(f"{figures.max():.3f}", style=style))
        table.add_row(Text(name, style=style), *cells, Text(groups, style=LABEL))
    body = [table, Text(_cost_of_groups(found))] if kept else [table]
    return section("Ways to place them", *body, note=Text("load of the fullest rank over the mean", style=LABEL))


def _cost_of_groups(found: ExpertPlacement) -> str:
    free = [(each.ungrouped, each.ungrouped_across) for each in found.layers]
    fullest, across = np.array(free, dtype=float).mean(axis=0).tolist()
    more = wording.percent(max(0.0, found.placed / fullest - 1.0))
    return (
        f"Keeping routing groups together leaves the fullest rank {more} more than it need have; "
        f"without it {wording.percent(across)} of a token's copies would leave its supernode."
    )


def _layers(found: ExpertPlacement) -> RenderableType:
    """A row per layer; imbalances are loads of the fullest rank over the mean."""
    windows = found.layers[0].worst_window is not None
    across = found.supernodes > 1
    heads = ["layer", "today", "EPLB", "placed", "bound", "gap", *(["across"] * across), *(["worst window"] * windows)]
    table = grid(*["right"] * len(heads))
    table.add_row(*(Text(head, style=LABEL) for head in heads))
    shown = sorted(sorted(found.layers, key=lambda each: -each.today)[:SHOWN_LAYERS], key=lambda each: each.layer)
    for each in shown:
        table.add_row(*_row(each, across))
    optimal = sum(each.status == "optimal" for each in found.layers)
    gaps = np.array([each.gap for each in found.layers])
    proof = f"{optimal} of {wording.count(len(found.layers), 'layer')} proven best"
    if optimal < len(found.layers):
        proof += f"; the others are within {_gap(float(gaps.max()))} of the bound"
    body: list[RenderableType] = [table, Text(proof + ".")]
    if len(shown) < len(found.layers):
        body.insert(1, Text(f"the {len(shown)} fullest of {len(found.layers)} layers", style=LABEL))
    if across:
        body.append(Text("Across: shares of a token's copies that leave its supernode, today and as placed.", style=LABEL))
    return section("Layers", *body, note=Text("load of the fullest rank over the mean", style=LABEL))


def _row(each: LayerPlacement, across: bool) -> Iterator[Text]:
    yield Text(str(each.layer))
    yield Text(f"{each.today:.3f}")
    yield Text(f"{each.balanced:.3f}")
    yield Text(f"{each.placed:.4f}", style=STRONG)
    yield Text(f"{each.bound:.4f}")
    yield Text("optimal" if each.status == "optimal" else _gap(each.gap), style=GOOD if each.status == "optimal" else DOUBT)
    if across:
        yield Text(f"{wording.percent(each.today_across)} → {wording.percent(each.across)}")
    if each.worst_window is not None and each.today_worst_window is not None:
        yield Text(f"{each.today_worst_window:.3f} → {each.worst_window:.3f}")


def _gap(share: float) -> str:
    """A gap with the digits that it needs: 0.013 %."""
    return f"{100 * share:.3f} %" if share < 0.001 else wording.percent(share)


def _assumptions(found: ExpertPlacement) -> RenderableType:
    table = grid("left", "wrap", gap=1)
    for assumption in found.assumptions:
        table.add_row(Text("·", style=LABEL), Text(assumption))
    return section("Assumptions", table)
