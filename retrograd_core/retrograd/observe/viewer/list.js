// A list of any length: only the rows in sight are in the document.

const ROWS_AROUND = 6;

let lists = 0;

/** `draw(item)` makes the content of a row; every row is `height` pixels high. */
class VirtualList {
  constructor({ label, height, draw, choose }) {
    this.height = height;
    this.draw = draw;
    this.choose = choose;
    this.items = [];
    this.selected = null;
    this.id = `list-${(lists += 1)}`;
    this.sizer = h("div", { class: "sizer", onclick: (event) => this.click(event) });
    this.element = h(
      "div",
      { class: "virtual", role: "listbox", tabindex: "0", "aria-label": label, onscroll: onceAFrame(() => this.render()) },
      this.sizer,
    );
    new ResizeObserver(onceAFrame(() => this.render())).observe(this.element);
  }

  /** Show other items; whoever has scrolled keeps looking at the same one. */
  set(items, selected) {
    const top = this.element.scrollTop;
    const anchor = top > 0 ? this.items[Math.floor(top / this.height)] : null;
    const moved = selected !== this.selected;
    const changed = items !== this.items;
    this.items = items;
    this.selected = selected;
    this.sizer.style.height = `${items.length * this.height}px`;
    if (changed && anchor) {
      const index = items.findIndex((item) => item.key === anchor.key);
      if (index >= 0) this.element.scrollTop = index * this.height + (top % this.height);
    }
    if (moved) this.reveal(selected);
    this.render();
  }

  reveal(key) {
    const index = this.items.findIndex((item) => item.key === key);
    if (index < 0) return;
    const top = index * this.height;
    const view = this.element.clientHeight;
    if (top < this.element.scrollTop) this.element.scrollTop = top;
    else if (top + this.height > this.element.scrollTop + view) this.element.scrollTop = top + this.height - view;
  }

  /** Rows may be drawn anew between press and release, so the place counts where no row was hit. */
  click(event) {
    const row = event.target.closest(".row");
    const place = (event.clientY - this.sizer.getBoundingClientRect().top) / this.height;
    const item = row ? this.items.find(({ key }) => key === row.dataset.key) : this.items[Math.floor(place)];
    if (item) this.choose(item);
  }

  render() {
    const { scrollTop, clientHeight } = this.element;
    const first = Math.max(0, Math.floor(scrollTop / this.height) - ROWS_AROUND);
    const last = Math.min(this.items.length, Math.ceil((scrollTop + clientHeight) / this.height) + ROWS_AROUND);
    const rows = [];
    for (let index = first; index < last; index += 1) rows.push(this.row(this.items[index], index));
    this.sizer.replaceChildren(...rows);
    const current = rows.find((row) => row.getAttribute("aria-selected") === "true");
    if (current) this.element.setAttribute("aria-activedescendant", current.id);
    else this.element.removeAttribute("aria-activedescendant");
  }

  row(item, index) {
    const row = h(
      "div",
      {
        class: "row",
        role: "option",
        id: `${this.id}-${index}`,
        "data-key": item.key,
        "aria-selected": String(item.key === this.selected),
        "aria-posinset": index + 1,
        "aria-setsize": this.items.length,
      },
      this.draw(item),
    );
    row.style.transform = `translateY(${index * this.height}px)`;
    row.style.height = `${this.height}px`;
    return row;
  }
}
