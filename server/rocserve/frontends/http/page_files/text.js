// Boxes for a model's texts, the head of a vector, and which of the last texts are nearest to a new one.

import { h, number, svg } from "./dom.js";

export const VECTOR = "EMBEDDING";
const SHOWN_NUMBERS = 8;
const SHOWN_TEXTS = 5;
const KEPT_TEXTS = 100;

/** Whether each of these inputs takes one text. */
export const areTexts = (inputs) => inputs.length > 0
  && inputs.every(({ datatype, shape }) => datatype === "BYTES" && shape.every((size) => size === -1 || size === 1));

/** A box for each input. Calls `send` with the inputs of a request. */
export function textBoxes(inputs, send) {
  const boxes = inputs.map(({ name }) => h("textarea", { rows: 2, "aria-label": `text for ${name}`, onkeydown }));
  const run = () => send(inputs.map(({ name, datatype, shape }, index) =>
    ({ name, datatype, shape: shape.map(() => 1), data: [boxes[index].value] })));
  function onkeydown(event) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run();
  }
  return h("div", {}, ...inputs.map(({ name }, index) => h("label", {}, name, boxes[index])),
    h("p", {}, h("button", { type: "button", onclick: run }, "Run"), " ", h("small", {}, "or Ctrl+Enter")));
}

/** Whether an output is the vector of one text or picture; models of text call it so. */
export const isVector = ({ name, datatype, shape, data }) =>
  name === VECTOR && /FP/.test(datatype) && data?.length > 1 && shape.at(-1) === data.length;

const lengthOf = (vector) => Math.hypot(...vector);

function cosine(one, other) {
  const product = one.reduce((sum, value, index) => sum + value * other[index], 0);
  return product / (lengthOf(one) * lengthOf(other)) || 0;
}

/** Numbers of a plot's width, and fewer than these are not worth one. */
const PLOT_WIDTH = 512;
const PLOT_HEIGHT = 64;
const FEWEST_NUMBERS = 8;

/** Draws numbers as lines from zero: of each column the least and the greatest. Null if there are few, or no numbers. */
export function plot(data) {
  const values = data.map((value) => (Number.isFinite(value) ? value : 0));
  const [lows, highs] = [columns(values, Math.min), columns(values, Math.max)];
  const [least, most] = [Math.min(0, ...lows), Math.max(0, ...highs)];
  if (values.length < FEWEST_NUMBERS || least === most) return null;
  const y = (value) => ((most - value) / (most - least)) * PLOT_HEIGHT;
  const x = (index) => ((index + 0.5) / lows.length) * PLOT_WIDTH;
  const path = lows.map((low, index) =>
    `M${x(index).toFixed(1)} ${y(Math.min(low, 0)).toFixed(1)}V${y(Math.max(highs[index], 0)).toFixed(1)}`).join("");
  const text = `${number(values.length, 0)} numbers from ${number(Math.min(...lows), 3)} to ${number(Math.max(...highs), 3)}`;
  const bars = svg("path", { class: "line rate", d: path });
  bars.style.strokeWidth = Math.max(1, (0.7 * PLOT_WIDTH) / lows.length);
  return h("figure", { class: "vector" }, svg("svg", { viewBox: `0 0 ${PLOT_WIDTH} ${PLOT_HEIGHT}`, role: "img",
    "aria-label": `plot of ${text}`, preserveAspectRatio: "none" },
  svg("path", { class: "grid", d: `M0 ${y(0).toFixed(1)}H${PLOT_WIDTH}` }), bars), h("figcaption", {}, text));
}

/** One value of each column of a plot: `choose` of the numbers that share it. */
function columns(values, choose) {
  const count = Math.min(values.length, PLOT_WIDTH);
  return Array.from({ length: count }, (_, index) => {
    const [from, to] = [index, index + 1].map((edge) => Math.floor((edge * values.length) / count));
    return values.slice(from, to).reduce((best, value) => choose(best, value));
  });
}

export function vector({ name, datatype, shape, data }) {
  const head = data.slice(0, SHOWN_NUMBERS).map((value) => Number(value.toPrecision(4))).join(", ");
  const more = data.length > SHOWN_NUMBERS ? `, … ${data.length - SHOWN_NUMBERS} more` : "";
  const form = `${datatype} [${shape.join(", ")}], length ${number(lengthOf(data), 3)}`;
  return h("section", {}, h("h3", {}, `${name} `, h("small", {}, form)), plot(data), h("pre", { tabindex: "0" }, head + more));
}

/** The texts that were sent since the last load of the model, with their vectors. */
export class LastTexts {
  #kept = [];

  /** Returns the nearest of the kept texts as { label, value }, and keeps the new one. */
  nearest(text, values) {
    const others = this.#kept.filter((kept) => kept.text !== text);
    const found = others.map((kept) => ({ label: kept.text, value: cosine(values, kept.values) }));
    this.#kept = [...others, { text, values }].slice(-KEPT_TEXTS);
    return found.sort((one, other) => other.value - one.value).slice(0, SHOWN_TEXTS);
  }
}
