"""Shows a job whose best layout depends on what fails as one: python results/goodput/regenerate.py

Writes README.md beside it, and stops where no layout does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from paraplan.optimizer import Plan, build_problem, plan
from paraplan.optimizer.reports.sizing import span
from paraplan.optimizer.writing import write_file
from paraplan.search_spaces.cluster import FailureRates
from paraplan.search_spaces.inputs import load_cluster

HERE = Path(__file__).parent
MODEL, CLUSTER, DEVICES, BATCH, SEQ_LEN = "llama-3.1-70b", "cloudmatrix-384", 784, 9408, 4096
FIX = "micro_batch=1,cp=1|2,rank_order=tp-cp-ep-dp-pp,offload=none,optimizer_sharding=zero1"
PER_DIE, DIES = 0.17, 768
WIDTH = 132
DEGREES = ("tp", "cp", "pp", "dp", "vpp")
HEADS = ("fails as one", "dies", "layout", "step", "goodput", "a failure every", "step with failures", "the fastest layout's")


@dataclass(frozen=True)
class Domain:
    """What fails as one, in words, and how often a year."""

    words: str
    rates: dict[str, float]


DOMAINS = (
    Domain("a die, back after 4 h", {"device_per_year": PER_DIE, "restart_s": 4 * 3600.0}),
    Domain("a supernode, back after 10 min", {"supernode_per_year": PER_DIE * DIES, "restart_s": 600.0}),
    Domain("a supernode, back after 2 h", {"supernode_per_year": PER_DIE * DIES, "restart_s": 2 * 3600.0}),
    Domain("a supernode, back after 4 h", {"supernode_per_year": PER_DIE * DIES, "restart_s": 4 * 3600.0}),
)


@dataclass(frozen=True)
class Answer:
    """The best layout where so much fails at once; `fastest_s` is a step with failures of the layout whose step is shortest."""

    words: str
    dies: int
    layout: str
    step_s: float
    goodput: float
    mtbf_s: float
    effective_s: float
    fastest_s: float | None
    legal: int

    @classmethod
    def of(cls, domain: Domain, found: Plan) -> Answer:
        layout, goodput, proof = found.plan.layout, found.goodput, found.front_certificate
        assert goodput is not None and proof is not None and proof.method == "exact"
        return cls(
            domain.words,
            found.plan.devices_used,
            " ".join(f"{name} {getattr(layout, name)}" for name in DEGREES),
            found.plan.step_time_s,
            goodput.goodput,
            goodput.mtbf_s,
            goodput.effective_step_s,
            goodput.fastest_effective_s,
            proof.legal,
        )

    @property
    def cells(self) -> tuple[str, ...]:
        """Its row of the table."""
        fastest = "the same" if self.fastest_s is None else f"{self.fastest_s:.2f} s"
        shown = (f"{self.step_s:.2f} s", f"{self.goodput:.2%}", span(self.mtbf_s), f"{self.effective_s:.2f} s", fastest)
        return (self.words, f"{self.dies:,}", self.layout, *shown)


def main() -> int:
    answers = [answer(domain) for domain in DOMAINS]
    write_file(HERE / "README.md", page(answers))
    return 0


def answer(domain: Domain) -> Answer:
    """The plan with the best goodput where so much fails at once."""
    cluster = load_cluster(CLUSTER).model_copy(update={"failures": FailureRates.model_validate(domain.rates)})
    return Answer.of(domain, plan(build_problem(MODEL, cluster, DEVICES, BATCH, SEQ_LEN, fix=FIX), objective="goodput"))


def page(answers: Sequence[Answer]) -> str:
    """The page: what was asked, what came of it, and the table. AssertionError where no domain has a layout of its own."""
    lines = [
        f"| {' | '.join(HEADS)} |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
        *(f"| {' | '.join(one.cells)} |" for one in answers),
    ]
    return (
        f"""# A layout that failures choose

`python results/goodput/regenerate.py` writes this page. {MODEL} on {DEVICES:,} dies of {CLUSTER}, {BATCH:,} sequences of
{SEQ_LEN:,} tokens a step, `--objective goodput` over all layouts with `--fix "{FIX}"`.

The job has a whole supernode of {DIES} dies and {DEVICES - DIES} dies of a second. A die fails {PER_DIE} times a year in every row
(assumed, as is when it is back; nobody has published either); what differs is what it takes with it.

{found(answers)}

"""
        + "\n".join(lines)
        + f"\n\nEach row is exact over {answers[0].legal:,} legal layouts.\n"
    )


def found(answers: Sequence[Answer]) -> str:
    """What the answers say, in sentences: the first one's layout, whose it stays, and what is best elsewhere."""
    first, *others = answers
    moved = [one for one in others if (one.dies, one.layout) != (first.dies, first.layout)]
    assert moved, "every domain of failure has the same best layout: the page has nothing to show"
    same = [one.words for one in others if one not in moved]
    kept = f" So it is where this fails as one: {'; '.join(same)}." if same else ""
    lines = [f"Where {first.words}, is all that fails as one, the best layout has {first.dies:,} dies: {first.layout}.{kept}"]
    for one in moved:
        assert one.fastest_s is not None and one.fastest_s > one.effective_s, "the layout that failures choose is the fastest one"
        idle = f", and {DEVICES - one.dies:,} are idle" if one.dies < DEVICES else ""
        lines.append(
            f"Where it is {one.words}, the best has {one.dies:,} dies{idle}: {one.layout}. Its step is "
            f"{one.step_s / first.step_s - 1:.1%} longer, but with failures, one every {span(one.mtbf_s)}, it takes "
            f"{one.effective_s:.2f} s; that of the fastest layout takes {one.fastest_s:.2f} s, "
            f"{one.fastest_s / one.effective_s - 1:.1%} more."
        )
    return fill(" ".join(lines), WIDTH)


if __name__ == "__main__":
    sys.exit(main())
