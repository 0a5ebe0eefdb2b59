// The lists of the rollouts view: groups with their filters, and the members of one group.

const GROUP_HEIGHT = 58;
const MEMBER_HEIGHT = 46;
const STRIP = { width: 84, height: 14 };

const SORTS = {
  newest: ["Newest first", (a, b) => b.update - a.update],
  oldest: ["Oldest first", (a, b) => a.update - b.update],
  spread: ["Largest spread", (a, b) => b.spread - a.spread],
  high: ["Highest mean", (a, b) => b.mean - a.mean],
  low: ["Lowest mean", (a, b) => rankLow(a) - rankLow(b)],
  longest: ["Longest answer", (a, b) => b.longest - a.longest],
};

const FILTERS = {
  spread: ["Spread", (group) => group.spread > 0, "Rewards differ between the members"],
  dropped: ["Dropped", (group) => group.dropped !== "", "The whole group is not trained"],
  excluded: ["Excluded", (group) => group.members.some((member) => member.excluded), "Some members are not trained"],
  truncated: ["Truncated", (group) => group.truncated > 0, "Some answers were cut at their budget"],
  errors: ["Errors", (group) => group.errors > 0, "A reward, a judge or a tool failed"],
  eval: ["Held-out", (group) => group.split === "eval", "Prompts of evaluations instead of those that are trained"],
};

function rankLow(group) {
  return group.mean === -Infinity ? Infinity : group.mean;
}

/** Training and held-out prompts are never in one list. */
function isEligible(group, state) {
  return (state.replaced || !group.replaced) && (group.split === "eval") === state.show.includes("eval");
}

/** The groups that the filters leave, in order. `deep` holds the files whose full texts match. */
function filterGroups(groups, state, deep) {
  const words = state.q.toLowerCase();
  const active = Object.keys(FILTERS).filter((name) => state.show.includes(name));
  return groups
    .filter(
      (group) =>
        isEligible(group, state) &&
        (state.from === null || group.update >= state.from) &&
        (state.to === null || group.update <= state.to) &&
        active.every((name) => FILTERS[name][1](group)) &&
        (!words || group.words.includes(words) || deep.has(group.file)),
    )
    .sort(SORTS[state.sort][1]);
}

class GroupsPane {
  constructor(app) {
    this.app = app;
    this.search = h("input", {
      type: "search",
      placeholder: "Search prompts and answers",
      "aria-label": "Search prompts and answers",
      oninput: () => app.go({ q: this.search.value }),
    });
    this.sort = h(
      "select",
      { "aria-label": "Order of the groups", onchange: () => app.go({ sort: this.sort.value }) },
      Object.entries(SORTS).map(([value, [label]]) => h("option", { value }, label)),
    );
    this.from = this.bound("from", "First update");
    this.to = this.bound("to", "Last update");
    this.chips = h("div", { class: "chips", role: "group", "aria-label": "Filters" });
    this.count = h("p", { class: "count", role: "status" });
    this.list = new VirtualList({
      label: "Groups",
      height: GROUP_HEIGHT,
      draw: (group) => this.draw(group),
      choose: (group) => app.choose(group.key),
    });
    this.element = h(
      "div",
      { class: "pane groups" },
      h(
        "div",
        { class: "filters" },
        this.search,
        h("div", { class: "line" }, this.sort, h("span", { class: "range" }, "updates ", this.from, "–", this.to)),
        this.chips,
        this.count,
      ),
      this.list.element,
    );
  }

  bound(name, label) {
    const read = () => (input.value === "" ? null : Number(input.value));
    const input = h("input", {
      type: "number",
      min: "0",
      "aria-label": label,
      onchange: () => this.app.go({ [name]: read() }),
    });
    return input;
  }

  update(data, state, groups, deepSearch) {
    for (const [input, value] of [
      [this.search, state.q],
      [this.from, state.from ?? ""],
      [this.to, state.to ?? ""],
    ]) {
      if (document.activeElement !== input) input.value = String(value);
    }
    this.sort.value = state.sort;
    this.from.placeholder = String(data.updates[0]?.update ?? "");
    this.to.placeholder = String(data.updates[data.updates.length - 1]?.update ?? "");
    const press = (name) => () => {
      const others = state.show.filter((other) => other !== name);
      this.app.go({ show: others.length < state.show.length ? others : [...others, name] });
    };
    const chips = Object.entries(FILTERS)
      .filter(([name]) => name !== "eval" || state.show.includes(name) || data.groups.some(FILTERS.eval[1]))
      .map(([name, [label, , title]]) => toggle(label, state.show.includes(name), press(name), { "data-filter": name, title }));
    if (data.groups.some((group) => group.replaced)) {
      const title = "Updates that were done again after a resume";
      chips.push(toggle("Replaced", state.replaced, () => this.app.go({ replaced: !state.replaced }), { title }));
    }
    if (state.q) {
      const title = "Also look at whole texts, not only at their starts";
      chips.push(toggle("Full texts", state.deep, () => this.app.go({ deep: !state.deep }), { "data-filter": "deep", title }));
    }
    this.chips.replaceChildren(...chips);
    const total = data.groups.filter((group) => isEligible(group, state)).length;
    const found = groups.length === total ? plural(total, "group") : `${groups.length.toLocaleString("en")} of ${plural(total, "group")}`;
    this.count.replaceChildren(found, deepSearch ? ` · searched ${deepSearch}` : "");
    this.low = Math.min(...groups.map((group) => group.low), Infinity);
    this.high = Math.max(...groups.map((group) => group.high), -Infinity);
    this.list.set(groups, state.group);
  }

  draw(group) {
    const badges = [
      group.split === "eval" ? badge("held-out", "info") : null,
      group.replaced ? badge("replaced", "info") : null,
      group.dropped ? badge(group.dropped, "muted") : null,
      group.truncated ? badge(`${group.truncated} cut`, "warn") : null,
      group.errors ? badge(plural(group.errors, "error"), "bad") : null,
    ];
    return [
      h(
        "div",
        { class: "top" },
        h("b", { class: "update", title: `Update ${group.update}` }, String(group.update)),
        h("span", { class: "name", title: `${group.source} · group ${group.group}` }, baseName(group.source) || group.group),
        h("span", { class: "badges" }, badges),
        h("span", { class: "mean", title: "Mean total" }, column(group.mean)),
      ),
      h("div", { class: "below" }, h("span", { class: "excerpt" }, group.prompt), rewardStrip(group, this.low, this.high)),
    ];
  }
}

function badge(text, kind) {
  return h("span", { class: `badge ${kind}`, title: text }, text);
}

/** A tick for each member's total. */
function rewardStrip(group, low, high) {
  const { width, height } = STRIP;
  const x = (total) => 2 + ((total - low) / (high - low || 1)) * (width - 4);
  const ticks = group.members
    .filter((member) => typeof member.total === "number")
    .map((member) => {
      const at = x(member.total).toFixed(1);
      return svg("line", { class: member.excluded ? "out" : "", x1: at, x2: at, y1: 2, y2: height - 2 });
    });
  const base = svg("line", { class: "base", x1: 0, x2: width, y1: height / 2, y2: height / 2 });
  return svg("svg", { class: "strip", width, height, "aria-hidden": "true" }, base, ...ticks);
}

class MembersPane {
  constructor(app) {
    this.app = app;
    this.list = new VirtualList({
      label: "Members by total reward",
      height: MEMBER_HEIGHT,
      draw: (member) => this.draw(member),
      choose: (member) => app.go({ member: member.id }),
    });
    this.head = h("div", { class: "head" });
    this.element = h("div", { class: "pane members" }, this.head, this.list.element);
  }

  update(group, state) {
    this.group = group;
    this.state = state;
    this.element.hidden = !group;
    if (!group) {
      this.list.set([], "");
      return;
    }
    this.head.replaceChildren(
      h("h2", {}, `Group ${group.group}`),
      h(
        "p",
        {},
        `${plural(group.members.length, "member")} · mean ${number(group.mean)} · spread ${number(group.spread)}`,
      ),
      ...(group.dropped ? [h("p", { class: "why" }, `Not trained: ${group.dropped}`)] : []),
    );
    const items = group.members.map((member) => ({ ...member, key: member.id }));
    this.list.set(items, state.member);
  }

  draw(member) {
    const { group } = this;
    const share = (member.total - group.low) / (group.spread || 1);
    const bar = h("i", { class: "bar-fill" });
    bar.style.inlineSize = `${(group.spread ? share : 1) * 100}%`;
    const facts = [
      `reward ${score(member.reward)}`,
      member.judgement !== undefined ? `judge ${score(member.judgement)}` : null,
      member.steps !== undefined ? `steps ${signed(member.steps)}` : null,
      plural(member.tokens ?? 0, "token"),
      member.calls ? plural(member.calls, "call") : null,
    ];
    const compared = this.state.otherGroup === group.key && this.state.otherMember === member.id;
    return [
      h(
        "div",
        { class: "top" },
        h("span", { class: "total" }, typeof member.total === "number" ? bar : null, h("b", {}, column(member.total))),
        h("span", { class: "name" }, member.id),
        h("span", { class: "badges" }, [
          compared ? badge("kept", "info") : null,
          member.excluded ? badge(member.excluded, "muted") : null,
          member.finish === "length" && !member.excluded ? badge("cut", "warn") : null,
          member.tool_errors ? badge(plural(member.tool_errors, "error"), "bad") : null,
        ]),
      ),
      h("div", { class: "facts-line" }, facts.filter(Boolean).join(" · ")),
    ];
  }
}
