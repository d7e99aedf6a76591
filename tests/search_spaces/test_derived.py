"""A document `like` another: only what differs is written, the rest is the other's."""

from pathlib import Path

import pytest
from paraplan.optimizer.planner import plan
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.loading import load_accelerator, load_cluster, load_model, load_stack


def written(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_a_level_is_changed_by_its_name_and_all_else_stays(tmp_path: Path) -> None:
    mine = load_cluster(written(tmp_path, "name: mine\nlike: gb200-nvl72\nlevels: {scale-out: {oversubscription: 4}}"))
    theirs = load_cluster("gb200-nvl72")
    assert mine.levels[-1].oversubscription == 4.0 and mine.levels[:-1] == theirs.levels[:-1]
    changed = {"name": "mine", "levels": mine.levels}
    assert mine == theirs.model_copy(update=changed)


def test_a_list_of_levels_replaces_all(tmp_path: Path) -> None:
    inner = "{name: server, size: 4, bandwidth_bytes_per_s: 3e11, latency_s: 2e-6}"
    outer = "{name: net, bandwidth_bytes_per_s: 5e10, latency_s: 5e-6}"
    mine = load_cluster(written(tmp_path, f"name: mine\nlike: hgx-h100\nlevels: [{inner}, {outer}]"))
    assert [(level.name, level.size) for level in mine.levels] == [("server", 4), ("net", None)]


def test_a_figure_is_replaced_whole(tmp_path: Path) -> None:
    """A new value with the old one's interval and source would claim what its source never said."""
    mine = load_accelerator(written(tmp_path, "name: mine\nlike: h100-80gb-sxm\nmemory_bytes: 60e9\npeak_flops: {fp8: 1.5e15}"))
    assert (mine.memory_bytes.grade, mine.memory_bytes.low, mine.memory_bytes.note) == ("given", None, "")
    theirs = load_accelerator("h100-80gb-sxm").peak_flops
    assert mine.peak_flops["fp8"].value == 1.5e15 and mine.peak_flops["bf16"] == theirs["bf16"]


def test_files_stand_on_files_beside_them(tmp_path: Path) -> None:
    """Also on one that names a device of its own, from another folder."""
    (tmp_path / "base").mkdir()
    written(tmp_path / "base", "name: chip\nlike: h200\npower_w: 600", "chip.yaml")
    written(tmp_path / "base", "name: base\nlike: hgx-h200\naccelerator: chip.yaml")
    mine = load_cluster(written(tmp_path, "name: mine\nlike: base/mine.yaml\nmax_devices: 64"))
    assert (mine.accelerator.name, mine.max_devices) == ("chip", 64)


def test_a_cluster_changes_its_device_in_place(tmp_path: Path) -> None:
    mine = load_cluster(written(tmp_path, "name: mine\nlike: hgx-h200\naccelerator: {like: h200, memory_bytes: 120e9}"))
    theirs = load_accelerator("h200")
    assert mine.accelerator == theirs.model_copy(update={"memory_bytes": mine.accelerator.memory_bytes})
    assert mine.accelerator.memory_bytes.value == 120e9


def test_a_device_like_another_is_priced_by_what_is_known_of_that(tmp_path: Path) -> None:
    """Under whatever name, also through a third, if it does not say of which."""
    first = written(tmp_path, "name: first\nlike: h200\nmemory_bytes: 120e9", "first.yaml")
    second = written(tmp_path, "name: second\nlike: first.yaml\npower_w: 500", "second.yaml")
    assert [load_accelerator(file).priced_as for file in (first, second)] == ["h200", "h200"]
    other = written(tmp_path, "name: other\nlike: first.yaml\ncurves_of: h100-80gb-sxm", "other.yaml")
    assert load_accelerator(other).priced_as == "h100-80gb-sxm"
    device = "{name: mine, like: h200, memory_bytes: 120e9}"
    cluster = load_cluster(written(tmp_path, f"name: mine\nlike: hgx-h200\naccelerator: {device}"))
    same = build_problem("llama-3.1-8b", "hgx-h200", 16, 64, 4096, fix="tp=2,pp=1,micro_batch=1")
    mine = same.model_copy(update={"cluster": cluster})
    steps = [plan(problem, top=1).plan for problem in (same, mine)]
    assert steps[0].step_time_s == steps[1].step_time_s and steps[0].step_time_interval_s == steps[1].step_time_interval_s


def test_models_and_stacks_too(tmp_path: Path) -> None:
    deeper = load_model(written(tmp_path, "name: deeper\nlike: llama-3.1-8b\nlayers: [64*dense]"))
    assert len(deeper.layer_kinds) == 64 and deeper.hidden_size == load_model("llama-3.1-8b").hidden_size
    stack = load_stack(written(tmp_path, "name: mine\nlike: megatron-lm\noverlap: {tp: 0.0}"))
    assert stack.overlap == load_stack("megatron-lm").overlap.model_copy(update={"tp": 0.0})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: mine\nlike: hgx-h10", "cluster: 'hgx-h10' is neither in the catalog nor a file; did you mean 'hgx-h100'"),
        ("name: mine\nlike: mine.yaml", "mine.yaml: like = 'mine.yaml' leads back to this file; let one of them stand by itself"),
        ("like: hgx-h100", "mine.yaml: name is missing; give what differs from hgx-h100 a name of its own"),
        ("name: mine\nlike: [hgx-h100]", "mine.yaml: like must be a name of the catalog or of a file beside this one"),
        ("name: mine\nlike: hgx-h100\nlevels: {rack: {size: 72}}", "levels.rack is not a level; known are server, scale-out"),
        ("name: mine\nlike: hgx-h100\nlevels: {scale-out: 4}", "levels.scale-out = 4: must be a mapping of what changes"),
        ("name: mine\nlike: hgx-h100\nsupernode: rack", "mine.yaml: supernode 'rack' must name a level with a size: server"),
        ("name: mine\naccelerator: h200", "mine.yaml: levels is missing, and so are supernode, host_link, default_stack"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        load_cluster(written(tmp_path, text))
    assert said in str(error.value)
