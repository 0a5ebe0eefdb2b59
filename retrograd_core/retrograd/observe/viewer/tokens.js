// Tokens with their log-probabilities and advantages.

const LOWEST_LOGP = -6; // the strongest colour

/** What one token was drawn with: `spans` of a record as objects by token. */
function tokenFacts(tokens) {
  const facts = new Map();
  let count = 0;
  for (const [start, length] of tokens.trained) {
    for (let index = start; index < start + length; index += 1) {
      const advantage = Array.isArray(tokens.advantage) ? tokens.advantage[count] : tokens.advantage;
      facts.set(index, { index, logp: tokens.logp[count], advantage });
      count += 1;
    }
  }
  return facts;
}

/** The largest size of an advantage, for the scale of colours. */
function advantageScale(tokens) {
  const values = Array.isArray(tokens.advantage) ? tokens.advantage : [tokens.advantage];
  return Math.max(1e-12, ...thin(values, 20000).map((value) => Math.abs(value ?? 0)));
}

/** One element a token; those that were not trained are faint. */
function tokenSpans(tokens, start, length, mode, facts, largest) {
  const spans = [];
  for (let index = start; index < start + length; index += 1) {
    const piece = tokens.pieces[index];
    const fact = facts.get(index);
    const span = h("span", { class: fact ? "token" : "token context", "data-token": index }, visible(piece));
    if (piece === "") span.classList.add("part");
    if (fact) paint(span, mode, fact, largest);
    spans.push(span);
  }
  return spans;
}

function visible(piece) {
  return piece === "" ? "·" : piece.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t");
}

function paint(span, mode, fact, largest) {
  const value = mode === "logp" ? fact.logp : fact.advantage;
  if (value === null || value === undefined) return;
  const strength = mode === "logp" ? Math.min(1, value / LOWEST_LOGP) : Math.min(1, Math.abs(value) / largest);
  span.classList.add(mode === "logp" || value < 0 ? "cool" : "warm");
  if (mode === "logp") span.classList.replace("cool", "rare");
  span.style.setProperty("--strength", `${Math.round(strength * 100)}%`);
}

/** The scale of the colours. */
function tokenLegend(mode, largest) {
  const ends = mode === "logp" ? ["p = 1", `log p ≤ ${number(LOWEST_LOGP)}`] : [number(-largest), signed(largest)];
  return h(
    "p",
    { class: `legend ${mode}` },
    h("span", {}, ends[0]),
    h("i"),
    h("span", {}, ends[1]),
    h("span", { class: "hint" }, "point at a token"),
  );
}

/** Shows the values of the token under the pointer, or of one that was tapped. */
class TokenTip {
  constructor() {
    this.element = h("div", { class: "tip", role: "tooltip", hidden: true });
  }

  /** Follow the tokens inside an element. */
  watch(element, tokens, facts) {
    const show = (event) => {
      const span = event.target.closest?.("[data-token]");
      if (!span) {
        this.element.hidden = true;
        return;
      }
      const index = Number(span.dataset.token);
      this.show(span, tokens.pieces[index], index, facts.get(index));
    };
    element.addEventListener("pointerover", show);
    element.addEventListener("click", show);
    element.addEventListener("pointerleave", () => (this.element.hidden = true));
  }

  show(span, piece, index, fact) {
    const rows = [["token", `${index + 1}`]];
    if (fact) {
      rows.push(["log p", number(fact.logp)], ["p", number(fact.logp === null ? null : Math.exp(fact.logp))]);
      if (fact.advantage !== undefined) rows.push(["advantage", signed(fact.advantage)]);
    } else rows.push(["", "not trained"]);
    this.element.replaceChildren(
      h("code", {}, piece === "" ? "part of a character" : JSON.stringify(piece)),
      h("dl", {}, rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    );
    this.element.hidden = false;
    const box = (span.getClientRects()[0] ?? span.getBoundingClientRect());
    const own = this.element.getBoundingClientRect();
    const left = Math.min(box.left, window.innerWidth - own.width - 8);
    const below = box.bottom + 6 + own.height < window.innerHeight;
    this.element.style.left = `${Math.max(8, left)}px`;
    this.element.style.top = `${below ? box.bottom + 6 : box.top - own.height - 6}px`;
  }
}
