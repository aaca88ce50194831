// Shows the loaded versions of a model side by side: figures, load check, latencies, and configurations with what was
// completed in them.

import { ask, data, recent, stateOf } from "./data.js";
import { badge, engine, h, linkTo, mebibytes, milliseconds, number, setText } from "./dom.js";

const PERIOD_MS = 15_000;
const MOST_VERSIONS = 4;
const MARKS = { "+": "completed", "-": "written" };

const milli = (us) => (us < 1000 ? number(us / 1000, 1) : number(us / 1000, 0));

/** `bounds`: those of all versions, so that equal durations are beside each other. */
function histogram(buckets, bounds) {
  if (!bounds.length) return h("p", { class: "soft" }, "No request in the last minute.");
  const counts = new Map(buckets.map(({ up_to_us, count }) => [up_to_us, count]));
  const most = Math.max(1, ...counts.values());
  return h("ol", { class: "bars latencies" }, ...bounds.map((bound) => {
    const count = counts.get(bound) ?? 0;
    const bar = h("span", { class: count ? "bar" : "" });
    bar.style.width = `${(100 * count) / most}%`;
    return h("li", {}, h("span", { class: "label" }, bound ? `to ${milli(bound)} ms` : "more"), bar,
      h("span", { class: "value" }, number(count, 0)));
  }));
}

/** `others`: the sets of the other versions' lines. */
function configuration(version, { config, config_file }, others) {
  const lines = config.map(({ mark, text }) => {
    const isOwn = mark !== "-" && others.some((other) => !other.has(text));
    return h("span", { class: `${MARKS[mark] ?? ""}${isOwn ? " own" : ""}` }, `${mark || " "} ${text}\n`);
  });
  const has = (kind) => lines.some((line) => line.classList.contains(kind));
  const legend = [config_file && "+ completed", has("written") && `\u2212 in ${config_file} but not so`,
    has("own") && "bold: not in all versions"].filter(Boolean).join("; ");
  return [legend && h("p", { class: "soft" }, legend),
    h("pre", { class: "config", tabindex: "0", "aria-label": `configuration of version ${version}` }, ...lines)];
}

function facts(model) {
  const quantile = (which) => milliseconds(model.latencies_us.find((entry) => entry.quantile === which)?.value);
  return {
    "Engine": engine(model),
    "Requests/s": number(recent(model)?.rate),
    "Latency p50, p99": `${quantile(0.5)}, ${quantile(0.99)} ms`,
    "Failed": number(model.failure_count, 0),
    "Memory": model.worker_memory_bytes.map(mebibytes).join(", ") || "\u2013",
    "Load check": model.load_check || "\u2013",
  };
}

/** Returns a function that shows in `place` the loaded versions of a model, the highest first, and keeps them current. */
export function versions(place, name) {
  let shownFor = "";
  let askedAt = -Infinity;
  let cards = new Map();

  async function show(models, key) {
    askedAt = performance.now();
    const told = await Promise.all(models.map(({ version }) =>
      ask(`/v2/version-details?${new URLSearchParams({ name, version })}`).catch(() => null)));
    if (key !== shownFor) return;
    const texts = told.map((one) => new Set(one?.config.filter(({ mark }) => mark !== "-").map(({ text }) => text)));
    const bounds = [...new Set(told.flatMap((one) => one?.latencies.map(({ up_to_us }) => up_to_us) ?? []))]
      .sort((one, other) => (one || Infinity) - (other || Infinity));
    for (const [index, model] of models.entries()) {
      const card = cards.get(model.version);
      const details = told[index];
      if (!details) continue;
      card.latencies.replaceChildren(h("h4", {}, "Latencies of the last minute"), histogram(details.latencies, bounds));
      const text = JSON.stringify([details.config, told.length]);
      if (card.text === text) continue;
      card.text = text;
      card.config.replaceChildren(...configuration(model.version, details, texts.filter((one) => one !== texts[index])).filter(Boolean));
    }
  }

  function newCard(model) {
    const card = { state: h("span"), list: h("dl", { class: "facts" }), latencies: h("div"), config: h("div"), text: "" };
    card.element = h("section", { class: "version-card", "aria-label": `version ${model.version}` },
      h("h3", {}, h("a", { href: linkTo(model) }, `Version ${model.version}`), " ", card.state), card.list, card.latencies,
      h("details", { open: true }, h("summary", {}, "Configuration"), card.config));
    return card;
  }

  return () => {
    const models = data.overview.models.filter((model) => model.name === name && model.platform && !model.nth)
      .sort((one, other) => other.version - one.version).slice(0, MOST_VERSIONS);
    const key = models.map(({ version, load_seconds }) => `${version} ${load_seconds}`).join();
    if (key !== shownFor) {
      shownFor = key;
      cards = new Map(models.map((model) => [model.version, newCard(model)]));
      place.replaceChildren(models.length ? h("h2", {}, "Versions") : "", ...[...cards.values()].map(({ element }) => element));
      askedAt = -Infinity;
    }
    for (const model of models) {
      const { state, list } = cards.get(model.version);
      badge(state, stateOf(model));
      // The figures of a single version are above.
      const shown = models.length > 1 ? facts(model) : {};
      if (list.children.length !== Object.keys(shown).length) {
        list.replaceChildren(...Object.keys(shown).map((title) => h("div", {}, h("dt", {}, title), h("dd"))));
      }
      Object.values(shown).forEach((text, index) => setText(list.children[index].lastChild, text));
    }
    if (models.length && performance.now() - askedAt > PERIOD_MS) show(models, key);
  };
}
