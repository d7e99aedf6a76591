"""The command `paraplan`: standard output carries the result, standard error the progress and what went wrong.

Exit status 0: done; 1: no legal layout, or an illegal one; 2: bad input. Commands return an Answer and print nothing themselves, so
that a pipe that closes or an interrupt is met in one place. Whatever takes long to import is imported inside the command that needs
it: `paraplan --help` and the lists of the catalog come at once.
"""

from __future__ import annotations

import codecs
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from .. import search_spaces
from ..search_spaces.errors import Infeasible, InputError
from .streams import INTERRUPTED, Meter, drop_output, flushed, interrupted, plain_form, say

if TYPE_CHECKING:
    from ..cost_models.calibration import Calibration
    from ..cost_models.validation import Validation
    from ..search_spaces.layout import Problem
    from .result import Plan, PricedLayout

DONE, NO_LAYOUT, BAD_INPUT, DEFECT, PIPE_CLOSED = 0, 1, 2, 70, 141
KINDS = ("models", "accelerators", "clusters", "stacks")
ENGINES = ("auto", "bnb")
OBJECTIVES = ("step-time",)
ILLEGAL = "this layout is not legal"

USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__base__)
"""click's UsageError, which typer imports from click or carries itself, depending on its version."""


app = typer.Typer(
    name="paraplan",
    help="Choose, prove and explain the parallel layout of a large-model training run.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@dataclass(frozen=True)
class Answer:
    """What a command has to say: `show` writes the result to standard output, `notes` are sentences for standard error."""

    show: Callable[[], None]
    notes: tuple[str, ...] = ()
    status: int = DONE


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status; whatever goes wrong is one sentence, never a traceback."""
    try:
        codecs.register_error("paraplan", plain_form)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="paraplan")
        answer = typer.main.get_command(app).main(
            list(sys.argv[1:] if arguments is None else arguments), prog_name="paraplan", standalone_mode=False
        )
        if not isinstance(answer, Answer):  # --help and --version have printed; an interrupt comes back as its status
            return interrupted() if answer == INTERRUPTED else flushed(int(answer or DONE))
        for note in answer.notes:
            say(note)
        answer.show()
        return flushed(answer.status)
    except BrokenPipeError:
        drop_output()
        return PIPE_CLOSED
    except (KeyboardInterrupt, typer.Abort):
        return interrupted()
    except USAGE_ERROR as error:
        context = getattr(error, "ctx", None)
        say(f"{error.format_message().rstrip('. ')} (see {context.command_path if context else 'paraplan'} --help)")
    except InputError as error:
        say(str(error))
    except OSError as error:
        say(f"{error.filename or 'standard output'}: {error.strerror or error}")
        if error.filename is None:
            drop_output()
    except Infeasible as error:
        for sentence in _sentences(error.summary, error.reasons):
            say(sentence)
        return NO_LAYOUT
    except Exception as error:
        if os.environ.get("PARAPLAN_TRACEBACK"):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        say(
            f"a defect of paraplan, please report it: {type(error).__name__} in {Path(frame.filename).name}:{frame.lineno} "
            f"({error}); PARAPLAN_TRACEBACK=1 shows more"
        )
        return DEFECT
    return BAD_INPUT


def _whole(text: str | int) -> int:
    """Reads a whole number; like typer's own reader, but its complaint names what was given."""
    if not re.fullmatch(r"[+-]?[0-9]{1,9}", str(text)):
        raise typer.BadParameter(f"{text!r} is not a whole number of at most 9 digits")
    return int(text)


def _number(text: str | float) -> float:
    """Reads a number likewise."""
    try:
        return float(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a number") from error


# --- commands ----------------------------------------------------------------------------------------------------------------

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Catalog name, Hugging Face config.json or a folder holding one, or ModelSpec YAML.")
]
Cluster = Annotated[str, typer.Option("--cluster", metavar="NAME|FILE", help="Cluster: catalog name or YAML.")]
Devices = Annotated[int, typer.Option("--devices", parser=_whole, metavar="N", help="Devices (ranks) of the job.")]
GlobalBatch = Annotated[int, typer.Option("--global-batch", parser=_whole, metavar="B", help="Sequences per step.")]
SeqLen = Annotated[int, typer.Option("--seq-len", parser=_whole, metavar="S", help="Tokens per sequence.")]
StackName = Annotated[
    str | None, typer.Option("--stack", metavar="NAME|FILE", help="Training software; by default the cluster's usual one.")
]
Precision = Annotated[str, typer.Option("--precision", metavar="NAME", help="Precision of the GEMMs: bf16, fp16, fp8 or fp4.")]
Inside = Annotated[
    list[str] | None, typer.Option("--inside", metavar="LEVEL:DIMS", help="Keep groups inside a level: supernode:tp,sp,ep.")
]
Framework = Annotated[str | None, typer.Option("--framework", metavar="NAME", help="Plan for what this framework can express.")]
FrameworkVersion = Annotated[str | None, typer.Option("--framework-version", metavar="V", help="Its version.")]
Profile = Annotated[str | None, typer.Option("--profile", metavar="FILE", help="Fitted figures to use over the shipped ones.")]
MemoryMargin = Annotated[
    float | None,
    typer.Option("--memory-margin", parser=_number, metavar="F", help="Share of memory to keep free; a plan keeps 0.15."),
]
VocabSize = Annotated[
    int | None, typer.Option("--vocab-size", parser=_whole, metavar="N", help="Vocabulary, where it differs from the model's.")
]
ExpertImbalance = Annotated[
    float | None,
    typer.Option("--expert-imbalance", parser=_number, metavar="F", help="Tokens of the fullest device over the mean."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on standard error.")]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"paraplan {version('paraplan')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> Answer | None:
    if context.invoked_subcommand is not None:
        return None
    text = context.get_help()
    return Answer(lambda: print(text))


@app.command("plan")
def plan_command(
    model: Model,
    cluster: Cluster,
    devices: Devices,
    global_batch: GlobalBatch,
    seq_len: SeqLen,
    stack: StackName = None,
    precision: Precision = "bf16",
    fix: Annotated[list[str] | None, typer.Option("--fix", metavar="COLUMN=VALUE,…", help="Fix: tp=8,pp=4|8.")] = None,
    forbid: Annotated[list[str] | None, typer.Option("--forbid", metavar="RULE", help='Forbid: "pp>16".')] = None,
    constraint: Annotated[
        list[str] | None, typer.Option("--constraint", metavar="RULE", help='Demand: "tp*cp <= 64", "pp == 8 or vpp == 1".')
    ] = None,
    inside: Inside = None,
    framework: Framework = None,
    framework_version: FrameworkVersion = None,
    profile: Profile = None,
    objective: Annotated[str, typer.Option("--objective", metavar="NAME", help="What is made least: step-time.")] = "step-time",
    engine: Annotated[str, typer.Option("--engine", metavar="NAME", help="Search: auto or bnb.")] = "auto",
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", parser=_number, metavar="S", help="Stop the search after S seconds.")
    ] = None,
    top: Annotated[int, typer.Option("--top", parser=_whole, metavar="K", help="Layouts to report, best first.")] = 5,
    memory_margin: MemoryMargin = None,
    vocab_size: VocabSize = None,
    expert_imbalance: ExpertImbalance = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write plan.json and launch files here.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """Find the layout with the shortest step that fits, and prove it."""
    _offered("--engine", engine, ENGINES)
    _offered("--objective", objective, OBJECTIVES)
    _at_least_one("--top", top)
    if time_limit is not None and not 0 < time_limit < float("inf"):
        raise InputError(f"--time-limit {time_limit:g}: must be a number of seconds greater than 0")
    if out is not None:
        _check_output(out, framework, framework_version)
    from ..search_spaces.inputs import build_problem
    from .planner import plan

    problem = build_problem(
        model,
        cluster,
        devices,
        global_batch,
        seq_len,
        stack,
        precision,
        framework=framework,
        framework_version=framework_version,
        fix=",".join(fix or ()),
        forbid=forbid or (),
        constraint=constraint or (),
        inside=inside or (),
        memory_margin=memory_margin,
        expert_imbalance=expert_imbalance,
        vocab_size=vocab_size,
    )
    try:
        with Meter(shown=not (quiet or as_json)) as meter:
            found = plan(problem, profile=profile, engine=engine, top=top, time_limit_s=time_limit, progress=meter)
        notes = () if out is None else _write_plan(found, out, framework, framework_version)
    except Infeasible as error:
        return _refusal(error.summary, error.reasons, as_json)
    if found.certificate.status != "optimal":
        notes = (f"stopped early: the best layout so far, within {found.certificate.gap:.0%} of the best there can be", *notes)
    if as_json:
        return Answer(lambda: print(found.to_json()))
    return Answer(lambda: _render(found), () if quiet else notes)


@app.command("evaluate")
def evaluate_command(
    model: Model,
    cluster: Cluster,
    devices: Devices,
    global_batch: GlobalBatch,
    seq_len: SeqLen,
    layout: Annotated[
        str, typer.Option("--layout", metavar="NAME=VALUE,…", help="tp=8,pp=16,ep=8,micro_batch=1,vpp=2,recompute=selective.")
    ],
    stack: StackName = None,
    precision: Precision = "bf16",
    inside: Inside = None,
    framework: Framework = None,
    framework_version: FrameworkVersion = None,
    profile: Profile = None,
    memory_margin: MemoryMargin = None,
    vocab_size: VocabSize = None,
    expert_imbalance: ExpertImbalance = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """Price one layout and say whether it is legal. What --layout leaves out follows: dp from the devices, the rest is 1 or off."""
    from ..cost_models.profile import load_profile
    from ..search_spaces.inputs import build_problem
    from .layout_words import complete, parse_layout
    from .planner import assumptions, evaluate

    given = parse_layout(layout)
    problem = build_problem(
        model,
        cluster,
        devices,
        global_batch,
        seq_len,
        stack,
        precision,
        framework=framework,
        framework_version=framework_version,
        fix=f"etp={given['etp']}" if "etp" in given else "",  # or else an assumption would fix it to 1
        inside=inside or (),
        memory_margin=memory_margin,
        expert_imbalance=expert_imbalance,
        vocab_size=vocab_size,
    )
    try:
        priced, broken = evaluate(problem, complete(problem, given), profile=profile)
    except Infeasible as error:
        return _refusal(error.summary, error.reasons, as_json)
    said = assumptions(problem, load_profile(problem.cluster.accelerator.name, profile), profile)
    problem = problem.model_copy(update={"assumptions": said})
    if broken and as_json:
        return _refusal(ILLEGAL, broken, as_json, plan=priced.model_dump(mode="json"))
    if as_json:
        return Answer(lambda: print(_priced_json(problem, priced)))
    return Answer(
        lambda: _render_layout(problem, priced), _sentences(ILLEGAL, broken) if broken else (), NO_LAYOUT if broken else DONE
    )


@app.command("export")
def export_command(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan written by plan --out or plan --json.")],
    to: Annotated[str, typer.Option("--to", metavar="FRAMEWORK", help="Framework to write for.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder to write to.")],
    framework_version: FrameworkVersion = None,
) -> Answer:
    """Write a plan as a training framework's own files."""
    from .exporters import export

    written = export(_read_plan(plan_file), to, out, framework_version)
    return Answer(lambda: print(*written, sep="\n"))


@app.command("validate")
def validate_command(
    runs: Annotated[Path, typer.Argument(metavar="RUNS.csv", help="Measured runs; models.json beside it gives their shapes.")],
    profile: Profile = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """Price measured runs and say how far off the predictions are."""
    from ..cost_models.validation import validate

    with Meter(shown=not (quiet or as_json)) as meter:
        found = validate(runs, profile, lambda share: meter("pricing runs", share))
    if as_json:
        return Answer(lambda: print(found.to_json()))
    return Answer(lambda: _render_validation(found))


@app.command("calibrate")
def calibrate_command(
    runs: Annotated[Path, typer.Argument(metavar="RUNS.csv", help="Measured runs; models.json beside it gives their shapes.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="PROFILE.yaml", help="File to write, for --profile.")],
    stack: Annotated[str | None, typer.Option("--stack", metavar="NAME", help="Training software to fit; by default all.")] = None,
    site: Annotated[
        bool, typer.Option("--site", help="The runs are your own: rows without a split count too; one to three are enough.")
    ] = False,
    profile: Profile = None,
    quiet: Quiet = False,
) -> Answer:
    """Fit a stack's figures to measured runs whose split is fit, and write them as a profile."""
    from ..cost_models.calibration import calibrate
    from .reports.calibration import profile_yaml
    from .writing import write_file

    if stack is not None and stack not in _catalog_names("stacks"):
        from ..search_spaces.inputs import catalog_entry

        catalog_entry("stacks", stack)  # raises, naming what is near
    if out.resolve() == runs.resolve():
        raise InputError(f"--out {out}: is the table of runs itself; name another file")
    with Meter(shown=not quiet) as meter:
        found = calibrate(runs, stack, site, profile, lambda share: meter("fitting", share))
    write_file(out, profile_yaml(found))
    return Answer(lambda: _render_calibration(found), () if quiet else (f"wrote {out}",))


@app.command("catalog")
def catalog_command(
    kind: Annotated[str | None, typer.Argument(metavar="[models|accelerators|clusters|stacks]", show_default=False)] = None,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", show_default=False)] = None,
) -> Answer:
    """List the catalog, or print an entry with its sources."""
    if kind is None:
        text = "\n".join(f"{each}\n{_wrapped(_catalog_names(each))}" for each in KINDS)
        return Answer(lambda: print(text))
    _offered("catalog", kind, KINDS)
    if name is None:
        return Answer(lambda: print(*_catalog_names(kind), sep="\n"))
    if name not in _catalog_names(kind):
        from ..search_spaces.inputs import catalog_entry

        catalog_entry(cast(Any, kind), name)  # raises, naming what is near
    entry = (_catalog(kind) / f"{name}.yaml").read_text(encoding="utf-8")
    return Answer(lambda: print(entry, end=""))


def _catalog(kind: str) -> Path:
    return Path(search_spaces.__path__[0]) / "catalog" / kind


def _catalog_names(kind: str) -> list[str]:
    """Names are file names: nothing has to be read, nor the records imported, to list them."""
    return sorted(path.stem for path in _catalog(kind).glob("*.yaml"))


def _wrapped(names: Sequence[str]) -> str:
    import shutil
    import textwrap

    width = max(40, min(shutil.get_terminal_size().columns, 100))
    return textwrap.fill("  ".join(names), width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


# --- checks before the work --------------------------------------------------------------------------------------------------


def _offered(flag: str, value: str, values: Sequence[str]) -> None:
    if value not in values:
        raise InputError(f"{flag} {value!r} is not offered; there is {', '.join(values)}")


def _at_least_one(flag: str, value: int) -> None:
    if value < 1:
        raise InputError(f"{flag} {value}: must be at least 1")


def _check_output(directory: Path, framework: str | None, framework_version: str | None) -> None:
    """Refuses before the search what could not be written after it."""
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise InputError(f"{nearest}: a file of this name is in the way; name a folder to write to")
    if framework is not None:
        from .exporters import EXPORTERS

        if framework not in EXPORTERS:
            raise InputError(f"--framework {framework!r} cannot be written to --out; there is {', '.join(EXPORTERS)}")
        from .exporters.knobs import FRAMEWORKS, dialect

        if framework_version is not None and framework in FRAMEWORKS:
            dialect(framework, framework_version)  # raises, naming the versions that it knows


# --- results -----------------------------------------------------------------------------------------------------------------


def _sentences(summary: str, reasons: Sequence[str]) -> tuple[str, ...]:
    """The summary and, indented below it, the reasons that it does not give itself."""
    return (summary, *(f"  {reason}" for reason in reasons if reason not in summary))


def _refusal(summary: str, reasons: Sequence[str], as_json: bool, **more: Any) -> Answer:
    """No legal layout: the reasons as sentences on standard error or, asked for JSON, as a document on standard output."""
    import json

    if as_json:
        document = json.dumps({"error": summary, "reasons": list(reasons), **more}, indent=2, ensure_ascii=False)
        return Answer(lambda: print(document), status=NO_LAYOUT)
    return Answer(lambda: None, _sentences(summary, reasons), NO_LAYOUT)


def _render(plan: Plan) -> None:
    from rich.console import Console

    from .reports.terminal import render

    render(plan, Console())


def _render_layout(problem: Problem, priced: PricedLayout) -> None:
    from rich.console import Console

    from .reports.terminal import render_layout

    render_layout(problem, priced, Console())


def _render_validation(found: Validation) -> None:
    from rich.console import Console

    from .reports.validation import render

    render(found, Console())


def _render_calibration(found: Iterable[Calibration]) -> None:
    from rich.console import Console

    from .reports.calibration import render

    render(found, Console())


def _priced_json(problem: Problem, priced: PricedLayout) -> str:
    """The keys of plan.json that one layout has."""
    from importlib.metadata import version

    from pydantic_core import to_json

    document = {"paraplan": version("paraplan"), "problem": problem, "assumptions": problem.assumptions, "plan": priced}
    return to_json(document, indent=2, exclude_none=True, inf_nan_mode="null").decode()


def _read_plan(path: Path) -> Plan:
    from ..search_spaces.documents import parse_document, to_record
    from .result import Plan

    if not path.is_file():
        raise InputError(f"{path}: is not a plan.json" if path.exists() else f"{path}: there is no such file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    return to_record(Plan, parse_document(text, str(path), as_json=True), str(path))


def _write_plan(plan: Plan, directory: Path, framework: str | None, framework_version: str | None) -> tuple[str, ...]:
    """Writes plan.json and the framework's files, all or none; returns what was done, in sentences."""
    from .exporters import EXPORTERS, render
    from .writing import write_folder

    target = framework or plan.problem.stack.framework
    files = {"plan.json": _plan_json(plan)}
    if target in EXPORTERS:
        files |= render(plan, target, framework_version)
    write_folder(directory, files)
    wrote = f"wrote {', '.join(files)} to {directory}"
    return (wrote,) if target in EXPORTERS else (wrote, f"no launch files: {target} has no exporter")


def _plan_json(plan: Plan) -> str:
    """plan.json with its groups, a dimension on one line: thousands of ranks would otherwise take a line each."""
    import json

    from .ranks import groups

    lines = ",\n".join(f'    "{name}": {json.dumps(ranks)}' for name, ranks in groups(plan.plan.layout).items())
    rest = plan.model_copy(update={"groups": None}).to_json().removesuffix("\n}")
    return f'{rest},\n  "groups": {{\n{lines}\n  }}\n}}\n'


if __name__ == "__main__":
    sys.exit(main())
