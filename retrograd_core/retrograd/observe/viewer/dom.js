// Elements are made of text nodes and attributes only: nothing that a model wrote is ever parsed as HTML.

/** An element. Properties that start with "on" are listeners, `class` and the rest are attributes. */
function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  setProperties(element, properties);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

/** An SVG element. */
function svg(tag, properties = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  setProperties(element, properties);
  element.append(...children);
  return element;
}

function setProperties(element, properties) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
}

/** A button that stays pressed. */
function toggle(label, pressed, onclick, properties = {}) {
  return h("button", { type: "button", class: "toggle", "aria-pressed": String(pressed), onclick, ...properties }, label);
}

/** Buttons of which one is pressed: `choices` are [value, label] pairs. */
function segmented(name, choices, current, choose) {
  const buttons = choices.map(([value, label]) => toggle(label, value === current, () => choose(value)));
  return h("div", { class: "segmented", role: "group", "aria-label": name }, buttons);
}

/** Calls at most once a frame. */
function onceAFrame(action) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      action();
    });
  };
}
