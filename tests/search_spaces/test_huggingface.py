"""Models come from Hugging Face configs, ModelSpec files and the catalog; all three give the published sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paraplan.search_spaces import huggingface
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.huggingface import SPEC_EXAMPLE, from_config
from paraplan.search_spaces.loading import load_model
from paraplan.search_spaces.model import (
    Attention,
    CompressedAttention,
    LatentAttention,
    LinearAttention,
    Mamba2,
    ModelSpec,
    MoeMlp,
    Mtp,
)
from paraplan.search_spaces.model_families import FAMILIES

CONFIGS = Path(__file__).parents[2].parent / "shared" / "hf_configs"
CATALOG = Path(huggingface.__file__).parent / "catalog" / "models"

# Counted independently from each config: language model, without MTP. Total; active; less input embedding; less LM head, too.
COUNTS = {
    "DeepSeek-MoE-16B": (16_375_728_128, 2_828_650_496, 2_618_935_296, 2_409_220_096),
    "DeepSeek-R1": (671_026_419_200, 37_552_297_472, 36_625_618_432, 35_698_939_392),
    "DeepSeek-V2-Lite": (15_706_484_224, 2_661_150_208, 2_451_435_008, 2_241_719_808),
    "DeepSeek-V3": (671_026_419_200, 37_552_297_472, 36_625_618_432, 35_698_939_392),
    "DeepSeek-V3.2": (671_877_944_064, 38_403_822_336, 37_477_143_296, 36_550_464_256),
    "GLM-4.5": (352_797_829_024, 33_632_266_144, 32_856_319_904, 32_080_373_664),
    "GLM-4.5-Air": (106_852_251_264, 13_424_129_664, 12_803_372_672, 12_182_615_680),
    "GLM-5": (743_911_218_432, 41_784_728_832, 40_833_146_112, 39_881_563_392),
    "GLM-5.1": (743_911_218_432, 41_784_728_832, 40_833_146_112, 39_881_563_392),
    "Gemma-3-27b": (27_009_346_304, 27_009_346_304, 27_009_346_304, 25_599_716_096),
    "Kimi-K2": (1_026_408_232_448, 32_861_500_928, 31_687_095_808, 30_512_690_688),
    "Kimi-K2.5": (1_026_408_232_448, 32_861_500_928, 31_687_095_808, 30_512_690_688),
    "Llama-3.1-405B": (405_853_388_800, 405_853_388_800, 403_752_042_496, 401_650_696_192),
    "Llama-3.1-70B": (70_553_706_496, 70_553_706_496, 69_503_033_344, 68_452_360_192),
    "Llama-3.1-8B": (8_030_261_248, 8_030_261_248, 7_504_924_672, 6_979_588_096),
    "Llama-3.2-3B": (3_212_749_824, 3_212_749_824, 3_212_749_824, 2_818_747_392),
    "Llama-4-Maverick": (400_711_848_960, 17_184_691_200, 16_150_205_440, 15_115_719_680),
    "MiniMax-M1": (456_089_655_296, 48_403_306_496, 47_174_113_280, 45_944_920_064),
    "MiniMax-M2": (228_689_764_864, 11_030_553_088, 10_415_956_480, 9_801_359_872),
    "MiniMax-M2.5": (228_689_764_864, 11_030_553_088, 10_415_956_480, 9_801_359_872),
    "Mixtral-8x22B": (140_620_634_112, 39_152_031_744, 38_955_423_744, 38_758_815_744),
    "Mixtral-8x7B": (46_702_792_704, 12_879_925_248, 12_748_853_248, 12_617_781_248),
    "Nemotron-3-Nano-30B-A3B": (31_577_940_288, 3_580_076_352, 3_227_754_816, 2_875_433_280),
    "Nemotron-3-Super-120B-A12B": (120_668_707_840, 12_770_237_440, 12_233_366_528, 11_696_495_616),
    "Nemotron-H-56B": (56_324_350_464, 56_324_350_464, 55_250_608_640, 54_176_866_816),
    "Qwen2-57B-A14B": (57_408_658_944, 14_249_270_784, 13_704_732_160, 13_160_193_536),
    "Qwen2.5-72B": (72_706_203_648, 72_706_203_648, 71_460_495_360, 70_214_787_072),
    "Qwen2.5-7B": (7_615_616_512, 7_615_616_512, 7_070_619_136, 6_525_621_760),
    "Qwen3-0.6B": (596_049_920, 596_049_920, 596_049_920, 440_467_456),
    "Qwen3-1.7B": (1_720_574_976, 1_720_574_976, 1_720_574_976, 1_409_410_048),
    "Qwen3-235B-A22B": (235_093_634_560, 22_190_763_520, 21_568_433_664, 20_946_103_808),
    "Qwen3-30B-A3B": (30_532_122_624, 3_353_032_704, 3_041_867_776, 2_730_702_848),
    "Qwen3-32B": (32_762_123_264, 32_762_123_264, 31_984_210_944, 31_206_298_624),
    "Qwen3-8B": (8_190_735_360, 8_190_735_360, 7_568_405_504, 6_946_075_648),
    "Qwen3-Coder-480B-A35B": (480_154_875_392, 35_474_765_312, 34_541_270_528, 33_607_775_744),
    "Qwen3-Next-80B-A3B": (79_674_391_296, 3_874_929_408, 3_563_764_480, 3_252_599_552),
    "Qwen3.5-122B-A10B": (122_111_526_912, 9_771_288_576, 9_008_449_536, 8_245_610_496),
    "Qwen3.5-35B-A3B": (34_660_610_688, 3_454_988_928, 2_946_429_568, 2_437_870_208),
    "gpt-oss-120b": (116_829_156_672, 5_711_982_912, 5_132_849_472, 4_553_716_032),
    "gpt-oss-20b": (20_914_757_184, 4_187_440_704, 3_608_307_264, 3_029_173_824),
    "gpt2": (124_439_808, 124_439_808, 124_439_808, 85_842_432),
    "gpt2-large": (774_030_080, 774_030_080, 774_030_080, 709_701_120),
}
PUBLISHED_ONLY = ("DeepSeek-V4-Flash", "MiMo-7B-Base")
DESIGNED = ("gpt3-175b", "megatron-1t", "moe-1.8t", "moe-10t")
ALL = (*COUNTS, *PUBLISHED_ONLY)


def config(name: str) -> ModelSpec:
    if not CONFIGS.is_dir():
        pytest.skip(f"the configs are not beside this repository ({CONFIGS})")
    return from_config(CONFIGS / f"{name}.json")


def catalog(name: str) -> ModelSpec:
    return load_model(CATALOG / f"{name.lower()}.yaml")


def counts(model: ModelSpec) -> tuple[int, int, int, int]:
    return (
        model.parameters(),
        model.active_parameters(),
        model.active_parameters(embedding=False),
        model.active_parameters(embedding=False, head=False),
    )


# Sizes


@pytest.mark.parametrize("name", COUNTS)
def test_a_config_gives_the_model_s_exact_size(name: str) -> None:
    assert counts(config(name)) == COUNTS[name]


@pytest.mark.parametrize("name", COUNTS)
def test_the_catalog_gives_the_model_s_exact_size(name: str) -> None:
    assert counts(catalog(name)) == COUNTS[name]


@pytest.mark.parametrize("name", ALL)
def test_the_catalog_holds_what_the_config_says(name: str) -> None:
    assert catalog(name) == config(name).model_copy(update={"source": catalog(name).source})


def test_every_catalog_model_is_tested_and_says_where_it_is_from() -> None:
    assert {path.stem for path in CATALOG.glob("*.yaml")} == {*(name.lower() for name in ALL), *DESIGNED}
    assert all(catalog(path.stem).name == path.stem and catalog(path.stem).source for path in CATALOG.glob("*.yaml"))


GEMMA = {
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
GEMMA_2 = {
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
GEMMA_3 = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
}
SCOUT = {
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 202048,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "tie_word_embeddings": False,
    "attention_chunk_size": 8192,
}


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ({"model_type": "gemma", **GEMMA}, 8.538e9),
        ({"model_type": "gemma2", **GEMMA_2}, 9.242e9),
        ({"model_type": "gemma3_text", "head_dim": 256, "vocab_size": 262144, **GEMMA_3}, 268.1e6),
        ({"model_type": "llama4_text", **SCOUT}, 107.8e9),
        ({"model_type": "llama4_text", **SCOUT, "num_local_experts": 128, "interleave_moe_layer_step": 2}, 400.7e9),
    ],
    ids=["Gemma 7B", "Gemma 2 9B", "Gemma 3 270M", "Llama 4 Scout", "Llama 4 Maverick"],
)
def test_sizes_of_models_whose_heads_or_experts_are_their_own(given: dict[str, Any], size: float, tmp_path: Path) -> None:
    """Attention of 16 heads · 256 is wider than a hidden size of 3,072; experts may be in every layer or in each second."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, **given}))
    assert from_config(path).parameters() == pytest.approx(size, rel=1e-3)


def test_deepseek_v4_flash_has_its_published_284b_and_13b() -> None:
    model = catalog("deepseek-v4-flash")
    assert model.parameters() == pytest.approx(284e9, rel=0.01)
    assert round(model.active_parameters(embedding=False) / 1e9) == 13


def test_mimo_7b_has_its_published_7_8b_with_mtp() -> None:
    assert catalog("mimo-7b-base").parameters(mtp=True) == pytest.approx(7.8e9, rel=0.01)


def test_glm_4_5_has_its_published_355b_with_mtp_in_and_embeddings_out() -> None:
    model = catalog("glm-4.5")
    assert model.parameters(mtp=True) - 2 * model.vocab_size * model.hidden_size == pytest.approx(355e9, rel=0.01)


def test_gpt3_and_megatron_1t_follow_the_megatron_formula() -> None:
    """arXiv 2104.04473 equation 2 leaves out the 2h weights of the final norm."""
    for name, layers, h in (("gpt3-175b", 96, 12288), ("megatron-1t", 128, 25600)):
        model = catalog(name)
        assert model.parameters() == 12 * layers * h * h + 13 * layers * h + (51200 + 2048) * h + 2 * h
    assert catalog("megatron-1t").parameters() == pytest.approx(1.008e12, rel=0.001)


def test_the_designed_moe_models_have_their_sizes() -> None:
    assert catalog("moe-1.8t").parameters() == pytest.approx(1.8e12, rel=0.01)
    assert catalog("moe-1.8t").active_parameters() == pytest.approx(280e9, rel=0.01)
    assert catalog("moe-10t").parameters() == pytest.approx(10e12, rel=0.01)


# What a config says about layers, family by family


def test_the_name_is_the_file_s_in_lower_case() -> None:
    assert config("Qwen3-30B-A3B").name == "qwen3-30b-a3b"


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("llama-3.1-8b", ("32*dense",)),
        ("deepseek-v3", ("3*dense", "58*moe")),
        ("gpt-oss-20b", ("12*(sliding full)",)),
        ("qwen3-next-80b-a3b", ("12*(3*linear full)",)),
        ("minimax-m1", ("10*(7*lightning full)",)),
        ("llama-4-maverick", ("12*(chunked_dense chunked_moe chunked_dense full_moe)",)),
        ("gemma-3-27b", ("10*(5*sliding full)", "2*sliding")),
        ("deepseek-v4-flash", ("2*window_hash_moe", "ratio4_hash_moe", "20*(ratio128_moe ratio4_moe)")),
    ],
)
def test_layers_are_in_the_model_s_order(name: str, layers: tuple[str, ...]) -> None:
    assert catalog(name).layers == layers


@pytest.mark.parametrize(
    ("name", "mtp"),
    [
        ("deepseek-v3", Mtp(layers=1, kind="moe")),
        ("kimi-k2", None),
        ("glm-4.5", Mtp(layers=1, kind="moe")),
        ("minimax-m2", Mtp(layers=3, kind="moe")),
        ("qwen3.5-35b-a3b", Mtp(layers=1, kind="full")),
        ("nemotron-3-super-120b-a12b", Mtp(layers=1, kind="attention_moe")),
        ("deepseek-v4-flash", Mtp(layers=1, kind="window_moe")),
        ("mimo-7b-base", Mtp(layers=1, kind="dense")),
        ("qwen3-next-80b-a3b", None),  # its config has no key for it
    ],
)
def test_mtp_layers(name: str, mtp: Mtp | None) -> None:
    assert catalog(name).mtp == mtp


def test_head_dim_is_the_quotient_only_where_it_is_absent() -> None:
    assert catalog("llama-3.1-8b").kinds["dense"].mixer == Attention(heads=32, kv_heads=8, head_dim=128)
    assert catalog("qwen3-0.6b").kinds["dense"].mixer == Attention(heads=16, kv_heads=8, head_dim=128, qk_norm="head")


def test_a_sliding_window_that_is_not_used_is_not_read() -> None:
    mixer = catalog("qwen2.5-7b").kinds["dense"].mixer
    assert mixer == Attention(heads=28, kv_heads=4, head_dim=128, qkv_bias=True)


def test_mla_ignores_head_dim_and_keeps_the_indexer() -> None:
    mixer = catalog("glm-5").kinds["moe"].mixer
    assert isinstance(mixer, LatentAttention)
    assert (mixer.qk_nope_head_dim, mixer.qk_rope_head_dim, mixer.v_head_dim) == (192, 64, 256)
    assert (mixer.indexer_heads, mixer.indexer_topk) == (32, 2048)


def test_deepseek_v2_lite_has_full_rank_queries_and_ungrouped_routing() -> None:
    kind = catalog("deepseek-v2-lite").kinds["moe"]
    assert isinstance(kind.mixer, LatentAttention) and kind.mixer.q_lora_rank is None
    assert isinstance(kind.mlp, MoeMlp) and not kind.mlp.router_expert_bias


def test_node_limited_routing_of_deepseek_v3() -> None:
    mlp = catalog("deepseek-v3").kinds["moe"].mlp
    assert isinstance(mlp, MoeMlp)
    assert (mlp.routing_groups, mlp.routing_groups_topk, mlp.score_function, mlp.router_expert_bias) == (8, 4, "sigmoid", True)


def test_gpt_oss_has_biases_sinks_and_windows() -> None:
    kinds = catalog("gpt-oss-120b").kinds
    full = Attention(heads=64, kv_heads=8, head_dim=64, qkv_bias=True, out_bias=True, sinks=True, scaled_rotary=True)
    assert kinds["full"].mixer == full
    assert kinds["sliding"].mixer == full.model_copy(update={"window": 128})
    assert isinstance(kinds["full"].mlp, MoeMlp) and kinds["full"].mlp.bias and kinds["full"].mlp.router_linear_bias


def test_llama4_has_a_shared_expert_that_no_key_names() -> None:
    kinds = catalog("llama-4-maverick").kinds
    assert isinstance(kinds["full_moe"].mlp, MoeMlp) and kinds["full_moe"].mlp.shared_width == 8192
    chunked = kinds["chunked_moe"].mixer
    assert isinstance(chunked, Attention) and (chunked.window, chunked.chunked) == (8192, True)


def test_nemotron_layers_hold_one_part_and_experts_work_in_a_latent_width() -> None:
    kinds = catalog("nemotron-3-super-120b-a12b").kinds
    assert isinstance(kinds["mamba"].mixer, Mamba2) and kinds["mamba"].mlp is None and kinds["mamba"].norms == 1
    assert isinstance(kinds["moe"].mlp, MoeMlp) and kinds["moe"].mixer is None
    assert (kinds["moe"].mlp.latent_size, kinds["moe"].mlp.gated, kinds["moe"].mlp.top_k) == (1024, False, 22)


def test_hybrid_qwen_alternates_a_delta_net_with_gated_attention() -> None:
    kinds = catalog("qwen3.5-122b-a10b").kinds
    assert kinds["linear"].mixer == LinearAttention(
        kind="gated_delta_net", key_heads=16, value_heads=64, key_head_dim=128, value_head_dim=128, conv_kernel=4
    )
    assert isinstance(kinds["full"].mixer, Attention) and kinds["full"].mixer.output_gate


def test_deepseek_v4_widens_the_residual_and_hashes_its_first_layers() -> None:
    model = catalog("deepseek-v4-flash")
    assert model.residual_streams == 4
    sparse, hashed = model.kinds["ratio4_moe"], model.kinds["ratio4_hash_moe"]
    assert isinstance(sparse.mixer, CompressedAttention) and sparse.mixer.overlapping and sparse.mixer.indexer_topk == 512
    assert isinstance(sparse.mlp, MoeMlp) and sparse.mlp.router_expert_bias
    assert isinstance(hashed.mlp, MoeMlp) and not hashed.mlp.router_expert_bias


def test_gpt2_uses_names_of_its_own() -> None:
    model = catalog("gpt2")
    assert (model.hidden_size, model.num_layers, model.max_position_embeddings) == (768, 12, 1024)
    assert model.learned_positions and model.tied_embeddings and model.norm == "layer"


# Small configs, written here

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}
QWEN_MOE: dict[str, Any] = LLAMA | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def read(folder: Path, values: Any) -> ModelSpec:
    file = folder / "config.json"
    file.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return from_config(file)


def refusal(folder: Path, values: Any) -> str:
    with pytest.raises(InputError) as caught:
        read(folder, values)
    assert str(folder / "config.json") in str(caught.value)
    return str(caught.value)


def test_a_folder_holding_a_config_will_do_and_names_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    model = read(folder, LLAMA)
    assert from_config(folder) == from_config(str(folder)) == model
    assert model.name == "my-model"


def test_null_counts_as_absent(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA | {"head_dim": None, "rope_scaling": None, "tie_word_embeddings": None}) == read(tmp_path, LLAMA)


@pytest.mark.parametrize(
    ("given", "normalized"),
    [
        ({}, False),  # the configuration class of qwen3_moe
        ({"norm_topk_prob": True}, True),
        ({"model_type": "qwen3_vl_moe"}, True),  # its router divides, and has no field for it
        ({"model_type": "mixtral", "num_local_experts": 8}, True),
    ],
)
def test_weights_of_experts_add_up_to_1_where_the_family_says_so(tmp_path: Path, given: dict[str, Any], normalized: bool) -> None:
    (kind,) = read(tmp_path, QWEN_MOE | given).kinds.values()
    assert isinstance(kind.mlp, MoeMlp) and kind.mlp.normalized_top_k == normalized


@pytest.mark.parametrize(
    ("given", "fraction"),
    [
        ({}, 1.0),
        ({"partial_rotary_factor": 0.5}, 0.5),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}}, 0.25),
        ({"rotary_dim": 8}, 0.5),  # of heads that are 16 wide, as MiniMax says it
        (
            QWEN_MOE | {"model_type": "qwen3_5_moe", "layer_types": ["full_attention"] * 4, "shared_expert_intermediate_size": 0},
            0.25,
        ),
    ],
)
def test_rotary_embedding_turns_a_part_of_every_head(tmp_path: Path, given: dict[str, Any], fraction: float) -> None:
    (kind,) = read(tmp_path, LLAMA | given).kinds.values()
    assert isinstance(kind.mixer, Attention) and kind.mixer.rotary_fraction == fraction


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; it must be at most 1"),
        ({"rope_parameters": {"partial_rotary_factor": 2}}, "rope_parameters.partial_rotary_factor is 2; it must be at most 1"),
        ({"rotary_dim": 17}, "rotary_dim is 17; it must be at most the width of a head, 16"),
    ],
)
def test_rotary_embedding_turns_no_more_than_a_head(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    assert words in refusal(tmp_path, LLAMA | given)


@pytest.mark.parametrize(
    ("section", "scaled"),
    [
        ({"rope_type": "yarn", "factor": 32.0}, True),
        ({"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}, False),  # as DeepSeek-V3's: they cancel
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0}, False),
        ({"rope_type": "llama3", "factor": 8.0}, False),
    ],
)
def test_yarn_scales_rotary_embedding_unless_its_factors_cancel(tmp_path: Path, section: dict[str, object], scaled: bool) -> None:
    (kind,) = read(tmp_path, LLAMA | {"rope_scaling": section}).kinds.values()
    assert isinstance(kind.mixer, Attention) and kind.mixer.scaled_rotary == scaled


def test_a_bare_infinity_is_accepted(tmp_path: Path) -> None:
    text = json.dumps(LLAMA | {"time_step_limit": [0.0, float("inf")]})
    assert "Infinity" in text and read(tmp_path, text) == read(tmp_path, LLAMA)


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    assert read(tmp_path, "\ufeff" + json.dumps(LLAMA)) == read(tmp_path, LLAMA)


def test_a_multimodal_config_is_read_from_its_text_part(tmp_path: Path) -> None:
    plain = read(tmp_path, LLAMA | {"model_type": "qwen3", "tie_word_embeddings": True})
    inner = {key: value for key, value in LLAMA.items() if key != "model_type"}
    outer = {"model_type": "qwen3_vl", "text_config": inner | {"model_type": "qwen3_vl_text"}, "tie_word_embeddings": True}
    nested = read(tmp_path, outer)
    assert nested == plain.model_copy(update={"source": nested.source})


def test_qwen_says_which_layers_are_dense(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN_MOE).layers == ("4*moe",)
    assert read(tmp_path, QWEN_MOE | {"decoder_sparse_step": 2}).layers == ("2*(dense moe)",)
    assert read(tmp_path, QWEN_MOE | {"mlp_only_layers": [0, 1]}).layers == ("2*dense", "2*moe")


def test_a_used_sliding_window_starts_at_max_window_layers(tmp_path: Path) -> None:
    windowed = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    model = read(tmp_path, LLAMA | windowed)
    assert model.layer_kinds == ("full", "sliding")
    assert read(tmp_path, LLAMA | windowed | {"use_sliding_window": False}).layer_kinds == ("dense", "dense")


def test_moe_layers_may_be_listed_one_by_one(tmp_path: Path) -> None:
    deepseek = LLAMA | {
        "model_type": "deepseek",
        "num_hidden_layers": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    assert read(tmp_path, deepseek | {"moe_layer_freq": [0, 1, 0, 1]}).layers == ("2*(dense moe)",)
    assert read(tmp_path, deepseek | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}).layers == ("dense", "3*moe")
    assert read(tmp_path, deepseek | {"first_k_dense_replace": 2}).layers == ("2*dense", "2*moe")


# What is refused, in one sentence with file, field, value and remedy


@pytest.mark.parametrize("field", [field for field in LLAMA if field not in ("model_type", "num_key_value_heads")])
@pytest.mark.parametrize("value", [-1, 0, "64", True, 1.5, 10**30, [64]])
def test_a_size_that_is_not_a_positive_whole_number(tmp_path: Path, field: str, value: Any) -> None:
    message = refusal(tmp_path, LLAMA | {field: value})
    assert field in message and "must be" in message


@pytest.mark.parametrize(
    "field", [field for field in QWEN_MOE if field not in ("num_key_value_heads", "head_dim", "intermediate_size")]
)
def test_a_field_that_is_missing_or_null(tmp_path: Path, field: str) -> None:
    without = {key: value for key, value in QWEN_MOE.items() if key != field}
    assert f"{field}" in refusal(tmp_path, without) and "is missing; give" in refusal(tmp_path, without)
    assert "is missing; give" in refusal(tmp_path, QWEN_MOE | {field: None})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 66}, "hidden_size is 66; it must be a multiple of num_attention_heads 4, or head_dim must be given"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide num_attention_heads 4"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers is 100000000; it must be at most 10,000"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        ({"attention_bias": 1}, "attention_bias is 1; it must be true or false"),
        ({"model_type": 7}, "model_type is 7"),
        (QWEN_MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be at most num_experts, 8"),
        (QWEN_MOE | {"layer_types": ["full_attention"]}, "layer_types is a list of 1 items; it must have one item per layer, 4"),
        (QWEN_MOE | {"layer_types": ["magic"] * 4}, "layer_types is a list of 4 items; it must be a list of full_attention"),
        (QWEN_MOE | {"mlp_only_layers": [-1]}, "mlp_only_layers is a list of 1 items; it must be a list of whole numbers"),
    ],
)
def test_values_that_do_not_fit_together(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert words in refusal(tmp_path, LLAMA | changes)


def test_a_bad_field_of_the_text_part_is_named_with_its_path(tmp_path: Path) -> None:
    nested = {"model_type": "qwen3_vl", "text_config": LLAMA | {"model_type": "qwen3_vl_text", "vocab_size": -5}}
    assert "text_config.vocab_size is -5; it must be a positive whole number" in refusal(tmp_path, nested)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not complete JSON"),
        ('{"model_type": "llama", ', "is not complete JSON"),
        ("[1, 2]", "holds a list where an object of fields is needed"),
        ("null", "holds a NoneType"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "holds a number that cannot be read"),
        ("{}", "model_type is missing"),
    ],
)
def test_a_file_that_holds_no_config(tmp_path: Path, text: str, words: str) -> None:
    assert words in refusal(tmp_path, text)


def test_a_file_that_is_not_text_too_large_or_not_there(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(InputError, match=r"there is no such file; give a config\.json or the folder"):
        from_config(tmp_path)
    file.write_bytes(b'{"model_type": "\xff\xfe"}')
    with pytest.raises(InputError, match="not UTF-8"):
        from_config(file)
    file.write_text(json.dumps(LLAMA | {"padding": "x" * 4_000_001}))
    with pytest.raises(InputError, match="bytes, more than any"):
        from_config(file)


def test_an_unknown_family_is_refused_with_what_to_write_instead(tmp_path: Path) -> None:
    message = refusal(tmp_path, LLAMA | {"model_type": "hyena_7"})
    assert "'hyena_7'" in message
    assert all(field in message for field in ("hidden_size", "vocab_size", "max_position_embeddings", "kinds", "layers"))
    file = tmp_path / "model.yaml"
    file.write_text(SPEC_EXAMPLE)
    assert SPEC_EXAMPLE in message
    assert load_model(file).layer_kinds == ("dense", *["moe"] * 31)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10**12) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from([*QWEN_MOE, "layer_types", "text_config"]), JSON))
def test_whatever_a_config_holds_it_is_read_or_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, model_type: str, values: dict[str, Any]
) -> None:
    file = tmp_path_factory.mktemp("any") / "config.json"
    file.write_text(json.dumps(QWEN_MOE | {"model_type": model_type} | values))
    try:
        assert from_config(file).parameters() > 0
    except InputError as error:
        assert str(file) in str(error)


# ModelSpec files


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("hidden_size: 4096", "hidden_size: -1", "hidden_size = -1: must be greater than 0"),
        ("hidden_size: 4096", 'hidden_size: "4096"', "hidden_size = '4096': must be a whole number"),
        ("hidden_size: 4096", "hidden_sise: 4096", "hidden_sise is not a known key; did you mean 'hidden_size'"),
        ("hidden_size: 4096\n", "", "hidden_size is missing"),
        ("31*moe", "31*mo", "layers names the kind 'mo', which is not defined; use one of dense, moe"),
        ("kv_heads: 8", "kv_heads: 5", "heads 32 is not a multiple of kv_heads 5"),
        ("kind: moe", "kind: magic", "'magic'"),
    ],
)
def test_a_wrong_model_file_is_refused_in_one_sentence(tmp_path: Path, old: str, new: str, words: str) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(SPEC_EXAMPLE.replace(old, new))
    with pytest.raises(InputError) as caught:
        load_model(file)
    assert words in str(caught.value) and str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
