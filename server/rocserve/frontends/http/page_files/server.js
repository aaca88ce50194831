// Shows the whole server: figures, what needs attention, and graphs of the last ten minutes, which the server keeps.

import { chart } from "./chart.js";
import { ask, data, historyOf, kindOf } from "./data.js";
import { h, linkTo, milliseconds, number, setText } from "./dom.js";

const PERIOD_MS = 5_000;
const SPAN_MS = 600_000;
const MINUTE_MS = 60_000;
/** Models that are named; the table shows all. */
const MOST_NAMED = 6;

/** What the server has told; kept while other parts of the page are shown. */
const known = { state: null, points: [], askedAt: -Infinity };

async function refresh() {
  if (performance.now() - known.askedAt < PERIOD_MS) return;
  known.askedAt = performance.now();
  try {
    let state = await ask(`/v2/server-state?after=${known.points.at(-1)?.at_ms ?? 0}`);
    if (known.state && known.state.started_ms !== state.started_ms) {
      known.points = [];
      state = await ask("/v2/server-state");
    }
    known.state = state;
    known.points = [...known.points, ...state.points].filter(({ at_ms }) => at_ms > state.now_ms - SPAN_MS);
  } catch {
    // The overview meets the same error, and reports it.
  }
}

const gigabytes = (used, total) => (total ? `${number(used / 2 ** 30)} of ${number(total / 2 ** 30)} GiB` : "–");
const percent = (share) => (share < 0 ? "–" : `${number(100 * share, 0)} %`);

function duration(ms) {
  const minutes = Math.floor(ms / 60_000);
  const [days, hours] = [Math.floor(minutes / 1440), Math.floor(minutes / 60) % 24];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes % 60} min`;
  return minutes ? `${minutes} min` : `${Math.floor(ms / 1000)} s`;
}

/** How many versions are in each state, as "58 ready, 1 failed". */
export function countsOf(models) {
  const counts = Map.groupBy(models, kindOf);
  const kinds = { ready: "ready", loading: "loading", failed: "failed", absent: "not loaded" };
  return Object.entries(kinds).filter(([kind]) => counts.has(kind))
    .map(([kind, text]) => `${number(counts.get(kind).length, 0)} ${text}`).join(", ") || "no models";
}

function facts({ state, points }) {
  const last = points.at(-1);
  const gpus = state.gpus.map((gpu, index) => [`GPU ${index}`,
    `${percent(gpu.use)}, ${gigabytes(gpu.memory_used_bytes, gpu.memory_total_bytes)}`]);
  return Object.fromEntries([
    ["Requests/s", number(last?.answered_rate)],
    ["Failures/s", number(last?.failed_rate)],
    ["Latency p50, p99", `${milliseconds(last?.p50_us || null)}, ${milliseconds(last?.p99_us || null)} ms`],
    ["Waiting", number(last?.waiting, 0)],
    ["CPU", percent(state.cpu_use)],
    ["Memory", gigabytes(state.memory_used_bytes, state.memory_total_bytes)],
    ...gpus,
    ["Running for", duration(state.now_ms - state.started_ms)],
  ].filter(([, text]) => text !== "–"));
}

/** Requests that a queue has turned away in the last minute, as far as this page has seen. */
function rejected(model) {
  const history = historyOf(model);
  const first = history.find(({ at }) => at > (history.at(-1)?.at ?? 0) - MINUTE_MS);
  return first ? history.at(-1).rejected - first.rejected : 0;
}

/** Why a model needs attention, the most harmful first; "" = it does not. The number is the order. */
function trouble(model) {
  if (kindOf(model) === "failed") return [0, model.reason];
  const { reason } = model;
  if (reason.includes("not answered for")) return [1, reason];
  if (reason.includes("restarting: ")) return [1, reason];
  const count = rejected(model);
  if (count > 0) return [2, `turned away ${number(count, 0)} requests in the last minute: its queue was full, or they waited too long`];
  if (reason.includes("newer content failed to load")) return [3, reason];
  return model.load_warning ? [4, model.load_warning] : [5, ""];
}

function attention(models) {
  const found = models.map((model) => [...trouble(model), model]).filter(([, why]) => why)
    .sort(([one], [other]) => one - other);
  const rest = found.length - MOST_NAMED;
  return [...found.slice(0, MOST_NAMED).map(([order, why, model]) => h("li", { class: order ? "" : "failed" },
    h("a", { href: linkTo(model) }, model.name), model.version && ` version ${model.version}`, ": ", why)),
    rest > 0 && h("li", {}, `and ${number(rest, 0)} more`)].filter(Boolean);
}

function graphs({ state, points }, width) {
  const line = (value) => points.map((point) => [point.at_ms, value(point)]);
  const named = (kind, text) => h("span", { class: kind }, text);
  return [
    h("figure", {}, h("figcaption", {}, named("rate", "Requests/s"), ", ", named("failed", "failures/s")),
      chart("Requests of all models", "a second", width,
        { rate: line((p) => p.answered_rate), failed: line((p) => p.failed_rate) }, state.now_ms)),
    h("figure", {}, h("figcaption", {}, "Latency in ms: ", named("rate", "mean"), ", ", named("tail", "p99 of a minute")),
      chart("Latency of all models", "milliseconds", width, {
        rate: line((p) => (p.mean_us ? p.mean_us / 1000 : null)), tail: line((p) => (p.p99_us ? p.p99_us / 1000 : null)),
      }, state.now_ms)),
  ];
}

export function serverView() {
  const list = h("dl", { class: "facts narrow" });
  const troubles = h("ul", { class: "troubles" });
  const needs = h("section", { class: "needs", "aria-label": "Needs attention" }, h("h2", {}, "Needs attention"), troubles);
  const charts = h("div", { class: "columns" });
  const element = h("section", { "aria-label": "Server" }, list, needs);
  let drawn = "";
  let told = "";
  function show() {
    const models = data.overview?.models ?? [];
    const found = attention(models);
    const text = found.map((item) => item.textContent).join("\n");
    needs.hidden = !found.length;
    // The same text stays, so that a reader keeps the place.
    if (text !== told) troubles.replaceChildren(...found);
    told = text;
    element.hidden = charts.hidden = !known.state || !data.overview;
    if (element.hidden) return;
    const shown = facts(known);
    if (list.children.length !== Object.keys(shown).length) {
      list.replaceChildren(...Object.keys(shown).map((title) => h("div", {}, h("dt", {}, title), h("dd"))));
    }
    Object.values(shown).forEach((value, index) => setText(list.children[index].lastChild, value));
    const width = Math.min(600, Math.max(280, element.clientWidth - 60));
    const drawing = `${known.state.now_ms} ${width}`;
    if (drawing !== drawn) charts.replaceChildren(...graphs(known, width));
    drawn = drawing;
  }
  function update() {
    show();
    refresh().then(show);
  }
  return { elements: [element, charts], update };
}
