"""One layout as the recomputation by hand sees it: ranks in explicit groups, and chunks of pieces."""

from __future__ import annotations

from math import ceil, inf

from paraplan.cost_models.profile import Profile, load_profile
from paraplan.optimizer.ranks import coordinates, groups
from paraplan.search_spaces.layout import Layout, Problem, Recompute, parse_offload, parse_sharding
from paraplan.search_spaces.model import MoeMlp
from reference_records import BF16


class ReferenceLayout:
    """A problem, a layout whose stages are given, and what follows from both."""

    def __init__(self, problem: Problem, layout: Layout, profile: Profile | None = None) -> None:
        self.problem, self.layout = problem, layout
        self.model, self.cluster, self.workload = problem.model, problem.cluster, problem.workload
        self.device = self.cluster.accelerator
        self.profile = profile or load_profile(self.device.name)
        self.stack = problem.stack.with_figures(self.profile.stack_figures(problem.stack, self.device.name))
        self.levels = self.cluster.levels
        self.unit_sizes = problem.allocated_sizes
        self.groups = groups(layout) | {"dp_cp": self._dp_cp_groups()}
        self.tokens = layout.micro_batch * self.workload.seq_len / layout.cp
        self.sp = layout.tp if layout.sequence_parallel else 1
        self.linear = 1.0 if self.workload.precision in ("fp8", "fp4") else BF16
        self.keeps = self.stack.footprint
        self.sent_gradient = self.stack.reduced_gradient_bytes or self.stack.gradient_bytes
        self.recompute = Recompute.parse(layout.recompute)
        self.sharding, self.hsdp = parse_sharding(layout.optimizer_sharding)  # 0 none, 1 zero1, 2 zero2, 3 zero3, 4 hsdp
        if self.sharding == 2 and layout.pp > 1 and self.keeps.gathered_stages:
            self.sharding = 3  # stages that stay gathered from the first micro-batch to the last let weights go after neither pass
        self.offload, self.leaving = parse_offload(layout.offload)
        mtp = self.model.mtp.layers if self.model.mtp else 0
        self.heads = 1 + mtp
        self.blocks = [*self.model.layer_kinds, *["mtp"] * mtp]
        unit = self.stack.vocab_divisor * layout.tp
        self.vocab = ceil((self.workload.vocab_size or self.model.vocab_size) / unit) * unit
        self.chunks = self._chunks()

    def _dp_cp_groups(self) -> list[list[int]]:
        """Ranks that hold the same dense weights: same tp and pp, any dp and cp; under HSDP the runs of K of them."""
        at = coordinates(self.layout)
        found: dict[tuple[int, int], list[int]] = {}
        for rank, tp, pp in zip(at["rank"], at["tp"], at["pp"], strict=True):
            found.setdefault((int(tp), int(pp)), []).append(int(rank))
        return list(found.values())

    def _chunks(self) -> list[list[tuple[str, bool]]]:
        """(piece, recomputed) of every virtual chunk, in the order of the pipeline."""
        depth = {0: 0, 1: inf, 2: self.recompute.layers, 3: inf}[self.recompute.mode]
        found = []
        for v in range(self.layout.vpp):
            for stage in self.layout.stages:
                chunk = stage.chunks[v]
                layers = self.blocks[chunk.layers[0] : chunk.layers[1] + 1] if chunk.layers else []
                held = [(name, i < depth) for i, name in enumerate([*layers, *["mtp"] * chunk.mtp])]
                held += [("embedding", False)] if chunk.embedding else []
                held += [("head", False)] if chunk.loss else []
                found.append(held)
        return found

    @property
    def hidden_bytes(self) -> float:
        """Hidden states of a micro-batch as they lie between layers."""
        return BF16 * self.tokens * self.model.hidden_size / self.sp

    def _moe_mlp(self) -> MoeMlp:
        return next(kind.mlp for kind in self.model.kinds.values() if isinstance(kind.mlp, MoeMlp))

    def shards(self) -> tuple[list[list[int]], list[list[int]]]:
        """Groups that shard dense states, and groups of the copies of a shard (HSDP)."""
        whole = self.groups["dp_cp"]
        if self.sharding != 4:
            return whole, []
        k = min(self.hsdp, len(whole[0]))
        inner = [group[i : i + k] for group in whole for i in range(0, len(group), k)]
        return inner, [group[i::k] for group in whole for i in range(k)]
