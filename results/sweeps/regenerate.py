"""Runs the sweeps and writes down their tables, pictures and what they say: python results/sweeps/regenerate.py [--store FILE]

With a store that is kept, what is in it already is not planned again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paraplan.optimizer.reports.sweep_plots import pictures
from paraplan.optimizer.sweeps.grid import alike, read_sweep
from paraplan.optimizer.sweeps.series import device_hours, is_planned, layout_words, strategy, with_efficiencies
from paraplan.optimizer.sweeps.store import Store
from paraplan.optimizer.sweeps.table import EFFICIENCIES, Row, rows_of, write_csv
from paraplan.optimizer.writing import write_file
from paraplan.search_spaces.documents import read_document
from paraplan.search_spaces.inputs import load_cluster

HERE = Path(__file__).parent
LARGEST, DENSE = "moe:10T", "dense:70B"
FIXED, SCALED = EFFICIENCIES
LIKENESS = "share_of_peak_or_cost"


@dataclass(frozen=True)
class Sweep:
    """A YAML beside this file, what it is about, the pictures that are kept of it, and five lines on what it says."""

    name: str
    title: str
    words: str
    kept: tuple[str, ...]
    learnt: Callable[[Sequence[Row]], list[str]]


def main(store: str) -> None:
    sections = []
    for sweep in SWEEPS:
        file = HERE / f"{sweep.name}.yaml"
        rows = with_likeness(planned(file, store), file)
        write_csv([{**row, "seconds": None} for row in rows], HERE / f"{sweep.name}.csv")  # seconds differ from run to run
        drawn = pictures(rows)
        for picture in sweep.kept:
            write_file(HERE / f"{sweep.name}-{picture}", drawn[picture])
        sections.append(section(sweep, rows))
    write_file(HERE / "README.md", HEAD + "\n".join(sections))


def planned(path: Path, store: str) -> list[Row]:
    """All points of a sweep, with how well they scale beside each."""
    subprocess.run([sys.executable, "-m", "paraplan.optimizer.cli", "sweep", str(path), "--store", store], check=True)
    opened = Store(store, write=False)
    rows = [row for _, row in rows_of(opened, [point.key for point in read_sweep(path)])]
    opened.close()
    return with_efficiencies(rows)


def with_likeness(rows: Sequence[Row], file: Path) -> list[Row]:
    """Beside each row of as much peak or price as another cluster's, what share of that was reached."""
    share = {(cluster, found.devices): round(found.share, 4) for cluster, _, found in alike(file)}
    return [{**row, LIKENESS: share[row["cluster"], row["devices"]]} if share else row for row in rows]


def section(sweep: Sweep, rows: Sequence[Row]) -> str:
    count, without = len(rows), sum(not is_planned(row) for row in rows)
    lines = "\n".join(f"{number}. {line}" for number, line in enumerate(sweep.learnt(rows), start=1))
    shown = "\n\n".join(f"![{sweep.title}: {Path(name).stem}]({sweep.name}-{name})" for name in sweep.kept)
    return f"""## {sweep.title}

{sweep.words} [{sweep.name}.yaml]({sweep.name}.yaml), {count} points, {without or "none"} without a plan;
[{sweep.name}.csv]({sweep.name}.csv) is the table of its store.

{lines}

{shown}
"""


HEAD = """# Sweeps

`python results/sweeps/regenerate.py` writes this page, its tables and its pictures. By the cost model alone, in BF16; devices are
what software addresses (a die of 910C is one). Models are of the scaling families (`search_spaces/scaling_families.py`). The
pictures are those of `paraplan sweep --store FILE --show "" --plot DIR`, which also writes them as one page with filters. In the
tables, efficiency is tokens per second and device over those of the fewest devices that have a plan, at a batch that stays and at
one that grows with the devices, beside every point that has another to be set against: the same batch, or as many sequences for
every device, on another count. A point is proved best in its space (`optimal`) unless the table says otherwise.

"""


# --- what they say -----------------------------------------------------------------------------------------------------------


def at(rows: Iterable[Row], **wanted: object) -> list[Row]:
    """Planned rows with these values."""
    return [row for row in rows if is_planned(row) and all(row[name] == value for name, value in wanted.items())]


def each(rows: Iterable[Row], said: Callable[[Row], str], by: str = "cluster") -> str:
    return ", ".join(f"{said(row)} on {row[by]}" for row in rows)


def missing(rows: Iterable[Row]) -> str:
    names = [f"{row['model']} on {row['devices']:,} of {row['cluster']}" for row in rows if not is_planned(row)]
    return f"no plan for {', '.join(dict.fromkeys(names))}" if names else "every point has a plan"


def shares(rows: Sequence[Row]) -> str:
    return each(rows, lambda row: f"{row['mfu']:.0%}")


def spread(values: Iterable[float]) -> str:
    found = sorted(values)
    return f"{found[0]:.0%} to {found[-1]:.0%}"


def so(words: str, holds: bool) -> str:
    """A sentence that explains figures. AssertionError once they no longer say so: it is to be written anew."""
    assert holds, f"the rows no longer say: {words}"
    return words


def equal_counts(rows: Sequence[Row]) -> list[str]:
    most = [row for row in rows if row["devices"] == 4096]
    grown = at(most, global_batch=16384)
    large, dense = (at(grown, model=name) for name in (LARGEST, DENSE))
    best = max(large, key=lambda row: row["tokens_per_s"])
    worst = min(large, key=lambda row: row["tokens_per_s"])
    fixed = spread(row[FIXED] for row in at(most, global_batch=4096) if row[FIXED])
    scaled = spread(row[SCALED] for row in grown if row[SCALED])
    times = best["tokens_per_s"] / worst["tokens_per_s"]
    crossing = each(large, lambda row: f"{row['cross_supernode_share']:.0%}")
    apart = [max(row["mfu"] for row in some) / min(row["mfu"] for row in some) for some in (dense, large)]
    short = any(row[FIXED] > 1.0 for row in at(most, global_batch=4096) if row[FIXED])
    return [
        f"MFU of {DENSE} on 4,096 devices, 4 sequences each: {shares(dense)}. Of {LARGEST}: {shares(large)}. "
        + so("Dense models hardly tell supernodes apart, the all-to-all of experts does.", apart[0] < 1.1 and apart[1] > 1.5),
        f"Of the bytes of {LARGEST} that travel between devices, {crossing} leave their supernode.",
        so("Equal counts are not equal machines", times > 1.5)
        + f": {LARGEST} runs {times:.1f} times as fast on {best['cluster']} as on "
        f"{worst['cluster']}. The next two sweeps compare what has one peak, or one price.",
        f"From 1,024 to 4,096 devices the rate per device is {scaled} of what it was where the batch grows with the devices, and "
        f"{fixed} where it stays{' (more than all of it where memory was short on 1,024)' if short else ''}.",
        f"{so('Memory decides first', len(at(rows)) < len(rows))}: {missing(rows)}.",
    ]


def equal_peak(rows: Sequence[Row]) -> list[str]:
    def rate(row: Row) -> float:
        peak = load_cluster(row["cluster"]).accelerator.peak_flops["bf16"].value * row["devices"]
        return float(row["tokens_per_s"] / peak * 1e18)

    def said(some: Sequence[Row]) -> str:
        return f"{each(some, lambda row: f'{rate(row):,.0f}')}, {ratio(some, rate)} apart"

    most = of_most(rows)
    large, dense, moe = (at(most, model=name, global_batch=8960) for name in (LARGEST, DENSE, "moe:600B"))
    small = at(most, model=LARGEST, global_batch=4480)
    rates = {row["cluster"]: row["tokens_per_s"] for row in large}
    loses = all(row["tokens_per_s"] < rates[row["cluster"]] for row in small if row["cluster"] in rates)
    return [
        f"2,560 H100 have the peak of {counted(most)}. Rates below are on these, 8,960 sequences a step, in tokens per second for "
        "each EFLOP/s of peak, so that what is left of the difference does not count.",
        f"{DENSE}: {said(dense)}.",
        f"moe:600B: {said(moe)}. {LARGEST}: {said(large)}.",
        f"{so('A large batch keeps more devices busy', loses)}: with 4,480 sequences instead of 8,960, {LARGEST} keeps "
        f"{kept(small, large)} of its rate. {scaling(rows)}",
        f"Memory comes with the count, not with the peak: {missing(rows)}.",
    ]


def equal_cost(rows: Sequence[Row]) -> list[str]:
    prices = read_document(HERE / "7b-to-10t-equal-cost.yaml")["prices"]

    def paid(row: Row) -> float:
        return float(device_hours(row) * prices[row["cluster"]])

    most = of_most(rows)
    lines = [
        f"At the example prices 3,072 H100 cost an hour what {counted(most)} do. Money below is on these, 9,600 sequences a step. "
        + scaling(rows)
    ]
    orders = set()
    for model in (DENSE, "moe:600B", LARGEST):
        some = at(most, model=model, global_batch=9600)
        orders.add(tuple(row["cluster"] for row in sorted(some, key=paid)))
        cheap = min(some, key=paid)
        others = [row for row in some if row is not cheap]
        even = each(others, lambda row: f"{prices[row['cluster']] * paid(cheap) / paid(row):.2f}")  # noqa: B023 - called at once
        cost = each(some, lambda row: f"{paid(row):.3g}")
        lines.append(
            f"{model}: a million tokens cost {cost}; the others would cost as little as {cheap['cluster']} at {even} an hour."
        )
    moves = so("The order of clusters is one of prices, and it moves with the model", len(orders) > 1)
    lines.append(f"{moves}: put in your own and run it again.")
    return lines


def deepseek(rows: Sequence[Row]) -> list[str]:
    h800, dies = (by(at(rows, global_batch=15360, cluster=name), "devices") for name in ("hgx-h800", "cloudmatrix-384"))
    grown = spread(row[SCALED] for row in at(rows) if row["global_batch"] == 7.5 * row["devices"] and row[SCALED])
    published = at(h800, devices=2048)[0]
    falls = all(some[-1][FIXED] < 0.95 for some in (h800, dies))
    ends = min(row[SCALED] for row in at(rows) if row["global_batch"] == 7.5 * row["devices"] and row[SCALED])
    dearer = [device_hours(some[-1]) / min(map(device_hours, some)) - 1.0 for some in (h800, dies)]
    return [
        f"On 2,048 H800, the published run, the best is {layout_words(published)}, MFU {published['mfu']:.1%} in BF16.",
        f"At the published batch of 15,360 sequences the rate per device falls to {h800[-1][FIXED]:.0%} on {h800[-1]['devices']:,} "
        f"H800 and to {dies[-1][FIXED]:.0%} on {dies[-1]['devices']:,} dies{so(': micro-batches run out', falls)}.",
        f"With 7.5 sequences for every device it is {grown} over the whole range: "
        + so("the batch, more than the network, stops scaling.", ends > max(h800[-1][FIXED], dies[-1][FIXED])),
        f"What wins by count: {turns(h800)} on hgx-h800; {turns(dies)} on cloudmatrix-384.",
        f"At the published batch a token costs least on {cheapest(h800)} H800 and on {cheapest(dies)} dies; on "
        f"{h800[-1]['devices']:,} it takes {dearer[0]:.0%} and {dearer[1]:.0%} more device-hours: "
        + so("time has its price.", min(dearer) > 0.0),
    ]


def lengths(rows: Sequence[Row]) -> list[str]:
    names = list(dict.fromkeys(row["cluster"] for row in rows))
    found = {name: by(at(rows, cluster=name), "seq_len") for name in names}

    def of_each(said: Callable[[list[Row]], str], joint: str = "; ") -> str:
        return joint.join(f"{said(some)} on {name}" for name, some in found.items())

    def first(some: list[Row], grown: Callable[[Row], bool]) -> str:
        return next((f"{row['seq_len'] // 1024}K" for row in some if grown(row)), "none of these lengths")

    rates = of_each(lambda some: f"{some[0]['tokens_per_s_per_device']:,.0f} to {some[-1]['tokens_per_s_per_device']:,.0f}", ", ")
    flops = of_each(lambda some: f"{some[0]['mfu']:.0%} to {some[-1]['mfu']:.0%}", ", ")
    worst = min(found.values(), key=lambda some: some[-1]["mfu"] / some[0]["mfu"])
    falls = f"{worst[0]['cluster']}, of whose traffic {worst[-1]['cross_supernode_share']:.0%} leaves the supernode then"
    groups = of_each(lambda some: f"tp·cp {some[0]['tp'] * some[0]['cp']} to {some[-1]['tp'] * some[-1]['cp']}", ", ")
    ends = of_each(lambda some: f"{layout_words(some[0])} to {layout_words(some[-1])}")
    redone = of_each(lambda some: first(some, lambda row: row["recompute"] != "none"), ", ")
    attention = all(
        some[-1]["tokens_per_s_per_device"] / some[0]["tokens_per_s_per_device"] < 0.5 * some[-1]["mfu"] / some[0]["mfu"]
        for some in found.values()
    )
    grows = all(some[-1]["tp"] * some[-1]["cp"] > 8 * some[0]["tp"] * some[0]["cp"] for some in found.values())
    return [
        f"From 4K to 1M tokens the rate per device goes from {rates}: {so('mostly by the attention of a token.', attention)}",
        f"MFU, which counts that attention, goes from {flops}. It falls most on {falls}.",
        f"A sequence is divided over {groups}: {so('four sequences leave little but itself to divide by.', grows)}",
        f"Layouts go from {ends}.",
        f"Something is recomputed from {redone} on; {missing(rows)}.",
    ]


def by(rows: Iterable[Row], name: str) -> list[Row]:
    return sorted(rows, key=lambda row: row[name])


def counted(rows: Iterable[Row]) -> str:
    counts = {row["cluster"]: row for row in rows if row["cluster"] != "hgx-h100"}
    return ", ".join(f"{row['devices']:,} on {name} ({row[LIKENESS]:.2f} of it)" for name, row in counts.items())


def of_most(rows: Sequence[Row]) -> list[Row]:
    """The rows of the most devices of each cluster."""
    most = {row["cluster"]: row["devices"] for row in by(rows, "devices")}
    return [row for row in rows if row["devices"] == most[row["cluster"]]]


def scaling(rows: Sequence[Row]) -> str:
    """How well all models scale to the most devices of each cluster."""
    found = [[row[name] for row in of_most(rows) if row[name]] for name in EFFICIENCIES]
    fixed, scaled = map(spread, found)
    short = " (more than all of it where memory was short on fewer)" if max(map(max, found)) > 1.0 else ""
    return f"On twice the devices the rate per device is {scaled} where the batch grows as they do, {fixed} where it stays{short}."


def ratio(rows: Sequence[Row], of: Callable[[Row], float]) -> str:
    return f"{max(map(of, rows)) / min(map(of, rows)):.2f} times"


def kept(small: Sequence[Row], large: Sequence[Row]) -> str:
    rates = {row["cluster"]: row["tokens_per_s"] for row in large}
    return each([row for row in small if row["cluster"] in rates], lambda row: f"{row['tokens_per_s'] / rates[row['cluster']]:.0%}")


def turns(rows: Sequence[Row]) -> str:
    """Strategies from the fewest devices on, where they change."""
    found: list[tuple[int, str]] = []
    for row in rows:
        if not found or found[-1][1] != strategy(row):
            found.append((row["devices"], strategy(row)))
    return ", ".join(f"{name} from {devices:,}" for devices, name in found)


def cheapest(rows: Sequence[Row]) -> str:
    return f"{min(rows, key=device_hours)['devices']:,}"


SWEEPS = (
    Sweep(
        "7b-to-10t",
        "7B to 10T on four supernodes, at equal counts of devices",
        "Two dense models and two of experts on 1,024 and 4,096 devices.",
        ("strategies.png", "curves.svg"),
        equal_counts,
    ),
    Sweep(
        "7b-to-10t-equal-peak",
        "The same at equal peak",
        "As many devices as have the dense BF16 peak of 1,280 and of 2,560 H100.",
        ("strategies.png",),
        equal_peak,
    ),
    Sweep(
        "7b-to-10t-equal-cost",
        "The same at equal cost",
        "As many devices as cost an hour what 1,536 and 3,072 H100 do.",
        ("strategies.png",),
        equal_cost,
    ),
    Sweep(
        "deepseek-v3",
        "DeepSeek-V3 over 256 to 16,384 devices",
        "At the batch of its own run, and at one that grows with the devices.",
        ("strategies.png", "curves.svg", "fronts.svg"),
        deepseek,
    ),
    Sweep(
        "sequence-length",
        "Sequences of 4K to 1M tokens for a 70B",
        "On 1,024 devices, four million tokens (4·2²⁰) a step.",
        ("strategies.png", "curves.svg"),
        lengths,
    ),
)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--store")
    given = parser.parse_args().store
    with tempfile.TemporaryDirectory() as folder:
        main(given or str(Path(folder) / "sweep.sqlite"))
