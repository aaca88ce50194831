// Draws the boxes that a detector returns on the picture that was sent, as `rocserve detect --out` does.

import { h, number, svg } from "./dom.js";

/** Fraction of the colour circle (the golden section) between two classes: neighbouring classes get distant hues. */
const HUE_STEP = 0.618034;
/** Width of a letter and height of a line, of a text that is 1 high. */
const LETTER = 0.62;
const LINE = 1.35;

/** Red, green and blue of a class, up to 255. */
function colourOf(index) {
  const hue = (index * HUE_STEP) % 1;
  const part = (n) => {
    const k = (n + hue * 6) % 6;
    return Math.round(255 * (1 - 0.85 * Math.max(0, Math.min(k, 4 - k, 1))));
  };
  return [part(5), part(3), part(1)];
}

const covers = (one, other) => one.x < other.x + other.width && other.x < one.x + one.width
  && one.y < other.y + other.height && other.y < one.y + one.height;

/** Where a plate of this size goes: above its box, in it, below it, or the next place down that covers no other plate. */
function placed(plates, { left, top, bottom, width, height, room }) {
  const at = (y) => ({ x: Math.max(0, Math.min(left, room.width - width)), y, width, height });
  const isFree = (plate) => plate.y >= 0 && plate.y + height <= room.height && !plates.some((other) => covers(plate, other));
  const steps = Math.ceil(room.height / height);
  const others = Array.from({ length: 2 * steps }, (_, step) => top + (step % 2 ? -1 : 1) * Math.ceil(step / 2) * height);
  const found = [top - height, top, bottom, ...others].map(at).find(isFree) ?? at(Math.max(0, top - height));
  plates.push(found);
  return found;
}

/** BOXES are in pixels of the picture; the best are first. */
export async function drawn(picture, { BOXES, SCORES, CLASSES, LABELS }) {
  const image = h("img", { src: picture, alt: "the picture that was sent" });
  await image.decode();
  const { naturalWidth: width, naturalHeight: height } = image;
  const scale = Math.max(width, height) / 500;
  const size = 13 * scale;
  const names = (LABELS ?? CLASSES).data;
  const classes = [...new Set(names)];
  const plates = [];
  const found = names.map((label, index) => {
    const [left, top, right, bottom] = BOXES.data.slice(4 * index, 4 * index + 4);
    const colour = colourOf(CLASSES?.data[index] ?? classes.indexOf(label));
    const text = [label, SCORES && `${number(100 * SCORES.data[index], 0)}%`].filter(Boolean).join(" ");
    const plate = placed(plates, { left, top, bottom, width: (String(text).length + 1) * LETTER * size, height: LINE * size,
      room: { width, height } });
    return { left, top, right, bottom, text, plate, fill: `rgb(${colour.join(" ")})`,
      isBright: 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 120 };
  });
  const boxes = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "boxes" });
  // The best are on top, and a coloured line lies on a dark one, so that it is visible on any picture.
  for (const { left, top, right, bottom, fill } of found.toReversed()) {
    for (const [stroke, line] of [["#101010", 4.5], [fill, 2.5]])
      boxes.append(svg("rect", { class: "box-line", x: left, y: top, width: Math.max(0, right - left),
        height: Math.max(0, bottom - top), stroke, "stroke-width": line * scale }));
  }
  // All plates are above all boxes, so that no line crosses a label.
  for (const { plate, fill, isBright, text } of found) {
    boxes.append(svg("rect", { class: "plate", ...plate, fill }),
      svg("text", { x: plate.x + 0.5 * LETTER * size, y: plate.y + size, "font-size": size,
        fill: isBright ? "#000" : "#fff" }, text));
  }
  const frame = h("div", { class: "drawn" }, image, boxes);
  frame.style.width = `min(100%, ${(28 * width) / height}rem)`;
  return h("div", { class: "picture" }, frame, h("ul", {}, ...found.map(({ text, fill }) => {
    const swatch = h("span", { class: "swatch" });
    swatch.style.background = fill;
    return h("li", {}, swatch, text);
  })));
}
