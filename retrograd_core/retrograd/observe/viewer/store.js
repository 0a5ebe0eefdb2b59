// The data of the page: scripts beside it, loaded as they are needed and again as they grow.

const DATA = "observe-data";
const POLL_MS = 2000;
const DETAILS_KEPT = 40;

/** Holds summaries of everything and the details of a few groups. Fires "change" when something is new. */
class Store extends EventTarget {
  constructor() {
    super();
    this.index = null;
    this.chunks = new Map(); // name -> { revision, rows }
    this.details = new Map(); // file of a group -> promise of its records
    this.waiting = new Map(); // name of a script -> what takes its data
    this.rows = [];
    this.failed = "";
    window.retrogradIndex = (index) => (this.incoming = index);
    window.retrogradData = (name, packed) => this.waiting.get(name)?.(packed);
  }

  /** Load what there is, then follow it. */
  async follow() {
    for (;;) {
      try {
        await this.refresh();
      } catch (error) {
        this.fail(error.message);
      }
      await new Promise((resolve) => setTimeout(resolve, document.hidden ? 5 * POLL_MS : POLL_MS));
    }
  }

  fail(message) {
    if (message === this.failed) return;
    this.failed = message;
    this.dispatchEvent(new Event("change"));
  }

  async refresh() {
    this.incoming = null;
    await loadScript(`${DATA}/index.js?${Date.now()}`);
    const index = this.incoming;
    if (!index) throw new Error("the index of the data cannot be read");
    if (index.v !== 1) throw new Error(`the data has version ${index.v}; this page reads version 1`);
    if (this.index && index.build === this.index.build && index.bytes === this.index.bytes) {
      this.fail("");
      return;
    }
    if (this.index && index.build !== this.index.build) {
      this.chunks.clear();
      this.details.clear();
    }
    const stale = index.chunks.filter(({ name, revision }) => this.chunks.get(name)?.revision !== revision);
    await Promise.all(
      stale.map(async ({ name, revision }) => {
        this.chunks.set(name, { revision, rows: await this.load(name, revision) });
      }),
    );
    this.index = index;
    this.rows = index.chunks.flatMap(({ name }) => this.chunks.get(name).rows);
    this.failed = "";
    this.dispatchEvent(new Event("change"));
  }

  /** The records of a group: { prompt, selection, members: Map of id to { rollout, outcome } }. */
  detail(group) {
    const known = this.details.get(group.file);
    this.details.delete(group.file);
    const detail = known ?? this.load(group.file, this.index.build).then(arrange);
    detail.catch(() => this.details.delete(group.file)); // may be there at the next try
    this.details.set(group.file, detail);
    if (this.details.size > DETAILS_KEPT) this.details.delete(this.details.keys().next().value);
    return detail;
  }

  /** The JSON in a script. */
  async load(name, revision) {
    let packed = null;
    this.waiting.set(name, (data) => (packed = data));
    try {
      await loadScript(`${DATA}/${name}.js?${revision}`);
    } finally {
      this.waiting.delete(name);
    }
    if (packed === null) throw new Error(`${name}.js holds no data`);
    const bytes = Uint8Array.from(atob(packed), (char) => char.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).json();
  }
}

function loadScript(address) {
  return new Promise((resolve, reject) => {
    const script = h("script", { src: address });
    const end = (action) => () => {
      script.remove();
      action();
    };
    script.onload = end(resolve);
    script.onerror = end(() => reject(new Error(`${address.split("?")[0]} cannot be loaded`)));
    document.head.append(script);
  });
}

function arrange(records) {
  const detail = { prompt: null, selection: null, members: new Map() };
  for (const record of records) {
    if (record.kind === "prompt" || record.kind === "selection") detail[record.kind] = record;
    else {
      if (!detail.members.has(record.member)) detail.members.set(record.member, {});
      detail.members.get(record.member)[record.kind] = record;
    }
  }
  return detail;
}

/** What is known of one run; `id` null takes the newest. Repeated updates of a resumed run count once. */
function selectRun(rows, id) {
  const starts = rows.filter((row) => row.kind === "run");
  const runs = [...new Map(starts.map((row) => [row.run, row])).values()];
  const run = runs.find((row) => row.run === id) ?? starts[starts.length - 1] ?? null;
  const segments = new Map(starts.filter((row) => row.run === run?.run).map((row) => [row.segment, row]));
  const own = rows.filter((row) => segments.has(row.segment));
  const first = new Map();
  for (const row of own) {
    if (row.kind === "update") first.set(row.segment, Math.min(row.update, first.get(row.segment) ?? Infinity));
  }
  // An update is replaced if a later segment began at it or before it.
  const isReplaced = (row) => [...first].some(([segment, update]) => segment > row.segment && update <= row.update);
  const current = own.filter((row) => !isReplaced(row));
  const groups = own.filter((row) => row.kind === "group").map((row) => summarize(row, isReplaced(row)));
  const byKey = new Map();
  for (const group of groups) {
    // Two groups of an update may have one name: the second is told apart by its file.
    if (byKey.has(group.key)) group.key = `${group.key}/${group.file}`;
    byKey.set(group.key, group);
  }
  return {
    run,
    runs,
    segments: [...segments.values()],
    updates: current.filter((row) => row.kind === "update"),
    evaluations: current.filter((row) => row.kind === "evaluation"),
    gaps: own.filter((row) => row.kind === "gap"),
    groups,
    byKey,
    time: own.reduce((latest, row) => Math.max(latest, row.time ?? 0), 0),
  };
}

/** A group with what the list filters and sorts by; computed once a row. */
function summarize(row, replaced) {
  row.replaced = replaced;
  if (row.key) return row;
  row.key = [row.segment, row.update, row.split, row.group].join("/");
  const totals = row.members.map((member) => member.total).filter((total) => typeof total === "number");
  row.low = Math.min(...totals);
  row.high = Math.max(...totals);
  row.spread = totals.length ? row.high - row.low : 0;
  row.mean = totals.length ? totals.reduce((sum, total) => sum + total, 0) / totals.length : -Infinity;
  row.truncated = row.members.filter((member) => member.finish === "length").length;
  row.errors = row.members.filter(
    (member) => member.reward === "error" || member.judgement === "error" || member.tool_errors,
  ).length;
  row.longest = Math.max(0, ...row.members.map((member) => member.tokens ?? 0));
  row.members.sort((a, b) => (b.total ?? -Infinity) - (a.total ?? -Infinity));
  row.words = [row.group, row.source, row.prompt, ...row.members.map((member) => member.text ?? "")]
    .join("\n")
    .toLowerCase();
  return row;
}
