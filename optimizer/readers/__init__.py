"""A job's configuration in whatever format it is written: recognised by its content, read as text, never executed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import yaml

from ...search_spaces.documents import MAX_BYTES, did_you_mean
from ...search_spaces.errors import InputError
from . import deepspeed, job_yaml, megatron_bridge, megatron_script, mindformers, paraplan, torchtitan, verl
from .job import FaultTolerance, Finding, Job, SplitWish
from .json_text import plain_json
from .processes import world
from .python_source import constants, is_python
from .shell import options, read_script

__all__ = ["FORMATS", "FaultTolerance", "Finding", "Job", "SplitWish", "read_file", "read_job", "read_text", "recognise"]

Variables = Mapping[str, str]
Reader = Callable[[str, str, int | None, Variables | None], Job]

FORMATS: dict[str, Reader] = {
    "megatron-lm": lambda text, where, devices, given: megatron_script.read(text, where, "megatron-lm", devices, given),
    "mindspeed-llm": lambda text, where, devices, given: megatron_script.read(text, where, "mindspeed-llm", devices, given),
    "megatron-bridge": lambda text, where, devices, given: megatron_bridge.read(text, where, devices, given),
    "mindformers": lambda text, where, devices, given: mindformers.read(text, where, devices),
    "torchtitan": lambda text, where, devices, given: torchtitan.read(text, where, devices, given),
    "deepspeed": lambda text, where, devices, given: deepspeed.read(text, where, devices),
    "verl": lambda text, where, devices, given: verl.read(text, where, devices, given),
    "job": lambda text, where, devices, given: job_yaml.read(text, where, devices),
    "paraplan": lambda text, where, devices, given: paraplan.read(text, where, devices),
}
"""Format → reader of a text, its name in errors, the devices that the caller names, and variables that the caller sets."""

MOST_BESIDE = 20
"""Scripts beside a program that are looked at for the one that starts it."""
CONFIGURATIONS = (".py", ".json", ".yaml", ".yml", ".toml")
NOT_READ = {
    "LLaMA-Factory": r"\bllamafactory-cli\b|^(?:finetuning_type|dist_config|per_device_train_batch_size)\s*:",
    "Axolotl": r"\baxolotl\b|^base_model\s*:",
    "ms-swift's Transformers trainer": r"\bswift\s+(?:sft|pt|rlhf)\b",
    "Accelerate": r"\baccelerate\s+launch\b",
}
"""Trainers on Transformers, by what their files hold."""
UNKNOWN = (
    "is of no format that is known here: a launch script of Megatron-LM, MindSpeed-LLM or verl, overrides or a program of "
    "Megatron-Bridge, a mindformers or job YAML, a torchtitan command line, program or TOML, a DeepSpeed JSON, a plan.json or "
    "tp=8,pp=4; --format says which"
)


def read_job(config: str | Path, *, form: str | None = None, devices: int | None = None, variables: Variables | None = None) -> Job:
    """The job of a file, of the configuration that a launch script starts, or of a layout such as "tp=8,pp=4" itself.

    InputError names what cannot be read, and why.
    """
    where, text = _layout_or_file(config)
    if form is not None and form not in FORMATS:
        raise InputError(f"--format {form!r} is not one of {', '.join(FORMATS)}{did_you_mean(form, tuple(FORMATS))}")
    try:
        job = read_text(text, where, form=form, devices=devices, variables=variables)
        started_by = _started_by(Path(where).expanduser(), variables) if job.devices is None else None
        if started_by is None:
            return job
        script, count = started_by
        job = read_text(text, where, form=form, devices=count, variables=variables)
        return replace(job, assumptions=(f"{count} processes: {script.name} beside it starts so many", *job.assumptions))
    except InputError:
        started = started_with(text, Path(where).expanduser(), variables)
        if started is None:
            raise
    beside, processes = started
    where, text = read_file(beside)
    job = read_text(text, where, form=form, devices=devices or processes, variables=variables)
    return replace(job, assumptions=(f"read from {beside.name}, which {config} starts", *job.assumptions))


def _started_by(path: Path, variables: Variables | None) -> tuple[Path, int] | None:
    """The script beside a program that starts it, and the processes that it starts; None where there is none that says."""
    if path.suffix != ".py" or not path.is_file():
        return None
    for script in sorted(path.parent.glob("*.sh"))[:MOST_BESIDE]:
        with suppress(InputError):  # what cannot be read starts nothing
            beside, processes = started_with(read_file(script)[1], script, variables) or (None, None)
            if beside == path and processes is not None:
                return script, processes
    return None


def started_with(text: str, path: Path, variables: Variables | None = None) -> tuple[Path, int | None] | None:
    """The configuration beside a launch script that its command names, and the processes it starts; None where there is none.

    Only a file of the script's own folder is looked at, whatever path the script gives it.
    """
    if not path.is_file():
        return None
    script = read_script(text, variables, str(path))
    words = [word for line in script.commands for word in line]
    modules = [f"{word}.py" for before, word in pairwise(words) if before == "--module"]
    for name in [*(word.rsplit("/", 1)[-1] for word in words if word.endswith(CONFIGURATIONS)), *modules]:
        beside = path.parent / name
        if beside.is_file() and beside != path:
            return beside, world(script, [option for line in script.commands for option in options(line)], str(path))
    return None


def read_text(
    text: str, where: str, *, form: str | None = None, devices: int | None = None, variables: Variables | None = None
) -> Job:
    """The job of a text; `where` names it in errors."""
    chosen = form or recognise(text, where)
    return FORMATS[chosen](text, where, devices, variables)


def recognise(text: str, where: str) -> str:
    """The format of a text, by what it holds. InputError if it is none of them."""
    if not text.strip():
        raise InputError(f"{where}: is empty; give a job's configuration")
    if text.lstrip().startswith("{"):
        return _json_format(text, where)
    if paraplan.is_layout(text):
        return "paraplan"
    if is_python(text):
        return _program_format(text, where)
    if verl.is_verl(text):
        return "verl"
    if torchtitan.is_toml(text) or torchtitan.is_started(text):
        return "torchtitan"
    if megatron_bridge.overrides(text, where):
        return "megatron-bridge"
    if megatron_script.is_megatron(text):
        return "mindspeed-llm" if megatron_script.is_mindspeed(text) else "megatron-lm"
    keys = set(re.findall(r"^([A-Za-z_][\w]*)\s*:", text, re.MULTILINE))
    if "parallel_config" in keys:
        return "mindformers"
    if re.search(r"\bstrategy\s*:", text) or job_yaml.is_flat(re.findall(r"^\s*(\w+)\s*:[ \t]*\d", text, re.MULTILINE)):
        return "job"
    if re.search(r"^\s+(tensor|pipeline)_model_parallel_size\s*:", text, re.MULTILINE):
        return "megatron-bridge"
    started = "\n".join(" ".join(words) for words in read_script(text, None, where, surely=False).commands)
    if started != text and megatron_script.is_megatron(started):  # in files that it reads in
        return "mindspeed-llm" if megatron_script.is_mindspeed(f"{text}\n{started}") else "megatron-lm"
    whose = next((name for name, sign in NOT_READ.items() if re.search(sign, text, re.MULTILINE)), None)
    if whose is not None:
        said = "give the DeepSpeed JSON that it names, with --devices, or a layout such as tp=2,cp=4"
        raise InputError(f"{where}: is {whose}'s, which is not read; {said}")
    raise InputError(f"{where}: {UNKNOWN}")


def _program_format(text: str, where: str) -> str:
    """The framework whose fields a Python program sets."""
    if torchtitan.program(text, where) is not None:
        return "torchtitan"
    if megatron_bridge.program(text, where) is not None:
        return "megatron-bridge"
    if {"GROUPS", "WORLD_SIZE"} <= constants(text).keys():
        raise InputError(f"{where}: holds process groups; judge them with --groups {where}")
    raise InputError(f"{where}: sets no field of Megatron-Bridge or torchtitan; --format says which of them it is for")


def _json_format(text: str, where: str) -> str:
    try:
        data = json.loads(plain_json(text))
    except (ValueError, RecursionError) as error:
        data = _flow_yaml(text)
        if not isinstance(data, dict):
            raise InputError(f"{where}: is not complete JSON: {error}; copy the file again") from error
    if not isinstance(data, dict):
        raise InputError(f"{where}: holds no mapping; {UNKNOWN}")
    if {"plan", "problem", "layout", "certificate"} & data.keys():
        return "paraplan"
    if (
        "task" in data
        or "strategy" in data
        or job_yaml.is_flat([key for key, value in data.items() if not isinstance(value, dict)])
    ):
        return "job"
    if {*deepspeed.KEYS, "zero_optimization", "bf16", "fp16", "tensor_parallel"} & data.keys():
        return "deepspeed"
    if "parallel_config" in data:
        return "mindformers"
    raise InputError(f"{where}: {UNKNOWN}")


def _flow_yaml(text: str) -> object:
    """A mapping in braces that is YAML but not JSON; aliases, which unfold into gigabytes, are not looked at."""
    if "&" in text or len(text) > 100_000:
        return None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


def _layout_or_file(config: str | Path) -> tuple[str, str]:
    """(name in errors, text) of a file, or of a layout that is given in place of one."""
    given = str(config)
    if not _exists(given):
        if "=" in given and paraplan.is_layout(given):
            return "layout", given
        raise InputError(f"{_shortened(given)}: there is no such file, nor is it a layout such as tp=8,pp=4")
    return read_file(config)


def _exists(given: str) -> bool:
    try:
        return Path(given).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long for a name, or with a null byte in it
        return False


def _shortened(given: str) -> str:
    return given if len(given) <= 80 else given[:77] + "…"


def read_file(path: str | Path) -> tuple[str, str]:
    """(name in errors, text) of a file, line ends as they are on Unix. InputError for what is not text."""
    given = str(path)
    if not _exists(given):
        raise InputError(f"{_shortened(given)}: there is no such file")
    path = Path(given).expanduser()
    if path.is_dir():
        raise InputError(f"{given}: is a folder; name the file in it that configures the job")
    if not path.is_file():
        raise InputError(f"{given}: is not an ordinary file")
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise InputError(f"{given}: has {size:,} bytes; at most {MAX_BYTES:,} are read")
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{given}: is not UTF-8 text (byte {error.start}); give the job's configuration") from error
    except OSError as error:
        raise InputError(f"{given}: cannot be read: {error.strerror}") from error
    if "\x00" in text:
        raise InputError(f"{given}: holds null bytes, which no text has; give the job's configuration")
    return given, text.replace("\r\n", "\n")
