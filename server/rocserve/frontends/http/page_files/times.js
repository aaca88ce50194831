// Tells which part of the time a request took, by the counters of its model and of an ensemble's steps.

import { ask } from "./data.js";
import { h, number } from "./dom.js";

const PARTS = { queue: "queue", compute_input: "inputs", compute_infer: "compute", compute_output: "outputs",
  cache_hit: "cache hit", cache_miss: "cache miss" };

const statsOf = (name, version) => `/v2/models/${encodeURIComponent(name)}${version && `/versions/${version}`}/stats`;

/** The sums of a model's counters: part -> [count, ns]. */
async function counters(name, version) {
  const sums = {};
  for (const { inference_stats } of (await ask(statsOf(name, version))).model_stats) {
    for (const [part, { count, ns }] of Object.entries(inference_stats)) {
      const [before, sum] = sums[part] ?? [0, 0];
      sums[part] = [before + count, sum + ns];
    }
  }
  return sums;
}

/** What one request took since `before`, in ms by part; null if there was none. Other clients' requests are in it. */
function since(before, after) {
  const requests = after.success[0] - before.success[0];
  if (requests < 1) return null;
  const ms = ([, ns], [, earlier]) => (ns - earlier) / requests / 1e6;
  return { requests, total: ms(after.success, before.success),
    parts: Object.entries(PARTS).map(([part, title]) => [title, ms(after[part], before[part])]) };
}

/** Returns a function that, after the request, returns a section with its times; null if the counters may not be read. */
export async function watchTimes(name, version, config) {
  const steps = config.ensemble_scheduling?.step ?? [];
  const watched = [[name, version], ...steps.map((step) =>
    [step.model_name, step.model_version < 0 ? "" : String(step.model_version)])];
  const unique = [...new Map(watched.map((each) => [each.join("\n"), each])).values()];
  const read = () => Promise.all(unique.map((each) => counters(...each))).catch(() => null);
  const before = await read();
  return async (took) => {
    const after = before && await read();
    const found = after?.map((each, index) => since(before[index], each));
    const own = found?.[0];
    if (!own) return null;
    const rows = steps.length ? found.slice(1).flatMap((step, index) => (step ? [[unique[index + 1][0], step.total,
      `queue ${number(step.parts[0][1], 2)}`]] : [])) : own.parts.filter(([, ms]) => ms > 0);
    rows.push(["all in the server", own.total]);
    const most = Math.max(...rows.map(([, ms]) => ms), Number.MIN_VALUE);
    const shown = rows.map(([title, ms, note]) => {
      const bar = h("span", { class: "bar" });
      bar.style.width = `${(100 * ms) / most}%`;
      return h("li", {}, h("span", { class: "label" }, title, note && h("small", {}, ` ${note}`)), bar,
        h("span", { class: "value" }, number(ms, 2)));
    });
    const others = own.requests > 1 ? ` (mean of ${number(own.requests, 0)} requests that were answered meanwhile)` : "";
    return h("details", { class: "times" },
      h("summary", {}, `Answered in ${number(took)} ms; the server took ${number(own.total)} ms${others}`),
      h("ol", { class: "spent", "aria-label": "milliseconds" }, ...shown));
  };
}
