"use strict";
// Draws the charts of a report with uPlot, from the JSON in #data.

const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = method => dark.matches ? method.dark : method.light;
const state = {x: null, logX: false, logY: false, off: [], zoom: {}};
const charts = new Map(); // element → {plot, methods}, the name of each series' method
let following = false; // whether a series is being switched because another chart's was

// ---- numbers as text ----
const digits = (value, n = 3) => String(Number(value.toPrecision(n)));
function inUnit(value, units) {
  const [unit, size] = units.find(([, , below]) => Math.abs(value) < below) ?? units.at(-1);
  return `${digits(value / size)} ${unit}`.trim();
}
const show = {
  seconds: v => v === 0 ? "0 s" : inUnit(v, [["µs", 1e-6, 1e-3], ["ms", 1e-3, 1], ["s", 1, 120], ["min", 60, 7200], ["h", 3600]]),
  bytes: v => inUnit(v, [["B", 1, 999.5], ["kB", 1e3, 999.5e3], ["MB", 1e6, 999.5e6], ["GB", 1e9, 999.5e9], ["TB", 1e12]]),
  count: v => inUnit(v, [["", 1, 9999.5], ["k", 1e3, 999.5e3], ["M", 1e6, 999.5e6], ["G", 1e9]]),
  number: v => Math.abs(v) < 1e5 ? digits(v, 5) : show.count(v),
};
// What curves are drawn over: label and format.
const overs = {
  step: ["step", show.count], time: ["training time", show.seconds], bytes: ["bytes sent by each worker", show.bytes],
};

// Time if it is known, unless the reader has chosen.
const overOf = lines => state.x ?? (lines.some(line => data.grids[line.grid].time) ? "time" : "step");

// ---- scales and axes ----
function logTicks(low, high, most) {
  for (const steps of [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let n = Math.floor(Math.log10(low)); n <= Math.log10(high); n++)
      for (const s of steps) if (s * 10 ** n >= low && s * 10 ** n <= high) ticks.push(Number((s * 10 ** n).toPrecision(6)));
    const gaps = ticks.slice(1).map((tick, n) => Math.log(tick / ticks[n]) / Math.log(high / low));
    if (Math.min(...gaps) > 0.9 / most) return ticks.length > 1 ? ticks : null;
  }
  return null;
}
function linearTicks(low, high, most) {
  const raw = (high - low) / most, base = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(s => s * base).find(s => s >= raw);
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high * (1 + 1e-9); n++) ticks.push(Number((n * step).toPrecision(9)));
  return ticks;
}
// Times on a linear axis have one unit.
const unitOf = high => high < 180 ? ["s", 1] : high < 7200 ? ["min", 60] : ["h", 3600];
function axis(label, format, space, more = {}) {
  const isTime = (u, n) => format === show.seconds && u.scales[n ? "y" : "x"].distr !== 3 && u.scales[n ? "y" : "x"].max >= 1;
  return {
    label, stroke: css("--soft"), font: "12px system-ui", labelFont: "12px system-ui", labelSize: 20, labelGap: 4,
    grid: {stroke: css("--rule"), width: 1}, ticks: {stroke: css("--rule"), width: 1},
    splits(u, n, low, high) {
      const most = Math.max(3, Math.floor((n ? u.bbox.height : u.bbox.width) / devicePixelRatio / space));
      const log = u.scales[n ? "y" : "x"].distr === 3;
      const size = isTime(u, n) ? unitOf(high)[1] : 1;
      return (log && logTicks(low, high, most)) || linearTicks(low / size, high / size, most).map(v => v * size);
    },
    filter: (u, splits) => splits,
    values: (u, splits, n) => {
      const [unit, size] = unitOf(u.scales[n ? "y" : "x"].max);
      return splits.map(v => v == null ? "" : isTime(u, n) ? `${digits(v / size)} ${unit}` : format(v));
    },
    ...more,
  };
}
// Room around the values, so that no point lies on the edge.
function padded(low, high, log, room) {
  if (!(low <= high)) return [0, 1];
  if (log && low > 0) { const factor = Math.max((high / low) ** room, 1.02); return [low / factor, high * factor]; }
  const extra = (high - low) * room || Math.abs(high) * 0.05 || 1;
  return [low - extra, high + extra];
}

// ---- drawing on the canvas, in CSS pixels ----
function onCanvas(u, draw) {
  const {ctx, bbox} = u, ratio = devicePixelRatio;
  ctx.save();
  ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
  ctx.scale(ratio, ratio); ctx.textAlign = "left";
  draw(ctx, v => u.valToPos(v, "x", true) / ratio, v => u.valToPos(v, "y", true) / ratio, {
    left: bbox.left / ratio, top: bbox.top / ratio, right: (bbox.left + bbox.width) / ratio, bottom: (bbox.top + bbox.height) / ratio,
  });
  ctx.restore();
}
function stroke(ctx, points, style, width = 1, dash = []) {
  ctx.beginPath(); ctx.strokeStyle = style; ctx.lineWidth = width; ctx.setLineDash(dash);
  points.forEach(([x, y], n) => n ? ctx.lineTo(x, y) : ctx.moveTo(x, y));
  ctx.stroke();
}

// ---- a plot and its legend ----
function plot(holder, options, values, methods) {
  const u = new uPlot({
    width: holder.clientWidth, height: holder.clientWidth < 420 ? 250 : 300, legend: {live: true}, ...options,
    hooks: {...options.hooks, setSeries: [(u, n, change) => follow(holder, n, change)]},
  }, values, holder);
  charts.set(holder, {plot: u, methods});
  for (const head of u.root.querySelectorAll(".u-series th")) {
    head.tabIndex = 0;
    head.onkeydown = event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); head.click(); } };
  }
  return u;
}
// A method that is switched off in one chart is switched off in all.
function follow(holder, n, change) {
  const name = charts.get(holder)?.methods[n];
  if (following || name == null || change.show == null) return;
  state.off = state.off.filter(other => other !== name).concat(change.show ? [] : [name]);
  following = true;
  for (const {plot, methods} of charts.values())
    methods.forEach((other, i) => { if (other === name && plot.series[i].show !== change.show) plot.setSeries(i, {show: change.show}); });
  following = false;
}

const nearest = (u, n, at) => {
  const xs = u.data[0], ys = u.data[n], x = xs[at];
  let low = at, high = at;
  while (low >= 0 && ys[low] == null) low--;
  while (high < ys.length && ys[high] == null) high++;
  if (low < 0) return high < ys.length ? high : null;
  return high < ys.length && xs[high] - x < x - xs[low] ? high : low;
};

function drawCurve(holder, spec) {
  const id = holder.dataset.chart, over = overOf(spec.lines);
  const positive = x => !state.logX || x > 0, value = y => y != null && (!state.logY || y > 0);
  const lines = spec.lines.filter(line => data.grids[line.grid][over]).map(line => {
    const xs = data.grids[line.grid][over], keep = xs.map((x, n) => n).filter(n => positive(xs[n]) && value(line.y[n]));
    const pick = values => values && keep.map(n => values[n]);
    return {...line, x: pick(xs), y: pick(line.y), low: pick(line.low), high: pick(line.high), of: data.methods[line.method]};
  }).filter(line => line.x.length);
  const left = [...new Set(spec.lines.map(line => data.methods[line.method].name))].filter(name => !lines.some(line => line.of.name === name));
  const note = `Not known over ${overs[over][0]}: ${left.join(", ")}.`;
  if (left.length) holder.append(Object.assign(document.createElement("p"), {className: "soft", textContent: note}));
  if (!lines.length) return;
  const values = uPlot.join(lines.map(line => [line.x, line.y]));
  const first = values[0][0], last = values[0].at(-1), whole = u => u.scales.x.min <= first && u.scales.x.max >= last;
  const visible = u => lines.filter((line, n) => u.series[n + 1].show);
  const format = show.number;
  const range = (u, low, high) => {
    // Called before the range of x is set, so what is visible is known by its values only.
    const shown = visible(u).flatMap(line => line.y), all = low <= Math.min(...shown) && high >= Math.max(...shown);
    if (all && !state.logY) {
      const late = visible(u).flatMap(line => [line.y, line.low ?? [], line.high ?? []].flatMap(ys => ys.slice(ys.length < 6 ? 0 : ys.length >> 1)));
      if (late.length) [low, high] = [Math.min(...late), Math.max(...late)];
    }
    return padded(low, high, state.logY, 0.06);
  };
  const u = plot(holder, {
    cursor: {dataIdx: nearest, drag: {x: true, y: false}, points: {size: 7}},
    scales: {
      x: {time: false, distr: state.logX ? 3 : 1, range: (u, low, high) => low < high ? [low, high] : padded(low, high, false, 0.05)},
      y: {distr: state.logY ? 3 : 1, range},
    },
    axes: [axis(overs[over][0], overs[over][1], 55, {size: 34}), axis(null, format, 40, {size: 62})],
    series: [{label: over, value: (u, v) => v == null ? "–" : overs[over][1](v)}, ...lines.map(line => ({
      label: line.of.name + (line.label ? ` (${line.label})` : ""), stroke: colour(line.of), width: 2, spanGaps: true,
      dash: line.label ? [4, 4] : line.of.dash, points: {show: line.x.length < 25, size: 5, fill: colour(line.of)},
      show: !state.off.includes(line.of.name), value: (u, v) => v == null ? "–" : format(v),
    }))],
    hooks: {
      drawAxes: [u => onCanvas(u, (ctx, x, y) => {
        for (const line of visible(u).filter(line => line.low)) {
          ctx.beginPath(); ctx.globalAlpha = 0.16; ctx.fillStyle = colour(line.of);
          line.x.forEach((at, n) => ctx.lineTo(x(at), y(line.high[n])));
          for (let n = line.x.length - 1; n >= 0; n--) ctx.lineTo(x(line.x[n]), y(line.low[n]));
          ctx.fill();
        }
      })],
      draw: [u => onCanvas(u, (ctx, x, y, box) => drawMarks(ctx, visible(u), over, x, box))],
      setScale: [(u, key) => {
        if (key !== "x" || !charts.has(holder)) return;
        if (whole(u)) delete state.zoom[id]; else state.zoom[id] = [over, u.scales.x.min, u.scales.x.max];
      }],
    },
  }, values, [null, ...lines.map(line => line.of.name)]);
  const [axisOfZoom, min, max] = state.zoom[id] ?? [];
  if (axisOfZoom === over) u.setScale("x", {min, max});
}
function drawMarks(ctx, lines, over, x, box) {
  const seen = new Set(), ends = []; // ends: of the labels in each row
  ctx.font = "11px system-ui"; ctx.textBaseline = "top";
  const key = over === "time" ? "seconds" : over;
  for (const line of lines) for (const mark of line.marks) {
    if (mark[key] == null || (state.logX && mark[key] <= 0)) continue;
    const at = x(mark[key]), name = `${mark.label} ${Math.round(at)}`;
    if (seen.has(name)) continue; // of another method, at the same place
    seen.add(name);
    stroke(ctx, [[at, box.top], [at, box.bottom]], colour(line.of), 1, [3, 3]);
    const width = ctx.measureText(mark.label).width, left = at + width + 6 > box.right ? at - width - 4 : at + 4;
    let row = 0;
    while (ends[row] != null && ends[row].some(([a, b]) => left < b + 4 && left + width > a - 4)) row++;
    (ends[row] ??= []).push([left, left + width]);
    ctx.globalAlpha = 0.8; ctx.fillStyle = css("--card"); ctx.fillRect(left - 2, box.top + 2 + 14 * row, width + 4, 13); ctx.globalAlpha = 1;
    ctx.fillStyle = colour(line.of); ctx.fillText(mark.label, left, box.top + 3 + 14 * row);
  }
}
