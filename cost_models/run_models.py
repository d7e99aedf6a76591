"""Shapes of the models behind measured runs: a models.json beside the CSV, the catalog, and what neither of them says.

An entry of models.json holds num_layers, hidden_size, num_attention_heads, num_kv_heads, head_dim, ffn_hidden_size, gated_mlp,
vocab_size, tied_embeddings, num_experts, moe_top_k, moe_ffn_hidden_size, shared_expert_ffn, first_k_dense, mla and mtp_layers.
A CSV may give the same sizes in columns of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..search_spaces.documents import read_document
from ..search_spaces.errors import InputError
from ..search_spaces.inputs import catalog_names, load_model
from ..search_spaces.layer_kinds import Attention, DenseMlp, LatentAttention, LayerKind, MoeMlp, Mtp
from ..search_spaces.model import ModelSpec
from .run_files import NEEDED, OPTIONAL, OTHER_NAMES
from .runs import Run, Unpriceable, meaning

Shape = Mapping[str, Any]

CATALOG_NAMES = {
    "deepseek-v4-flash": "deepseek-v4-flash",
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "llama4-maverick-400b": "llama-4-maverick",
    "nemotron-3-nano": "nemotron-3-nano-30b-a3b",
    "nemotron-h-56b": "nemotron-h-56b",
}
"""Models whose layers differ in ways that models.json cannot say (windows, state-space blocks, every second layer dense)."""

MANY_KINDS = re.compile(r"hybrid|sliding|alternating|every 2nd layer|every second layer|mamba", re.IGNORECASE)
"""Notes of a shape that its numbers alone do not describe."""

ALIASES = {
    "llama38b": "llama-3.1-8b",
    "llama370b": "llama-3.1-70b",
    "llama3370b": "llama-3.1-70b",
    "llama3405b": "llama-3.1-405b",
    "deepseekv3671b": "deepseek-v3",
    "deepseekr1671b": "deepseek-r1",
    "qwen330b": "qwen3-30b-a3b",
    "qwen3235b": "qwen3-235b-a22b",
    "gpt3": "gpt3-175b",
    "gpt175b": "gpt3-175b",
    "gpt1t": "megatron-1t",
}
"""Other names of the catalog's models, and models of their shapes, as `plain` writes them."""
VARIANT = re.compile(r"[-_ ](instruct|base|chat|hf|it|pretrain|pretrained|sft|v0\.\d+)$")
"""What a name ends in that changes no shape."""
SIZES = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "head_dim", "ffn_hidden_size", "vocab_size"),
    *("num_experts", "moe_top_k", "moe_ffn_hidden_size", "shared_expert_ffn", "num_shared_experts", "first_k_dense", "mtp_layers"),
)
FLAGS = ("gated_mlp", "tied_embeddings")
FULL = ("num_layers", "hidden_size", "num_attention_heads")
"""Columns without which a row's own sizes are no shape."""
MOST_LAYERS = 4096
"""Layers of no real model come near it."""

SHORT, NEAR = 0.85, 0.05
"""Parameters over the total that a shape names: so few that a matrix is missing, and so near that none is."""

LONGEST = 1 << 20
"""Positions of a model without learned ones: they cost nothing."""


def unread(columns: Iterable[str]) -> tuple[str, ...]:
    """Those columns of a table of runs that nothing reads."""
    known = {*NEEDED, *OPTIONAL, *OTHER_NAMES, *SIZES, *FLAGS}
    return tuple(name for name in columns if name and name not in known)


def read_shapes(path: Path) -> dict[str, Shape]:
    """models.json; empty where there is none. InputError where it is not a JSON object."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path}: is not valid JSON ({type(error).__name__})") from error
    if not isinstance(data, dict):
        raise InputError(f"{path}: must hold an object of model names, each with an object of its sizes")
    return data


def model_of(run: Run, shapes: Mapping[str, Shape], seq_len: int) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model of a run, and what was made of its name. Unpriceable, naming the model, where nobody says what it looks like.

    What models.json says counts first, then the row's own sizes, then the catalog; names are looked up as they stand, then
    without their owner, punctuation and variant.
    """
    name, own = run.text("model"), _own_shape(run)
    if name in CATALOG_NAMES or name in shapes:
        return model_spec(name, shapes, seq_len), ()
    if own:
        return _from_shape(name or "unnamed", own, seq_len), ("model: its shape is that of the row's own columns",)
    if not name:
        raise Unpriceable("missing field: model")
    if name in catalog_names("models"):
        return load_model(name), ()
    near = _near(name, shapes) or ALIASES.get(plain(name)) or _near(name, catalog_names("models"))
    if near is None:
        raise Unpriceable(f"unknown model shape: {name}")
    return model_spec(near, shapes, seq_len), (f"model: {name} is taken to be {near}",)


def model_spec(name: str, shapes: Mapping[str, Shape], seq_len: int) -> ModelSpec:
    """The model of that name. Unpriceable where nobody says what it looks like.

    `seq_len` is how many positions a model with learned ones has.
    """
    if name in CATALOG_NAMES:
        return load_model(CATALOG_NAMES[name])
    if name in shapes:
        return _from_shape(name, shapes[name], seq_len)
    if name in catalog_names("models"):
        return load_model(name)
    raise Unpriceable(f"unknown model shape: {name}")


def plain(name: str) -> str:
    """A model's name without its owner, its variant and its punctuation: meta-llama/Llama-3.1-8B-Instruct is llama318b."""
    name = name.lower().rpartition("/")[2].removeprefix("meta-")
    while (shorter := VARIANT.sub("", name)) != name:
        name = shorter
    return re.sub(r"[^a-z0-9]", "", name)


def _near(name: str, names: Iterable[str]) -> str | None:
    """The one name that is the same but for owner, variant and punctuation."""
    found = [each for each in names if plain(each) == plain(name)]
    return found[0] if plain(name) and len(found) == 1 else None


def _own_shape(run: Run) -> dict[str, Any]:
    """The sizes that stand in the row itself; empty where they are no shape."""
    sizes: dict[str, Any] = {name: run.count(name) for name in SIZES if run.text(name) not in ("", "0")}
    if not all(sizes.get(name) for name in FULL):
        return {}
    flags = {name: meaning("flag", run.text(name)) == "yes" for name in FLAGS if run.text(name)}
    return {**{name: size for name, size in sizes.items() if size is not None}, **flags}


def _from_shape(name: str, shape: Shape, seq_len: int) -> ModelSpec:
    """The same object for the same shape: what is priced together is told by it."""
    return _checked(name, json.dumps(shape, sort_keys=True), seq_len)


@cache
def _checked(name: str, text: str, seq_len: int) -> ModelSpec:
    shape = json.loads(text)
    if not isinstance(shape, dict):
        raise Unpriceable(f"model shape does not hold together: {name}")
    if MANY_KINDS.search(str(shape.get("notes") or "")):
        raise Unpriceable(f"layers of several kinds, which models.json cannot say: {name}")
    try:
        return _gated_by_total(name, shape, seq_len) or _spec(name, shape, seq_len)
    except (ValidationError, TypeError, ValueError, OverflowError, AttributeError) as error:
        if isinstance(error, Unpriceable):
            raise
        raise Unpriceable(f"model shape does not hold together: {name}") from error


def _gated_by_total(name: str, shape: Shape, seq_len: int) -> ModelSpec | None:
    """The shape with gated feed-forward layers where it names none but only they come to the total that it names.

    Scripts spell activations in flags of their own (Gemma 2's --gelu-tanh gates): a third of such weights would be lost.
    """
    total = float(shape.get("total_params_b") or 0.0) * 1e9
    if not total or shape.get("gated_mlp") or not shape.get("ffn_hidden_size"):
        return None
    gated = _spec(name, {**shape, "gated_mlp": True}, seq_len)
    short = _spec(name, shape, seq_len).parameters() < SHORT * total
    return gated if short and abs(gated.parameters() / total - 1.0) < NEAR else None


def _spec(name: str, shape: Shape, seq_len: int) -> ModelSpec:
    hidden, layers = _size(name, shape, "hidden_size"), _size(name, shape, "num_layers")
    if layers > MOST_LAYERS:
        raise ValueError(f"{layers} layers")
    gated = bool(shape.get("gated_mlp"))
    # GPT-2's line (plain feed-forward, tied embedding) learns its positions and has biases; ALiBi models learn none.
    gpt = not gated and bool(shape.get("tied_embeddings"))
    learned = gpt and "alibi" not in str(shape.get("notes") or "").lower()
    mixer = _mixer(name, shape, hidden, gpt)
    experts = int(shape.get("num_experts") or 0)
    dense = experts <= 1  # one expert is a dense layer
    first_dense = layers if dense else int(shape.get("first_k_dense") or 0)
    mtp = int(shape.get("mtp_layers") or 0)
    kinds: dict[str, LayerKind] = {}
    if first_dense:
        width = _size(name, shape, "ffn_hidden_size", 4 * hidden if gpt or shape.get("gated_mlp") is None else None)
        kinds["dense"] = LayerKind(mixer=mixer, mlp=DenseMlp(width=width, gated=gated, bias=gpt))
    if not dense:
        kinds["moe"] = LayerKind(mixer=mixer, mlp=_moe(name, shape, gated))
    counts = {"dense": first_dense, "moe": layers - first_dense}
    return ModelSpec(
        name=name,
        hidden_size=hidden,
        vocab_size=_size(name, shape, "vocab_size", _published(name, "vocab_size")),
        max_position_embeddings=seq_len if learned else LONGEST,
        kinds=kinds,
        layers=tuple(f"{count}*{kind}" for kind, count in counts.items() if count),
        tied_embeddings=bool(shape.get("tied_embeddings")),
        learned_positions=learned,
        norm="rms" if gated else "layer",
        mtp=Mtp(layers=mtp, kind="dense" if dense else "moe") if mtp else None,
        source=str(shape.get("hf_or_source") or ""),
    )


def _mixer(name: str, shape: Shape, hidden: int, bias: bool) -> Attention | LatentAttention:
    heads = _size(name, shape, "num_attention_heads")
    if shape.get("mla"):
        mla = shape["mla"]
        return LatentAttention(heads=heads, **{key: mla[key] for key in LATENT if mla.get(key) is not None})
    return Attention(
        heads=heads,
        kv_heads=_size(name, shape, "num_kv_heads", heads),
        head_dim=_size(name, shape, "head_dim", max(hidden // heads, 1)),
        window=_published(name, "window"),
        qkv_bias=bias,
        out_bias=bias,
    )


LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _moe(name: str, shape: Shape, gated: bool) -> MoeMlp:
    width = _size(name, shape, "moe_ffn_hidden_size", shape.get("ffn_hidden_size"))
    shared = shape.get("shared_expert_ffn")
    return MoeMlp(
        experts=_size(name, shape, "num_experts"),
        top_k=_size(name, shape, "moe_top_k"),
        width=width,
        gated=gated,
        shared_width=int((shape.get("num_shared_experts") or 0) * width if shared is None else shared),
    )


def _size(name: str, shape: Shape, key: str, otherwise: int | None = None) -> int:
    value = shape.get(key) or otherwise
    if value is None:
        raise Unpriceable(f"unknown model shape: {name} has no {key}")
    return int(value)


def _published(name: str, key: str) -> int | None:
    """What a family's published configuration says of a model that goes by that name."""
    return next((size for pattern, size in _published_sizes()[key]["sizes"].items() if re.match(pattern, name)), None)


@cache
def _published_sizes() -> dict[str, Any]:
    return read_document(Path(__file__).parent / "published_sizes.yaml")
