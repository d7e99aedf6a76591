"""The command `paraplan`: standard output carries the result, standard error the progress and what went wrong.

Exit status 0: done; 1: no legal layout, or an illegal one; 2: bad input; 130: interrupted before there was anything to tell.
Commands return an Answer and print nothing themselves, so that a pipe that closes or an interrupt is met in one place. Whatever
takes long to import is imported inside the command that needs it: `paraplan --help` and the lists of the catalog come at once.
"""

from __future__ import annotations

import codecs
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

import typer

from ..search_spaces.errors import Infeasible, InputError
from .commands import COMMANDS, GROUPS, Listed
from .commands.answers import BAD_INPUT, DEFECT, DONE, NO_LAYOUT, PIPE_CLOSED, Answer, sentences
from .commands.help import Command, group_of
from .interrupts import came, hold
from .streams import INTERRUPTED, drop_output, flushed, interrupted, plain_form, say

USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__base__)
"""click's UsageError, which typer imports from click or carries itself, depending on its version."""


def run(arguments: Sequence[str] | None) -> int:
    """Runs the command and returns its exit status; whatever goes wrong is one sentence, never a traceback.

    What would else be a defect is an interrupt where the user did interrupt. An answer that is there is shown whole.
    """
    if sys.stdout is None:  # closed by the caller; a file that is opened now would take its place
        say("standard output is closed: there is nowhere to write the result; send it to a file or to /dev/null")
        return BAD_INPUT
    try:
        codecs.register_error("paraplan", plain_form)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="paraplan")
        answer = typer.main.get_command(app).main(
            list(sys.argv[1:] if arguments is None else arguments), prog_name="paraplan", standalone_mode=False
        )
        if not isinstance(answer, Answer):  # --help and --version have printed; an interrupt comes back as its status
            return interrupted(arguments) if answer == INTERRUPTED else flushed(int(answer or DONE))
        hold()
        for note in answer.notes:
            say(note)
        answer.show()
        if came() and answer.status == DONE:
            say("interrupted: what is told is what was found by then")
        return flushed(answer.status)
    except BrokenPipeError:
        drop_output()
        return PIPE_CLOSED
    except (KeyboardInterrupt, typer.Abort):
        return interrupted(arguments)
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
        for sentence in sentences(error.summary, error.reasons):
            say(sentence)
        return NO_LAYOUT
    except Exception as error:
        if came():  # an extension module that an interrupt broke off while it loaded
            return interrupted(arguments)
        if os.environ.get("PARAPLAN_TRACEBACK"):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        say(
            f"a defect of paraplan, please report it: {type(error).__name__} in {Path(frame.filename).name}:{frame.lineno} "
            f"({error}); PARAPLAN_TRACEBACK=1 shows more"
        )
        return DEFECT
    return BAD_INPUT


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"paraplan {version('paraplan')}")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> Answer | None:
    return _branch(context)


def _branch(context: typer.Context) -> Answer | None:
    """The list of commands, where none is named."""
    if context.invoked_subcommand is not None:
        return None
    text = context.get_help()
    return Answer(lambda: print(text))


def _lines(listed: Listed) -> dict[str, str]:
    return {name: line for name, (_, line) in listed.items()}


def _tree() -> typer.Typer:
    """All commands, each under its name."""
    last = {"Tuning with real runs": {name: help.lower().rstrip(".") for name, (help, _) in GROUPS.items()}}
    lists = {heading: _lines(listed) for heading, listed in COMMANDS.items()} | last
    tree = typer.Typer(
        name="paraplan",
        help="Choose, prove and explain the parallel layout of a large-model training run.\n\nparaplan COMMAND --help says more.",
        cls=group_of(lists),
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        callback=_root,
        invoke_without_command=True,
    )
    for listed in COMMANDS.values():
        _add(tree, listed)
    for name, (help, listed) in GROUPS.items():
        lines = {"Commands": _lines(listed)}
        branch = typer.Typer(help=help, cls=group_of(lines), callback=_branch, invoke_without_command=True, rich_markup_mode=None)
        _add(branch, listed)
        tree.add_typer(branch, name=name)
    return tree


def _add(tree: typer.Typer, listed: Listed) -> None:
    for name, (command, _) in listed.items():
        tree.command(name, cls=Command)(command)


app = _tree()
