"""Partitions of well-known models in every form that a framework takes, held to the frameworks' own rules of them."""

from __future__ import annotations

import re

import pytest
from paraplan.optimizer import build_problem, evaluate
from paraplan.optimizer.exporters.splits import (
    first_last,
    layer_counts,
    layer_list,
    megatron_layout,
    noop_layers,
    parse_megatron_layout,
)
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.search_spaces.errors import Infeasible
from paraplan.search_spaces.layout import Layout, Problem

KNOWN = (
    ("Et*4|(t*4|)*14tmL", 16, 61, 1),  # DeepSeek-V3
    ("Et*3|(tt|)*29m|L", 16, 61, 1),
    ("Et*7|(t*8|)*14t*7L", 16, 126, 0),  # Llama-3 405B
    ("Et|(tt|)*62tL", 16, 126, 0),
    ("E|(t|)*126L", 16, 126, 0),
    ("Et*4|(t*4|)*14tL", 16, 61, 0),  # Kimi-K2
    ("Et*4|(t*4|)*22t*4L", 8, 96, 0),  # GPT-3
    ("Et*11|(t*12|)*6t*11L", 8, 94, 0),  # Qwen3-235B
    ("Et*2|(t*3|)*30t*2L", 8, 94, 0),
)
"""Layout string, pipeline ranks, decoder layers, MTP layers."""


@pytest.mark.parametrize(("text", "pp", "layers", "mtp"), KNOWN)
def test_a_layout_string_says_every_known_partition(text: str, pp: int, layers: int, mtp: int) -> None:
    """Megatron-Core: chunks divide by pp, E first and L last once each, as many t and m as the model has, m in one chunk."""
    stages = parse_megatron_layout(text, pp)
    written = megatron_layout(stages)
    assert parse_megatron_layout(written, pp) == stages
    chunks = expanded(written).split("|")
    flat = "".join(chunks)
    assert len(chunks) % pp == 0 and flat[0] == "E" and chunks[-1][-1] == "L"
    assert [flat.count(letter) for letter in "EtmL"] == [1, layers, mtp, 1]
    assert sum("m" in chunk for chunk in chunks) == min(mtp, 1)
    assert flat.rfind("t") < flat.find("m") or not mtp


@pytest.mark.parametrize(("text", "pp", "layers", "mtp"), KNOWN)
def test_forms_that_cannot_say_a_partition_are_not_given(text: str, pp: int, layers: int, mtp: int) -> None:
    """No-ops: as many layers in every chunk, never only no-ops. First and last apart: vpp divides both and what is between."""
    stages = parse_megatron_layout(text, pp)
    counts, vpp = layer_counts(stages), len(stages[0].chunks)
    if min(counts) < 1:
        with pytest.raises(ValueError, match="no-ops only"):
            noop_layers(counts)
    else:
        padded, noops = noop_layers(counts)
        assert padded - len(noops) == layers and padded % (pp * vpp) == 0 and set(noops) < set(range(padded))
    ends = first_last(counts, pp)
    if ends is not None:
        between, rest = divmod(layers - sum(ends), pp - 2)
        assert not rest and not any(count % vpp for count in (*ends, between))
        assert counts == (ends[0] // vpp, *[between // vpp] * (pp - 2), ends[1] // vpp) * vpp
    if vpp == 1:
        listed = [int(count) for count in layer_list(counts).split(",")]
        assert len(listed) == pp and sum(listed) == layers


def test_first_and_last_apart_says_what_it_can() -> None:
    said = [first_last(layer_counts(parse_megatron_layout(text, pp)), pp) for text, pp, _, _ in KNOWN]
    assert said == [(4, 1), None, (7, 7), None, None, (4, 1), (12, 12), (11, 11), None]


def test_empty_chunks_are_legal_where_a_layout_string_says_them() -> None:
    """Llama-3 405B ran eight chunks a stage, the first with the embedding and the last with the loss alone."""
    problem, layout = llama("tp=8,pp=16,vpp=8,recompute=full")
    given = layout.model_copy(update={"stages": parse_megatron_layout("E|(t|)*126L", 16)})
    priced, broken = evaluate(problem, given, replayed=False)
    assert not broken
    filled = evaluate(*llama("tp=8,pp=16,vpp=7,recompute=full"), replayed=False)[0]
    assert priced.step_time_s < filled.step_time_s
    assert evaluate(problem, layout, replayed=False)[0].step_time_s == priced.step_time_s  # the only way to cut it
    padded = problem.model_copy(update={"stack": problem.stack.model_copy(update={"split_forms": ("even", "noop_layers")})})
    with pytest.raises(Infeasible, match="cannot be priced"):
        evaluate(padded, given)  # MindSpeed refuses a chunk of no-ops only


def llama(words: str) -> tuple[Problem, Layout]:
    problem = build_problem("llama-3.1-405b", "hgx-h100", 8192, 2048, 8192)
    return problem, complete(problem, parse_layout(words))


def expanded(text: str) -> str:
    """The string as Megatron's parser expands it: groups first, then repeated letters."""
    for pattern in (r"\(([^()]+)\)\*(\d+)", r"([EtmL|])\*(\d+)"):
        text = re.sub(pattern, lambda match: match.group(1) * int(match.group(2)), text)
    return text
