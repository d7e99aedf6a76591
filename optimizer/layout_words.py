"""--layout: names and values of one layout, and what follows from them where they are left out."""

from __future__ import annotations

from ..search_spaces.errors import InputError
from ..search_spaces.flags import COLUMN_VALUES, column_named, items
from ..search_spaces.layout import RANK_ORDERS, Layout, Problem, Split, Stage
from ..search_spaces.stack import Stack
from ..search_spaces.vocabulary import V_SHAPED
from .exporters.splits import parse_megatron_layout

STAGES = "stages"
"""Where blocks are cut: a layout string of Megatron-LM, or the decoder layers of every chunk with + between them."""


def parse_layout(text: str) -> dict[str, str]:
    """Column → value in its normal form, of "tp=8,pp=16,recompute=selective:mlp+moe". InputError names column and value."""
    given: dict[str, str] = {}
    for part in items(text, "layout"):
        name, equals, value = part.partition("=")
        if not equals or not value.strip():
            raise InputError(f"layout: {part!r} is not NAME=VALUE, such as tp=8")
        column = STAGES if name.strip().lower() == STAGES else column_named(name, "layout", COLUMN_VALUES)
        if column in given:
            raise InputError(f"layout: {column} is given twice; a layout has one value of each")
        given[column] = value.strip() if column == STAGES else _value(column, value.strip())
    return given


def complete(problem: Problem, given: dict[str, str]) -> Layout:
    """The layout with what was left out: dp takes up the devices, num_microbatches the batch, edp the devices of a stage.

    A quotient that does not come out whole is rounded down, for the rules to say so. A choice that is left out is Layout's own
    default or, where the stack does not offer that, the first that it does.
    """
    if STAGES in given:
        return _with_stages(problem, given)
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


def _with_stages(problem: Problem, given: dict[str, str]) -> Layout:
    """The layout cut as `stages` says, which sets vpp too. InputError where that is not the model or its degrees."""
    text, pp = given[STAGES], int(given.get("pp", 1))
    counts = _block_counts(text, problem.model.num_layers, problem.model.mtp.layers if problem.model.mtp else 0, pp)
    vpp, rest = divmod(len(counts), pp)
    if rest or given.get("vpp", str(vpp)) != str(vpp):
        raise InputError(f"layout: stages has {len(counts)} chunks, pp·vpp is {pp}·{given.get('vpp', '…')}.")
    layout = complete(problem, {**{name: value for name, value in given.items() if name != STAGES}, "vpp": str(vpp)})
    cuts = tuple(sum(counts[:chunk]) for chunk in range(len(counts) + 1))
    split = Split(pp, vpp, cuts, layout.schedule in V_SHAPED)
    return layout.model_copy(update={"stages": split.stages(problem.model.num_layers, layout.recompute)})


def _block_counts(text: str, layers: int, mtp: int, pp: int) -> list[int]:
    """Blocks of every chunk, MTP layers in the last unless a layout string puts them elsewhere."""
    if text.replace("+", "").isdigit():
        counts = [int(part) for part in text.split("+") if part]
        placed = sum(counts)
        counts[-1] += mtp
        found = mtp
    else:
        stages = parse_megatron_layout(text, pp)
        counts = [_blocks(stages, chunk, pp) for chunk in range(pp * len(stages[0].chunks))]
        found = sum(chunk.mtp for stage in stages for chunk in stage.chunks)
        placed = sum(counts) - found
    if (placed, found) != (layers, mtp):
        raise InputError(f"layout: stages hold {placed} decoder and {found} MTP layers, the model has {layers} and {mtp}.")
    return counts


def _blocks(stages: tuple[Stage, ...], chunk: int, pp: int) -> int:
    held = stages[chunk % pp].chunks[chunk // pp]
    return (held.layers[1] - held.layers[0] + 1 if held.layers else 0) + held.mtp


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


def _value(column: str, value: str) -> str:
    try:
        return COLUMN_VALUES[column](value)
    except ValueError as error:
        reason = str(error)
        raise InputError(f"layout: {reason if reason.startswith(column) else f'{column} = {value!r} {reason}'}") from error
