// Asks the server for the state of the models, once a second while the page is visible: of those in view and those that
// events name, and of all models as often as costs the server at most one percent of a core. The page keeps the last ten
// minutes of each model; of all together the server keeps them.

import { LENGTH_HEADER, received } from "./binary.js";

const KEPT_MS = 600_000;
const RATE_MS = 5_000;
const MOST_EVENTS = 200;
/** How many times as long as an answer about all models takes, the page waits for the next one. */
const PAUSE_FACTOR = 100;
/** Names in one request; the server takes 200. */
const MOST_NAMES = 100;

/** `inView`: returns the names of the models that are shown. */
export const data =
  { overview: null, error: "", header: "", events: [], changed: new EventTarget(), inView: () => [] };
/** Models whose rows have changed, as events tell. */
const changedNames = new Set();
const histories = new Map();
const secrets = {};
let nextPoll = null;

/** `nth`: models of several namespaces may have one name, and are numbered from 0. */
export const keyOf = (model) => JSON.stringify([model.name, model.version, model.nth ?? 0]);

/** The state as the page shows it: waiting for files is not a failure. */
export const stateOf = (model) => (model.lacks_files ? "" : model.state);

/** What a row counts as: "failed", "loading", "ready", or "absent" if nobody has asked for it or it waits for its files. */
export function kindOf({ state, reason, lacks_files }) {
  if (lacks_files || state === "" || state === "UNKNOWN" || reason === "unloaded") return "absent";
  return { READY: "ready", UNAVAILABLE: "failed" }[state] ?? "loading";
}

/** The row of a version; of a name without a version, the latest version that is ready, else the last row. */
export function findModel(name, version) {
  const rows = (data.overview?.models ?? []).filter((row) => row.name === name);
  const latest = () => rows.filter((row) => row.state === "READY").sort((one, other) => other.version - one.version)[0];
  return rows.find((row) => row.version === version) ?? (version ? undefined : latest() ?? rows.at(-1));
}

/** Returns the answer's JSON, read by `options.parse`. Throws an Error with the server's text if the server refuses. */
export async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: { ...options.headers, ...secrets } }).catch(() => {
    throw new Error("The server does not answer.");
  });
  if (response.ok && options.stream) return response.body;
  const length = response.headers.get(LENGTH_HEADER);
  if (response.ok && length) return received(await response.arrayBuffer(), Number(length));
  const text = await response.text();
  let answer = null;
  try {
    answer = (options.parse ?? JSON.parse)(text);
    if (response.ok) return answer;
  } catch {
    answer = { error: `The server's answer is not JSON: ${text.slice(0, 300)}` };
  }
  const error = new Error(answer.error || `HTTP ${response.status}`);
  error.header = response.status === 403 ? (/expecting header '([^']+)'/.exec(error.message)?.[1] ?? "") : "";
  throw error;
}

/** Sets the secret of a restricted API. It stays in the memory of this page. */
export function useSecret(header, value) {
  secrets[header] = value;
  poll();
}

/** The headers that a restricted API wants; their values stay in this page. */
export const headersNeeded = () => Object.keys(secrets);

function note(model, at) {
  const key = keyOf(model);
  let history = histories.get(key) ?? [];
  const last = history.at(-1);
  // After another load, the counters begin at zero.
  if (last && (last.success > model.success_count || last.executions > model.execution_count)) history = [];
  const quantile = Object.fromEntries(model.latencies_us.map((entry) => [entry.quantile, entry.value]));
  history.push({
    at,
    success: model.success_count,
    successNs: model.success_ns,
    failures: model.failure_count,
    rejected: model.rejected_count,
    inferences: model.inference_count,
    executions: model.execution_count,
    p50: quantile[0.5],
    p99: quantile[0.99],
  });
  while (history[0].at < at - KEPT_MS) history.shift();
  histories.set(key, history);
}

export const historyOf = (model) => histories.get(keyOf(model)) ?? [];

/** Requests and failures per second, milliseconds per request and rows per batch, between two samples. */
export function between(before, after) {
  const seconds = (after.at - before.at) / 1000;
  const requests = after.success - before.success;
  const executions = after.executions - before.executions;
  return {
    at: after.at,
    rate: requests / seconds,
    failures: (after.failures - before.failures) / seconds,
    mean: requests > 0 ? (after.successNs - before.successNs) / requests / 1e6 : null,
    batch: executions > 0 ? (after.inferences - before.inferences) / executions : null,
    p99: after.p99 == null ? null : after.p99 / 1000,
  };
}

/** The rates of the last RATE_MS; null if there are fewer than two samples. */
export function recent(model) {
  const history = historyOf(model);
  const last = history.at(-1);
  const before = history.findLast((sample) => sample.at <= (last?.at ?? 0) - RATE_MS) ?? history[0];
  return last && before !== last ? between(before, last) : null;
}

/** Replaces the rows of `names`, or all rows if it is null. */
function take(overview, names) {
  const counts = new Map();
  for (const model of overview.models) {
    const key = keyOf(model);
    model.nth = counts.get(key) ?? 0;
    counts.set(key, model.nth + 1);
    note(model, overview.now_ms);
  }
  if (names) {
    const others = data.overview.models.filter((model) => !names.has(model.name));
    overview.models = [...others, ...overview.models]
      .sort((one, other) => (one.name < other.name ? -1 : one.name > other.name ? 1 : 0));
  } else {
    const there = new Set(overview.models.map(keyOf));
    for (const key of histories.keys()) if (!there.has(key)) histories.delete(key);
  }
  Object.assign(data, { overview, error: "", header: "" });
}

let allAt = -Infinity;
let allTook = 0;

async function refresh() {
  const began = performance.now();
  const isAll = !data.overview || data.error || began - allAt >= Math.max(900, PAUSE_FACTOR * allTook);
  const names = isAll ? null : new Set([...changedNames, ...data.inView()].slice(0, MOST_NAMES));
  if (names?.size === 0) return;
  // An event that comes from now on may tell of what the answer does not have.
  for (const name of names ?? [...changedNames]) changedNames.delete(name);
  try {
    const query = isAll ? "" : `?${new URLSearchParams([...names].map((name) => ["name", name]))}`;
    const overview = await ask(`/v2/overview${query}`);
    if (isAll) [allAt, allTook] = [performance.now(), performance.now() - began];
    take(overview, names);
  } catch (error) {
    Object.assign(data, { error: error.message, header: error.header ?? "" });
  }
  data.changed.dispatchEvent(new Event("change"));
}

let isRefreshing = false;

async function poll() {
  clearTimeout(nextPoll);
  if (isRefreshing) return;
  isRefreshing = true;
  await refresh();
  isRefreshing = false;
  nextPoll = setTimeout(poll, document.hidden ? 5000 : 1000);
}

/** Follows server-sent events. Uses fetch, because EventSource cannot send the header of a restricted API. */
async function follow() {
  let after = 0;
  for (;;) {
    try {
      const body = await ask("/v2/events", { stream: true, headers: { "Last-Event-ID": String(after) } });
      const reader = body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = ""; ; ) {
        const { value, done } = await reader.read();
        if (done) break;
        const parts = (rest + value).split("\n\n");
        rest = parts.pop();
        for (const part of parts) {
          const line = part.split("\n").find((each) => each.startsWith("data: "));
          if (!line) continue;
          const event = JSON.parse(line.slice(6));
          if (event.number <= after) data.events = []; // A restarted server numbers its events from 1.
          after = event.number;
          if (event.name) changedNames.add(event.name);
          data.events = [event, ...data.events].slice(0, MOST_EVENTS);
        }
        poll();
      }
    } catch {
      // The overview meets the same error, and reports it.
    }
    await new Promise((resume) => setTimeout(resume, 2000));
  }
}

export function start() {
  poll();
  follow();
  document.addEventListener("visibilitychange", () => !document.hidden && poll());
}
