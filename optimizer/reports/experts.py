"""Where experts go, as it is drawn at a terminal: the fullest rank by layer, and what the step takes."""

from __future__ import annotations

from collections.abc import Iterator

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
    print_sections(console, [_headline(found), _layers(found), steps_section(found.steps), _assumptions(found)], width)


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
        (wording.times(found.today) if found.today >= 10 else f"{found.today:.2f}×", STRONG),
        " the mean today, and ",
        (f"{found.placed:.3f}×", GOOD),
        f" as placed (mean over {wording.count(len(found.layers), 'layer')}).",
    )
    return Group(title, where, Text(), gain)


def _layers(found: ExpertPlacement) -> RenderableType:
    """A row per layer; imbalances are loads of the fullest rank over the mean."""
    windows = found.layers[0].worst_window is not None
    across = found.supernodes > 1
    heads = ["layer", "today", "LPT", "placed", "bound", "gap", *(["across"] * across), *(["worst window"] * windows)]
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
        body.append(Text(f"Across supernodes: shares of {found.across_is}.", style=LABEL))
    return section("Layers", *body, note=Text("load of the fullest rank over the mean", style=LABEL))


def _row(each: LayerPlacement, across: bool) -> Iterator[Text]:
    yield Text(str(each.layer))
    yield Text(f"{each.today:.3f}")
    yield Text(f"{each.longest_first:.3f}")
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
