"""How a partition of the layers into stages is written: Megatron's layout string, no-op layers, and layers per stage."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from ...search_spaces.errors import InputError
from ...search_spaces.layout import Chunk, Stage
from ...search_spaces.vocabulary import V_SHAPED

LETTERS = "EtmL"
GROUP = re.compile(r"\(([^()]+)\)\*(\d+)")
REPEAT = re.compile(r"([EtmL|])\*(\d+)")
MOST_CHARACTERS = 1_000_000  # of an expanded layout string; a typing slip must not fill the memory


def virtual_chunks(stages: Sequence[Stage], schedule: str = "1f1b") -> tuple[Chunk, ...]:
    """The chunks in the order a token passes them.

    That is round by round over the stages, or down and back up where a V-shaped schedule's stage 0 also holds the loss. ValueError
    if the stages do not all hold as many chunks, or if a V-shaped schedule's do not hold two.
    """
    chunks_per_stage = {len(stage.chunks) for stage in stages}
    if len(chunks_per_stage) != 1:
        raise ValueError(f"stages hold {sorted(chunks_per_stage)} chunks; every stage must hold the same number")
    vpp = chunks_per_stage.pop()
    if schedule in V_SHAPED and vpp != 2:
        raise ValueError(f"schedule {schedule} runs 2 chunks per stage, the layout lists {vpp}")
    if schedule not in V_SHAPED or not stages[0].chunks[1].loss:
        return tuple(stage.chunks[v] for v in range(vpp) for stage in stages)
    return (*(stage.chunks[0] for stage in stages), *(stage.chunks[1] for stage in reversed(stages)))


def layer_count(chunk: Chunk) -> int:
    """Decoder layers of a chunk."""
    return chunk.layers[1] - chunk.layers[0] + 1 if chunk.layers else 0


def layer_counts(stages: Sequence[Stage], schedule: str = "1f1b") -> tuple[int, ...]:
    """Decoder layers of each chunk, in the order of `virtual_chunks`."""
    return tuple(layer_count(chunk) for chunk in virtual_chunks(stages, schedule))


# --- Megatron's layout string ------------------------------------------------------------------------------------------------


def megatron_layout(stages: Sequence[Stage]) -> str:
    """`--pipeline-model-parallel-layout` for the stages, such as "Ett|(tt|)*6mL".

    E, t, m and L stand for embedding, decoder layer, MTP layer and loss; `|` ends a chunk; equal chunks in a row are folded, one
    level deep, because the parser expands parentheses once (megatron/core/transformer/pipeline_parallel_layer_layout.py).
    InputError if Megatron would refuse the stages.
    """
    chunks = [_letters(chunk) for chunk in virtual_chunks(stages)]
    _refuse_illegal(chunks, len(stages))
    pieces = [(_fold(text), len(list(run))) for text, run in groupby(chunks[:-1])]
    return "".join(f"({text}|)*{n}" if n > 1 else f"{text}|" for text, n in pieces) + _fold(chunks[-1])


def parse_megatron_layout(text: str, pp: int) -> tuple[Stage, ...]:
    """The stages that a layout string describes on pp pipeline ranks; InputError says what Megatron would refuse, and why."""
    chunks = _expand(text).split("|")
    if pp < 1 or len(chunks) % pp:
        raise InputError(f"layout {text!r} has {len(chunks)} chunks, which pp = {pp} does not divide")
    _refuse_illegal(chunks, pp)
    parsed: list[Chunk] = []
    first = 0
    for letters in chunks:
        layers = letters.count("t")
        parsed.append(
            Chunk(
                layers=(first, first + layers - 1) if layers else None,
                embedding="E" in letters,
                mtp=letters.count("m"),
                loss="L" in letters,
            )
        )
        first += layers
    return tuple(Stage(stage=s, chunks=tuple(parsed[s::pp])) for s in range(pp))


def _letters(chunk: Chunk) -> str:
    return "E" * chunk.embedding + "t" * layer_count(chunk) + "m" * chunk.mtp + "L" * chunk.loss


def _fold(letters: str) -> str:
    runs = [(letter, len(list(run))) for letter, run in groupby(letters)]
    return "".join(f"{letter}*{n}" if n > 4 else letter * n for letter, n in runs)


def _expand(text: str) -> str:
    if " " in text or "\t" in text or "\n" in text:
        raise InputError(f"layout {text!r} holds white space, which Megatron's parser refuses; write it without")
    expanded = text.replace(",", "")
    for pattern in (GROUP, REPEAT):
        grown = sum(len(body) * int(count[:9]) for body, count in pattern.findall(expanded))
        if grown > MOST_CHARACTERS:
            raise InputError(f"layout {text!r} expands to {grown} items; the most is {MOST_CHARACTERS}")
        expanded = pattern.sub(lambda match: match.group(1) * int(match.group(2)), expanded)
    for letter in expanded:
        if letter in "()*":
            raise InputError(f"layout {text!r}: write groups as (…)*n and repeats as x*n; groups do not nest")
        if letter not in LETTERS + "|":
            raise InputError(f"layout {text!r}: {letter!r} is not one of E, t, m, L and |")
    return expanded


def _refuse_illegal(chunks: Sequence[str], pp: int) -> None:
    """Megatron-Core's own checks, and one it lacks: an empty chunk after the loss passes there, and training then breaks."""
    flat = "".join(chunks)
    if flat.count("E") != 1 or not chunks[0].startswith("E"):
        raise InputError("a Megatron layout starts with the embedding (E), once")
    if flat.count("L") != 1 or not chunks[-1].endswith("L"):
        raise InputError("a Megatron layout ends with the loss (L), once, in the last chunk")
    if re.search("m.*t", flat):
        raise InputError("a Megatron layout puts every decoder layer (t) before the MTP layers (m)")
    with_mtp = [index for index, chunk in enumerate(chunks) if "m" in chunk]
    if len(with_mtp) > 1:
        raise InputError(f"Megatron keeps all MTP layers (m) in one chunk; the layout spreads them over {len(with_mtp)}")
    if with_mtp and with_mtp[0] < len(chunks) - pp:
        raise InputError("Megatron takes MTP layers (m) only in the last chunk of a stage")
    if with_mtp and len(chunks) > pp > 1 and with_mtp[0] % pp == 0:
        raise InputError("Megatron does not take MTP layers (m) on the first stage")


# --- what MindSpeed offers ---------------------------------------------------------------------------------------------------


def noop_layers(counts: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Any contiguous partition as an even one: (layers with the no-ops counted, ids of the no-ops).

    Every chunk is padded at its end to the fullest one. Ids number the padded layers from 0 (`--noop-layers`, beside
    `--num-layers` with the no-ops in). ValueError if a chunk would hold no-ops only, which MindSpeed refuses.
    """
    fullest = max(counts)
    if min(counts) < 1:
        raise ValueError(f"chunk {list(counts).index(min(counts))} has no layers, and MindSpeed refuses a chunk of no-ops only")
    return fullest * len(counts), tuple(
        index * fullest + position for index, count in enumerate(counts) for position in range(count, fullest)
    )


def padded_ids(counts: Sequence[int]) -> tuple[int, ...]:
    """Id of each real layer among the padded ones of `noop_layers`."""
    fullest = max(counts)
    return tuple(index * fullest + position for index, count in enumerate(counts) for position in range(count))


def layer_list(counts: Sequence[int]) -> str:
    """`--num-layer-list`: layers of each stage, comma-separated; for stages of one chunk."""
    return ",".join(str(count) for count in counts)


def first_last(counts: Sequence[int], pp: int) -> tuple[int, int] | None:
    """Decoder layers of the first and the last stage, when all stages between hold as many and a stage's chunks are equal.

    The form of `--decoder-first-pipeline-num-layers` and its twin; None when the partition does not have it.
    """
    vpp = len(counts) // pp
    rounds = [tuple(counts[v * pp : (v + 1) * pp]) for v in range(vpp)]
    if pp < 2 or len(set(rounds)) != 1 or len(set(rounds[0][1:-1])) > 1 or min(counts) < 1:
        return None
    return rounds[0][0] * vpp, rounds[0][-1] * vpp
