"""What the README pages promise: links lead somewhere, flags exist, and files are read as they are shown."""

import re
from functools import cache
from pathlib import Path

import pytest
import typer
from paraplan.optimizer.application import app
from paraplan.search_spaces.loading import load_cluster, load_model, load_stack

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *(ROOT / folder / "README.md" for folder in ("optimizer", "cost_models", "search_spaces"))]
OF_OTHERS = {"--overlap-moe-expert-parallel-comm", "--strict"}
"""Flags of Megatron-LM and mypy that the pages name."""
LOADERS = {"cluster.yaml": load_cluster, "model.yaml": load_model, "stack.yaml": load_stack}


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def flags() -> frozenset[str]:
    """Every long option of every command."""
    commands = [typer.main.get_command(app)]
    found: set[str] = {"--help"}
    while commands:
        command = commands.pop()
        found |= {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        commands += getattr(command, "commands", {}).values()
    return frozenset(found)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", page.read_text())
    assert links
    for target, anchor in links:
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_flags_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text()))
    assert named <= flags() | OF_OTHERS


def test_files_are_read_as_shown(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n# (\S+):.*\n((?:.*\n)*?)```", (ROOT / "search_spaces" / "README.md").read_text())
    assert {name for name, _ in blocks} == set(LOADERS)
    for name, text in blocks:
        (tmp_path / name).write_text(text)
        assert LOADERS[name](tmp_path / name)
