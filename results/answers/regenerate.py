"""Asks what a plan answers beyond the fastest layout and writes down what is said: python results/answers/regenerate.py"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from paraplan.optimizer.writing import write_file

HERE = Path(__file__).parent
SMALL = "llama-3.1-8b --cluster hgx-h100 --devices 64 --global-batch 256 --seq-len 4096"
LARGE = "llama-3.1-70b --cluster hgx-h100 --devices 64 --global-batch 256 --seq-len 8192"
CURRENT = "tp=4,pp=4,vpp=4,recompute=full\n"
WIDTH = "100"


@dataclass(frozen=True)
class Question:
    """A command (without `paraplan`), what it answers, and the heading from which on its output is shown, to before another."""

    title: str
    words: str
    meaning: str
    begin: str = ""
    end: str = ""


TIGHT = "llama-3.1-8b --cluster hgx-h100 --devices 2 --global-batch 32 --seq-len 4096"
QUESTIONS = (
    Question(
        "What each choice buys", "why plan.json", "The best layout without each choice of the plan, by an exact search again."
    ),
    Question(
        "Why not another",
        "why plan.json --not tp=8,pp=4",
        "The best layout that has what is named, and the way to it. What a decision adds depends on those taken before it, so "
        "its bar is the mean over all orders (Shapley value); layouts in between count even if they are illegal or too large.",
    ),
    Question(
        "Where two layouts differ",
        "compare-layouts plan.json --alternative 1",
        "Bars add up to the difference.",
    ),
    Question(
        "From a running job",
        f"plan {LARGE} --from current.txt -q",
        f"`current.txt` holds `{CURRENT.strip()}`.",
        "From current.txt",
        "Certificate",
    ),
    Question(
        "Several aims",
        f"plan {SMALL} --objective step-time,memory -q",
        "The front: no layout is better than a shown one in one aim and as good in the other.",
        "Front",
        "Certificate",
    ),
    Question(
        "Other hardware",
        f"plan {SMALL} --sensitivity -q",
        "Each row, and both sides of each threshold, is a search of its own.",
        "On other hardware",
        "Certificate",
    ),
    Question(
        "Figures in doubt",
        f"plan {SMALL} --robust -q",
        "The best layouts of all scenarios tried in all of them; the robust one is that whose worst regret is least.",
        "Robust",
        "Certificate",
    ),
    Question(
        "Knobs beyond the space",
        f"plan {TIGHT} --refine -q",
        "Optuna goes on from the plan, CP-SAT keeps what it tries legal; not proved, and never worse.",
        "Refined",
        "Certificate",
    ),
)


def asked(question: Question, folder: Path) -> str:
    """What the command prints, the part that answers."""
    command = [sys.executable, "-m", "paraplan.optimizer.cli", *question.words.split()]
    ran = subprocess.run(command, cwd=folder, env={**os.environ, "COLUMNS": WIDTH}, capture_output=True, text=True, check=True)
    lines = ran.stdout.splitlines()
    begin = next((i for i, line in enumerate(lines) if question.begin and line.startswith(question.begin)), 0)
    end = next((i for i, line in enumerate(lines) if question.end and i > begin and line.startswith(question.end)), len(lines))
    return "\n".join(lines[begin:end]).strip("\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = subprocess.run(
            [sys.executable, "-m", "paraplan.optimizer.cli", "plan", *LARGE.split(), "--json"],
            capture_output=True,
            text=True,
            check=True,
        )
        (folder / "plan.json").write_text(made.stdout, encoding="utf-8")
        (folder / "current.txt").write_text(CURRENT, encoding="utf-8")
        parts = [
            "# What a plan answers beyond the fastest layout",
            f"`python results/answers/regenerate.py` writes this page. `plan.json` is of `paraplan plan {LARGE} --json`.",
        ]
        for question in QUESTIONS:
            answer = f"```\n$ paraplan {question.words.removesuffix(' -q')}\n{asked(question, folder)}\n```"
            parts += [f"## {question.title}", question.meaning, answer]
    write_file(HERE / "README.md", "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
