"""MindSpeed's own verdict on exported options: Megatron-LM 0.12's parser, MindSpeed's, and the validators of its features.

    python tests/exporters/mindspeed_proof.py --megatron ~/Megatron-LM --mindspeed ~/MindSpeed --mindspeed-llm ~/MindSpeed-LLM

needs torch, a checkout of Megatron-LM at core_v0.12.1 and checkouts of the other two. Ascend's packages are stood in for; an
option that neither parser knows must be one that MindSpeed-LLM registers.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import warnings
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

warnings.filterwarnings("ignore")
STOOD_IN = ("torch_npu", "torchair", "transformer_engine", "apex", "mindspeed.patch_utils", "mindspeed.deprecate")
PROBLEMS = (
    ("llama-3.1-70b", 256, 1024, 8192),
    ("deepseek-v3", 512, 7680, 4096),
    ("qwen3-235b-a22b", 512, 2048, 4096),
)


def features(mindspeed: Path) -> list[Any]:
    """One of every feature that can be made on this machine."""
    for name in STOOD_IN:
        sys.modules.setdefault(name, MagicMock())
    root = mindspeed / "mindspeed" / "features_manager"
    package = ModuleType("mindspeed.features_manager")  # its own __init__ imports all of Ascend's software
    package.__path__ = [str(root)]
    sys.path.insert(0, str(mindspeed))
    sys.modules["mindspeed.features_manager"] = package
    base = importlib.import_module("mindspeed.features_manager.feature").MindSpeedFeature
    made = {}
    for module in pkgutil.walk_packages([str(root)], "mindspeed.features_manager."):
        try:
            loaded = importlib.import_module(module.name)
        except Exception:  # one that needs more of Ascend's software
            continue
        for kind in vars(loaded).values():
            if isinstance(kind, type) and issubclass(kind, base) and kind is not base and kind.__name__ not in made:
                try:
                    made[kind.__name__] = kind()
                except TypeError:
                    continue
    return list(made.values())


def parser_of(megatron: Path) -> argparse.ArgumentParser:
    """Megatron-LM's own; made before Ascend's packages are stood in for, as it asks for versions of what it finds."""
    sys.path.insert(0, str(megatron))
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(conflict_handler="resolve", allow_abbrev=False)
    add_megatron_arguments(parser)
    return parser


def register(parser: argparse.ArgumentParser, made: list[Any]) -> None:
    for feature in made:
        try:
            feature.register_args(parser)
        except Exception as error:
            print(f"{type(feature).__name__} registers nothing here: {error}")


def accepts(parser: argparse.ArgumentParser, made: list[Any], known: str, plan: Any, version: str | None) -> Counter[str]:
    """Raises what a validator raises; counts the validators that ran."""
    from paraplan.optimizer.exporters.mindspeed_llm import flags

    words = [word for option in flags(plan, version) for word in option]
    args, unknown = parser.parse_known_args(words)
    strange = [word for word in unknown if word.startswith("--") and f'"{word}"' not in known and f"'{word}'" not in known]
    assert not strange, f"options that nobody registers: {strange}"
    layout = plan.plan.layout
    args.data_parallel_size, args.world_size = layout.dp, layout.devices
    args.use_custom_fsdp = getattr(args, "use_custom_fsdp", False)
    args.virtual_pipeline_model_parallel_size = layout.vpp if layout.vpp > 1 and layout.schedule == "interleaved" else None
    ran = Counter[str]()
    for feature in made:
        before = vars(args).copy()
        try:
            feature.validate_args(args)
            ran[type(feature).__name__] += 1
        except (AttributeError, ImportError, NameError, TypeError):
            vars(args).update(before)  # it reads what only a whole run has
    return ran


def main() -> int:
    from paraplan.search_spaces.errors import Infeasible
    from proving import judge, options, report
    from random_plans import plans

    wanted = options(__doc__, 300)
    for name in ("--megatron", "--mindspeed", "--mindspeed-llm"):
        wanted.add_argument(name, type=Path, required=True)
    wanted.add_argument("--version")
    given = wanted.parse_args()
    parser = parser_of(given.megatron)
    made = features(given.mindspeed)
    register(parser, made)
    sources = (given.mindspeed_llm / "mindspeed_llm", given.mindspeed / "mindspeed" / "features_manager")
    known = "\n".join(path.read_text("utf-8") for source in sources for path in source.rglob("*.py"))
    ran, unsaid = Counter[str](), 0

    def judged(plan: Any) -> None:
        nonlocal unsaid
        try:
            ran.update(accepts(parser, made, known, plan, given.version))
        except Infeasible:  # random cuts may leave a first stage of dense layers and no-ops, which MindSpeed-LLM refuses too
            unsaid += 1

    verdict = judge(plans(given.plans, given.seed, "mindspeed-llm", "cloudmatrix-384", PROBLEMS), judged)
    most = max(ran.values(), default=0)
    print(f"{most} plans reached the validators, {unsaid} were refused in words before")
    print(f"{sum(times == most for times in ran.values())} validators ran on every plan that did")
    return report(verdict, given.plans)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
