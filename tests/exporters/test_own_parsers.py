"""A sample of exported plans before torchtitan and DeepSpeed themselves; torchtitan_proof.py and deepspeed_proof.py run hundreds.

Each proof makes fake process groups and changes its process, so it gets one of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("module", "proof", "count"), [("torchtitan", "torchtitan_proof.py", 8), ("deepspeed", "deepspeed_proof.py", 20)]
)
def test_sampled_plans_are_accepted(module: str, proof: str, count: int, tmp_path: Path) -> None:
    if find_spec(module) is None:
        pytest.skip("the extra export-proof is not installed")
    command = [sys.executable, str(Path(__file__).parent / proof), "--plans", str(count), "--seed", "11"]
    compiled = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path)}  # a killed build leaves a lock there
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=compiled)
    assert f"legal plans: {count} of {count} accepted" in done.stdout, done.stdout + done.stderr[-2000:]
    assert done.returncode == 0
