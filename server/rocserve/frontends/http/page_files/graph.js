// Draws an ensemble's steps from the request to the answer, with what flows between them and which step takes the time.

import { between, findModel, historyOf, kindOf } from "./data.js";
import { h, linkTo, number, svg } from "./dom.js";

const MINUTE_MS = 60_000;
const BOX_HEIGHT = 58;
const END_HEIGHT = 30;
const LEAST_WIDTH = 108;
const MOST_WIDTH = 260;
const BETWEEN = 16;
/** Width for texts on arrows that are longer than the boxes. */
const BESIDE = 180;
/** Height of a line of text on an arrow, and of the space above and below these lines. */
const LINE = 16;
const SPACE = 22;
/** Width of a letter, about. */
const LETTER = 7.2;

const typed = ({ datatype, shape }) => `${datatype} [${shape.join(",")}]`;
const cut = (text, width) => {
  const most = Math.max(4, Math.floor(width / LETTER));
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
};
const versionOf = (step) => (step.model_version < 0 ? "" : String(step.model_version));

/** The nodes in their rows and the arrows between them. Node 0 is the request, the last one the answer. */
function plan(config, metadata, metadataOf) {
  const steps = config.ensemble_scheduling.step;
  const answer = steps.length + 1;
  const made = new Map(metadata.inputs.map((input) => [input.name, { from: 0, type: typed(input) }]));
  steps.forEach((step, index) => {
    const outputs = new Map((metadataOf.get(step.model_name)?.outputs ?? []).map((output) => [output.name, output]));
    for (const [output, tensor] of Object.entries(step.output_map)) {
      const known = outputs.get(output);
      made.set(tensor, { from: index + 1, type: known ? typed(known) : "" });
    }
  });
  const arrows = new Map();
  const connect = (tensor, to) => {
    const source = made.get(tensor);
    if (!source) return;
    const key = `${source.from} ${to}`;
    const arrow = arrows.get(key) ?? { from: source.from, to, tensors: new Set() };
    arrow.tensors.add(`${tensor} ${source.type}`);
    arrows.set(key, arrow);
  };
  steps.forEach((step, index) => Object.values(step.input_map).forEach((tensor) => connect(tensor, index + 1)));
  metadata.outputs.forEach(({ name }) => connect(name, answer));
  // Each node is one row below the last of those that it waits for.
  const rowOf = Array(answer + 1).fill(0);
  for (let round = 0; round <= answer; round++) {
    for (const { from, to } of arrows.values()) rowOf[to] = Math.max(rowOf[to], Math.min(rowOf[from] + 1, answer));
  }
  rowOf[answer] = Math.max(...rowOf.slice(0, answer), 0) + 1;
  const rows = Array.from({ length: rowOf[answer] + 1 }, () => []);
  rowOf.forEach((row, node) => rows[row].push(node));
  return { steps, rows: rows.filter((row) => row.length), arrows: [...arrows.values()], answer };
}

/** The mean time of a step's requests in the last minute, and its failures; null = there was none, or it is not known. */
function minuteOf(step) {
  const row = findModel(step.model_name, versionOf(step));
  const history = row ? historyOf(row) : [];
  const last = history.at(-1);
  const before = history.find((sample) => sample.at >= (last?.at ?? 0) - MINUTE_MS);
  if (!last || before === last) return { row, mean: null, failures: 0 };
  return { row, mean: between(before, last).mean, failures: last.failures - before.failures };
}

function drawn({ steps, rows, arrows, answer }, available) {
  const lane = arrows.some(({ from, to }) => rowOf(to) - rowOf(from) > 1) ? 26 : 0;
  const most = Math.max(...rows.map((row) => row.length));
  const width = Math.min(available, most * (MOST_WIDTH + BETWEEN) + BESIDE);
  const room = width - lane;
  const boxWidth = Math.max(LEAST_WIDTH, Math.min(MOST_WIDTH, (room - BETWEEN * (most - 1)) / most));
  const full = Math.max(width, most * (boxWidth + BETWEEN) - BETWEEN + lane);
  const places = new Map();
  const into = rows.map((row) => arrows.filter(({ to }) => row.includes(to)));
  let y = 1;
  rows.forEach((row, index) => {
    const lines = into[index].reduce((sum, { tensors }) => sum + tensors.size, 0);
    if (index) y += 2 * SPACE + lines * LINE;
    const height = row[0] === 0 || row[0] === answer ? END_HEIGHT : BOX_HEIGHT;
    const left = (full - lane - row.length * boxWidth - (row.length - 1) * BETWEEN) / 2;
    row.forEach((node, at) => places.set(node, { x: left + at * (boxWidth + BETWEEN), y, height }));
    y += height;
  });
  function rowOf(node) { return rows.findIndex((row) => row.includes(node)); }

  const head = svg("marker", { id: "head", viewBox: "0 0 8 8", refX: 8, refY: 4, markerWidth: 8, markerHeight: 8,
    orient: "auto" }, svg("path", { d: "M0 0L8 4L0 8z" }));
  const graph = svg("svg", { width: full, height: y + 1, class: "graph", role: "group",
    "aria-label": "steps of the ensemble" }, svg("defs", {}, head));
  const middle = (node) => places.get(node).x + boxWidth / 2;
  const texts = [];
  into.forEach((arrivals) => {
    let line = 0;
    for (const { from, to, tensors } of arrivals) {
      const [start, end] = [places.get(from), places.get(to)];
      const count = arrivals.filter((other) => other.to === to).length;
      const nth = arrivals.filter((other) => other.to === to).findIndex((other) => other.from === from);
      const [x1, y1, y2] = [middle(from), start.y + start.height, end.y];
      const x2 = end.x + (boxWidth * (nth + 1)) / (count + 1);
      const isFar = rowOf(to) - rowOf(from) > 1;
      const side = full - 8;
      graph.append(svg("path", { class: "arrow", "marker-end": "url(#head)", d: isFar
        ? `M${x1} ${y1}C${x1} ${y1 + 30} ${side} ${y1} ${side} ${y1 + 44}V${y2 - 44}C${side} ${y2 - 4} ${x2} ${y2 - 40} ${x2} ${y2}`
        : `M${x1} ${y1}C${x1} ${(y1 + y2) / 2} ${x2} ${(y1 + y2) / 2} ${x2} ${y2}` }));
      // Each text has a line of its own, so that none covers another.
      const top = y2 - SPACE - arrivals.reduce((sum, arrival) => sum + arrival.tensors.size, 0) * LINE;
      for (const tensor of tensors) {
        const text = svg("text", { class: "tensor", x: isFar ? (x2 + side) / 2 : (x1 + x2) / 2, y: top + (line += 1) * LINE - 4,
          "text-anchor": "middle" }, cut(tensor, full - 20), svg("title", {}, tensor));
        texts.push(text);
      }
    }
  });
  graph.append(...texts);
  const shown = steps.map((step, index) => {
    const { x, y: top } = places.get(index + 1);
    const time = svg("text", { class: "time", x: x + 10, y: top + 38 });
    const share = svg("rect", { class: "share", x: x + 1, y: top + BOX_HEIGHT - 7, height: 6, width: 0, rx: 2 });
    const box = svg("rect", { class: "step", x: x + 0.5, y: top, width: boxWidth - 1, height: BOX_HEIGHT, rx: 6 });
    const version = versionOf(step) && ` version ${versionOf(step)}`;
    graph.append(svg("a", { href: linkTo({ name: step.model_name, version: versionOf(step) }) }, box, share,
      svg("text", { class: "name", x: x + 10, y: top + 20 }, cut(step.model_name + version, boxWidth - 28)), time,
      svg("title", {}, step.model_name + version)));
    return { step, box, share, time };
  });
  for (const [node, text] of [[0, "request"], [answer, "answer"]]) {
    const { x, y: top, height } = places.get(node);
    graph.append(svg("rect", { class: "end", x: x + 0.5, y: top, width: boxWidth - 1, height, rx: height / 2 }),
      svg("text", { class: "name", x: middle(node), y: top + 20, "text-anchor": "middle" }, text));
  }
  function update() {
    const minutes = shown.map(({ step }) => minuteOf(step));
    const sum = minutes.reduce((total, { mean }) => total + (mean ?? 0), 0);
    shown.forEach(({ box, share, time }, index) => {
      const { row, mean, failures } = minutes[index];
      const state = row && kindOf(row) === "ready" ? "" : row ? (row.state || "not loaded").toLowerCase() : "not there";
      const part = sum && mean != null ? mean / sum : 0;
      const texts = [state, part ? `${number(100 * part, 0)} % · ${number(mean, 2)} ms` : "", failures > 0 ? `${number(failures, 0)} failed` : ""];
      const text = cut(texts.filter(Boolean).join(" · "), boxWidth - 20);
      if (time.textContent !== text) time.textContent = text;
      box.classList.toggle("bad", Boolean(state) || failures > 0);
      share.setAttribute("width", Math.max(0, part * (boxWidth - 2)));
    });
  }
  return { graph, update };
}

/** Returns the section and the function that updates it. `metadataOf`: a model's name -> its metadata, as far as known. */
export function ensembleGraph(config, metadata, metadataOf) {
  const found = plan(config, metadata, metadataOf);
  const place = h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "graph" });
  let width = 0;
  let update = () => {};
  const section = h("section", {}, h("h2", {}, "Steps"), place, h("p", {}, h("small", {},
    "Times are means of each model's requests in the last minute, also of those that other clients sent.")));
  return { section, update: () => {
    if (place.clientWidth && place.clientWidth !== width) {
      width = place.clientWidth;
      const next = drawn(found, width);
      place.replaceChildren(next.graph);
      update = next.update;
    }
    update();
  } };
}
