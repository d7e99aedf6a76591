"""What a sweep.yaml means, and what a query picks."""

from __future__ import annotations

from pathlib import Path

import pytest
from paraplan.optimizer.sweeps.grid import Point, read_sweep
from paraplan.optimizer.sweeps.query import parse_query, select
from paraplan.search_spaces.errors import InputError

BASE = "clusters: [hgx-h100]\ndevices: [8, 16]\nglobal_batch: [32, 4 per device]\nseq_len: [4096]\n"


def points(tmp_path: Path, text: str) -> list[Point]:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    return read_sweep(path)


def test_the_grid_is_every_combination_once_with_models_outermost(tmp_path: Path) -> None:
    found = points(tmp_path, BASE + "models: [gpt2, {family: moe, sizes: [600b, 10T]}]\nprecision: [bf16, fp8]\n")
    assert list(dict.fromkeys(point.model for point in found)) == ["gpt2", "moe:600B", "moe:10T"]
    assert len(found) == 3 * (1 + 2) * 2  # 4 per device is 32 on 8 devices, which is there already
    assert {(point.devices, point.global_batch) for point in found} == {(8, 32), (16, 32), (16, 64)}
    assert len({point.key for point in found}) == len(found)
    assert Point.from_json(found[0].to_json()).key == found[0].key


def test_a_list_repeats_a_flag_that_may_be_repeated_and_spans_the_grid_for_others(tmp_path: Path) -> None:
    options = "options: {forbid: ['pp>16', 'vpp>2'], stack: [megatron-lm, torchtitan], framework-version: 0.16, inside: none}\n"
    found = points(tmp_path, BASE + "models: gpt2\n" + options)
    assert len(found) == 6
    assert found[0].options == {
        "forbid": ["pp>16", "vpp>2"],
        "stack": "megatron-lm",
        "framework_version": "0.16",
        "inside": ["none"],
    }
    spanned = points(tmp_path, BASE + "models: gpt2\noptions: {fix: [['tp=1'], ['tp=2', 'pp=1']]}\n")
    assert {tuple(point.options["fix"]) for point in spanned} == {("tp=1",), ("tp=2", "pp=1")}


def test_a_batch_of_tokens_has_fewer_sequences_the_longer_they_are(tmp_path: Path) -> None:
    text = (
        "models: gpt2\nclusters: hgx-h100\ndevices: 64\nseq_len: [4096, 32768, 1048576]\nglobal_batch: [4Mi tokens, 1 M tokens]\n"
    )
    found = {(point.seq_len, point.global_batch) for point in points(tmp_path, text)}
    assert found == {(4096, 1024), (32768, 128), (1048576, 4), (4096, 244), (32768, 31), (1048576, 1)}


def test_clusters_may_have_as_many_devices_as_have_one_peak_or_price(tmp_path: Path) -> None:
    text = (
        "models: gpt2\nclusters: [hgx-h100, gb200-nvl72, cloudmatrix-384]\nseq_len: 4096\nglobal_batch: 4096\n"
        "devices: [64, peak of 2048 hgx-h100, price of 2048 hgx-h100]\n"
        "prices: {hgx-h100: 2.5, gb200-nvl72: 5, cloudmatrix-384: 1.25}\n"
    )
    found = [(point.cluster, point.devices) for point in points(tmp_path, text)]
    assert [count for _, count in found] == [64, 2048, 64, 768, 1024, 64, 5376, 4096]
    # 2,048 of 989 TFLOP/s are 810 of 2,500 and 5,723 of 353.9: nearest are 192 trays of 4 (864 are 12 racks), and 7 supernodes


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (BASE, "models is missing"),
        (BASE + "models: []", "models"),
        (BASE + "models: gpt2\ndevice: 8", "did you mean 'devices'"),
        (BASE.replace("[8, 16]", "[0]") + "models: gpt2", "devices"),
        (BASE.replace("4 per device", "many") + "models: gpt2", "'4 per device'"),
        (BASE.replace("8, 16", "8, half") + "models: gpt2", "'peak of 2048 hgx-h100'"),
        (
            BASE.replace("[hgx-h100]", "hgx-b200").replace("8, 16", "price of 8 hgx-h100") + "models: gpt2",
            "prices has none of hgx-h100",
        ),
        (BASE + "models: [{family: moe, sizes: [7X]}]", "sweep.yaml: sizes: '7X'"),
        (BASE + "models: gpt2\noptions: {engin: auto}", "did you mean 'engine'"),
        (BASE + "models: gpt2\noptions: {top: [1, 0]}", "options"),
        (BASE + "models: gpt2\noptions: {lora: 8}", "LoRA"),
        (BASE + "models: gpt2\noptions: {memory-margin: 0.1, memory_margin: 0.2}", "given twice"),
        (BASE.replace("[4096]", str(list(range(1, 2001)))).replace("[8, 16]", str(list(range(1, 501)))) + "models: gpt2", "points"),
    ],
)
def test_a_sweep_that_means_nothing_is_refused_in_words(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(InputError, match=r"sweep\.yaml") as error:
        points(tmp_path, text)
    assert named in str(error.value)


ROWS = [
    ("a", {"model": "moe:10T", "devices": 64, "mfu": 0.3, "status": "optimal", "option stack": "megatron-lm"}),
    ("b", {"model": "moe:600B", "devices": 1024, "mfu": 0.5, "status": "optimal", "option stack": "torchtitan"}),
    ("c", {"model": "gpt2", "devices": 2048, "mfu": None, "status": "infeasible", "option stack": "torchtitan"}),
]
COLUMNS = tuple(ROWS[0][1])


@pytest.mark.parametrize(
    ("query", "keys"),
    [
        ("", "abc"),
        ("model=moe:*, devices >= 1024", "b"),
        ("devices<2048", "ab"),
        ("model=gpt2|moe:10T", "ac"),
        ("model!=gpt2|moe:10T", "b"),
        ("mfu>0.1,mfu≤0.3", "a"),
        ("devices=64|2048", "ac"),
        ("stack=torchtitan,status==optimal", "b"),
        ("option-stack=megatron*", "a"),
    ],
)
def test_a_query_picks_the_rows_that_meet_all_conditions(query: str, keys: str) -> None:
    assert "".join(key for key, _ in select(ROWS, parse_query(query, COLUMNS))) == keys


@pytest.mark.parametrize("query", ["modle=x", "devices", "devices=many", "model<x", "devices>1|2", "__import__('os')=1"])
def test_a_query_that_means_nothing_is_refused(query: str) -> None:
    with pytest.raises(InputError, match="--show"):
        parse_query(query, COLUMNS)
