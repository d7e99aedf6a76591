"""Partitions written and read back; Megatron's own refusals; MindSpeed's no-op layers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paraplan.optimizer.exporters.splits import (
    first_last,
    layer_counts,
    layer_list,
    megatron_layout,
    noop_layers,
    padded_ids,
    parse_megatron_layout,
    virtual_chunks,
)
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.layout import Split, Stage


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, tuple[Stage, ...]]:
    """Stages with decoder layers anywhere and the MTP layers in the last chunk or, alone, just before it."""
    pp, vpp = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    counts = draw(st.lists(st.integers(0, 7), min_size=pp * vpp, max_size=pp * vpp))
    mtp = draw(st.integers(0, 2))
    layers = sum(counts)
    if draw(st.booleans()) and pp > 2 and mtp:
        counts[-2] += mtp
        counts[-1] = 0
        layers = sum(counts) - mtp
    else:
        counts[-1] += mtp
    cuts = [0]
    for count in counts:
        cuts.append(cuts[-1] + count)
    return layers, Split(pp, vpp, tuple(cuts)).stages(layers, "none")


@given(splits())
def test_layout_string_round_trip(case: tuple[int, tuple[Stage, ...]]) -> None:
    layers, stages = case
    if len(stages) == 1 and any(chunk.mtp for chunk in stages[0].chunks[:-1]):
        return
    text = megatron_layout(stages)
    assert parse_megatron_layout(text, len(stages)) == stages
    assert sum(layer_counts(stages)) == layers
    assert " " not in text and "((" not in text


@pytest.mark.parametrize(
    ("counts", "mtp", "pp", "text"),
    [
        ((2, 2, 2, 2, 2, 2, 2, 1), 1, 4, "Ett|(tt|)*6mL"),
        ((4, *[4] * 14, 1), 0, 16, "Etttt|(tttt|)*14tL"),
        ((12, 12), 0, 2, "Et*12|t*12L"),
        ((1, 0, 0, 1), 0, 4, "Et|(|)*2tL"),
        ((3,), 0, 1, "EtttL"),
    ],
)
def test_known_layout_strings(counts: tuple[int, ...], mtp: int, pp: int, text: str) -> None:
    cuts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    assert megatron_layout(Split(pp, len(counts) // pp, tuple(cuts)).stages(cuts[-1] - mtp, "none")) == text


def test_reads_what_people_write() -> None:
    """PP 16 with a stage for MTP alone: stage 14 holds 2t / 2t→m, as Megatron prints it for this string."""
    stages = parse_megatron_layout("Et*3|(tt|)*29,m|L", 16)
    assert [len(stage.chunks) for stage in stages] == [2] * 16
    assert stages[0].chunks[0].layers == (0, 2) and stages[0].chunks[0].embedding
    assert stages[14].chunks[1].mtp == 1 and stages[14].chunks[1].layers is None
    assert stages[15].chunks[1].loss and stages[15].chunks[1].layers is None


@pytest.mark.parametrize(
    ("text", "pp", "words"),
    [
        ("E((t|)*2)*3L", 1, "do not nest"),
        ("Ett| tL", 2, "white space"),
        ("ett|tL", 2, "'e' is not one of"),
        ("E|(t|)*3,m|m||L", 4, "one chunk"),
        ("Ett|tL|", 3, "in the last chunk"),
        ("tE|tL", 2, "starts with the embedding"),
        ("Et|tLL", 2, "ends with the loss"),
        ("Em|tL", 2, "before the MTP layers"),
        ("Et|t|t|mL|", 4, "which pp = 4 does not divide"),
        ("Et|tm|t|L", 2, "before the MTP"),
        ("Et|t|m|L", 2, "on the first stage"),
        ("Et|m|||L|", 3, "in the last chunk"),
        ("Et|(t|)*999999999L", 2, "expands to"),
    ],
)
def test_what_megatron_refuses(text: str, pp: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_megatron_layout(text, pp)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=24))
def test_noop_layers_pad_any_partition_to_an_even_one(counts: list[int]) -> None:
    padded, noops = noop_layers(counts)
    real = padded_ids(counts)
    assert padded % len(counts) == 0
    assert sorted([*noops, *real]) == list(range(padded))
    per_chunk = padded // len(counts)
    assert [sum(1 for layer in real if layer // per_chunk == chunk) for chunk in range(len(counts))] == counts


def test_noops_of_shipped_recipes() -> None:
    """61 layers over 16 chunks of 4 (DeepSeek-V3), 94 over 4 stages of 3 chunks of 8 (Qwen3-235B)."""
    assert noop_layers([4] * 15 + [1]) == (64, (61, 62, 63))
    assert noop_layers([8] * 11 + [6]) == (96, (94, 95))


def test_noops_do_not_make_a_chunk() -> None:
    with pytest.raises(ValueError, match="chunk 1 has no layers"):
        noop_layers([3, 0, 3])


def test_first_and_last_stage_apart() -> None:
    assert first_last([7, 8, 8, 7], 4) == (7, 7)
    assert first_last([1, 2, 2, 1, 1, 2, 2, 1], 4) == (2, 2)
    assert first_last([7, 8, 9, 7], 4) is None
    assert first_last([0, 8, 8, 7], 4) is None
    assert layer_list([16, 16, 16, 13]) == "16,16,16,13"


def test_a_v_shaped_schedule_ends_where_it_began() -> None:
    forward = Split(2, 2, (0, 1, 3, 6, 10)).stages(10, "none")
    bent = tuple(Stage(stage=stage.stage, chunks=(stage.chunks[0], forward[1 - stage.stage].chunks[1])) for stage in forward)
    for stages in (forward, bent):
        assert [chunk.layers for chunk in virtual_chunks(stages, "dualpipev")] == [(0, 0), (1, 2), (3, 5), (6, 9)]
    with pytest.raises(ValueError, match="2 chunks per stage"):
        virtual_chunks(Split(2, 1, (0, 4, 8)).stages(8, "none"), "dualpipev")
