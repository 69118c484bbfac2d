/* Requests to the service. */

let key = null;
try {
  key = sessionStorage.getItem("vitrail-key");
} catch { /* storage may be disabled */ }

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/* Whether the service has asked for an API key. */
export const keyed = () => key !== null;

/* Sends a request; a blob is posted. Asks for the API key if the service wants one, and keeps one that worked. */
export async function ask(path, { blob, params = {} } = {}) {
  const url = new URL(path, location.origin);
  for (const [name, value] of Object.entries(params)) {
    if (value !== null && value !== undefined) url.searchParams.set(name, value);
  }
  for (;;) {
    const sent = key, headers = key ? { Authorization: `Bearer ${key}` } : {};
    if (blob) headers["Content-Type"] = blob.type.startsWith("image/") ? blob.type : "application/octet-stream";
    let response;
    try {
      response = await fetch(url, { method: blob ? "POST" : "GET", body: blob, headers });
    } catch {
      throw new Refused(0, "The service does not answer. Is it still running?");
    }
    if (response.status === 401) {
      if (sent === key) await askForKey(Boolean(sent)); // otherwise another request has asked for it meanwhile
      continue;
    }
    if (response.ok) {
      try {
        if (sent) sessionStorage.setItem("vitrail-key", sent);
      } catch { /* as above */ }
      return response;
    }
    let message = `The service answered ${response.status}.`;
    try {
      message = (await response.json()).error.message;
    } catch { /* not our JSON: a proxy, perhaps */ }
    throw new Refused(response.status, message);
  }
}

/* One dialog, however many requests wait for the key. */
let asking = null;
function askForKey(wrong) {
  asking ??= new Promise((done, refuse) => {
    const [dialog, field, error] = ["key-dialog", "key", "key-wrong"].map((id) => document.getElementById(id));
    const complain = (text) => {
      error.textContent = text;
      error.hidden = !text;
    };
    complain(wrong ? "That key is wrong. Try again." : "");
    key = null;
    dialog.firstElementChild.onsubmit = (event) => {
      if (/^[ -~\xa0-\xff]+$/.test(field.value)) key = field.value;
      else { // a header cannot carry it
        event.preventDefault();
        complain("A key has Latin letters, digits and signs only. Check what you typed.");
      }
    };
    dialog.onclose = () => {
      field.value = "";
      asking = null;
      if (key === null) refuse(new Refused(401, "This service needs its API key."));
      else done();
    };
    dialog.showModal();
  });
  return asking;
}

/* Attention of every layer, head and patch: a header, then one byte per number. See /docs. */
export class Attention {
  constructor(buffer) {
    const length = new DataView(buffer).getUint32(0, true);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    this.layers = header.layers;
    this.rollout = header.rollout;
    this.bytes = new Uint8Array(buffer, 4 + length);
  }

  /* The grid of a layer; 0 is the rollout through all of them. */
  grid(layer) {
    return layer ? this.layers[layer - 1].grid : this.rollout.grid;
  }

  /* Attention of a cell, or of the whole picture if it is null: values from 0 to 1.
     Layer 0 is all of them: the rollout of the whole picture, or the mean over the layers of a cell. */
  row(layer, head, cell) {
    const [h, w] = this.grid(layer), cells = h * w;
    const values = new Float32Array(cells);
    const add = (start) => { for (let i = 0; i < cells; i++) values[i] += this.bytes[start + i]; };
    if (!layer && cell === null) add(this.rollout.offset);
    else {
      const used = layer ? [this.layers[layer - 1]] : this.layers.filter(({ grid }) => grid[0] === h && grid[1] === w);
      for (const { heads, offset } of used) {
        const row = cell === null ? 0 : cell + 1;
        for (let k = head ? head - 1 : 0; k < (head || heads); k++) add(offset + (k * (cells + 1) + row) * cells);
      }
    }
    return { grid: [h, w], values: stretched(values), signed: false };
  }
}

/* Values from the smallest to the largest as 0 to 1; signed ones as -1 to 1, with 0 in its place. */
export function stretched(values, signed = false) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (signed) [low, high] = [0, Math.max(high, -low)];
  const range = high - low || 1;
  return Float32Array.from(values, (value) => (value - low) / range);
}

/* A base64 PNG as a canvas whose pixels are opaque or empty, so that the page sets the opacity. */
export async function picture(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const bitmap = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
  const canvas = Object.assign(document.createElement("canvas"), { width: bitmap.width, height: bitmap.height });
  const context = canvas.getContext("2d");
  context.drawImage(bitmap, 0, 0);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 3; i < pixels.data.length; i += 4) if (pixels.data[i]) pixels.data[i] = 255;
  context.putImageData(pixels, 0, 0);
  return canvas;
}
