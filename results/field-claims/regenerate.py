"""Holds claims of field reports to the product's own numbers: python results/field-claims/regenerate.py

Writes results/field-claims.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

from paraplan.optimizer.streams import Meter
from paraplan.optimizer.training_run import arithmetic
from paraplan.optimizer.writing import write_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from claims import Claim, arithmetic_claims, planned_claims  # noqa: E402

HEAD = """# What field reports claim

`python results/field-claims/regenerate.py` writes this page. Every number is computed by the functions that plans are priced with;
`claims.py` holds one small function for each.

"""
ARITHMETIC = """
## The arithmetic, line by line

10¹⁴ parameters on 10¹³ tokens in 30 days, at 300 effective TFLOP/s a device: 7.7 million devices, not thousands. N is what a token
uses: a dense model of 10T on as many tokens takes 6·10²⁶, a mixture of 10T only its active part.

"""


def main() -> int:
    with Meter(shown=True) as meter:
        claims = [*arithmetic_claims(), *planned_claims(meter)]
    write_file(HERE.parent / "field-claims.md", page(claims))
    return 0


def page(claims: list[Claim]) -> str:
    """The claims as a table, in their order."""
    lines = ["| claimed | our number | | why |", "|---|---|---|---|"]
    lines += [f"| {one.said} | {one.ours} | **{one.verdict}** | {one.because} |" for one in claims]
    return HEAD + "\n".join(lines) + "\n" + ARITHMETIC + "\n".join(steps()) + "\n"


def steps() -> list[str]:
    """What `paraplan size` shows of a run, for parameters and tokens alone."""
    rows = ["| | | | |", "|---|---|---:|---|"]
    for line in arithmetic(1e14, 1e13, 30.0, 3e14, "effective, of a device"):
        rows.append(f"| {line.name} | {line.expression} | {line.value:.4g} | {line.unit} |")
    return rows


if __name__ == "__main__":
    sys.exit(main())
