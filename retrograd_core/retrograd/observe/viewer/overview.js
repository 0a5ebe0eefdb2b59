// The two views beside the rollouts: curves, and what is known of the run.

class CurvesView {
  constructor(app) {
    this.app = app;
    this.cursor = new Cursor();
    this.charts = new Map();
    this.shown = []; // what the charts were drawn from
    this.bar = h("div", { class: "bar" });
    this.grid = h("div", { class: "charts" });
    this.empty = h("p", { class: "empty" });
    this.element = h("section", { class: "view curves", "aria-label": "Curves" }, this.bar, this.empty, this.grid);
    new ResizeObserver(onceAFrame(() => this.draw())).observe(this.grid);
  }

  update(data, state) {
    if (data !== this.data) this.specs = chartSpecs(data.updates, data.evaluations);
    this.data = data;
    this.state = state;
    this.drawBar();
    this.draw();
  }

  selected() {
    const { metrics, find } = this.state;
    const words = find.toLowerCase();
    const key = this.specs.filter(({ name }) => rank(KEY_METRICS, name) < KEY_METRICS.length);
    const base = metrics === "all" || !key.length ? this.specs : key;
    return words ? this.specs.filter(({ name }) => name.toLowerCase().includes(words)) : base;
  }

  drawBar() {
    const { state, app } = this;
    if (!this.find) {
      this.find = h("input", {
        type: "search",
        placeholder: "Find metrics",
        "aria-label": "Find metrics",
        oninput: () => app.go({ find: this.find.value }),
      });
      this.smooth = h("input", {
        type: "range",
        min: "0",
        max: "0.95",
        step: "0.05",
        oninput: () => app.go({ smooth: Number(this.smooth.value) }),
      });
      this.choices = h("div", { class: "choices" });
      this.bar.append(this.find, this.choices, h("label", { class: "smooth" }, "Smooth", this.smooth));
    }
    if (document.activeElement !== this.find) this.find.value = state.find;
    this.smooth.value = String(state.smooth);
    this.choices.replaceChildren(
      segmented("Metrics", [["key", "Key metrics"], ["all", `All ${this.specs.length}`]], state.metrics, (metrics) =>
        app.go({ metrics, find: "" }),
      ),
      toggle("Log scale", state.log, () => app.go({ log: !state.log }), { class: "toggle log" }),
    );
  }

  draw() {
    if (!this.data || this.element.hidden) return;
    const specs = this.selected();
    this.empty.textContent = specs.length ? "" : this.data.updates.length ? "No metric matches." : "No update has ended yet.";
    const wanted = new Set(specs.map((spec) => spec.name));
    for (const [name, chart] of this.charts) {
      if (!wanted.has(name)) {
        chart.remove();
        this.charts.delete(name);
      }
    }
    for (const { name } of specs) {
      if (!this.charts.has(name)) this.charts.set(name, new Chart(this.cursor, (update) => this.open(update)));
    }
    const charts = specs.map(({ name }) => this.charts.get(name));
    const inPlace = charts.every(({ element }, index) => this.grid.children[index] === element);
    if (!inPlace) this.grid.replaceChildren(...charts.map(({ element }) => element));
    const widths = charts.map(({ element }) => element.clientWidth - 2); // read all before writing any
    charts.forEach((chart, index) => chart.draw(specs[index], widths[index], this.state));
  }

  open(update) {
    this.app.go({ view: "rollouts", from: update, to: update, group: "", member: "" });
  }
}

class RunView {
  constructor() {
    this.element = h("section", { class: "view run", "aria-label": "Run" });
  }

  update(data) {
    const { run, segments, gaps } = data;
    if (!run) return;
    const facts = [
      ["Algorithm", run.algorithm],
      ["Model", run.model],
      ["Output", run.output],
      ["Run", run.run],
      ["retrograd", run.version],
      ["Rollouts recorded", run.every > 1 ? `every ${run.every} updates` : "every update"],
      ["Texts", run.max_text_chars ? `cut at ${plural(run.max_text_chars, "character")}` : "whole"],
    ];
    const pair = ([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))];
    const lost = gaps.map((gap) => h("li", {}, gapText(gap)));
    this.element.replaceChildren(
      h("h2", {}, "Run"),
      h("dl", { class: "facts" }, facts.flatMap(pair)),
      h("h2", {}, "Starts"),
      h("ol", { class: "segments" }, segments.map((segment) => h("li", { value: segment.segment }, startText(segment)))),
      ...(lost.length ? [h("h2", {}, "Not recorded"), h("ul", { class: "gaps" }, lost)] : []),
      h("h2", {}, "Settings"),
      h("dl", { class: "facts settings" }, Object.entries(run.settings).map(([name, value]) => [name, shown(value)]).flatMap(pair)),
    );
  }
}

function shown(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

function startText(segment) {
  const torn = segment.torn_bytes ? `; ${plural(segment.torn_bytes, "byte")} of a torn record were cut off` : "";
  return `${clock(segment.time)} ${segment.resumed ? "resumed" : "started"} with retrograd ${segment.version}${torn}`;
}

function gapText(gap) {
  return `${clock(gap.time)}: ${plural(gap.records, "record")} (${gap.reason})`;
}
