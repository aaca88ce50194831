// Makes elements of texts and other elements. Nothing here turns text into markup.

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child != null && child !== false && child !== ""));
  return element;
}

export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/** Writes only new text, so that a selection or a screen reader keeps its place. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function badge(element, state) {
  setText(element, state || "NOT LOADED");
  element.className = `badge ${(state || "none").toLowerCase()}`;
}

export const linkTo = (model) => `#/model/${encodeURIComponent(model.name)}/${encodeURIComponent(model.version)}`;

/** Writes why a model is in its state; softly if it only waits for files. What gets them can be copied. */
export function setReason(element, model) {
  const text = model?.reason ?? "";
  if (element.dataset.text === text) return;
  element.dataset.text = text;
  const commands = model?.lacks_files ? [...text.matchAll(/get one with: ([^;]+)/g)].map(([, command]) => command) : [];
  element.classList.toggle("soft", Boolean(model?.lacks_files || model?.state === ""));
  if (commands.length) {
    const parts = [...new Set(commands)].flatMap((command, index) => [index ? " and " : "", h("code", {}, command)]);
    element.replaceChildren("Waits for files; get them with ", ...parts);
  } else element.replaceChildren(text);
}

export const number = (value, digits = 1) =>
  value == null || Number.isNaN(value) ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });

export const milliseconds = (us) => (us == null ? "–" : number(us / 1000, us < 10_000 ? 2 : 0));

export const mebibytes = (bytes) => (bytes ? `${number(bytes / 2 ** 20, 0)} MiB` : "–");

/** The engine of a version, and its devices. */
export const engine = (model) =>
  [...new Set([model.engine || model.platform, model.devices])].filter(Boolean).join(" · ");

export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");
