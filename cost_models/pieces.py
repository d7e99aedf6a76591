"""What pieces of the model cost a rank: before anything is said of recompute and sharding (`Whole`), and under them (`Piece`).

A piece's kernels and messages depend on few columns (tp, cp, ep, etp, micro-batch, cp type), so they are worked out once per
distinct combination however many layouts share it; what is recomputed and how weights are gathered is put on top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np

from ..search_spaces.layout import Floats, Ints

COMPONENTS = ("compute", "tp", "cp", "ep", "dp", "host", "offload")
ENDS = ("embedding", "head")
COMPUTE, TP, CP, EP, DP, HOST, OFFLOAD = range(len(COMPONENTS))
WHOLE_COLUMNS = ("tp", "cp", "ep", "etp", "micro_batch", "sequence_parallel", "cp_type")
"""What the kernels and messages of a piece depend on."""
DENSE_COLUMNS = ("tp", "cp", "micro_batch", "sequence_parallel", "cp_type")
"""The same of a piece without experts."""
PIECE_COLUMNS = (*WHOLE_COLUMNS, "recompute_mode", "recompute_modules")


@dataclass(frozen=True)
class Part:
    """Operators of a piece that recomputing any of the same `modules` frees: seconds (components, n), saved bytes (n,)."""

    modules: int
    forward_s: Floats
    saved_bytes: Floats


@dataclass(frozen=True)
class Whole:
    """One piece before anything is said of recompute and sharding; times (components, n) without host, bytes and weights (n,).

    `redone_s`: what full recompute repeats of an embedding or a head that it counts among the layers, 0 of layers themselves.
    `floors_s`: host time of forward and of backward, and how long the device waits for the host in forward. `outside_s`: how long
    its messages take that leave the supernode, forward and backward, hidden or not.
    """

    parts: tuple[Part, ...]
    forward_s: Floats
    backward_s: Floats
    redone_s: Floats
    input_bytes: Floats
    saved_bytes: Floats
    floors_s: tuple[Floats, Floats, Floats]
    outside_s: tuple[Floats, Floats]
    dense_weights: Floats
    expert_weights: Floats

    def spread(self, place: Ints) -> Whole:
        """The combination at the given place for each row."""
        return cast(Whole, _mapped(lambda values: values[..., place], self))


@dataclass(frozen=True)
class Wholes:
    """All pieces for n combinations of WHOLE_COLUMNS, and what depends on nothing else, (n,)."""

    pieces: dict[str, Whole]
    layer_input_bytes: Floats
    logits_bytes: Floats
    dispatch_bytes: Floats
    largest_saved_bytes: Floats
    gradient_buffer_bytes: Floats
    copied_weights: Floats

    def take(self, place: Ints) -> Wholes:
        """The combinations at the given places."""
        return cast(Wholes, _mapped(lambda values: values[..., place], self))

    @classmethod
    def joined(cls, first: Wholes, second: Wholes) -> Wholes:
        """The combinations of both, one after the other."""
        return cast(Wholes, _mapped(lambda *values: np.concatenate(values, axis=-1), first, second))


def _mapped(function: Callable[..., Floats], *records: Any) -> Any:
    """A record like the given ones, which have one shape, with a function of their arrays in place of each."""
    first = records[0]
    if isinstance(first, np.ndarray):
        return function(*records)
    if isinstance(first, dict):
        return {name: _mapped(function, *(record[name] for record in records)) for name in first}
    if isinstance(first, tuple):
        return tuple(_mapped(function, *each) for each in zip(*records, strict=True))
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first)]
        return type(first)(*(_mapped(function, *(getattr(record, name) for record in records)) for name in names))
    return first


@dataclass(frozen=True)
class Piece:
    """Cost of one piece; times are (components, n) in seconds, bytes (n,).

    `recompute_s` and `recomputed_bytes` are for a layer under the row's recompute choice, `saved_bytes` for one that keeps
    everything; of these what is offloaded is gone. `working_bytes` it has besides while it runs: what it makes again, and what has
    yet to leave the device, or is back on it.
    """

    forward_s: Floats
    backward_s: Floats
    recompute_s: Floats
    saved_bytes: Floats
    recomputed_bytes: Floats
    working_bytes: Floats
    dense_weights: Floats  # parameters on one rank, shared by its dp·cp group
    expert_weights: Floats  # parameters on one rank, shared by its edp group
    outside_s: tuple[Floats, Floats]  # of messages on links of data parallelism, forward and backward: those that leave the
    # supernode, and weights that are gathered

    @cached_property
    def once_s(self) -> Floats:
        """Forward seconds, (n,)."""
        return np.asarray(self.forward_s.sum(axis=0))

    @cached_property
    def back_s(self) -> Floats:
        """Backward seconds without recompute, (n,)."""
        return np.asarray(self.backward_s.sum(axis=0))

    @property
    def work_s(self) -> Floats:
        """Forward and backward seconds without recompute, (n,)."""
        return np.asarray(self.once_s + self.back_s)

    @cached_property
    def again_s(self) -> Floats:
        """Recompute seconds, (n,)."""
        return np.asarray(self.recompute_s.sum(axis=0))


@dataclass(frozen=True)
class Pieces:
    """Costs of all pieces for n factor rows; `blocks[i]` names the piece of block i (decoder layers, then MTP layers)."""

    pieces: dict[str, Piece]
    blocks: tuple[str, ...]
    layer_input_bytes: Floats
    logits_bytes: Floats
    dispatch_bytes: Floats
    largest_saved_bytes: Floats  # of one operator: its gradient is as large
    gradient_buffer_bytes: Floats  # stand-ins for the gradients of the layers' weights, one for each shape
    copied_weights: Floats  # word embedding that another of several stages keeps too: as a tied head, or for MTP layers

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.blocks))

    @cached_property
    def running(self) -> dict[str, Ints]:
        """How many of each layer's piece lie before every block and before the end, (blocks+1,)."""
        here = {name: np.array([block == name for block in self.blocks], dtype=np.int64) for name in self.names}
        return {name: np.concatenate([[0], np.cumsum(each)]) for name, each in here.items()}

    @property
    def copied_for(self) -> int | None:
        """The block whose stage keeps the copied embedding, the first of the MTP layers; without any the last stage does."""
        return self.blocks.index("mtp") if "mtp" in self.blocks else None

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many of each piece the model has."""
        return {**{name: self.blocks.count(name) for name in self.names}, "embedding": 1, "head": 1}

    @cached_property
    def work_s(self) -> Floats:
        """Forward and backward seconds of the whole model per micro-batch without recompute."""
        return np.asarray(np.sum([count * self.pieces[name].work_s for name, count in self.counts.items()], axis=0))

    @cached_property
    def again_s(self) -> Floats:
        """Seconds to redo in all layers what each row's choice redoes."""
        return np.asarray(np.sum([self.counts[name] * self.pieces[name].again_s for name in self.names], axis=0))

    @cached_property
    def unused_shares(self) -> tuple[Floats, Floats]:
        """Share of the whole model's forward, and of its backward without recompute, that leaves data parallelism's links free."""
        each = [(count, self.pieces[name]) for name, count in self.counts.items()]
        found = []
        for side, seconds in enumerate(("once_s", "back_s")):
            whole = np.sum([count * getattr(piece, seconds) for count, piece in each], axis=0)
            outside = np.sum([count * piece.outside_s[side] for count, piece in each], axis=0)
            found.append(np.clip(1.0 - outside / whole, 0.0, 1.0))
        return found[0], found[1]

    @cached_property
    def rank_weights(self) -> tuple[Floats, Floats]:
        """Dense and expert parameters of the whole model on the ranks of all stages."""
        each = [(count, self.pieces[name]) for name, count in self.counts.items()]
        dense = np.sum([count * piece.dense_weights for count, piece in each], axis=0)
        return dense, np.sum([count * piece.expert_weights for count, piece in each], axis=0)
