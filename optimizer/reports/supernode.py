"""Sections on what a plan's supernodes make of it: its topology rule's cost, devices left idle, the price of reserved memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ..result import Plan
from ..supernode_result import CheckpointTraffic, DevicesLeft, InsideCost, LeftOption, ReservePrice, SlowPlace
from . import wording
from .drawing import DOUBT, GOOD, LABEL, STRONG, grid, section
from .further import degrees
from .imbalance import steps_section

WORTH_SAYING = 1e-3
"""Share of a step by which a stage has to be worse for a slow device before that is said."""


def supernode_sections(plan: Plan) -> Iterator[RenderableType]:
    """Those that the plan has something to say about."""
    if plan.inside is not None and (plan.inside.given or not plan.inside.kept or plan.inside.without is not None):
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
    """What keeping groups inside levels costs, and what would be faster without."""
    kept = "kept" if cost.kept else "nothing that keeps it fits"
    lines = [Text.assemble(("rule ", LABEL), (cost.rule, STRONG), f"   {kept}{'' if cost.given else ', by default'}")]
    if cost.without is None:
        lines.append(Text("it costs nothing: the best layout without it keeps to it", style=GOOD))
    else:
        with_s, without_s = wording.seconds(cost.step_time_s), wording.seconds(cost.step_time_without_s)
        lines.append(
            Text.assemble(("it costs ", LABEL), (f"{cost.slower:.1%}", DOUBT), f"   {with_s} against {without_s} without it:")
        )
        lines.append(Text(f"{degrees(cost.without)}   on {cost.without.devices:,} devices"))
    if not cost.proved:
        lines.append(Text("not proved: the time limit ended a search", style=DOUBT))
    return section("What the topology rule costs", *lines)


def _left(left: DevicesLeft, ruled: bool) -> Group:
    """How many devices the job has, what it does with them, and the other ways to go on, all under the topology rule if `ruled`."""
    counts = Counter(left.free)
    free = ", ".join(f"{units:,} × {size:,}" for size, units in counts.items())
    idle = f"{left.used:,} used, {left.idle:,} idle" if left.idle else f"all {left.used:,} used"
    table = grid("wrap", "right", "right", "wrap")
    ways, where = ("spreads", "as allocated") if left.open else ("ways to go on", "free in supernodes")
    table.add_row(*(Text(text, style=LABEL) for text in (ways, "step", "idle", "layout")))
    for option in (*left.options, *((left.whole,) if left.whole else ())):
        table.add_row(*_row(option, left.options, ruled))
    head = Text.assemble((f"{where} ", LABEL), free, f"   {idle}")
    return section("Devices over supernodes" if left.open else "Devices left", head, *_slow(left), Text(), table)


def slow_words(plan: Plan) -> list[Text]:
    """What the headline's step is of where a device of the plan is slow."""
    if plan.devices_left is None or (place := plan.devices_left.slow) is None:
        return []
    return [Text(f"that is with the slow device in stage {place.stage}, as advised below{_elsewhere(place)}", style=DOUBT)]


def _slow(left: DevicesLeft) -> Iterator[Text]:
    """Where to put the slow device of the plan, and what that saves."""
    place = left.slow
    if place is None:
        return
    where = f"stage {place.stage} (rank {place.rank}, server {place.host})"
    step = wording.seconds(place.step_time_s)
    yield Text.assemble(("put the slow device into ", LABEL), (where, STRONG), f"   step {step}{_elsewhere(place)}")


def _elsewhere(place: SlowPlace) -> str:
    """What a step would take without the slow device, and with it where it does most harm."""
    said = f"; {wording.seconds(place.spared_step_time_s)} if none were slow"
    if place.worst_step_time_s > place.step_time_s * (1.0 + WORTH_SAYING):
        said += f", {wording.seconds(place.worst_step_time_s)} with it in stage {place.worst_stage}"
    return said


def _row(option: LeftOption, options: Sequence[LeftOption], ruled: bool) -> tuple[Text, Text, Text, Text]:
    style = STRONG if option is options[0] else ""
    if option.step_time_s is None or option.layout is None:
        none = f"nothing faster{' keeps to the rule' * ruled}" if option.beaten else "nothing fits"
        return Text(option.words), Text("–"), Text("–"), Text(none)
    idle = f"{option.devices_idle:,}"
    return (
        Text(option.words, style=style),
        Text(wording.seconds(option.step_time_s), style=style),
        Text(idle),
        Text(degrees(option.layout)),
    )


def _reserve(price: ReservePrice) -> Group:
    """Seconds that the last GiB of the reserve costs, and that one more would."""
    table = grid("right", "right", "wrap")
    table.add_row(*(Text(text, style=LABEL) for text in ("reserved", "step", "each GiB")))
    less = price.reserved_gib - price.step_gib
    if price.less_s is not None:
        table.add_row(Text(wording.gib(less)), Text(wording.seconds(price.less_s)), Text())
    paid = "" if price.price_s_per_gib is None else f"{price.price_s_per_gib * 1e3:.0f} ms for the last"
    table.add_row(
        Text(wording.gib(price.reserved_gib), style=STRONG), Text(wording.seconds(price.step_time_s), style=STRONG), Text(paid)
    )
    more = Text("nothing fits") if price.more_s is None else Text(wording.seconds(price.more_s))
    next_gib = "" if price.next_s_per_gib is None else f"{price.next_s_per_gib * 1e3:.0f} ms for one more"
    table.add_row(Text(wording.gib(price.reserved_gib + price.step_gib)), more, Text(next_gib))
    doubt = [] if price.proved else [Text("not proved: the time limit ended a search", style=DOUBT)]
    return section("Reserved memory", table, *doubt)


def checkpoint_section(traffic: CheckpointTraffic) -> Group:
    """What a checkpoint that drains beside training takes of a level, and what that costs."""
    first = "training's traffic first" if traffic.priority else "without a priority queue"
    head = Text.assemble(
        ("drains over ", LABEL),
        (traffic.level, STRONG),
        f"   {first}: {wording.gib(traffic.device_bytes / 2**30)} of every device in {wording.seconds(traffic.drain_s)}",
    )
    step = wording.seconds(traffic.draining_step_time_s)
    cost = Text.assemble(("step meanwhile ", LABEL), (step, STRONG), f"   {traffic.slower:+.1%}")
    if traffic.taken:
        cost.append(f", {traffic.taken:.0%} of the level's bandwidth gone where both send")
    lines = [head, cost]
    if traffic.interval_s is not None and traffic.mean_slower is not None:
        lines.append(
            Text.assemble(("over all ", LABEL), f"{traffic.mean_slower:+.2%}, saved every {wording.seconds(traffic.interval_s)}")
        )
    return section("Checkpoint traffic", *lines)
