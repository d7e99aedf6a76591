"""The rule of the scaling families: sizes come out as asked, and shapes divide."""

from __future__ import annotations

import numpy as np
import pytest
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.inputs import load_model
from paraplan.search_spaces.model import DenseMlp, MoeMlp
from paraplan.search_spaces.scaling_families import FAMILIES, family_model, is_family, member_name, parameters

SIZES = [f"{billions:.3f}B" for billions in np.geomspace(3, 100_000, 60).round(3)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_size_comes_out_within_two_per_cent(family: str) -> None:
    models = {size: family_model(member_name(family, size)) for size in SIZES}
    off = {size: model.parameters() / parameters(size) - 1.0 for size, model in models.items()}
    assert max(map(abs, off.values())) < 0.02, max(off, key=lambda size: abs(off[size]))
    assert all(0.6 < model.hidden_size / model.num_layers / 128 < 1.6 for model in models.values())


def test_shapes_divide_by_the_degrees_that_split_them() -> None:
    for size in ("7B", "70B", "600B", "1.8T", "10T"):
        model = family_model(member_name("moe", size))
        mlp, mixer = model.kinds["moe"].mlp, model.kinds["moe"].mixer
        assert isinstance(mlp, MoeMlp)
        assert mlp.experts in (128, 256, 512)
        assert mlp.width % 16 == mixer.heads % mixer.kv_heads == model.hidden_size % 1024 == 0  # type: ignore[union-attr]
        dense = family_model(member_name("dense", size)).kinds["dense"].mlp
        assert isinstance(dense, DenseMlp)
        assert dense.width % 256 == 0


def test_active_parameters_of_experts_are_near_those_of_published_models_of_the_size() -> None:
    """DeepSeek-V3: 37 of 671 billion; Kimi K2: 32 of 1,040."""
    assert 25e9 < family_model("moe:671B").active_parameters() < 50e9
    assert 30e9 < family_model("moe:1.04T").active_parameters() < 60e9


@pytest.mark.parametrize("size", ["7", "0B", "2B", "101T", "7b!", "1e3B", "", "9999999B"])
def test_a_size_out_of_range_or_shape_is_refused(size: str) -> None:
    with pytest.raises(InputError, match="from 3B to 100T"):
        member_name("dense", size)


@pytest.mark.parametrize("name", ["dense:70B", "moe:1.8T"])
def test_a_member_is_a_model_wherever_one_is_named(name: str) -> None:
    assert load_model(name) == load_model(name.lower()) == family_model(name)
    with pytest.raises(InputError, match=f"^model: {name}B: .* from 3B to 100T"):
        load_model(f"{name}B")


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(InputError, match="dense, moe"):
        member_name("hybrid", "7B")
    assert is_family("moe:10T")
    assert not is_family("moe-10t")
