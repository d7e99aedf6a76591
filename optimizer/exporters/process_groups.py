"""A plan as a Python file that builds its process groups in torch.distributed, and checks that parameters lie as planned."""

from __future__ import annotations

import pprint
from collections.abc import Iterable, Sequence
from itertools import chain

from ...search_spaces.errors import InputError
from ...search_spaces.groups import DIMENSIONS
from ...search_spaces.layout import Chunk, Split
from ...search_spaces.tensors import Tensor
from ..ranks import coordinates, groups
from ..result import Plan
from .folder import HOSTS, folder
from .knobs import Dialect
from .launch import commented, host_order, layout_words, origin
from .request import Request, refuse_unsayable

FRAMEWORK = "groups"
FILE = "process_groups.py"

Axes = tuple[tuple[int, int], ...]
"""(size, stride) of each, slowest first: what a regular set of ranks is made of."""


def files(plan: Plan, version: str | None = None) -> dict[str, str]:
    """process_groups.py and how it is used; InputError for a version, which the file does not have."""
    if version is not None:
        raise InputError(f"framework-version: {version} says nothing to process groups; leave it out")
    asked = Request(plan, Dialect(FRAMEWORK, ()))
    refuse_unsayable(asked)
    head = [origin(asked), f"Layout: {layout_words(plan.plan)}; rank order {asked.layout.rank_order}.", host_order(asked)]
    backend = "hccl" if asked.problem.cluster.accelerator.vendor == "huawei" else "nccl"
    constants = {
        "WORLD_SIZE": asked.layout.devices,
        "BACKEND": backend,
        "GROUPS": {name: (axes([line[0] for line in lines]), axes(lines[0])) for name, lines in all_groups(asked).items()},
        "PARAMETERS": stage_parameters(asked),
    }
    written = "\n".join(f"{name} = {pprint.pformat(value, width=112, sort_dicts=False)}" for name, value in constants.items())
    program = "\n".join([*commented(head), PROGRAM.replace("@CONSTANTS@", written)])
    return folder(asked, {FILE: program}, _steps(backend), NOTES)


def _steps(backend: str) -> tuple[str, ...]:
    needs = f"torch.distributed with {backend}{' and torch_npu' if backend == 'hccl' else ''}"
    return (
        f"Put {FILE} beside the program that trains; it needs {needs}, and nothing of paraplan.",
        f"Start a process per device, ranks in the order of {HOSTS}: `torchrun --nnodes … --nproc-per-node … --node-rank N`.",
        "After init_process_group, call build() on every rank: it returns the rank's group of each dimension by name.",
        "Once the model is cut, call check_parameters(dense, experts) and check_balance(dense, experts) with the numbers of "
        "parameters that a rank holds: what is not as planned is named.",
        f"`python {FILE}` says how balanced the plan is; `paraplan check --groups FILE.json` judges rank lists of another program.",
    )


NOTES = (
    "Every rank builds the groups of all, in one order, as torch.distributed asks: one that leaves some out waits for ever.",
    "edp, not dp, is what gradients of experts are reduced over, dp_cp what those of all else are.",
)


def all_groups(asked: Request) -> dict[str, list[list[int]]]:
    """The groups of every dimension, and of dp and cp together, over which dense gradients and optimizer states are spread."""
    layout = asked.layout
    found = groups(layout)
    table = coordinates(layout)
    together: dict[tuple[int, int], list[int]] = {}
    for rank, (tp, pp) in enumerate(zip(table["tp"].tolist(), table["pp"].tolist(), strict=True)):
        together.setdefault((tp, pp), []).append(rank)
    return {**{name: found[name] for name in DIMENSIONS}, "dp_cp": sorted(together.values())}


def axes(values: Sequence[int]) -> Axes:
    """The axes whose sums, the last one fastest, are the values less the first of them. ValueError if there are none such."""
    found: list[tuple[int, int]] = []
    rest = [value - values[0] for value in values]
    while len(rest) > 1:
        stride = rest[1]
        size = next((n for n, value in enumerate(rest) if value != n * stride), len(rest))
        if len(rest) % size:
            raise ValueError(f"{len(rest)} ranks are no whole number of runs of {size}")
        heads = rest[::size]
        if any(value != heads[n // size] + n % size * stride for n, value in enumerate(rest)):
            raise ValueError("the ranks are not regular")
        found.append((size, stride))
        rest = heads
    return tuple(reversed(found))


def stage_parameters(asked: Request) -> list[tuple[int, int]]:
    """(dense, expert) parameters of a rank of each stage, padding of the vocabulary included."""
    layout, spec = asked.layout, asked.spec
    unit = asked.stack.vocab_divisor * layout.tp
    vocab = asked.problem.workload.vocab_size or spec.vocab_size
    spec = spec.with_vocab(-(-vocab // unit) * unit)
    stages = layout.stages
    if not stages:
        blocks = spec.num_layers + (spec.mtp.layers if spec.mtp else 0)
        chunks = layout.pp * layout.vpp
        cuts = (*(n * (spec.num_layers // chunks) for n in range(chunks)), blocks)
        stages = Split(layout.pp, layout.vpp, cuts).stages(spec.num_layers, layout.recompute)

    def held(chunk: Chunk) -> Iterable[Tensor]:
        layers = range(chunk.layers[0], chunk.layers[1] + 1) if chunk.layers else range(0)
        yield from chain.from_iterable(spec.layer_tensors(spec.layer_kinds[layer]) for layer in layers)
        yield from chain.from_iterable(spec.mtp_tensors() for _ in range(chunk.mtp))
        yield from spec.embedding_tensors() if chunk.embedding else ()
        yield from spec.head_tensors() if chunk.loss else ()
        if chunk.loss and spec.tied_embeddings and layout.pp > 1:
            yield spec.embedding_tensors()[0]

    found = []
    for stage in stages:
        count = {False: 0.0, True: 0.0}
        for tensor in chain.from_iterable(held(chunk) for chunk in stage.chunks):
            count[tensor.sharding.startswith("expert")] += float(tensor.numel_per_rank(layout.tp, layout.ep, layout.etp))
        found.append((round(count[False]), round(count[True])))
    return found


PROGRAM = '''
"""Process groups of the layout above, for torch.distributed.

Start the processes (torchrun), then on every rank:

    import process_groups
    groups = process_groups.build()                   # {"tp": group, "cp": group, ...}, this rank's own
    process_groups.check_parameters(dense, experts)   # numbers of parameters that this rank holds
    process_groups.check_balance(dense, experts)      # the same on every rank: are they balanced between ranks?
"""

import itertools

@CONSTANTS@
# GROUPS: dimension -> (axes of the groups' first ranks, axes of a group's ranks); an axis is (size, stride), the last runs fastest.
# PARAMETERS: (dense, expert) parameters of a rank, by stage.


def spread(axes, start=0):
    """The ranks that the axes reach from a start."""
    return [start + sum(step) for step in itertools.product(*(range(0, size * stride, stride) for size, stride in axes))]


def group_ranks(dimension):
    """All groups of a dimension, as lists of ranks; every rank is in one of them."""
    firsts, members = GROUPS[dimension]
    return [spread(members, first) for first in spread(firsts)]


def place(rank, dimension):
    """Index of a rank in its group of a dimension."""
    return next(ranks.index(rank) for ranks in group_ranks(dimension) if rank in ranks)


def build(backend=BACKEND, timeout=None):
    """This rank's group of every dimension. Every rank must call it: groups are made together and in the same order."""
    import torch.distributed as dist

    if dist.get_world_size() != WORLD_SIZE:
        raise RuntimeError(f"the layout is for {WORLD_SIZE} ranks; {dist.get_world_size()} were started")
    own = {}
    for dimension in GROUPS:
        for ranks in group_ranks(dimension):
            group = dist.new_group(ranks, backend=backend, timeout=timeout, group_desc=dimension)
            if dist.get_rank() in ranks:
                own[dimension] = group
    return own


def check_parameters(dense, experts=0, rank=None, tolerance=0.02):
    """Whether this rank holds the parameters that the plan counts for its stage; RuntimeError says which are off, and how far.

    Ranks of one stage hold equally many, so a rank that is off has a weight sharded otherwise than planned.
    """
    if rank is None:
        import torch.distributed as dist

        rank = dist.get_rank()
    stage = place(rank, "pp")
    for kind, held, planned in zip(("dense", "expert"), (dense, experts), PARAMETERS[stage]):
        if abs(held - planned) > tolerance * max(planned, 1):
            raise RuntimeError(f"rank {rank}, stage {stage}: {held} {kind} parameters; the plan counts {planned}")


def check_balance(dense, experts=0, held=None, tolerance=0.02):
    """How much fuller the fullest rank is than the mean; RuntimeError where ranks of one stage differ or that is more than planned.

    Stages hold different layers, and so unequally many: as far as the plan has them so that is balanced. `held` are the (dense,
    expert) numbers of all ranks, where they are known already.
    """
    if held is None:
        import torch.distributed as dist

        held = [None] * WORLD_SIZE
        dist.all_gather_object(held, (dense, experts))
    totals = [sum(counts) for counts in held]
    for stage, ranks in enumerate(zip(*group_ranks("pp"))):
        least, most = (pick(ranks, key=totals.__getitem__) for pick in (min, max))
        if totals[most] - totals[least] > tolerance * totals[most]:
            raise RuntimeError(f"stage {stage}: rank {most} holds {totals[most]} parameters, rank {least} {totals[least]}")
    fullest = max(totals) * len(totals) / sum(totals)
    if fullest > (1 + tolerance) * planned_balance():
        raise RuntimeError(f"the fullest rank holds {fullest:.3f} times the mean; {planned_balance():.3f} by the plan")
    return fullest


def planned_balance():
    """Parameters of the fullest stage's ranks over the mean."""
    totals = [sum(counts) for counts in PARAMETERS]
    return max(totals) * len(totals) / sum(totals)


if __name__ == "__main__":
    totals = [sum(counts) for counts in PARAMETERS]
    print(f"parameters of a rank: {min(totals):,} to {max(totals):,} by stage, the fullest {planned_balance():.3f} times the mean")
    for name in GROUPS:
        lists = group_ranks(name)
        print(f"{name:6} {len(lists)} groups of {len(lists[0])}: {lists[0][:8]}{' ...' if len(lists[0]) > 8 else ''}")
'''
