"""The stage split that a run's framework would have used."""

from __future__ import annotations

import re
from itertools import accumulate

import numpy as np

from ..search_spaces.layout import Split
from ..search_spaces.model import Attention, DenseMlp, ModelSpec

LAYOUT_STRING = re.compile(r"\b(?:pp[_ ])?layout[= ]\(?(E[Etm0-9*|()]*L)")
"""Megatron's layout string as it stands in a row's notes: E embedding, t decoder layer, m MTP, L loss, | between chunks."""
ENDS_COUNT_AS_LAYERS = "partition-method type:transformer|embedding"


def split_of(model: ModelSpec, pp: int, vpp: int, words: str, notes: str) -> Split:
    """Cuts of the blocks (decoder layers, then MTP layers). `words` is the meaning of the family's "split" entry."""
    layers, chunks = model.num_layers, pp * vpp
    mtp = model.mtp.layers if model.mtp else 0
    named = LAYOUT_STRING.search(notes)
    if named:
        counts = _counts(named[1])
        if len(counts) == chunks and sum(counts) == layers + mtp:
            return Split(pp, vpp, (0, *accumulate(counts)))
    if words == "by compute":
        return Split(pp, vpp, _by_compute(model, chunks))
    if words == "by parameters":
        return Split(pp, vpp, _by_parameters(model, chunks))
    counts = even_counts(layers, chunks, ENDS_COUNT_AS_LAYERS in notes)
    counts[-1] += mtp
    return Split(pp, vpp, (0, *accumulate(counts)))


def even_counts(layers: int, chunks: int, ends_count: bool = False) -> list[int]:
    """Decoder layers of every chunk, as equal as a framework makes them.

    Where they do not come out even: embedding and head count as a layer each if that makes them so (Megatron's
    account_for_embedding/loss_in_pipeline_split, DeepSpeed's type:transformer|embedding); else all chunks take the larger share
    and the last what is left; else the first chunks take one more.
    """
    share, rest = divmod(layers, chunks)
    if chunks > 2 and (layers + 2) % chunks == 0 and (rest or ends_count):
        share = (layers + 2) // chunks
        return [share - 1, *[share] * (chunks - 2), share - 1]
    if rest == 0:
        return [share] * chunks
    short = layers - (share + 1) * (chunks - 1)
    if short > 0:
        return [share + 1] * (chunks - 1) + [short]
    return [share + 1] * rest + [share] * (chunks - rest)


def _counts(string: str) -> list[int]:
    """Blocks per chunk of a layout string: "Et*4|(t*4|)*14tmL" has 16 chunks, 4 layers each but for the last, 1 and an MTP."""
    flat = re.sub(r"\(([^()]*)\)\*(\d{1,4})", lambda m: m[1] * int(m[2]), string)
    flat = re.sub(r"([Etm])\*(\d{1,4})", lambda m: m[1] * int(m[2]), flat)
    return [chunk.count("t") + chunk.count("m") for chunk in flat.split("|")]


def _by_parameters(model: ModelSpec, chunks: int) -> tuple[int, ...]:
    """Cuts that make the largest chunk's parameters least, embedding and head included; a chunk takes all that fits under that.

    Aleph-Alpha/scaling's balanced partition, after DeepSpeed's partition_balanced.
    """
    ends = (model.embedding_tensors(), model.head_tensors())
    embedding, head = (sum(tensor.numel for tensor in tensors) for tensors in ends)
    layers = [sum(tensor.numel for tensor in model.layer_tensors(kind)) for kind in model.layer_kinds]
    layers[0] += embedding
    layers[-1] += head
    total = np.concatenate([[0], np.cumsum(layers)])

    def cuts(most: float) -> list[int]:
        found = [0]
        for _ in range(chunks):
            found.append(int(np.searchsorted(total, total[found[-1]] + most, side="right")) - 1)
        return found

    sizes = np.unique(total[:, None] - total[None, :])
    possible = sizes[sizes > 0]
    low, high = 0, len(possible) - 1
    while low < high:  # the least bound under which the chunks hold everything
        middle = (low + high) // 2
        low, high = (low, middle) if cuts(possible[middle])[-1] == len(layers) else (middle + 1, high)
    return tuple(cuts(possible[low]))


def _by_compute(model: ModelSpec, chunks: int) -> tuple[int, ...]:
    """nanotron's rule: blocks stay on a stage until the matrix products so far pass its share of all, the head's included.

    Cost of a layer 4·heads·head_dim·h + 3·width·h, of the head vocabulary·h, of anything else 0 (its get_block_compute_costs).
    """
    hidden, costs = model.hidden_size, []
    for name in model.layer_kinds:
        mixer, mlp = model.kinds[name].mixer, model.kinds[name].mlp
        attention = 4 * mixer.heads * mixer.head_dim * hidden if isinstance(mixer, Attention) else 0
        costs.append(attention + (3 * mlp.width * hidden if isinstance(mlp, DenseMlp) else 0))
    total = np.cumsum([*costs, model.vocab_size * hidden])
    counts, stage = [0] * chunks, 0
    for cost in total[:-1]:
        counts[stage] += 1
        if cost > total[-1] * (stage + 1) / chunks and stage + 1 < chunks:
            stage += 1
    return (0, *accumulate(counts))
