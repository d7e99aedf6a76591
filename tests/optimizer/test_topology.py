"""Pictures of plans: well-formed, every device once and in its place, groups and loads as they are, names escaped."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from paraplan.optimizer.cli import main
from paraplan.optimizer.evaluation import evaluate
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.optimizer.ranks import groups, placement
from paraplan.optimizer.reports.topology import ALL_DRAWN, COLOURS, MOST_TILES, draw
from paraplan.optimizer.result import PricedLayout
from paraplan.optimizer.topology import topology
from paraplan.search_spaces.inputs import build_problem, load_cluster, load_model
from paraplan.search_spaces.layout import Layout, Problem

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the sample lies beside them
from sample_plan import sample_plan, sample_priced, sample_problem

SVG = "{http://www.w3.org/2000/svg}"

PLACES = {
    "8": ("hgx-h800", Layout(tp=2, pp=4, dp=8, ep=8, edp=2)),
    "72": ("gb200-nvl72", Layout(pp=9, dp=32, ep=8, edp=4)),
    "384": ("cloudmatrix-384", Layout(tp=8, dp=48, ep=32, edp=12)),
    "768": ("cloudmatrix-384", Layout(tp=4, pp=3, dp=128, ep=256, edp=2)),
    "some idle": ("cloudmatrix-384", Layout(pp=16, dp=128, ep=32, edp=4)),
    "cabinets": ("atlas-950-superpod", Layout(tp=4, pp=4, dp=192, ep=64, edp=12)),
    "131072 by 768": ("cloudmatrix-384", Layout(tp=4, cp=4, pp=16, dp=512, ep=256, edp=32)),
    "131072 by 8": ("hgx-h800", Layout(tp=8, dp=16384, edp=131072)),
}


def placed(place: str) -> tuple[Problem, PricedLayout]:
    cluster, layout = PLACES[place]
    machine = load_cluster(cluster)
    levels = [level.name for level in machine.levels]
    traffic = {levels[0]: {"tp": 100.0, "ep": 20.0}, levels[-1]: {"pp": 3.0}}
    problem = sample_problem().model_copy(update={"cluster": machine, "devices": layout.devices})
    return problem, sample_priced().model_copy(update={"layout": layout, "traffic_gib": traffic})


@cache
def drawn(place: str) -> ElementTree.Element:
    picture = draw(*placed(place), "svg")
    assert isinstance(picture, str)
    return ElementTree.fromstring(picture.encode())


def of_kind(root: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [rect for rect in root.iter(f"{SVG}rect") if kind in rect.get("class", "").split()]


def corners(rects: list[ElementTree.Element]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Left, top, right and bottom of every rectangle, (n, 4)."""
    at = np.array([[float(rect.get(name, "nan")) for name in ("x", "y", "width", "height")] for rect in rects])
    return np.concatenate([at[:, :2], at[:, :2] + at[:, 2:]], axis=1)


@pytest.mark.parametrize("place", PLACES)
def test_every_device_is_drawn_once_and_in_its_supernode(place: str) -> None:
    problem, priced = placed(place)
    root = drawn(place)
    columns = placement(priced.layout, problem.cluster)
    devices, frames = of_kind(root, "device"), of_kind(root, "supernode")
    ranks = [int(re.match(r"rank (\d+) ", rect.findtext(f"{SVG}title") or "").group(1)) for rect in devices]  # type: ignore[union-attr]
    assert sorted(ranks) == np.flatnonzero(columns["supernode"] < len(frames)).tolist()
    assert len(frames) == columns["supernode"].max() + 1 or len(frames) == 1
    inner, outer = corners(devices), corners(frames)[columns["supernode"][ranks]]
    assert (inner[:, :2] >= outer[:, :2]).all()
    assert (inner[:, 2:] <= outer[:, 2:]).all()
    assert len(np.unique(inner.round(2), axis=0)) == len(devices)
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    everything = corners(devices + frames + of_kind(root, "tile"))
    assert everything.min() >= 0
    assert everything[:, 2].max() <= width
    assert everything[:, 3].max() <= height


@pytest.mark.parametrize("place", [place for place in PLACES if not place.startswith("131072")])
def test_devices_do_not_overlap(place: str) -> None:
    boxes = corners(of_kind(drawn(place), "device"))
    order = boxes[np.lexsort((boxes[:, 0], boxes[:, 1].round(1)))]
    same_row = order[1:, 1].round(1) == order[:-1, 1].round(1)
    assert (order[1:, 0] >= order[:-1, 2])[same_row].all()
    columns = [boxes[boxes[:, 0].round(1) == x] for x in np.unique(boxes[:, 0].round(1))[:20]]
    assert all((np.sort(c[:, 1])[1:] >= np.sort(c[:, 3])[:-1] - 0.05).all() for c in columns)


@pytest.mark.parametrize("place", ["131072 by 768", "131072 by 8", "some idle"])
def test_what_is_not_drawn_is_counted(place: str) -> None:
    """Tiles stand for every supernode, and say how many devices they have."""
    problem, priced = placed(place)
    tiles = of_kind(drawn(place), "tile")
    assert len(tiles) <= MOST_TILES
    said = [re.search(r": ([\d,]+) devices", rect.findtext(f"{SVG}title") or "") for rect in tiles]
    assert sum(int(found.group(1).replace(",", "")) for found in said if found) == priced.layout.devices
    assert (priced.layout.devices <= ALL_DRAWN) == (place == "some idle")
    assert problem.devices == priced.layout.devices


def test_colours_of_the_page_are_the_groups() -> None:
    """Class ep-3 is on the devices of EP groups 3, 15, …; a stylesheet gives it the fourth colour when EP is asked for."""
    problem, priced = placed("768")
    text = draw(problem, priced, "html")
    assert isinstance(text, str)
    of_rank = {int(rank): classes.split() for classes, rank in re.findall(r'class="device ([^"]+)"><title>rank (\d+) ', text)}
    assert len(of_rank) == 1536
    for name in ("tp", "dp", "ep", "edp"):
        for index, group in enumerate(groups(priced.layout)[name]):
            assert {f"{name}-{index % len(COLOURS)}"} == {c for rank in group for c in of_rank[rank] if c.startswith(f"{name}-")}
    stages = placement(priced.layout, problem.cluster)["pp"]
    assert all(f"pp-{stages[rank]}" in classes for rank, classes in of_rank.items())
    assert f"#by-ep:checked ~ figure .ep-3 {{ fill: {COLOURS[3]} }}" in text


def test_page_is_whole_and_needs_nothing_else() -> None:
    text = draw(*placed("72"), "html")
    assert isinstance(text, str)
    open_tags: list[str] = []
    asked: list[tuple[str, str | None]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            asked.extend(pair for pair in attrs if pair[0] in ("src", "href", "onclick", "onload"))
            if tag not in ("meta", "input"):
                open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

    Reader().feed(text)
    assert open_tags == []
    assert asked == []
    assert "<script" not in text
    assert set(re.findall(r"https?://[^\"' <]+", text)) == {"http://www.w3.org/2000/svg"}
    assert text.count('type="radio"') == 4
    assert text.count(" checked>") == 1


def test_names_are_escaped() -> None:
    problem, priced = placed("8")
    name = '<script>alert(1)</script> & "ours" $x_2$'
    problem = problem.model_copy(update={"model": problem.model.model_copy(update={"name": name})})
    for kind in ("svg", "html"):
        text = draw(problem, priced, kind)  # type: ignore[arg-type]
        assert isinstance(text, str)
        assert "<script>" not in text
        assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; " in text
    root = ElementTree.fromstring(str(draw(problem, priced, "svg")).encode())
    assert any(name in (text.text or "") for text in root.iter(f"{SVG}text"))


def test_supernodes_say_what_they_leave_idle() -> None:
    """288 devices are 72 in each of four racks; 256 are 64 of 72."""
    cluster, layout = PLACES["72"]
    problem, priced = placed("72")
    for devices, said in ((288, "72 devices"), (256, "64 of 72 devices")):
        used = priced.model_copy(
            update={"layout": layout.model_copy(update={"pp": 1, "dp": devices, "ep": 8, "edp": devices // 8})}
        )
        picture = str(draw(problem.model_copy(update={"cluster": load_cluster(cluster), "devices": devices}), used, "svg"))
        assert f"supernode 3 · {said}, {devices // 16} servers" in picture


@pytest.mark.parametrize(("devices", "unused"), [(576, 0), (512, 64), (128, 16)])
def test_devices_that_stay_idle_are_outlined_and_titles_stay_in_their_frames(devices: int, unused: int) -> None:
    """Racks of 72 of which all or 64 are used; where there are more they are drawn smaller and say less."""
    problem, priced = placed("72")
    used = priced.model_copy(update={"layout": Layout(dp=devices, ep=8, edp=devices // 8)})
    root = ElementTree.fromstring(str(draw(problem.model_copy(update={"devices": devices}), used, "svg")).encode())
    assert len(of_kind(root, "unused")) == unused
    inner, frames = corners(of_kind(root, "unused") + of_kind(root, "device")), of_kind(root, "supernode")
    assert len(np.unique(inner.round(2), axis=0)) == devices + unused
    titles = [text for text in root.iter(f"{SVG}text") if (text.text or "").startswith("supernode ") and text.get("x") is not None]
    for text, (left, _, right, _) in zip(titles, corners(frames), strict=False):
        assert float(text.get("x", "0")) + 6.0 * len(text.text or "") <= right
        assert float(text.get("x", "0")) > left


def test_what_is_not_free_is_grey_and_what_stays_idle_is_outlined() -> None:
    """Of racks with 72, 70, 61 and 33 free a layout fills 192 devices as 70, 70 and 52, and 44 stay idle."""
    problem, priced = placed("72")
    problem = problem.model_copy(update={"devices": 201, "per_supernode": 70})
    priced = priced.model_copy(update={"layout": Layout(dp=192, ep=8, edp=24), "devices_used": 192, "devices_idle": 44})
    free = (72, 70, 61, 33)
    picture = str(draw(problem, priced, "svg", free))
    root = ElementTree.fromstring(picture.encode())
    assert [len(of_kind(root, kind)) for kind in ("device", "unused", "taken", "supernode")] == [192, 44, 4 * 72 - 236, 4]
    assert "supernode 2: 52 of 61 devices" in picture and "supernode 3: 0 of 33 devices" in picture
    assert "outlined: not used; grey: not free" in picture
    found = topology(problem, priced, free)
    assert found.devices.tolist() == [70, 70, 52, 0]
    assert all(len(each.inside) == len(each.across) == 4 for each in found.dimensions)
    assert found.facts()["supernode"]["free"] == list(free)
    wide = priced.model_copy(update={"layout": Layout(dp=4096, ep=8, edp=512)})
    many = str(draw(problem.model_copy(update={"devices": 4096, "per_supernode": 64}), wide, "svg", (*[70] * 64, 30)))
    assert "All 65 supernodes, 0 to 64 devices in each; 414 free ones are not used" in many


def test_a_dense_model_has_no_groups_of_experts() -> None:
    problem, priced = placed("8")
    dense = problem.model_copy(update={"model": load_model("llama-3.1-8b")})
    layout = Layout(tp=2, pp=4, dp=8, edp=16)
    picture = str(draw(dense, priced.model_copy(update={"layout": layout, "traffic_gib": {}}), "svg"))
    assert "dp 8" in picture
    assert "edp" not in picture


def test_loads_and_reach() -> None:
    problem, priced = placed("768")
    found = topology(problem, priced)
    assert [level.name for level in found.levels] == ["package", "server", "supernode", "scale-out"]
    package = problem.cluster.levels[0].bandwidth_bytes_per_s.value
    assert found.levels[0].utilisation == pytest.approx(120.0 * 2**30 / package / priced.step_time_s)
    assert found.levels[1].gib == {}
    by_name = {dimension.name: dimension for dimension in found.dimensions}
    assert (by_name["tp"].reach, by_name["ep"].reach, by_name["edp"].reach) == ("server", "supernode", "scale-out")
    assert by_name["ep"].inside.tolist() == [3, 3]
    assert by_name["ep"].across.tolist() == [0, 0]
    assert by_name["edp"].most_supernodes == 2
    for dimension in found.dimensions:
        homes = [set(np.array(group) // 768) for group in groups(priced.layout)[dimension.name]]
        assert dimension.inside.tolist() == [sum(home == {s} for home in homes) for s in (0, 1)]
        assert dimension.across.tolist() == [sum(s in home and len(home) > 1 for home in homes) for s in (0, 1)]


def test_command_writes_what_the_name_asks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="PNG needs the extra plots")
    problem, priced = placed("8")
    plan = sample_plan().model_copy(update={"problem": problem, "plan": priced})
    (tmp_path / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    for name, start in (("a.svg", b"<?xml"), ("a.html", b"<!DOCTYPE html>"), ("A.PNG", b"\x89PNG")):
        assert main(["topology", str(tmp_path / "plan.json"), "-o", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(start)
    assert capsys.readouterr().err.splitlines() == [f"paraplan: wrote {tmp_path / name}" for name in ("a.svg", "a.html", "A.PNG")]
    assert main(["topology", str(tmp_path / "plan.json"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == topology(problem, priced).facts() and {each["name"] for each in document["groups"]} >= {"tp", "ep"}
    assert [level["name"] for level in document["levels"]] == [level.name for level in problem.cluster.levels]
    for arguments, sentence in (
        ([], "--out is missing"),
        (["-o", "a.gif"], "ends in .svg, .html, .png"),
        (["-o", "a.svg", "--alternative", "9"], "--alternative 9"),
    ):
        assert main(["topology", str(tmp_path / "plan.json"), *arguments]) == 2
        assert sentence in capsys.readouterr().err


def test_png_without_matplotlib_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text(sample_plan().to_json(), encoding="utf-8")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["topology", str(tmp_path / "plan.json"), "-o", str(tmp_path / "a.png")]) == 2
    assert "pip install 'paraplan[plots]'" in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()


def test_ranks_lie_where_they_were_priced_though_some_devices_stay_idle() -> None:
    """132 of 144: EP groups of 4 that the price keeps inside racks of 72 would straddle two of 66."""
    problem = build_problem("qwen3-30b-a3b", "gb200-nvl72", 144, 264, 4096)
    layout = complete(problem, parse_layout("tp=1,pp=1,dp=132,ep=4,micro_batch=1,recompute=full"))
    priced, _ = evaluate(problem, layout)
    assert (priced.devices_used, priced.devices_idle) == (132, 12)
    columns = placement(priced.layout, problem.cluster, sizes=problem.allocated_sizes)
    assert np.bincount(columns["supernode"]).tolist() == [72, 60]
    drawn = topology(problem, priced)
    assert drawn.devices.tolist() == [72, 60]
    (experts,) = (each for each in drawn.dimensions if each.name == "ep")
    across = sum(volumes.get("ep", 0.0) for level, volumes in priced.traffic_gib.items() if level == "scale-out")
    assert (experts.most_supernodes > 1) == (across > 0.0)
