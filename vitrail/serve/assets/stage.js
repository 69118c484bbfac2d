/* The stage: a picture as the model sees it, and light through its patches where the model looks. */

const calm = matchMedia("(prefers-reduced-motion: reduce)");
const LEAD = "12 13 16";
const SUN = [255, 196, 92];
const SKY = [86, 160, 235];

export class Stage {
  constructor(slot, { onPoint }) {
    this.slot = slot;
    this.box = slot.querySelector(".stage");
    this.canvas = slot.querySelector("canvas");
    this.context = this.canvas.getContext("2d");
    this.caption = slot.querySelector(".caption");
    this.clear();
    this.onPoint = onPoint;
    for (const kind of ["pointermove", "pointerdown"]) this.box.addEventListener(kind, (event) => this.point(event));
    this.box.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") this.move(null);
    });
    this.box.addEventListener("keydown", (event) => this.press(event));
    this.box.addEventListener("blur", () => this.move(null));
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  /* Shows no picture, and why. */
  clear(reason = "") {
    this.box.classList.remove("full");
    this.slot.querySelector(".reason").textContent = reason;
    this.caption.textContent = "";
    this.picture = null;
    this.bare();
  }

  /* The picture with nothing over it. */
  bare() {
    this.cell = this.layer = null;
    this.boxes = [];
    this.light(null);
  }

  /* Shows a picture, cropped as the model's preprocessing does. */
  show(bitmap, preprocess) {
    this.bare();
    const [h, w] = preprocess.img_size;
    this.aspect = w / h;
    this.box.style.aspectRatio = `${w} / ${h}`;
    this.box.classList.add("full");
    const padded = preprocess.fit === "pad";
    const width = padded ? bitmap.width : Math.min(bitmap.width, bitmap.height * this.aspect) * preprocess.crop;
    const height = padded ? bitmap.height : width / this.aspect;
    this.crop = [(bitmap.width - width) / 2, (bitmap.height - height) / 2, width, height];
    /* The share of the input that a padded picture takes. */
    this.part = padded ? [Math.min(1, this.aspect ** -1 * width / height), Math.min(1, this.aspect * height / width)] : [1, 1];
    this.picture = bitmap;
    this.small = width < 48;
    this.draw();
  }

  /* Draws boxes: {box: [x0, y0, x1, y1] in pixels of the picture, colour, text}. */
  mark(boxes) {
    this.boxes = boxes;
    this.draw();
  }

  /* Lays a picture over this one, such as a mask; its opacity is set by `fade`. */
  cover(layer) {
    this.layer = layer;
    this.draw();
  }

  fade(opacity) {
    this.opacity = opacity;
    this.draw();
  }

  /* Lets light through where a map is high: {grid, values, signed}, or null for the plain picture. */
  light(map) {
    const before = this.shown;
    this.map = map;
    cancelAnimationFrame(this.frame);
    const same = before && map && before.values.length === map.values.length && before.signed === map.signed;
    if (!same || calm.matches) {
      this.shown = map && { ...map, values: Float32Array.from(map.values) };
      this.draw();
      return;
    }
    const begun = performance.now(), from = Float32Array.from(before.values);
    const step = (now) => {
      const share = Math.min(1, (now - begun) / 140), eased = 1 - (1 - share) ** 3;
      this.shown = { ...map, values: Float32Array.from(map.values, (to, i) => from[i] + (to - from[i]) * eased) };
      this.draw();
      if (share < 1) this.frame = requestAnimationFrame(step);
    };
    this.frame = requestAnimationFrame(step);
  }

  point(event) {
    if (!this.map) return;
    const box = this.canvas.getBoundingClientRect(), [h, w] = this.map.grid;
    const x = Math.floor((event.clientX - box.left) / box.width * w);
    const y = Math.floor((event.clientY - box.top) / box.height * h);
    this.move(x >= 0 && x < w && y >= 0 && y < h ? y * w + x : null);
  }

  press(event) {
    const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === "Escape") this.move(null);
    if (!by || !this.map) return;
    event.preventDefault();
    const [h, w] = this.map.grid;
    const at = this.cell === null ? [Math.floor(h / 2), Math.floor(w / 2)] : [Math.floor(this.cell / w), this.cell % w];
    const y = Math.min(h - 1, Math.max(0, at[0] + by[0])), x = Math.min(w - 1, Math.max(0, at[1] + by[1]));
    this.move(y * w + x);
  }

  move(cell) {
    if (cell === this.cell) return;
    this.cell = cell;
    this.onPoint(this);
    this.draw();
  }

  draw() {
    if (!this.picture) return;
    const sharp = devicePixelRatio || 1;
    const width = Math.round(this.box.clientWidth * sharp), height = Math.round(width / this.aspect);
    if (!width) return;
    if (this.canvas.width !== width || this.canvas.height !== height) {
      this.canvas.width = width;
      this.canvas.height = height;
    }
    const context = this.context;
    context.imageSmoothingEnabled = !this.small;
    context.imageSmoothingQuality = "high";
    const wide = width * this.part[0], high = height * this.part[1];
    context.fillStyle = "#000"; // as the model sees padding
    context.fillRect(0, 0, width, height);
    context.fillStyle = "#fff"; // as the model sees transparency
    context.fillRect(0, 0, wide, high);
    context.drawImage(this.picture, ...this.crop, 0, 0, wide, high);
    if (this.layer && !this.shown) {
      context.globalAlpha = this.opacity ?? 0.6;
      context.drawImage(this.layer, 0, 0, wide, high);
      context.globalAlpha = 1;
    }
    if (this.shown) this.drawPanes(context, width, height, sharp);
    this.drawBoxes(context, wide / this.crop[2], high / this.crop[3], sharp);
  }

  drawBoxes(context, across, down, sharp) {
    context.font = `600 ${Math.round(11 * sharp)}px system-ui, sans-serif`;
    context.textBaseline = "top";
    context.lineWidth = 2 * sharp;
    for (const { box: [x0, y0, x1, y1], colour, text } of [...this.boxes].reverse()) {
      context.strokeStyle = context.fillStyle = colour;
      context.strokeRect(x0 * across, y0 * down, (x1 - x0) * across, (y1 - y0) * down);
      const wide = context.measureText(text).width + 6 * sharp;
      context.fillRect(x0 * across - sharp, y0 * down - sharp, wide, 15 * sharp);
      context.fillStyle = "#fff";
      context.fillText(text, x0 * across + 2 * sharp, y0 * down + sharp);
    }
  }

  drawPanes(context, width, height, sharp) {
    const { grid: [h, w], values, signed } = this.shown;
    const left = (x) => Math.round(x * width / w), top = (y) => Math.round(y * height / h);
    for (let y = 0; y < h; y++) {
      for (let x = 0; x < w; x++) {
        const value = values[y * w + x], strength = Math.abs(value) ** 0.8;
        const place = [left(x), top(y), left(x + 1) - left(x), top(y + 1) - top(y)];
        context.fillStyle = `rgb(${LEAD} / ${0.85 * (1 - strength)})`;
        context.fillRect(...place);
        const [red, green, blue] = signed && value < 0 ? SKY : SUN;
        context.globalCompositeOperation = signed && value < 0 ? "source-over" : "soft-light";
        context.fillStyle = `rgb(${red} ${green} ${blue} / ${(signed ? 0.6 : 0.75) * strength})`;
        context.fillRect(...place);
        context.globalCompositeOperation = "source-over";
      }
    }
    if (width / w > 9 * sharp) {
      context.fillStyle = `rgb(${LEAD} / .5)`;
      const lead = Math.max(1, Math.round(sharp * Math.min(2, width / w / sharp / 24)));
      for (let x = 1; x < w; x++) context.fillRect(left(x) - Math.floor(lead / 2), 0, lead, height);
      for (let y = 1; y < h; y++) context.fillRect(0, top(y) - Math.floor(lead / 2), width, lead);
    }
    if (this.cell !== null && this.cell < h * w) {
      const x = this.cell % w, y = Math.floor(this.cell / w), line = 2.5 * sharp;
      for (const [colour, wide] of [["rgb(0 0 0 / .55)", line + 3 * sharp], ["#fff", line]]) {
        context.strokeStyle = colour;
        context.lineWidth = wide;
        context.strokeRect(left(x), top(y), left(x + 1) - left(x), top(y + 1) - top(y));
      }
    }
  }
}
