// Draws a graph of the last ten minutes.

import { number, svg } from "./dom.js";

const HEIGHT = 130;
const LEFT = 44;
const BOTTOM = 18;
const SPAN_MS = 600_000;

/** The next round number that is not less than the value. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

/**
 * `width`: the drawing's, in units of which a text is 10 high, so that it is readable on a telephone, too.
 * `lines`: by CSS class, which gives the colour: points [milliseconds, value or null].
 */
export function chart(title, unit, width, lines, now) {
  const values = Object.values(lines).flat().map(([, value]) => value ?? 0);
  const top = ceiling(Math.max(0, ...values));
  const x = (at) => LEFT + ((at - now + SPAN_MS) / SPAN_MS) * (width - LEFT - 4);
  const y = (value) => 8 + (1 - value / top) * (HEIGHT - BOTTOM - 8);
  const label = `${title}, ${unit}`;
  const graph = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, class: "chart", role: "img", "aria-label": label });
  for (const value of [0, top / 2, top]) {
    graph.append(
      svg("line", { x1: LEFT, x2: width - 4, y1: y(value), y2: y(value), class: "grid" }),
      svg("text", { x: LEFT - 5, y: y(value) + 4, "text-anchor": "end" }, number(value, 2)),
    );
  }
  for (const [minutes, text, anchor] of [[10, "−10 min", "start"], [5, "−5 min", "middle"], [0, "now", "end"]]) {
    graph.append(svg("text", { x: x(now - minutes * 60_000), y: HEIGHT - 3, "text-anchor": anchor }, text));
  }
  for (const [name, points] of Object.entries(lines)) {
    let path = "";
    let pen = "M";
    for (const [at, value] of points) {
      // A single point becomes a dot.
      if (value != null) path += `${pen}${x(at).toFixed(1)} ${y(value).toFixed(1)}${pen === "M" ? "h0" : ""}`;
      pen = value == null ? "M" : "L";
    }
    graph.append(svg("path", { d: path || "M0 0", class: `line ${name}` }));
  }
  return graph;
}
