/* The answer in its own form: bars of classes, labels with thresholds, or numbers on their scale. Names are text only. */

const MOST = 8; // classes shown at first

const percent = (share) => `${(100 * share).toFixed(share > 0.9995 || share < 0.0995 ? 1 : 0)}%`;
export const plain = (value) => Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });

export const readable = (name) => name.replaceAll("_", " ");

export function node(tag, kind, text) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
}

export class Answers {
  constructor(place, { onTarget }) {
    this.place = place;
    this.onTarget = onTarget;
    this.all = false;
    this.rows = new Map();
  }

  begin(facts) {
    this.facts = facts;
    this.names = facts.task.classes;
    this.rows.clear();
    this.place.replaceChildren();
    this.list = node("ul", `bars ${facts.form}`);
    this.more = node("button", "quiet");
    this.more.type = "button";
    this.more.addEventListener("click", () => {
      this.all = !this.all;
      this.draw();
    });
    this.place.append(this.list, this.more);
    this.scores = [];
    this.draw();
  }

  /* Scores of one or two pictures, in class order, and the target whose evidence is shown. */
  show(scores, target) {
    this.scores = scores.filter(Boolean);
    this.target = target;
    this.draw();
  }

  order() {
    const numbers = this.names.map((_, i) => i);
    if (!this.scores.length || this.facts.form === "values") return numbers;
    const best = (i) => Math.max(...this.scores.map((row) => row[i]));
    return numbers.sort((a, b) => best(b) - best(a));
  }

  draw() {
    const waiting = !this.scores.length;
    const order = this.order(), most = this.all || this.facts.form === "values" ? order.length : MOST;
    const shown = order.slice(0, most);
    this.list.classList.toggle("waiting", waiting);
    this.list.classList.toggle("two", this.scores.length === 2);
    const before = new Map([...this.rows].map(([i, row]) => [i, row.item.getBoundingClientRect().top]));
    const focused = document.activeElement;
    for (const [i, row] of this.rows) if (!shown.includes(i)) row.item.remove(), this.rows.delete(i);
    shown.forEach((i, place) => {
      if (!this.rows.has(i)) this.rows.set(i, this.row(i));
      const row = this.rows.get(i);
      if (this.list.children[place] !== row.item) this.list.insertBefore(row.item, this.list.children[place] ?? null);
      this.fill(row, i, place);
    });
    if (focused && this.list.contains(focused)) focused.focus();
    slide(this.rows, before);
    this.more.hidden = waiting || this.facts.form === "values" || order.length <= MOST;
    this.more.textContent = this.all ? "Show fewer" : `Show all ${order.length}`;
  }

  row(i) {
    const item = node("li"), button = node("button", "row");
    button.type = "button";
    const name = node("span", "name", readable(this.names[i])), tracks = node("span", "tracks"), text = node("span", "text");
    button.append(name, text, tracks);
    item.append(button);
    button.addEventListener("click", () => this.onTarget(this.names[i]));
    return { item, button, tracks, text };
  }

  fill({ button, tracks, text }, i, place) {
    const { form, explains, task } = this.facts;
    const values = this.scores.map((row) => row[i]);
    const write = form === "values" ? plain : percent;
    text.textContent = values.map(write).join("  ·  ");
    button.disabled = !explains || !values.length;
    button.setAttribute("aria-pressed", String(this.target === this.names[i]));
    button.title = explains ? `Evidence for ${readable(this.names[i])}` : "";
    button.classList.toggle("first", place === 0 && values.length > 0 && form !== "values");
    button.classList.toggle("given", form === "labels" && values.some((value) => value >= task.thresholds?.[i]));
    while (tracks.children.length < Math.max(1, values.length)) {
      const track = node("span", "track");
      track.append(node("i"));
      tracks.append(track);
    }
    while (tracks.children.length > Math.max(1, values.length)) tracks.lastChild.remove();
    [...tracks.children].forEach((track, n) => {
      if (form === "values") scale(track, values[n], task, i);
      else track.firstChild.style.width = `${100 * (values[n] ?? 0)}%`;
      if (form === "labels" && task.thresholds) mark(track, task.thresholds[i]);
    });
  }
}

/* A number on the range of the training data: its mean and two standard deviations. */
function scale(track, value, task, i) {
  const mean = task.target_mean?.[i] ?? 0, spread = 2.5 * (task.target_std?.[i] ?? 1);
  const share = Math.min(1, Math.max(0, ((value ?? mean) - mean + spread) / (2 * spread)));
  track.classList.add("scale");
  track.firstChild.style.left = `${100 * share}%`;
  track.dataset.low = plain(mean - spread);
  track.dataset.high = plain(mean + spread);
}

function mark(track, threshold) {
  const tick = track.querySelector("b") ?? track.appendChild(node("b"));
  tick.style.left = `${100 * threshold}%`;
  tick.title = `threshold ${percent(threshold)}`;
}

/* Rows that change places slide there. */
function slide(rows, before) {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  for (const [i, row] of rows) {
    const moved = before.has(i) ? before.get(i) - row.item.getBoundingClientRect().top : 0;
    if (moved) row.item.animate([{ transform: `translateY(${moved}px)` }, { transform: "none" }], { duration: 220, easing: "ease-out" });
  }
}
