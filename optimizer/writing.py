"""Files written whole or not at all: drafts beside their place, then moved into it once every one is complete."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from ..search_spaces.errors import InputError


def write_folder(directory: Path, files: Mapping[str, str | bytes]) -> list[Path]:
    """Writes every file (name relative to `directory` → text or bytes) or, if anything goes wrong, none; returns their paths.

    Missing folders are made. A shell script (.sh) becomes executable. InputError if the place cannot be written.
    """
    targets = [directory / _safe_name(name) for name in files]
    try:
        made = _make_folders({directory, *(target.parent for target in targets)})
        try:
            _refuse_folders(targets)
            _write(directory, dict(zip(targets, files.values(), strict=True)))
        except BaseException:
            for folder in reversed(made):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise
    except OSError as error:
        place = error.filename or directory
        raise InputError(f"{place}: cannot write here ({error.strerror or error}); name another place") from error
    return targets


def write_file(path: Path, text: str | bytes) -> Path:
    """Writes one file whole or not at all; InputError if the place cannot be written."""
    if not path.name:
        raise InputError(f"{path}: name a file to write, not a folder")
    return write_folder(path.parent, {path.name: text})[0]


def _safe_name(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if not path.name or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise InputError(f"file name {name!r} must stay inside the output folder")
    return path


def _make_folders(folders: set[Path]) -> list[Path]:
    """Makes what is missing, outermost first; returns what was made."""
    missing = {folder for path in folders for folder in (path, *path.parents) if not folder.exists()}
    made = sorted(missing, key=lambda folder: len(folder.parts))
    for folder in made:
        folder.mkdir(exist_ok=True)
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder}: a file of this name is in the way; name a folder to write to")
    return made


def _refuse_folders(targets: list[Path]) -> None:
    for target in targets:
        if target.is_dir():
            raise InputError(f"{target}: a folder of this name is in the way; move it or name another place")


def _write(directory: Path, texts: Mapping[Path, str | bytes]) -> None:
    """Drafts and the files they replace share the folder's file system, so that each move is one step and can be undone."""
    workspace = Path(tempfile.mkdtemp(prefix=".paraplan-", dir=directory))
    try:
        drafts = {target: _draft(workspace / str(n), target, text) for n, (target, text) in enumerate(texts.items())}
        _move_into_place(drafts)
    finally:
        shutil.rmtree(workspace)


def _draft(path: Path, target: Path, text: str | bytes) -> Path:
    with path.open("wb") as stream:
        stream.write(text if isinstance(text, bytes) else text.encode("utf-8"))
        stream.flush()
        os.fsync(stream.fileno())
    if target.suffix == ".sh":
        mode = path.stat().st_mode
        path.chmod(mode | (mode & 0o444) >> 2)  # executable for those who may read it
    return path


def _move_into_place(drafts: Mapping[Path, Path]) -> None:
    undo: list[tuple[Path, Path | None]] = []
    try:
        for target, draft in drafts.items():
            kept = draft.with_suffix(".old") if target.exists() else None
            if kept:
                shutil.copy2(target, kept)
            undo.append((target, kept))
            draft.replace(target)
    except BaseException:
        for target, kept in reversed(undo):
            if kept:
                kept.replace(target)
            else:
                target.unlink(missing_ok=True)
        raise
