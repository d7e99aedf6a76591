"""catalog."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from ... import search_spaces
from .answers import Answer, document, offered
from .options import AsJson, Quiet

KINDS = ("models", "accelerators", "clusters", "stacks")


def catalog_command(
    kind: Annotated[str | None, typer.Argument(metavar="[models|accelerators|clusters|stacks]", show_default=False)] = None,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", show_default=False)] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """List the catalog, or print an entry with its sources."""
    if kind is None and as_json:
        return Answer(document({each: catalog_names(each) for each in KINDS}))
    if kind is None:
        text = "\n".join(f"{each}\n{_wrapped(catalog_names(each))}" for each in KINDS)
        return Answer(lambda: print(text))
    offered("catalog", kind, KINDS)
    if name is None and as_json:
        return Answer(document({kind: catalog_names(kind)}))
    if name is None:
        return Answer(lambda: print(*catalog_names(kind), sep="\n"))
    if name not in catalog_names(kind):
        from ...search_spaces.inputs import catalog_entry

        catalog_entry(cast(Any, kind), name)  # raises, naming what is near
    entry = (_catalog(kind) / f"{name}.yaml").read_text(encoding="utf-8")
    if as_json:
        from ...search_spaces.documents import parse_document

        return Answer(document(parse_document(entry, name)))
    return Answer(lambda: print(entry, end=""))


def _catalog(kind: str) -> Path:
    return Path(search_spaces.__path__[0]) / "catalog" / kind


def catalog_names(kind: str) -> list[str]:
    """Names are file names: nothing has to be read, nor the records imported, to list them."""
    return sorted(path.stem for path in _catalog(kind).glob("*.yaml"))


def _wrapped(names: Sequence[str]) -> str:
    import shutil
    import textwrap

    width = max(40, min(shutil.get_terminal_size().columns, 100))
    return textwrap.fill("  ".join(names), width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
