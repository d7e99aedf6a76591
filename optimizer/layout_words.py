"""--layout: names and values of one layout, and what follows from them where they are left out."""

from __future__ import annotations

from ..search_spaces.documents import did_you_mean
from ..search_spaces.errors import InputError
from ..search_spaces.flags import COLUMN_VALUES, refuse_unsupported
from ..search_spaces.layout import RANK_ORDERS, Layout, Problem
from ..search_spaces.stack import Stack
from ..search_spaces.vocabulary import V_SHAPED


def parse_layout(text: str) -> dict[str, str]:
    """Column → value in its normal form, of "tp=8,pp=16,recompute=selective:mlp+moe". InputError names column and value."""
    given: dict[str, str] = {}
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name, equals, value = part.partition("=")
        if not equals or not value.strip():
            raise InputError(f"layout: {part!r} is not NAME=VALUE, such as tp=8")
        column = _column(name)
        if column in given:
            raise InputError(f"layout: {column} is given twice; a layout has one value of each")
        given[column] = _value(column, value.strip())
    return given


def complete(problem: Problem, given: dict[str, str]) -> Layout:
    """The layout with what was left out: dp takes up the devices, num_microbatches the batch, edp the devices of a stage.

    A quotient that does not come out whole is rounded down, for the rules to say so. A choice that is left out is Layout's own
    default or, where the stack does not offer that, the first that it does.
    """
    usual = {"vpp": 2} if given.get("schedule") in V_SHAPED else {}
    degree = {name: int(given.get(name, usual.get(name, 1))) for name in ("tp", "cp", "pp", "ep", "etp", "vpp", "micro_batch")}
    stage = degree["tp"] * degree["cp"]
    dp = int(given.get("dp", max(1, problem.devices // (stage * degree["pp"]))))
    batch = problem.workload.global_batch
    return Layout.model_validate(
        {
            **_choices(problem.stack, degree["vpp"]),
            **degree,
            "dp": dp,
            "edp": max(1, stage * dp // (degree["ep"] * degree["etp"])),
            "num_microbatches": max(1, batch // (degree["micro_batch"] * dp)),
            **{name: value for name, value in given.items() if name not in degree},
        }
    )


def following_dp(problem: Problem, layout: Layout, devices: int) -> int | None:
    """The dp of a layout, its own left aside, on so many devices: the largest that leaves whole micro-batches and expert groups.

    None where no such dp uses more than half of what the other degrees leave room for.
    """
    stage, batch = layout.tp * layout.cp, problem.workload.global_batch
    room = devices // (stage * layout.pp)

    def whole(dp: int) -> bool:
        batches, rest = divmod(batch, layout.micro_batch * dp)
        grid = stage * dp % (layout.ep * layout.etp) == 0
        return grid and not rest and batches > 0 and (layout.vpp == 1 or batches % layout.pp == 0)

    return next((dp for dp in range(room, room // 2, -1) if whole(dp)), None)


def _choices(stack: Stack, vpp: int) -> dict[str, str]:
    offered = {
        "schedule": ("interleaved" if vpp > 1 else "1f1b", stack.schedules),
        "cp_type": ("p2p", stack.cp_types),
        "optimizer_sharding": ("zero1", stack.optimizer_shardings),
        "rank_order": (RANK_ORDERS[0], stack.rank_orders),
    }
    return {name: usual if usual in words else words[0] for name, (usual, words) in offered.items()}


def _column(name: str) -> str:
    column = name.strip().lower().replace("-", "_")
    if column not in COLUMN_VALUES:
        refuse_unsupported([column], "layout")
        near = did_you_mean(column, list(COLUMN_VALUES)) or f": {', '.join(COLUMN_VALUES)}"
        raise InputError(f"layout: {name.strip()!r} is not a column{near}")
    return column


def _value(column: str, value: str) -> str:
    try:
        return COLUMN_VALUES[column](value)
    except ValueError as error:
        reason = str(error)
        raise InputError(f"layout: {reason if reason.startswith(column) else f'{column} = {value!r} {reason}'}") from error
