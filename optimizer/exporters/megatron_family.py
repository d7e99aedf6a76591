"""How a member of the Megatron family is exported: its settings by what they set, and the scripts that carry them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..result import Plan
from .folder import folder
from .knobs import Settings
from .launch import SAVE_INTERVAL, Script, Variable, launch_script, norm_epsilon, rotary_base
from .megatron_model import MegatronRequest, vocabulary_sizes
from .megatron_parallel import family_problems
from .megatron_rotary import scaling_note
from .request import request

Groups = dict[str, Settings]


@dataclass(frozen=True)
class Family:
    """What one member has of its own. `fixed` are knobs that are set the same for every plan."""

    framework: str
    problems: Callable[[MegatronRequest], Iterator[str]]
    groups: Callable[[MegatronRequest], Groups]
    notes: Callable[[MegatronRequest], Iterator[str]]
    environment: Callable[[MegatronRequest], Mapping[str, str | None]]
    fixed: Mapping[str, Any]


def asked_of(family: Family, plan: Plan, version: str | None) -> MegatronRequest:
    """The plan for the member at a version; Infeasible with all that it cannot be told."""

    def problems(asked: MegatronRequest) -> Iterator[str]:
        yield from family_problems(asked)
        yield from family.problems(asked)

    return request(MegatronRequest, plan, family.framework, version, problems)


def setting_groups(family: Family, plan: Plan, version: str | None = None) -> Groups:
    """Every setting that the plan decides, by what it sets: the model, the parallel layout, memory, precision."""
    return family.groups(asked_of(family, plan, version))


def options(family: Family, plan: Plan, version: str | None = None) -> list[tuple[str, ...]]:
    """Every option that the plan decides, with its values, as words of a command line."""
    return [setting.words for group in setting_groups(family, plan, version).values() for setting in group]


def script_files(family: Family, plan: Plan, version: str | None, home: str) -> dict[str, str]:
    """A launch script that carries every setting as an option of pretrain_gpt.py in the folder that the variable `home` names."""
    asked = asked_of(family, plan, version)
    left = left_open(asked)
    name = f"{family.framework}.sh"
    arrays = {**family.groups(asked), "FRAMEWORK_ARGS": asked.speaks.sets(**family.fixed)}
    script = Script(
        command=(f'"${{{home}}}/pretrain_gpt.py"',),
        variables=[*left.values(), Variable(home, f"folder of {asked.speaks.title}", ".")],
        environment=family.environment(asked),
        arrays={group: [setting.words for setting in settings] for group, settings in arrays.items()},
        open_arguments=[(asked.speaks.set(knob).name, variable.name) for knob, variable in with_load(left)],
        notes=[*model_notes(asked), *family.notes(asked)],
    )
    steps = (
        f"Install {asked.speaks.title} on every server and set {home} to its folder.",
        f"Set the variables that the top of {name} lists; `bash {name}` names all that are missing.",
        f"Run `NODE_RANK=N MASTER_ADDR=… bash {name}` on every server, N as in hosts.csv.",
    )
    return folder(asked, {name: launch_script(asked, script)}, steps, script.notes)


def left_open(asked: MegatronRequest) -> dict[str, Variable]:
    """What the plan leaves open: knob → the variable that carries it."""
    variables = {
        "data_split": Variable("DATA_SPLIT", "parts for training, validation and test", "100,0,0"),
        "data_path": Variable("DATA_PATH", "prefix of the tokenised data"),
        "tokenizer": Variable("TOKENIZER_PATH", "folder of the Hugging Face tokenizer"),
        "save": Variable("CHECKPOINT_DIR", "where checkpoints are read and written"),
        "steps": Variable("TRAIN_ITERS", "number of steps", kind=int),
        "learning_rate": Variable("LR", "peak learning rate", kind=float),
        "norm_epsilon": norm_epsilon(asked.spec),
        "save_interval": Variable("SAVE_INTERVAL", "steps between checkpoints", str(SAVE_INTERVAL), kind=int),
    }
    if not asked.spec.learned_positions:
        variables["rotary_base"] = rotary_base(asked.spec, kind=int)
    if asked.spec.is_moe:
        variables["load_balancing"] = Variable("MOE_LOAD_BALANCING", "aux_loss, seq_aux_loss or none")
        variables["aux_loss_coefficient"] = Variable("MOE_AUX_LOSS_COEFF", "weight of the balancing loss", kind=float)
    return variables


def with_load(left: Mapping[str, Variable]) -> list[tuple[str, Variable]]:
    """The open knobs; checkpoints are read from where they are written."""
    return [*left.items(), ("load", left["save"])]


def _activation(asked: MegatronRequest) -> str:
    model = asked.architecture
    return "clamped quick GELU, gated," if model.moe is not None and model.moe.clamped else "SwiGLU" if model.gated else "GELU"


def model_notes(asked: MegatronRequest) -> list[str]:
    """What a ModelSpec does not record, and the script therefore takes for granted, and what training hangs on."""
    notes = [
        f"the MLP's activation is taken to be {_activation(asked)} and dropout to be off; "
        "initialisation and the optimizer's settings are the framework's defaults unless you set them"
    ]
    if scaling := scaling_note(asked):
        notes.append(scaling)
    if asked.stack.gradient_bytes != 4 and asked.precision != "fp16":
        setting = asked.speaks.set("gradients_bf16")
        notes.append(
            f"gradients accumulate and are reduced in bf16 ({' = '.join(setting.words)}), which is what the plan's stack "
            f"{asked.stack.name} was priced with; where nothing is said the framework takes fp32, which needs twice the memory of "
            "two bytes and loses nothing in sums"
        )
    vocabulary, padded = vocabulary_sizes(asked)
    if padded != vocabulary:
        notes.append(f"the vocabulary of {vocabulary} tokens is padded to {padded}, a multiple of {asked.stack.vocab_divisor} x tp")
    if asked.precision == "fp8":
        notes.append("the plan prices FP8 GEMMs; the scaling recipe is the usual one of this accelerator")
    return notes
