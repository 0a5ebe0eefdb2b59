// The page: its state lives in the address, everything else follows from it and from the data.

const DEFAULTS = {
  view: "curves",
  run: "",
  group: "",
  member: "",
  otherGroup: "",
  otherMember: "",
  tokens: "",
  q: "",
  deep: false,
  sort: "newest",
  show: [],
  replaced: false,
  from: null,
  to: null,
  metrics: "key",
  find: "",
  log: false,
  smooth: 0,
};

const VIEWS = { curves: "Curves", rollouts: "Rollouts", run: "Run" };

const KEYS = [
  ["1 2 3", "curves, rollouts, run"],
  ["j k", "next, previous group"],
  ["h l ← →", "previous, next member"],
  ["c", "compare: keep this member beside the next"],
  ["t", "colour tokens by log-probability, by advantage, not at all"],
  ["/", "search"],
  ["Esc", "leave a field, close, back to the groups"],
  ["d", "dark or light"],
  ["?", "this help"],
];

/** The state in an address; what cannot be read keeps its default. */
function readState(hash) {
  const given = new URLSearchParams(hash.slice(1));
  const state = { ...DEFAULTS, show: [] };
  for (const [name, standard] of Object.entries(DEFAULTS)) {
    const text = given.get(name);
    if (text === null) continue;
    if (Array.isArray(standard)) state[name] = text.split(",").filter((item) => item in FILTERS);
    else if (typeof standard === "boolean") state[name] = text === "1";
    else if (standard === null || typeof standard === "number") {
      state[name] = Number.isFinite(Number(text)) ? Number(text) : standard;
    } else state[name] = text;
  }
  if (!(state.view in VIEWS)) state.view = DEFAULTS.view;
  if (!(state.sort in SORTS)) state.sort = DEFAULTS.sort;
  if (!["", "logp", "advantage"].includes(state.tokens)) state.tokens = "";
  return state;
}

function writeState(state) {
  const given = new URLSearchParams();
  for (const [name, standard] of Object.entries(DEFAULTS)) {
    const value = state[name];
    if (Array.isArray(standard)) {
      if (value.length) given.set(name, value.join(","));
    } else if (value !== standard) given.set(name, typeof value === "boolean" ? "1" : String(value));
  }
  return `#${given}`;
}

class App {
  constructor(root) {
    this.store = new Store();
    this.state = readState(location.hash);
    this.data = selectRun([], "");
    this.groups = [];
    this.deep = new Set();
    this.deepDone = "";
    this.deepQuery = "";
    this.build(root);
    this.store.addEventListener("change", () => this.refresh());
    window.addEventListener("hashchange", () => {
      this.state = readState(location.hash);
      this.refresh();
    });
    document.addEventListener("keydown", (event) => this.key(event));
    setInterval(() => this.drawStatus(), 5000);
    this.theme(remembered("theme") ?? "");
    this.render();
    this.store.follow();
  }

  build(root) {
    this.curves = new CurvesView(this);
    this.runView = new RunView();
    this.groupsPane = new GroupsPane(this);
    this.membersPane = new MembersPane(this);
    this.conversation = new ConversationPane(this);
    this.rollouts = h(
      "section",
      { class: "view rollouts", "aria-label": "Rollouts" },
      this.groupsPane.element,
      h("div", { class: "detail" }, this.membersPane.element, this.conversation.element),
    );
    this.views = { curves: this.curves.element, rollouts: this.rollouts, run: this.runView.element };
    this.name = h("span", { class: "model" });
    this.runs = h("select", { "aria-label": "Run", onchange: () => this.go({ ...DEFAULTS, view: this.state.view, run: this.runs.value }) });
    this.tabs = h("nav", { "aria-label": "Views" });
    this.status = h("p", { class: "status", role: "status" });
    this.alert = h("p", { class: "alert", role: "alert", hidden: true });
    this.help = h(
      "dialog",
      { class: "help", "aria-label": "Keys" },
      h("h2", {}, "Keys"),
      h("dl", {}, KEYS.flatMap(([keys, text]) => [h("dt", {}, keys.split(" ").map((key) => h("kbd", {}, key))), h("dd", {}, text)])),
      h("form", { method: "dialog" }, h("button", { class: "toggle" }, "Close")),
    );
    root.append(
      h(
        "header",
        { class: "page" },
        h("h1", {}, "retrograd"),
        this.name,
        this.runs,
        this.tabs,
        this.status,
        h("button", { type: "button", class: "icon", "aria-label": "Dark or light", title: "Dark or light (d)", onclick: () => this.nextTheme() }, "◐"),
        h("button", { type: "button", class: "icon", "aria-label": "Keys", title: "Keys (?)", onclick: () => this.help.showModal() }, "?"),
      ),
      this.alert,
      h("main", {}, Object.values(this.views)),
      this.help,
    );
  }

  /** New data or a new address: work out what follows from them. */
  refresh() {
    this.data = selectRun(this.store.rows, this.state.run);
    this.render();
  }

  /** Change the state. Choosing goes into the history, filtering replaces the address. */
  go(change) {
    const before = this.state;
    this.state = { ...before, ...change };
    const address = writeState(this.state);
    const isStep = ["view", "group", "member", "run"].some((name) => before[name] !== this.state[name]);
    history[isStep ? "pushState" : "replaceState"](null, "", address);
    if (before.run !== this.state.run) this.refresh();
    else this.render();
  }

  choose(key) {
    const group = this.data.byKey.get(key);
    this.go({ view: "rollouts", group: key, member: group?.members[0]?.id ?? "" });
  }

  compare() {
    const { group, member, otherMember } = this.state;
    this.go(otherMember ? { otherGroup: "", otherMember: "" } : { otherGroup: group, otherMember: member });
  }

  render() {
    const { state, data } = this;
    for (const [name, element] of Object.entries(this.views)) element.hidden = name !== state.view;
    this.drawHeader();
    this.drawStatus();
    document.body.classList.toggle("reading", state.view === "rollouts" && state.group !== "");
    if (state.view === "curves") this.curves.update(data, state);
    else if (state.view === "run") this.runView.update(data);
    else this.renderRollouts();
  }

  renderRollouts() {
    const { state, data } = this;
    this.searchTexts();
    const inputs = JSON.stringify([state.q, state.show, state.from, state.to, state.sort, state.replaced, this.deep.size]);
    if (data !== this.filteredData || inputs !== this.filteredBy) {
      this.groups = filterGroups(data.groups, state, this.deep);
      [this.filteredData, this.filteredBy] = [data, inputs];
    }
    const group = data.byKey.get(state.group);
    this.groupsPane.update(data, state, this.groups, this.deepDone);
    this.membersPane.update(group, state);
    const sides = [this.rollout(state.group, state.member), this.rollout(state.otherGroup, state.otherMember)];
    const [chosen, other] = sides;
    const same = chosen && other && chosen[0] === other[0] && chosen[1] === other[1];
    this.conversation.update(this.store, chosen ? [...(other && !same ? [other] : []), chosen] : [], state);
  }

  rollout(key, id) {
    const group = this.data.byKey.get(key);
    const member = group?.members.find((item) => item.id === id);
    return member ? [group, member] : null;
  }

  /** Look for the words in whole texts, group by group; results come in as they are found. */
  async searchTexts() {
    const { q, deep } = this.state;
    const query = deep ? q.toLowerCase() : "";
    if (query === this.deepQuery) return;
    this.deepQuery = query;
    this.deep = new Set();
    this.deepDone = "";
    if (!query) return;
    const groups = [...this.data.groups].sort(SORTS.newest[1]);
    for (const [index, group] of groups.entries()) {
      let records = [];
      try {
        records = await this.store.load(group.file, this.store.index.build);
      } catch {
        continue; // shows itself when somebody opens the group
      }
      if (query !== this.deepQuery) return;
      if (textOf(records).includes(query)) this.deep.add(group.file);
      if (index % 20 === 19 || index === groups.length - 1) {
        this.deepDone = index === groups.length - 1 ? plural(groups.length, "text file") : `${index + 1} of ${groups.length}`;
        if (this.state.view === "rollouts") this.renderRollouts();
      }
    }
  }

  drawHeader() {
    const { data, state } = this;
    const { run } = data;
    document.title = run ? `${baseName(run.output)} · retrograd` : "retrograd";
    this.name.textContent = run ? `${baseName(run.model)} · ${run.algorithm}` : "";
    this.name.title = run?.model ?? "";
    this.runs.hidden = data.runs.length < 2;
    this.runs.replaceChildren(
      ...data.runs.map((item) =>
        h("option", { value: item.run, selected: item.run === run.run }, `${baseName(item.output)} ${clock(item.time).slice(5, 16)}`),
      ),
    );
    const tab = ([name, label]) =>
      h("button", { type: "button", "aria-current": name === state.view ? "page" : null, onclick: () => this.go({ view: name }) }, label);
    if (this.tabs.children.length === 0 || this.tabs.dataset.view !== state.view) {
      const focused = this.tabs.contains(document.activeElement);
      this.tabs.dataset.view = state.view;
      this.tabs.replaceChildren(...Object.entries(VIEWS).map(tab));
      if (focused) this.tabs.querySelector("[aria-current]").focus();
    }
  }

  drawStatus() {
    const { data, store } = this;
    const last = data.updates[data.updates.length - 1];
    const text = !data.run
      ? store.failed
        ? "No records yet"
        : "Loading"
      : `${last ? `update ${last.update}` : "started"} · ${ago(data.time)}`;
    if (this.status.textContent !== text) this.status.textContent = text;
    const lost = data.gaps.reduce((sum, gap) => sum + gap.records, 0);
    const alert = store.failed && data.run ? `The data cannot be brought up to date: ${store.failed}` : "";
    this.alert.textContent = alert || (lost ? `${plural(lost, "record")} could not be written; see Run.` : "");
    this.alert.hidden = this.alert.textContent === "";
  }

  /** Mark the words that were searched for, without touching the document. */
  mark(element) {
    if (!CSS.highlights) return;
    CSS.highlights.delete("found");
    const words = this.state.q.toLowerCase();
    if (!words) return;
    const ranges = [];
    const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const text = walker.currentNode.data.toLowerCase();
      for (let at = text.indexOf(words); at >= 0 && ranges.length < 1000; at = text.indexOf(words, at + words.length)) {
        const range = new Range();
        range.setStart(walker.currentNode, at);
        range.setEnd(walker.currentNode, Math.min(at + words.length, walker.currentNode.length));
        ranges.push(range);
      }
    }
    CSS.highlights.set("found", new Highlight(...ranges));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || this.help.open) return;
    const field = event.target.closest("input, select, textarea");
    if (event.key === "Escape") {
      if (field) field.blur();
      else if (this.state.view === "rollouts") this.go({ group: "", member: "", otherGroup: "", otherMember: "" });
      return;
    }
    if (field) return;
    const action = this.action(event.key);
    if (!action) return;
    event.preventDefault();
    action();
  }

  action(key) {
    const reading = this.state.view === "rollouts";
    const always = {
      1: () => this.go({ view: "curves" }),
      2: () => this.go({ view: "rollouts" }),
      3: () => this.go({ view: "run" }),
      d: () => this.nextTheme(),
      "?": () => this.help.showModal(),
      "/": () => this.focusSearch(),
    };
    const inRollouts = {
      j: () => this.step(1),
      k: () => this.step(-1),
      h: () => this.stepMember(-1),
      l: () => this.stepMember(1),
      ArrowLeft: () => this.stepMember(-1),
      ArrowRight: () => this.stepMember(1),
      c: () => this.state.member && this.compare(),
      t: () => this.go({ tokens: { "": "logp", logp: "advantage", advantage: "" }[this.state.tokens] }),
    };
    return always[key] ?? (reading ? inRollouts[key] : null);
  }

  focusSearch() {
    if (this.state.view === "run") this.go({ view: "rollouts" });
    (this.state.view === "curves" ? this.curves.find : this.groupsPane.search).focus();
  }

  step(by) {
    const index = this.groups.findIndex((group) => group.key === this.state.group);
    const next = this.groups[index < 0 ? 0 : index + by];
    if (next) this.choose(next.key);
  }

  stepMember(by) {
    const members = this.data.byKey.get(this.state.group)?.members ?? [];
    const index = members.findIndex((member) => member.id === this.state.member);
    const next = members[index < 0 ? 0 : index + by];
    if (next) this.go({ member: next.id });
  }

  theme(name) {
    if (name) document.documentElement.dataset.theme = name;
  }

  nextTheme() {
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    const name = (document.documentElement.dataset.theme ?? system) === "dark" ? "light" : "dark";
    this.theme(name);
    remember("theme", name);
  }
}

/** Everything in the records of a group that somebody may look for. */
function textOf(records) {
  const texts = [];
  const collect = (value) => {
    if (typeof value === "string") texts.push(value);
    else if (value && typeof value === "object") Object.values(value).forEach(collect);
  };
  for (const { tokens, ...rest } of records) collect(rest);
  return texts.join("\n").toLowerCase();
}

function remembered(name) {
  try {
    return localStorage.getItem(`retrograd-${name}`);
  } catch {
    return null; // a browser may keep nothing for files
  }
}

function remember(name, value) {
  try {
    localStorage.setItem(`retrograd-${name}`, value);
  } catch {
    // it is forgotten with the page
  }
}

new App(document.getElementById("app"));
