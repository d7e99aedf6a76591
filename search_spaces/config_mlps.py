"""Readers of feed-forward parts: from the fields of a Hugging Face config to the part of every layer, in order, by name.

Equal names mean equal parts. Publishers agree neither on the key of the expert width (intermediate_size in some) nor on that of the
expert count, nor on how they say which layers are MoE: a reader is one family's way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .config_fields import Fields
from .layer_kinds import DenseMlp, Mlp, MoeMlp

NamedMlp = tuple[str, Mlp | None]
Mlps = Callable[[Fields, int], Sequence[NamedMlp]]
MoeLayers = Callable[[Fields, int], Sequence[bool]]
NO_MLP: NamedMlp = ("", None)
SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


def dense_everywhere(reader: Callable[[Fields], DenseMlp]) -> Mlps:
    """The same dense block in every layer."""
    return lambda f, layers: [("dense", reader(f))] * layers


def dense_and_moe(where: MoeLayers, moe: Callable[[Fields], MoeMlp], other: Callable[[Fields], DenseMlp]) -> Mlps:
    """MoE where the family's rule says so and a dense block elsewhere; each is read only if some layer has it."""

    def mlps(f: Fields, layers: int) -> list[NamedMlp]:
        sparse = where(f, layers)
        built: dict[bool, NamedMlp] = {}
        if any(sparse):
            built[True] = ("moe", moe(f))
        if not all(sparse):
            built[False] = ("dense", other(f))
        return [built[layer] for layer in sparse]

    return mlps


def moe_everywhere(moe: Callable[[Fields], MoeMlp]) -> Mlps:
    """The same mixture of experts in every layer."""
    return lambda f, layers: [("moe", moe(f))] * layers


def after_first_dense(f: Fields, layers: int) -> list[bool]:
    """DeepSeek and its kin: dense layers first, then every moe_layer_freq-th; or a list, of types or of 0 and 1."""
    if f.has("mlp_layer_types"):
        return [kind == "sparse" for kind in f.words("mlp_layer_types", ("dense", "sparse"), layers)]
    if isinstance(f.values.get("moe_layer_freq"), list):
        return [bool(sparse) for sparse in f.wholes("moe_layer_freq", layers)]
    first, step = f.extent("first_k_dense_replace", default=0), f.count("moe_layer_freq", default=1)
    return [layer >= first and layer % step == 0 for layer in range(layers)]


def qwen_sparse_layers(f: Fields, layers: int) -> list[bool]:
    """Every decoder_sparse_step-th layer is a mixture, but for those of mlp_only_layers."""
    only_dense = set(f.wholes("mlp_only_layers")) if f.has("mlp_only_layers") else set()
    step = f.count("decoder_sparse_step", default=1)
    return [layer not in only_dense and (layer + 1) % step == 0 for layer in range(layers)]


def llama4_sparse_layers(f: Fields, layers: int) -> list[bool]:
    """moe_layers where it is given; otherwise every interleave_moe_layer_step-th layer."""
    if f.has("moe_layers"):
        sparse = set(f.wholes("moe_layers"))
        return [layer in sparse for layer in range(layers)]
    step = f.count("interleave_moe_layer_step", default=1)
    return [(layer + 1) % step == 0 for layer in range(layers)]


def dense(*width: str, bias: bool | None = None, gated: bool = True) -> Callable[[Fields], DenseMlp]:
    """A reader of dense blocks whose width stands in one of these fields."""

    def read(f: Fields) -> DenseMlp:
        return DenseMlp(
            width=f.count(*(width or ("intermediate_size",))),
            gated=gated,
            bias=f.flag("mlp_bias", False) if bias is None else bias,
        )

    return read


def mixture(f: Fields, experts: str, width: str, top_k: Sequence[str] = ("num_experts_per_tok",), **facts: Any) -> MoeMlp:
    """A mixture of experts by its fields; InputError where a token would choose more experts than there are."""
    count, chosen = f.count(experts), f.count(*top_k)
    if chosen > count:
        raise f.error(top_k[0], f"it must be at most {experts}, {count}")
    return MoeMlp(experts=count, top_k=chosen, width=f.count(width), **facts)


def deepseek_moe(method: str, score: str, normalized: bool) -> Callable[[Fields], MoeMlp]:
    """`method`, `score` and `normalized` are the family's topk_method, scoring_func and norm_topk_prob where they are left out.

    Only noaux_tc balances by a bias per expert; greedy routing ignores the groups of experts.
    """

    def read(f: Fields) -> MoeMlp:
        chosen = f.text("topk_method", ("greedy", "group_limited_greedy", "noaux_tc"), method)
        grouped = chosen != "greedy"
        return mixture(
            f,
            "n_routed_experts",
            "moe_intermediate_size",
            shared_width=f.extent("n_shared_experts", default=0) * f.count("moe_intermediate_size"),
            router_expert_bias=chosen == "noaux_tc",
            routing_groups=f.count("n_group", default=1) if grouped else 1,
            routing_groups_topk=f.count("topk_group", default=1) if grouped else 1,
            score_function=f.text("scoring_func", SCORES, score),
            normalized_top_k=f.flag("norm_topk_prob", normalized),
            routed_scaling_factor=f.number("routed_scaling_factor", 1.0),
        )

    return read


deepseek_v4_moe = deepseek_moe("noaux_tc", "sqrtsoftplus", True)


def deepseek_v4_mlps(f: Fields, layers: int) -> list[NamedMlp]:
    """The first num_hash_layers send a token to experts by its id, and so need no balancing bias."""
    moe = deepseek_v4_moe(f)
    hashed = moe.model_copy(update={"router_expert_bias": False})
    first = f.extent("num_hash_layers", default=0)
    return [("hash_moe", hashed) if layer < first else ("moe", moe) for layer in range(layers)]


def qwen_moe(shared: bool, normalized: bool) -> Callable[[Fields], MoeMlp]:
    """A reader of Qwen's mixtures, with its gated shared expert or without; `normalized` is the family's norm_topk_prob."""

    def read(f: Fields) -> MoeMlp:
        width = f.extent("shared_expert_intermediate_size") if shared else 0
        normal = f.flag("norm_topk_prob", normalized)
        facts: dict[str, Any] = {"shared_width": width, "shared_gate": width > 0, "normalized_top_k": normal}
        return mixture(f, "num_experts", "moe_intermediate_size", **facts)

    return read


def mixtral_moe(f: Fields) -> MoeMlp:
    return mixture(f, "num_local_experts", "intermediate_size")


def gpt_oss_moe(f: Fields) -> MoeMlp:
    """Gates cut off at swiglu_limit; 1 is added to the linear projection, which no field says (Hugging Face's modeling_gpt_oss)."""
    top_k = ("num_experts_per_tok", "experts_per_token")
    limit = f.optional("swiglu_limit")
    gate = {"clamped": True, "clamp_limit": limit, "gate_offset": 1.0}
    return mixture(f, "num_local_experts", "intermediate_size", top_k, bias=True, router_linear_bias=True, **gate)


def llama4_moe(f: Fields) -> MoeMlp:
    """There always is one shared expert, as wide as a routed one, though no key says so; an expert's weight is its own sigmoid."""
    facts: dict[str, Any] = {"shared_width": f.count("intermediate_size"), "score_function": "sigmoid", "normalized_top_k": False}
    return mixture(f, "num_local_experts", "intermediate_size", **facts)


def minimax_m1_moe(f: Fields) -> MoeMlp:
    shared = f.extent("shared_intermediate_size", default=0)
    return mixture(f, "num_local_experts", "intermediate_size", shared_width=shared)


def minimax_m2_moe(f: Fields) -> MoeMlp:
    return mixture(
        f,
        "num_local_experts",
        "intermediate_size",
        shared_width=f.extent("shared_intermediate_size", default=0),
        router_expert_bias=f.flag("use_routing_bias", True),
        score_function=f.text("scoring_func", SCORES, "sigmoid"),
    )


def gpt2_mlp(f: Fields) -> DenseMlp:
    """n_inner, or four times the hidden size."""
    return DenseMlp(width=f.count("n_inner", default=4 * f.count("hidden_size", "n_embd")), gated=False, bias=True)
