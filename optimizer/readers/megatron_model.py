"""The model that Megatron's options describe, with the framework's own defaults for what they leave out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ValidationError

from ...search_spaces.documents import sentence
from ...search_spaces.errors import InputError
from ...search_spaces.layer_pattern import compact
from ...search_spaces.libraries import megatron_core, mindspeed_llm
from ...search_spaces.model import ModelSpec
from .megatron_rotary import rope_scaling, scales_queries
from .options import Knobs

MOST_LAYERS = 20_000
OTHER_MIXERS = ("attention_variant", "linear_pattern", "hybrid")
"""Knobs of layers that these options alone do not tell in full."""


@dataclass(frozen=True)
class Described:
    """What options say of a model: the figures that rules read, the whole of it where they say enough, and what was assumed; of
    that, `doubts` are what a model as people build it seldom has. `with_vocabulary` makes the model where nothing else is missing.
    """

    sizes: dict[str, int]
    model: ModelSpec | None
    assumptions: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    with_vocabulary: Callable[[int], ModelSpec] | None = None


def describe(knobs: Knobs) -> Described:
    """The model of a command line; no-op layers are left out of its count. InputError for sizes that no model has."""
    given = {name: knobs.whole(name, 0 if name in ("shared_width", "shared_experts", "mtp") else 1) for name in WHOLE}
    if given["shared_experts"] and given["shared_width"] is None:  # MindSpeed-LLM: each as wide as a routed one
        given["shared_width"] = given["shared_experts"] * (given["expert_width"] or _ffn(knobs, given))
    vocab = given["padded_vocab"] or given["vocab"]
    said = list(_assumed(knobs, given))
    sizes = _sizes(knobs, given)
    # attention that the options do not describe in full needs a MODEL beside them
    if any(given[name] is None for name in NEEDED) or any(knobs.has(name) for name in OTHER_MIXERS):
        return Described(sizes, None)
    if (sizes["layers"] or 0) > MOST_LAYERS:
        raise InputError(f"{knobs.where}: --num-layers {sizes['layers']} is more than any model has ({MOST_LAYERS:,})")
    if (other := pattern_length(knobs, given["layers"], given["experts"])) is not None:
        return Described(sizes, None, (*said, f"the model is not read: {knobs.names['moe_pattern']} is of {other} layers"))
    doubts = tuple(_doubts(given))
    build = partial(_model, knobs, given, sizes)
    try:
        model = build(vocab or PROBED)
    except ValidationError as error:
        unread = sentence(error, ModelSpec, "the model is not read, as its options do not fit together")
        return Described(sizes, None, (*said, unread))
    return Described(sizes, model if vocab else None, tuple(said), doubts, None if vocab else build)


PROBED = 1 << 16
"""Tokens with which options are tried that leave the vocabulary open."""
WHOLE = (
    *("layers", "hidden_size", "heads", "head_dim", "ffn_width", "max_positions", "padded_vocab", "vocab", "kv_heads", "mtp"),
    *("experts", "top_k", "expert_width", "shared_width", "shared_experts", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"),
    *("qk_rope_head_dim", "v_head_dim", "routing_groups", "routing_groups_topk", "latent_size"),
    *("indexer_heads", "indexer_head_dim", "indexer_topk", "seq_len"),
)
NEEDED = ("layers", "hidden_size", "heads")
Given = dict[str, int | None]


def _assumed(knobs: Knobs, given: Given) -> Iterator[str]:
    """Framework defaults that the model rests on."""
    if given["hidden_size"] and not given["ffn_width"]:
        yield f"feed-forward width {_ffn(knobs, given)}: Megatron's own where --ffn-hidden-size is not given"
    yield from _doubts(given)
    if given["experts"] and not given["top_k"]:
        yield "each token goes to 2 experts: Megatron's default of --moe-router-topk"


def _doubts(given: Given) -> Iterator[str]:
    """Defaults that shape the model and that few models have."""
    if given["experts"] and not given["expert_width"]:
        yield "experts as wide as the feed-forward layer: --moe-ffn-hidden-size is not given"


def _ffn(knobs: Knobs, given: Given) -> int:
    """Megatron's width: 4·h, or two thirds of that in whole 64s for gated layers (megatron/training/arguments.py)."""
    hidden = given["hidden_size"] or 0
    return given["ffn_width"] or (int(4 * hidden * 2 / 3) // 64 * 64 if _gated(knobs) else 4 * hidden)


def positions(knobs: Knobs) -> str:
    """How tokens' places are told; an older switch comes before the option's word."""
    return "rope" if knobs.has("rotary") else knobs.text("positions") or "learned_absolute"


def _gated(knobs: Knobs) -> bool:
    return knobs.has("gated") or knobs.has("quick_gated")


def _kv_heads(knobs: Knobs, given: Given) -> int | None:
    heads = given["heads"]
    return (given["kv_heads"] or 1) if knobs.has("grouped_query") else heads


def noops(knobs: Knobs, layers: int) -> tuple[int, ...]:
    """Ids of MindSpeed's no-op layers. InputError for ids that are none of the layers."""
    text = knobs.text("noop_layers")
    if text is None:
        return ()
    ids = sorted({int(part) for part in re.split(r"[,\s]+", text) if re.fullmatch(r"\d{1,6}", part)})
    if not ids or ids[-1] >= layers:
        raise InputError(f"{knobs.where}: --noop-layers {text!r} must be ids from 0 to {layers - 1}, with commas between")
    return tuple(ids)


def _sizes(knobs: Knobs, given: Given) -> dict[str, int]:
    """The rules' constants that the options give; a model of Megatron's has every part or its count is 0."""
    found: dict[str, int | None] = {"mtp_layers": given["mtp"]}
    layers, experts = given["layers"], given["experts"] or 0
    if layers:
        real, mtp = layers - len(noops(knobs, layers)), given["mtp"] or 0
        found |= {"layers": real, "mtp_layers": mtp, "blocks": real + mtp}
    mla = knobs.has("mla")
    found["heads"] = given["heads"]
    found["kv_heads"] = 0 if mla else _kv_heads(knobs, given)
    found["kv_heads_multiple"] = found["kv_heads"]
    if layers or experts:
        found |= {"experts": experts, "mla": int(mla), "tied": int(not knobs.has("untied"))}
        found |= {"indexer": int(_indexed(knobs, given)), "compressed": 0, "linear_heads": 0, "state_groups": 0}
        found |= {"windows": int(_window(knobs) is not None), "sinks": int(knobs.text("attention_sinks") not in (None, "vanilla"))}
        found["shared_width"] = given["shared_width"] or 0
        found["expert_width"] = (given["expert_width"] or (_ffn(knobs, given) if given["hidden_size"] else None)) if experts else 0
    if given["hidden_size"] and layers and pattern_length(knobs, layers, experts) is None:
        pattern = moe_pattern(knobs, layers, experts)
        found["mlp_width"] = 0 if all(pattern) else _ffn(knobs, given)
    return {name: value for name, value in found.items() if value is not None}


def moe_pattern(knobs: Knobs, layers: int, experts: int) -> tuple[bool, ...]:
    """Which layers are MoE. InputError for a pattern that is not one of Megatron's."""
    text = knobs.text("moe_pattern")
    if not experts:
        return (False,) * layers
    first = knobs.text("dense_first")
    if first is not None and re.fullmatch(r"-?\d{1,6}", first):
        every = int(text) if text and re.fullmatch(r"-?\d{1,6}", text) else 1
        if int(first) < 0 or every < 0:
            return (True,) * layers
        return tuple(i >= int(first) and i % max(every, 1) == 0 for i in range(layers))
    if text is None:
        return (True,) * layers
    if re.fullmatch(r"\d{1,6}", text.strip()) and int(text):
        return tuple(i % int(text) == 0 for i in range(layers))
    found = list_expression(text)
    if found is None or len(found) != layers or not set(found) <= {0, 1}:
        raise InputError(f"{knobs.where}: --moe-layer-freq {text!r} is not a number or a list of {layers} zeros and ones")
    return tuple(bool(value) for value in found)


def pattern_length(knobs: Knobs, layers: int | None, experts: int | None) -> int | None:
    """Layers that a list of zeros and ones says to be MoE or not, where that is another number than the model's."""
    text = knobs.text("moe_pattern")
    found = list_expression(text) if text is not None and layers and experts and not knobs.has("dense_first") else None
    return len(found) if found is not None and len(found) != layers and set(found) <= {0, 1} else None


def list_expression(text: str) -> list[int] | None:
    """The list of a Python expression such as "([0]*3+[1]*58)*2": lists, + and * by a number alone. None for anything else."""
    words = re.findall(r"\d+|[\[\]()+*,]|\S", text)
    if len(words) > 10_000 or not words:
        return None
    try:
        value, rest = _list_sum(words)
    except (ValueError, IndexError, RecursionError):
        return None
    return value if not rest else None


def _list_sum(words: list[str]) -> tuple[list[int], list[str]]:
    value, words = _list_product(words)
    while words[:1] == ["+"]:
        more, words = _list_product(words[1:])
        value = _bounded(value + more)
    return value, words


def _list_product(words: list[str]) -> tuple[list[int], list[str]]:
    if words[0] == "(":
        value, words = _list_sum(words[1:])
        if words[:1] != [")"]:
            raise ValueError("a bracket is not closed")
        words = words[1:]
    elif words[0] == "[":
        end = words.index("]")
        value = [int(word[:6]) for word in words[1:end] if word != ","]
        words = words[end + 1 :]
    else:
        raise ValueError("not a list")
    while words[:1] == ["*"]:
        value = _bounded(value, int(words[1][:9]))
        words = words[2:]
    return value, words


def _bounded(value: list[int], times: int = 1) -> list[int]:
    if len(value) * times > MOST_LAYERS:
        raise ValueError("too long")
    return value * times


def _model(knobs: Knobs, given: Given, sizes: dict[str, int], vocab: int) -> ModelSpec:
    layers = given["layers"] or 0
    left_out = set(noops(knobs, layers))
    pattern = moe_pattern(knobs, layers, sizes["experts"])
    moe = [is_moe for place, is_moe in enumerate(pattern) if place not in left_out]
    windowed = _windowed(knobs, len(moe))
    names = [("moe" if is_moe else "dense") + ("_window" if window else "") for is_moe, window in zip(moe, windowed, strict=True)]
    kinds = {name: _kind(knobs, given, name) for name in dict.fromkeys(names)}
    mtp = {"layers": given["mtp"], "kind": names[-1]} if given["mtp"] else None
    data: dict[str, Any] = {
        "name": "the job's model",
        "hidden_size": given["hidden_size"],
        "vocab_size": vocab,
        "max_position_embeddings": given["max_positions"] or given["seq_len"] or 4096,
        "kinds": kinds,
        "layers": compact(names),
        "tied_embeddings": not knobs.has("untied"),
        "learned_positions": positions(knobs) == "learned_absolute",
        "norm": "rms" if (knobs.text("norm") or "").lower().startswith("rms") else "layer",
        "mtp": mtp,
        "rope_scaling": rope_scaling(knobs),
        "source": "options of the job",
    }
    return ModelSpec.model_validate(data)


def _windowed(knobs: Knobs, layers: int) -> Sequence[bool]:
    if knobs.text("window") is None:
        return [False] * layers
    text = knobs.text("window_pattern")
    if text is None:
        return [True] * layers
    if re.fullmatch(r"\d{1,6}", text) and int(text):
        return [(i + 1) % int(text) != 0 for i in range(layers)]
    found = list_expression(text)
    return [bool(value) for value in found] if found is not None and len(found) == layers else [True] * layers


NUMBERS = {"routed_scaling_factor": "routed_scaling", "clamp_limit": "activation_clamp", "gate_offset": "gate_offset"}
"""Figures of experts that need be no whole numbers, and their knobs."""


RAW_ROUTERS = ("softmax_topk", "group_limited_greedy", "pai_megatron_aux_loss")
"""Routers of MindSpeed-LLM's own that weigh experts by the softmax of all (mindspeed_llm core/transformer/moe/router.py)."""


def _normalized(knobs: Knobs) -> bool:
    """Whether the weights of a token's experts by softmax add up to 1."""
    router = knobs.values.get("load_balancing", ())  # exports leave it open, and what is open is no kind of its own
    return knobs.has("topk_normalised") or not (knobs.has("pre_softmax") or set(RAW_ROUTERS) & set(router))


def _kind(knobs: Knobs, given: Given, name: str) -> dict[str, Any]:
    gated, bias = _gated(knobs), not knobs.has("no_bias")
    if name.startswith("moe"):
        shared = {
            "router_linear_bias": bias,
            "router_expert_bias": knobs.has("expert_bias"),
            "shared_gate": knobs.has("shared_gate"),
        }
        numbers = ("latent_size", "routing_groups", "routing_groups_topk")
        top_k, score = given["top_k"] or int(megatron_core().experts_of_a_token.value), knobs.text("score_function") or "softmax"
        mlp: dict[str, Any] = {
            "kind": "moe",
            "experts": given["experts"],
            "top_k": top_k,
            "width": given["expert_width"] or _ffn(knobs, given),
            "gated": gated,
            "bias": bias,
            "clamped": knobs.has("activation_clamp"),
            "shared_width": given["shared_width"] or 0,
            **shared,
            **{key: given[key] for key in numbers if given[key]},
            "score_function": score,
            "normalized_top_k": _normalized(knobs) if score == "softmax" else top_k > 1,
        }
        texts = {name: knobs.text(knob) or "" for name, knob in NUMBERS.items()}
        mlp |= {name: float(text) for name, text in texts.items() if re.fullmatch(r"\d{1,6}(\.\d{1,9})?", text)}
    else:
        mlp = {"kind": "mlp", "width": _ffn(knobs, given), "gated": gated, "bias": bias}
    return {"mixer": _mixer(knobs, given, name.endswith("_window")), "mlp": mlp}


def _indexed(knobs: Knobs, given: Given) -> bool:
    """Whether latent attention picks the tokens it looks at."""
    return knobs.has("indexer") or bool(given["indexer_heads"])


def _rotary_fraction(knobs: Knobs) -> float:
    """Share of a head that rotary embedding turns; 0 is MindSpeed-LLM's word for all of it."""
    text = knobs.text("rotary_fraction") or ""
    return (float(text) if re.fullmatch(r"(?=.*\d)\d{0,3}\.?\d{0,9}", text) else 0.0) or 1.0


def _mixer(knobs: Knobs, given: Given, window: bool) -> dict[str, Any]:
    heads, hidden = given["heads"] or 1, given["hidden_size"] or 1
    if knobs.has("mla"):
        mixer: dict[str, Any] = {"kind": "mla", "heads": heads, "q_lora_rank": given["q_lora_rank"]}
        indexer = mindspeed_llm().indexer if _indexed(knobs, given) else {}
        widths = {**megatron_core().latent_attention, **indexer}
        return mixer | {name: given[name] or value for name, value in widths.items()}
    bias = not knobs.has("no_bias")
    mixer = {
        "kind": "attention",
        "heads": heads,
        "kv_heads": _kv_heads(knobs, given),
        "head_dim": given["head_dim"] or max(1, hidden // heads),
        "qkv_bias": bias or knobs.has("qkv_bias"),
        "out_bias": bias,
        "qk_norm": "head" if knobs.has("qk_norm") else "none",
        "output_gate": knobs.has("output_gate"),
        "sinks": knobs.text("attention_sinks") == "learnable",
        "rotary_fraction": _rotary_fraction(knobs),
        "scaled_rotary": scales_queries(knobs),
    }
    size = _window(knobs)
    return {**mixer, "window": size} if window and size else mixer


def _window(knobs: Knobs) -> int | None:
    """Tokens that a query of a windowed layer may look back on, its own included; None where none is given, or all (-1)."""
    behind = re.match(r"\(?\s*(\d{1,9})", knobs.text("window") or "")
    return int(behind.group(1)) + 1 if behind else None
