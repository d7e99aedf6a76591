"""What a sweep.yaml means, and what a query picks."""

from __future__ import annotations

from pathlib import Path

import pytest
from paraplan.optimizer.sweeps.grid import Point, likenesses, read_sweep
from paraplan.optimizer.sweeps.query import check_values, parse_query, select
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

    def found(text: str) -> set[tuple[str, int]]:
        return {(point.cluster, point.devices) for point in points(tmp_path, text) if point.devices > 64}

    # 1,280 of 989 TFLOP/s are 506 of 2,500 and 3,577 of 353.9: 4,480 sequences can be dealt to 2⁹ and 2⁹ · 7
    dealt = text.replace("2048", "1280").replace("4096\nd", "4480\nd")
    by_peak, by_price = {("gb200-nvl72", 512), ("cloudmatrix-384", 3584)}, {("gb200-nvl72", 640), ("cloudmatrix-384", 2560)}
    assert found(dealt) == {("hgx-h100", 1280), *by_peak, *by_price}
    # 2,048 are 810 and 5,723: no count within 5 % divides 4,096, the nearest others are 192 trays of 4 and 7 supernodes
    by_peak, by_price = {("gb200-nvl72", 768), ("cloudmatrix-384", 5376)}, {("gb200-nvl72", 1024), ("cloudmatrix-384", 4096)}
    assert found(text) == {("hgx-h100", 2048), *by_peak, *by_price}
    assert list(likenesses(tmp_path / "sweep.yaml")) == [
        "devices = 'peak of 2048 hgx-h100': 2,048 on hgx-h100 (100.0 % of it), 768 on gb200-nvl72 (94.8 % of it), "
        "5,376 on cloudmatrix-384 (93.9 % of it)",
        "devices = 'price of 2048 hgx-h100': 2,048 on hgx-h100 (100.0 % of it), 1,024 on gb200-nvl72 (100.0 % of it), "
        "4,096 on cloudmatrix-384 (100.0 % of it)",
    ]


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


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("model=zzz", "no point that is stored has model zzz; there is moe:10T, moe:600B, gpt2"),
        ("model!=zzz", "has model zzz; there is"),
        ("model=gtp2", "has model gtp2; did you mean 'gpt2'?"),
        ("model=moe:*|llama*", "has model llama*; there is"),
        ("model=gpt*;devices=64", "has model gpt*;devices=64; there is moe:10T, moe:600B, gpt2; commas stand between conditions"),
        ("devices=7", "has devices 7; there is 64, 1024, 2048"),
        ("stack=nemo*", "has stack nemo*; there is megatron-lm, torchtitan"),
    ],
)
def test_a_value_that_no_point_has_is_told_with_those_that_there_are(query: str, said: str) -> None:
    with pytest.raises(InputError) as raised:
        check_values(parse_query(query, COLUMNS), [row for _, row in ROWS])
    assert said in str(raised.value)


@pytest.mark.parametrize("query", ["model=moe:*,devices=2048", "status=bad input", "mfu=0.9", "devices>4096"])
def test_a_query_may_find_nothing(query: str) -> None:
    """What came of points may be none; and values that there are may not come together."""
    check_values(parse_query(query, COLUMNS), [row for _, row in ROWS])
    check_values(parse_query("model=zzz", COLUMNS), [])  # nothing is stored yet
    assert not select(ROWS, parse_query(query, COLUMNS))


@pytest.mark.parametrize(
    ("word", "meant"),
    [("step", "'step_time_s'"), ("batch", "'micro_batch' or 'global_batch'"), ("seq", "'seq_len'"), ("sead", "'seed'")],
)
def test_a_column_cut_short_is_taken_for_the_whole(word: str, meant: str) -> None:
    columns = ("model", "tp", "ep", "seed", "global_batch", "seq_len", "micro_batch", "step_time_s", "optimizer_sharding")
    with pytest.raises(InputError, match=rf"'{word}' is not a column; did you mean {meant}\?"):
        parse_query(f"{word}<1", columns)
