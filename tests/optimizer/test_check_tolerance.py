"""Fault tolerance: units, Young's and Daly's intervals, and stores that die with their host."""

from __future__ import annotations

import math

import pytest
from paraplan.cost_models.reliability import daly_interval_s, failures_per_s, lost_share, young_interval_s
from paraplan.optimizer.checking.checker import check
from paraplan.optimizer.checking.tolerance import duration, judge
from paraplan.optimizer.readers import FaultTolerance, read_text
from paraplan.search_spaces.cluster import ClusterSpec, FailureRates
from paraplan.search_spaces.inputs import load_cluster


def failing(**rates: float) -> ClusterSpec:
    return load_cluster("hgx-h100").model_copy(update={"failures": FailureRates.model_validate(rates)})


def test_rates_add_up() -> None:
    """8 devices, one server and one supernode of 8 each: 8·0.2 + 0.5 + 0.1 failures a year for each server."""
    cluster = failing(device_per_year=0.2, server_per_year=0.5, supernode_per_year=0.1)
    year = 365.25 * 86400
    assert failures_per_s(cluster, 64) == pytest.approx(8 * (8 * 0.2 + 0.5 + 0.1) / year)
    assert failures_per_s(failing(), 64) is None


def test_intervals() -> None:
    """With saves of 60 s and a failure a day, √(2·60·86400) = 3220 s; Daly's is a little less for the save itself."""
    young = math.sqrt(2 * 60 * 86400)
    assert young_interval_s(60, 86400) == pytest.approx(young) == pytest.approx(3219.9, rel=1e-4)
    assert daly_interval_s(60, 86400) == pytest.approx(young * (1 + math.sqrt(60 / 172800) / 3 + 60 / 172800 / 9) - 60)
    assert daly_interval_s(3000, 1000) == 1000


@pytest.mark.parametrize(("save", "mtbf"), [(10.0, 3600.0), (60.0, 86400.0), (600.0, 7200.0), (1.0, 1e6)])
def test_no_interval_loses_less_than_dalys(save: float, mtbf: float) -> None:
    best = lost_share(daly_interval_s(save, mtbf), save, mtbf)
    for factor in (0.5, 0.8, 1.25, 2.0, 5.0):
        assert lost_share(factor * daly_interval_s(save, mtbf), save, mtbf) >= best * (1 - 1e-3)
    assert 0 < best < 1
    assert lost_share(1e9, save, mtbf) == 1.0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("30min", (30, "min")),
        ("1.5 h", (1.5, "h")),
        ("500 steps", (500, "steps")),
        ("500", (500, "")),
        ("1h30m", (5400, "s")),
        ("1 h, 30 min", (5400, "s")),
        ("00:30:00", (1800, "s")),
        ("PT30M", (30, "m")),
        ("P1DT12H", (36 * 3600, "s")),
        ("2 weeks", (2, "weeks")),
        ("30 min 5 steps", None),
        ("1h 30", None),
        ("P", None),
        ("PT", None),
        ("soon", None),
        ("5 fortnights", None),
        ("-3 s", None),
    ],
)
def test_durations(text: str, found: tuple[float, str] | None) -> None:
    read = duration(text)
    assert (None if read is None else (read.amount, read.unit)) == found


@pytest.mark.parametrize("text", ["500", "0 s", "soon", "1e99h", "٣ min"])
def test_an_interval_needs_a_unit(text: str) -> None:
    found = judge(FaultTolerance(checkpoint_interval=text), None, None, None, None, None)
    assert [each.rule for each in found.broken] == ["F001"]


@pytest.mark.parametrize(
    ("store", "policy", "broken"),
    [
        (("/dev/shm",), "reschedule", True),
        (("/dev/shm/ckpt", "tmpfs"), None, True),
        (("memory",), "restart", True),
        (("ramdisk:/x",), "restart", True),
        (("local_nvme",), "restart", True),
        (("local_nvme", "s3://bucket"), "restart", False),
        (("file:///dev/shm/ckpt",), None, True),
        (("/var/run/shm",), None, True),
        (("file:///mnt/shared",), None, False),
        (("/dev/shm", "s3://bucket"), "reschedule", False),
        (("/mnt/shared",), "reschedule", False),
        (("/dev/shm",), "abort", False),
        ((), "reschedule", False),
    ],
)
def test_a_store_that_dies_with_its_host(store: tuple[str, ...], policy: str | None, broken: bool) -> None:
    found = judge(FaultTolerance(state_store=store, node_failure_policy=policy), None, None, None, None, None)
    assert bool(found.broken) is broken


@pytest.mark.parametrize(
    ("interval", "said"),
    [("4h", "too rare"), ("1min", "too often"), ("60min", "near the best"), ("30", "the best interval is 76 min")],
)
def test_an_interval_beside_the_best(interval: str, said: str) -> None:
    """2,048 devices that fail 0.17 times a year fail every 25 h together; saves of 2 min are best 77 min apart, which an interval
    without a unit is told too.
    """
    found = judge(FaultTolerance(checkpoint_interval=interval), failing(device_per_year=0.17), 2048, None, 120.0, None)
    assert found.mtbf_s == pytest.approx(25.2 * 3600, rel=0.01)
    assert found.best_interval_s == pytest.approx(76.4 * 60, rel=0.02)
    assert said in " ".join(found.advice)


def test_steps_need_the_time_of_a_step() -> None:
    given = FaultTolerance(checkpoint_interval="500 steps", checkpoint_save_time="2 min")
    cluster = failing(device_per_year=0.17)
    lacking = judge(given, cluster, 2048, None, None, None, "the global batch (--global-batch)").needs
    assert lacking == ("the time of a step, to turn steps into seconds: the global batch (--global-batch)",)
    found = judge(given, cluster, 2048, 10.0, None, None)
    assert found.interval_s == 5000 and found.save_s == 120
    assert not found.needs


def test_a_save_takes_at_least_what_copying_takes() -> None:
    found = judge(FaultTolerance(checkpoint_interval="4h"), failing(device_per_year=0.17), 2048, None, None, 0.5)
    assert found.save_at_least
    assert "may be right" in " ".join(found.advice)
    found = judge(FaultTolerance(checkpoint_interval="30"), failing(device_per_year=0.17), 2048, None, None, 0.5)
    assert " or more with a failure every 25 h, since" in found.advice[0]


def test_rates_that_nobody_measured_are_told_with_the_verdict() -> None:
    """Of H800 no rate is published, of H100 one is; a job that names no interval rests on neither."""
    given, silent = FaultTolerance(checkpoint_interval="30min"), FaultTolerance()
    told = {
        name: judge(given, load_cluster(name), 1024, 10.0, 20.0, None).assumptions for name in ("hgx-h800", "hgx-h100", "hgx-a100")
    }
    assert [each.startswith("hgx-h800 failures device_per_year = 0.17") for each in told["hgx-h800"]] == [True]
    assert told["hgx-h100"] == told["hgx-a100"] == ()
    assert judge(silent, load_cluster("hgx-h800"), 1024, 10.0, 20.0, None).assumptions == ()


def test_a_job_is_told_which_input_its_step_waits_for() -> None:
    text = (
        "task:\n  strategy: {tensor_parallel: 8, pipeline_parallel: 1, data_parallel: 1, micro_batch_size: 1, seq_len: 4096}\n"
        "  resource: {accelerators: 8}\n  fault_tolerance: {checkpoint_interval: 500 steps}\n"
    )
    found = check(read_text(text, "job.yaml"), "llama-3.1-8b", "hgx-h100", best=False)
    assert found.fault_tolerance is not None
    assert all(
        need.endswith(": the global batch (--global-batch)") or need.startswith("how long") for need in found.fault_tolerance.needs
    )
    whole = check(
        read_text(text.replace("seq_len", "global_batch: 64, seq_len"), "job.yaml"), "llama-3.1-8b", "hgx-h100", best=False
    )
    assert whole.global_batch == 64 and whole.priced is not None and not whole.unknown
