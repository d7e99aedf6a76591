"""What field reports say of large training runs, and the product's own number beside each; arithmetic first, real plans after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from paraplan.cost_models.checkpoint import state_bytes
from paraplan.cost_models.memory import static_rates
from paraplan.cost_models.network import Network
from paraplan.cost_models.profile import load_profile
from paraplan.cost_models.reliability import (
    SECONDS_PER_DAY,
    best_interval_s,
    failures_per_s,
    lost_share,
    yearly_rate,
)
from paraplan.optimizer import Infeasible, build_problem, evaluate, plan
from paraplan.optimizer.comparing import Compared, Field, compare
from paraplan.optimizer.result import PricedLayout
from paraplan.optimizer.training_run import arithmetic
from paraplan.search_spaces.cluster import ClusterSpec, FailureRates
from paraplan.search_spaces.groups import Groups
from paraplan.search_spaces.inputs import load_cluster, load_model
from paraplan.search_spaces.layout import Layout, LayoutTable, Problem

Verdict = Literal["agrees", "wrong", "depends"]
TERABYTE, GIGABYTE = 1e12, 1e9
WHOLE = Layout(tp=1, cp=1, pp=1, dp=1, ep=1, etp=1, edp=1, micro_batch=1, num_microbatches=1)
"""One device with everything: what a parameter costs unsharded."""


@dataclass(frozen=True)
class Claim:
    """What is said, our number, whether they agree, and what that rests on."""

    said: str
    ours: str
    verdict: Verdict
    because: str


def training_state_tb(parameters: float, gradient_bytes: int = 4, optimizer_bytes: int = 12) -> float:
    """TB of weights, gradients and optimizer states of so many parameters, as the memory model counts a device that shards none."""
    problem = build_problem("llama-3.1-8b", "hgx-h100", 8, 8, 4096)
    stack = problem.stack.model_copy(update={"gradient_bytes": gradient_bytes, "optimizer_bytes": optimizer_bytes})
    rates = static_rates(problem.model_copy(update={"stack": stack}), LayoutTable.from_layouts([WHOLE]))
    return float(rates.total(0)[0]) * parameters / TERABYTE


def checkpoint_tb(model: str = "moe-10t", cluster: str = "cloudmatrix-384") -> float:
    """Weights and optimizer states, once each, of a catalog model."""
    return state_bytes(build_problem(model, cluster, 768, 768, 4096)) / TERABYTE


def all_reduce_sent_gb(ranks: int, gigabytes: float = 10.0, cluster: str = "hgx-h100") -> float:
    """What one rank sends in a ring all-reduce, all levels together."""
    network, at = _ring(ranks, cluster)
    return float(2.0 * network.ring_bytes(at, np.array([gigabytes * GIGABYTE])).sum() / GIGABYTE)


def all_reduce_s(ranks: int, gigabytes: float = 10.0, cluster: str = "hgx-h100") -> float:
    """Its time on a cluster by the network model."""
    network, at = _ring(ranks, cluster)
    return float(network.all_reduce_s(at, np.array([gigabytes * GIGABYTE]))[0])


def card_years(flops: float, flops_per_s: float) -> float:
    """Years of 365 days that one card takes."""
    return flops / flops_per_s / (365 * SECONDS_PER_DAY)


def flops_of(active: float, tokens: float) -> float:
    """6·N·D, from the same lines that `paraplan size` shows."""
    return next(line.value for line in arithmetic(active, tokens, 1.0, 1.0) if line.name == "FLOPs")


def devices_for(active: float, tokens: float, days: float, flops_per_device: float) -> float:
    """Devices at an effective rate of each."""
    return arithmetic(active, tokens, days, flops_per_device)[-1].value


def failures_per_day(yearly: float, devices: int) -> float:
    """Failures of a job whose devices fail so often a year."""
    cluster = load_cluster("hgx-h100")
    rates = FailureRates.model_validate({"device_per_year": yearly})
    rate = failures_per_s(cluster.model_copy(update={"failures": rates}), devices)
    assert rate is not None
    return SECONDS_PER_DAY * rate


def longest_save_s(interval_s: float, mtbf_s: float) -> float:
    """The save for which an interval is the best one: C = M·(−x − ln(1−x)) at x = T/M."""
    x = interval_s / mtbf_s
    return float(mtbf_s * (-x - np.log1p(-x)))


def mfu_readings(before: float, shares: Sequence[float]) -> dict[str, float]:
    """MFU after several savings, by what their percentages are taken to be of."""
    return {
        "each adds to the throughput, one after another": before * float(np.prod([1.0 + share for share in shares])),
        "each cuts the step that the last one left": before / float(np.prod([1.0 - share for share in shares])),
        "all are shares of the first step": before / (1.0 - sum(shares)),
    }


def without_supernode(cluster: ClusterSpec, inner: str = "server") -> ClusterSpec:
    """The same devices and servers, joined by the scale-out network only, and without the pool that the supernode shares."""
    levels = tuple(level for level in cluster.levels if level.name != cluster.supernode)
    return cluster.model_copy(
        update={"name": f"{cluster.name}-without-supernode", "levels": levels, "supernode": inner, "pool": None}
    )


def break_even(
    model: str, sizes: Sequence[float], devices: int, global_batch: int, progress: Callable[[str, float], None] | None = None
) -> Compared:
    """CloudMatrix384 beside the same dies without the supernode, over sizes of a model."""
    cluster = load_cluster("cloudmatrix-384")
    field = Field((without_supernode(cluster), cluster), (devices, devices), {})
    return compare(load_model(model), field, global_batch, 4096, sizes=sizes, progress=progress)


@dataclass(frozen=True)
class Offloaded:
    """One problem with its optimizer states at the host, and on the devices; None where nothing fits.

    `kept` is the layout of `device` with its states moved to the host and nothing else changed.
    """

    title: str
    host: PricedLayout | None
    device: PricedLayout | None
    kept: PricedLayout | None

    @property
    def cost(self) -> float | None:
        """By what share the step at the host is longer."""
        return None if self.host is None or self.device is None else self.host.step_time_s / self.device.step_time_s - 1.0

    @property
    def cost_kept(self) -> float | None:
        """The same with the layout kept."""
        return None if self.kept is None or self.device is None else self.kept.step_time_s / self.device.step_time_s - 1.0


def offloaded(title: str, model: str, cluster: str, devices: int, global_batch: int, seq_len: int) -> Offloaded:
    """Both best plans."""
    found = [
        _best(build_problem(model, cluster, devices, global_batch, seq_len, fix=f"offload={tier}"))
        for tier in ("optimizer:1", "none")
    ]
    host, device = found
    kept = None
    if device is not None:
        moved = device.layout.model_copy(update={"offload": "optimizer:1"})
        kept, _ = evaluate(build_problem(model, cluster, devices, global_batch, seq_len), moved, replayed=False)
    return Offloaded(title, host, device, kept)


def growth(model: str, cluster: str, devices: int, global_batch: int, seq_len: int) -> float | None:
    """Throughput of twice the devices over that of once, the batch unchanged."""
    once, twice = (_best(build_problem(model, cluster, count, global_batch, seq_len)) for count in (devices, 2 * devices))
    return None if once is None or twice is None else once.step_time_s / twice.step_time_s


def arithmetic_claims() -> Iterator[Claim]:
    """Those that follow from formulas."""
    sixteen, eighteen = training_state_tb(1.8e12, gradient_bytes=2), training_state_tb(1.8e12)
    yield Claim(
        "1.8T parameters need over 10 TB of training state",
        f"{sixteen:.1f} TB with BF16 gradients, {eighteen:.1f} TB with FP32 ones",
        "agrees",
        "16 or 18 bytes a parameter; 10 TB is a weak bound, off by a factor of three: activations come on top",
    )
    low, high = training_state_tb(1e14, gradient_bytes=2, optimizer_bytes=4), training_state_tb(1e14, gradient_bytes=2)
    yield Claim(
        "10¹⁴ parameters need 600 TB and more",
        f"{low:,.0f} TB with BF16 moments and no FP32 weights, {high:,.0f} TB with FP32 ones",
        "agrees",
        "8 to 16 bytes a parameter; 600 TB are 6 bytes, which leaves no second moment",
    )
    sent, fast, slow = all_reduce_sent_gb(400), all_reduce_s(400), all_reduce_s(400, cluster="atlas-800t-a2")
    yield Claim(
        "An all-reduce of 10 GB over 400 cards takes tens of seconds",
        f"a ring sends {sent:.2f} GB per card: {sent / 50:.2f} s at 50 GB/s, {sent / 12.5:.1f} s at 12.5; the network model says "
        f"{fast:.2f} s on hgx-h100 and {slow:.2f} s on atlas-800t-a2",
        "wrong",
        f"tens of seconds need {sent / 10:.1f} GB/s a card or less",
    )
    volumes = [all_reduce_sent_gb(ranks) for ranks in (8, 64, 400, 4000)]
    yield Claim(
        "Its volume grows with the number of cards",
        "per card " + ", ".join(f"{volume:.2f}" for volume in volumes) + " GB for 8, 64, 400, 4,000 cards",
        "wrong",
        "2·S·(n−1)/n tends to 2·S; only the sum over all cards grows with n, and so do their links. Latency grows",
    )
    flops = flops_of(1e14, 1e13)
    yield Claim(
        "6·10²⁷ FLOPs are 6,000 cards of 1 PFLOP/s for a year",
        f"{card_years(flops, 1e15):,.0f} card-years (of 365 days) at the peak; at 300 effective TFLOP/s and 30 days "
        f"{devices_for(1e14, 1e13, 30, 3e14) / 1e6:.1f} million cards",
        "wrong",
        f"6,000 such cards take {card_years(flops, 1e15) / 6000:.0f} years. N is what a token uses: of a mixture, the active part",
    )
    daily, rates = failures_per_day(0.001, 10_000), [yearly_rate(hours * 3600, 10_000) for hours in (12, 5)]
    llama = failures_per_day(0.173, 10_000)
    yield Claim(
        "A yearly failure rate of 0.1 % per card stops a job of 10,000 cards several times a day",
        f"{daily:.3f} failures a day, one in {1 / daily:.0f} days; an MTBF of 5 to 12 h needs {rates[0]:.0%} to {rates[1]:.0%} a "
        "year",
        "wrong",
        f"at Llama 3's 17 % a year 10,000 cards fail {llama:.1f} times a day: that is frequent, the rate is off by a factor of 100",
    )
    saved = checkpoint_tb()
    yield Claim(
        "A checkpoint of 10T parameters takes tens of TB",
        f"{saved:.0f} TB, 14 bytes a parameter",
        "wrong",
        "20 TB are the BF16 weights alone; a job that is to go on needs the FP32 weights and both moments",
    )
    mtbf = 3 * 3600.0
    longest, with_60 = longest_save_s(300, mtbf), float(best_interval_s(60, mtbf))
    lost = [lost_share(300, 60, mtbf), lost_share(with_60, 60, mtbf)]
    yield Claim(
        "A checkpoint every 300 s is right",
        f"the best interval at an MTBF of 3 h is 300 s for a save that stops training for {longest:.1f} s; for 60 s it is "
        f"{with_60 / 60:.0f} min, and 300 s lose {lost[0]:.0%} of the time where that loses {lost[1]:.0%}",
        "depends",
        "right if saves are asynchronous and block for about 4 s or less",
    )
    readings = mfu_readings(0.45, (0.12, 0.07, 0.08))
    two = mfu_readings(0.45, (0.12, 0.07))
    listed = "; ".join(f"{words}: {value:.1%}" for words, value in readings.items())
    yield Claim(
        "MFU goes from 45 % to 62 % by 12 % less waiting, 7 % less for data and states that stay resident (8 %)",
        f"{listed}. Without the last: {min(two.values()):.1%} to {max(two.values()):.1%}",
        "depends",
        "reached only if all three are shares of the first step; savings made one after another give 58 to 60 %",
    )


CASES = (
    ("DeepSeek-V3, 1,536 dies of CloudMatrix384", "deepseek-v3", "cloudmatrix-384", 1536, 15360, 4096),
    ("1.8T mixture, 3,072 dies of CloudMatrix384", "moe-1.8t", "cloudmatrix-384", 3072, 3072, 8192),
    ("Llama 3.1 405B, 1,024 H100", "llama-3.1-405b", "hgx-h100", 1024, 1024, 8192),
    ("Llama 3.1 70B, 64 H100", "llama-3.1-70b", "hgx-h100", 64, 256, 8192),
    ("Llama 3.1 70B, 64 H100, a batch of 64", "llama-3.1-70b", "hgx-h100", 64, 64, 8192),
)
SIZES = (1e11, 5e11, 2e12)
SHAPES = (
    ("deepseek-v3", "fine mixture (shape of DeepSeek-V3, 256 experts)"),
    ("moe-1.8t", "coarse mixture (shape of moe-1.8t, 16 experts)"),
    ("llama-3.1-405b", "dense (shape of Llama 3.1 405B)"),
)
DOUBLINGS = ((8192, 2048), (16384, 2048), (16384, 512), (16384, 256))


def planned_claims(progress: Callable[[str, float], None]) -> Iterator[Claim]:
    """Those that need plans."""
    cases = []
    for number, case in enumerate(CASES):
        progress(f"offload: {case[0]}", number / len(CASES))
        cases.append(offloaded(*case))
    known = [one.cost for one in cases if one.cost is not None]
    large, small = (one.cost or 0.0 for one in cases[-2:])
    assert small > large, "offloading takes no larger share of the step at the smaller batch: the reason below is another"
    yield Claim(
        "Offloading the optimizer to the CPU costs 30 % of the step; keeping its states in HBM gains 8 %",
        "; ".join(f"{one.title}: {_cost_words(one)}" for one in cases),
        "depends" if any(abs(cost) >= 0.05 for cost in known) else "wrong",
        "each side with its own best plan: the memory that offloading frees goes into less recompute or narrower groups. What "
        "moving the states takes is a fixed time of every step, so that its share falls with the batch",
    )
    for model, words in SHAPES:
        found = break_even(model, SIZES, 3072, 3072, progress)
        premium = found.overtakes[0].premium
        told = ", ".join(
            f"{row.parameters / 1e9:,.0f}B {'—' if each is None else f'{each:.2f}×'}"
            for row, each in zip(found.rows, premium, strict=True)
        )
        yield Claim(
            f"Supernodes pay from 500B parameters on: {words}",
            f"3,072 dies of CloudMatrix384 against the same dies in servers of 16, tokens per die: {told}",
            "depends",
            "the factor is what a die-hour may cost more. The shape of the model and the price decide, not 500B: the smallest of "
            f"these sizes that pays, by the ratio of prices, is {_moves([row.parameters for row in found.rows], premium)}",
        )
    doubled = []
    for number, (devices, batch) in enumerate(DOUBLINGS):
        progress("doubling", number / len(DOUBLINGS))
        doubled.append((devices, batch, growth("llama-3.1-405b", "hgx-h100", devices, batch, 8192)))
    grown = [each for _, _, each in doubled if each is not None]
    assert min(grown) < 1.35 < 1.75 < max(grown), "a batch far too small no longer leaves 30 %: the reason below is another"
    yield Claim(
        "Doubling a cluster gave 30 % more throughput",
        "Llama 3.1 405B on H100: "
        + "; ".join(
            f"{devices:,} to {2 * devices:,} at a batch of {batch:,}: {'no plan' if each is None else f'{each - 1.0:+.0%}'}"
            for devices, batch, each in doubled
        ),
        "depends",
        "on the batch: unchanged, it leaves every device fewer micro-batches; 30 % are what a batch far too small leaves",
    )


def _moves(sizes: Sequence[float], premium: Sequence[float | None]) -> str:
    """From which of the sizes on a supernode pays, at some ratios of prices."""
    told = []
    for ratio in (1.0, 1.05, 1.1, 1.2, 1.3):
        paid = [size for size, each in zip(sizes, premium, strict=True) if each is not None and each >= ratio]
        told.append(f"{ratio:g}×: {f'{min(paid) / 1e9:,.0f}B' if paid else 'none of these'}")
    return "; ".join(told)


def _cost_words(one: Offloaded) -> str:
    if one.host is None or one.device is None:
        return "only with states at the host" if one.device is None and one.host is not None else "only with states on the device"
    return f"{one.cost:+.1%} at the host, {one.cost_kept:+.1%} with the layout kept"


def _best(problem: Problem) -> PricedLayout | None:
    try:
        return plan(problem, top=1).plan
    except Infeasible:
        return None


def _ring(ranks: int, cluster: str) -> tuple[Network, object]:
    machine = load_cluster(cluster)
    network = Network(machine, load_profile(machine.accelerator.priced_as), machine.allocated_sizes(ranks))
    return network, network.crossing(Groups(np.array([ranks]), np.array([1])))
