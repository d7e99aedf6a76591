"""Files appear whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from pathlib import Path

import pytest
from paraplan.optimizer import writing
from paraplan.optimizer.commands.plan_files import check_output
from paraplan.optimizer.writing import refuse_place, write_file, write_folder
from paraplan.search_spaces.errors import InputError

FILES = {"a.sh": "echo a\n", "deep/b.json": "{}\n", "c.txt": "ü\n"}


def tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text("utf-8") for path in folder.rglob("*") if path.is_file()}


def test_writes_all(tmp_path: Path) -> None:
    paths = write_folder(tmp_path / "new" / "folder", FILES)
    assert tree(tmp_path / "new" / "folder") == FILES
    assert [path.name for path in paths] == ["a.sh", "b.json", "c.txt"]
    assert os.access(paths[0], os.X_OK) and not os.access(paths[2], os.X_OK)


def test_replaces_what_was_there_and_leaves_the_rest(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("old")
    (tmp_path / "mine").write_text("mine")
    write_folder(tmp_path, FILES)
    assert tree(tmp_path) == {**FILES, "mine": "mine"}


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_interruption_leaves_what_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException, at: int
) -> None:
    (tmp_path / "a.sh").write_text("old")
    calls = 0
    owner = os if step == "fsync" else Path
    original = getattr(owner, step)

    def fail(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise error
        return original(*args)

    monkeypatch.setattr(writing.os if step == "fsync" else writing.Path, step, fail)
    with pytest.raises((KeyboardInterrupt, InputError)):
        write_folder(tmp_path, FILES)
    assert tree(tmp_path) == {"a.sh": "old"}
    assert [path.name for path in tmp_path.iterdir()] == ["a.sh"]


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    for target in (tmp_path / "out", tmp_path / "out" / "deeper"):
        with pytest.raises(InputError, match="out"):
            write_folder(target, FILES)
    assert tree(tmp_path) == {"out": ""}


def test_a_folder_where_a_file_should_be(tmp_path: Path) -> None:
    (tmp_path / "c.txt").mkdir()
    with pytest.raises(InputError, match=r"c\.txt: a folder of this name is in the way"):
        write_folder(tmp_path, FILES)
    assert tree(tmp_path) == {} and not (tmp_path / "deep").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="cannot write here"):
        write_folder(tmp_path, FILES)


def test_a_draft_that_cannot_be_written_is_told_as_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(prefix: str, dir: Path) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), f"{dir}/{prefix}x1y2")

    monkeypatch.setattr(tempfile, "mkdtemp", refused)
    with pytest.raises(InputError, match=rf"^{re.escape(str(tmp_path))}: cannot write here \(Permission denied\)"):
        write_folder(tmp_path, FILES)


def test_a_closed_folder_is_refused_before_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write anywhere
    closed = rf"{re.escape(str(tmp_path))}: cannot write here"
    with pytest.raises(InputError, match=rf"^--csv .*a\.csv: {closed}"):
        refuse_place(tmp_path / "a.csv", "--csv ")
    with pytest.raises(InputError, match=f"^{closed}"):
        check_output(tmp_path / "new" / "folder", None, None)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "", "a/../../x", "x\0y"])
def test_names_stay_inside_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="must stay inside"):
        write_folder(tmp_path / "out", {name: ""})
    assert not (tmp_path / "out").exists()


def test_one_file(tmp_path: Path) -> None:
    assert write_file(tmp_path / "report.html", "<p>").read_text() == "<p>"
    with pytest.raises(InputError, match="a folder of this name"):
        write_file(tmp_path, "text")
