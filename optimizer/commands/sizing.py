"""compare and size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ...search_spaces.errors import Infeasible, InputError
from ..streams import Meter
from .answers import Answer, at_least_one, refusal
from .options import AsJson, Cluster, GlobalBatch, Model, Precision, Profile, Quiet, SeqLen, StackName, number, whole

if TYPE_CHECKING:
    from ...search_spaces.cluster import ClusterSpec


def compare_command(
    model: Model,
    clusters: Annotated[
        str, typer.Option("--clusters", metavar="NAME|FILE,…", help="Clusters to compare: a catalog name or YAML each.")
    ],
    devices: Annotated[str, typer.Option("--devices", metavar="N[,N…]", help="Devices of each, or one number for all.")],
    global_batch: GlobalBatch,
    seq_len: SeqLen,
    precision: Precision = "bf16",
    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price",
            metavar="CLUSTER=P|FILE",
            help="Price of a device-hour, or a YAML of such pairs.",
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option("--sizes", metavar="P,P,…", help="MODEL at these sizes: 100B,500B,2T."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """Compare clusters by the best plan on each: step time, MFU, tokens, cost and energy."""
    from ...search_spaces.inputs import load_model
    from ..comparing import Field, compare, read_prices
    from ..training_run import amount

    machines, counts = _clusters(clusters, devices)
    field = Field(machines, counts, read_prices(price or (), [machine.name for machine in machines]))
    wanted = [amount(part, "--sizes") for part in sizes.split(",")] if sizes is not None else []
    once("--sizes", sizes or "", [f"{each:g}" for each in wanted])
    with Meter(shown=not (quiet or as_json)) as meter:
        found = compare(load_model(model), field, global_batch, seq_len, precision, wanted, meter)
    nothing = all(side.plan is None for row in found.rows for side in row.sides)
    if nothing:
        return refusal("no cluster has a plan", [f"{side.cluster}: {side.reason}" for side in found.rows[0].sides], as_json)
    if as_json:
        text = found.model_dump_json(indent=2, exclude_none=True)
        return Answer(lambda: print(text))

    def show() -> None:
        from rich.console import Console

        from ..reports.sizing import render_compared

        render_compared(found, Console())

    return Answer(show)


def size_command(
    model: Model,
    cluster: Cluster,
    tokens: Annotated[str, typer.Option("--tokens", metavar="D", help="Tokens to train on: 10T, 300B, 1e13.")],
    days: Annotated[float, typer.Option("--days", parser=number, metavar="D", help="Days that the run may take.")],
    global_batch: GlobalBatch,
    seq_len: SeqLen,
    stack: StackName = None,
    precision: Precision = "bf16",
    target_mfu: Annotated[
        float | None, typer.Option("--target-mfu", parser=number, metavar="F", help="Show beside it what a constant MFU would say.")
    ] = None,
    repair_days: Annotated[
        float | None,
        typer.Option(
            "--repair-days",
            parser=number,
            metavar="D",
            help="Days that a failed server is away, for the spares.",
        ),
    ] = None,
    profile: Profile = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """Say how many devices a run needs to be done in time, from real plans, failures and checkpoints included."""
    from ..sizing import size
    from ..training_run import amount, sized

    run = sized(
        model, cluster, amount(tokens, "--tokens"), days, global_batch, seq_len, stack=stack, precision=precision, profile=profile
    )
    try:
        with Meter(shown=not (quiet or as_json)) as meter:
            found = size(run, target_mfu=target_mfu, repair_days=repair_days, progress=meter)
    except Infeasible as error:
        return refusal(error.summary, error.reasons, as_json)
    if as_json:
        text = found.model_dump_json(indent=2, exclude_none=True)
        return Answer(lambda: print(text))

    def show() -> None:
        from rich.console import Console

        from ..reports.sizing import render_sizing

        render_sizing(found, Console())

    return Answer(show)


def _clusters(names: str, devices: str) -> tuple[tuple[ClusterSpec, ...], tuple[int, ...]]:
    """The clusters and the devices of each. InputError where the lists do not go together."""
    from ...search_spaces.inputs import check_devices, load_cluster

    if not _parts(names):
        raise InputError("--clusters: is empty; name clusters with commas between them, such as hgx-h100,gb200-nvl72")
    machines = tuple(load_cluster(name) for name in _parts(names))
    counts = [_devices(part, devices) for part in _parts(devices)]
    once("--clusters", names, [machine.name for machine in machines])
    if not counts or len(counts) not in (1, len(machines)):
        raise InputError(f"--devices {devices}: give one number for all of {names}, or one for each")
    counts = counts * len(machines) if len(counts) == 1 else counts
    for machine, count in zip(machines, counts, strict=True):
        at_least_one("--devices", count)
        check_devices(machine, count)
    return machines, tuple(counts)


def _devices(part: str, given: str) -> int:
    try:
        return whole(part)
    except typer.BadParameter as error:
        raise InputError(f"--devices {given}: {error.message}") from error


def once(flag: str, given: str, names: Sequence[str]) -> None:
    """InputError where one thing is listed twice."""
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise InputError(f"{flag} {given}: {twice} is given twice; leave one out")


def _parts(text: str) -> Sequence[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
