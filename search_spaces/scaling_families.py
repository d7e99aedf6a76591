"""Scaling families: models of 3 billion to 100 trillion parameters, all shaped by one rule.

`dense:70B` and `moe:10T` name them. A dense model has grouped-query attention with heads of 128 and a gated MLP; a model of
experts has the same attention, one shared expert and fine-grained routed ones, 8 a token. Per layer, with hidden size h, width w
and kv key heads:

    attention  2·h² + 2·h·128·kv     dense MLP  3·h·w     experts  (E + 1)·3·h·w + router h·E + E

and 2·131,072·h for embedding and LM head. The rule:

1. E = 128 experts up to 200 billion parameters, 256 up to two trillion, 512 beyond; kv = 8, and 16 from h = 16,384 on.
2. h is where a model of h/128 layers has the size asked for if w = 3.5·h (dense) or w = h/4 (experts): between the aspect ratios of
   Llama 3.1 405B (130), DeepSeek-V3 (117) and wider models. It is rounded to a multiple of 1,024, from 16,384 on of 2,048.
3. Layers are a multiple of 4 within a fifth of h/128, below 32 of 2; w makes up for what rounding left, as a multiple of 256
   (dense) or 64 (experts; 16 below h = 4,096). The depth nearest to h/128 is taken of those that come within half a per cent of
   the size, or else the one that comes nearest to it.

Powers of two up to 16, mostly 64, thus divide what tensor and expert parallelism split.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import InputError
from .model import Attention, DenseMlp, LayerKind, ModelSpec, MoeMlp

VOCABULARY = 131_072
HEAD = 128
POSITIONS = 131_072
TOP_K = 8
WIDE = 16_384  # hidden size from which on there are 16 key heads and sizes are rounded to 2,048
NARROW, NARROW_EXPERTS = 4096, 16  # hidden size up to which experts' widths are multiples of 16
SHALLOW = 32
CLOSE = 0.005
SMALLEST, LARGEST = 3e9, 100e12
UNITS = {"B": 1e9, "T": 1e12}
NAME = re.compile(r"(?P<family>[a-z]+):(?P<size>.*)")


@dataclass(frozen=True)
class Family:
    """What tells families apart: w/h as a rule, and what w is a multiple of."""

    width_ratio: float
    width_multiple: int
    experts: bool


FAMILIES = {"dense": Family(3.5, 256, False), "moe": Family(0.25, 64, True)}


def is_family(name: str) -> bool:
    """Whether a model's name is one of a family: `moe:600B`."""
    found = NAME.fullmatch(name)
    return found is not None and found["family"] in FAMILIES


def member_name(family: str, size: object) -> str:
    """`moe:1.8T` for a family and a size; InputError where there is no such family or size."""
    if family not in FAMILIES:
        raise InputError(f"family = {family!r}: must be one of {', '.join(FAMILIES)}")
    parameters(str(size))
    return f"{family}:{str(size).strip().upper()}"


def parameters(size: str, where: str = "sizes") -> float:
    """Parameters that a size names: 7B, 1.8T; InputError, which says where it was given, for what is no size of a family."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([BT])", size.strip().upper())
    count = float(found[1]) * UNITS[found[2]] if found else 0.0
    if not SMALLEST <= count <= LARGEST:
        raise InputError(f"{where}: {size!r} must be a number of billions or trillions from 3B to 100T, such as 70B or 1.8T")
    return count


def family_model(name: str) -> ModelSpec:
    """The model of a family by its name, shaped by the rule above."""
    family, _, size = name.partition(":")
    rule, wanted, size = FAMILIES[family], parameters(size, f"model: {name}"), size.strip().upper()
    experts = expert_count(wanted) if rule.experts else 0
    hidden = _hidden(wanted, rule, experts)
    kv = 16 if hidden >= WIDE else 8
    depths = _depths(hidden)
    shapes = [(layers, _width(wanted, rule, experts, hidden, kv, layers)) for layers in depths]
    layers, width = min(shapes, key=lambda shape: _distance(_total(experts, hidden, kv, *shape) / wanted, shape[0], hidden))
    attention = Attention(kind="attention", heads=hidden // HEAD, kv_heads=kv, head_dim=HEAD)
    return ModelSpec(
        name=f"{family}:{size}",
        hidden_size=hidden,
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        kinds={family: LayerKind(mixer=attention, mlp=_mlp(experts, width))},
        layers=(f"{layers}*{family}",),
        source=f"the {family} family of paraplan sweep at {size}; no published model has these sizes",
    )


def expert_count(wanted: float) -> int:
    """Routed experts of a layer by the model's parameters."""
    return 128 if wanted <= 200e9 else 256 if wanted <= 2e12 else 512


def _mlp(experts: int, width: int) -> DenseMlp | MoeMlp:
    if not experts:
        return DenseMlp(kind="mlp", width=width)
    return MoeMlp(
        kind="moe",
        experts=experts,
        top_k=TOP_K,
        width=width,
        shared_width=width,
        router_expert_bias=True,
        score_function="sigmoid",
    )


def _hidden(wanted: float, rule: Family, experts: int) -> int:
    """h of (h/128)·h²·(2 + 3·(E + 1)·w/h) = size, rounded; key heads, router and embedding are left to the width."""
    exact = float((wanted * HEAD / (2.0 + 3.0 * (experts + 1) * rule.width_ratio)) ** (1.0 / 3.0))
    multiple = 2048 if exact >= WIDE else 1024
    return max(1, round(exact / multiple)) * multiple


def _depths(hidden: int) -> list[int]:
    """Multiples of 4, of 2 below 32, within a fifth of h/128."""
    low, high = 0.8 * hidden / HEAD, 1.2 * hidden / HEAD
    return [depth for depth in range(2, int(high) + 1, 2) if depth >= low and (depth < SHALLOW or depth % 4 == 0)]


def _distance(size: float, layers: int, hidden: int) -> tuple[float, float]:
    """What a depth is chosen by; `size` is over the one asked for."""
    return max(abs(size - 1.0), CLOSE), abs(layers - hidden / HEAD)


def _width(wanted: float, rule: Family, experts: int, hidden: int, kv: int, layers: int) -> int:
    left = wanted - _total(experts, hidden, kv, layers, 0)
    each = left / (layers * (experts + 1) * 3 * hidden)
    multiple = NARROW_EXPERTS if rule.experts and hidden < NARROW else rule.width_multiple
    return max(1, round(each / multiple)) * multiple


def _total(experts: int, hidden: int, kv: int, layers: int, width: int) -> int:
    attention = 2 * hidden * hidden + 2 * hidden * HEAD * kv
    return layers * (attention + (experts + 1) * 3 * hidden * width + experts * (hidden + 1)) + 2 * VOCABULARY * hidden
