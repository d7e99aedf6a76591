"""Which cuts are legal: against the letters of every chunk, read as the frameworks read them."""

from __future__ import annotations

import sys
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from paraplan.optimizer.exporters.splits import megatron_layout, noop_layers, padded_ids, parse_megatron_layout
from paraplan.optimizer.readers.job import SplitWish
from paraplan.optimizer.readers.splits import cut
from paraplan.search_spaces.cutting import Cutting
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.inputs import build_problem, load_stack
from paraplan.search_spaces.layout import Split
from paraplan.search_spaces.model import Mtp

sys.path.insert(0, str(Path(__file__).parents[1] / "optimizer"))  # the oracle lies beside the optimizer's tests
from brute_force import can_be_told

STACKS = ("megatron-lm", "mindspeed-llm", "mindformers", "torchtitan")


@st.composite
def shapes(draw: st.DrawFn) -> tuple[str, int, int, int, int]:
    """A stack, decoder layers, MTP layers, pp and vpp, with more chunks than layers now and then."""
    pp = draw(st.integers(1, 4))
    vpp = draw(st.integers(1, 3)) if pp > 1 else 1
    return draw(st.sampled_from(STACKS)), draw(st.integers(1, 7)), draw(st.integers(0, 2)), pp, vpp


@given(shapes())
@settings(max_examples=150, deadline=None)
def test_legal_cuts_are_those_whose_letters_the_framework_takes(shape: tuple[str, int, int, int, int]) -> None:
    name, layers, mtp, pp, vpp = shape
    cutting = Cutting.of(load_stack(name), layers, mtp, pp, vpp)
    base = build_problem("deepseek-v3" if mtp else "llama-3.1-8b", "hgx-h100", 8, 8, 4096, name)
    kind = base.model.layer_kinds[-1]
    model = base.model.model_copy(update={"layers": (f"{layers}*{kind}",), "mtp": Mtp(layers=mtp, kind=kind) if mtp else None})
    problem = base.model_copy(update={"model": model})
    blocks = layers + mtp
    every = [(0, *inner, blocks) for inner in combinations_with_replacement(range(blocks + 1), pp * vpp - 1)]
    if pp * vpp > blocks + sum(cutting.bare):
        assert not any(can_be_told(problem, pp, vpp, cuts) for cuts in every)
        return
    legal = cutting.legal(np.array(every))
    assert legal.tolist() == [can_be_told(problem, pp, vpp, cuts) for cuts in every]
    starts = np.array(every)[legal][:, :-1]
    if len(starts):
        assert (starts <= cutting.latest).all()


@given(shapes(), st.data())
@settings(max_examples=150, deadline=None)
def test_what_is_legal_comes_back_from_the_form_that_says_it(shape: tuple[str, int, int, int, int], data: st.DataObject) -> None:
    """C063: Megatron's string; C072: ids of no-ops; C071: an offset, over an even share and with whole layers."""
    name, layers, mtp, pp, vpp = shape
    mtp = 0 if name == "torchtitan" else mtp
    stack = load_stack(name)
    cutting = Cutting.of(stack, layers, mtp, pp, vpp)
    blocks = layers + mtp
    inner = sorted(data.draw(st.lists(st.integers(0, blocks), min_size=pp * vpp - 1, max_size=pp * vpp - 1)))
    split = Split(pp, vpp, (0, *inner, blocks))
    fits = pp * vpp <= blocks + sum(cutting.bare) and bool(cutting.legal(np.array([split.cuts]))[0])
    stages = split.stages(layers, "none")
    counts = [min(b, layers) - min(a, layers) for a, b in zip(split.cuts, split.cuts[1:], strict=False)]
    if "layout" in stack.split_forms:
        if fits:
            assert parse_megatron_layout(megatron_layout(stages), pp) == stages
            assert cut(SplitWish(layout=stages), layers, mtp, pp, vpp) == split
    elif "offset" in stack.split_forms:
        base, rest = divmod(layers, pp * vpp)
        if fits:
            offset = [count - base for count in counts]
            assert sum(offset) == rest and min(counts[1:-1], default=1) >= 1
            assert cut(SplitWish(counts=tuple(base + more for more in offset)), layers, mtp, pp, vpp) == split
    elif fits:
        padded, missing = noop_layers(counts)
        assert padded % (pp * vpp) == 0 and all(0 <= each < padded for each in missing)
        assert sorted((*missing, *padded_ids(counts))) == list(range(padded))
        real = [
            sum(index * padded // (pp * vpp) <= each < (index + 1) * padded // (pp * vpp) for each in padded_ids(counts))
            for index in range(pp * vpp)
        ]
        assert real == counts


def test_what_megatron_refuses_of_strings_is_refused() -> None:
    """C063, letter by letter."""
    for text, pp in (
        ("tt|ttL", 2),  # no embedding
        ("Ett|tt", 2),  # no loss
        ("tE|ttL", 2),  # the embedding is not first
        ("Et|Ltt", 2),  # nor the loss last
        ("Et|mt|tL", 3),  # MTP before a decoder layer
        ("Ett|tm|mL", 3),  # MTP in two chunks
        ("Et|tm|tL|tt", 2),  # and before decoder layers, with the loss inside
        ("Et|t|tm|L", 2),  # MTP on the first stage, of two chunks a stage
        ("Ettt|tL|", 2),  # three chunks on two stages
        ("Et x|tL", 2),  # white space, and a letter that is none
    ):
        try:
            parse_megatron_layout(text, pp)
        except InputError:
            continue
        raise AssertionError(f"{text} on {pp} stages was taken")
