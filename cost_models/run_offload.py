"""What a measured run offloads, from the words of its source to the share of its saved activations that leaves the device."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from ..search_spaces.layout import SELECTIVE, Layout, LayoutTable, Problem, Recompute
from .operators import layer_input_bytes
from .runs import Unpriceable
from .step import CostModel

LAYERS = re.compile(r"activations of (\d{1,6}) layers")
MODULES = re.compile(r"activations of modules ([a-z_0-9+]+)")
LAYER_INPUT = "layer_input"

SAVED_BY: Mapping[str, tuple[str, ...]] = {
    # Megatron-Core's fine-grained offloading: a module's input leaves, which is what the operator before it saves.
    "attn_norm": (LAYER_INPUT,),
    "qkv_linear": ("input_norm",),
    "core_attn": ("qkv_proj", "kv_up_proj", "rotary"),
    "attn_proj": ("core_attention", "out_proj"),
    "mlp_norm": ("residual",),
    "expert_fc1": ("permute",),
    "moe_act": ("experts_fc1", "experts_clamp"),
    "fused_group_mlp": ("permute", "experts_fc1", "experts_clamp", "experts_act"),
    # MindSpeed's swap-attention: its default modules are input_norm, self_attention and post_attention_norm.
    "attention": (
        *(LAYER_INPUT, "input_norm", "qkv_proj", "kv_up_proj", "mla_down_proj", "rotary"),
        *("core_attention", "out_proj", "residual", "mlp_norm"),
    ),
}
"""Operators whose saved tensors leave with a module of that name; `layer_input` is what a layer keeps of its own input."""


def offload_of(words: str, problem: Problem, layout: Layout) -> str:
    """The layout's offload: as the vocabulary has it, or the share that some layers or modules hold of what is saved."""
    if found := LAYERS.fullmatch(words):
        layers = problem.model.num_layers / layout.pp  # of a stage, from the first on
        return f"activations:{min(1.0, int(found[1]) / layers):.6g}"
    if found := MODULES.fullmatch(words):
        return f"activations:{_share(found[1].split('+'), problem, layout):.6g}"
    return words


def _share(modules: list[str], problem: Problem, layout: Layout) -> float:
    """Bytes that the modules' operators save over all that layers keep under the layout's recompute."""
    if unknown := [name for name in modules if name not in SAVED_BY]:
        raise Unpriceable(f"offload of a module that is not priced: {unknown[0]}")
    leaving = {name for module in modules for name in SAVED_BY[module]}
    layers, recompute = CostModel(problem).layers, Recompute.parse(layout.recompute)
    if recompute.mode not in (0, SELECTIVE):
        raise Unpriceable("offload of single modules beside full recompute")
    f = layers.factors(LayoutTable.from_layouts([layout]))
    left = total = 0.0
    for block in layers.blocks:
        kept = {LAYER_INPUT: float(layer_input_bytes(problem.model, f)[0])}
        for op in layers.operators(block, f):
            if not op.modules & recompute.modules:
                kept[op.name] = kept.get(op.name, 0.0) + float(np.broadcast_to(op.saved_bytes, f.zeros.shape)[0])
        left += sum(size for name, size in kept.items() if name in leaving)
        total += sum(kept.values())
    return left / total
