// Shows an ensemble's steps as the server draws them, with which step takes the time and which fails.

import { ask, between, data, findModel, historyOf, kindOf } from "./data.js";
import { h, linkTo, number, svg } from "./dom.js";
import { COUNTDOWN } from "./repair.js";

const MINUTE_MS = 60_000;
/** Width of a letter, about. */
const LETTER = 7.2;
/** Pixels on each side of a box's texts, and of the bar at its lower edge. */
const INSET = 10;
const BAR = 6;

const cut = (text, width) => {
  const most = Math.max(4, Math.floor(width / LETTER));
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
};

/** The mean time of a step's requests in the last minute, and its failures; null = there was none, or it is not known. */
function minuteOf({ model, version }) {
  const row = findModel(model, version);
  const history = row ? historyOf(row) : [];
  const last = history.at(-1);
  const before = history.find((sample) => sample.at >= (last?.at ?? 0) - MINUTE_MS);
  if (!last || before === last) return { row, mean: null, failures: 0 };
  return { row, mean: between(before, last).mean, failures: last.failures - before.failures };
}

/** Returns the drawing and the function that updates what is in the steps. */
function drawn({ width, height, boxes, arrows, labels }) {
  const head = svg("marker", { id: "head", viewBox: "0 0 8 8", refX: 8, refY: 4, markerWidth: 8, markerHeight: 8,
    orient: "auto" }, svg("path", { d: "M0 0L8 4L0 8z" }));
  const graph = svg("svg", { width, height, class: "graph", role: "group", "aria-label": "steps of the ensemble" },
    svg("defs", {}, head),
    ...arrows.map((path) => svg("path", { class: "arrow", "marker-end": "url(#head)", d: path })),
    ...labels.map(({ x, y, text, title }) =>
      svg("text", { class: "tensor", x, y, "text-anchor": "middle" }, text, svg("title", {}, title))));
  const shown = [];
  for (const place of boxes) {
    const { kind, x, y, text, title, model, version } = place;
    const isStep = kind === "step";
    const box = svg("rect", { class: isStep ? "step" : kind === "written by no step" ? "end bad" : "end", x: x + 0.5, y,
      width: place.width - 1, height: place.height, rx: isStep ? 6 : place.height / 2 });
    const name = svg("text", { class: "name", x: isStep ? x + INSET : x + place.width / 2, y: y + 20,
      "text-anchor": isStep ? "start" : "middle" }, text);
    if (!isStep) { graph.append(box, name); continue; }
    const time = svg("text", { class: "time", x: x + INSET, y: y + 38 });
    const share = svg("rect", { class: "share", x: x + 1, y: y + place.height - BAR - 1, height: BAR, width: 0, rx: 2 });
    graph.append(svg("a", { href: linkTo({ name: model, version }) }, box, share, name, time, svg("title", {}, title)));
    shown.push({ place, box, share, time });
  }
  function update() {
    const minutes = shown.map(({ place }) => minuteOf(place));
    const sum = minutes.reduce((total, { mean }) => total + (mean ?? 0), 0);
    shown.forEach(({ place, box, share, time }, index) => {
      const { row, mean, failures } = minutes[index];
      const state = row && kindOf(row) === "ready" ? "" : row ? (row.state || "not loaded").toLowerCase() : "not there";
      const part = sum && mean != null ? mean / sum : 0;
      const texts = [state, part ? `${number(100 * part, 0)} % · ${number(mean, 2)} ms` : "", failures > 0 ? `${number(failures, 0)} failed` : ""];
      const text = cut(texts.filter(Boolean).join(" · "), place.width - 2 * INSET);
      if (time.textContent !== text) time.textContent = text;
      box.classList.toggle("bad", Boolean(state) || failures > 0);
      share.setAttribute("width", Math.max(0, part * (place.width - 2)));
    });
  }
  return { graph, update };
}

/** Returns a function that shows the graph in `place` if the model is an ensemble, served or not, and draws it again when
 * the model or the width changes. */
export function ensembleGraph(place, name, version) {
  const frame = h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "graph" });
  const section = h("section", { hidden: true }, h("h2", {}, "Steps"), frame, h("p", {}, h("small", {},
    "Times are means of each model's requests in the last minute, also of those that other clients sent.")));
  place.replaceChildren(section);
  let asked = "";
  let update = () => {};
  return async (model) => {
    const mayBe = model && (model.platform === "ensemble" || !model.platform);
    const width = Math.floor(place.clientWidth);
    const wanted = mayBe && width ? `${width} ${model.state} ${model.load_seconds} ${model.reason.replace(COUNTDOWN, "")}` : "";
    if (wanted === asked) {
      update();
      return;
    }
    asked = wanted;
    try {
      const found = wanted ? await ask(`/v2/ensemble-graph?${new URLSearchParams({ name, version, width })}`) : { boxes: [] };
      if (wanted !== asked) return;
      section.hidden = !found.boxes.length;
      if (section.hidden) { update = () => {}; return; }
      const members = [...new Set(found.boxes.map((box) => box.model).filter(Boolean))];
      if (place.isConnected) data.inView = () => [name, ...members];
      const next = drawn(found);
      frame.replaceChildren(next.graph);
      update = next.update;
      update();
    } catch {
      // What refuses the graph, as a restriction, also refuses what is shown beside it, which says why.
      section.hidden = true;
      if (wanted === asked) asked = "";
    }
  };
}
