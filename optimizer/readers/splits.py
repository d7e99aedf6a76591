"""Stages as a configuration cuts them: the layers that every chunk would hold, or the rule that forbids it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...search_spaces.layout import Split
from .job import Finding, SplitWish

ARGUMENTS = "Megatron-LM megatron/training/arguments.py; megatron/core/transformer/transformer_config.py"
LAYOUT = "Megatron-LM megatron/core/transformer/pipeline_parallel_layer_layout.py"
LOPSIDED = 1.5
"""Share of an even stage by which a first or last stage may be fuller in what is proposed."""
EVERY_LAYER = "every layer is placed once"


def cut(wish: SplitWish, layers: int, mtp: int, pp: int, vpp: int, folded: bool = False) -> Split | Finding | None:
    """The split of a wish, `folded` for a schedule that goes down the stages and back up; None where the planner may cut or rule
    C060 says why the even split fails.
    """
    found = _cut(wish, layers, mtp, pp, vpp)
    return replace(found, folded=True) if folded and isinstance(found, Split) else found


def _cut(wish: SplitWish, layers: int, mtp: int, pp: int, vpp: int) -> Split | Finding | None:
    if wish.free:
        return None
    if wish.layout:
        return _as_listed(wish, layers, mtp, pp)
    if wish.less is not None:
        return _weighed(wish.less, layers, mtp, pp, vpp)
    if wish.counts:
        return _as_counted(wish.counts, layers, mtp, pp, vpp)
    counts = _first_last(wish, layers, pp, vpp)
    if counts is None or isinstance(counts, Finding):
        return counts
    return _split(counts, mtp, pp, vpp)


def even_counts(layers: int, pp: int, vpp: int) -> tuple[int, ...] | None:
    """Layers of each chunk of the even split, in virtual-pipeline order; None where it does not come out whole."""
    chunks = pp * vpp
    return (layers // chunks,) * chunks if layers % chunks == 0 and layers >= chunks else None


def uneven_remedy(layers: int, pp: int) -> str:
    """How a first and a last stage of their own would cut the layers, in words; "" where no such cut is near to even."""
    found = first_last_counts(layers, pp)
    if found is None:
        return ""
    first, last = found
    middle = (layers - first - last) // (pp - 2) if pp > 2 else 0
    shown = [first, *[middle] * (pp - 2), last]
    said = "+".join(map(str, shown)) if pp <= 8 else f"{first}+{pp - 2}·{middle}+{last}"
    return f"{first} in the first and {last} in the last stage ({said})"


def first_last_counts(layers: int, pp: int) -> tuple[int, int] | None:
    """(first, last) layers such that the stages between hold as many, nearest to even; None where there is none near."""
    if pp < 2 or layers < pp:
        return None
    fair, options = layers / pp, []
    for middle in range(max(1, int(fair) - 1), int(fair) + 3):
        ends = layers - middle * (pp - 2)
        if ends >= 2:
            options.append((ends // 2, ends - ends // 2, middle))
    if not options:
        return None
    first, last, _ = min(options, key=lambda cut: (max(cut), cut[2] - min(cut[:2])))
    return (first, last) if max(first, last) <= LOPSIDED * fair + 1 else None


def _split(counts: Sequence[int], mtp: int, pp: int, vpp: int) -> Split:
    cuts = [0]
    for count in counts:
        cuts.append(cuts[-1] + count)
    cuts[-1] += mtp
    return Split(pp, vpp, tuple(cuts))


def _as_listed(wish: SplitWish, layers: int, mtp: int, pp: int) -> Split | Finding:
    if len(wish.layout) != pp:
        return Finding("C063a", f"the layout has {len(wish.layout)} stages, pp is {pp}.", EVERY_LAYER, LAYOUT)
    try:
        split = Split.from_stages(wish.layout)
    except ValueError as error:
        return Finding("C063a", f"{error}.", EVERY_LAYER, LAYOUT)
    chunks = [chunk for stage in wish.layout for chunk in stage.chunks]
    listed_mtp = sum(chunk.mtp for chunk in chunks)
    listed = split.cuts[-1] - listed_mtp
    if listed != layers:
        return Finding("C063a", f"the layout places {listed} decoder layers, the model has {layers}.", EVERY_LAYER, LAYOUT)
    if listed_mtp != mtp:
        return Finding("C063a", f"the layout places {listed_mtp} MTP layers, the model has {mtp}.", EVERY_LAYER, LAYOUT)
    return split


def _as_counted(counts: Sequence[int], layers: int, mtp: int, pp: int, vpp: int) -> Split | Finding:
    if len(counts) != pp * vpp:
        sentence = f"layers are listed for {len(counts)} chunks, pp·vpp is {pp}·{vpp}."
        return Finding("C063a", sentence, EVERY_LAYER, "MindSpeed-LLM num-layer-list")
    if sum(counts) != layers:
        sentence = f"the stages hold {'+'.join(map(str, counts))} = {sum(counts)} layers, the model has {layers}."
        return Finding("C063a", sentence, EVERY_LAYER, "MindSpeed-LLM num-layer-list")
    return _split(counts, mtp, pp, vpp)


def _weighed(less: tuple[int, int], layers: int, mtp: int, pp: int, vpp: int) -> Split | Finding:
    """torchtitan's split: even over layers and both weights, what is left over going to the first chunks."""
    chunks = pp * vpp
    base, extra = divmod(layers + sum(less), chunks)
    counts = [base + int(chunk < extra) for chunk in range(chunks)]
    counts[0] -= less[0]
    counts[-1] -= less[1]
    if chunks > layers + sum(less) or min(counts) < 0:
        sentence = f"{chunks} chunks are more than {layers} layers with {sum(less)} for embedding and loss fill."
        return Finding("C070", sentence, "every chunk holds a layer, or embedding or loss", "torchtitan pipeline_parallel.py")
    return _split(counts, mtp, pp, vpp)


def _first_last(wish: SplitWish, layers: int, pp: int, vpp: int) -> Sequence[int] | Finding | None:
    """Counts of a split whose first or last stage is set apart, or in which embedding and loss count as layers."""
    set_apart = wish.first is not None or wish.last is not None
    if wish.embedding or wish.loss:
        if set_apart:
            sentence = "first or last stage and embedding or loss are both set apart; only one of the two ways may be used."
            return Finding("C061", sentence, "the two ways exclude each other", ARGUMENTS)
        return _counting_ends(wish, layers, pp, vpp)
    if not set_apart:
        return even_counts(layers, pp, vpp)
    if pp == 1:
        given = wish.first if wish.first is not None else wish.last
        if given == layers:
            return even_counts(layers, pp, vpp)
        sentence = (
            f"with pp = 1 the only stage is told to hold {given} of the {layers} layers; leave that out, or give pp more than 1."
        )
        return Finding("C061", sentence, EVERY_LAYER, ARGUMENTS)
    ends = [each for each in (wish.first, wish.last) if each is not None]
    rest, stages = layers - sum(ends), pp - len(ends)
    named = " and ".join(
        f"{count} in the {which} stage" for which, count in (("first", wish.first), ("last", wish.last)) if count is not None
    )
    if rest < stages or (stages and rest % stages) or (not stages and rest):
        return Finding("C061", _rest_sentence(layers, named, rest, stages, wish, pp), EVERY_LAYER, ARGUMENTS)
    middle = rest // stages if stages else 0
    per_stage = [middle] * pp
    if wish.first is not None:
        per_stage[0] = wish.first
    if wish.last is not None:
        per_stage[-1] = wish.last
    odd = next((count for count in per_stage if count % vpp), None)
    if odd is not None:
        sentence = f"a stage of {odd} layers does not divide into vpp = {vpp} chunks."
        return Finding("C061", sentence, "a stage's chunks hold as many layers each", ARGUMENTS)
    return [count // vpp for count in per_stage] * vpp


def _rest_sentence(layers: int, named: str, rest: int, stages: int, wish: SplitWish, pp: int) -> str:
    if not stages:
        return f"{named} leave {rest} of the {layers} layers without a stage."
    sentence = f"{named} leave {rest} of the {layers} layers for {stages} stages, which do not divide evenly"
    if wish.first is None and wish.last is not None and layers >= pp:
        legal = [last for last in range(1, layers - stages + 1) if (layers - last) % stages == 0]
        near = sorted(sorted(legal, key=lambda last: abs(last - (wish.last or 0)))[:2])
        return f"{sentence}; {' or '.join(map(str, near))} in the last stage would." if near else f"{sentence}."
    remedy = uneven_remedy(layers, pp)
    return f"{sentence}; {remedy} would." if remedy else f"{sentence}."


def _counting_ends(wish: SplitWish, layers: int, pp: int, vpp: int) -> Sequence[int] | Finding:
    extra, chunks = int(wish.embedding) + int(wish.loss), pp * vpp
    total = layers + extra
    if total % chunks:
        what = " and ".join(name for name, on in (("embedding", wish.embedding), ("loss", wish.loss)) if on)
        sentence = f"pp·vpp = {chunks} does not divide {layers} layers with {what} counted as {extra} more, {total}."
        return Finding("C060", sentence, "stages are cut evenly", ARGUMENTS)
    counts = [total // chunks] * chunks
    counts[0] -= int(wish.embedding)
    counts[-1] -= int(wish.loss)
    if min(counts) < 0:
        return Finding("C060", "a chunk holds embedding and loss only and would need a layer less than none.", "", ARGUMENTS)
    return counts
