"""Scaling of rotary positions as settings of the Megatron family: Llama 3.1's, and YaRN for latent and for plain attention.

What a release cannot be told is not set, and a note says so. Sources: Megatron-LM megatron/core/models/common/embeddings
(rotary_pos_embedding.py and yarn_rotary_pos_embedding.py), multi_latent_attention.py and megatron/training/argument_utils.py;
Megatron-Bridge models/gpt_provider.py; MindSpeed-LLM core/models/common/embeddings/rotary_pos_embedding.py.
"""

from __future__ import annotations

from ...search_spaces.model import LatentAttention, RopeScaling
from .knobs import Settings
from .megatron_model import MegatronRequest

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of Llama 3.1's scaling in Megatron-Core; GPTModel is built without --rope-scaling-factor, so 8 is one of them."""
LLAMA3_FACTOR = 8.0
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
"""Fields of Megatron-Core's latent attention that Megatron-LM has no options for."""


def scaled_positions(asked: MegatronRequest) -> str:
    """The kind of position embedding: yarn is one for plain attention of Megatron-Core, and a setting of its own elsewhere."""
    if asked.spec.learned_positions:
        return "learned_absolute"
    scaling, latent = asked.spec.rope_scaling, isinstance(asked.architecture.attention, LatentAttention)
    stretched = scaling is not None and scaling.rope_type == "yarn" and obstacle(asked) is None
    return "yarn" if stretched and not latent and not asked.speaks.has("scaling_type") else "rope"


def scaling_settings(asked: MegatronRequest) -> Settings:
    """Everything that stretches rotary positions; latent attention of Megatron-Core is told also that nothing does."""
    scaling, latent, speaks = asked.spec.rope_scaling, isinstance(asked.architecture.attention, LatentAttention), asked.speaks
    if asked.spec.learned_positions:
        return []
    if scaling is None or obstacle(asked) is not None:
        return [speaks.set("yarn_factor", 1.0)] if latent and not speaks.has("scaling_type") else []
    if speaks.has("scaling_type"):
        return _mindspeed(asked, scaling)
    if scaling.rope_type == "llama3":
        return [speaks.set("llama3_scaling"), speaks.set("rope_factor", scaling.factor)]
    if latent:
        own = {"latent_original": scaling.original_max_position_embeddings, **_betas(scaling)}
        told = speaks.sets(yarn_factor=scaling.factor, **_scales(scaling))
        return [*told, *(speaks.set(knob, value) for knob, value in own.items() if speaks.has(knob))]
    return _plain(asked, scaling)


def _plain(asked: MegatronRequest, scaling: RopeScaling) -> Settings:
    """YaRN of attention that is not latent; Megatron-Bridge has fields for it alone, and rounds only if told to."""
    put, has = asked.speaks.set, asked.speaks.has
    prefix = "plain_" if has("plain_yarn_factor") else ""
    told = {f"{prefix}{knob}": value for knob, value in {"yarn_factor": scaling.factor, **_scales(scaling)}.items()}
    told |= {"yarn_original": scaling.original_max_position_embeddings}
    told |= {f"yarn_{knob}": value for knob, value in _betas(scaling).items()}
    rounding = "yarn_rounded" if scaling.truncate else "yarn_unrounded"
    return [*(put(knob, value) for knob, value in told.items()), *([put(rounding)] if has(rounding) else [])]


def scaling_note(asked: MegatronRequest) -> str | None:
    """What of the scaling is not set, and why; None where all is."""
    scaling = asked.spec.rope_scaling
    if asked.spec.learned_positions:
        return None
    if scaling is None:
        return (
            "rotary positions are not scaled, as the model's description has no rope_scaling: where its config.json has one, give "
            "that in the description and export again"
        )
    reason = obstacle(asked)
    return (
        reason and f"rope_scaling {scaling.rope_type} of the model is not set, and positions turn as if there were none: {reason}"
    )


def obstacle(asked: MegatronRequest) -> str | None:
    """Why the model's scaling cannot be told to this release, or None."""
    scaling, latent = asked.spec.rope_scaling, isinstance(asked.architecture.attention, LatentAttention)
    if scaling is None:
        return None
    if scaling.rope_type not in ("llama3", "yarn"):
        return f"{asked.speaks.title} has no options for this kind"
    if scaling.lacking:
        return f"the model's description has no {scaling.lacking}"
    if scaling.attention_factor is not None:
        return "it computes YaRN's factor of queries and keys itself, and cannot be given attention_factor"
    if scaling.rope_type == "llama3" and latent:
        return "latent attention has YaRN alone"
    if latent and not scaling.truncate:
        return "latent attention ends YaRN's range at whole dimensions (truncate: true)"
    if asked.speaks.has("scaling_type"):
        return _mindspeed_obstacle(asked, scaling, latent)
    if scaling.rope_type == "llama3":
        passed_on = asked.speaks.framework == "megatron-bridge"
        return _fixed(scaling, LLAMA3 if passed_on else {**LLAMA3, "factor": LLAMA3_FACTOR})
    return _latent_obstacle(asked, scaling) if latent else _plain_obstacle(asked)


def _latent_obstacle(asked: MegatronRequest, scaling: RopeScaling) -> str | None:
    if asked.speaks.has("latent_original"):
        return None
    if asked.speaks.core >= (0, 14):
        return _fixed(scaling, YARN)
    if scaling.mscale != scaling.mscale_all_dim:
        return "it scales the softmax by mscale instead of mscale_all_dim before 0.14"
    longest = max(asked.spec.max_position_embeddings, asked.problem.workload.seq_len)
    return _fixed(scaling, {**YARN, "original_max_position_embeddings": longest})  # that option is read for it


def _plain_obstacle(asked: MegatronRequest) -> str | None:
    if not asked.speaks.has("yarn_original"):
        return f"{asked.speaks.title} has no options of YaRN for attention that is not latent"
    return "MTP layers turn positions plainly" if asked.spec.mtp else None


def _fixed(scaling: RopeScaling, constants: dict[str, float]) -> str | None:
    """Where the model has another value than the framework's own constant."""
    wanted = {name: getattr(scaling, name) for name in constants}
    other = [f"{name} {wanted[name]:g}, not {value:g}" for name, value in constants.items() if wanted[name] != value]
    return f"it has no option for {' and '.join(other)}" if other else None


def _scales(scaling: RopeScaling) -> dict[str, float]:
    return {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}


def _betas(scaling: RopeScaling) -> dict[str, float]:
    return {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}


def _mindspeed(asked: MegatronRequest, scaling: RopeScaling) -> Settings:
    put, original = asked.speaks.set, scaling.original_max_position_embeddings
    chosen = [put("scaling_type", scaling.rope_type), put("rope_factor", scaling.factor)]
    if scaling.rope_type == "llama3":
        ends = ("low_freq_factor", "high_freq_factor")
        return [*chosen, put("llama3_original", original), *(put(name, getattr(scaling, name)) for name in ends)]
    whole = {knob: int(value) for knob, value in _betas(scaling).items()}
    told = {**_scales(scaling), **whole, "yarn_original": original}
    return [*chosen, *(put(knob, value) for knob, value in told.items())]


def _mindspeed_obstacle(asked: MegatronRequest, scaling: RopeScaling, latent: bool) -> str | None:
    if scaling.rope_type == "llama3" or latent:
        return _whole_betas(scaling)
    longest = max(asked.spec.max_position_embeddings, asked.problem.workload.seq_len)
    if not scaling.truncate:
        return "it ends YaRN's range at whole dimensions (truncate: true)"
    if longest != (scaling.factor or 0) * (scaling.original_max_position_embeddings or 0):
        return f"it takes {longest} / {scaling.original_max_position_embeddings} for the factor, not {scaling.factor:g}"
    return _whole_betas(scaling)


def _whole_betas(scaling: RopeScaling) -> str | None:
    return None if all(value == int(value) for value in _betas(scaling).values()) else "beta_fast and beta_slow are whole numbers"
