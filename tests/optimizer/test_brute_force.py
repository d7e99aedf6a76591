"""A sample of the comparison that results/benchmarks/brute_force.py makes on a thousand problems."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from against_listing import compared, tiny_problems


@pytest.mark.parametrize("first_seed", range(0, 100_000, 25_000))
def test_a_sample_of_tiny_problems_is_solved_like_by_listing(first_seed: int) -> None:
    for problem in islice(tiny_problems(first_seed), 2):
        assert compared(problem).differences == ()
