"""Shows a job whose best layout depends on what fails as one: python results/goodput/regenerate.py

Writes README.md beside it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from paraplan.optimizer import Plan, build_problem, plan
from paraplan.optimizer.reports.sizing import span
from paraplan.optimizer.writing import write_file
from paraplan.search_spaces.cluster import FailureRates
from paraplan.search_spaces.inputs import load_cluster

HERE = Path(__file__).parent
MODEL, CLUSTER, DEVICES, BATCH, SEQ_LEN = "llama-3.1-405b", "cloudmatrix-384", 1568, 1568, 4096
FIX = "micro_batch=1,cp=1|2,rank_order=tp-cp-ep-dp-pp,offload=none,optimizer_sharding=zero1"
PER_DIE, DIES = 0.17, 768


@dataclass(frozen=True)
class Domain:
    """What fails as one, in words, and how often a year."""

    words: str
    rates: dict[str, float]


DOMAINS = (
    Domain("a die, back after 1 h", {"device_per_year": PER_DIE, "restart_s": 3600.0}),
    Domain("a supernode, back after 1 h", {"supernode_per_year": PER_DIE * DIES, "restart_s": 3600.0}),
    Domain("a supernode, back after 10 min", {"supernode_per_year": PER_DIE * DIES, "restart_s": 600.0}),
)
REST = DEVICES - 2 * DIES
HEAD = f"""# A layout that failures choose

`python results/goodput/regenerate.py` writes this page. {MODEL} on {DEVICES:,} dies of {CLUSTER}, {BATCH:,} sequences of
{SEQ_LEN:,} tokens a step, `--objective goodput` over all layouts with `--fix "{FIX}"`.

The job has two whole supernodes of {DIES} dies and {REST} dies of a third. A die fails {PER_DIE} times a year (assumed; nobody has
published a rate) in every row; what differs is what it takes with it. Where it stops the job alone, all dies are worth having.
Where it takes its supernode down, the third supernode fails as often as a whole one for the work of {REST} dies: the best layout
leaves them idle, though its step is longer.

"""


def main() -> int:
    write_file(HERE / "README.md", HEAD + table([(domain, answer(domain)) for domain in DOMAINS]))
    return 0


def answer(domain: Domain) -> Plan:
    """The plan with the best goodput where so much fails at once."""
    cluster = load_cluster(CLUSTER).model_copy(update={"failures": FailureRates.model_validate(domain.rates)})
    return plan(build_problem(MODEL, cluster, DEVICES, BATCH, SEQ_LEN, fix=FIX), objective="goodput")


def table(answers: list[tuple[Domain, Plan]]) -> str:
    """A row for every domain."""
    heads = ("fails as one", "dies", "layout", "step", "goodput", "a failure every", "step with failures", "the fastest layout's")
    lines = [f"| {' | '.join(heads)} |", "|---|---:|---|---:|---:|---:|---:|---:|"]
    for domain, found in answers:
        layout, goodput = found.plan.layout, found.goodput
        assert goodput is not None and found.front_certificate is not None and found.front_certificate.method == "exact"
        degrees = " ".join(f"{name} {getattr(layout, name)}" for name in ("tp", "cp", "pp", "dp", "vpp"))
        other = f"{goodput.fastest_effective_s:.2f} s" if goodput.fastest_effective_s is not None else "the same"
        cells = (
            domain.words,
            f"{found.plan.devices_used:,}",
            degrees,
            f"{found.plan.step_time_s:.2f} s",
            f"{goodput.goodput:.2%}",
            span(goodput.mtbf_s),
            f"{goodput.effective_step_s:.2f} s",
            other,
        )
        lines.append(f"| {' | '.join(cells)} |")
    legal = answers[0][1].front_certificate
    assert legal is not None
    return "\n".join(lines) + f"\n\nEach row is exact over {legal.legal:,} legal layouts.\n"


if __name__ == "__main__":
    sys.exit(main())
