"""Layout (one full choice), LayoutTable (many, as columns) and Problem (what a layout is chosen for).

Words are the field's: the dense grid is tp·cp·pp·dp, the expert grid etp·ep·edp·pp, and both use the same devices. dp excludes cp
and ep. Text values become small integer codes in a table, by position in the vocabularies below.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, field_validator, model_validator

from .cluster import ClusterSpec
from .model import Frozen, ModelSpec
from .stack import Stack
from .vocabulary import CP_TYPES, FLAG_RANK_ORDERS, RANK_ORDERS, RECOMPUTE_MODULES, SCHEDULES, SHARDINGS
from .workload import Workload

__all__ = [
    "ALL_LAYERS",
    "COLUMNS",
    "CP_TYPES",
    "DEGREES",
    "FLAG_RANK_ORDERS",
    "FULL_BLOCK",
    "FULL_UNIFORM",
    "NONE",
    "RANK_ORDERS",
    "RECOMPUTE_MODULES",
    "SCHEDULES",
    "SELECTIVE",
    "SHARDINGS",
    "Bools",
    "Chunk",
    "Floats",
    "Ints",
    "Layout",
    "LayoutTable",
    "Problem",
    "Recompute",
    "Split",
    "Stage",
    "offload_text",
    "parse_offload",
    "parse_sharding",
]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

NONE, SELECTIVE, FULL_BLOCK, FULL_UNIFORM = range(4)
ALL_LAYERS = 1 << 20
"""Depth K of "full": every layer of the chunk."""


@dataclass(frozen=True)
class Recompute:
    """What is recomputed in the backward pass.

    mode is NONE, SELECTIVE (the modules of the bit mask), FULL_BLOCK (the first `layers` layers of every chunk) or
    FULL_UNIFORM (every layer, checkpoints `layers` apart).
    """

    mode: int = NONE
    modules: int = 0
    layers: int = 0

    @classmethod
    def parse(cls, text: str) -> Recompute:
        """Reads `none | full | full:block:K | full:uniform:K | selective[:core_attn+mlp+…]`; ValueError says what is wrong."""
        head, _, tail = text.partition(":")
        if text == "none":
            return cls()
        if text == "full":
            return cls(FULL_BLOCK, 0, ALL_LAYERS)
        if head == "selective":
            names = tail.split("+") if tail else ["core_attn"]
            unknown = [name for name in names if name not in RECOMPUTE_MODULES]
            if unknown:
                raise ValueError(f"recompute module {unknown[0]!r} is not one of {', '.join(RECOMPUTE_MODULES)}")
            return cls(SELECTIVE, sum(1 << RECOMPUTE_MODULES.index(name) for name in set(names)))
        method, _, depth = tail.partition(":")
        if head == "full" and method in ("block", "uniform") and depth.isdigit() and int(depth) > 0:
            return cls(FULL_BLOCK if method == "block" else FULL_UNIFORM, 0, int(depth))
        raise ValueError(f"recompute {text!r} is not none, full, full:block:K, full:uniform:K or selective:module+module")

    @property
    def module_names(self) -> tuple[str, ...]:
        return tuple(name for bit, name in enumerate(RECOMPUTE_MODULES) if self.modules >> bit & 1)

    def __str__(self) -> str:
        if self.mode == NONE:
            return "none"
        if self.mode == SELECTIVE:
            return "selective:" + "+".join(self.module_names)
        if self.mode == FULL_BLOCK:
            return "full" if self.layers >= ALL_LAYERS else f"full:block:{self.layers}"
        return f"full:uniform:{self.layers}"


class Chunk(Frozen):
    """One model chunk of a stage: decoder layers first..last (inclusive; null when it has none), and what else it holds."""

    layers: tuple[int, int] | None = None
    embedding: bool = False
    mtp: int = 0
    loss: bool = False
    recompute: str = "none"


class Stage(Frozen):
    """One pipeline rank and its chunks, in the order of vpp."""

    stage: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Split:
    """Where the sequence of blocks (decoder layers, then MTP layers) is cut into pp·vpp chunks.

    `cuts` has pp·vpp+1 entries, from 0 to the number of blocks, not decreasing; chunk c of the virtual pipeline holds blocks
    cuts[c] … cuts[c+1]−1 and sits on stage c mod pp or, `folded` into a V, first down the stages and then back up. The embedding is
    in the first chunk, the loss in the last. `redone`: how many of its first blocks each chunk recomputes as a whole, where chunks
    differ in that; else what the layout says holds for all of them.
    """

    pp: int
    vpp: int
    cuts: tuple[int, ...]
    folded: bool = False
    redone: tuple[int, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.cuts, self.cuts[1:], strict=False))

    def beyond(self, num_layers: int) -> tuple[int, ...]:
        """MTP layers of each chunk."""
        return tuple(max(0, end - max(first, num_layers)) for first, end in zip(self.cuts, self.cuts[1:], strict=False))

    def stages(self, num_layers: int, recompute: str) -> tuple[Stage, ...]:
        """The split in the words of plan.json."""

        mtp = self.beyond(num_layers)

        def chunk(index: int) -> Chunk:
            first, end = self.cuts[index], self.cuts[index + 1]
            last = min(end, num_layers) - 1
            return Chunk(
                layers=(first, last) if last >= first else None,
                embedding=index == 0,
                mtp=mtp[index],
                loss=index == self.pp * self.vpp - 1,
                recompute=_redone(self.redone[index], end - first) if self.redone else recompute,
            )

        places = range(self.pp), range(self.vpp)
        return tuple(Stage(stage=s, chunks=tuple(chunk(self._chunk(s, v)) for v in places[1])) for s in places[0])

    def _chunk(self, stage: int, turn: int) -> int:
        """The chunk that a stage holds as its first, second, …"""
        return (turn + 1) * self.pp - 1 - stage if self.folded and turn % 2 else turn * self.pp + stage

    @classmethod
    def from_stages(cls, stages: Sequence[Stage]) -> Split:
        """Reads `stages` back; ValueError names the first chunk that does not follow on from the one before, or recompute that
        chunks cannot have beside each other.
        """
        pp, vpp = len(stages), len(stages[0].chunks)
        folded = pp > 1 and vpp == 2 and stages[0].chunks[1].loss
        cuts, recomputed = [0], []
        for index in range(pp * vpp):
            turn, place = divmod(index, pp)
            stage = pp - 1 - place if folded and turn % 2 else place
            chunk = stages[stage].chunks[turn]
            if chunk.layers is not None and chunk.layers[0] != cuts[-1]:
                raise ValueError(f"stage {stage} chunk {turn} starts at layer {chunk.layers[0]} where layer {cuts[-1]} is next")
            cuts.append(cuts[-1] + (chunk.layers[1] - chunk.layers[0] + 1 if chunk.layers else 0) + chunk.mtp)
            recomputed.append(chunk.recompute)
        return cls(pp, vpp, tuple(cuts), folded, _depths(recomputed, cuts))


def _redone(depth: int, blocks: int) -> str:
    """In words that the first `depth` of a chunk's blocks are redone."""
    return str(Recompute(FULL_BLOCK, 0, ALL_LAYERS if depth >= blocks else depth)) if min(depth, blocks) else "none"


def _depths(words: Sequence[str], cuts: Sequence[int]) -> tuple[int, ...]:
    """How many blocks each chunk redoes; () where all that hold any say the same. ValueError: they differ in more than that."""
    held = [end - first for first, end in pairwise(cuts)]
    if len({said for said, blocks in zip(words, held, strict=True) if blocks}) <= 1:
        return ()
    parsed = [Recompute.parse(said) for said in words]
    wrong = next((each for each in parsed if each.mode not in (NONE, FULL_BLOCK)), None)
    if wrong is not None:
        raise ValueError(f"recompute {wrong} of one chunk, and another of others: chunks may differ as none, full, full:block:K")
    return tuple(min(each.layers, blocks) for each, blocks in zip(parsed, held, strict=True))


Count = Annotated[int, Field(gt=0, lt=10**9)]
"""A degree or a number of micro-batches; sums and products of them stay whole numbers of 64 bits."""


class Layout(Frozen):
    """One full choice. Degrees that are left out are 1; `num_microbatches`, `edp` and `sequence_parallel` follow from the rest."""

    tp: Count = 1
    cp: Count = 1
    pp: Count = 1
    dp: Count = 1
    ep: Count = 1
    etp: Count = 1
    edp: Count = 1
    vpp: Count = 1
    micro_batch: Count = 1
    num_microbatches: Count = 1
    sequence_parallel: bool
    cp_type: str = "p2p"
    schedule: str = "1f1b"
    optimizer_sharding: str = "zero1"
    recompute: str = "none"
    offload: str = "none"
    rank_order: str = RANK_ORDERS[0]
    overlap: dict[str, float] = {}
    stages: tuple[Stage, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _default_sequence_parallel(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("sequence_parallel") is None:
            tp = data.get("tp", 1)
            return {**data, "sequence_parallel": isinstance(tp, int) and tp > 1}
        return data

    @field_validator("cp_type")
    @classmethod
    def _cp_type(cls, value: str) -> str:
        return _one_of("cp_type", value, CP_TYPES)

    @field_validator("schedule")
    @classmethod
    def _schedule(cls, value: str) -> str:
        return _one_of("schedule", value, SCHEDULES)

    @field_validator("rank_order")
    @classmethod
    def _rank_order(cls, value: str) -> str:
        if value not in RANK_ORDERS:
            raise ValueError(f"rank_order {value!r} must name tp, cp, ep, dp and pp once each, such as {RANK_ORDERS[0]}")
        return value

    @field_validator("recompute")
    @classmethod
    def _recompute(cls, value: str) -> str:
        return str(Recompute.parse(value))

    @field_validator("optimizer_sharding")
    @classmethod
    def _sharding(cls, value: str) -> str:
        parse_sharding(value)
        return value

    @field_validator("offload")
    @classmethod
    def _offload(cls, value: str) -> str:
        parse_offload(value)
        return value

    @model_validator(mode="after")
    def _stages_match(self) -> Layout:
        if self.stages and (len(self.stages) != self.pp or len(self.stages[0].chunks) != self.vpp):
            raise ValueError(
                f"stages lists {len(self.stages)} stages of {len(self.stages[0].chunks)} chunks, pp·vpp is {self.pp}·{self.vpp}"
            )
        return self

    @property
    def devices(self) -> int:
        return self.tp * self.cp * self.pp * self.dp


def parse_sharding(text: str) -> tuple[int, int]:
    """`none|zero1|zero2|zero3|hsdp:K` → (code, K or 0); ValueError says what would be right."""
    head, _, tail = text.partition(":")
    if head == "hsdp" and tail.isdigit() and int(tail) > 0:
        return SHARDINGS.index("hsdp"), int(tail)
    if text in SHARDINGS and text != "hsdp":
        return SHARDINGS.index(text), 0
    raise ValueError(f"optimizer_sharding {text!r} is not none, zero1, zero2, zero3 or hsdp:K")


def sharding_as_run(stack: Stack, sharding: Ints, pp: Ints) -> Ints:
    """The sharding that each row runs, (n,): where a pipeline's stages stay gathered ZeRO-2 and ZeRO-3 are one program."""
    gathered = (pp > 1) & stack.footprint.gathered_stages
    return np.where(gathered & (sharding == SHARDINGS.index("zero2")), SHARDINGS.index("zero3"), sharding)


def parse_offload(text: str) -> tuple[float, float]:
    """`none|optimizer:F|activations:F` (joined by +) → (optimizer fraction, activations fraction)."""
    fractions = {"optimizer": 0.0, "activations": 0.0}
    for part in [] if text == "none" else text.split("+"):
        what, _, share = part.partition(":")
        try:
            fraction = float(share)
        except ValueError:
            fraction = -1.0
        if what not in fractions or not 0 <= fraction <= 1:
            raise ValueError(f"offload {text!r} is not none, optimizer:F or activations:F with F from 0 to 1")
        fractions[what] = fraction
    return fractions["optimizer"], fractions["activations"]


def offload_text(optimizer: float, activations: float) -> str:
    """(optimizer fraction, activations fraction) as `parse_offload` reads them."""
    parts = [f"{name}:{f:g}" for name, f in (("optimizer", optimizer), ("activations", activations)) if f > 0]
    return "+".join(parts) or "none"


def _one_of(name: str, value: str, values: tuple[str, ...]) -> str:
    if value not in values:
        raise ValueError(f"{name} {value!r} is not one of {', '.join(values)}")
    return value


class Problem(Frozen):
    """What a layout is chosen for: model, cluster, how many of its devices and how they lie, stack and workload.

    `per_supernode`: devices in each supernode, of which the last has the rest; None: as the cluster allocates them.
    """

    model: ModelSpec
    cluster: ClusterSpec
    devices: Annotated[int, Field(gt=0)]
    stack: Stack
    workload: Workload
    assumptions: tuple[str, ...] = ()
    per_supernode: Annotated[int, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _supernode_holds_them(self) -> Problem:
        size = self.cluster.levels[self.cluster.supernode_place].size
        if size is not None and (self.per_supernode or 0) > size:
            raise ValueError(f"per_supernode {self.per_supernode} is more than the {size} devices of a {self.cluster.supernode}")
        return self

    @property
    def allocated_sizes(self) -> tuple[int, ...]:
        """Devices in use in one unit of each level, innermost first (`ClusterSpec.allocated_sizes`); all of them come last."""
        return self.cluster.allocated_sizes(self.devices, self.per_supernode)


@dataclass(frozen=True)
class LayoutTable:
    """Many layouts as equal-length columns (n,). Codes are positions in the vocabularies of this module.

    `split` indexes `splits`; −1 stands for the balanced split that the optimizer would start from.
    """

    tp: Ints
    cp: Ints
    pp: Ints
    dp: Ints
    ep: Ints
    etp: Ints
    vpp: Ints
    micro_batch: Ints
    num_microbatches: Ints
    sequence_parallel: Ints  # 0 or 1
    cp_type: Ints
    schedule: Ints
    sharding: Ints
    hsdp: Ints
    recompute_mode: Ints
    recompute_modules: Ints
    recompute_layers: Ints
    optimizer_offload: Floats
    activation_offload: Floats
    rank_order: Ints
    split: Ints
    splits: tuple[Split, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def edp(self) -> Ints:
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @property
    def devices(self) -> Ints:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def leaves_over(self) -> Bools:
        """Where interleaved chunks cannot run all micro-batches in groups of pp, (n,)."""
        return np.asarray((self.schedule == SCHEDULES.index("interleaved")) & (self.num_microbatches % self.pp != 0))

    def take(self, rows: npt.NDArray[np.intp] | Bools | slice) -> LayoutTable:
        """The given rows, in the given order."""
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMNS})

    def with_splits(self, split: npt.NDArray[np.intp], splits: tuple[Split, ...]) -> LayoutTable:
        """The same rows, row i cut as splits[split[i]]."""
        return replace(self, split=np.asarray(split, dtype=np.int64), splits=splits)

    @classmethod
    def concatenate(cls, tables: Sequence[LayoutTable]) -> LayoutTable:
        """Tables one below the other; all must share `splits`."""
        columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in COLUMNS}
        return cls(**columns, splits=tables[0].splits)

    @classmethod
    def from_layouts(cls, layouts: Iterable[Layout]) -> LayoutTable:
        """A table of the given layouts, one row each."""
        rows = [_row(layout) for layout in layouts]
        splits = tuple(dict.fromkeys(row[-1] for row in rows if row[-1] is not None))
        columns: dict[str, npt.NDArray[np.generic]] = {}
        for position, name in enumerate(COLUMNS[:-1]):
            dtype = np.float64 if name.endswith("_offload") else np.int64
            columns[name] = np.array([row[position] for row in rows], dtype=dtype)
        columns["split"] = np.array([-1 if row[-1] is None else splits.index(row[-1]) for row in rows], dtype=np.int64)
        return cls(**columns, splits=splits)  # type: ignore[arg-type]

    def layout(self, row: int, num_layers: int, overlap: dict[str, float] | None = None) -> Layout:
        """Row as a Layout; its stages are filled in when the row names a split."""
        recompute = self.recompute(row)
        split = int(self.split[row])
        sharding = SHARDINGS[int(self.sharding[row])]
        return Layout(
            **{name: int(getattr(self, name)[row]) for name in DEGREES},
            edp=int(self.edp[row]),
            sequence_parallel=bool(self.sequence_parallel[row]),
            cp_type=CP_TYPES[int(self.cp_type[row])],
            schedule=SCHEDULES[int(self.schedule[row])],
            optimizer_sharding=f"hsdp:{int(self.hsdp[row])}" if sharding == "hsdp" else sharding,
            recompute=str(recompute),
            offload=offload_text(float(self.optimizer_offload[row]), float(self.activation_offload[row])),
            rank_order=RANK_ORDERS[int(self.rank_order[row])],
            overlap=overlap or {},
            stages=self.splits[split].stages(num_layers, str(recompute)) if split >= 0 else (),
        )

    def recompute(self, row: int) -> Recompute:
        return Recompute(int(self.recompute_mode[row]), int(self.recompute_modules[row]), int(self.recompute_layers[row]))


DEGREES = ("tp", "cp", "pp", "dp", "ep", "etp", "vpp", "micro_batch", "num_microbatches")
COLUMNS = tuple(f.name for f in fields(LayoutTable) if f.name != "splits")


def _row(layout: Layout) -> tuple[int | float | Split | None, ...]:
    recompute = Recompute.parse(layout.recompute)
    sharding, hsdp = parse_sharding(layout.optimizer_sharding)
    return (
        *(getattr(layout, name) for name in DEGREES),
        int(layout.sequence_parallel),
        CP_TYPES.index(layout.cp_type),
        SCHEDULES.index(layout.schedule),
        sharding,
        hsdp,
        recompute.mode,
        recompute.modules,
        recompute.layers,
        *parse_offload(layout.offload),
        RANK_ORDERS.index(layout.rank_order),
        Split.from_stages(layout.stages) if layout.stages else None,
    )
