"""--plot: pictures as files, and the page in a browser without a network: it loads, hovering shows the layout, filters work."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zlib
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from paraplan.optimizer.cli import main
from paraplan.optimizer.sweeps.grid import Point
from paraplan.optimizer.sweeps.point import Outcome
from paraplan.optimizer.sweeps.store import Store

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--proxy-server=127.0.0.1:9", "--virtual-time-budget=20000", "--dump-dom"),
)
needs_plots = pytest.mark.skipif(
    any(__import__("importlib.util").util.find_spec(name) is None for name in ("matplotlib", "plotly")),
    reason="matplotlib or plotly is not installed (paraplan[plots])",
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
CLUSTERS, DEVICES, MODELS = ("hgx-h100", "gb200-nvl72"), (64, 256, 1024), ("dense:7B", "moe:600B")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two models on two clusters at three counts and two batches; the larger one fits nowhere on 64 devices."""
    where = str(tmp_path_factory.mktemp("pictures") / "my-sweep.sqlite")
    points = [
        Point(model, cluster, devices, batch * devices, 4096, "bf16", {"objective": "step-time,memory"})
        for model in MODELS
        for cluster in CLUSTERS
        for devices in DEVICES
        for batch in (4, 8)
    ]
    opened = Store(where)
    opened.add(points)
    for point in points:
        if point.model == "moe:600B" and point.devices == 64:
            opened.finish(point.key, Outcome("infeasible", "d", 0.1, "No <layout> fits."), "{}")
        else:
            opened.finish(point.key, Outcome("optimal", "d", 0.1, document=document(point)), json.dumps(record(point)))
    opened.close()
    return where


def document(point: Point) -> bytes:
    """The part of a plan.json that holds a front: of one point, three layouts in two aims."""
    if (point.model, point.cluster, point.global_batch) != ("dense:7B", "hgx-h100", 256):
        return zlib.compress(b"{}")
    layout = {"cp": 1, "pp": 1, "dp": 64, "ep": 1, "vpp": 1, "micro_batch": 1, "recompute": "none", "offload": "none"}
    figures = ((1, 10.0, 60.0, ["fastest"]), (2, 11.0, 40.0, ["knee"]), (4, 15.0, 30.0, []))
    front = [{"layout": {**layout, "tp": tp}, "aims": {"step-time": s, "memory": gib}, "marks": m} for tp, s, gib, m in figures]
    proof = {"aims": ["step-time", "memory"], "units": {"step-time": "s", "memory": "GiB"}}
    return zlib.compress(json.dumps({"front": front, "front_certificate": proof}).encode())


def record(point: Point) -> dict[str, Any]:
    """Figures of a plan that nobody made; ep on 256 devices is another than on 1,024."""
    experts = point.model.startswith("moe")
    seconds = {"hgx-h100": 2.0, "gb200-nvl72": 1.0}[point.cluster] * (5 if experts else 1) * point.global_batch / point.devices
    rate = point.global_batch * 4096 / seconds / point.devices
    ep = point.devices // 16 if experts else 1
    return {
        "parameters": 600_000_000_000 if experts else 7_000_000_000,
        "active_parameters": 30_000_000_000 if experts else 7_000_000_000,
        "step_time_s": seconds,
        "tokens_per_s_per_device": rate,
        "tokens_per_s": rate * point.devices,
        "mfu": 0.4,
        "peak_gib": 60.0,
        "usable_gib": 66.0,
        "cross_supernode_share": 0.25,
        "devices_used": point.devices,
        "devices_idle": 0,
        **{"tp": 1, "cp": 1, "pp": 4 if experts else 1, "dp": point.devices // (4 if experts else 1), "ep": ep, "vpp": 1},
        **{"micro_batch": 2, "optimizer_sharding": "zero1", "recompute": "selective:mlp", "offload": "none"},
    }


@pytest.fixture(scope="module")
def drawn(store: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn") / "plots"
    assert main(["sweep", "--store", store, "--show", "", "--quiet", "--plot", str(folder)]) == 0
    return folder


@needs_plots
def test_pictures_are_written_as_png_and_svg_and_say_what_they_show(drawn: Path) -> None:
    assert {path.name for path in drawn.iterdir()} == {
        *(f"{name}.{kind}" for name in ("strategies", "curves", "fronts", "aims") for kind in ("png", "svg")),
        "sweep.html",
    }
    assert (drawn / "strategies.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    words = (drawn / "strategies.svg").read_text()
    for shown in ("moe:600B", "dense:7B", "pp4 ep16", "pp4 ep64", "data only", "no layout", "hgx-h100 · batch 4 per device", "1K"):
        assert shown in words
    assert all(f">{name}<" in (drawn / "curves.svg").read_text() for name in CLUSTERS)  # at the ends of their lines


@needs_plots
def test_the_same_store_is_drawn_to_the_same_bytes(store: str, drawn: Path, tmp_path: Path) -> None:
    assert main(["sweep", "--store", store, "--show", "", "--quiet", "--plot", str(tmp_path)]) == 0
    assert all((tmp_path / path.name).read_bytes() == path.read_bytes() for path in drawn.iterdir())


PROBE = """
<script>
(async () => {
  const settle = () => new Promise((done) => setTimeout(done, 250));
  const errors = window.said;
  const panels = (name) => [...document.querySelectorAll(`#${name} .panel`)];
  const words = (panel) => [...panel.querySelectorAll("text")].map((text) => text.textContent).join("|");
  const titles = (name) => panels(name).map((panel) => panel.querySelector(".gtitle")?.textContent);
  const pointed = async (panel, x, y) => {  // moves the mouse there, as a reader does
    const area = panel.querySelector(".nsewdrag"), box = area.getBoundingClientRect();
    const at = { bubbles: true, view: window, clientX: box.left + x * box.width, clientY: box.top + y * box.height };
    for (const kind of ["mouseover", "mousemove"]) area.dispatchEvent(new MouseEvent(kind, at));
    await settle();
    return [...panel.querySelectorAll(".hoverlayer .hovertext")].map((text) => text.textContent).join("|");
  };
  const pick = async (name, text) => {
    const list = document.querySelector(`select[name='${name}']`);
    list.value = [...list.options].find((option) => option.text === text).value;
    list.dispatchEvent(new Event("change"));
    await settle();
  };
  await settle();
  const found = {
    filters: [...document.querySelectorAll("select")].map((list) => list.name),
    count: document.getElementById("count").textContent,
    key: document.getElementById("key").textContent,
    titles: titles("strategies"),
    cells: words(panels("strategies")[0]), curves: panels("curves").length, fronts: titles("fronts"),
    undrawn: ["curves", "fronts"].map((name) => document.getElementById(`${name}-more`).textContent),
  };
  const first = panels("strategies")[0];
  first.scrollIntoView();
  found.cell = await pointed(first, 0.5, 0.25);  // 256 devices, the larger model
  found.empty = await pointed(first, 0.17, 0.25);  // 64 devices, where it does not fit
  found.trades = titles("trades");
  const trade = panels("trades")[0];
  trade.scrollIntoView();
  found.traded = await pointed(trade, 0.06, 0.06);
  first.scrollIntoView();
  await pick("cluster", "gb200-nvl72");
  await pick("batch", "8 per device");
  found.filtered = { count: document.getElementById("count").textContent, titles: titles("strategies"), fronts: titles("fronts") };
  await pick("measure", "MFU");
  const curve = panels("curves").at(-1);
  found.measure = words(curve);
  curve.scrollIntoView();
  found.mark = await pointed(curve, 0.04, 0.1);
  await pick("model", "dense:7B");
  found.model = words(panels("strategies")[0]);
  found.errors = errors;
  const out = document.createElement("pre");
  out.id = "found";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
})();
</script>
"""
WATCH = """<script>
window.said = [];
window.addEventListener("error", (event) => window.said.push(String(event.message)));
window.addEventListener("unhandledrejection", (event) => window.said.push(String(event.reason)));
for (const kind of ["error", "warn"]) {
  const was = console[kind];
  console[kind] = (...words) => { window.said.push(words.join(" ")); was(...words); };
}
</script>"""


@pytest.fixture(scope="module")
def seen(drawn: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a browser without a network shows of the page, before and after its filters are used."""
    assert CHROMIUM is not None
    folder = tmp_path_factory.mktemp("browser")
    page = (drawn / "sweep.html").read_text().replace("<head>", f"<head>{WATCH}", 1)
    head, tail = page.rsplit("</body>", 1)
    (folder / "probed.html").write_text(f"{head}{PROBE}</body>{tail}")
    own = ("--window-size=1400,1200", f"--user-data-dir={folder / 'profile'}", (folder / "probed.html").as_uri())
    command = [CHROMIUM, *FLAGS, *own]
    dom = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    told = re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    assert told is not None
    found: dict[str, Any] = json.loads(unescape(told[1]))
    return found


@needs_plots
@needs_chromium
def test_the_page_loads_without_errors_or_a_network_and_shows_all_points(drawn: Path, seen: dict[str, Any]) -> None:
    page = (drawn / "sweep.html").read_text()
    assert re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", page.split("<body>")[0].split("<script>")[0]) == []
    assert re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", page.split("<body>")[1]) == []
    assert seen["errors"] == []
    assert seen["count"] == "24 of 24 points, 20 with a plan"
    assert seen["titles"] == [f"{cluster} · batch {batch} per device" for cluster in CLUSTERS for batch in (4, 8)]
    assert seen["filters"] == ["model", "cluster", "devices", "batch", "measure"]
    assert seen["key"] == "data or cppp ep"
    assert seen["fronts"] == [f"{model} · batch {batch} per device" for model in MODELS for batch in (4, 8)]
    assert seen["curves"] == 4
    assert seen["undrawn"] == ["Not drawn: 4 points without a plan."] * 2
    assert "data only" in seen["cells"]
    assert "no plan" in seen["cells"]


@needs_plots
@needs_chromium
def test_pointing_at_a_cell_or_a_mark_shows_its_layout(seen: dict[str, Any]) -> None:
    assert "moe:600B on 256 × hgx-h100" in seen["cell"]
    assert "pp 4 dp 64 ep 16 micro-batch 2" in seen["cell"]
    assert "recompute selective:mlp" in seen["cell"]
    assert "infeasible: No <layout> fits." in seen["empty"]
    assert "moe:600B on 256 × gb200-nvl72" in seen["mark"]
    assert "pp 4 dp 64 ep 16" in seen["mark"]


@needs_plots
@needs_chromium
def test_a_front_of_several_aims_is_drawn_for_the_point_that_has_one(drawn: Path, seen: dict[str, Any]) -> None:
    assert seen["trades"] == ["dense:7B on 64 × hgx-h100, batch 256, bf16"]
    assert "dp 64 micro-batch 1" in seen["traded"]
    assert "fastest" in seen["traded"]
    words = (drawn / "aims.svg").read_text()
    assert all(f">{shown}<" in words for shown in ("step-time, s", "memory, GiB", "knee"))


@needs_plots
@needs_chromium
def test_filters_leave_what_they_name(seen: dict[str, Any]) -> None:
    assert seen["filtered"] == {
        "count": "6 of 24 points, 5 with a plan",
        "titles": ["gb200-nvl72 · batch 8 per device"],
        "fronts": [f"{model} · batch 8 per device" for model in MODELS],
    }
    assert "% of the dense peak" in seen["measure"]
    assert "dense:7B" in seen["model"]
    assert "moe:600B" not in seen["model"]


def test_pictures_without_plotly_are_refused_before_anything_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "plotly" else sys)
    (tmp_path / "s.yaml").write_text("models: x\nclusters: y\ndevices: 8\nglobal_batch: 8\nseq_len: 8\n")
    assert main(["sweep", str(tmp_path / "s.yaml"), "--store", str(tmp_path / "s.sqlite"), "--plot", str(tmp_path / "p")]) == 2
    assert "pip install 'paraplan[plots]'" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"s.yaml"}


@needs_plots
def test_where_nothing_has_a_plan_there_is_nothing_to_draw(store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--store", store, "--show", "status=infeasible", "--plot", str(tmp_path / "p")]) == 2
    assert "no point has a plan" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


@needs_plots
def test_logarithmic_axes_name_values_wherever_they_begin() -> None:
    from paraplan.optimizer.reports.sweep_plots import _round_values

    assert _round_values(21.0, 29.0, 5) == [25.0]
    for low in (0.0123, 1.0, 7.7, 480.0):
        for ratio in (3.0, 11.0, 250.0, 40_000.0):
            named = _round_values(low, low * ratio, 6)
            assert 2 <= len(named) <= 6, (low, ratio)
            assert all(low <= value <= low * ratio for value in named)


@needs_plots
@pytest.mark.parametrize("growth", [1.001, 1.01, 1.04, 1.1, 1.3, 1.8])
def test_no_line_of_a_front_crosses_the_name_of_a_point(growth: float) -> None:
    """A front that is level at first and then loses the same share of its rate with every twice as many devices."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from paraplan.optimizer.reports.sweep_plots import fronts

    asked = {"model": "m", "cluster": "c", "global_batch": 8192, "seq_len": 4096, "precision": "bf16", "status": "optimal"}
    rates = {256 << n: 900.0 / 1.001**n / growth ** max(n - 3, 0) for n in range(7)}
    figure = fronts(
        [{**asked, "devices": n, "tokens_per_s_per_device": rate, "tokens_per_s": n * rate} for n, rate in rates.items()]
    )
    assert figure is not None
    FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    line = axes.lines[1]
    path = line.get_transform().transform_path(line.get_path())
    names = [text for text in axes.texts if text.get_text() != "c"]
    boxes = [text.get_window_extent() for text in names]
    assert len(names) == len(rates) and not any(path.intersects_bbox(box, filled=False) for box in boxes)
    assert not any(box.overlaps(after) for box, after in pairwise(boxes))


@needs_plots
def test_fronts_keep_options_apart_and_say_what_is_not_drawn() -> None:
    from paraplan.optimizer.reports.sweep_plots import fronts

    def row(model: str, devices: int, forbid: str, status: str = "optimal") -> dict[str, Any]:
        asked = {"model": model, "cluster": "c", "devices": devices, "global_batch": 64, "seq_len": 4096, "precision": "bf16"}
        rate = 1000.0 - devices
        figures = {"tokens_per_s": rate * devices, "tokens_per_s_per_device": rate, "parameters": 1, "active_parameters": 1}
        return {**asked, "option forbid": forbid, "status": status, **(figures if status == "optimal" else {})}

    both = [row("one", devices, forbid) for devices in (8, 16) for forbid in ("pp>1", "tp>1")]
    figure = fronts([*both, row("bad", 8, "tp>1", "bad input")])
    assert figure is not None
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["one · forbid pp>1", "one · forbid tp>1"]
    assert "not drawn: bad · forbid tp>1" in figure.get_supxlabel()
    assert all(len(axes.get_xticks()) >= 2 for axes in figure.axes)
