"""A model of another size: the same kinds of layer, width and depth grown alike."""

from __future__ import annotations

import math

from .errors import InputError
from .layer_kinds import Attention, DenseMlp, LatentAttention, LayerKind, MoeMlp
from .layer_pattern import MAX_LAYERS, compact
from .model import ModelSpec

WIDTH_MULTIPLE, HIDDEN_MULTIPLE, HEAD_MULTIPLE, LAYER_MULTIPLE = 256, 256, 16, 4
"""What sizes are rounded to, so that degrees of parallelism divide them."""
HALVINGS = 40
WITHIN = 0.1  # of the size asked for


def scaled(model: ModelSpec, parameters: float) -> ModelSpec:
    """The model with about so many parameters, within a tenth: hidden size, heads, MLP widths and layers times one factor.

    Experts, their top-k and head dimensions stay, as does the vocabulary. InputError for kinds of layer whose sizes do not
    follow from one factor, and for sizes that cannot be met.
    """
    low, high, best = 1e-3, 1e3, model
    for _ in range(HALVINGS):
        factor = (low * high) ** 0.5
        if factor * model.num_layers > MAX_LAYERS:
            high = factor
            continue
        grown = _times(model, factor)
        count = grown.parameters()
        low, high = (factor, high) if count < parameters else (low, factor)
        if abs(count - parameters) < abs(best.parameters() - parameters):
            best = grown
    if abs(best.parameters() / parameters - 1.0) > WITHIN:
        raise InputError(f"sizes: {model.name} cannot be given {parameters:.3g} parameters; the nearest is {best.parameters():.3g}")
    return best


def _times(model: ModelSpec, factor: float) -> ModelSpec:
    layers = _rounded(model.num_layers * factor, LAYER_MULTIPLE)
    kinds = [model.layer_kinds[place * model.num_layers // layers] for place in range(layers)]
    return model.model_copy(
        update={
            "hidden_size": _rounded(model.hidden_size * factor, HIDDEN_MULTIPLE),
            "kinds": {name: _kind(model, kind, factor) for name, kind in model.kinds.items()},
            "layers": compact(kinds),
        }
    )


def _kind(model: ModelSpec, kind: LayerKind, factor: float) -> LayerKind:
    mixer, mlp = kind.mixer, kind.mlp
    if not isinstance(mixer, Attention | LatentAttention) or not isinstance(mlp, DenseMlp | MoeMlp | None):
        raise InputError(f"sizes: {model.name} has layers that do not grow by one factor; use a model of attention and MLPs")
    kv_heads = mixer.kv_heads if isinstance(mixer, Attention) else 1
    grouped = kv_heads < mixer.heads
    heads = _rounded(mixer.heads * factor, math.lcm(HEAD_MULTIPLE, kv_heads) if grouped else HEAD_MULTIPLE)
    changed: dict[str, object] = {"mixer": mixer.model_copy(update={"heads": heads} | ({} if grouped else {"kv_heads": heads}))}
    if mlp is not None:
        names = ["width", *(["shared_width"] if isinstance(mlp, MoeMlp) and mlp.shared_width else [])]
        changed["mlp"] = mlp.model_copy(update={name: _rounded(getattr(mlp, name) * factor, WIDTH_MULTIPLE) for name in names})
    return kind.model_copy(update=changed)


def _rounded(value: float, multiple: int) -> int:
    return max(1, round(value / multiple)) * multiple
