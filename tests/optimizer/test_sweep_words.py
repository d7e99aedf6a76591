"""What is wrong with a sweep.yaml is said of the field as it was written, and a sweep ends as its points do."""

from __future__ import annotations

from pathlib import Path

import pytest
from paraplan.optimizer.cli import main

REST = {"models": "[llama-3.1-8b]", "clusters": "[hgx-h100]", "devices": "[8]", "global_batch": "[32]", "seq_len": "[4096]"}


def ran(folder: Path, capsys: pytest.CaptureFixture[str], **fields: str) -> tuple[int, str, str]:
    """Exit status, standard error and standard output of a sweep with some fields of its own."""
    path = folder / "s.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in (REST | fields).items()))
    status = main(["sweep", str(path), "--store", str(folder / "s.sqlite"), "--workers", "1"])
    said = capsys.readouterr()
    return status, said.err.replace(f"{path}: ", ""), said.out


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"devices": "[8.5]"}, "devices[0] = 8.5: must be a whole number or text"),
        ({"devices": "[true]"}, "devices[0] = True: must be a whole number or text"),
        ({"devices": "[8, -1]"}, "devices[1] = -1: must be greater than 0"),
        ({"devices": "[]"}, "devices = a list of 0: must have at least 1 entry"),
        ({"seq_len": "[true]"}, "seq_len[0] = True: must be a whole number"),
        ({"models": "[3]"}, "models[0] = 3: must be text or a mapping"),
        ({"models": "[{family: dense, sizes: []}]"}, "models[0].sizes = a list of 0: must have at least 1 entry"),
        ({"models": "[{famly: dense}]"}, "models[0].famly is not a known key; did you mean 'family'?"),
        ({"prices": "{hgx-h100: cheap}"}, "prices.hgx-h100 = 'cheap': must be a number"),
        ({"prices": "{hgx-h100: true}"}, "prices.hgx-h100 = True: must be a number"),
        ({"prices": "3"}, "prices = 3: must be a mapping or text"),
        ({"prices": "{hgx-h10: 2}"}, "prices.hgx-h10: 'hgx-h10' is no cluster of this sweep or the catalog"),
        ({"options": "{fix: 3}"}, "options: fix = 3: must be a list"),
        ({"global_batch": "[1000 tokens]"}, "global_batch = '1000 tokens': is less than one sequence of seq_len 4096"),
    ],
)
def test_a_field_is_named_as_it_was_written(
    fields: dict[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, told, _ = ran(tmp_path, capsys, **fields)
    assert status == 2
    assert told.startswith(f"paraplan: {said}")
    assert "more)" not in told, "one thing is wrong"
    assert not (tmp_path / "s.sqlite").exists()


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"models": "[nope, neither]"}, 2, "planned 0 of 2 points, 2 bad input"),
        ({"models": "[nope, llama-3.1-70b]", "devices": "[1]"}, 1, "planned 0 of 2 points, 1 bad input, 1 infeasible"),
        ({"models": "[nope, llama-3.1-8b]"}, 0, "planned 1 of 2 points, 1 bad input"),
    ],
)
def test_a_sweep_without_a_plan_ends_like_its_points(
    fields: dict[str, str], status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, told, table = ran(tmp_path, capsys, **fields)
    assert ended == status
    assert said in told
    assert f"{said.split()[3]} points · {said.split()[1]} planned" in table
    assert ran(tmp_path, capsys, **fields)[0] == status, "again, from the store"


def test_a_batch_of_tokens_says_what_it_was_rounded_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, told, _ = ran(tmp_path, capsys, global_batch="[130k tokens]")
    assert "global_batch = '130k tokens': with sequences of 4,096 tokens taken as 32 of them, 131,072 tokens" in told
    _, told, _ = ran(tmp_path, capsys, global_batch="[128Ki tokens]")
    assert "taken as" not in told
