// Curves: small charts that share one cursor.

const CHART_HEIGHT = 128;
const MARGIN = { left: 46, right: 10, top: 8, bottom: 20 };

/** What the charts show: one for each metric, the parts of a distribution together. */
function chartSpecs(updates, evaluations) {
  const points = new Map(); // name -> [{ x, time, y }]
  for (const row of [...updates, ...evaluations]) {
    for (const [name, y] of Object.entries(row.metrics)) {
      if (!points.has(name)) points.set(name, []);
      points.get(name).push({ x: row.update, time: row.time, y, text: row.nonfinite?.[name] });
    }
  }
  for (const list of points.values()) list.sort((a, b) => a.x - b.x);
  const folded = new Set();
  const specs = [];
  for (const name of points.keys()) {
    // A mean has its deviation beside it: `reward/mean` and `reward/std`, or `eval/reward` and `eval/reward_std`.
    const isMean = /(^|[/_])mean$/.test(name);
    const part = (kind) => (isMean ? name.replace(/mean$/, kind) : `${name}_${kind}`);
    const has = (kind) => points.has(part(kind));
    if (!has("std") && !(has("min") && has("max"))) continue;
    const spec = { name, main: points.get(name), band: null, sides: [], parts: [name] };
    if (has("std")) spec.band = points.get(part("std"));
    for (const kind of ["min", "max"]) if (has(kind)) spec.sides.push(points.get(part(kind)));
    for (const kind of ["std", "min", "max"]) if (has(kind)) folded.add(part(kind));
    specs.push(spec);
  }
  const combined = new Set(specs.map((spec) => spec.name));
  for (const [name, list] of points) {
    if (!folded.has(name) && !combined.has(name)) specs.push({ name, main: list, band: null, sides: [] });
  }
  const order = ({ name }) => [rank(ORDER, name), rank(KEY_METRICS, name)];
  return specs.sort((a, b) => {
    const [[prefixA, keyA], [prefixB, keyB]] = [order(a), order(b)];
    return prefixA - prefixB || keyA - keyB || a.name.localeCompare(b.name);
  });
}

/** Shown first; the others are a click away. */
const KEY_METRICS = [
  /^reward\/mean$/,
  /^reward\/(total_mean|group_std_mean)$/,
  /^eval\/(reward|pass|loss)/,
  /kl(_reference)?$/,
  /entropy$/,
  /clip_fraction/,
  /^(policy|train)\/loss$/,
  /truncated_fraction$|failed_fraction$/,
  /^completions\/.*mean/,
  /^judge\/degenerate/,
  /grad_norm$/,
  /tokens_per_second$/,
];

const ORDER = [/^reward\//, /^eval\//, /^policy\//, /^train\//, /^judge\//, /^agent\//, /^completions\//, /^optimizer\//];

function rank(patterns, name) {
  const index = patterns.findIndex((pattern) => pattern.test(name));
  return index < 0 ? patterns.length : index;
}

/** Shared by all charts: the x under the pointer, null for none. */
class Cursor extends EventTarget {
  x = null;

  set(x) {
    if (x === this.x) return;
    this.x = x;
    this.dispatchEvent(new Event("change"));
  }
}

/** One chart. `open(update)` goes to the rollouts of an update. */
class Chart {
  constructor(cursor, open) {
    this.cursor = cursor;
    this.readout = h("span", { class: "readout" });
    this.title = h("h3");
    this.plot = svg("svg", {
      class: "plot",
      height: CHART_HEIGHT,
      tabindex: "0",
      role: "img",
      onpointermove: (event) => this.cursor.set(this.nearest(event)),
      onpointerleave: () => this.cursor.set(null),
      onblur: () => this.cursor.set(null),
      onkeydown: (event) => this.key(event),
      onclick: () => this.cursor.x !== null && open(this.cursor.x),
    });
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, this.title, this.readout), this.plot);
    this.onCursor = () => this.drawCursor();
    cursor.addEventListener("change", this.onCursor);
  }

  remove() {
    this.cursor.removeEventListener("change", this.onCursor);
    this.element.remove();
  }

  draw(spec, width, { log, smooth }) {
    this.spec = spec;
    this.title.textContent = spec.name;
    this.title.title = spec.name;
    this.plot.setAttribute("width", width);
    const values = (points) => points.map((point) => point.y).filter((y) => Number.isFinite(y) && (!log || y > 0));
    const shown = [...values(spec.main), ...spec.sides.flatMap(values)];
    if (spec.band) for (const { low, high } of bandOf(spec)) shown.push(...[low, high].filter((y) => !log || y > 0));
    const xs = spec.main.map((point) => point.x);
    this.x = scale(xs[0] ?? 0, xs[xs.length - 1] ?? 1, MARGIN.left, width - MARGIN.right);
    this.y = yScale(shown, log);
    this.plot.replaceChildren(...this.axes(width, log), ...this.lines(smooth), this.cursorGroup());
    const last = spec.main[spec.main.length - 1];
    this.plot.setAttribute(
      "aria-label",
      `${spec.name}: ${number(last?.y)} at update ${last?.x}; between ${number(this.y.low)} and ${number(this.y.high)}`,
    );
    this.drawCursor();
  }

  axes(width, log) {
    const parts = [];
    for (const tick of this.y.ticks) {
      const y = this.y(tick);
      parts.push(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }));
      parts.push(svg("text", { class: "tick", x: MARGIN.left - 6, y: y + 3.5, "text-anchor": "end" }, number(tick)));
    }
    for (const tick of niceTicks(this.x.low, this.x.high, Math.max(2, width / 64), true)) {
      parts.push(
        svg("text", { class: "tick", x: this.x(tick), y: CHART_HEIGHT - 5, "text-anchor": "middle" }, number(tick)),
      );
    }
    if (!this.y.ticks.length) {
      const text = log ? "no positive values" : "no values";
      parts.push(svg("text", { class: "tick", x: width / 2, y: CHART_HEIGHT / 2, "text-anchor": "middle" }, text));
    }
    return parts;
  }

  lines(smooth) {
    const { main, band, sides } = this.spec;
    const parts = [];
    if (band) parts.push(svg("path", { class: "band", d: this.area(bandOf(this.spec)) }));
    for (const side of sides) parts.push(svg("path", { class: "side", d: this.path(side) }));
    if (smooth > 0) {
      parts.push(svg("path", { class: "raw", d: this.path(main) }));
      parts.push(svg("path", { class: "line", d: this.path(smoothed(main, smooth)) }));
    } else parts.push(svg("path", { class: "line", d: this.path(main) }));
    if (main.length <= 24) {
      for (const point of main) {
        if (this.y.shows(point.y)) {
          parts.push(svg("circle", { class: "dot", cx: this.x(point.x), cy: this.y(point.y), r: 2 }));
        }
      }
    }
    for (const point of main.filter(({ text }) => text)) {
      const x = this.x(point.x);
      parts.push(svg("path", { class: "nonfinite", d: `M${x - 3} ${CHART_HEIGHT - MARGIN.bottom}l3 -6l3 6z` }));
    }
    return parts;
  }

  /** A path with at most a lowest and a highest point for each pixel. */
  path(points) {
    let text = "";
    let column = null;
    let pen = "M";
    const flush = () => {
      if (!column) return;
      for (const point of column.low === column.high ? [column.low] : inOrder(column.low, column.high)) {
        text += `${pen}${this.x(point.x).toFixed(1)} ${this.y(point.y).toFixed(1)}`;
        pen = "L";
      }
      column = null;
    };
    for (const point of points) {
      if (!this.y.shows(point.y)) {
        flush();
        pen = "M";
        continue;
      }
      const at = Math.round(this.x(point.x));
      if (!column || column.at !== at) {
        flush();
        column = { at, low: point, high: point };
      } else {
        if (point.y < column.low.y) column.low = point;
        if (point.y > column.high.y) column.high = point;
      }
    }
    flush();
    return text;
  }

  area(band) {
    const at = (y) => this.y(this.y.shows(y) ? y : this.y.low).toFixed(1);
    const kept = thin(band, 800).filter(({ high }) => this.y.shows(high));
    if (!kept.length) return "";
    const top = kept.map(({ x, high }) => `${this.x(x).toFixed(1)} ${at(high)}`);
    const bottom = kept.reverse().map(({ x, low }) => `${this.x(x).toFixed(1)} ${at(low)}`);
    return `M${[...top, ...bottom].join("L")}Z`;
  }

  cursorGroup() {
    this.rule = svg("line", { class: "rule", y1: MARGIN.top, y2: CHART_HEIGHT - MARGIN.bottom });
    this.dot = svg("circle", { class: "dot", r: 3.5 });
    return svg("g", {}, this.rule, this.dot);
  }

  drawCursor() {
    const { main, band } = this.spec;
    const hovering = this.cursor.x !== null;
    const point = hovering ? closest(main, this.cursor.x) : main[main.length - 1];
    for (const part of [this.rule, this.dot]) part.style.display = hovering && point ? "" : "none";
    if (!point) return;
    const spread = band ? closest(band, point.x) : null;
    const value = `${point.text ?? number(point.y)}${spread ? ` ± ${number(spread.y)}` : ""}`;
    this.readout.replaceChildren(h("b", {}, value), hovering ? ` at ${number(point.x)}` : "");
    if (!hovering) return;
    const x = this.x(point.x);
    setProperties(this.rule, { x1: x, x2: x });
    if (this.y.shows(point.y)) setProperties(this.dot, { cx: x, cy: this.y(point.y) });
    else this.dot.style.display = "none";
  }

  nearest(event) {
    const left = this.plot.getBoundingClientRect().left;
    return closest(this.spec.main, this.x.invert(event.clientX - left))?.x ?? null;
  }

  key(event) {
    const points = this.spec.main;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Enter" && this.cursor.x !== null) this.plot.dispatchEvent(new Event("click"));
    if (!step || !points.length) return;
    event.preventDefault();
    event.stopPropagation();
    const now = this.cursor.x === null ? points.length : points.indexOf(closest(points, this.cursor.x));
    this.cursor.set(points[Math.min(points.length - 1, Math.max(0, now + step))].x);
  }
}

function bandOf({ main, band }) {
  const deviation = new Map(band.map(({ x, y }) => [x, y]));
  return main
    .map(({ x, y }) => ({ x, low: y - deviation.get(x), high: y + deviation.get(x) }))
    .filter(({ low, high }) => Number.isFinite(low) && Number.isFinite(high));
}

/** Exponential moving average, without its start's bias. */
function smoothed(points, weight) {
  let sum = 0;
  let norm = 0;
  return points.map((point) => {
    if (!Number.isFinite(point.y)) return point;
    sum = weight * sum + (1 - weight) * point.y;
    norm = weight * norm + (1 - weight);
    return { ...point, y: sum / norm };
  });
}

function inOrder(a, b) {
  return a.x <= b.x ? [a, b] : [b, a];
}

function thin(items, most) {
  const step = Math.ceil(items.length / most);
  return step > 1 ? items.filter((_, index) => index % step === 0) : items;
}

/** The point whose x is nearest; `points` are in order of x. */
function closest(points, x) {
  let low = 0;
  let high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle].x < x) low = middle + 1;
    else high = middle;
  }
  const before = points[low - 1];
  return before && Math.abs(before.x - x) <= Math.abs(points[low].x - x) ? before : points[low];
}

function scale(low, high, from, to) {
  const span = high - low || 1;
  const start = high === low ? (from + to) / 2 : from;
  const map = (value) => start + ((value - low) / span) * (to - from);
  map.invert = (pixel) => low + ((pixel - start) / (to - from)) * span;
  return Object.assign(map, { low, high });
}

function yScale(values, log) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  const bottom = CHART_HEIGHT - MARGIN.bottom;
  const shows = (y) => Number.isFinite(y) && (!log || y > 0);
  if (low > high) return Object.assign(() => bottom, { ticks: [], low: NaN, high: NaN, shows });
  const raw = { low, high };
  if (log) {
    const inner = scale(Math.log10(low), Math.log10(high), bottom - 4, MARGIN.top + 4);
    return Object.assign((y) => inner(Math.log10(y)), { ticks: logTicks(low, high), ...raw, shows });
  }
  const pad = (high - low || Math.abs(high) || 1) * 0.06;
  const inner = scale(low - pad, high + pad, bottom, MARGIN.top);
  return Object.assign((y) => inner(y), { ticks: niceTicks(low - pad, high + pad, 4, false), ...raw, shows });
}

function niceTicks(low, high, count, whole) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  if (whole) step = Math.max(1, Math.round(step));
  const ticks = [];
  for (let index = Math.ceil(low / step); index * step <= high; index += 1) {
    ticks.push(Number((index * step).toPrecision(12)));
  }
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.ceil(Math.log10(low)); 10 ** power <= high; power += 1) ticks.push(10 ** power);
  if (ticks.length >= 2) return thin(ticks, 4);
  return low === high ? [low] : [low, high];
}
