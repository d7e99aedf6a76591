"""Tiers by hand: what a save, its drain and coming back take from the host, the pool and the storage, by what has failed."""

from __future__ import annotations

import pytest
from paraplan.cost_models.checkpoint import Failures
from paraplan.cost_models.recovery import Recovery, Saved
from paraplan.search_spaces.cluster import ClusterSpec, FailureRates
from paraplan.search_spaces.inputs import build_problem, load_cluster

WHOLE, DEVICES = 1e12, 800  # bytes of a checkpoint
SAVED = Saved(5e9, 8e9)


def pooled(pool: bool) -> ClusterSpec:
    """CloudMatrix384 whose saves go to its pool at 40 GB/s, or without one to its hosts at as much."""
    cluster = load_cluster("cloudmatrix-384")
    rates = {"device_per_year": 0.2, "supernode_per_year": 4.0, "restart_s": 600.0}
    update = {"failures": FailureRates.model_validate(rates), **({} if pool else {"pool": None})}
    return cluster.model_copy(update=update)


def recovery(pool: bool) -> Recovery:
    found = Recovery.of(pooled(pool))
    assert found is not None
    return found


def test_a_pool_is_where_saves_go_where_there_is_one() -> None:
    assert (recovery(True).tier, recovery(False).tier) == ("pool", "host")
    assert float(recovery(True).save_s(5e9)) == pytest.approx(5e9 / 40e9)


def test_a_pool_of_one_server_is_lost_with_it() -> None:
    cluster = pooled(True)
    flat = [level for level in cluster.levels if level.name != "supernode"]
    found = Recovery.of(cluster.model_copy(update={"levels": tuple(flat), "supernode": "server"}))
    assert found is not None and found.lost["device_per_year"] == 16 and recovery(True).lost["device_per_year"] == 0


def test_after_a_device_failed_its_servers_share_comes_from_the_storage_and_the_rest_from_the_hosts() -> None:
    """16 of 800 dies: 2 % of the 10.4 s that 800 · 0.12 GB/s take for a terabyte; hosts return 8 GB at 40 GB/s in 0.2 s."""
    host = recovery(False)
    every = WHOLE / (DEVICES * 0.12e9)
    assert float(host.drain_s(WHOLE, DEVICES)) == pytest.approx(every)
    assert float(host.read_s("device_per_year", WHOLE, SAVED, DEVICES)) == pytest.approx(max(0.02 * every, 0.2))
    assert float(host.read_s("device_per_year", WHOLE, Saved(5e9, 20e9), DEVICES)) == pytest.approx(0.5)
    assert float(host.back_s("device_per_year", WHOLE, SAVED, DEVICES)) == pytest.approx(600 + 0.02 * every + 8e9 / 25e9)
    assert float(host.exposed_s("device_per_year", WHOLE, SAVED, DEVICES)) == pytest.approx(every)  # the server's copy is gone


def test_a_copy_in_the_pool_outlives_a_device_and_counts_at_once_but_not_its_supernode() -> None:
    """A supernode of 768 takes 96 % of the copies along."""
    pool, every = recovery(True), WHOLE / (DEVICES * 0.12e9)
    assert float(pool.exposed_s("device_per_year", WHOLE, SAVED, DEVICES)) == 0.0
    assert float(pool.read_s("device_per_year", WHOLE, SAVED, DEVICES)) == pytest.approx(0.2)
    assert float(pool.exposed_s("supernode_per_year", WHOLE, SAVED, DEVICES)) == pytest.approx(every)
    assert float(pool.read_s("supernode_per_year", WHOLE, SAVED, DEVICES)) == pytest.approx(0.96 * every)


def test_where_nothing_stands_or_has_room_all_is_read_from_the_storage() -> None:
    """A job inside the failed supernode; and two copies of 45 GB beside 10 GB offloaded, which 96 GB of a die cannot hold."""
    for pool in (True, False):
        found = recovery(pool)
        assert float(found.read_s("supernode_per_year", WHOLE, SAVED, 768)) == pytest.approx(WHOLE / (768 * 0.12e9))
        crowded, every = Saved(45e9, 55e9), float(found.drain_s(WHOLE, DEVICES))
        assert float(found.read_s("device_per_year", WHOLE, crowded, DEVICES)) == pytest.approx(every)
        assert float(found.exposed_s("device_per_year", WHOLE, crowded, DEVICES)) == pytest.approx(every)
        roomy = float(found.exposed_s("device_per_year", WHOLE, Saved(45e9, 50e9), DEVICES))
        assert roomy == (0.0 if pool else pytest.approx(every))


def test_a_pool_leaves_more_time_to_train_than_hosts_do() -> None:
    stretches = []
    for pool in (True, False):
        failures = Failures.of(build_problem("llama-3.1-405b", pooled(pool), DEVICES, 800, 4096))
        assert failures is not None
        stretches.append(float(failures.stretch(DEVICES, SAVED)))
    assert 1.0 < stretches[0] < stretches[1]
