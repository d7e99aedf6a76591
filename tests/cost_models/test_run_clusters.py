"""Tests of the cluster that a run's row names: its accelerator, its site and the links between its servers."""

from __future__ import annotations

import pytest
from paraplan.cost_models.run_clusters import cluster_of, server_links
from paraplan.cost_models.runs import Run


def run(**cells: str) -> Run:
    return Run({"accelerator": "A100-80GB-SXM", "family": "newlab", **cells}, "a")


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("inter-node 4 x 100Gb RoCE", (4, 400.0)),
        ("inter-machine bandwidth 4 * 100Gb", (4, 400.0)),
        ("md [A100 80GB with 1600 Gbps node-node interconnect (RoCE)]", (1, 1600.0)),
        ("128 GPUs, 400 Gbps between nodes", (1, 400.0)),
        ("inter-node 800 Gb/s per node in the configs", (1, 800.0)),
        ("8x400Gb/s InfiniBand", (8, 3200.0)),
    ],
)
def test_links_of_a_server_are_read(text: str, links: tuple[int, float]) -> None:
    assert server_links(text) == links


@pytest.mark.parametrize(
    "text",
    [
        "A100-80GB-SXM",
        "max is 77GB",
        "NVLink 600 GB/s inter-node",
        "400 Gb/s adapters",
        "8 x 80GB per node",
        "tp=4 at 16 GPUs per node",
    ],
)
def test_memory_and_rates_of_one_device_are_no_links_of_a_server(text: str) -> None:
    assert server_links(text) is None


def test_a_row_that_names_its_links_is_priced_with_them() -> None:
    plain, linked = cluster_of(run()).levels[-1], cluster_of(run(notes="inter-node 4 x 100Gb RoCE")).levels[-1]
    assert plain.bandwidth_bytes_per_s.value == 25e9
    assert linked.bandwidth_bytes_per_s.value / linked.devices_per_nic == pytest.approx(400e9 / 8 / 8)
    assert linked.devices_per_nic == 2
    assert "400 Gbit/s per server" in linked.bandwidth_bytes_per_s.source


def test_a_rate_for_the_whole_server_is_shared_out() -> None:
    level = cluster_of(run(source="README, 400 Gbps between nodes")).levels[-1]
    assert (level.bandwidth_bytes_per_s.value, level.devices_per_nic) == (400e9 / 8 / 8, 1)


def test_a_site_that_is_known_needs_no_note() -> None:
    internevo = cluster_of(run(family="internevo"))
    assert internevo.levels[-1] == cluster_of(run(notes="4 x 100 Gb/s per server")).levels[-1]
    assert cluster_of(run(family="bigscience")).name == "jean-zay-a100"


def test_links_of_servers_do_not_touch_a_rack_of_72() -> None:
    rack = run(accelerator="GB200", notes="400 Gbps between nodes")
    assert cluster_of(rack).levels == cluster_of(run(accelerator="GB200")).levels
