"""The arithmetic behind results/field-claims.md, by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "results" / "field-claims"))  # scripts there are no package
import claims


def test_training_state() -> None:
    """16 bytes a parameter with BF16 gradients, 18 with FP32 ones: 28.8 and 32.4 TB of 1.8T; 8 to 16 of 10¹⁴: 800 to 1,600 TB."""
    assert claims.training_state_tb(1.8e12, gradient_bytes=2) == pytest.approx(28.8)
    assert claims.training_state_tb(1.8e12) == pytest.approx(32.4)
    assert claims.training_state_tb(1e14, gradient_bytes=2, optimizer_bytes=4) == pytest.approx(800)
    assert claims.training_state_tb(1e14, gradient_bytes=2) == pytest.approx(1600)


def test_checkpoint_of_ten_trillion() -> None:
    assert claims.checkpoint_tb() == pytest.approx(140, rel=0.01)


def test_all_reduce_volume_tends_to_twice_the_size() -> None:
    """2·10·399/400 = 19.95 GB per card: 0.4 s at 50 GB/s and 1.6 s at 12.5."""
    assert claims.all_reduce_sent_gb(400) == pytest.approx(19.95)
    assert claims.all_reduce_sent_gb(400, cluster="atlas-800t-a2") == pytest.approx(19.95)
    assert claims.all_reduce_sent_gb(4000) < 20.0
    assert claims.all_reduce_sent_gb(8) == pytest.approx(17.5)
    assert 0.02 < claims.all_reduce_s(400) < 1.6


def test_card_years() -> None:
    """6·10²⁷ / 10¹⁵ s are 190,259 years of 365 days; 6,000 cards do 1.9·10²⁶ in one."""
    flops = claims.flops_of(1e14, 1e13)
    assert claims.card_years(flops, 1e15) == pytest.approx(190_259, rel=1e-5)
    assert claims.devices_for(1e14, 1e13, 30, 3e14) == pytest.approx(7.716e6, rel=1e-3)


def test_failures_of_ten_thousand_cards() -> None:
    """10,000 · 0.001 / 365.25 = 0.0274 a day."""
    assert claims.failures_per_day(0.001, 10_000) == pytest.approx(0.02738, rel=1e-3)


def test_the_save_for_which_300_s_is_best() -> None:
    save = claims.longest_save_s(300, 3 * 3600.0)
    assert save == pytest.approx(300**2 / (2 * 10_800), rel=0.03)
    assert float(claims.best_interval_s(save, 3 * 3600.0)) == pytest.approx(300, rel=1e-6)


def test_readings_of_mfu() -> None:
    """45·1.12·1.07·1.08 = 58.2; 45/(0.88·0.93·0.92) = 59.8; 45/0.73 = 61.6."""
    assert list(claims.mfu_readings(0.45, (0.12, 0.07, 0.08)).values()) == pytest.approx([0.5824, 0.5977, 0.6164], rel=1e-3)


def test_a_cluster_without_its_supernode() -> None:
    cluster = claims.load_cluster("cloudmatrix-384")
    flat = claims.without_supernode(cluster)
    assert [level.name for level in flat.levels] == ["package", "server", "scale-out"] and flat.supernode == "server"
    assert flat.levels[-1] == cluster.levels[-1] and flat.pool is None


def test_the_arithmetic_claims_are_told() -> None:
    told = list(claims.arithmetic_claims())
    assert len(told) == 9
    assert {claim.verdict for claim in told} == {"agrees", "wrong", "depends"}
