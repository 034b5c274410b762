"use strict";
// Draws the page's plots with uPlot, filters the samples, and follows a running run.

const byId = id => document.getElementById(id);
const colourOf = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isNumber = value => typeof value === "number";
const faded = colour => colour + "26";
const BAR = uPlot.paths.bars({size: [1, Infinity], align: 0});
const WHOLE = [...Array(9).keys()].flatMap(power => [1, 2, 5].map(n => n * 10 ** power));

function shortNumber(value, digits) {
  if (!isNumber(value)) return "-";
  const size = Math.abs(value);
  if (size && size < 1e-3) return value.toExponential(Math.max(0, digits - 2)).replace(/\.?0+e/, "e");
  if (size >= 1e4) return new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: digits}).format(value);
  return String(Number(value.toPrecision(digits)));
}

class Chart {
  constructor(element, plot) {
    this.element = element;
    this.drawing = element.querySelector(".drawing");
    this.outputs = [...element.querySelectorAll(".legend output")];
    this.isLog = plot.log;
    this.set(plot);
    this.draw();
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.element);
  }

  end() {
    this.observer.disconnect();
    this.chart.destroy();
  }

  // Takes new values of the same plot, and keeps the reader's zoom.
  update(plot) {
    const {min, max} = this.chart.scales.x;
    const isZoomed = min > this.ends[0] || max < this.ends[1];
    this.set(plot);
    this.chart.setData(this.columns(), !isZoomed);
    if (isZoomed) this.chart.setScale("x", {min, max});
    this.tell();
  }

  set(plot) {
    this.plot = plot;
    this.ends = [plot.x[0] - plot.xMargin, plot.x[plot.x.length - 1] + plot.xMargin];
  }

  draw() {
    const width = this.drawing.clientWidth;
    const old = this.chart;
    if (!old) this.drawing.textContent = "";
    else old.destroy();
    this.chart = new uPlot(this.options(width), this.columns(), this.drawing);
    this.tell();
  }

  resize() {
    const width = this.drawing.clientWidth;
    if (width && width !== this.chart.width) this.chart.setSize({width, height: this.chart.height});
  }

  // Columns of uPlot: x, then each series' edges and line, or the tops of a stack from its last layer to its first.
  columns() {
    const {x, series, stacked} = this.plot;
    const drawn = values => this.isLog ? values.map(value => value > 0 ? value : null) : values;
    if (stacked) {
      const tops = [];
      series.reduce((below, s) => (tops.unshift(below.map((top, i) => top + (s.y[i] || 0))), tops[0]), x.map(() => 0));
      return [x, ...tops];
    }
    return [x, ...series.flatMap(s => [...(s.low ? [s.low, s.high] : []), s.y].map(drawn))];
  }

  options(width) {
    const {plot} = this, ink = colourOf("--ink"), grid = colourOf("--grid");
    const series = [{}], bands = [];
    const layers = plot.stacked ? [...plot.series].reverse() : plot.series;
    for (const s of layers) {
      const colour = colourOf(s.colour), scale = s.right ? "right" : "y";
      const common = {scale, spanGaps: s.joined, points: {show: false}};
      if (plot.stacked) {
        series.push({...common, fill: colour, stroke: colour, width: 0, paths: BAR});
        continue;
      }
      if (s.low) {
        if (!s.bars) bands.push({series: [series.length + 1, series.length], fill: faded(colour)});
        series.push({...common, width: 0}, {...common, width: 0});
      }
      const points = plot.x.length <= 40 && !s.faint && s.colour !== "--ink" ? {show: true, size: 6, fill: colour} : common.points;
      series.push({...common, stroke: s.faint ? colour + "59" : colour, width: s.width, dash: s.dash, points});
    }
    const range = {
      zero: (u, low, high) => [0, 1.06 * high || 1],
      around: (u, low, high) => (largest => [-largest, largest])(1.06 * Math.max(Math.abs(low), Math.abs(high)) || 1),
    }[plot.from];
    const yScale = this.isLog ? {distr: 3} : range ? {range} : {};
    const axis = {stroke: ink, grid: {stroke: grid, width: 0.6}, ticks: {stroke: grid, size: 4}, font: "12px system-ui", labelFont: "12px system-ui", labelSize: 18};
    const yAxis = {
      ...axis,
      scale: "y",
      label: plot.yLabel,
      values: (u, splits) => splits.map(value => value === null ? "" : shortNumber(value, 4)),
      size: (u, texts) => 16 + 7.5 * Math.max(2, ...(texts || []).map(text => text.length)),
    };
    const axes = [{...axis, label: plot.xLabel, size: 30, gap: 4, ...(plot.wholeX ? {incrs: WHOLE} : {})}, yAxis];
    if (plot.series.some(s => s.right)) axes.push({...yAxis, scale: "right", side: 1, label: plot.rightLabel, grid: {show: false}});
    return {
      width, height: Math.round(Math.max(190, Math.min(260, 0.62 * width))), series, bands, axes,
      padding: [10, axes.length > 2 ? 0 : 12, 0, 0],
      legend: {show: false},
      scales: {x: {time: false, range: (u, low, high) => low === null || (low === plot.x[0] && high === this.plot.x.at(-1)) ? this.ends : [low, high]}, y: yScale, right: yScale},
      cursor: {y: false, sync: {key: plot.xLabel, scales: ["x", null]}, points: {show: !plot.stacked, size: 7}},
      hooks: {setCursor: [() => this.tell()], draw: [u => this.drawBars(u)]},
    };
  }

  // Draws the interval of each single value.
  drawBars(u) {
    const place = (value, s) => u.valToPos(value, s.right ? "right" : "y", true);
    for (const s of this.plot.series.filter(s => s.bars)) {
      u.ctx.strokeStyle = colourOf(s.colour);
      u.ctx.lineWidth = devicePixelRatio;
      u.ctx.beginPath();
      this.plot.x.forEach((x, i) => {
        if (s.y[i] === null || x < u.scales.x.min || x > u.scales.x.max) return;
        const across = u.valToPos(x, "x", true);
        u.ctx.moveTo(across, place(s.low[i], s));
        u.ctx.lineTo(across, place(s.high[i], s));
      });
      u.ctx.stroke();
    }
  }

  // Writes the values at the pointer into the legend, or the latest values if the pointer is elsewhere.
  tell() {
    const {plot} = this, pointed = this.chart && this.chart.cursor.idx;
    plot.series.forEach((s, i) => {
      let at = pointed;
      while (s.joined && at > 0 && s.y[at] === null) at -= 1;
      const text = s.low && !isNumber(s.y[at]) ? "" : shortNumber(s.y[at], 4);
      const band = s.low && isNumber(s.y[at]) ? ` [${shortNumber(s.low[at], 3)}, ${shortNumber(s.high[at], 3)}]` : "";
      this.outputs[i].textContent = isNumber(pointed) ? text + band : s.latest;
    });
    const place = this.element.closest(".figure").querySelector(".at");
    if (place) place.textContent = isNumber(pointed) ? `${plot.wholeX ? "step" : plot.xLabel} ${shortNumber(plot.x[pointed], 6)}` : "";
  }
}

let charts = [];
const readPlots = page => JSON.parse(page.getElementById("plots").textContent);
const part = (page, name) => page.querySelector(`[data-part="${name}"]`);

// Takes the values out of a page's legends; what remains changes only with the figures and their lines.
function outline(page) {
  const figures = part(page, "figures");
  for (const output of figures.querySelectorAll("output")) output.textContent = "";
  return figures.innerHTML;
}

function drawCharts(plots) {
  charts.forEach(chart => chart.end());
  charts = [...document.querySelectorAll(".plot")].map((element, i) => new Chart(element, plots[i]));
  for (const figure of document.querySelectorAll(".figure")) {
    const own = charts.filter(chart => figure.contains(chart.element) && !chart.plot.stacked);
    const button = figure.querySelector("button.log");
    if (!own.length) continue;
    button.hidden = false;
    button.setAttribute("aria-pressed", own[0].isLog);
    button.addEventListener("click", () => {
      const isLog = !own[0].isLog;
      button.setAttribute("aria-pressed", isLog);
      for (const chart of own) { chart.isLog = isLog; chart.draw(); }
    });
  }
}

// A sample stays if each of its numbers lies within the reader's limits.
function filterSamples() {
  const asked = [...document.querySelectorAll("#filter input")].filter(input => input.value !== "");
  const samples = [...document.querySelectorAll(".sample")];
  for (const sample of samples) {
    sample.hidden = !asked.every(({dataset: {fact, end}, value}) => {
      const found = sample.dataset[fact];
      return found !== undefined && (end === "from" ? Number(found) >= Number(value) : Number(found) <= Number(value));
    });
  }
  byId("filter").hidden = !samples.length;
  byId("shown").textContent = samples.filter(sample => !sample.hidden).length;
}

// Takes what has changed from a newer page; keeps the reader's zoom, filter, open parts and place among the samples.
function take(page) {
  const isOpen = new Map([...document.querySelectorAll("details[data-key]")].map(({dataset, open}) => [dataset.key, open]));
  const scrolled = document.querySelector(".samples")?.scrollTop;
  for (const old of document.querySelectorAll('[data-part]:not([data-part="figures"])')) {
    old.replaceWith(part(page, old.dataset.part));
  }
  for (const details of document.querySelectorAll("details[data-key]")) {
    details.open = isOpen.get(details.dataset.key) ?? details.open;
  }
  filterSamples();
  document.querySelector(".samples")?.scrollTo(0, scrolled ?? 0);
  const plots = readPlots(page), newFigures = outline(page);
  if (newFigures === figures) return charts.forEach((chart, i) => chart.update(plots[i]));
  figures = newFigures;  // another figure, or another line in one
  part(document, "figures").innerHTML = figures;
  drawCharts(plots);
}

// On a live page: requests the page again. Only a failed request means that the server has ended.
async function follow(tag) {
  let html = null;
  try {
    const answer = await fetch(location.href, {cache: "no-store", headers: tag ? {"If-None-Match": tag} : {}});
    if (answer.status === 200) {
      html = await answer.text();
      tag = answer.headers.get("ETag");
    }
    byId("lost").hidden = true;
  } catch {
    byId("lost").hidden = false;
  }
  setTimeout(follow, 2000, tag);
  if (html !== null) take(new DOMParser().parseFromString(html, "text/html"));
}

document.body.classList.add("scripted");
let figures = "live" in document.body.dataset ? outline(document) : "";
drawCharts(readPlots(document));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach(chart => chart.draw()));
if (byId("filter")) {
  byId("filter").addEventListener("input", filterSamples);
  filterSamples();
}
if ("live" in document.body.dataset) follow("");
