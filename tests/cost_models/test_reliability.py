"""Failures and checkpoints: the best interval and the time lost, held to a simulation that knows no formula."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from paraplan.cost_models.checkpoint import Failures, state_bytes
from paraplan.cost_models.money import per_million_tokens
from paraplan.cost_models.recovery import Recovery, Saved
from paraplan.cost_models.reliability import (
    RATES,
    best_interval_s,
    daly_interval_s,
    failures_per_s,
    kept_interval_s,
    lost_share,
    spare_units,
    spares,
    time_over_work,
    weighed_s,
    yearly_rate,
    young_interval_s,
)
from paraplan.search_spaces.cluster import ClusterSpec, FailureRates, Figure
from paraplan.search_spaces.inputs import build_problem, load_cluster


def simulated_goodput(interval_s: float, save_s: float, drain_s: float, restart_s: float, mtbf_s: float, failures: int) -> float:
    """Trains, saves, fails at random and comes back, one event after another; a save counts once it has drained."""
    chance = random.Random(1)
    clock = trained = 0.0
    for _ in range(failures):
        alive = chance.expovariate(1.0 / mtbf_s)
        at, kept, draining = 0.0, 0, []
        while at < alive:
            at += interval_s + save_s
            draining.append(at + drain_s)
        kept = sum(done <= alive for done in draining)
        trained += kept * interval_s
        clock += alive
        while (next_failure := chance.expovariate(1.0 / mtbf_s)) < restart_s:  # fails again while it comes back
            clock += next_failure
        clock += restart_s
    return trained / clock


@pytest.mark.parametrize(
    ("save", "drain", "restart", "mtbf"),
    [(30.0, 0.0, 0.0, 3600.0), (60.0, 200.0, 600.0, 10_800.0), (5.0, 300.0, 60.0, 3600.0), (200.0, 0.0, 300.0, 2000.0)],
)
def test_expected_time_is_what_a_simulation_takes(save: float, drain: float, restart: float, mtbf: float) -> None:
    interval = float(kept_interval_s(save, drain, mtbf))
    expected = 1.0 / float(time_over_work(interval, save, restart + drain, mtbf))
    assert simulated_goodput(interval, save, drain, restart, mtbf, 30_000) == pytest.approx(expected, rel=0.02)
    if not drain:
        assert expected == pytest.approx(1.0 - lost_share(interval, save, mtbf, restart))


@pytest.mark.parametrize("save", [0.01, 1.0, 60.0, 2000.0, 50_000.0])
def test_the_best_interval_is_a_minimum(save: float) -> None:
    """It solves (1 − T/M)·e^(T/M) = e^(−C/M), and intervals beside it lose more; Young's and Daly's come near for short saves."""
    mtbf = 10_800.0
    best = float(best_interval_s(save, mtbf))
    assert (1.0 - best / mtbf) * math.exp(best / mtbf) == pytest.approx(math.exp(-save / mtbf), rel=1e-9)
    least = lost_share(best, save, mtbf)
    assert all(lost_share(factor * best, save, mtbf) > least for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0))
    if save <= 60.0:
        assert best == pytest.approx(daly_interval_s(save, mtbf), rel=1e-3)
        assert best == pytest.approx(young_interval_s(save, mtbf), rel=0.06)


def test_intervals_broadcast_and_vanish_without_a_save() -> None:
    found = best_interval_s(np.array([0.0, 10.0, 100.0]), 3600.0)
    assert found[0] == 0.0 and all(a < b for a, b in pairwise(found))
    assert float(time_over_work(0.0, 0.0, 0.0, 3600.0)) == 1.0


def test_saving_every_300_s_is_right_for_saves_of_four_seconds() -> None:
    """√(2·4·10,800) = 294 s."""
    assert float(best_interval_s(4.0, 10_800.0)) == pytest.approx(294, rel=0.02)


def test_llama_3_fails_every_three_hours_and_keeps_over_90_percent() -> None:
    """arXiv 2407.21783: 419 unexpected interruptions in 54 days, over 90 % effective training time."""
    cluster = load_cluster("hgx-h100")
    rate = failures_per_s(cluster, 16_384)
    assert rate is not None and 1.0 / rate == pytest.approx(54 * 86400 / 419, rel=0.005)
    failures = Failures.of(build_problem("llama-3.1-405b", cluster, 16_384, 2048, 8192))
    assert failures is not None
    assert 0.90 < 1.0 / float(failures.stretch(16_384, Saved(np.array([4e9]), np.array([4e9])))[0]) < 0.97


def test_nothing_beats_the_least_stretch() -> None:
    failures = Failures.of(build_problem("llama-3.1-8b", "hgx-h100", 64, 256, 8192))
    assert failures is not None
    held = np.geomspace(1e6, 1e12, 20)
    for resident in (np.zeros(20), held):
        assert (failures.stretch(64, Saved(resident, held)) >= failures.stretch(64)).all()
    assert (np.diff(failures.stretch(64, Saved(held, held))) > 0).all()
    assert (np.diff(failures.stretch(np.array([8, 64, 512, 4096]))) > 0).all()


def test_a_checkpoint_is_14_bytes_a_parameter() -> None:
    """2 of BF16 weights and 12 of Adam's FP32 weights and moments: 140 TB for 10T parameters."""
    problem = build_problem("moe-10t", "cloudmatrix-384", 131_072, 15_360, 8192)
    assert state_bytes(problem) == pytest.approx(14 * 9.978e12, rel=0.001)


def test_recovery_needs_the_cluster_to_say_how_it_fails() -> None:
    cluster = load_cluster("hgx-h100")
    assert Recovery.of(cluster.model_copy(update={"storage": None})) is None
    silent = cluster.model_copy(update={"failures": type(cluster.failures)()})
    assert failures_per_s(silent, 64) is None and Recovery.of(silent) is None


def test_a_supernode_that_fails_as_one_counts_by_the_supernodes_in_use() -> None:
    """769 dies of CloudMatrix384 are in two supernodes, 768 in one."""
    rates = {"supernode_per_year": 4.0}
    cluster = load_cluster("cloudmatrix-384")
    cluster = cluster.model_copy(update={"failures": type(cluster.failures).model_validate(rates)})
    one, two = failures_per_s(cluster, 768), failures_per_s(cluster, 769)
    assert one is not None and two == pytest.approx(2 * one)


def test_spares_are_counted_by_what_is_replaced() -> None:
    """Devices and servers that fail are replaced by servers, supernodes that fail by supernodes; an HGX server is both."""
    rack, server = load_cluster("gb200-nvl72"), load_cluster("hgx-h100")
    figure = Figure(value=0.1, source="test", grade="assumed", low=0.1, high=0.1)

    def failing(cluster: ClusterSpec, *names: str) -> ClusterSpec:
        return cluster.model_copy(update={"failures": FailureRates(**dict.fromkeys(names, figure))})

    found = spare_units(failing(rack, *RATES), 7200, 10.0)
    assert found == {"server": spares((720 + 180) / 365.25, 10.0), "supernode": spares(10 / 365.25, 10.0)}
    assert spare_units(failing(rack, "device_per_year"), 7200, 10.0) == {"server": spares(720 / 365.25, 10.0)}
    assert spare_units(failing(server, *RATES), 80, 10.0) == {"server": spares(10 / 365.25, 10.0)}
    assert not spare_units(failing(rack), 7200, 10.0)


def test_yearly_rates_and_spares() -> None:
    """An MTBF of 5 h of 10,000 devices is 17.5 % a year each. Of a Poisson mean of 2, 98.3 % is at most 5 and 99.5 % at most 6."""
    assert yearly_rate(5 * 3600, 10_000) == pytest.approx(0.1753, rel=1e-3)
    assert spares(1.0, 2.0, 0.99) == 6
    assert spares(0.0, 2.0) == 0
    assert spares(300.0, 2.0) == pytest.approx(spares(400.0, 2.0) * 600 / 800, rel=0.05)


def test_money_by_hand() -> None:
    """1,000 devices that do 400,000 tokens/s: a million takes 2.5 s, 0.694 device-hours, at 2 an hour 1.39, at 700 W 0.486 kWh."""
    found = per_million_tokens(400_000.0, 1000, 2.0, 700.0)
    assert (found.device_hours, found.price, found.kwh) == pytest.approx((0.69444, 1.38889, 0.486111), rel=1e-4)
    assert per_million_tokens(400_000.0, 1000).price is None


def test_kinds_of_failure_weigh_as_a_simulation_of_both_says() -> None:
    """Three in four failures lose 600 s of drain and 900 s of restart, the others nothing and 60 s; drawn at random."""
    mtbf, save, interval, kinds = 7200.0, 20.0, 500.0, ((0.75, 600.0, 900.0), (0.25, 0.0, 60.0))
    chance, clock, trained = random.Random(2), 0.0, 0.0

    def kind() -> tuple[float, float, float]:
        return kinds[0] if chance.random() < kinds[0][0] else kinds[1]

    for _ in range(40_000):
        alive, (_, drain, restart) = chance.expovariate(1.0 / mtbf), kind()
        trained += interval * max(math.floor((alive - drain) / (interval + save)), 0)
        clock += alive
        while (next_failure := chance.expovariate(1.0 / mtbf)) < restart:  # fails again while it comes back, by either kind
            clock += next_failure
            restart = kind()[2]
        clock += restart
    shares, drains, restarts = zip(*kinds, strict=True)
    failure = weighed_s(drains, shares, mtbf) + weighed_s(restarts, shares, mtbf)
    assert float(time_over_work(interval, save, failure, mtbf)) == pytest.approx(clock / trained, rel=0.02)
    assert float(weighed_s([120.0, 120.0], [0.3, 0.7], mtbf)) == pytest.approx(120.0)
