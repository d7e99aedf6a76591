"""What a plan says of its supernodes: what a rule costs, what lost devices leave, what a reserve takes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from ..search_spaces.layout import Layout


class Record(BaseModel):
    """Base of the records of this module."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class InsideCost(Record):
    """The best step with groups kept inside levels as `rule` says, and without that.

    `given`: by the user, else by default; a default one that nothing which fits meets is not `kept`. `slower` is the plan's share
    above the best without the rule, which is `without`, None where the plan is. `proved`: both were searched to the end.
    """

    rule: str
    given: bool
    kept: bool = True
    step_time_s: float
    step_time_without_s: float
    slower: float
    without: Layout | None = None
    proved: bool


class SlowPlace(Record):
    """Where a slow device does least harm: in `stage`, whose first rank is `rank` on server `host` in the order of NODE_RANK.

    The step with it there, in the stage where it does most, and with no device slow.
    """

    stage: int
    rank: int
    host: int
    step_time_s: float
    worst_stage: int
    worst_step_time_s: float
    spared_step_time_s: float


class LeftOption(Record):
    """A way to go on: how many devices it is planned for, how many of them the best layout uses, and its step.

    No figures where nothing fits, or where it was searched only for what is faster than others and is `beaten`; unless it was
    searched to its end, `complete`, there may be more. With a slow device in it the step is that with the device where it does the
    least harm, `slow`. Only layouts that use `least_used` devices or more were looked at. `forbidden`: which rules leave no layout
    that is legal.
    """

    words: str
    devices: int
    per_supernode: int
    devices_used: int | None = None
    devices_idle: int | None = None
    step_time_s: float | None = None
    layout: Layout | None = None
    slow: SlowPlace | None = None
    beaten: bool = False
    complete: bool = True
    least_used: int = 0
    forbidden: tuple[str, ...] = ()

    @property
    def in_supernodes(self) -> tuple[int, ...]:
        """Devices in each supernode: as many in all but a last, which has the rest."""
        whole, rest = divmod(self.devices, self.per_supernode)
        return (*[self.per_supernode] * whole, *([rest] if rest else []))


class DevicesLeft(Record):
    """What the job has and what it makes of it: `free` devices in each supernode, `idle` of them in the plan.

    `options` were compared, the plan's first; `whole` is the job without losses, as a spare would keep it. `open`: how many lie in
    each supernode was the plan's to choose, and `free` is how they are allocated.
    """

    free: tuple[int, ...]
    devices: int
    used: int
    idle: int
    options: tuple[LeftOption, ...]
    whole: LeftOption | None = None
    open: bool = False

    @property
    def in_part(self) -> bool:
        """Whether no option has all devices: shares that are not equal but for a last one are not planned for."""
        return all(option.devices < self.devices for option in self.options)

    @property
    def told(self) -> tuple[int, ...]:
        """Devices free in each supernode, where that was said or follows from a loss; else none."""
        return () if self.open else self.free

    @property
    def slow(self) -> SlowPlace | None:
        """Where the plan's slow device does least harm, if it has one."""
        return self.options[0].slow if self.options else None


class StepAt(Record):
    """The layout's step time if the fullest rank receives `imbalance` times the mean; `of` says whose imbalance it is.

    `memory_verdict`: whether the fullest stage fits then.
    """

    imbalance: float
    step_time_s: float
    of: str = ""
    memory_verdict: Literal["fits", "unsure", "oom"]


class CheckpointTraffic(Record):
    """What draining checkpoints take of a level, and from training.

    Each device sends `device_bytes` in `drain_s`, for which it has the share `taken` of the level while training sends too; the
    step is then `draining_step_time_s`, `slower` by that share. `interval_s` between checkpoints where failures are known: over
    all of it steps are `mean_slower`. With `priority` training's traffic goes first.
    """

    level: str
    priority: bool
    device_bytes: float
    taken: float
    drain_s: float
    draining_step_time_s: float
    slower: float
    interval_s: float | None = None
    mean_slower: float | None = None


class ReservePrice(Record):
    """The step with `reserved_gib` of every device kept free, with nothing, and with `step_gib` less and more; None: nothing fits.

    From `since_gib` reserved the step is the plan's, with less it is `before_s`; with `until_gib` it is `after_s`, longer.
    `price_s_per_gib`: what the last GiB of the reserve costs, `next_s_per_gib` what one more would. `proved`: all were searched
    to the end; else the prices may be those of searches that were cut short.
    """

    reserved_gib: float
    step_gib: float
    step_time_s: float
    unreserved_s: float | None = None
    since_gib: float = 0.0
    before_s: float | None = None
    until_gib: float | None = None
    after_s: float | None = None
    less_s: float | None = None
    more_s: float | None = None
    price_s_per_gib: float | None = None
    next_s_per_gib: float | None = None
    proved: bool = True
