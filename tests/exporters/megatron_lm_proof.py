"""Megatron-LM's own verdict on exported options: its parser, validate_args, and the configuration that it makes of them.

    python tests/exporters/megatron_lm_proof.py --checkout ~/Megatron-LM --version 0.16 --plans 300

needs torch and a checkout of the version. What asks a GPU or Transformer Engine for its version is answered in their stead.
"""

from __future__ import annotations

import os
import sys
import types
import typing
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

OPEN = {
    "--data-path": "data",
    "--tokenizer-model": "tokenizer",
    "--save": "checkpoints",
    "--load": "checkpoints",
    "--split": "100,0,0",
    "--train-iters": "10",
    "--lr": "1e-4",
    "--norm-epsilon": "1e-5",
    "--save-interval": "500",
    "--tokenizer-type": "HuggingFaceTokenizer",
    "--attention-dropout": "0.0",
    "--hidden-dropout": "0.0",
    "--vocab-size": "128000",
}
"""What a plan leaves to the person who launches."""
NO_BUILD = {"--moe-permute-fusion", "--no-rope-fusion"}
"""Options that import a kernel of Transformer Engine, which has no CPU build."""


def load(checkout: Path) -> Any:
    """megatron.training.arguments of the checkout, on a machine without a GPU."""
    import torch

    sys.path.insert(0, str(checkout))
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined, unused-ignore]
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0, name="H100")  # type: ignore[assignment]
    from megatron.training import arguments

    for name in ("get_device_arch_version", "is_te_min_version"):
        if hasattr(arguments, name):
            setattr(arguments, name, (lambda *_: 9) if name.startswith("get") else (lambda *_, **__: True))
    from megatron.core import utils
    from packaging.version import Version

    utils._te_version = Version("2.9.0")
    return arguments


def accepts(arguments: Any, plan: Any, version: str) -> None:
    """Raises what Megatron-LM raises on the options of a plan."""
    from paraplan.optimizer.exporters.megatron_lm import environment, flags

    queues = environment(plan, version).get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if queues is not None:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = queues
    os.environ |= {"RANK": "1", "WORLD_SIZE": str(plan.plan.layout.devices), "LOCAL_RANK": "1"}
    decided = [word for words in flags(plan, version) if words[0] not in NO_BUILD for word in words]
    opened = [word for pair in OPEN.items() for word in pair]
    if plan.problem.model.is_moe:
        opened += ["--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-3"]
    if any(words[0] == "--multi-latent-attention" for words in flags(plan, version)):
        opened += [*(["--rope-type", "rope"] if version != "0.12" else []), "--no-rope-fusion"]
    elif not plan.problem.model.learned_positions:
        opened += ["--no-rope-fusion"]
    sys.argv = ["pretrain_gpt.py", *decided, *opened]
    args = arguments.parse_args()
    arguments.validate_args(args)
    arguments.core_transformer_config_from_args(args)


def main() -> int:
    from proving import judge, options, report
    from random_plans import PROBLEMS, plans

    parser = options(__doc__, 300)
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--version", default="0.16")
    parser.add_argument("--stack", default="megatron-lm")
    parser.add_argument("--without", nargs="*", default=[], help="models that the version does not build")
    given = parser.parse_args()
    arguments = load(given.checkout)
    problems = tuple(case for case in PROBLEMS if case[0] not in given.without)
    drawn = plans(given.plans, given.seed, given.stack, "hgx-h100", problems)
    verdict = judge(drawn, lambda plan: accepts(arguments, plan, given.version))
    return report(verdict, given.plans)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
