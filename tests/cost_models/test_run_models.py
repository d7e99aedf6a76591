"""Shapes of published models: what their own figures say of each other."""

from __future__ import annotations

from typing import Any

import pytest
from paraplan.cost_models.run_models import model_spec
from paraplan.search_spaces.model import DenseMlp

GEMMA: dict[str, Any] = {
    **{"num_layers": 42, "hidden_size": 3584, "num_attention_heads": 16, "num_kv_heads": 8, "head_dim": 256},
    **{"ffn_hidden_size": 14336, "gated_mlp": False, "vocab_size": 256000, "tied_embeddings": True, "total_params_b": 9.0},
}
"""Gemma 2 9B: 42·(3·3584·14336 + 2·3584·256·(16 + 8)) + 256000·3584 = 9.2e9 weights, 7.1e9 with two feed-forward matrices."""


@pytest.mark.parametrize(
    ("told", "gated"),
    [({}, True), ({"total_params_b": 7.1}, False), ({"total_params_b": None}, False), ({"total_params_b": 12.0}, False)],
    ids=["only gated comes to the total", "ungated does", "no total", "neither does"],
)
def test_a_total_of_parameters_tells_gated_layers(told: dict[str, Any], gated: bool) -> None:
    spec = model_spec("gemma", {"gemma": {**GEMMA, **told}}, 4096)
    mlp = spec.kinds["dense"].mlp
    assert isinstance(mlp, DenseMlp) and mlp.gated is gated
    hand = 42 * ((3 if gated else 2) * 3584 * 14336 + 2 * 3584 * 256 * (16 + 8)) + 256000 * 3584
    assert spec.parameters() == pytest.approx(hand, rel=5e-3)


def test_a_shape_without_a_width_keeps_four_times_the_hidden_size() -> None:
    """GPT's: nothing is said of gates, and no total makes up for a width that is not told."""
    spec = model_spec("gpt", {"gpt": {**GEMMA, "gated_mlp": None, "ffn_hidden_size": None}}, 4096)
    mlp = spec.kinds["dense"].mlp
    assert isinstance(mlp, DenseMlp) and not mlp.gated and mlp.width == 4 * 3584
