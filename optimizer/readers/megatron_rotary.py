"""Scaling of rotary positions as the options of a job of the Megatron family have it, the exporters' settings read back.

Constants that no option gives are the framework's own (exporters.megatron_rotary names their sources).
"""

from __future__ import annotations

import re
from typing import Any

from ..exporters.megatron_rotary import LLAMA3, LLAMA3_FACTOR, YARN
from .options import Knobs

LATENT = {
    "factor": "yarn_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_max_position_embeddings": "latent_original",
}
PLAIN = {
    **LATENT,
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "original_max_position_embeddings": "yarn_original",
}
BRIDGE_PLAIN = {
    **PLAIN,
    "factor": "plain_yarn_factor",
    "mscale": "plain_mscale",
    "mscale_all_dim": "plain_mscale_all_dim",
}
MINDSPEED = {**LATENT, "factor": "rope_factor", "original_max_position_embeddings": "yarn_original"}
MINDSPEED_LLAMA3 = {
    "factor": "rope_factor",
    "original_max_position_embeddings": "llama3_original",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
}
"""Field of a RopeScaling → the knob of its value, by the kind of attention and the framework."""


def rope_scaling(knobs: Knobs) -> dict[str, Any] | None:
    """The fields of the job's RopeScaling; None where its options ask for none, a factor of 1 included."""
    kind = knobs.text("scaling_type")
    if kind is not None:
        return {"rope_type": kind, **_figures(knobs, MINDSPEED_LLAMA3 if kind == "llama3" else MINDSPEED)}
    if knobs.has("llama3_scaling"):
        passed_on = knobs.names["llama3_scaling"].startswith("model.")  # Megatron-LM builds its model without the option
        return {"rope_type": "llama3", **LLAMA3, "factor": figure(knobs, "rope_factor") if passed_on else LLAMA3_FACTOR}
    latent = knobs.has("mla") and knobs.text("rope_type") != "rope"
    if not latent and knobs.text("positions") != "yarn":
        return None
    bridge = knobs.has("plain_yarn_factor")
    found = _figures(knobs, LATENT if latent else BRIDGE_PLAIN if bridge else PLAIN)
    if found.get("factor", 1.0) == 1.0:
        return None
    rounded = {} if latent else {"truncate": knobs.has("yarn_rounded") if bridge else not knobs.has("yarn_unrounded")}
    return {"rope_type": "yarn", **YARN, **found, **rounded}


def scales_queries(knobs: Knobs) -> bool:
    """Whether YaRN scales queries and keys: as long as its two factors do not cancel (arXiv 2309.00071, 3.4), or none is given."""
    scaling = rope_scaling(knobs)
    if scaling is None:
        return knobs.text("positions") == "yarn" and not any(map(knobs.has, ("yarn_factor", "plain_yarn_factor")))
    return scaling["rope_type"] == "yarn" and bool(scaling.get("mscale", 1.0) != scaling.get("mscale_all_dim", 0.0))


def _figures(knobs: Knobs, table: dict[str, str]) -> dict[str, Any]:
    found = {field: figure(knobs, knob) for field, knob in table.items()}
    return {field: int(value) if "original" in field else value for field, value in found.items() if value is not None}


def figure(knobs: Knobs, knob: str) -> float | None:
    """The value of a knob that need be no whole number; None where it is not given or is no such figure."""
    text = knobs.text(knob) or ""
    return float(text) if re.fullmatch(r"\d{1,9}(\.\d{0,9})?", text) else None
