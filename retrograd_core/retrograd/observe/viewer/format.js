// Numbers, times and names as the page shows them.

/** Four significant digits, with a real minus; "–" for what is not a number. */
function number(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  let text;
  if (size >= 1e6 || size < 1e-4) text = value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  else if (size >= 1000) text = Math.round(value).toLocaleString("en");
  else text = String(Number(value.toPrecision(4)));
  return text.replace(/-/g, "−");
}

/** A number in a column: three decimals, so that points stand below each other. */
function column(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  return Math.abs(value) < 1000 ? value.toFixed(3).replace("-", "−") : number(value);
}

/** A number with its sign. */
function signed(value) {
  return typeof value === "number" && value > 0 ? `+${number(value)}` : number(value);
}

/** A score in a list: its number, or why there is none. */
function score(value) {
  return typeof value === "string" ? value : number(value);
}

function plural(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

/** Seconds since the epoch as local date and time. */
function clock(seconds) {
  const date = new Date(seconds * 1000);
  const two = (part) => String(part).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** How long ago. */
function ago(seconds) {
  const passed = Math.max(0, Date.now() / 1000 - seconds);
  if (passed < 60) return `${Math.round(passed)} s ago`;
  if (passed < 3600) return `${Math.round(passed / 60)} min ago`;
  if (passed < 86400) return `${Math.round(passed / 3600)} h ago`;
  return `${Math.round(passed / 86400)} days ago`;
}

/** The last part of a path or locator. */
function baseName(path) {
  return path.split("/").pop() || path;
}
