"""Readers of token mixers: from the fields of a Hugging Face config to the mixer of every layer, in order, by name.

Equal names mean equal mixers. Facts that no field states, such as a bias that a family always has, are given by the family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .config_fields import Fields
from .layer_kinds import Attention, CompressedAttention, LatentAttention, LinearAttention, Mamba2, Mixer

NamedMixer = tuple[str, Mixer | None]
Mixers = Callable[[Fields, int], Sequence[NamedMixer]]
LayerTypes = Callable[[Fields, int], Sequence[str]]
NO_MIXER: NamedMixer = ("", None)


def same(name: str, reader: Callable[[Fields], Mixer]) -> Mixers:
    """The same mixer in every layer."""
    return lambda f, layers: [(name, reader(f))] * layers


def by_type(default: LayerTypes, **readers: Callable[[Fields], Mixer]) -> Mixers:
    """Layers of several types, named in layer_types or else by the family's rule; a type's first word names the mixer."""

    def mixers(f: Fields, layers: int) -> list[NamedMixer]:
        types = f.words("layer_types", readers, layers) if f.has("layer_types") else default(f, layers)
        built = {name: readers[name](f) for name in dict.fromkeys(types)}
        return [(name.partition("_")[0], built[name]) for name in types]

    return mixers


def every(interval: int, usual: str, other: str, key: str | None = None) -> LayerTypes:
    """Every interval-th layer is of the other type; the config may give another interval under `key`."""

    def types(f: Fields, layers: int) -> list[str]:
        period = f.count(key, default=interval) if key else interval
        return [usual if (layer + 1) % period else other for layer in range(layers)]

    return types


def qwen_windows(f: Fields, layers: int) -> list[str]:
    """sliding_window stands in configs that do not use it; where they do, it starts at layer max_window_layers."""
    if not f.flag("use_sliding_window", False) or not f.has("sliding_window"):
        return ["full_attention"] * layers
    full = f.extent("max_window_layers", default=layers)
    return ["full_attention" if layer < full else "sliding_attention" for layer in range(layers)]


def window_everywhere(f: Fields, layers: int) -> list[str]:
    """Every layer sees its window, or all where the configuration has none."""
    return ["sliding_attention" if f.has("sliding_window") else "full_attention"] * layers


def llama4_types(f: Fields, layers: int) -> list[str]:
    """Layers without rotary positions (every fourth, or 0 in no_rope_layers) see everything; the rest see their chunk."""
    if not f.has("attention_chunk_size"):
        return ["full_attention"] * layers
    if f.has("no_rope_layers") and f.values["no_rope_layers"] != []:
        return ["chunked_attention" if rope else "full_attention" for rope in f.wholes("no_rope_layers", layers)]
    return list(every(4, "chunked_attention", "full_attention", key="no_rope_layer_interval")(f, layers))


def minimax_types(f: Fields, layers: int) -> list[str]:
    """attn_type_list: 1 is softmax attention, 0 lightning attention."""
    kinds = f.wholes("attn_type_list", layers)
    if not set(kinds) <= {0, 1}:
        raise f.error("attn_type_list", "it must hold only 0 (lightning attention) and 1 (softmax attention)")
    return ["full_attention" if kind else "lightning_attention" for kind in kinds]


def attention(**facts: Any) -> Callable[[Fields], Attention]:
    """Softmax attention. `facts` are fields of Attention: a value, or a function of the config's fields."""

    def read(f: Fields) -> Attention:
        heads = f.count("num_attention_heads", "n_head")
        kv_heads = f.count("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise f.error("num_key_value_heads", f"it must divide num_attention_heads {heads}")
        given = {name: fact(f) if callable(fact) else fact for name, fact in facts.items()}
        width = head_dim(f, heads)
        rotary: dict[str, Any] = {"rotary_fraction": rotary_fraction(f, width), "scaled_rotary": scaled_rotary(f)}
        return Attention(heads=heads, kv_heads=kv_heads, head_dim=width, **rotary, **given)

    return read


def head_dim(f: Fields, heads: int) -> int:
    """Width of a head: its own field, else hidden_size over the heads."""
    for name in ("head_dim", "attention_head_dim"):
        if f.has(name) or name in f.defaults:
            return f.count(name)
    hidden = f.count("hidden_size", "n_embd")
    if hidden % heads:
        raise f.error("hidden_size", f"it must be a multiple of num_attention_heads {heads}, or head_dim must be given")
    return hidden // heads


def rotary_fraction(f: Fields, width: int) -> float:
    """Share of a head that rotary embedding turns; MiniMax gives the dimensions, and others may give it beside rope_theta."""
    if f.has("rotary_dim"):
        dimensions = f.count("rotary_dim")
        if dimensions > width:
            raise f.error("rotary_dim", f"it must be at most the width of a head, {width}")
        return dimensions / width
    inner = f.section("rope_parameters")
    asked = inner if inner.has("partial_rotary_factor") else f
    fraction = asked.number("partial_rotary_factor", 1.0)
    if fraction > 1:
        raise asked.error("partial_rotary_factor", "it must be at most 1")
    return fraction


def scaled_rotary(f: Fields) -> bool:
    """Whether YaRN scales queries and keys: by 0.1·ln(factor) + 1, unless its two mscales cancel (arXiv 2309.00071, 3.4)."""
    section = f.values.get("rope_scaling") or f.values.get("rope_parameters")
    if not isinstance(section, dict) or "yarn" not in (section.get("rope_type"), section.get("type")):
        return False
    told = section.get("attention_factor")
    cancelled = section.get("mscale") is not None and section.get("mscale") == section.get("mscale_all_dim")
    return not cancelled if told is None else bool(told != 1)


def attention_bias(f: Fields) -> bool:
    return f.flag("attention_bias", False)


BIASED: dict[str, Any] = {"qkv_bias": attention_bias, "out_bias": attention_bias}
QWEN3: dict[str, Any] = {"qk_norm": "head", **BIASED}


def window(f: Fields) -> int:
    return f.count("sliding_window")


def sliding_and_full(default: LayerTypes, **facts: Any) -> Mixers:
    return by_type(default, full_attention=attention(**facts), sliding_attention=attention(window=window, **facts))


def latent_attention(f: Fields) -> LatentAttention:
    """MLA; head_dim is not read (GLM-5 gives the rope part there). Every layer counts an indexer, also where layers share one."""
    indexer = f.has("index_n_heads")
    return LatentAttention(
        heads=f.count("num_attention_heads"),
        q_lora_rank=f.count("q_lora_rank") if f.has("q_lora_rank") else None,
        kv_lora_rank=f.count("kv_lora_rank"),
        qk_nope_head_dim=f.count("qk_nope_head_dim"),
        qk_rope_head_dim=f.count("qk_rope_head_dim"),
        v_head_dim=f.count("v_head_dim"),
        qkv_bias=attention_bias(f),
        out_bias=attention_bias(f),
        indexer_heads=f.count("index_n_heads") if indexer else 0,
        indexer_head_dim=f.count("index_head_dim") if indexer else 0,
        indexer_topk=f.count("index_topk") if indexer else 0,
    )


def compressed_mixers(f: Fields, layers: int) -> list[NamedMixer]:
    """One mixer per decoder layer, by its compression ratio."""
    return [compressed_mixer(f, ratio) for ratio in compress_ratios(f, layers)[:layers]]


def compress_ratios(f: Fields, layers: int) -> list[int]:
    """One ratio per decoder layer and, after them, per MTP layer."""
    ratios = f.wholes("compress_ratios")
    if len(ratios) < layers:
        raise f.error("compress_ratios", f"it must have one item per layer, at least {layers}")
    return ratios


def compressed_mixer(f: Fields, ratio: int) -> NamedMixer:
    """Ratio 4 goes with overlapping windows and an indexer, larger ratios with neither, 0 with the sliding window alone."""
    sparse = ratio == 4
    mixer = CompressedAttention(
        heads=f.count("num_attention_heads"),
        head_dim=f.count("head_dim"),
        rope_head_dim=f.count("qk_rope_head_dim"),
        q_lora_rank=f.count("q_lora_rank"),
        o_lora_rank=f.count("o_lora_rank"),
        o_groups=f.count("o_groups"),
        window=window(f),
        compress_ratio=ratio,
        overlapping=sparse,
        indexer_heads=f.count("index_n_heads") if sparse else 0,
        indexer_head_dim=f.count("index_head_dim") if sparse else 0,
        indexer_topk=f.count("index_topk") if sparse else 0,
    )
    return f"ratio{ratio}" if ratio else "window", mixer


def gated_delta_net(f: Fields) -> LinearAttention:
    return LinearAttention(
        kind="gated_delta_net",
        key_heads=f.count("linear_num_key_heads"),
        value_heads=f.count("linear_num_value_heads"),
        key_head_dim=f.count("linear_key_head_dim"),
        value_head_dim=f.count("linear_value_head_dim"),
        conv_kernel=f.count("linear_conv_kernel_dim"),
    )


def lightning(f: Fields) -> LinearAttention:
    """As many heads of the same width as the softmax layers have queries."""
    heads = f.count("num_attention_heads")
    width = head_dim(f, heads)
    return LinearAttention(kind="lightning", key_heads=heads, value_heads=heads, key_head_dim=width, value_head_dim=width)


def mamba2(f: Fields) -> Mamba2:
    return Mamba2(
        heads=f.count("mamba_num_heads"),
        head_dim=f.count("mamba_head_dim"),
        state_size=f.count("ssm_state_size"),
        groups=f.count("n_groups"),
        conv_kernel=f.count("conv_kernel"),
        chunk_size=f.count("chunk_size"),
        conv_bias=f.flag("use_conv_bias", True),
        in_bias=f.flag("use_bias", False),
        out_bias=f.flag("use_bias", False),
    )


def minimax_m2_mixers(f: Fields, layers: int) -> Sequence[NamedMixer]:
    """All layers are full attention; its query and key norms span the whole projection ("per_layer")."""
    if f.has("attn_type_list") and set(minimax_types(f, layers)) != {"full_attention"}:
        raise f.error("attn_type_list", "it must be 1 (softmax attention) throughout in this family")
    normed = f.flag("use_qk_norm", True)
    if normed:
        f.text("qk_norm_type", ("per_layer",), "per_layer")
    return same("full", attention(qk_norm="width" if normed else "none"))(f, layers)


def qwen_hybrid(gate: Callable[[Fields], bool]) -> Mixers:
    """Three gated delta nets, then one full attention, whose queries are as wide again for the output gate."""
    return by_type(
        every(4, "linear_attention", "full_attention", key="full_attention_interval"),
        linear_attention=gated_delta_net,
        full_attention=attention(output_gate=gate, **QWEN3),
    )
