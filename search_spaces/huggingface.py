"""Models from a Hugging Face config.json.

Only the language model of a multimodal config is read; its vision and audio towers are left out. Nothing is guessed: an unknown
model_type is refused with what a ModelSpec of it needs, and fields are read by the rules in model_families.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from .config_fields import Fields
from .config_mixers import NamedMixer
from .config_mlps import NamedMlp
from .documents import MAX_BYTES, sentence, to_record
from .errors import InputError
from .layer_pattern import compact
from .model import LayerKind, ModelSpec, Mtp, RopeScaling
from .model_families import FAMILIES, Family

__all__ = ["from_config"]

NORM_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps")
SPEC_EXAMPLE = """\
name: my-model
hidden_size: 4096
vocab_size: 128256
max_position_embeddings: 8192
kinds:
  dense:
    mixer: {kind: attention, heads: 32, kv_heads: 8, head_dim: 128}
    mlp: {kind: mlp, width: 14336}
  moe:
    mixer: {kind: attention, heads: 32, kv_heads: 8, head_dim: 128}
    mlp: {kind: moe, experts: 64, top_k: 6, width: 1408, shared_width: 2816}
layers: [dense, 31*moe]
"""


def from_config(path: Path | str) -> ModelSpec:
    """The model of a config.json, or of the folder that holds one, named after its file or folder; or of a ModelSpec as JSON.

    InputError for a file that cannot be read as a config, a model_type without a family, and a field that is missing or invalid.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    config = _read(file)
    if "kinds" in config and "model_type" not in config:
        return to_record(ModelSpec, config, str(file))
    return from_mapping(config, _name(file), str(file), "Hugging Face config.json")


def from_mapping(config: dict[str, object], name: str, where: str, source: str) -> ModelSpec:
    """The model of the fields of a config.json, wherever they stand; `where` names that in errors, `source` in the record."""
    fields, family, model_type = _family(config, where)
    try:
        return _spec(name, fields, config, family, f"{source}, model_type {model_type}")
    except ValidationError as error:
        raise InputError(sentence(error, ModelSpec, where)) from error


def _read(file: Path) -> dict[str, object]:
    """The config as a mapping. Unlike other inputs it may hold a bare Infinity: published ones do (Nemotron's time_step_limit)."""
    if not file.is_file():
        raise InputError(f"{file}: there is no such file; give a config.json or the folder that holds it")
    try:
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise InputError(
                f"{file}: has {size:,} bytes, more than any config.json ({MAX_BYTES:,} are read); give the model's own"
            )
        config = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}; give a readable config.json") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise InputError(
            f"{file}: is not complete JSON: {error.msg}, line {error.lineno} column {error.colno}; copy the published file again"
        ) from error
    except RecursionError as error:
        raise InputError(f"{file}: is nested too deeply for a config.json; copy the published file again") from error
    except ValueError as error:  # a number with thousands of digits
        raise InputError(f"{file}: holds a number that cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{file}: holds a {type(config).__name__} where an object of fields is needed; give the model's own")
    return config


def _family(config: dict[str, object], file: str) -> tuple[Fields, Family, str]:
    """The fields of the language model and the family that reads them; a multimodal config holds them in text_config."""
    inner = config.get("text_config")
    values, path = (inner, "text_config.") if isinstance(inner, dict) else (config, "")
    model_type = values.get("model_type", config.get("model_type"))
    if model_type is None:
        raise InputError(f"{file}: model_type is missing; give one of {', '.join(sorted(FAMILIES))}")
    if not isinstance(model_type, str):
        raise InputError(f"{file}: {path}model_type is {model_type!r}; it must be text such as 'llama'")
    family = FAMILIES.get(model_type.removesuffix("_text"))
    if family is None:
        raise InputError(_unknown(file, model_type))
    return Fields(file, values, family.defaults, path), family, model_type


def _unknown(file: str, model_type: str) -> str:
    return (
        f"{file}: model_type is {model_type!r}, which paraplan does not read; known are {', '.join(sorted(FAMILIES))}. "
        "Describe the model in a ModelSpec YAML instead and give that file: name, hidden_size, vocab_size, "
        "max_position_embeddings, the kinds of its layers (mixer: attention, mla, compressed, gated_delta_net, lightning or "
        f"mamba2; mlp: mlp or moe) and layers, their order. For example:\n{SPEC_EXAMPLE}"
    )


def _name(file: Path) -> str:
    return (file.resolve().parent.name if file.name == "config.json" else file.stem).lower() or "model"


def _spec(name: str, fields: Fields, config: dict[str, object], family: Family, source: str) -> ModelSpec:
    depth = family.depth(fields)
    parts = list(zip(family.mixers(fields, depth), family.mlps(fields, depth), strict=True))
    mtp_layers = family.mtp_layers(fields)
    extra = [family.mtp_layer(fields, depth) if family.mtp_layer else parts[-1]] if mtp_layers else []
    names = _kind_names([*parts, *extra])
    kinds = {kind: _kind(*part, family.norms_per_part) for kind, part in zip(names, [*parts, *extra], strict=True)}
    return ModelSpec(
        name=name,
        hidden_size=fields.count("hidden_size", "n_embd"),
        vocab_size=fields.count("vocab_size"),
        max_position_embeddings=fields.count("max_position_embeddings", "n_positions"),
        kinds=kinds,
        layers=compact(names[:depth]),
        tied_embeddings=_tied(fields, config),
        learned_positions=family.learned_positions,
        norm=family.norm,
        residual_streams=family.residual_streams(fields),
        mtp=Mtp(layers=mtp_layers, kind=names[-1]) if mtp_layers else None,
        norm_epsilon=fields.optional(*NORM_EPSILONS),
        rope_theta=_rope_theta(fields),
        rope_scaling=_rope_scaling(fields),
        source=source,
    )


def _rope_theta(fields: Fields) -> float | None:
    """It may stand in a section of its own."""
    return fields.section("rope_parameters").optional("rope_theta") or fields.optional("rope_theta")


UNSCALED = frozenset({"default", "mrope"})
"""Kinds of rotary positions that stretch nothing."""


def _rope_scaling(fields: Fields) -> RopeScaling | None:
    """The section on rope_scaling, whose type has two names; YaRN without a first context takes the model's (transformers)."""
    name = next((name for name in ("rope_scaling", "rope_parameters") if isinstance(fields.values.get(name), dict)), None)
    if name is None:
        return None
    section = fields.section(name)
    kind = section.values.get("rope_type") or section.values.get("type") or "default"
    if str(kind) in UNSCALED:
        return None
    given = {key: value for key, value in section.values.items() if key in RopeScaling.model_fields and value is not None}
    if kind == "yarn":
        given.setdefault("original_max_position_embeddings", fields.count("max_position_embeddings"))
    try:
        return RopeScaling.model_validate({**given, "rope_type": kind})
    except ValidationError as error:
        raise InputError(sentence(error, RopeScaling, f"{fields.file}: {fields.path}{name}")) from error


def _tied(fields: Fields, config: dict[str, object]) -> bool:
    """tie_word_embeddings may stand beside text_config instead of in it."""
    outer = Fields(fields.file, config, fields.defaults)
    return fields.flag("tie_word_embeddings", outer.flag("tie_word_embeddings", False))


def _kind_names(parts: Sequence[tuple[NamedMixer, NamedMlp]]) -> list[str]:
    """A name per layer, made of what tells its kind from the others: the mixer, the feed-forward part, or both."""
    mixers, mlps = {mixer for (mixer, _), _ in parts}, {mlp for _, (mlp, _) in parts}
    if len(mixers) == 1:
        return [mlp for _, (mlp, _) in parts]
    if len(mlps) == 1:
        return [mixer for (mixer, _), _ in parts]
    return ["_".join(filter(None, (mixer, mlp))) for (mixer, _), (mlp, _) in parts]


def _kind(mixer: NamedMixer, mlp: NamedMlp, norms_per_part: int) -> LayerKind:
    present = (mixer[1] is not None) + (mlp[1] is not None)
    return LayerKind(mixer=mixer[1], mlp=mlp[1], norms=norms_per_part * present)
