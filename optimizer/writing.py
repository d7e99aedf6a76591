"""Files written whole or not at all: drafts beside their place, then moved into it once every one is complete."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from ..search_spaces.errors import InputError

DRAFTS = ".paraplan-"
"""What the name of a folder of drafts begins with."""
CLOSED, ELSEWHERE = "cannot write here", "name another place"


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
        raise InputError(f"{_named(error, directory)}: {CLOSED} ({error.strerror or error}); {ELSEWHERE}") from error
    return targets


def _named(error: OSError, directory: Path) -> Path:
    """The place that an error is about as the user knows it: a draft is the folder that it was for."""
    place = Path(os.fsdecode(error.filename or directory))
    return directory if any(part.startswith(DRAFTS) for part in place.parts) else place


def replaced(directory: Path, files: Mapping[str, str | bytes]) -> tuple[str, ...]:
    """A sentence that names the files of `directory` that `write_folder` would put others in the place of; none where none are."""
    others = _others(directory, files)
    if not others:
        return ()
    return (f"replaced {len(others)} file{'s' * (len(others) > 1)} in {directory} that read otherwise: {', '.join(others)}",)


def refuse_replacing(directory: Path, files: Mapping[str, str | bytes]) -> None:
    """InputError that names the files of `directory` that `write_folder` would put others in the place of, if there are any."""
    others = _others(directory, files)
    if others:
        what = "a file that reads" if len(others) == 1 else "files that read"
        raise InputError(
            f"{directory}: {', '.join(others)}: {what} otherwise would be written over; name another folder, or give --force"
        )


def _others(directory: Path, files: Mapping[str, str | bytes]) -> list[str]:
    contents = {name: text if isinstance(text, bytes) else text.encode("utf-8") for name, text in files.items()}
    return [name for name, content in contents.items() if _reads_otherwise(directory / name, content)]


def _reads_otherwise(path: Path, content: bytes) -> bool:
    """Whether there is a file, and not this one; one that cannot be read is taken for another."""
    try:
        return path.is_file() and path.read_bytes() != content
    except OSError:
        return True


def write_file(path: Path, text: str | bytes) -> Path:
    """Writes one file whole or not at all, in a folder that is there; InputError if the place cannot be written."""
    refuse_place(path)
    return write_folder(path.parent, {path.name: text})[0]


def refuse_place(path: Path, said: str = "") -> None:
    """InputError for a path that can be no file: what can be known before a long search is over. `said` goes before it."""
    if not path.name:
        raise InputError(f"{said}{path}: name a file to write, not a folder")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{said}{path}: there is no folder {path.parent}; make it first, or name another place")
    if path.is_dir():
        raise InputError(f"{said}{path}: a folder of this name is in the way; move it or name another place")
    if path.exists() and not path.is_file():
        raise InputError(f"{said}{path}: is a device or a pipe; name a file, or none that is there")
    refuse_closed(path.parent, f"{said}{path}: ")


def refuse_closed(folder: Path, said: str = "") -> None:
    """InputError for a folder that this user may not write in."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{said}{folder}: {CLOSED} ({os.strerror(errno.EACCES)}); {ELSEWHERE}")


def spare_inputs(outputs: Mapping[str, Path | None], inputs: Iterable[Path | str | None]) -> None:
    """InputError where a file that an option would write is one that is read, or another option's, however named."""
    read = [Path(path) for path in inputs if path is not None]
    written: list[tuple[str, Path]] = []
    for option, path in outputs.items():
        if path is None:
            continue
        if any(_same(path, other) for other in read):
            raise InputError(f"{option} {path}: would overwrite what is read here; name another file")
        twice = next((other for other, taken in written if _same(path, taken)), None)
        if twice is not None:
            raise InputError(f"{option} {path}: is the file that {twice} names too; name another file")
        written.append((option, path))


def _same(first: Path, second: Path) -> bool:
    """Whether two paths lead to one file, by links too."""
    try:
        return first.resolve() == second.resolve() or (first.exists() and second.exists() and first.samefile(second))
    except (OSError, ValueError):  # a path that cannot be looked at is nothing that could be read
        return False


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
    workspace = Path(tempfile.mkdtemp(prefix=DRAFTS, dir=directory))
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
