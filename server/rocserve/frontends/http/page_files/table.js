// The table of models: searched, filtered and sorted. Only the rows in view are in the document.

import { data, keyOf, kindOf, recent, stateOf } from "./data.js";
import { badge, engine, h, linkTo, mebibytes, milliseconds, number, setReason, setText } from "./dom.js";

/** Rows from which on the table scrolls in a box, so that the content below stays near. */
const LONG = 40;
/** Pixels above and below the view in which rows are ready. */
const AROUND = 500;
const NOTHING = "–";

const quantile = (model, which) => model.latencies_us.find((entry) => entry.quantile === which)?.value ?? null;
const memory = (model) => model.worker_memory_bytes.reduce((sum, bytes) => sum + bytes, 0) || null;
const cached = ({ cache_hit_count: hits, cache_miss_count: misses }) => (hits + misses ? (100 * hits) / (hits + misses) : null);
const ifLoaded = (value) => (model) => (model.platform === "" ? null : value(model));
const written = (form) => (value) => (value == null ? NOTHING : form(value));
const count = written((value) => number(value, 0));

/** `value`: what rows are sorted by; null = the row has none. */
const COLUMNS = [
  { title: "Model", value: (model) => model.name },
  { title: "State", value: (model) => ["failed", "loading", "ready", "absent"].indexOf(kindOf(model)) },
  { title: "Engine", value: ifLoaded(engine), text: written((value) => value) },
  { title: "Requests/s", value: ifLoaded((model) => recent(model)?.rate ?? null), text: written(number) },
  { title: "p50 ms", value: (model) => quantile(model, 0.5), text: milliseconds },
  { title: "p99 ms", value: (model) => quantile(model, 0.99), text: milliseconds },
  { title: "Waiting", value: ifLoaded((model) => model.pending_requests), text: count },
  { title: "Rows a batch", value: (model) => recent(model)?.batch ?? null, text: written(number) },
  { title: "Failures", value: ifLoaded((model) => model.failure_count), text: count },
  { title: "Cache hits", value: cached, text: written((value) => `${number(value, 0)} %`) },
  { title: "Memory", value: memory, text: mebibytes },
  { title: "Restarts", value: ifLoaded((model) => model.worker_restarts), text: count },
];
const KINDS = { "": "All", failed: "Failed", loading: "Loading", ready: "Ready", absent: "Not loaded" };

/** What the reader has chosen; kept while other parts of the page are shown. `column`: "" = what needs attention first. */
const chosen = { text: "", kind: "", engine: "", column: "", isDown: false };
/** Repositories whose rows are hidden. */
const folded = new Set();

const failing = (model) => (kindOf(model) === "failed" ? 0 : model.reason.includes("newer content failed to load") ? 1 : 2);
const engineName = (model) => model.engine || model.platform;

function compare(one, other) {
  if (one === other) return 0;
  if (one === null || other === null) return one === null ? 1 : -1; // Rows without a value are last, whatever the order.
  return (one < other ? -1 : 1) * (chosen.isDown ? -1 : 1);
}

/** The chosen rows in their order; `models` are in the order of their names. */
function arranged(models) {
  const words = chosen.text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = models.filter((model) => {
    const has = (word) => `${model.name} ${model.version} ${model.reason}`.toLowerCase().includes(word);
    return (!chosen.kind || kindOf(model) === chosen.kind) && (!chosen.engine || engineName(model) === chosen.engine)
      && words.every(has);
  });
  const value = chosen.column ? COLUMNS.find(({ title }) => title === chosen.column).value : failing;
  return found.map((model) => [value(model), model]).sort(([one], [other]) => compare(one, other)).map(([, model]) => model);
}

/** Puts the rows of each repository below a heading, if `models` are of several repositories. */
function grouped(rows, models) {
  if (models.every(({ repository }) => repository === models[0].repository)) return rows;
  const groups = Map.groupBy(rows, (model) => model.repository);
  return [...groups].sort(([one], [other]) => (!one || (other && one > other) ? 1 : -1)).flatMap(([group, members]) =>
    [{ group, members }, ...(folded.has(group) ? [] : members)]);
}

const rowKey = (item) => (item.members ? `group ${item.group}` : keyOf(item));

/** `onFold` is called when the reader has folded a repository, or opened it. */
function newHeading({ group }, onFold) {
  const text = h("b", {}, group || "In no repository");
  const count = h("small");
  const button = h("button", { type: "button", onclick: () => {
    if (!folded.delete(group)) folded.add(group);
    onFold();
  } }, text, " ", count);
  return { element: h("tbody", { class: "group" }, h("tr", {}, h("th", { colspan: COLUMNS.length, scope: "rowgroup" }, button))),
    button, count };
}

function fillHeading({ button, count }, { group, members }) {
  const counts = Map.groupBy(members, kindOf);
  const words = ["failed", "loading", "ready", "absent"].filter((kind) => counts.has(kind))
    .map((kind) => `${number(counts.get(kind).length, 0)} ${KINDS[kind].toLowerCase()}`);
  setText(count, words.join(", "));
  button.setAttribute("aria-expanded", String(!folded.has(group)));
}

function newRow(model) {
  const state = h("span");
  const reason = h("p", { class: "reason" });
  const name = h("th", { scope: "row" }, h("a", { href: linkTo(model) }, model.name),
    h("span", { class: "version" }, model.version && ` version ${model.version}`));
  const values = COLUMNS.slice(2).map(({ title }) => h("td", { "data-title": title }));
  const why = h("tr", {}, h("td", { colspan: COLUMNS.length }, reason));
  return { element: h("tbody", {}, h("tr", {}, name, h("td", {}, state), ...values), why), state, reason, why, values };
}

function fillRow(row, model) {
  badge(row.state, stateOf(model));
  setReason(row.reason, model);
  row.why.hidden = !model.reason;
  COLUMNS.slice(2).forEach(({ value, text }, index) => {
    const cell = row.values[index];
    setText(cell, text(value(model)));
    cell.classList.toggle("empty", cell.textContent === NOTHING);
    cell.classList.toggle("zero", value(model) === 0);
  });
}

/** The controls above the table. `onChoice` is called when the reader has chosen something else. */
function controls(onChoice) {
  const choose = (choice) => { Object.assign(chosen, choice); onChoice(); };
  const search = h("input", { type: "search", placeholder: "Search", "aria-label": "search models", "aria-keyshortcuts": "/",
    oninput: () => choose({ text: search.value }) });
  search.value = chosen.text;
  const kinds = Object.entries(KINDS).map(([kind, title]) =>
    h("button", { type: "button", class: kind, onclick: () => choose({ kind }) }, title, " ", h("b")));
  const engines = h("select", { "aria-label": "engine", onchange: () => choose({ engine: engines.value }) });
  // Where columns are folded, their heads cannot be used.
  const sorts = h("select", { class: "sorts", "aria-label": "sort by", onchange: () => choose(JSON.parse(sorts.value)) },
    ...["", ...COLUMNS.map(({ title }) => title)].map((column) => h("option", {
      value: JSON.stringify({ column, isDown: isNumeric(column) }),
      selected: column === chosen.column,
    }, column ? `Sort: ${column}` : "Sort: failing first")));
  let known = "";
  function update(models) {
    const counts = { "": models.length };
    for (const model of models) counts[kindOf(model)] = (counts[kindOf(model)] ?? 0) + 1;
    kinds.forEach((button) => {
      const kind = button.className;
      setText(button.lastChild, number(counts[kind] ?? 0, 0));
      button.setAttribute("aria-pressed", String(kind === chosen.kind));
      button.hidden = Boolean(kind) && !counts[kind] && kind !== chosen.kind;
    });
    const names = [...new Set([...models.map(engineName), chosen.engine])].filter(Boolean).sort();
    if (known === names.join("\n")) return;
    known = names.join("\n");
    engines.replaceChildren(h("option", { value: "" }, "All engines"),
      ...names.map((name) => h("option", { value: name, selected: name === chosen.engine }, name)));
  }
  return { search, element: h("div", { class: "controls" }, search, h("div", { class: "kinds" }, ...kinds), engines, sorts), update };
}

const isNumeric = (column) => COLUMNS.findIndex(({ title }) => title === column) > 2;

export function modelTable() {
  const rows = new Map();
  const heights = new Map();
  const above = h("tbody", { class: "space" }, h("tr"));
  const below = h("tbody", { class: "space" }, h("tr"));
  const heads = COLUMNS.map(({ title }) => h("th", { scope: "col" }, h("button", { type: "button", onclick: () => sortBy(title) }, title)));
  const table = h("table", { class: "models" }, h("thead", {}, h("tr", {}, ...heads)), above, below);
  const box = h("div", { class: "box", onscroll: draw }, table);
  const none = h("p", { class: "none" });
  const bar = controls(() => { box.scrollTop = 0; update(); });
  let shown = [];
  let bottoms = [];
  let isWaiting = false;

  function sortBy(column) {
    const isSame = chosen.column === column;
    // The second use turns the order, the third is the first order again: failing first.
    const isDown = isSame ? !chosen.isDown : isNumeric(column);
    const isOver = isSame && chosen.isDown !== isNumeric(column);
    Object.assign(chosen, isOver ? { column: "", isDown: false } : { column, isDown });
    update();
  }

  /** Where each row ends. Rows that were never in view are taken to be as high as most others. The median of the heights
   * stays when a few rows of another height come into view; a mean would move thousands of rows. */
  function measure() {
    const usual = [...heights.values()].sort((one, other) => one - other)[heights.size >> 1] ?? 36;
    let bottom = 0;
    bottoms = shown.map((model) => (bottom += heights.get(rowKey(model)) ?? usual));
  }

  function draw() {
    const top = above.getBoundingClientRect().top;
    const from = Math.max(0, box.getBoundingClientRect().top) - top - AROUND;
    const to = innerHeight - top + AROUND;
    const first = Math.max(0, bottoms.findIndex((bottom) => bottom > from));
    const end = bottoms.findIndex((bottom) => bottom > to);
    const inView = shown.slice(first, end < 0 ? shown.length : end + 1);
    const keys = new Set(inView.map(rowKey));
    const focused = table.contains(document.activeElement) ? document.activeElement.textContent : null;
    for (const [key, row] of rows) if (!keys.has(key)) { row.element.remove(); rows.delete(key); }
    let before = above;
    for (const model of inView) {
      const key = rowKey(model);
      if (!rows.has(key)) rows.set(key, model.members ? newHeading(model, update) : newRow(model));
      const row = rows.get(key);
      if (model.members) fillHeading(row, model);
      else fillRow(row, model);
      if (before.nextSibling !== row.element) before.after(row.element);
      before = row.element;
    }
    // A model whose version becomes known has another row.
    if (focused !== null && !table.contains(document.activeElement))
      [...table.querySelectorAll("a")].find((link) => link.textContent === focused)?.focus();
    above.firstChild.style.height = `${first ? bottoms[first - 1] : 0}px`;
    below.firstChild.style.height = `${shown.length ? bottoms.at(-1) - (bottoms[first + inView.length - 1] ?? 0) : 0}px`;
    data.inView = () => [...new Set(inView.map(({ name }) => name).filter(Boolean))];
    let hasChanged = false;
    for (const [key, { element }] of rows) {
      const height = element.getBoundingClientRect().height;
      hasChanged ||= Math.abs((heights.get(key) ?? -1) - height) > 0.5;
      heights.set(key, height);
    }
    if (!hasChanged || isWaiting) return;
    isWaiting = true;
    requestAnimationFrame(() => { isWaiting = false; measure(); if (table.isConnected) draw(); });
  }

  function update() {
    const models = data.overview?.models ?? [];
    shown = grouped(arranged(models), models);
    bar.element.hidden = !models.length;
    bar.update(models);
    heads.forEach((head, index) => {
      const isSorted = COLUMNS[index].title === chosen.column;
      if (isSorted) head.setAttribute("aria-sort", chosen.isDown ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    table.hidden = !shown.length;
    none.hidden = shown.length > 0 || !data.overview;
    setText(none, models.length ? "No model matches."
      : "There is no model yet: put one into NAME/1/ of the repository, for example as model.onnx.");
    box.classList.toggle("long", shown.length > LONG);
    measure();
    draw();
  }

  box.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const links = [...table.querySelectorAll("tbody a")];
    const next = step && links[links.indexOf(document.activeElement) + step];
    if (!next || document.activeElement.tagName !== "A") return;
    event.preventDefault();
    next.focus();
  });
  function whileShown(type, work) {
    const listener = (event) => (table.isConnected ? work(event) : removeEventListener(type, listener));
    addEventListener(type, listener);
  }
  whileShown("scroll", draw);
  whileShown("resize", () => { heights.clear(); measure(); draw(); });
  whileShown("keydown", (event) => {
    if (event.key !== "/" || /INPUT|TEXTAREA|SELECT/.test(document.activeElement.tagName)) return;
    event.preventDefault();
    bar.search.focus();
  });
  return { elements: [bar.element, box, none], update };
}
