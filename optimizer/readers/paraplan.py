"""paraplan's own layouts: a plan.json, what evaluate --json printed, or "tp=8,pp=4"."""

from __future__ import annotations

import re
from typing import Any

from ...search_spaces.documents import parse_document, to_record
from ...search_spaces.errors import InputError
from ...search_spaces.flags import COLUMN_VALUES, INTEGER_COLUMNS
from ...search_spaces.layout import Layout, Problem
from ..exporters.splits import parse_megatron_layout
from ..layout_words import STAGES, parse_layout
from .job import Job, SplitWish

FORMAT = "paraplan"
PAIR = re.compile(r"([A-Za-z_-]+)\s*=\s*\S+$")
FOLLOWS = ("edp",)
"""Columns that follow from the others."""


def is_layout(text: str) -> bool:
    """Whether a text is a list such as "tp=8,pp=4", even if some of its names are no columns; a script's variables are none."""
    if text.startswith("#!"):
        return False
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    pairs = [part.strip() for line in lines for part in line.split(",") if part.strip()]
    named = [match and match.group(1).lower().replace("-", "_") for match in (PAIR.match(pair) for pair in pairs)]
    return None not in named and any(name in (*COLUMN_VALUES, STAGES) for name in named)


def read(text: str, where: str, devices: int | None = None) -> Job:
    """The job of a layout. A plan.json also holds its problem."""
    if text.lstrip().startswith("{"):
        return _planned(parse_document(text, where, as_json=True), where, devices)
    try:
        lines = (line.split("#")[0].strip().removesuffix(",") for line in text.splitlines())
        given = parse_layout(",".join(line for line in lines if line))
    except InputError as error:
        raise InputError(f"{where}: {error}" if where != "layout" else str(error)) from error
    if not given:
        raise InputError(f"{where}: is empty; write a layout such as tp=8,pp=4")
    written = dict(given)
    split = _split(given, where)
    degrees = {name: int(value) for name, value in given.items() if name in INTEGER_COLUMNS and name not in FOLLOWS}
    choices = {name: value for name, value in given.items() if name not in INTEGER_COLUMNS}
    plain = dict.fromkeys(("tp", "cp", "pp", "ep", "etp", "vpp"), 1)
    said = tuple(f"{name} 1: not given" for name in ("tp", "pp") if name not in degrees)
    return Job(
        format=FORMAT,
        degrees={**plain, **degrees},
        choices=choices,
        devices=devices,
        split=split,
        written=written,
        assumptions=said,
    )


def _split(given: dict[str, str], where: str) -> SplitWish:
    """What `stages` says, which is taken out of the given values and sets vpp among them."""
    text, pp = given.pop(STAGES, None), int(given.get("pp", 1))
    if text is None:
        return SplitWish(free=True)
    counts = tuple(int(part) for part in text.split("+")) if re.fullmatch(r"\d+(\+\d+)*", text) else ()
    stages = () if counts else parse_megatron_layout(text, pp)
    chunks = len(counts) if counts else pp * len(stages[0].chunks)
    if chunks % pp or given.get("vpp", str(chunks // pp)) != str(chunks // pp):
        raise InputError(f"{where}: layout: stages has {chunks} chunks, pp·vpp is {pp}·{given.get('vpp', '…')}.")
    given["vpp"] = str(chunks // pp)
    return SplitWish(counts=counts, layout=stages)


def _planned(data: dict[str, Any], where: str, devices: int | None) -> Job:
    plan = data.get("plan")
    found = data.get("layout", plan.get("layout") if isinstance(plan, dict) else None)
    if not isinstance(found, dict):
        raise InputError(f"{where}: plan.layout is missing; name a plan.json or what evaluate --json printed")
    layout = to_record(Layout, found, f"{where}: layout")
    problem = to_record(Problem, data["problem"], f"{where}: problem") if isinstance(data.get("problem"), dict) else None
    given = plan.get("devices_idle") if isinstance(plan, dict) else None
    beyond = layout.devices + given - problem.devices if problem and isinstance(given, int) and devices is None else 0
    return Job(
        format=FORMAT,
        framework=problem.stack.framework if problem else None,
        degrees={name: getattr(layout, name) for name in INTEGER_COLUMNS if name not in FOLLOWS},
        choices={
            **{name: getattr(layout, name) for name in COLUMN_VALUES if name not in INTEGER_COLUMNS},
            "sequence_parallel": "true" if layout.sequence_parallel else "false",
        },
        devices=devices or (problem.devices if problem else layout.devices),
        global_batch=problem.workload.global_batch if problem else layout.micro_batch * layout.num_microbatches * layout.dp,
        seq_len=problem.workload.seq_len if problem else None,
        precision=problem.workload.precision if problem else None,
        vocab_size=problem.workload.vocab_size if problem else None,
        model=problem.model if problem else None,
        split=SplitWish(layout=layout.stages) if layout.stages else SplitWish(free=True),
        written={name: str(found[name]).lower() for name in COLUMN_VALUES if found.get(name) is not None},
        problem=problem,
        left_out=max(0, beyond),
    )
