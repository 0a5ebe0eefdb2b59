// One trajectory, or two side by side.

const LONG_TEXT = 6000; // characters shown before "show all"

class ConversationPane {
  constructor(app) {
    this.app = app;
    this.tip = new TokenTip();
    this.opening = h("div", { class: "opening" });
    this.columns = h("div", { class: "columns" });
    this.bar = h("div", { class: "bar" });
    this.scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Conversation" }, this.opening, this.columns);
    this.element = h("div", { class: "pane conversation" }, this.bar, this.scroll, this.tip.element);
    this.drawn = "";
  }

  /** `sides` are [group, member] pairs: the chosen rollout, and the one it is compared with if any. */
  async update(store, sides, state) {
    const wanted = JSON.stringify([sides.map(([group, member]) => [group.key, member.id]), state.tokens]);
    this.drawBar(sides, state);
    if (wanted === this.drawn) return;
    this.drawn = wanted;
    this.tip.element.hidden = true;
    if (!sides.length) {
      this.opening.replaceChildren();
      this.columns.replaceChildren(h("p", { class: "empty" }, "Choose a group: j and k go through them."));
      return;
    }
    try {
      const details = await Promise.all(sides.map(([group]) => store.detail(group)));
      if (wanted === this.drawn) this.draw(sides, details, state);
    } catch (error) {
      if (wanted !== this.drawn) return;
      this.drawn = "";
      this.opening.replaceChildren();
      this.columns.replaceChildren(h("p", { class: "empty bad" }, `These rollouts cannot be shown: ${error.message}`));
    }
  }

  drawBar(sides, state) {
    const { app } = this;
    const comparing = state.otherMember !== "";
    this.bar.replaceChildren(
      h("button", { type: "button", class: "back", onclick: () => app.go({ group: "", member: "" }) }, "‹ Groups"),
      segmented(
        "Tokens",
        [
          ["", "Text"],
          ["logp", "Log-probability"],
          ["advantage", "Advantage"],
        ],
        state.tokens,
        (tokens) => app.go({ tokens }),
      ),
      sides.length
        ? toggle(comparing ? "Stop comparing" : "Compare", comparing, () => app.compare(), {
            class: "toggle compare",
            title: "Keep this member beside the next one that you choose",
          })
        : "",
      h("span", { class: "hint" }, comparing && sides.length < 2 ? "now choose another member" : ""),
    );
  }

  draw(sides, details, state) {
    this.columns.classList.toggle("two", sides.length > 1);
    const shared = sides.length < 2 || sides[0][0] === sides[1][0];
    const opening = (detail) => promptPart(detail.prompt);
    this.opening.replaceChildren(...(shared ? opening(details[0]) : []));
    this.columns.replaceChildren(
      ...sides.map(([group, member], index) =>
        h(
          "article",
          { class: "trajectory", "aria-label": `Member ${member.id} of group ${group.group}` },
          ...(shared ? [] : opening(details[index])),
          ...this.trajectory(group, member, details[index], state),
        ),
      ),
    );
    this.scroll.scrollTop = 0;
    this.app.mark(this.scroll);
  }

  trajectory(group, member, detail, state) {
    const { rollout, outcome } = detail.members.get(member.id) ?? {};
    if (!rollout) return [h("p", { class: "empty" }, "This member is not in the records.")];
    const { tokens } = rollout;
    const facts = tokenFacts(tokens);
    const largest = advantageScale(tokens);
    const messages = rollout.messages ?? [{ role: "assistant", content: rollout.completion }];
    const parts = [outcomePart(group, member, rollout, outcome)];
    if (state.tokens) parts.push(tokenLegend(state.tokens, largest));
    const body = h("div", { class: "messages" });
    const answers = messages.filter((message) => message.role === "assistant").length;
    const rewards = stepRewards(outcome, tokens, answers);
    if (state.tokens && tokens.trained.length !== answers) {
      // The turns cannot be told apart by the tokens: show them in one piece.
      const spans = tokenSpans(tokens, 0, tokens.pieces.length, state.tokens, facts, largest);
      body.append(messageCard("assistant", "Tokens", [h("div", { class: "text tokens" }, spans)]));
    } else {
      let answer = 0;
      for (const message of messages) {
        let spans = null;
        let reward;
        if (message.role === "assistant") {
          const [start, length] = tokens.trained[answer] ?? [0, 0];
          if (state.tokens) spans = tokenSpans(tokens, start, length, state.tokens, facts, largest);
          reward = rewards.get(answer);
          answer += 1;
        }
        body.append(messagePart(message, spans, reward));
      }
    }
    this.tip.watch(body, tokens, facts);
    parts.push(body);
    if (state.tokens && tokens.pieces.length < tokens.count) {
      const count = tokens.pieces.length.toLocaleString("en");
      parts.push(h("p", { class: "note" }, `${count} of ${plural(tokens.count, "token")} were recorded (observe.max_text_chars).`));
    }
    return parts;
  }
}

/** The prompt that all members share; long ones are folded. */
function promptPart(prompt) {
  if (!prompt) return [];
  const cards = prompt.messages.map((message) => messagePart(message, null, undefined));
  const extra = [];
  if (prompt.rubric) extra.push(messageCard("rubric", "Rubric", [textBlock(prompt.rubric)]));
  if (Object.keys(prompt.metadata).length) {
    const data = h("details", { class: "metadata" }, h("summary", {}, "Fields of the record"));
    data.append(textBlock(JSON.stringify(prompt.metadata, null, 2), "text mono"));
    extra.push(data);
  }
  return [
    h("p", { class: "source" }, `Update ${prompt.update} · ${prompt.source} · ${plural(prompt.prompt_tokens, "prompt token")}`),
    h("div", { class: "messages prompt" }, cards, extra),
    ...cutNote(prompt),
  ];
}

function cutNote(record) {
  return record.cut_chars
    ? [h("p", { class: "note" }, `${plural(record.cut_chars, "character")} were cut (observe.max_text_chars).`)]
    : [];
}

/** What the rollout earned, and why. */
function outcomePart(group, member, rollout, outcome) {
  const rows = [];
  const row = (name, value, why) => rows.push(h("dt", {}, name), h("dd", {}, h("b", {}, value), why ? h("p", {}, why) : ""));
  if (outcome) {
    row("Reward", scoreText(outcome.reward), outcome.reward.explanation);
    if (outcome.judgement) {
      const weight = outcome.judgement.judge_weight ?? outcome.reward.judge_weight;
      const name = weight === undefined ? "Judge" : `Judge × ${number(weight)}`;
      row(name, scoreText(outcome.judgement), outcome.judgement.explanation);
    }
    if (outcome.step_rewards) {
      row("Steps", signed(outcome.step_rewards.reduce((sum, [, reward]) => sum + reward, 0)));
    }
  }
  const { advantage } = rollout.tokens;
  if (typeof advantage === "number") row("Advantage", signed(advantage));
  const metrics = Object.entries(rollout.metrics ?? {});
  if (metrics.length) row("Metrics", "", metrics.map(([name, value]) => `${name} ${number(value)}`).join(" · "));
  const excluded = group.dropped ? `group: ${group.dropped}` : member.excluded;
  return h(
    "header",
    { class: "outcome" },
    h(
      "h2",
      {},
      h("span", {}, `Member ${member.id}`),
      h("b", { class: "total", title: "Total" }, number(outcome?.total)),
    ),
    h(
      "p",
      { class: "facts-line" },
      `${plural(rollout.tokens.trained_count, "token")} · ` +
        (rollout.finish === "length" ? "cut at its budget" : "ended by itself") +
        (excluded ? "" : " · trained"),
    ),
    excluded ? h("p", { class: "why" }, `Not trained: ${excluded}`) : "",
    h("dl", { class: "scores" }, rows),
    ...cutNote(rollout),
  );
}

function scoreText(value) {
  return value.kind === "value" ? number(value.value) : value.kind;
}

/** Rewards of steps by the index of the answer that they start at. */
function stepRewards(outcome, tokens, answers) {
  const rewards = new Map();
  for (const [index, reward] of outcome?.step_rewards ?? []) {
    const before = tokens.trained.filter(([start]) => start <= index).length;
    const answer = Math.min(answers, Math.max(1, before)) - 1;
    rewards.set(answer, (rewards.get(answer) ?? 0) + reward);
  }
  return rewards;
}

function messagePart(message, spans, reward) {
  const content = spans ? h("div", { class: "text tokens" }, spans) : textBlock(message.content);
  const parts = message.content || spans ? [content] : [];
  for (const call of message.tool_calls ?? []) parts.push(callPart(call));
  const name = message.name ? `${message.role} · ${message.name}` : message.role;
  const marks = [
    message.is_error ? badge("error", "bad") : null,
    reward === undefined ? null : badge(`step reward ${signed(reward)}`, reward < 0 ? "bad" : "good"),
  ];
  return messageCard(message.is_error ? "tool failed" : message.role, name, parts, marks);
}

function messageCard(kind, name, parts, marks = []) {
  return h("section", { class: `message ${kind}` }, h("h3", {}, h("span", {}, name), marks), parts);
}

function callPart(call) {
  const rows = Object.entries(call.arguments).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, shown(value))]);
  return h("div", { class: "call" }, h("b", {}, call.name), rows.length ? h("dl", {}, rows) : "");
}

/** A text, folded where it is very long. */
function textBlock(text, kind = "text") {
  if (text.length <= LONG_TEXT) return h("div", { class: kind }, text);
  const block = h("div", { class: kind }, text.slice(0, LONG_TEXT));
  const more = h(
    "button",
    {
      type: "button",
      class: "more",
      onclick: () => block.replaceChildren(text),
    },
    `… show all ${text.length.toLocaleString("en")} characters`,
  );
  block.append(more);
  return block;
}
