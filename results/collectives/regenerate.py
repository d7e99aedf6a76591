"""Collectives and token exchanges beside measured ones: python results/collectives/regenerate.py MEASURED_DIR

MEASURED_DIR holds collectives.csv and moe_all_to_all.csv. Every curve is fitted anew to half of the points of its table, as on a
chessboard of sizes, group sizes and multiprocessors, and compared with the other half. Token exchanges are priced once more the way
a plan prices them, over the levels of a catalog cluster, on rows of kinds that no curve was fitted to too.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from paraplan.cost_models.collective_fit import (
    BF16_BYTES,
    DEEP_EP,
    MessageFit,
    Rows,
    collective_fits,
    dealt_destinations,
)
from paraplan.cost_models.kernel_fit import read_tables
from paraplan.cost_models.kernel_tables import devices, kernel_tables
from paraplan.cost_models.log_fit import chessboard, column
from paraplan.cost_models.network import Network
from paraplan.cost_models.profile import Profile, load_profile
from paraplan.cost_models.routing import Routing
from paraplan.search_spaces.cluster import ClusterSpec
from paraplan.search_spaces.groups import Groups
from paraplan.search_spaces.inputs import load_cluster
from paraplan.search_spaces.libraries import deep_ep

HERE = Path(__file__).parent
PROFILES = ("a100-80gb-sxm", "h100-80gb-sxm", "h200", "b200", "b300", "gb200", "gb300")
BANDS = (("to 64 KiB", 0.0, 2.0**16), ("to 4 MiB", 2.0**16, 2.0**22), ("beyond", 2.0**22, np.inf))
PHASES = ("dispatch", "combine")
CLUSTERS = {f"{name}_sxm": f"hgx-{name}" for name in ("h100", "h200", "b200", "b300")}
CLUSTERS |= {"gb200": "gb200-nvl72", "gb300": "gb300-nvl72"}
VALUE_BYTES = {"bfloat16": BF16_BYTES, "fp8": deep_ep().fp8_bytes, "nvfp4": 0.5 + 1 / 16}  # one FP8 scale for 16 values of FP4
MIB = 2.0**20
LEAF_SERVERS = 4
"""Servers up to which the table's fabric carries all that its adapters send."""
Found = Mapping[tuple[str, str, str], tuple[MessageFit, NDArray[np.float64]]]


@dataclass(frozen=True)
class Exchange:
    """A measured exchange of tokens, how far its price is off (predicted over measured less one), and whether it was fitted."""

    system: str
    kernel: str
    ranks: int
    sms: str
    phase: str
    error: float
    fitted: bool = True


@dataclass(frozen=True)
class Dealt(Routing):
    """Experts dealt to tokens in turn, as the table's NVLink kernels were timed: no rank gets more than another."""

    def units_hit(self, units: NDArray[np.float64]) -> NDArray[np.float64]:
        return dealt_destinations(units, np.asarray(float(self.top_k)), units)


def held_out(tables: Mapping[str, Rows]) -> Found:
    """By accelerator, section and curve: the fit, and relative errors of the half-fitted curve at every point."""
    found = {}
    for name in PROFILES:
        for section, curve, fit in collective_fits(tables, devices()[name]):
            found[name, section, curve] = fit, fit.points.predicted_s(fit.half) / fit.points.measured_s - 1.0
    return found


def exchanges(rows: Rows, found: Found | None = None, spine: float = 1.0) -> Iterator[Exchange]:
    """Every exchange of tokens of a table, once, priced over the cluster's levels as a plan would.

    With `found` by the curves that were fitted to half of the rows. `spine`: how far the links between groups of four servers are
    oversubscribed.
    """
    fits = [fit for fit, _ in (found or {}).values()]
    fitted = {id(row) for fit in fits for row, chosen in zip(fit.rows, fit.points.fitted, strict=True) if chosen}
    alike: dict[tuple[str, ...], list[Mapping[str, str]]] = defaultdict(list)
    for row in rows:
        repeated = row["system"] == "h200_sxm" and row["nodes"] != "1"
        if row["phase"].removesuffix("_low_precision") in PHASES and not repeated:
            same = ("system", "kernel", "dtype", "ep", "nodes", "sms", "phase", "hidden", "topk", "experts")
            alike[tuple(row[name] for name in same)].append(row)
    networks: dict[tuple[str, int, str], Network] = {}
    for chosen in alike.values():
        first = chosen[0]
        key = first["system"], ranks_of(first), first["sms"]
        if key not in networks:
            networks[key] = network_of(*key, found or {}, spine)
        seconds = priced(networks[key], chosen)
        for row, error in zip(chosen, seconds / (column(chosen, "latency_us") * 1e-6) - 1.0, strict=True):
            phase = row["phase"].removesuffix("_low_precision")
            yield Exchange(row["system"], kernel_of(row), key[1], row["sms"], phase, float(error), id(row) in fitted)


def ranks_of(row: Mapping[str, str]) -> int:
    """Ranks of the group: as the row says, or what its hosts hold."""
    return int(row["ep"] or kernel_tables().deepep_ranks.of(row["system"]) * int(row["nodes"]))


def kernel_of(row: Mapping[str, str]) -> str:
    """The dispatcher in words, with the width of what it sends where that differs from row to row."""
    if row["kernel"] == DEEP_EP:
        return "DeepEP"
    width = {"bfloat16": "BF16", "fp8": "FP8", "nvfp4": "FP4"}[row["dtype"]]
    low = ", combined in FP4" if row["phase"].endswith("_low_precision") else ""
    return row["kernel"].removeprefix("trtllm-NVLink").replace("Sided", "-sided ").lower() + width + low


def network_of(system: str, ranks: int, sms: str, found: Found, spine: float) -> Network:
    """The network of a job of `ranks` devices whose exchanges are DeepEP's where the row names their multiprocessors."""
    spec = with_spine(load_cluster(CLUSTERS[system]), spine)
    name = spec.accelerator.name
    half = {(section, curve): fit.half for (of, section, curve), (fit, _) in found.items() if of == name}
    profile = with_curves(load_profile(name), half)
    sizes = spec.allocated_sizes(ranks)
    return Network(spec, profile, sizes, backend="deepep", sms=int(sms)) if sms else Network(spec, profile, sizes)


def with_curves(profile: Profile, curves: Mapping[tuple[str, str], object]) -> Profile:
    """The profile with some of its curves replaced."""
    sections = {section: dict(known) for section, known in profile.collectives.items()}
    for (section, name), curve in curves.items():
        sections[section][name] = curve  # type: ignore[assignment]
    return profile.model_copy(update={"collectives": sections})


def with_spine(spec: ClusterSpec, oversubscription: float) -> ClusterSpec:
    """The cluster with its servers in groups of four, between which links are oversubscribed; as it is without oversubscription."""
    if oversubscription == 1.0:
        return spec
    *inside, out = spec.levels
    leaf = out.model_copy(update={"name": "leaf", "size": LEAF_SERVERS * (inside[-1].size or 1)})
    return spec.model_copy(update={"levels": (*inside, leaf, out.model_copy(update={"oversubscription": oversubscription}))})


def priced(network: Network, rows: Rows) -> NDArray[np.float64]:
    """Seconds of rows that differ in their tokens only."""
    first = rows[0]
    at = network.crossing(Groups(np.full(len(rows), ranks_of(first)), np.ones(len(rows), dtype=np.int64)))
    narrow = deep_ep().fp8_bytes if first["kernel"] == DEEP_EP else VALUE_BYTES[first["dtype"]]
    copy_bytes = float(first["hidden"]) * (BF16_BYTES if first["phase"] == "combine" else narrow)
    routing = (Routing if first["kernel"] == DEEP_EP else Dealt)(int(first["topk"]), int(first["experts"]))
    kernel = "moe_dispatch" if first["phase"] == "dispatch" else "moe_combine"
    return network.exchange_s(at, column(rows, "tokens_per_rank") * copy_bytes, routing, kernel, copy_bytes)


def spine_of(rows: Rows, found: Found) -> tuple[float, list[Exchange]]:
    """By how much the table's spine is oversubscribed, by every second one of the rows of eight servers; prices of the others."""
    eight = [row for row in rows if row["system"] == "h100_sxm" and row["nodes"] == "8"]
    fitted = chessboard(column(eight, "tokens_per_rank"), column(eight, "sms"))
    halves = [[row for row, chosen in zip(eight, fitted, strict=True) if chosen == which] for which in (True, False)]

    def off(spine: float) -> float:
        return float(np.median([abs(np.log1p(each.error)) for each in exchanges(halves[0], found, spine)]))

    best = min((float(each) for each in np.arange(1.0, 6.01, 0.1)), key=off)
    return best, [replace(each, system=f"h100_sxm, spine {best:.1f}:1") for each in exchanges(halves[1], found, best)]


def bands(fit: MessageFit, error: np.ndarray) -> list[str]:
    """Median error of the points that were not fitted, by size of the message, in words."""
    left = ~fit.points.fitted
    found = []
    for _, low, high in BANDS:
        chosen = np.abs(error[left & (fit.points.message > low) & (fit.points.message <= high)])
        found.append(f"{np.median(chosen):.1%}" if len(chosen) else "–")
    return found


def page(found: Found, exchanged: list[Exchange], spine: float) -> list[str]:
    """The lines of README.md."""
    pooled: dict[str, list[float]] = defaultdict(list)
    table = []
    for (name, section, curve), (fit, error) in found.items():
        left = np.abs(error[~fit.points.fitted])
        pooled[name] += left.tolist()
        row = [name, section, curve, str(len(left)), f"{np.median(left):.1%}", f"{np.quantile(left, 0.9):.1%}", *bands(fit, error)]
        table.append("| " + " | ".join(row) + " |")
    return [
        "# Collectives beside measured ones",
        "",
        "`python results/collectives/regenerate.py MEASURED_DIR` writes this page and the plot.",
        "",
        "Errors are |predicted/measured − 1| on points that the curve was not fitted to: each is fitted to every second point of",
        "sizes and group sizes. Tables are NVIDIA's benchmark data (ai-dynamo/aiconfigurator at 095f58a51, Apache-2.0).",
        "",
        "| accelerator | points | median | 90th |",
        "|---|---:|---:|---:|",
        *(f"| {name} | {len(e)} | {np.median(e):.1%} | {np.quantile(e, 0.9):.1%} |" for name, e in pooled.items()),
        "",
        "![Predicted beside measured](predicted-vs-measured.png)",
        "",
        "| accelerator | level | collective | points | median | 90th | " + " | ".join(name for name, _, _ in BANDS) + " |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
        *table,
        "",
        *exchange_lines(exchanged, spine),
    ]


def exchange_lines(exchanged: list[Exchange], spine: float) -> list[str]:
    """The page's part on token exchanges."""
    left = [each for each in exchanged if not each.fitted]
    of_kernel = grouped(left, lambda each: (each.system, each.kernel, f"{each.ranks:3d}"))
    of_sms = grouped([each for each in left if each.sms], lambda each: (each.system, f"{each.ranks:3d}", f"{int(each.sms):2d}"))
    rows = [each for each in exchanged if "spine" not in each.system]
    return [
        "## Token exchanges as a plan prices them",
        "",
        "Every row of the table through the network model of a catalog cluster: what crosses NVLink and what crosses adapters by",
        "the placement of the group, each at its fabric's curve, and what a kernel's multiprocessors (SMs) copy. Errors are",
        "medians over rows that no curve was fitted to (curves of half of the rows price the others), with their bias.",
        "",
        f"{len(rows):,} rows of dispatch and combine, {sum(not each.fitted for each in rows):,} of them not fitted. The H200's of",
        "several servers, which repeat the H100's, are left out.",
        "",
        "| system | dispatcher | ranks | rows not fitted | dispatch | combine |",
        "|---|---|---:|---:|---:|---:|",
        *(table_line(key, each) for key, each in sorted(of_kernel.items())),
        "",
        "- **Eight servers.** Two and four fill their adapters; eight send 22 GB/s of 50 whatever the SMs. One cause explains all",
        f"  sizes, dispatch and combine: leaves of four servers under a spine oversubscribed {spine:.1f}:1, fitted to every second",
        "  of these rows. It belongs to that fabric: on eight H100 servers HybridEP sends 31 to 44 GB/s (DeepEP hybrid-ep branch,",
        "  docs/README_Hybrid-EP.md), on eight H800 servers DeepEP 44 to 45 (docs/legacy.md), own server's tokens taken out.",
        "  Catalog clusters are not oversubscribed; give a cluster's `oversubscription` where yours is.",
        "- **NVL72.** DeepEP's rows are of the four devices of a tray: from top-8 to top-22 their times grow by 9 %, as distinct",
        "  devices among four do (11 %) and among eight do not (44 %).",
        "- **NVLink kernels** (TensorRT-LLM) were timed with experts dealt to tokens in turn: from 4 to 8 ranks their times grow",
        "  2.1 to 2.3 times, from 8 to 16 by 6 to 9 %, as 3, 7 and 7.5 copies sent do; uniform routing would send 2.7, 4.6 and",
        "  6.1. Two ranks were not fitted: half of every token stays on its device. FP4 and the one-sided kernel are of",
        "  inference only and no plan prices them: with less to send the kernel's own time shows. Nor does one price the 540",
        "  rows of the two-sided kernel's preparation: counts and addresses, 42 µs beside 1.5 ms for 4,096 tokens on 8 ranks.",
        "- **HybridEP**, which most stacks run on Blackwell, has no rows: B200 and B300 hold its documented rate, GB200 and GB300",
        "  the NVLink kernel's, between what HybridEP reaches by its API and in the kernel. DeepEP's curves stand beside them",
        "  (`flex_backend: deepep`). Neither is measured over several hosts of Blackwell.",
        "",
        "DeepEP by the SMs that it is given: 20 are its default, which plans price. Below 16, two and four servers do not feed",
        "their adapters steadily (12 SMs send no more than 8); the curves between servers are fitted from 16 on.",
        "",
        "| system | ranks | SMs | rows not fitted | dispatch | combine |",
        "|---|---:|---:|---:|---:|---:|",
        *(table_line(key, each) for key, each in sorted(of_sms.items())),
        "",
        *ring_lines(),
    ]


def ring_lines() -> list[str]:
    """What larger rings rest on: how much longer an all-gather over servers would take with every hop of one flat ring."""
    sizes = (64 * MIB, 1024 * MIB, 8192 * MIB)
    longer = "; ".join(
        f"over {servers} servers " + ", ".join(f"{flat_ring(servers, size):.0%} ({size / MIB:,.0f} MiB)" for size in sizes)
        for servers in (16, 128)
    )
    return [
        "Nothing here measures groups of more than eight devices but token exchanges: larger rings, and all on Ascend and AMD,",
        "rest on documented figures. Within a server the n − 1 hops of NCCL's rings are fitted, and right in the median (above).",
        "Between servers an all-gather is priced level by level, with at most as many hops as up and down a tree. With a hop for",
        f"every rank, as in one flat ring, one of H100s would take longer: {longer}.",
        "Runs that gather every layer's weights (FSDP on 256 devices and more, `results/validation`) are predicted within 5 % at",
        "the median, too fast by some stacks and too slow by others: nothing there asks for these hops, but what hides behind",
        "compute would not show.",
    ]


def flat_ring(servers: int, size_bytes: float) -> float:
    """How much longer an all-gather over HGX H100 servers takes if every rank's share goes round one ring of all, as a share."""
    spec = load_cluster("hgx-h100")
    network = Network(spec, load_profile(spec.accelerator.priced_as), spec.allocated_sizes(8 * servers))
    at = network.crossing(Groups(np.array([8 * servers]), np.array([1])))
    hop_s = network._curves("all_gather").hop_s
    priced_s = float((network._hops("all_gather", at, 1.0)[:, 0] * hop_s).sum())
    ring_s = 7 * servers * hop_s[0] + (servers - 1) * hop_s[1]
    return float(ring_s - priced_s) / float(network.all_gather_s(at, np.array([size_bytes]))[0])


def grouped(each: Iterable[Exchange], key: Callable[[Exchange], tuple[str, ...]]) -> dict[tuple[str, ...], list[Exchange]]:
    found: dict[tuple[str, ...], list[Exchange]] = defaultdict(list)
    for one in each:
        found[key(one)].append(one)
    return found


def table_line(key: tuple[str, ...], each: list[Exchange]) -> str:
    """One row: what it is of, how many rows, median error and bias of either phase."""
    cells = [*(name.strip() for name in key), str(len(each))]
    for phase in PHASES:
        errors = np.array([one.error for one in each if one.phase == phase])
        cells.append(f"{np.median(np.abs(errors)):.1%} ({np.median(errors):+.1%})" if errors.size else "–")
    return "| " + " | ".join(cells) + " |"


def plot(found: Found, path: Path) -> None:
    """Predicted over measured of the points that were not fitted, by message size, a panel for each accelerator."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(14, 6), sharex=True, sharey=True)
    curves = list(dict.fromkeys(curve for _, _, curve in found))
    for panel, name in zip(axes.flat, PROFILES, strict=False):
        for (accelerator, section, curve), (fit, error) in found.items():
            if accelerator == name:
                left = ~fit.points.fitted
                marker = "x" if section == "scale-out" else "o"
                color = f"C{curves.index(curve)}"
                panel.scatter(fit.points.message[left], 1.0 + error[left], s=8, marker=marker, color=color, alpha=0.5, label=curve)
        panel.set(xscale="log", yscale="log", title=name, ylim=(0.5, 2.0))
        panel.axhspan(0.9, 1.1, color="grey", alpha=0.2)
        panel.set_yticks([0.5, 0.7, 1.0, 1.4, 2.0], ["0.5", "0.7", "1", "1.4", "2"], minor=False)
        panel.minorticks_off()
    last = axes.flat[-1]
    last.axis("off")
    for curve in curves:
        last.scatter([], [], s=20, color=f"C{curves.index(curve)}", label=curve)
    last.scatter([], [], s=20, marker="x", color="grey", label="between servers")
    last.legend(loc="center", frameon=False)
    figure.supxlabel("message, bytes")
    figure.supylabel("predicted over measured time")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main(arguments: list[str]) -> int:
    """Writes the page and the plot beside this file."""
    if len(arguments) != 1:
        print("give the folder with collectives.csv and moe_all_to_all.csv", file=sys.stderr)
        return 2
    tables = read_tables(Path(arguments[0]))
    found = held_out(tables)
    rows = tables["moe_all_to_all"]
    spine, eight = spine_of(rows, found)
    (HERE / "README.md").write_text("\n".join(page(found, [*exchanges(rows, found), *eight], spine)) + "\n", encoding="utf-8")
    plot(found, HERE / "predicted-vs-measured.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
