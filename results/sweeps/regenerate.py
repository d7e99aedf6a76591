"""Runs the example sweep and writes down its table and what it says: python results/sweeps/regenerate.py [--store FILE]

With a store that is kept, what is in it already is not planned again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from paraplan.optimizer.sweep_grid import read_sweep
from paraplan.optimizer.sweep_store import Store
from paraplan.optimizer.sweep_table import Row, rows_of, write_csv
from paraplan.optimizer.writing import write_file

HERE = Path(__file__).parent
SWEEP, TABLE = HERE / "7b-to-10t.yaml", HERE / "7b-to-10t.csv"
LARGEST, MOST = "moe:10T", 4096


def main(store: str) -> None:
    subprocess.run([sys.executable, "-m", "paraplan.optimizer.cli", "sweep", str(SWEEP), "--store", store], check=True)
    open_store = Store(store, write=False)
    rows = [row for _, row in rows_of(open_store, [point.key for point in read_sweep(SWEEP)])]
    open_store.close()
    write_csv([{**row, "seconds": None} for row in rows], TABLE)  # seconds differ from run to run
    write_file(HERE / "README.md", page(rows))


def page(rows: list[Row]) -> str:
    lines = "\n".join(f"{number}. {line}" for number, line in enumerate(learnt(rows), start=1))
    return f"""# 7B to 10T on four supernodes

[7b-to-10t.yaml](7b-to-10t.yaml) plans four sizes of the scaling families (`optimizer/sweep_family.py`) on four clusters at equal
counts of devices, {len(rows)} points; [7b-to-10t.csv](7b-to-10t.csv) is the table of its store. By the cost model alone, in BF16;
devices are what software addresses (a die of 910C counts as one). Regenerate with `python results/sweeps/regenerate.py`.

{lines}
"""


def learnt(rows: list[Row]) -> list[str]:
    """Five findings, each with its figures."""
    planned = [row for row in rows if row.get("step_time_s")]
    without = [f"{row['model']} on {row['devices']:,} of {row['cluster']}" for row in rows if not row.get("step_time_s")]
    large = [row for row in planned if row["model"] == LARGEST]
    most = [row for row in planned if row["devices"] == MOST]
    return [
        f"Without a plan: {', '.join(without) or 'no point'}; all others have one that fits and is optimal in its space.",
        f"MFU of {LARGEST} on {MOST:,} devices: {shares(large, lambda row: row['devices'] == MOST)}.",
        f"MFU of dense:70B on {MOST:,} devices: {shares(most, lambda row: row['model'] == 'dense:70B')}.",
        f"Layouts of {LARGEST} on {MOST:,} devices: {layouts(large)}.",
        f"From 1,024 to {MOST:,} devices, 4 sequences a device on both, tokens per second and device change by {change(planned)} "
        "over all models and clusters.",
    ]


def shares(rows: list[Row], wanted: Callable[[Row], bool]) -> str:
    return ", ".join(f"{row['mfu']:.0%} on {row['cluster']}" for row in rows if wanted(row))


def layouts(rows: list[Row]) -> str:
    names = ("tp", "cp", "pp", "vpp", "dp", "ep")
    words = ((row, " ".join(f"{name} {row[name]}" for name in names if row[name] > 1)) for row in rows if row["devices"] == MOST)
    return "; ".join(f"{layout} on {row['cluster']}" for row, layout in words)


def change(rows: list[Row]) -> str:
    """From the fewest to the most devices, the least and the largest."""
    rates = {(row["model"], row["cluster"], row["devices"]): row["tokens_per_s_per_device"] for row in rows}
    found = [
        rates[model, cluster, MOST] / rate - 1.0
        for (model, cluster, devices), rate in rates.items()
        if devices != MOST and (model, cluster, MOST) in rates
    ]
    return f"{min(found):+.0%} to {max(found):+.0%}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--store")
    given = parser.parse_args().store
    with tempfile.TemporaryDirectory() as folder:
        main(given or str(Path(folder) / "sweep.sqlite"))
