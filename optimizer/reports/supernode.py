"""Sections on what a plan's supernodes make of it: its topology rule's cost, devices left idle, the price of reserved memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ..result import Plan
from ..rule_prices import CHANGE
from ..supernode_result import CheckpointTraffic, DevicesLeft, InsideCost, LeftOption, ReservePrice, SlowPlace
from . import wording
from .drawing import DOUBT, GOOD, LABEL, STRONG, grid, section
from .further import degrees
from .imbalance import steps_section

WORTH_SAYING = 1e-3
"""Share of a step by which a stage has to be worse for a slow device before that is said."""
CUT_SHORT = "not searched to the end"


def supernode_sections(plan: Plan) -> Iterator[RenderableType]:
    """Those that the plan has something to say about."""
    if plan.inside is not None:
        yield _inside(plan.inside)
    if plan.devices_left is not None:
        yield _left(plan.devices_left, bool(plan.problem.workload.inside))
    if plan.reserve is not None:
        yield _reserve(plan.reserve)
    if plan.at_imbalance:
        yield steps_section(plan.at_imbalance)
    if plan.checkpoint is not None:
        yield checkpoint_section(plan.checkpoint)


def _inside(cost: InsideCost) -> Group:
    """What keeping groups inside levels costs, and what would be faster without; the rule that goes without saying in a line."""
    if cost.kept and cost.proved and cost.without is None and not cost.given:
        return section("What the topology rule costs", Text(f"nothing: the best layout keeps to {cost.rule}, the default"))
    none = "nothing that keeps it fits" if cost.proved else f"nothing that keeps it was found, {CUT_SHORT}"
    kept = "kept" if cost.kept else none
    lines = [Text.assemble(("rule ", LABEL), (cost.rule, STRONG), f"   {kept}{'' if cost.given else ', by default'}")]
    if cost.without is None:
        lines.append(Text("it costs nothing: the best layout without it keeps to it", style=GOOD))
    else:
        with_s, without_s = wording.seconds(cost.step_time_s), wording.seconds(cost.step_time_without_s)
        lines.append(
            Text.assemble(
                ("it costs ", LABEL), (wording.percent(cost.slower), DOUBT), f"   {with_s} against {without_s} without it:"
            )
        )
        lines.append(Text(f"{degrees(cost.without)}   on {cost.without.devices:,} devices"))
    if not cost.proved:
        lines.append(Text("not proved: the time limit ended a search", style=DOUBT))
    return section("What the topology rule costs", *lines)


def _left(left: DevicesLeft, ruled: bool) -> Group:
    """How many devices the job has, what it does with them, and the other ways to go on, all under the topology rule if `ruled`."""
    table = grid("wrap", "right", "right", "wrap")
    own = left.options[0].in_supernodes if left.open else left.free
    ways = "spreads" if left.open else "ways to go on"
    where = ("as allocated" if own == left.free else "as planned") if left.open else "free in supernodes"
    table.add_row(*(Text(text, style=LABEL) for text in (ways, "step", "idle", "layout")))
    for option in (*told_apart(left.options), *((left.whole,) if left.whole else ())):
        table.add_row(*_row(option, left.options, ruled))
    counted = ", ".join(f"{units:,} × {size:,}" for size, units in Counter(own).items())
    head = Text.assemble((f"{where} ", LABEL), counted)
    if left.open:
        head.append(f"   {left.used:,} used, {left.idle:,} idle" if left.idle else f"   all {left.used:,} used")
        return section("Devices over supernodes", head, *_slow(left), Text(), table)
    return section("Devices left", Text(" ".join(left_words(left))), head, *_slow(left), Text(), table)


def left_words(left: DevicesLeft) -> Iterator[str]:
    """Devices left, devices used and idle, and what that beats, sentence by sentence."""
    best, whole = left.options[0], left.whole
    gone = whole.devices - left.devices if whole else 0
    have = f"Of {whole.devices:,} devices {left.devices:,} are left" if whole and gone else f"{left.devices:,} devices are there"
    if best.layout is None or best.step_time_s is None:
        yield f"{have}, and nothing fits them."
        return
    used = f"{left.used:,} of them as {_shape(best)} and leaves {left.idle:,} idle" if left.idle else f"all as {_shape(best)}"
    yield f"{have}: the plan uses {used}, {wording.seconds(best.step_time_s)} a step."
    those, such = "those", ""
    if left.in_part:
        those, such = "the layouts in such shares", " in such shares"
        most = max(option.devices for option in left.options)
        yield f"Equal shares in all supernodes but a last were tried, which hold {most:,} at most."
    fuller = [option for option in left.options if option.step_time_s is not None and (option.devices_used or 0) > left.used]
    if fuller:
        second = min(fuller, key=lambda option: option.step_time_s or 0.0)
        waits = ", waiting for the slow one" if second.slow else ""
        fastest = f"{second.devices_used:,} as {_shape(second)}{waits}: {_beside(second, best)}"
        yield f"Of {those} that use more the fastest has {fastest}."
    elif any(option.least_used and option.layout is None for option in left.options):
        yield f"No legal layout{such} that fits uses more of them."
    if whole and whole.step_time_s is not None:
        spare = f"With a spare in place of {'what is lost' if gone else 'the slow one'}"
        yield f"{spare}, {whole.devices_used:,} as {_shape(whole)}: {_beside(whole, best)}."


def _shape(option: LeftOption) -> str:
    """«TP 8 × PP 16 × DP 3», whose product is the devices that are used."""
    degrees_of = ((name, getattr(option.layout, name)) for name in ("tp", "cp", "pp", "dp"))
    return " × ".join(f"{name.upper()} {degree:,}" for name, degree in degrees_of if degree > 1) or "one device"


def _beside(other: LeftOption, best: LeftOption) -> str:
    """«17.0 s, 7.6 % longer»."""
    assert other.step_time_s is not None
    assert best.step_time_s is not None
    share = other.step_time_s / best.step_time_s - 1.0
    cut_short = "" if other.complete else f", {CUT_SHORT}"
    return f"{wording.seconds(other.step_time_s)}, {wording.percent(abs(share))} {'longer' if share > 0 else 'less'}{cut_short}"


def told_apart(options: Sequence[LeftOption]) -> Iterator[LeftOption]:
    """One of those that come to the same layout and step, as it reads, with the counts of devices of the others behind its own."""
    alike: dict[object, list[LeftOption]] = {}
    for option in options:
        step = wording.seconds(option.step_time_s or 0.0)
        kind = option.words if option.layout is None else (option.layout.model_dump_json(exclude={"overlap"}), step, option.slow)
        alike.setdefault(kind, []).append(option)
    for first, *others in alike.values():
        counts = sorted({option.devices for option in others} - {first.devices}, reverse=True)
        also = f", likewise {', '.join(f'{count:,}' for count in counts)}" if counts else ""
        yield first.model_copy(update={"words": f"{first.words}{also}"})


def slow_words(plan: Plan) -> list[Text]:
    """What the headline's step is of where a device of the plan is slow."""
    if plan.devices_left is None or (place := plan.devices_left.slow) is None:
        return []
    return [Text(f"this is with the slow device where it does least harm, stage {place.stage}{_elsewhere(place)}", style=DOUBT)]


def _slow(left: DevicesLeft) -> Iterator[Text]:
    """Where to put the slow device of the plan, and what that saves."""
    place = left.slow
    if place is None:
        return
    where = f"stage {place.stage} (rank {place.rank}, server {place.host})"
    step = wording.seconds(place.step_time_s)
    yield Text.assemble(("put the slow device into ", LABEL), (where, STRONG), f"   step {step}{_elsewhere(place)}")


def _elsewhere(place: SlowPlace) -> str:
    """What a step takes with the slow device where it does most harm, and without it."""
    worst = f"{wording.seconds(place.worst_step_time_s)} where it does most, stage {place.worst_stage}"
    if place.worst_step_time_s <= place.step_time_s * (1.0 + WORTH_SAYING):
        worst = "no more in any other"
    return f"; {worst}; {wording.seconds(place.spared_step_time_s)} if none were slow"


def _row(option: LeftOption, options: Sequence[LeftOption], ruled: bool) -> tuple[Text, Text, Text, Text]:
    style = STRONG if option.layout == options[0].layout and option.devices == options[0].devices else ""
    if option.step_time_s is None or option.layout is None:
        none = f"nothing faster{' keeps to the rule' * ruled}" if option.beaten else "nothing fits"
        none = f"no legal layout: {'; '.join(option.forbidden)}" if option.forbidden else none
        none = none if option.complete else f"nothing{' faster' * option.beaten} found, {CUT_SHORT}"
        return Text(option.words), Text("–"), Text("–"), Text(none)
    idle = f"{option.devices_idle:,}"
    return (
        Text(option.words, style=style),
        Text(wording.seconds(option.step_time_s), style=style),
        Text(idle),
        Text(degrees(option.layout) + ("" if option.complete else f", {CUT_SHORT}")),
    )


def _reserve(price: ReservePrice) -> Group:
    """What the reserve costs, and with how much less and more of it the step is another."""
    table = grid("right", "right", "left")
    table.add_row(*(Text(text, style=LABEL) for text in ("reserved", "step", "")))
    if price.before_s is not None and price.unreserved_s is not None:
        table.add_row(Text("nothing"), Text(wording.seconds(price.unreserved_s)), Text())
        saved = f"{wording.seconds(price.step_time_s - price.before_s)} less"
        table.add_row(Text(f"just below {price.since_gib:.3f} GiB"), Text(wording.seconds(price.before_s)), Text(saved))
    table.add_row(Text(f"{price.reserved_gib:g} GiB", style=STRONG), Text(wording.seconds(price.step_time_s), style=STRONG), Text())
    if price.until_gib is not None:
        step, more = "nothing fits", ""
        if price.after_s is not None:
            step, more = wording.seconds(price.after_s), f"{wording.seconds(price.after_s - price.step_time_s)} more"
        table.add_row(Text(f"from {price.until_gib:.3f} GiB"), Text(step), Text(more))
    doubt = [] if price.proved else [Text("not proved: the time limit ended a search", style=DOUBT)]
    note = Text(f"changes of the step under {100 * CHANGE:.1f} % are left out of the table", style=LABEL)
    return section("Reserved memory", Text(_reserve_words(price)), table, *doubt, note=note)


def _reserve_words(price: ReservePrice) -> str:
    """What all of a reserve costs and each GiB of it on the mean, its last one, and one more."""
    cost_s = price.step_time_s - (price.step_time_s if price.unreserved_s is None else price.unreserved_s)
    whole = f"{price.reserved_gib:g} GiB"
    if cost_s <= 0:
        said = f"The {whole} cost nothing"
    else:
        each = wording.seconds(cost_s / price.reserved_gib)
        last = wording.seconds(price.price_s_per_gib or 0.0)
        said = f"The {whole} cost {wording.seconds(cost_s)} a step, {each} a GiB on the mean, the last one {last}"
    if price.next_s_per_gib is None:
        return f"{said}; with one more nothing fits."
    if price.next_s_per_gib > 0 or price.until_gib is None:
        return f"{said}; one more costs {wording.seconds(price.next_s_per_gib)}."
    return f"{said}; up to {price.until_gib:.3f} GiB in all cost no more."


def checkpoint_section(traffic: CheckpointTraffic) -> Group:
    """What a checkpoint that drains beside training takes of a level, and what that costs."""
    first = "training's traffic first" if traffic.priority else "without a priority queue"
    head = Text.assemble(
        ("drains over ", LABEL),
        (traffic.level, STRONG),
        f"   {first}: {wording.gib(traffic.device_bytes / 2**30)} of every device in {wording.seconds(traffic.drain_s)}",
    )
    step = wording.seconds(traffic.draining_step_time_s)
    cost = Text.assemble(("step meanwhile ", LABEL), (step, STRONG), f"   {wording.change(traffic.slower)}")
    if traffic.taken:
        cost.append(f", {wording.percent(traffic.taken)} of the level's bandwidth gone where both send")
    lines = [head, cost]
    if traffic.interval_s is not None and traffic.mean_slower is not None:
        lines.append(
            Text.assemble(
                ("over the whole run ", LABEL),
                f"{wording.change(traffic.mean_slower)} with a save every {wording.seconds(traffic.interval_s)}",
            )
        )
    return section("Checkpoint traffic", *lines)
