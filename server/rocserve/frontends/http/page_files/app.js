// Shows the part of the page that the URL names, and the list of models.

import { showApi } from "./api.js";
import { data, keyOf, recent, start, useSecret } from "./data.js";
import { badge, clock, engine, h, linkTo, mebibytes, milliseconds, number, setText } from "./dom.js";
import { showModel } from "./model.js";

const view = document.getElementById("view");
const notice = document.getElementById("notice");

const COLUMNS = ["Model", "State", "Engine", "Requests/s", "p50 ms", "p99 ms", "Waiting", "Rows a batch", "Failures",
  "Cache hits", "Memory", "Restarts"];

const quantile = (model, which) => model.latencies_us.find((entry) => entry.quantile === which)?.value;

function cells(model) {
  const now = recent(model);
  const cached = model.cache_hit_count + model.cache_miss_count;
  const memory = model.worker_memory_bytes.reduce((sum, bytes) => sum + bytes, 0);
  const isLoaded = model.platform !== "";
  return [
    isLoaded ? engine(model) : "–",
    isLoaded ? number(now?.rate) : "–",
    milliseconds(quantile(model, 0.5)),
    milliseconds(quantile(model, 0.99)),
    isLoaded ? number(model.pending_requests, 0) : "–",
    number(now?.batch),
    isLoaded ? number(model.failure_count, 0) : "–",
    cached ? `${number((100 * model.cache_hit_count) / cached, 0)} %` : "–",
    mebibytes(memory),
    isLoaded ? number(model.worker_restarts, 0) : "–",
  ];
}

function newRow(model) {
  const state = h("span");
  const reason = h("p", { class: "reason" });
  const name = h("th", { scope: "row" }, h("a", { href: linkTo(model) }, model.name),
    h("span", { class: "version" }, model.version && ` version ${model.version}`));
  const values = COLUMNS.slice(2).map((title) => h("td", { "data-title": title }));
  const why = h("tr", {}, h("td", { colspan: COLUMNS.length }, reason));
  return { element: h("tbody", {}, h("tr", {}, name, h("td", {}, state), ...values), why), state, reason, why, values };
}

function showModels() {
  const table = h("table", { class: "models" },
    h("thead", {}, h("tr", {}, ...COLUMNS.map((title) => h("th", { scope: "col" }, title)))));
  const none = h("p", {}, "There are no models.");
  const events = h("ol", { class: "events", tabindex: "0", "aria-label": "Events" });
  view.replaceChildren(table, none, h("h2", {}, "Events"), events);
  const rows = new Map();
  let shown = null;
  return () => {
    const models = data.overview?.models ?? [];
    none.hidden = models.length > 0 || !data.overview;
    const keys = new Set(models.map(keyOf));
    const focused = table.contains(document.activeElement) ? document.activeElement.textContent : null;
    for (const [key, row] of rows) if (!keys.has(key)) { row.element.remove(); rows.delete(key); }
    models.forEach((model, index) => {
      const key = keyOf(model);
      if (!rows.has(key)) rows.set(key, newRow(model));
      const row = rows.get(key);
      badge(row.state, model.state);
      setText(row.reason, model.reason);
      row.why.hidden = !model.reason;
      cells(model).forEach((text, column) => {
        setText(row.values[column], text);
        row.values[column].classList.toggle("empty", text === "–");
      });
      // The table's first child is its head.
      if (table.children[index + 1] !== row.element) table.insertBefore(row.element, table.children[index + 1] ?? null);
    });
    // A model whose version becomes known has another row.
    if (focused !== null && !table.contains(document.activeElement))
      ([...table.querySelectorAll("a")].find((link) => link.textContent === focused) ?? view).focus();
    if (shown === data.events) return;
    shown = data.events;
    events.replaceChildren(...data.events.map((event) => {
      const state = h("span");
      badge(state, event.state);
      return h("li", {}, h("time", {}, clock(event.time_ms)), " ", state, " ", h("b", {}, event.name),
        event.version && ` version ${event.version}`, event.reason && `: ${event.reason}`);
    }));
  };
}

let update = () => {};

function route() {
  const [, part, name, version] = location.hash.split("/");
  document.title = name ? `${decodeURIComponent(name)} - rocserve` : "rocserve";
  for (const link of document.querySelectorAll("nav a")) {
    const isHere = link.hash === "#/api" ? part === "api" : part !== "api";
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (part === "model") update = showModel(view, decodeURIComponent(name), decodeURIComponent(version ?? ""));
  else if (part === "api") update = showApi(view);
  else update = showModels();
  update();
}

function askSecret(header) {
  const label = `value of ${header}`;
  const value = h("input", { type: "password", autocomplete: "off", required: true, "aria-label": label });
  const submit = (event) => {
    event.preventDefault();
    useSecret(header, value.value);
  };
  return h("form", { onsubmit: submit }, h("label", {}, `${header}: `, value), " ", h("button", {}, "Use"));
}

function showState() {
  const { overview, error, header } = data;
  const state = overview?.ready ? "ready" : "not ready";
  setText(document.getElementById("server"), overview ? `${overview.server} ${overview.version} · ${state}` : "");
  if (notice.dataset.text !== error) {
    notice.dataset.text = error;
    notice.hidden = !error;
    notice.replaceChildren(error, header ? askSecret(header) : "");
  }
  update();
}

data.changed.addEventListener("change", showState);
addEventListener("hashchange", () => { route(); view.focus(); });
route();
start();
