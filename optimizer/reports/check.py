"""A job's judgement as it is drawn at a terminal: legal, fits, how good, and the way to the best layout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, zip_longest

from rich.console import Console, RenderableType
from rich.text import Text

from ..checking.checked import AND, Checked, Fit
from ..checking.group_check import CheckedGroups, GroupsOf
from ..checking.legality import Broken
from ..checking.tolerance import Tolerance, span
from ..readers.spelling import BATCH_MADE_UP
from ..result import PricedLayout
from . import wording
from .drawing import BAD, DOUBT, GOOD, LABEL, STRONG, bullets, grid, print_sections, section, width_of
from .waterfall import layout_lines, signed_seconds, style_of

VERDICTS = {"fits": GOOD, "unsure": DOUBT, "oom": BAD}
MOST_UNKNOWN = 12
MANY_CHUNKS = 16
"""Chunks whose layers nobody reads one by one."""
PLAIN = {"offload": "none", "rank_order": "tp-cp-ep-dp-pp"}
SAME_PEAK_GIB = 0.05
MOST_RUNS = 12
FOLDED_GAIN = 0.002
"""Changes that add less than this share of the step are told in one line."""


def render_check(found: Checked, name: str, console: Console) -> None:
    """Prints the judgement of a job."""
    width = width_of(console)
    sections: list[RenderableType] = [_title(found, name), _legal(found)]
    if found.fit is not None:
        sections.append(_fits(found, found.fit))
    if found.best is not None or found.best_status or found.nearest_priced is not None:
        sections.append(_good(found))
    if found.fault_tolerance is not None:
        sections.append(_tolerance(found.fault_tolerance))
    if found.advice:
        sections.append(section("Worth knowing", bullets(found.advice)))
    told = _not_judged(found)
    if told:
        sections.append(section("Not judged", bullets(told)))
    if found.unknown or found.unresolved or found.may_change_model:
        sections.append(_not_understood(found))
    if found.assumptions:
        sections.append(section("Assumptions", bullets(found.assumptions)))
    print_sections(console, sections, width)


def render_groups(found: CheckedGroups, name: str, console: Console) -> None:
    """Prints the judgement of rank lists."""
    width = width_of(console)
    verdict = Text("right", style=GOOD) if found.ok else Text("wrong", style=BAD)
    table = grid("left", "right", "left", "right", "right", "right", "left")
    heads = ("", "groups", "of", "ranks", "missing", "doubled", "should be")
    table.add_row(*(Text(head, style=LABEL) for head in heads))
    for each in found.dimensions:
        table.add_row(*_group_row(each))
    sentences = [sentence for each in found.dimensions for sentence in each.broken]
    title = Text.assemble((f"Process groups of {name}", STRONG), f"  {found.devices:,} ranks ({found.devices_from})")
    wrong = [section("Wrong", bullets((*found.broken, *sentences)))] if not found.ok else []
    checked = section("Checked", bullets(found.checked))
    print_sections(console, [title, section("Groups", table, note=verdict), *wrong, checked], width)


def _group_row(each: GroupsOf) -> Iterator[Text]:
    style = BAD if each.broken else GOOD
    sizes = " and ".join(map(str, list(each.sizes)[:4])) + (" and more" if len(each.sizes) > 4 else "")
    right = f"{each.expected_groups:,} of {each.expected_size}" if each.expected_groups is not None else wording.NONE
    yield Text(each.dimension, style=style)
    yield from map(Text, (f"{each.groups:,}", sizes, f"{each.touched:,}", f"{each.missing:,}", f"{each.doubled:,}", right))


def _title(found: Checked, name: str) -> RenderableType:
    """What was read, and the layout that it says."""
    devices = f" on {wording.count(found.devices, 'device')}" if found.devices else ""
    on = f" on {found.devices:,} × {found.accelerator}" if found.devices and found.accelerator else devices
    on += f", {found.idle:,} idle" if found.idle else ""
    stack = f", stack {found.stack}" if found.stack else ""
    text = Text.assemble(
        (name, STRONG), f"  {found.format}{stack}", (f"\n{found.model or 'a model that is not given'}{on}", STRONG)
    )
    names = {"num_microbatches": "micro-batches", "micro_batch": "mb"}
    frame = [f"{names.get(column, column)} {value}" for column, value in found.given.items() if isinstance(value, int)]
    text.append(f"\n{'   '.join(frame)}")
    chosen = list(_chosen(found))
    if chosen:
        text.append("\n" + ", ".join(chosen))
    chunks = [f"{each - mtp}{_ahead(mtp)}" for each, mtp in zip(found.stages, found.mtp, strict=True)]
    if len(set(chunks)) > 1:
        text.append(f"\nlayers per chunk {_runs(chunks)}")
    return text


def _runs(chunks: Sequence[str]) -> str:
    """Layers of chunks in their order: «4+5+5+3», of many equal ones that follow on each other once, «4, 9 × 5, 3»."""
    if len(chunks) < MANY_CHUNKS:
        return "+".join(chunks)
    runs = [(len(list(run)), each) for each, run in groupby(chunks)]
    return ", ".join(f"{count} × {each}" if count > 1 else each for count, each in runs)


def _shown(value: str) -> str:
    """A value, long lists of layers folded."""
    named = re.fullmatch(r"([\w.-]+ ?[=:] ?)(\[\[.*\]\]|\[[\d, ]+\]|[\d+]+)", value)
    if named is None:
        return value
    name, listed = named.groups()
    parts = re.findall(r"\[([^\[\]]*)\]", listed) if '"layers.' in listed else []
    chunks = [str(part.count('"layers.')) for part in parts] or ([] if "[[" in listed else re.findall(r"\d+", listed))
    return f"{name}{_runs(chunks)} layers (as it is written: --json)" if len(chunks) >= MANY_CHUNKS else value


def _ahead(layers: int) -> str:
    return f" ({wording.count(layers, 'MTP layer')} more)" if layers else ""


def _chosen(found: Checked) -> Iterator[str]:
    """Batch and text columns, without what is as nobody would say it."""
    if found.global_batch or found.seq_len:
        yield f"global batch {found.global_batch or wording.NONE}, sequence {found.seq_len or wording.NONE}"
    names = {"sequence_parallel": "SP", "optimizer_sharding": "sharding", "rank_order": "ranks", "cp_type": "cp type"}
    for column, value in found.given.items():
        silent = (column == "cp_type" and found.given.get("cp") == 1) or PLAIN.get(column) == value
        if isinstance(value, str) and not silent:
            yield f"{names.get(column, column)} {value}"


def _legal(found: Checked) -> RenderableType:
    if found.legal is None:
        return section("Legal", Text("nothing that is known could be judged"), note=Text("unknown", style=DOUBT))
    if found.legal:
        said = "yes, as far as it could be judged" if found.not_judged or found.unresolved else "yes"
        return section("Legal", Text(f"{wording.count(found.judged, 'rule')} judged, none broken"), note=Text(said, style=GOOD))
    table = grid("left", "wrap", gap=1)
    for before, each in zip((None, *found.broken), found.broken, strict=False):
        again = before is not None and (before.reason, before.source) == (each.reason, each.source)
        for label, text in _broken(each, only=len(found.broken) == 1, again=again):
            table.add_row(label, text)
    body: list[RenderableType] = [table]
    if found.nearest:
        body.append(Text("Nearest legal:", style=STRONG))
        body.append(bullets(_nearest_line(found, place) for place in range(len(found.nearest))))
    return section("Legal", *body, note=Text(f"no: {wording.count(len(found.broken), 'rule')} broken", style=BAD))


def _broken(each: Broken, only: bool, again: bool) -> Iterator[tuple[Text, Text]]:
    """The rule's id and what is broken; below, why the rule exists, unless that was said just before (`again`), and which values
    would meet it; `only`: and the job with it.
    """
    yield Text(each.rule, style=BAD), Text(each.sentence)
    if each.reason and not again:
        source = "" if each.source in ("", "definition") else f" ({each.source})"
        yield Text(), Text(f"{each.reason}{source}", style=LABEL)
    if each.legal:
        said = "legal with the rest as it is" if only else "mends it and breaks no other rule"
        yield Text(), Text(f"{said}: {_values(each.legal)}", style=LABEL)
    if each.alone:
        yield Text(), Text(f"mends it but breaks other rules: {_values(each.alone)}", style=LABEL)


def _values(columns: Mapping[str, tuple[int | str, ...]]) -> str:
    return "; ".join(f"{name} {', '.join(map(str, values))}" for name, values in columns.items())


def _nearest_line(found: Checked, place: int) -> Text:
    """A change, with the grid that it makes."""
    columns = found.nearest_columns[place]
    grid_columns = [name for name in ("tp", "cp", "pp", "dp") if name in found.given or name in columns]
    made = {name: columns.get(name, found.given.get(name, 1)) for name in grid_columns}
    line = Text(", ".join(found.nearest[place]), style=GOOD)
    if found.format == "job" and columns.keys() & made.keys():
        line.append(f"   ({' · '.join(f'{name} {value}' for name, value in made.items() if value != 1)})", style=LABEL)
    if found.format in BATCH_MADE_UP and "global_batch" in columns:
        line.append(f" (global batch {found.global_batch} → {columns['global_batch']})", style=DOUBT)
    return line


def _fits(found: Checked, fit: Fit) -> RenderableType:
    free, most = wording.gib(fit.free_gib), f"most of it, {wording.gib(fit.term_gib)}, is {_term(fit.term)}"
    body: list[RenderableType] = [Text(f"stage {fit.stage} peaks at {wording.gib(fit.peak_gib)} of {free} free; {most}")]
    body += [Text(f"may be wrong: {each}", style=BAD) for each in found.doubts]
    if found.may_change_model:
        count = wording.count(len(found.may_change_model), "option")
        body.append(Text(f"may be wrong: {count} that may change the model, not known here (below)", style=BAD))
    if fit.over_gib > 0:
        ways = {0: "no change of one or two choices mends it", 1: "this mends it:"}
        mend = ways.get(len(fit.mends), "any one of these mends it:")
        body.append(Text(f"{wording.gib(fit.over_gib)} too much; {mend}", style=BAD))
    elif fit.mends:
        body.append(Text(f"{'this makes' if len(fit.mends) == 1 else 'any one of these makes'} it sure:", style=DOUBT))
    lines = []
    for each in fit.mends:
        costs = f": {wording.gib(each.peak_gib)} ({each.verdict}), step {wording.change(each.slower)}"
        lines.append(Text.assemble(*(part for old, new in each.changes for part in (_diff(old, new), ", ")))[:-2].append(costs))
    body += [bullets(lines)] if lines else []
    if found.priced is not None and len(found.priced.memory.stages) > 1:
        body.append(_stages(found.priced))
    doubt = f"unsure, rather {'not' if fit.over_gib > 0 else 'yes'}: within 15 % of what is free"
    note = {"fits": "yes", "unsure": doubt, "oom": "no"}[fit.verdict]
    return section("Fits", *body, note=Text(note, style=VERDICTS[fit.verdict]))


def _term(name: str) -> str:
    return {"optimizer": "optimizer states", "transient": "a short-lived block", "communicators": "communicator buffers"}.get(
        name, name
    )


def _stages(priced: PricedLayout) -> RenderableType:
    """Peaks of the stages, equal ones together."""
    runs: list[tuple[list[int], float]] = []
    for stage in priced.memory.stages:
        if runs and abs(runs[-1][1] - stage.peak_gib) < SAME_PEAK_GIB:
            runs[-1][0].append(stage.stage)
        else:
            runs.append(([stage.stage], stage.peak_gib))
    shown = [f"{wording.ranges(stages)}: {wording.amount(peak)}" for stages, peak in runs[:MOST_RUNS]]
    return Text(f"GiB by stage  {'   '.join(shown)}{'   …' if len(runs) > MOST_RUNS else ''}", style=LABEL)


def _good(found: Checked) -> RenderableType:
    """How good the job is, beside the best layout on the same devices."""
    priced = found.priced
    if found.best is None and not found.best_status:
        alone = Text("the job has no price; the nearest legal layout has", style=DOUBT)
        return section("How good", layout_lines_of(found), note=alone)
    if found.best is None:
        return section("How good", Text(found.best_status), note=Text("no better layout was found", style=BAD))
    if priced is None:
        beside = "the nearest legal layout and the best have" if found.nearest_priced is not None else "the best legal layout has"
        unpriced = Text(f"the job has no price; {beside}", style=DOUBT)
        return section("How good", layout_lines_of(found), *_terms(found), *_changes(found), note=unpriced)
    low, high = priced.step_time_interval_s
    share = wording.percent(priced.breakdown_s.get("bubble", 0.0) / priced.step_time_s)
    bubble = f", bubble {share}" if priced.layout.pp > 1 else ""
    step = f"step {wording.seconds(priced.step_time_s)} ({wording.interval(low, high)})"
    said = f"{step}, MFU {wording.percent(priced.mfu)}{bubble}"
    if not found.changes:
        note = "no layout is faster" if found.best_status == "optimal" else "no faster layout was found"
        return section("How good", Text(said), note=Text(note, style=GOOD))
    faster = found.faster or 0.0
    less = f"the best layout takes {wording.percent(faster)} less" if faster > 0 else "no layout that surely fits is faster"
    return section("How good", Text(said), layout_lines_of(found), *_terms(found), *_changes(found), note=Text(less, style=DOUBT))


def layout_lines_of(found: Checked) -> RenderableType:
    """The job and the best layout, line by line."""
    named = (("job", found.priced), ("nearest", found.nearest_priced), ("best", found.best))
    rows = [(name, one) for name, one in named if one is not None]
    return layout_lines(found.problem, rows, found.given) if found.problem is not None else Text()


def _terms(found: Checked) -> Iterator[RenderableType]:
    """Where the job's step is longer."""
    start = found.priced or found.nearest_priced
    if found.waterfall is None or start is None:
        return
    least = FOLDED_GAIN * start.step_time_s
    terms = sorted(found.waterfall.terms, key=lambda bar: bar.seconds)
    shown = [f"{bar.term} {signed_seconds(bar.seconds)}" for bar in terms if abs(bar.seconds) > least]
    yield Text(f"from {'the job' if found.priced else 'there'} to the best, by term: {', '.join(shown)}")


def _changes(found: Checked) -> Iterator[RenderableType]:
    """What to change, the largest gain first; before that what only makes the job legal, whose gain nothing tells."""
    if not found.changes:
        return
    if all(change.seconds is None for change in found.changes):
        yield Text("What to change:", style=STRONG)
        yield bullets(_diff(change.before, change.after) for change in found.changes)
        return
    table = grid("right", "right", "wrap")
    table.add_row(*(Text(head, style=LABEL) for head in ("step", "peak", "change")))
    for change in found.changes:
        seconds, gib = change.seconds or 0.0, change.peak_gib or 0.0
        peak = wording.signed(wording.gib(gib)) if gib else wording.NONE
        untold = wording.NONE if found.priced is not None else "to be legal"
        step = untold if change.seconds is None else signed_seconds(seconds)
        together = f"{change.column.replace('_', ' ')} together: " if "," in change.column else ""
        said = Text.assemble((together, LABEL), _diff(change.before, change.after))
        table.add_row(Text(step, style=style_of(seconds)), Text(peak), said)
    yield Text("What to change, in order of gain:", style=STRONG)
    yield table
    if found.waterfall is not None and len(found.changes) > 1:
        yield Text(f"each share is {found.waterfall.averaged}", style=LABEL)


def _diff(before: str, after: str) -> Text:
    """«--option 8 → 4», what both have written once; «add --option» and «drop --option» where only one has it, or sets it."""
    pairs = [pair for pair in zip_longest(before.split(AND), after.split(AND), fillvalue="") if pair[0] != pair[1]]
    if len(pairs) > 1:
        return Text(", ").join(_diff(*pair) for pair in pairs)
    before, after = map(_shown, pairs[0] if pairs else (before, after))
    unset = [each.startswith("no ") or each.endswith("=null") for each in (before, after)]
    if unset == [True, False]:
        return Text.assemble("add ", (after, STRONG))
    if unset == [False, True]:
        return Text.assemble("drop ", (before, STRONG))
    shared = next((i for i, pair in enumerate(zip(before, after, strict=False)) if len(set(pair)) > 1), 0)
    same = max(before[:shared].rfind(end) for end in " =:") + 1
    if not before[same:].strip() or not after[same:].strip():
        same = 0
    closing = after[len(after.rstrip("}])")) :]
    old = before[same:].removesuffix(closing) if before.endswith(closing) else before[same:]
    return Text.assemble(before[:same], old.strip(), (" → ", LABEL), (after[same:].strip(), STRONG))


def _tolerance(found: Tolerance) -> RenderableType:
    figures = [
        ("interval", found.interval_s if not found.advice else None),  # which tells it
        ("a save takes at least" if found.save_at_least else "a save takes", found.save_s),
    ]
    known = ", ".join(f"{name} {span(value)}" for name, value in figures if value is not None)
    body: list[RenderableType] = [*([Text(known)] if known else []), *([bullets(found.advice)] if found.advice else [])]
    body += [bullets(f"needs {need}" for need in found.needs)] if found.needs else []
    return section("Fault tolerance", *(body or [Text("nothing to judge")]))


def _not_judged(found: Checked) -> tuple[str, ...]:
    return (*found.not_judged, *found.unpriced)


def _not_understood(found: Checked) -> RenderableType:
    lines: list[str | Text] = []
    if found.may_change_model:
        shown = ", ".join(found.may_change_model[:MOST_UNKNOWN])
        lines.append(Text(f"may change the model, price and memory may be wrong: {shown}", style=BAD))
    if found.unknown:
        more = len(found.unknown) - MOST_UNKNOWN
        lines.append(
            f"not known here, and left out: {', '.join(found.unknown[:MOST_UNKNOWN])}{f' and {more} more' if more > 0 else ''}"
        )
    if found.unresolved:
        lines.append(f"without a value in the file, and left out (--set NAME=VALUE): {', '.join(found.unresolved[:MOST_UNKNOWN])}")
    return section("Not understood", bullets(lines))
