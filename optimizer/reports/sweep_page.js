// Draws a sweep's points as they are filtered. SWEEP holds the points, the names of the axes and the look; Plotly is on this page.
"use strict";

const CONFIG = { displayModeBar: false };
const FONT = { family: "DejaVu Sans, Verdana, Arial, sans-serif", size: 11, color: "#1c1f24" };
const ALL = "all";
const MOST_PANELS = 24;
const LEFT = 74; // margin of a panel
const LETTER = 7.6; // width of a title's letters
const MOST_TICKS = 6;
const LEAST_RATIO = 3; // of the ends of a logarithmic axis, so that differences of a per cent look like it

const chosen = {};
let measure = Object.keys(SWEEP.measures)[0];

function begin() {
  const bar = document.getElementById("filters");
  for (const axis of SWEEP.axes) {
    chosen[axis.name] = ALL;
    bar.append(choice(axis.name, axis.words, [[ALL, ALL], ...axis.values.map((value, n) => [String(n), axis.labels[n]])], (picked) => {
      chosen[axis.name] = picked;
    }));
  }
  bar.append(choice("measure", "curves of", Object.keys(SWEEP.measures).map((name) => [name, name]), (picked) => {
    measure = picked;
  }));
  const key = document.getElementById("key");
  for (const name of SWEEP.strategies.filter((name) => SWEEP.points.some((point) => point.strategy === name))) {
    const item = document.createElement("span");
    const patch = document.createElement("i");
    patch.style.background = SWEEP.colours[name];
    item.append(patch, name);
    key.append(item);
  }
  draw();
  if (SWEEP.trades.length > 0) show("trades", SWEEP.trades.map((trade) => [trade.title, trade]), traded);
}

function choice(name, words, options, take) {
  const label = document.createElement("label");
  const list = document.createElement("select");
  list.name = name;
  for (const [value, text] of options) list.append(new Option(text, value));
  list.addEventListener("change", () => {
    take(list.value);
    draw();
  });
  label.append(words, list);
  return label;
}

function draw() {
  const points = SWEEP.points.filter((point) => SWEEP.axes.every((axis) => keeps(axis, point)));
  const planned = points.filter((point) => point.strategy !== null);
  document.getElementById("count").textContent =
    `${points.length.toLocaleString("en")} of ${SWEEP.points.length.toLocaleString("en")} points, ${planned.length.toLocaleString("en")} with a plan`;
  show("strategies", groups(points, [SWEEP.across, SWEEP.upwards, ...SWEEP.implied]), phase);
  const along = SWEEP.across === "cluster" ? [] : planned; // clusters side by side make no line
  const lines = groups(along, [SWEEP.across, "cluster"]).filter(([, held]) => distinct(held, SWEEP.across).length > 1);
  show("curves", lines, curve, missing(points, lines, `with no other ${SWEEP.names[SWEEP.across]} to draw a line to`));
  const fronts = groups(planned, ["devices", "cluster"]).filter(([, held]) => distinct(held, "speed").length > 1);
  show("fronts", fronts, front, missing(points, fronts, "with no other of the same problem to trade against"));
}

// Which points no panel shows, and why.
function missing(points, panels, alone) {
  const drawn = new Set(panels.flatMap(([, held]) => held));
  const left = points.filter((point) => !drawn.has(point));
  const unplanned = left.filter((point) => point.strategy === null).length;
  const counted = (count, why) => (count ? [`${count.toLocaleString("en")} ${count === 1 ? "point" : "points"} ${why}`] : []);
  const said = [...counted(unplanned, "without a plan"), ...counted(left.length - unplanned, alone)];
  return said.length ? `Not drawn: ${said.join(", ")}.` : "";
}

function keeps(axis, point) {
  if (chosen[axis.name] === ALL) return true;
  const wanted = axis.values[Number(chosen[axis.name])];
  return axis.name === "batch" ? point.batch.includes(wanted) : point[axis.name] === wanted;
}

// Points by what differs between them beside what a panel shows; those of several batches are in the panels of all that are kept.
function groups(points, inside) {
  const apart = SWEEP.axes.filter((axis) => !inside.includes(axis.name));
  const found = new Map();
  for (const point of points) {
    const byBatch = apart.find((axis) => axis.name === "batch");
    for (const batch of byBatch ? point.batch.filter((name) => chosen.batch === ALL || name === byBatch.values[Number(chosen.batch)]) : [null]) {
      const places = apart.map((axis) => axis.values.indexOf(axis.name === "batch" ? batch : point[axis.name]));
      const title = apart.map((axis, n) => (axis.name === "batch" ? "batch " : "") + axis.labels[places[n]]).join(" · ");
      if (!found.has(title)) found.set(title, { places, held: [] });
      found.get(title).held.push(point);
    }
  }
  const order = [...found.entries()].sort(([, a], [, b]) => {
    const n = a.places.findIndex((place, at) => place !== b.places[at]);
    return n < 0 ? 0 : a.places[n] - b.places[n];
  });
  return order.map(([title, group]) => [title, group.held]);
}

function show(name, panels, drawn, undrawn = "") {
  const place = document.getElementById(name);
  for (const panel of place.querySelectorAll(".panel")) Plotly.purge(panel);
  place.replaceChildren();
  for (const [title, held] of panels.slice(0, MOST_PANELS)) {
    const panel = document.createElement("div");
    panel.className = "panel";
    place.append(panel);
    const { traces, layout } = drawn(held);
    const lines = folded(title, layout.width - LEFT - 10);
    const more = 16 * (lines.length - 1); // room above for the lines of the title
    const top = { ...layout, height: layout.height + more, margin: { ...base("").margin, ...layout.margin, t: 34 + more } };
    Plotly.newPlot(panel, traces, { ...base(lines.join("<br>")), ...top }, CONFIG);
  }
  const left = panels.length - MOST_PANELS;
  const more = left > 0 ? `${left} more panels: choose above what to look at.` : panels.length ? "" : "No points to draw: choose others above.";
  document.getElementById(`${name}-more`).textContent = [more, undrawn].filter(Boolean).join(" ");
}

// A title as lines that a panel is wide enough for, broken between its parts.
function folded(title, width) {
  const lines = [];
  for (const part of title.split(" · ")) {
    const longer = lines.length ? `${lines.at(-1)} · ${part}` : part;
    if (lines.length && longer.length * LETTER > width) lines.push(part);
    else lines.splice(-1, 1, longer);
  }
  return lines;
}

function base(title) {
  return {
    title: { text: title, font: { ...FONT, size: 13 }, x: 0, xref: "paper", xanchor: "left" },
    font: FONT, margin: { l: LEFT, r: 20, t: 34, b: 44 }, showlegend: false, plot_bgcolor: "#fff",
    hoverlabel: { align: "left", bgcolor: "#fff", bordercolor: "#59606b", font: { ...FONT, size: 12 } },
  };
}

function distinct(points, name) {
  return [...new Set(points.map((point) => point[name]))];
}

// --- which strategy wins where -------------------------------------------------------------------------------------------------

function phase(held) {
  const xs = SWEEP.orders[SWEEP.across].filter((value) => held.some((point) => point[SWEEP.across] === value));
  const ys = SWEEP.orders[SWEEP.upwards].filter((value) => held.some((point) => point[SWEEP.upwards] === value));
  const at = (y, x) => held.find((point) => point[SWEEP.across] === x && point[SWEEP.upwards] === y);
  const cells = (read, none) => ys.map((y) => xs.map((x) => { const point = at(y, x); return point === undefined ? none : read(point); }));
  const count = SWEEP.strategies.length;
  const words = cells((point) => point.cell, "");
  const heat = {
    type: "heatmap", x: xs.map((_, n) => n), y: ys.map((_, n) => n),
    z: cells((point) => (point.strategy === null ? null : SWEEP.strategies.indexOf(point.strategy)), null),
    customdata: cells((point) => point.hover, ""), hovertemplate: "%{customdata}<extra></extra>", hoverongaps: true,
    colorscale: SWEEP.strategies.flatMap((name, n) => [[n / count, SWEEP.colours[name]], [(n + 1) / count, SWEEP.colours[name]]]),
    zmin: -0.5, zmax: count - 0.5, showscale: false, xgap: 3, ygap: 3,
  };
  const annotations = ys.flatMap((y, row) => xs.map((x, column) => ({
    x: column, y: row, text: words[row][column], showarrow: false,
    font: { ...FONT, size: 10, color: at(y, x)?.ink ?? "#59606b" }, captureevents: false,
  })));
  const axis = (values, name) => ({
    tickvals: values.map((_, n) => n), ticktext: values.map((value) => SWEEP.ticks[name][value]), range: [-0.5, values.length - 0.5],
    showgrid: false, zeroline: false, ticks: "", automargin: true,
  });
  return {
    traces: [heat],
    layout: {
      annotations, width: Math.max(260, 120 + 84 * xs.length), height: 92 + 56 * ys.length, plot_bgcolor: "#f1f2f4",
      xaxis: { ...axis(xs, SWEEP.across), title: { text: SWEEP.names[SWEEP.across], standoff: 6 } }, yaxis: axis(ys, SWEEP.upwards),
    },
  };
}

// --- curves and fronts ---------------------------------------------------------------------------------------------------------

function curve(held) {
  const ends = [];
  const traces = SWEEP.clusters.flatMap((cluster) => {
    const own = held.filter((point) => point.cluster === cluster.name).sort((a, b) => a[SWEEP.across] - b[SWEEP.across]);
    if (own.length === 0) return [];
    ends.push([cluster, own.at(-1)[SWEEP.across], own.at(-1).measures[measure]]);
    return [line(own, own.map((point) => point[SWEEP.across]), own.map((point) => point.measures[measure]), cluster)];
  });
  const xs = distinct(held, SWEEP.across).sort((a, b) => a - b);
  const share = measure === "MFU";
  const top = Math.max(...held.map((point) => point.measures[measure]));
  return {
    traces,
    layout: {
      ...side(ends, !share), width: 400, height: 290,
      xaxis: { type: "log", tickvals: xs, ticktext: xs.map((x) => SWEEP.ticks[SWEEP.across][x]), title: { text: SWEEP.names[SWEEP.across], standoff: 6 } },
      yaxis: { type: share ? "linear" : "log", title: { text: SWEEP.measures[measure] }, automargin: true, ...(share ? { nticks: 6, range: [0, 1.12 * top] } : logarithmic(held.map((point) => point.measures[measure]))) },
    },
  };
}

function front(held) {
  const ends = [];
  const traces = SWEEP.clusters.flatMap((cluster) => {
    const own = held.filter((point) => point.cluster === cluster.name);
    if (own.length === 0) return [];
    const best = unbeaten(own);
    const others = own.filter((point) => !best.includes(point));
    const last = best.at(-1);
    ends.push([cluster, last.speed, last.measures.cost]);
    return [
      { ...line(others, others.map((point) => point.speed), others.map((point) => point.measures.cost), cluster), mode: "markers", opacity: 0.35 },
      line(best, best.map((point) => point.speed), best.map((point) => point.measures.cost), cluster),
    ];
  });
  return {
    traces,
    layout: {
      ...side(ends, true), width: 440, height: 330,
      xaxis: { type: "log", title: { text: "tokens per second of the job: right is faster", standoff: 6 }, ...logarithmic(held.map((point) => point.speed), (value) => `${+(value / 1e6).toPrecision(4)}M`) },
      yaxis: { type: "log", title: { text: SWEEP.measures.cost }, automargin: true, ...logarithmic(held.map((point) => point.measures.cost)) },
    },
  };
}

// A front of one point, which filters leave alone.
function traded(trade) {
  const { points } = trade;
  const own = { type: "scatter", mode: "lines+markers", line: { color: SWEEP.clusters[0].colour, width: 1.6 }, marker: { size: 7 } };
  const said = (point) => [`<b>${point.words.replace(", ", "</b><br>")}`, ...(point.marks.length ? [point.marks.join(", ")] : [])].join("<br>");
  return {
    traces: [{
      ...own, x: points.map((point) => point.x), y: points.map((point) => point.y),
      customdata: points.map(said), hovertemplate: "%{customdata}<br>%{x:.4~g} · %{y:.4~g}<extra></extra>",
    }],
    layout: { width: 480, height: 330, xaxis: { title: { text: trade.x_name, standoff: 6 } }, yaxis: { title: { text: trade.y_name }, automargin: true } },
  };
}

// The ends of a logarithmic axis that shows these values.
function wide(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)].map(Math.log10);
  const more = Math.max(0.06, (Math.log10(LEAST_RATIO) - (high - low)) / 2);
  return [low - more, high + more];
}

// Range and ticks of a logarithmic axis: as many round values as have room, wherever it begins.
function logarithmic(values, words = (value) => (+value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 10 })) {
  const range = wide(values);
  const decades = Array.from({ length: Math.ceil(range[1]) - Math.floor(range[0]) }, (_, n) => Math.floor(range[0]) + n);
  const inside = (steps) => decades.flatMap((n) => steps.map((step) => step * 10 ** n)).filter((v) => Math.log10(v) > range[0] && Math.log10(v) < range[1]);
  const choices = [[1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8], [1, 1.5, 2, 3, 4, 6, 8], [1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]].map(inside);
  const tickvals = choices.find((ticks) => ticks.length <= MOST_TICKS) ?? choices.at(-1);
  return { range, tickvals, ticktext: tickvals.map(words) };
}

// None of them is beaten in speed by one that costs no more; from the cheapest on.
function unbeaten(points) {
  const order = [...points].sort((a, b) => a.measures.cost - b.measures.cost || b.speed - a.speed);
  return order.filter((point, n) => n === 0 || order.slice(0, n).every((before) => before.speed < point.speed));
}

function line(points, x, y, cluster) {
  return {
    type: "scatter", mode: "lines+markers", x, y, name: cluster.name, customdata: points.map((point) => point.hover),
    hovertemplate: "%{customdata}<extra></extra>", line: { color: cluster.colour, width: 1.6 }, marker: { symbol: cluster.mark, size: 7, color: cluster.colour },
  };
}

// Names beside the ends of lines, in the margin at the right, moved apart where they would lie on each other.
function side(ends, log) {
  if (SWEEP.clusters.length < 2 || ends.length === 0) return {};
  const order = [...ends].sort((a, b) => a[2] - b[2]);
  const annotations = order.map(([cluster, x, y], n) => {
    const near = n > 0 && Math.abs(Math.log(y / order[n - 1][2])) < 0.08;
    return {
      xref: "paper", x: 1.01, xanchor: "left", y: log ? Math.log10(y) : y, yshift: near ? 9 : n < order.length - 1 && Math.abs(Math.log(order[n + 1][2] / y)) < 0.08 ? -5 : 0,
      text: cluster.name, showarrow: false, font: { ...FONT, size: 10, color: cluster.text },
    };
  });
  return { annotations, margin: { l: 66, r: 118, t: 34, b: 44 } };
}

begin();
