/* The page: pictures in, answers and explanations out. */

import { Answers, plain, readable } from "/assets/answers.js";
import { ask, Attention, keyed, picture, Refused, stretched } from "/assets/api.js";
import { Camera } from "/assets/camera.js";
import { Stage } from "/assets/stage.js";

const $ = (id) => document.getElementById(id);
const unanswered = () => ({ answer: null, scores: null, attention: null, evidence: new Map() });
const one = document.querySelector(".slot"), other = one.cloneNode(true);
other.hidden = true;
other.dataset.slot = 1;
other.querySelector(".stage").ariaLabel = "Second picture";
one.after(other);
const slots = [one, other].map((slot) => ({
  stage: new Stage(slot, { onPoint: () => light() }),
  blob: null, next: null, job: 0, ...unanswered(), // the picture that is shown, and the one that is being answered
}));
const answers = new Answers($("answers"), { onTarget: chooseTarget });
const camera = new Camera($("camera"), { onFrame: async (blob) => (await ready) && analyse(0, blob), onError: say });
let facts = null, name = null, mode = "attention", target = null, comparing = false, latest = 0, wanted = null, touched = false, ready;

const ONE = { probabilities: "class", labels: "label", values: "value", areas: "class", boxes: "class" };
const layers = () => facts.explains?.layers ?? [];
const areas = () => facts.form === "areas"; // the answer is a picture over the picture
const boxes = () => facts.form === "boxes"; // labels with a place
const current = ({ next, blob }) => next ?? blob;
const active = () => slots.filter((slot, i) => i === 0 || comparing);

/* The model */

/* Whether the model could be loaded; until then, pictures wait. */
async function begin() {
  $("again").hidden = true;
  say("");
  try {
    const { models } = await (await ask("/models")).json();
    $("model").replaceChildren(...models.map((each) => new Option(each, each)));
    document.querySelector(".pick").hidden = models.length < 2;
    await useModel(models[0]);
  } catch (error) {
    $("headline").textContent = "The model cannot be loaded.";
    $("again").hidden = false;
    fail(error);
  }
  return facts !== null;
}

async function useModel(chosen) {
  facts = await (await ask("/model", { params: { model: chosen } })).json();
  name = chosen;
  $("ask").hidden = !facts.words;
  if (facts.words) Object.assign(facts, { form: "probabilities", task: { ...facts.task, classes: words() } });
  document.title = `${facts.name} · vitrail`;
  const count = facts.task.classes.length, what = ONE[facts.form];
  const plural = count === 1 ? what : what === "class" ? "classes" : `${what}s`;
  $("facts").textContent = [facts.architecture, facts.size, `${count.toLocaleString("en")} ${plural}`].join(" · ");
  $("curl").textContent = `curl${keyed() ? ' -H "Authorization: Bearer $VITRAIL_API_KEY"' : ""} -F image=@picture.jpg '${location.origin}/predict${$("model").options.length > 1 ? `?model=${name}` : ""}'`;
  target = null;
  touched = false;
  $("threshold").value = Math.min(...(facts.task.thresholds?.length ? facts.task.thresholds : [0.5]));
  mode = layers().length && !areas() && !boxes() ? "attention" : "picture";
  $("compare").hidden = false;
  answers.begin(facts);
  setUpControls();
  for (const slot of active()) {
    Object.assign(slot, unanswered());
    slot.stage.bare();
  }
  headline();
  await Promise.all(active().map((slot, i) => current(slot) && analyse(i, current(slot))));
}

/* The words in the box, for a model that was trained on captions; null for any other. */
const words = () => [...new Set($("words").value.split(",").map((word) => word.trim()).filter(Boolean))];
const labels = () => (facts.words ? words().join(",") : null);

async function useWords() {
  if (!words().length) return say("Give words to choose from, with commas between them.");
  await useModel(name);
}

function setUpControls() {
  $("controls").hidden = !facts.explains;
  const radios = document.querySelectorAll("input[name=mode]");
  for (const radio of radios) {
    radio.checked = radio.value === mode;
    radio.parentElement.hidden = radio.value === "attention" && !layers().length;
  }
  $("layer").max = layers().length;
  $("layer").value = 0;
  $("head").value = 0;
  heads();
}

function heads() {
  const layer = Number($("layer").value);
  const count = layer ? layers()[layer - 1].heads : 0;
  $("head").max = count;
  $("head").disabled = !layer;
  if (Number($("head").value) > count || !layer) $("head").value = 0;
  $("layer-value").textContent = layer ? `${layer} of ${layers().length}` : "all";
  $("head-value").textContent = Number($("head").value) ? `${$("head").value} of ${count}` : layer ? "mean" : "–";
}

/* Pictures */

/* A picture that is refused changes nothing: the one before it stays with its answer. */
async function analyse(number, blob) {
  const slot = slots[number], job = ++slot.job;
  slot.next = blob;
  say("");
  const bitmap = await createImageBitmap(blob).catch(() => null); // the service may read what the browser cannot
  if (job !== slot.job) return;
  const params = { model: name }, begun = performance.now();
  try {
    const all = boxes() ? { threshold: 0.05 } : {}; // the slider chooses among them
    const predicting = ask("/predict", { blob, params: { ...params, ...all, scores: true, layer: areas(), labels: labels() } });
    const explaining = layers().length ? ask("/explain", { blob, params: { ...params, format: "binary" } }) : null;
    explaining?.catch(() => {}); // its error is that of the prediction
    const { predictions: [answer], cut } = await (await predicting).json();
    const layer = bitmap && answer.layer ? await picture(answer.layer) : null;
    if (job !== slot.job) return;
    latest = performance.now() - begun;
    if (cut) say(cut > 1 ? `${cut} of the labels are longer than the model reads, and are cut.` : "One of the labels is longer than the model reads, and is cut.");
    Object.assign(slot, unanswered(), { blob, next: null, answer, scores: answer.scores });
    if (bitmap) slot.stage.show(bitmap, facts.preprocess);
    else slot.stage.clear("The browser cannot show this format, but here is the answer.");
    slot.stage.cover(layer);
    showAnswers();
    const attention = explaining && bitmap ? new Attention(await (await explaining).arrayBuffer()) : null;
    if (answer !== slot.answer) return;
    slot.attention = attention;
    await show();
  } catch (error) {
    if (job !== slot.job) return;
    slot.next = null;
    show();
    fail(error);
  }
}

async function take(files, number) {
  const pictures = [...files];
  if (!pictures.length || !(await ready)) return;
  if (pictures.some((file) => !file.size)) return say("This file is empty. Choose another picture.");
  camera.stop();
  if (pictures.length > 1 && !comparing) compare(true);
  if (pictures.length > 1) pictures.slice(0, 2).forEach((file, i) => analyse(i, file));
  else analyse(number ?? (comparing && current(slots[0]) && !current(slots[1]) ? 1 : 0), pictures[0]);
}

function compare(on) {
  comparing = on;
  $("compare").setAttribute("aria-pressed", String(on));
  $("bench").classList.toggle("comparing", on);
  slots[1].stage.slot.hidden = !on;
  if (!on) {
    Object.assign(slots[1], unanswered(), { blob: null, next: null, job: slots[1].job + 1 });
    slots[1].stage.clear();
  }
  showAnswers();
}

/* Answers */

const COLOURS = ["#e6194b", "#4363d8", "#3cb44b", "#f58231", "#911eb4", "#42d4f4", "#f032e6", "#9a6324", "#808000", "#000075"];

/* The boxes of an answer from the slider's threshold on; at its start, those of the model. */
function found({ answer }) {
  const chosen = Number($("threshold").value), own = facts.task.thresholds ?? [];
  return answer.labels.map((label, i) => {
    const k = facts.task.classes.indexOf(label);
    return { label, share: answer.probabilities[i], box: answer.boxes[i], colour: COLOURS[k % COLOURS.length], k };
  }).filter(({ share, k }) => share >= (touched ? chosen : own[k] ?? chosen));
}

function mark() {
  $("boxes").hidden = !boxes();
  if (!boxes()) return;
  $("threshold-value").textContent = touched ? `${Math.round(100 * $("threshold").value)}%` : "as chosen in training";
  for (const slot of active()) {
    if (slot.answer?.boxes) slot.stage.mark(found(slot).map((each) => ({ ...each, text: `${readable(each.label)} ${Math.round(100 * each.share)}%` })));
  }
}

function showAnswers() {
  mark();
  answers.show(active().map((slot) => slot.scores), mode === "relevance" ? target : null);
  headline();
  alike();
}

/* The answer in a sentence. Class names are inserted as text. */
function headline() {
  const place = $("headline"), [first, second] = active().map((slot) => slot.answer && slot.scores ? said(slot) : null);
  const strong = (text) => Object.assign(document.createElement("em"), { textContent: text });
  if (!first) return place.replaceChildren("What does ", strong(facts.name), " see?");
  return place.replaceChildren(strong(first), ...(second ? [" and ", strong(second)] : []));
}

function said(slot) {
  const { answer, scores } = slot;
  if (answer.boxes) {
    const counts = new Map();
    for (const { label } of found(slot)) counts.set(label, (counts.get(label) ?? 0) + 1);
    return [...counts].map(([label, count]) => `${count} ${readable(label)}`).join(", ") || "No object";
  }
  if (answer.values) return Object.entries(answer.values).slice(0, 3).map(([key, value]) => `${readable(key)} ${plain(value)}`).join(", ");
  if (areas()) return answer.labels.slice(0, 3).map((label, i) => `${readable(label)} ${Math.round(100 * answer.probabilities[i])}%`).join(", ");
  if (facts.form === "labels") return answer.labels.slice(0, 4).map(readable).join(", ") || "No label";
  return `${readable(answer.labels[0])}, ${Math.round(100 * Math.max(...scores))}%`;
}

/* How alike two pictures are to the model: the cosine of their feature vectors. */
async function alike() {
  const [a, b] = slots;
  $("alike").hidden = !(comparing && a.scores && b.scores && facts.embeds);
  if ($("alike").hidden) return;
  const before = [a.answer, b.answer];
  try {
    const [u, v] = await Promise.all([a, b].map(async ({ blob }) => (await (await ask("/embed", { blob, params: { model: name } })).json()).embeddings[0]));
    if (before[0] !== a.answer || before[1] !== b.answer) return;
    const dot = (x, y) => x.reduce((sum, value, i) => sum + value * y[i], 0);
    const cosine = dot(u, v) / Math.sqrt(dot(u, u) * dot(v, v));
    $("alike").textContent = `Cosine similarity of their feature vectors: ${cosine.toFixed(2).replace("-0.00", "0.00")}`;
  } catch (error) {
    fail(error);
  }
}

/* Explanations */

function chooseTarget(chosen) {
  const same = mode === "relevance" && target === chosen;
  target = chosen;
  setMode(same ? (layers().length && !areas() ? "attention" : "picture") : "relevance");
}

function setMode(chosen) {
  mode = chosen;
  for (const radio of document.querySelectorAll("input[name=mode]")) radio.checked = radio.value === mode;
  if (mode === "relevance") target ??= strongest();
  show();
}

function strongest() {
  const scores = slots[0].scores;
  return scores ? facts.task.classes[scores.indexOf(Math.max(...scores))] : null;
}

/* Fetches what is missing, then lights it. */
async function show() {
  answers.show(active().map((slot) => slot.scores), mode === "relevance" ? target : null);
  light();
  if (mode !== "relevance") return;
  await Promise.all(active().map((slot) => findEvidence(slot, target)));
  light();
}

async function findEvidence(slot, chosen) {
  const { answer, evidence, stage } = slot;
  if (!answer || !stage.picture || !chosen || evidence.has(chosen)) return;
  evidence.set(chosen, null);
  try {
    const params = { model: name, method: "relevance", target: chosen, labels: labels() };
    const { map, signed } = await (await ask("/explain", { blob: slot.blob, params })).json();
    const values = stretched(map.flat(), signed).map((value) => value * contrast(answer.scores));
    evidence.set(chosen, { grid: [map.length, map[0].length], values, signed });
  } catch (error) {
    evidence.delete(chosen);
    if (answer !== slot.answer) return;
    if (mode === "relevance" && target === chosen) chooseTarget(chosen); // back to the view without it
    fail(error);
  }
}

/* Evidence is shown as strongly as the model is decided, from 0 to 1: a guess has none at full contrast. */
function contrast(scores) {
  if (facts.form === "values") return 1;
  if (facts.form === "labels") return Math.max(...scores.map((share) => Math.abs(2 * share - 1)));
  const even = 1 / scores.length;
  return scores.length > 1 ? Math.sqrt(Math.max(0, Math.max(...scores) - even) / (1 - even)) : 1;
}

function light() {
  const layer = Number($("layer").value), head = Number($("head").value);
  $("sliders").hidden = mode !== "attention";
  $("fading").hidden = !areas() || mode !== "picture";
  document.querySelector(".legend").hidden = mode === "picture";
  const signed = mode === "relevance" && facts.explains?.signed;
  $("ramp").classList.toggle("signed", Boolean(signed));
  $("less").textContent = signed ? "against" : "less";
  $("more").textContent = signed ? "for" : "more";
  for (const slot of active()) {
    const { stage, attention } = slot;
    if (mode === "attention" && attention) stage.light(attention.row(layer, head, stage.cell));
    else stage.light(mode === "relevance" ? slot.evidence.get(target) ?? null : null);
    stage.caption.textContent = slot.scores && stage.picture ? caption(stage, layer, head) : "";
  }
  hint();
}

const undecided = (stage) => contrast(slots.find((slot) => slot.stage === stage).scores) < 0.3;

function caption(stage, layer, head) {
  if (mode === "relevance" && !stage.map) return "Computing the evidence…";
  if (mode === "relevance") return target ? `Evidence for ${readable(target)}${undecided(stage) ? ": little, as the model is undecided" : ""}` : "";
  if (mode === "picture" || !stage.map) return "";
  const [h, w] = stage.map.grid, place = (cell) => `row ${Math.floor(cell / w) + 1}, column ${(cell % w) + 1}`;
  if (stage.cell === null) return layer ? `Where ${head ? `head ${head} of ` : ""}layer ${layer} looks` : "Where the model looks, through all layers (rollout)";
  const most = stage.map.values.indexOf(Math.max(...stage.map.values));
  return `The patch in ${place(stage.cell)} looks mostly at ${most === stage.cell ? "itself" : place(most)}`;
}

function hint() {
  const touch = matchMedia("(hover: none)").matches;
  const click = `${touch ? "Tap" : "Click"} a ${ONE[facts.form]} to see the evidence for it.`;
  const texts = {
    picture: click,
    attention: `${touch ? "Touch" : "Move over"} a patch to see where it looks. ${click}`,
    relevance: "The patches that are evidence for the chosen answer. Choose another one in the list.",
  };
  $("hint").textContent = texts[mode] + (latest ? ` Answered in ${Math.round(latest)} ms.` : "");
}

/* Messages and wiring */

function say(text) {
  $("message").textContent = text;
  $("message").hidden = !text;
}

function fail(error) {
  if (!(error instanceof Refused)) throw error;
  say(error.message);
}

$("words").addEventListener("change", () => useWords().catch(fail));
$("model").addEventListener("change", () => useModel($("model").value).catch(fail));
for (const radio of document.querySelectorAll("input[name=mode]")) radio.addEventListener("change", () => setMode(radio.value));
for (const id of ["layer", "head"]) {
  $(id).addEventListener("input", () => {
    heads();
    light();
  });
}
$("threshold").addEventListener("input", () => {
  touched = true;
  mark();
  headline();
});
$("opacity").addEventListener("input", () => {
  $("opacity-value").textContent = `${$("opacity").value}%`;
  for (const { stage } of slots) stage.fade(Number($("opacity").value) / 100);
});
$("choose").addEventListener("click", () => {
  wanted = null;
  $("file").click();
});
$("file").addEventListener("change", () => {
  take($("file").files, wanted);
  $("file").value = "";
});
$("compare").addEventListener("click", () => compare(!comparing));
$("copy").addEventListener("click", async () => {
  let copied = true;
  try {
    await navigator.clipboard.writeText($("curl").textContent);
  } catch { // browsers have it on localhost and over HTTPS only
    getSelection().selectAllChildren($("curl"));
    copied = document.execCommand("copy");
  }
  $("copy").textContent = copied ? "Copied" : "Not copied: selected";
  setTimeout(() => { $("copy").textContent = "Copy"; }, 1500);
});
slots.forEach(({ stage }, i) => stage.box.addEventListener("click", () => {
  if (stage.picture) return;
  wanted = i;
  $("file").click();
}));
document.addEventListener("paste", (event) => take(event.clipboardData.files));
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("dragging");
});
document.addEventListener("dragleave", (event) => event.relatedTarget ?? document.body.classList.remove("dragging"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dragging");
  const slot = event.target.closest?.(".slot");
  if (!event.dataTransfer.files.length) say("That was not a file. Save the picture and drop the file.");
  take(event.dataTransfer.files, slot && Number(slot.dataset.slot));
});
for (const glass of document.querySelectorAll(".empty .window")) {
  for (let i = 0; i < 20; i++) glass.append(document.createElement("span"));
}

$("again").addEventListener("click", () => { ready = begin(); });
ready = begin();
