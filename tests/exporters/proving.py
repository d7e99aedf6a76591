"""What the proofs share: plans judged one by one, and the count of what was accepted."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable

from paraplan.optimizer.result import Plan
from paraplan.search_spaces.errors import Infeasible

Verdict = tuple[int, Counter[str]]


def judge(drawn: Iterable[Plan], accepts: Callable[[Plan], object]) -> Verdict:
    """How many plans are accepted, and what the others were refused for: by the exporter, or by the framework."""
    accepted, refused = 0, Counter[str]()
    for plan in drawn:
        try:
            accepts(plan)
            accepted += 1
        except Infeasible as error:
            refused[f"exporter: {error.reasons or error}"] += 1
        except (Exception, SystemExit) as error:
            refused[f"framework: {plan.problem.model.name}: {type(error).__name__}: {error}"] += 1
    return accepted, refused


def options(description: str | None, plans: int) -> argparse.ArgumentParser:
    """The options of every proof: how many plans, and which."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=plans)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def report(verdict: Verdict, plans: int) -> int:
    """Prints a verdict; the exit status."""
    accepted, refused = verdict
    print(f"legal plans: {accepted} of {plans} accepted")
    for reason, times in refused.most_common(20):
        print(f"  {times} x {reason[:400]}")
    return int(accepted < plans)
