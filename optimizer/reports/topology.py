"""A plan on its cluster as a picture: supernodes with their servers and devices, the groups by colour, the load of each level."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...search_spaces.layout import Ints, Problem
from ..result import PricedLayout
from ..topology import Dimension, LevelLoad, Topology, topology
from . import wording
from .scene import FAINT, INK, MARKS, Rect, Scene, Text, page, png, svg

COLOURS = (
    "#5b8fc9", "#f2a14e", "#6cb35f", "#e4716f", "#86c5bf", "#efd26b",
    "#b78cb4", "#ffb3b8", "#a98467", "#c3bab6", "#79a9ba", "#d58aa8",
)  # fmt: skip
"""Groups take these in turn."""
HUES = {
    "tp": "#1e3a5f",
    "cp": "#8a7a12",
    "pp": "#b4530a",
    "dp": "#52525b",
    "ep": "#0f766e",
    "etp": "#5b21b6",
    "edp": "#a34e97",
    "offload": "#8c6d3f",
}
"""What each dimension sends, in the bars, in the groups' order: darker than any group, so that nobody looks for one in them."""
SERVER, FRAME, TRACK, TAKEN = "#eef1f4", "#9aa5b1", "#e4e8ec", "#cfd6dd"
PIXELS = (64, 56, 48, 42, 38, 34, 30, 26, 22, 20, 18, 16, 14, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3)
"""Sides that a device may be drawn with."""
ALL_DRAWN = 2048
"""Devices up to which every supernode is drawn in full, if devices come out LEAST_OF_ALL pixels wide at least."""
LEAST_OF_ALL = 8
SHAPES = (1.2, 2.6, 0.7)
"""Widths over heights that supernodes may be drawn in, the first before the others."""
NUMBERED, NAMED = 22, 60
"""Pixels from which a device shows its rank, and a server its number."""
MOST_UNUSED = 2
"""Devices of a supernode over those in use, up to which the others are drawn too."""
COUNTED = 20
"""Pixels from which a tile shows how many devices it stands for."""
MOST_TILES = 1200
WIDTH, HEIGHT, MARGIN = 1280.0, 720.0, 28.0
PANEL = 320.0
ROOM = WIDTH - PANEL - 3 * MARGIN
"""Pixels that supernodes may take beside the panel."""
LETTER = 0.52
"""Mean width of a letter, as a share of its size."""
DEGREES, OF_EXPERTS = ("tp", "cp", "pp", "dp", "ep", "etp", "edp", "vpp"), ("ep", "etp", "edp")
GAP = 0.18
"""Space between devices, as a share of their side."""

Kind = Literal["svg", "html", "png"]


@dataclass(frozen=True)
class Grid:
    """Equal cells in rows: how many columns, and the size of a cell with the space that follows it."""

    columns: int
    width: float
    height: float

    def at(self, index: int) -> tuple[float, float]:
        return index % self.columns * self.width, index // self.columns * self.height

    def extent(self, count: int) -> tuple[float, float]:
        return min(count, self.columns) * self.width, math.ceil(count / self.columns) * self.height


@dataclass(frozen=True)
class Plot:
    """How large things are drawn: devices of a server, servers of a supernode, supernodes that are drawn in full."""

    pixel: float
    devices: Grid
    servers: Grid
    supernodes: Grid
    drawn: int


def draw(problem: Problem, priced: PricedLayout, kind: Kind, free: tuple[int, ...] = ()) -> str | bytes:
    """The picture in one of three forms; `free` as `DevicesLeft.told`.

    ImportError for a PNG without matplotlib (the extra `plots`).
    """
    found = topology(problem, priced, free)
    names = [dimension.name for dimension in found.dimensions]
    if kind == "html":
        labels = {dimension.name: f"{dimension.name} {dimension.size}" for dimension in found.dimensions}
        return page(_scene(problem, priced, found, names), labels, found.default, COLOURS, "colour by groups of ")
    scene = _scene(problem, priced, found, [name for name in names if name == found.default])
    return svg(scene) if kind == "svg" else png(scene)


def _scene(problem: Problem, priced: PricedLayout, found: Topology, shown: Sequence[str]) -> Scene:
    plot = _plot(found)
    left = list(_supernodes(found, plot, shown))
    across, down = plot.supernodes.extent(plot.drawn)
    bottom = MARGIN + 92.0 + down
    if plot.drawn < len(found.devices):
        tiles, bottom = _tiles(found, shown, bottom + 30.0)
        left, across = [*left, *tiles], ROOM
    label = _label(problem, priced)
    heading = list(_heading(label, problem, priced, found, shown))
    beside = MARGIN + max(across, *(_width(text.text, text.size) for text in heading)) + MARGIN
    panel, panel_bottom = _panel(found, beside)
    shapes = (*heading, *left, *panel)
    return Scene(round(beside + PANEL + MARGIN), round(max(bottom, panel_bottom) + MARGIN), shapes, label)


def _width(text: str, size: float) -> float:
    """Pixels that a line of text takes, about."""
    return LETTER * size * len(text)


def _label(problem: Problem, priced: PricedLayout) -> str:
    """«llama-3.1-70b on 512 of 513 × gb200»."""
    of = f" of {priced.devices_used + priced.devices_idle:,}" if priced.devices_idle else ""
    return f"{problem.model.name} on {priced.devices_used:,}{of} × {problem.cluster.accelerator.name}"


# --- heading -----------------------------------------------------------------------------------------------------------------


def _heading(label: str, problem: Problem, priced: PricedLayout, found: Topology, shown: Sequence[str]) -> Iterator[Text]:
    layout, names = priced.layout, [name for name in DEGREES if problem.model.is_moe or name not in OF_EXPERTS]
    yield Text(MARGIN, MARGIN + 16, label, 20, bold=True)
    degrees = " · ".join(f"{name} {getattr(layout, name)}" for name in names)
    yield Text(MARGIN, MARGIN + 38, f"{degrees} · step {wording.seconds(priced.step_time_s)}", 13, FAINT)
    for dimension in found.dimensions:
        if dimension.name in shown:
            yield Text(MARGIN, MARGIN + 60, _caption(dimension, found), 13, classes=(f"only-{dimension.name}",))


def _caption(dimension: Dimension, found: Topology) -> str:
    if dimension.name == "pp":
        how = f"Colour: pipeline stage, {dimension.size} of them"
    else:
        how = f"Colour: {dimension.name} group; devices of one colour that lie next to each other are one group of {dimension.size}"
        if dimension.most_supernodes > 1 or dimension.reach != found.levels[0].name:
            how = f"Colour: {dimension.name} group, {wording.count(dimension.count, 'group')} of {dimension.size}"
    turn = f"; {len(COLOURS)} colours in turn" if _colours(dimension, found) > len(COLOURS) else ""
    places = range(len(found.devices))
    unused = any(_usable(found, index) > found.devices[index] for index in places)
    taken = any(_slots(found, index) > _usable(found, index) for index in places)
    return f"{how}{turn}{'; outlined: not used' if unused else ''}{'; grey: not free' if taken else ''}."


def _colours(dimension: Dimension, found: Topology) -> int:
    return dimension.size if dimension.name == "pp" else dimension.count


# --- supernodes in full ------------------------------------------------------------------------------------------------------


def _plot(found: Topology) -> Plot:
    """The largest devices with which the supernodes that are to be drawn fit beside the panel."""
    total, count = int(found.devices.sum()), len(found.devices)
    for drawn in (count, 1) if total <= ALL_DRAWN else (1,):
        height = HEIGHT - MARGIN - 92.0 - (110.0 if drawn < count else 0.0)
        for pixel in PIXELS:
            for shape in SHAPES:
                plot = _sized(found, drawn, float(pixel), ROOM / height, shape)
                across, down = plot.supernodes.extent(drawn)
                if across <= ROOM and down <= height and (drawn == 1 or pixel >= LEAST_OF_ALL):
                    return plot
    return _sized(found, 1, float(PIXELS[-1]), 1.0, 1.0)


def _sized(found: Topology, drawn: int, pixel: float, space: float, shape: float) -> Plot:
    """Grids for devices of `pixel` side: supernodes of a shape (width over height), together in the shape of the space."""
    cell = pixel * (1.0 + GAP)
    devices = Grid(_columns_of_server(found.server), cell, cell)
    across, down = devices.extent(found.server)
    pad = max(2.0, pixel * 0.35)
    servers_each = math.ceil(max(_slots(found, index) for index in range(drawn)) / found.server)
    single = servers_each == 1
    title = 13.0 if across >= NAMED and not single else 0.0
    server = (across + 2 * pad + (0 if single else pad), down + 2 * pad + title + (0 if single else pad))
    servers = Grid(_columns(servers_each, *server, space if drawn == 1 else shape), *server)
    wide, high = servers.extent(servers_each)
    supernode = (wide + 26.0, high + 40.0)
    return Plot(pixel, devices, servers, Grid(_columns(drawn, *supernode, space), *supernode), drawn)


def _name(found: Topology) -> str:
    """What a supernode is called where it is no more than a server."""
    return "server" if found.supernode_name == "server" else "supernode"


def _columns_of_server(count: int) -> int:
    """Columns that fill whole rows, a little wider than high."""
    whole = [n for n in range(1, count + 1) if count % n == 0]
    return min(whole, key=lambda n: (abs(math.log(n / math.sqrt(1.7 * count))), -n))


def _columns(count: int, width: float, height: float, shape: float) -> int:
    """Columns with which `count` cells come nearest to a shape (width over height); whole rows where that costs little."""
    best = min(range(1, count + 1), key=lambda n: (max(n * width, math.ceil(count / n) * height * shape), n))
    even = [n for n in range(1, count + 1) if count % n == 0 and 0.7 * best <= n <= 1.4 * best]
    return min(even, key=lambda n: abs(n - best)) if even else best


def _supernodes(found: Topology, plot: Plot, shown: Sequence[str]) -> Iterator[Rect | Text]:
    for index in range(plot.drawn):
        x, y = plot.supernodes.at(index)
        yield from _supernode(found, plot, index, MARGIN + x, MARGIN + 92.0 + y, shown)


def _supernode(found: Topology, plot: Plot, index: int, x: float, y: float, shown: Sequence[str]) -> Iterator[Rect | Text]:
    ranks = np.flatnonzero(found.columns["supernode"] == index)
    slots = _slots(found, index)
    servers = math.ceil(slots / found.server)
    wide, high = plot.servers.extent(servers)
    name = _name(found)
    there = max(len(ranks), found.free[index]) if found.free else found.supernode_size
    of = f" of {there:,}" if len(ranks) < there else ""
    used = math.ceil(len(ranks) / found.server)
    short = f"{len(ranks):,}{of} devices"
    held = short + (f", {used} {found.server_name}s" if used > 1 else "")
    titles = (f"{name} {index} · {held}", f"{name} {index} · {short}", f"{name} {index} · {len(ranks):,}{of}", f"{name} {index}")
    said = next((title for title in titles if _width(title, 12) <= wide), str(index))
    yield Rect(x, y, wide + 14, high + 26, "#ffffff", FRAME, 4, f"{name} {index}: {held}", "supernode")
    yield Text(x + 8, y + 15, said, 12, INK, bold=True)
    for server in range(servers):
        dx, dy = plot.servers.at(server)
        begin, end = server * found.server, min((server + 1) * found.server, slots)
        usable = min(max(_usable(found, index) - begin, 0), end - begin)
        yield from _server(found, plot, ranks[begin:end], usable, end - begin, x + 8 + dx, y + 22 + dy, servers > 1, shown)


def _usable(found: Topology, index: int) -> int:
    """Devices of a supernode that are the job's to use, as far as they are drawn: of one that nobody spoke of, all."""
    return max(int(found.devices[index]), found.free[index]) if found.free else _slots(found, index)


def _slots(found: Topology, index: int) -> int:
    """Devices of a supernode that are drawn: all it has, or those that are the job's where most are another's."""
    own = _usable(found, index) if found.free else int(found.devices[index])
    return found.supernode_size if found.supernode_size <= MOST_UNUSED * max((own, *found.free)) else own


def _server(
    found: Topology, plot: Plot, ranks: Ints, usable: int, slots: int, x: float, y: float, boxed: bool, shown: Sequence[str]
) -> Iterator[Rect | Text]:
    """A server with the devices of `ranks`, outlines of those that the plan does not use, up to `usable`, and the others, up to
    `slots`, in grey.
    """
    across, down = plot.devices.extent(found.server)
    pad = max(2.0, plot.pixel * 0.35)
    title = 13.0 if across >= NAMED and boxed else 0.0
    if boxed:
        yield Rect(
            x, y, across + 2 * pad - plot.pixel * GAP, down + 2 * pad - plot.pixel * GAP + title, SERVER, "", 2, "", "server"
        )
    if title:
        host = f"{found.server_name} {found.columns['host'][ranks[0]]}" if len(ranks) else "not used" if usable else "not free"
        yield Text(x + pad, y + 12, host, 9.5, FAINT)
    for place in range(len(ranks), slots):
        dx, dy = plot.devices.at(place)
        fill, line, said, kind = ("#ffffff", FRAME, "not used", "unused") if place < usable else (TAKEN, "", "not free", "taken")
        yield Rect(x + pad + dx, y + pad + title + dy, plot.pixel, plot.pixel, fill, line, 2, said, kind)
    for place, rank in enumerate(ranks.tolist()):
        dx, dy = plot.devices.at(place)
        yield from _device(found, plot.pixel, rank, x + pad + dx, y + pad + title + dy, shown)


def _device(found: Topology, pixel: float, rank: int, x: float, y: float, shown: Sequence[str]) -> Iterator[Rect | Text]:
    """A square with its coordinates on hover, in the colour of its group."""
    columns = found.columns
    where = " · ".join(f"{d.name} {columns[d.name][rank]}" for d in found.dimensions)
    title = f"rank {rank} · {where} · host {columns['host'][rank]} · device {columns['device'][rank]}"
    colour = {d.name: _colour(d, found, rank) for d in found.dimensions if d.name in shown}
    fill = COLOURS[colour.get(found.default, 0)]
    yield Rect(x, y, pixel, pixel, fill, "", min(2.0, pixel / 8), title, "device", tuple(f"{n}-{c}" for n, c in colour.items()))
    if pixel >= NUMBERED:
        size = min(pixel * 0.36, 1.5 * pixel / max(3, len(str(rank))))
        yield Text(x + pixel / 2, y + pixel / 2 + size * 0.36, str(rank), size, INK, "middle")


def _colour(dimension: Dimension, found: Topology, rank: int) -> int:
    index = found.columns["pp"][rank] if dimension.name == "pp" else dimension.group[rank]
    return int(index) % len(COLOURS)


# --- the other supernodes ----------------------------------------------------------------------------------------------------


def _tiles(found: Topology, shown: Sequence[str], y: float) -> tuple[list[Rect | Text], float]:
    """A tile for every supernode, or for several in a row: green where groups stay inside, orange where one leaves."""
    count = len(found.devices)
    each = math.ceil(count / MOST_TILES)
    tiles = [range(first, min(first + each, count)) for first in range(0, count, each)]
    side = min(56.0, max(10.0, math.floor(math.sqrt(ROOM * 330.0 / len(tiles)))))
    rows = math.ceil(len(tiles) / int(ROOM // side))
    grid = Grid(math.ceil(len(tiles) / rows), side, side * 0.72 if side >= 34 else side)
    least, most = (f"{number:,}" for number in (found.devices.min(), found.devices.max()))
    held = f"{most} devices in each" if least == most else f"{least} to {most} devices in each"
    idle = sum(found.free) - int(found.devices.sum())
    what = f"All {count:,} {_name(found)}s, {held}" + (f"; {each} to a tile" if each > 1 else "")
    what += f"; {idle:,} free ones are not used" if idle > 0 else ""
    shapes: list[Rect | Text] = [Text(MARGIN, y, what, 13, bold=True)]
    for dimension in found.dimensions:
        if dimension.name in shown:
            shapes.append(Text(MARGIN, y + 17, _tile_caption(dimension), 11.5, FAINT, classes=(f"only-{dimension.name}",)))
    top = y + 28
    for place, members in enumerate(tiles):
        dx, dy = grid.at(place)
        shapes += _tile(found, members, grid, MARGIN + dx, top + dy, shown)
    return shapes, top + grid.extent(len(tiles))[1]


def _tile_caption(dimension: Dimension) -> str:
    if dimension.name == "pp":
        return "colour: the first pipeline stage in it"
    return f"green: every {dimension.name} group lies inside one; orange: some {dimension.name} groups reach into others"


def _tile(found: Topology, members: range, grid: Grid, x: float, y: float, shown: Sequence[str]) -> list[Rect | Text]:
    first, last = members[0], members[-1]
    devices = int(found.devices[first : last + 1].sum())
    classes, fill, lines = [], TRACK, []
    for dimension in found.dimensions:
        inside, across = (int(column[first : last + 1].sum()) for column in (dimension.inside, dimension.across))
        lines.append(f"{dimension.name}: {inside} groups inside, {across} across")
        if devices and dimension.name in shown:
            colour, mark = _tile_colour(found, dimension, first, across)
            classes.append(mark)
            fill = colour if dimension.name == found.default else fill
    name = f"{_name(found)} {first}" if first == last else f"{_name(found)}s {first} to {last}"
    width, height = grid.width - 3, grid.height - 3
    title = f"{name}: {devices:,} devices\n" + "\n".join(lines)
    shapes: list[Rect | Text] = [Rect(x, y, width, height, fill, "", 2, title, "tile", tuple(classes))]
    if grid.width >= COUNTED:
        size = min(11.0, 1.5 * width / max(3, len(f"{devices:,}")))
        shapes.append(Text(x + width / 2, y + height / 2 + size * 0.36, f"{devices:,}", size, INK, "middle"))
    return shapes


def _tile_colour(found: Topology, dimension: Dimension, supernode: int, across: int) -> tuple[str, str]:
    """Fill, and the class by which a page colours the tile."""
    if dimension.name == "pp":
        stage = int(found.columns["pp"][int(found.devices[:supernode].sum())]) % len(COLOURS)
        return COLOURS[stage], f"pp-{stage}"
    mark = "across" if across else "inside"
    return MARKS[mark], f"{dimension.name}-{mark}"


# --- levels and groups -------------------------------------------------------------------------------------------------------


def _panel(found: Topology, x: float) -> tuple[list[Rect | Text], float]:
    """What each level carries, and how far the groups of each dimension reach, from x on."""
    y = MARGIN + 16.0
    shapes: list[Rect | Text] = [
        Text(x, y, "Load of each level", 14, bold=True),
        Text(x, y + 17, "Bars: GiB a device sends in a step; %: of the step at full rate", 11, FAINT),
    ]
    y += 40
    names = [name for name in HUES if any(name in level.gib for level in found.levels)]
    longest = max((level.total_gib for level in found.levels), default=0.0)
    for level in reversed(found.levels):
        shapes += _level(level, longest, x, y)
        y += 52
    for place, name in enumerate(names):
        shapes.append(Rect(x + place * 46, y - 4, 10, 10, HUES[name]))
        shapes.append(Text(x + 14 + place * 46, y + 5, name, 11, FAINT))
    y += 44
    shapes.append(Text(x, y, "Groups", 14, bold=True))
    for dimension in found.dimensions:
        y += 22
        shapes.append(Text(x, y, f"{dimension.name} {dimension.size}", 12, bold=True))
        shapes.append(Text(x + 76, y, wording.count(dimension.count, "group"), 12, FAINT))
        shapes.append(Text(x + PANEL, y, _reach(dimension, found), 12, INK, "end"))
    return shapes, y + 10


def _level(level: LevelLoad, longest: float, x: float, y: float) -> Iterator[Rect | Text]:
    yield Text(x, y, level.name, 12, bold=True)
    said = f"{wording.gib(level.total_gib)} · {wording.percent(level.utilisation)}" if level.gib else "nothing crosses it"
    yield Text(x + PANEL, y, said, 12, INK if level.gib else FAINT, "end")
    yield Rect(x, y + 7, PANEL, 16, TRACK, "", 2)
    at = x
    for name, sent in sorted(level.gib.items(), key=lambda item: -item[1]):
        wide = PANEL * sent / longest
        yield Rect(at, y + 7, wide, 16, HUES[name], "", 0, f"{level.name}, {name}: {wording.gib(sent)}", "load")
        at += wide


def _reach(dimension: Dimension, found: Topology) -> str:
    if dimension.most_supernodes > 1:
        return f"across {dimension.most_supernodes:,} {_name(found)}s"
    return f"within a {dimension.reach}"
