"""Whether every field that an exported program sets is one of Megatron-Bridge's: read off its sources, as it needs a GPU to load.

    python tests/exporters/megatron_bridge_proof.py --bridge DIR --megatron DIR --version 0.6

needs checkouts of Megatron-Bridge and of the Megatron-LM that it stands on. The values are for megatron_core_proof.py to judge.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

Classes = dict[str, tuple[set[str], set[str]]]
"""Class → its own fields, and its bases by name."""
MODELS = {"Provider": ("MLATransformerConfig", "GPTModelProvider")}
"""A class that the program itself defines, and its bases."""


def classes(root: Path) -> Classes:
    """Dataclass fields and parameters of __init__ of all classes below a folder."""
    found: Classes = {}
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                fields, bases = found.setdefault(node.name, (set(), set()))
                bases |= {base.id for base in node.bases if isinstance(base, ast.Name)}
                for part in node.body:
                    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                        fields.add(part.target.id)
                    elif isinstance(part, ast.FunctionDef) and part.name == "__init__":
                        fields |= {argument.arg for argument in part.args.args}
    return found


def fields_of(name: str, known: Classes, seen: frozenset[str] = frozenset()) -> set[str]:
    """Fields of a class and of its bases; Megatron-Bridge imports those of Megatron-LM under the prefixes MCore and MTrain."""
    fields, bases = known.get(name, (set(), set()))
    names = {base.removeprefix(prefix) for base in bases for prefix in ("", "MCore", "MTrain")} - {*seen, name}
    return fields.union(*(fields_of(base, known, seen | {name}) for base in names))


def accepts(plan: Any, known: Classes, version: str) -> None:
    """AssertionError with what no class has."""
    from paraplan.optimizer.exporters.megatron_bridge import CLASSES, FILE, files

    for node in ast.walk(ast.parse(files(plan, version)[FILE])):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        name = node.func.id
        if name in (*CLASSES.values(), "ConfigContainer", "GPTModelProvider", "Provider"):
            own = set().union(*(fields_of(base, known) for base in MODELS.get(name, (name,))))
            strange = {str(keyword.arg) for keyword in node.keywords} - own
            assert not strange, f"{name} has no {', '.join(sorted(strange))}"


def main() -> int:
    from proving import judge, options, report
    from random_plans import plans

    parser = options(__doc__, 200)
    for name in ("--bridge", "--megatron"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--version", default="0.6")
    given = parser.parse_args()
    known = classes(given.megatron / "megatron")
    for name, (fields, bases) in classes(given.bridge / "src").items():
        own, theirs = known.setdefault(name, (set(), set()))
        own |= fields
        theirs |= bases
    verdict = judge(plans(given.plans, given.seed), lambda plan: accepts(plan, known, given.version))
    return report(verdict, given.plans)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
