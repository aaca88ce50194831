// Shows one model version: its inputs and outputs, its configuration, its statistics, and a form to try it.

import { modelActs } from "./acts.js";
import { chart } from "./chart.js";
import { ask, between, data, findModel, stateOf, historyOf, recent } from "./data.js";
import { badge, clock, engine, h, mebibytes, milliseconds, number, setReason, setText } from "./dom.js";
import { ensembleGraph } from "./graph.js";
import { repair } from "./repair.js";
import { tryIt } from "./try.js";
import { versions } from "./versions.js";

const STEP_MS = 5_000;
/** Facts that an ensemble does not have. All others are shown without a value too, because what is below must not move. */
const OF_LOADS = new Set(["Memory of workers", "Restarts of workers", "Load check", "Loaded in"]);

export const pathOf = (name, version) => `/v2/models/${encodeURIComponent(name)}${version && `/versions/${version}`}`;

/** The graph's points, each of two samples that are at least STEP_MS apart. */
function points(history) {
  const found = [];
  let before = history[0];
  for (const sample of history) {
    if (sample.at - before?.at < STEP_MS) continue;
    if (before !== sample) found.push(between(before, sample));
    before = sample;
  }
  return found;
}

function tensors(title, entries) {
  const row = (entry) => h("tr", {}, h("th", { scope: "row" }, entry.name), h("td", {}, entry.datatype),
    h("td", {}, `[${entry.shape.join(", ")}]`));
  return h("section", {}, h("h2", {}, title), h("table", {}, h("tbody", {}, ...entries.map(row))));
}

function facts(model) {
  const now = recent(model);
  const batches = Object.entries(model.batches).map(([size, count]) => `${size}: ${number(count, 0)}`);
  const quantile = (which) => milliseconds(model.latencies_us.find((entry) => entry.quantile === which)?.value);
  const cached = model.cache_hit_count + model.cache_miss_count;
  return {
    "Engine": engine(model),
    "Requests/s": number(now?.rate),
    "Latency p50, p90, p99": `${quantile(0.5)}, ${quantile(0.9)}, ${quantile(0.99)} ms`,
    "Waiting": number(model.pending_requests, 0),
    "Answered": number(model.success_count, 0),
    "Failed": number(model.failure_count, 0),
    "Executions by batch size": batches.join("; ") || "–",
    "Cache hits": cached ? `${number(model.cache_hit_count, 0)} of ${number(cached, 0)}` : "–",
    "Memory of workers": model.worker_memory_bytes.map(mebibytes).join(", ") || "–",
    "Restarts of workers": model.platform === "ensemble" ? "–" : number(model.worker_restarts, 0),
    "Load check": model.load_check || "–",
    "Loaded in": model.load_seconds ? `${number(model.load_seconds, 2)} s` : "–",
    "Last request": model.last_inference_ms ? clock(model.last_inference_ms) : "–",
  };
}

/** Asks for metadata and configuration, which only a ready version has. Called again after each load. */
async function describe(place, name, version) {
  try {
    const [metadata, config] = await Promise.all(["", "/config"].map((part) => ask(pathOf(name, version) + part)));
    place.replaceChildren(
      tryIt(name, version, metadata, config),
      h("div", { class: "columns" }, tensors("Inputs", metadata.inputs), tensors("Outputs", metadata.outputs)));
  } catch (error) {
    place.replaceChildren(h("p", { class: "reason" }, error.message));
  }
}

export function showModel(view, name, version) {
  const state = h("span");
  const reason = h("p", { class: "reason" });
  const list = h("dl", { class: "facts" });
  const charts = h("div", { class: "columns" });
  const failures = h("ol", { class: "events" });
  const failed = h("section", {}, h("h2", {}, "Last failures"), failures);
  const about = h("div");
  const help = h("div", { class: "repair" });
  const updateHelp = repair(help, name, version);
  const graph = h("div");
  const updateGraph = ensembleGraph(graph, name, version);
  const which = h("span");
  const title = h("h2", {}, name, which, " ", state);
  const acts = modelActs(name);
  const others = h("div", { class: "columns" });
  const updateVersions = versions(others, name);
  view.replaceChildren(title, reason, acts.element, help, list, charts, graph, about, others, failed);
  let described = "";
  let shownFailures = "";
  return () => {
    if (!data.overview) return;
    const model = findModel(name, version);
    const shown = model?.version ?? version;
    setText(which, shown && ` version ${shown}`);
    badge(state, model ? stateOf(model) : "GONE");
    setReason(reason, model ?? { reason: "The server has no such model." });
    acts.update(model);
    updateHelp(model);
    updateVersions();
    updateGraph(model);
    const isLoaded = Boolean(model?.platform);
    for (const part of [list, charts, failed]) part.hidden = !isLoaded;
    // After another load, the version may have other inputs or outputs.
    const load = isLoaded && model.state === "READY" ? `${model.state} ${model.load_seconds}` : "";
    if (load && load !== described) describe(about, name, version);
    if (!isLoaded) about.replaceChildren();
    described = isLoaded ? load || described : "";
    if (!isLoaded) return;
    const shownFacts = facts(model);
    if (!list.children.length) {
      list.append(...Object.keys(shownFacts).map((title) => h("div", {}, h("dt", {}, title), h("dd"))));
    }
    Object.values(shownFacts).forEach((text, index) => {
      setText(list.children[index].lastChild, text);
      list.children[index].hidden = text === "–" && OF_LOADS.has(list.children[index].firstChild.textContent);
    });
    const found = points(historyOf(model));
    const width = Math.min(600, Math.max(280, view.clientWidth - 60));
    const line = (value) => found.map((point) => [point.at, value(point)]);
    const named = (kind, text) => h("span", { class: kind }, text);
    const now = data.overview.now_ms;
    charts.replaceChildren(
      h("figure", {}, h("figcaption", {}, named("rate", "Requests/s"), ", ", named("failed", "failures/s")),
        chart("Requests", "a second", width, { rate: line((p) => p.rate), failed: line((p) => p.failures) }, now)),
      h("figure", {},
        h("figcaption", {}, "Latency in ms: ", named("rate", "mean"), ", ", named("tail", "p99 of a minute")),
        chart("Latency", "milliseconds", width, { rate: line((p) => p.mean), tail: line((p) => p.p99) }, now)));
    const text = JSON.stringify(model.failures);
    if (text === shownFailures) return;
    shownFailures = text;
    failures.replaceChildren(...model.failures.toReversed().map((failure) =>
      h("li", {}, h("time", {}, clock(failure.time_ms)), " ", failure.text)));
    if (!model.failures.length) failures.append(h("li", {}, "None."));
  };
}
