"""What a cluster record accepts, and how a job of so many devices sits on its levels."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paraplan.search_spaces.cluster import Accelerator, ClusterSpec, Figure, Level
from paraplan.search_spaces.inputs import load_cluster
from pydantic import ValidationError


def figure(value: float) -> dict[str, Any]:
    return {"value": value, "source": "test", "grade": "measured"}


def cluster(sizes: dict[str, int | None], supernode: str = "server", **changes: Any) -> ClusterSpec:
    levels = [
        {"name": name, "size": size, "bandwidth_bytes_per_s": figure(50e9), "latency_s": figure(1e-6)}
        for name, size in sizes.items()
    ]
    accelerator = {
        "name": "chip",
        "vendor": "nvidia",
        "peak_flops": {"bf16": figure(1e15)},
        "memory_bytes": figure(80e9),
        "memory_bandwidth_bytes_per_s": figure(3e12),
    }
    record = {
        "name": "made-up",
        "accelerator": accelerator,
        "levels": levels,
        "supernode": supernode,
        "host_link": {
            "bandwidth_bytes_per_s": figure(50e9),
            "memory_bandwidth_bytes_per_s": figure(50e9),
            "memory_bytes_per_device": figure(250e9),
        },
        "default_stack": "megatron-lm",
        "communicator_bytes": figure(0.2e9),
        "context_bytes": figure(1e9),
    }
    return ClusterSpec.model_validate(record | changes)


def refusal(*arguments: Any, **changes: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        cluster(*arguments, **changes)
    return str(caught.value)


def test_sizes_must_nest() -> None:
    assert "must be greater than 'server''s 8" in refusal({"server": 8, "rack": 8, "core": None})
    assert "must be a multiple of 'server''s 8, as is 96" in refusal({"server": 8, "rack": 100, "core": None})
    assert "leave its size out" in refusal({"server": 8, "core": 1024})
    assert "'server' needs a size" in refusal({"server": None, "core": None})
    assert refusal({"core": None})


def test_supernode_names_a_level_with_a_size() -> None:
    assert "must name a level with a size: server" in refusal({"server": 8, "core": None}, supernode="core")
    assert "rename the level" in refusal({"server": 8, "supernode": 64, "core": None}, supernode="server")


def test_the_word_supernode_finds_the_scale_up_level() -> None:
    made_up = cluster({"server": 8, "core": None})
    assert made_up.level_name("supernode") == "server"
    assert made_up.level_name("core") == "core"
    with pytest.raises(KeyError):
        made_up.level_name("pod")


def test_context_must_leave_memory() -> None:
    assert "leaves nothing" in refusal({"server": 8, "core": None}, context_bytes=figure(80e9))


@pytest.mark.parametrize("value", [450, 450e18])
def test_a_wrong_unit_is_noticed(value: float) -> None:
    with pytest.raises(ValidationError, match="450 GB/s is 450e9"):
        Level.model_validate({"name": "server", "size": 8, "bandwidth_bytes_per_s": figure(value), "latency_s": figure(1e-6)})


def test_precisions_are_ours() -> None:
    with pytest.raises(ValidationError, match="'fp7' is not one of bf16, fp16, fp8, fp4"):
        Accelerator.model_validate(
            {
                "name": "chip",
                "vendor": "amd",
                "peak_flops": {"fp7": figure(1e15)},
                "memory_bytes": figure(80e9),
                "memory_bandwidth_bytes_per_s": figure(3e12),
            }
        )


def test_an_assumed_figure_needs_its_interval() -> None:
    with pytest.raises(ValidationError, match="needs low and high"):
        Figure.model_validate({"value": 1.0, "source": "guess", "grade": "assumed"})
    with pytest.raises(ValidationError, match="outside its own interval, 2 to 3"):
        Figure.model_validate({"value": 1.0, "source": "guess", "grade": "assumed", "low": 2.0, "high": 3.0})


def test_a_bare_number_is_a_given_figure() -> None:
    assert Figure.model_validate(50e9).grade == "given"
    assert Figure.model_validate("50e9").value == 50e9  # YAML 1.1 reads 50e9 as text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "nan", "inf", True, None, []])
def test_a_figure_is_a_finite_amount(value: Any) -> None:
    with pytest.raises(ValidationError):
        Figure.model_validate(value)


@pytest.mark.parametrize(
    ("name", "devices", "sizes"),
    [
        ("gb200-nvl72", 256, (4, 64, 256)),  # four racks, 64 of 72 in each
        ("gb200-nvl72", 72, (4, 72, 72)),
        ("cloudmatrix-384", 512, (2, 16, 512, 512)),  # one supernode, not full
        ("cloudmatrix-384", 2048, (2, 16, 768, 2048)),  # 2048 over three is not whole: two full and one part empty
        ("cloudmatrix-384", 1, (1, 1, 1, 1)),
        ("hgx-h100", 4, (4, 4)),
        ("three-tier-h100", 512, (8, 256, 512)),
    ],
)
def test_allocated_sizes(name: str, devices: int, sizes: tuple[int, ...]) -> None:
    assert load_cluster(name).allocated_sizes(devices) == sizes


@pytest.mark.parametrize(
    ("name", "devices", "share", "sizes"),
    [
        ("gb200-nvl72", 276, 72, (4, 72, 276)),  # 72, 72, 72 and 60, where 69 in each is what the cluster allocates
        ("gb200-nvl72", 276, 69, (4, 69, 276)),
        ("gb200-nvl72", 108, 36, (4, 36, 108)),
        ("gb200-nvl72", 60, 72, (4, 60, 60)),  # one rack, of whatever share
        ("cloudmatrix-384", 1152, 768, (2, 16, 768, 1152)),
        ("cloudmatrix-384", 24, 12, (2, 12, 12, 24)),
        ("three-tier-h100", 600, 7, (7, 224, 600)),  # 86 servers fill leaves of 32
        ("three-tier-h100", 420, 7, (7, 210, 420)),  # 60 servers lie evenly, 30 below each of two leaves
    ],
)
def test_supernodes_have_the_share_that_is_said(name: str, devices: int, share: int, sizes: tuple[int, ...]) -> None:
    assert load_cluster(name).allocated_sizes(devices, share) == sizes


@given(devices=st.integers(1, 10**6), inner=st.integers(1, 16), outer=st.integers(2, 64))
def test_an_allocation_fits_and_uses_the_fewest_units(devices: int, inner: int, outer: int) -> None:
    made_up = cluster({"server": inner, "rack": inner * outer, "core": None})
    server, rack, whole = made_up.allocated_sizes(devices)
    assert whole == devices
    assert 1 <= server <= min(inner, rack) and rack <= min(inner * outer, devices)
    for part, total, size in ((rack, devices, inner * outer), (server, rack, inner)):
        units = -(-total // size)
        assert -(-total // part) == units
        assert part * units == total or part == size


def test_a_job_has_at_least_one_device() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        load_cluster("hgx-h100").allocated_sizes(0)
    with pytest.raises(ValueError, match="at least 1"):
        load_cluster("hgx-h100").allocated_sizes(8, 0)
