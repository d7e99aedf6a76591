"""No option writes over what its command reads: every such path is refused, and the file stays as it was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from paraplan.optimizer.cli import main
from paraplan.optimizer.writing import spare_inputs
from paraplan.search_spaces.errors import InputError

sys.path.insert(0, str(Path(__file__).parent))
from sample_plan import sample_plan

SWEEP = "{models: [llama-3.1-8b], clusters: [hgx-h100], devices: [8], global_batch: [32], seq_len: [4096]}\n"


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ("timeline plan.json -o plan.json", "plan.json"),
        ("topology plan.svg -o plan.svg", "plan.svg"),
        ("experts loads.csv --plan plan.json -o loads.csv", "loads.csv"),
        ("experts loads.csv --plan plan.json -o linked.json", "plan.json"),
        ("ranks plan.json --hosts hostfile -o .", "hostfile"),
        ("calibrate loads.csv -o ./loads.csv", "loads.csv"),
        ("sweep sweep.yaml --store s.sqlite --csv sweep.yaml", "sweep.yaml"),
        ("sweep --store plan.json --csv plan.json", "plan.json"),
        ("sweep sweep.yaml --store s.sqlite --csv s.sqlite", "sweep.yaml"),
    ],
)
def test_an_output_that_is_an_input_is_refused(
    arguments: str, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    servers = "".join(f"10.0.{n // 8}.{n % 8} s{n // 8}\n" for n in range(256))
    plan = sample_plan().to_json()
    files = {
        "plan.json": plan,
        "plan.svg": plan,
        "loads.csv": "layer,expert,load\n0,0,1\n",
        "hostfile": servers,
        "sweep.yaml": SWEEP,
    }
    for name, text in files.items():
        Path(name).write_text(text)
    Path("linked.json").symlink_to("plan.json")
    assert main(arguments.split()) == 2
    said = capsys.readouterr().err
    assert "would overwrite what is read here" in said
    assert len(said.splitlines()) == 1
    assert Path(kept).read_text() == files[kept]
    assert not Path("s.sqlite").exists()


def test_links_and_two_options_of_one_file(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.write_text("kept")
    (tmp_path / "hard").hardlink_to(store)
    with pytest.raises(InputError, match=r"--csv .*hard: would overwrite"):
        spare_inputs({"--csv": tmp_path / "hard"}, (store,))
    with pytest.raises(InputError, match=r"--parquet .*: is the file that --csv names too"):
        spare_inputs({"--csv": tmp_path / "t", "--parquet": tmp_path / "." / "t"}, (store,))
    spare_inputs({"--csv": tmp_path / "t", "--parquet": None}, (store, None))


def test_no_folder_is_made_for_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    given = ["sweep", str(tmp_path / "sweep.yaml"), "--store", str(tmp_path / "s.sqlite")]
    assert main([*given, "--csv", str(tmp_path / "none" / "t.csv")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
