// Shows what helps to repair a version that failed to load: why and where, its files, its configuration as written.

import { ask } from "./data.js";
import { clock, h, linkTo, number } from "./dom.js";

/** The part of a reason that changes every second. */
export const COUNTDOWN = / ?(next try in|loading for) \d+ s/g;

/** Whether the row tells of a failure, of the version itself or of newer content. */
const hasFailed = ({ state, reason }) => state === "" || (state === "UNAVAILABLE" && reason !== "unloaded")
  || /newer content failed to load: |failed before: /.test(reason);

const sized = (bytes) =>
  bytes < 1024 ? `${bytes} B` : bytes < 2 ** 20 ? `${number(bytes / 1024)} KiB` : `${number(bytes / 2 ** 20)} MiB`;

const loadCommand = (name) =>
  `curl -X POST '${location.origin}/v2/repository/models/${encodeURIComponent(name).replaceAll("'", "%27")}/load'`;

function facts(report, name) {
  const next = !report.failed_ms ? `when ${report.members.length ? "all its models are served" : "its files are complete"}`
    : report.retry_ms ? clock(report.retry_ms)
    : report.follows_files ? "when a file of the model changes; touch is enough"
      : report.loads_on_request ? h("code", {}, loadCommand(name)) : "at the server's next start";
  const tries = report.attempts > 1 ? `${report.attempts} times, last` : "once,";
  const shown = {
    "Failed": report.failed_ms ? `${tries} at ${clock(report.failed_ms)}` : null,
    "Next try": report.reason ? next : null,
    "Backend": report.backend || null,
  };
  return h("dl", { class: "facts" }, ...Object.entries(shown).filter(([, value]) => value != null)
    .map(([title, value]) => h("div", {}, h("dt", {}, title), h("dd", {}, value))));
}

function configuration({ config_file, config_text, config_is_cut, config_line }) {
  if (!config_file) return null;
  const lines = config_text.replace(/\n$/, "").split("\n").map((text, index) => {
    const isFault = index + 1 === config_line;
    return h(isFault ? "mark" : "span", {}, `${text}\n`);
  });
  if (config_is_cut) lines.push("…");
  const where = config_line ? `, line\u00a0${config_line}` : "";
  return h("section", {}, h("h3", {}, "Configuration, as written ", h("small", {}, config_file + where)),
    h("pre", { class: "lines", tabindex: "0" }, ...lines));
}

function files({ files: found, file_count, is_served }) {
  const shown = found.filter(({ path, is_changed }) => path && (!path.endsWith("/") || is_changed));
  if (!shown.length) return h("section", {}, h("h3", {}, "Files"), h("p", {}, "There are none."));
  const today = new Date().toDateString();
  const when = (ms) => new Date(ms).toDateString() === today ? clock(ms) : new Date(ms).toLocaleDateString("en-CA");
  const row = ({ path, bytes, changed_ms, is_changed }) => h("tr", {}, h("th", { scope: "row" }, path),
    h("td", { class: "size" }, path.endsWith("/") ? "" : sized(bytes)), h("td", {}, h("time", {}, when(changed_ms))),
    is_served && h("td", {}, !is_changed ? "" : path.endsWith("/") ? "entries changed" : h("b", {}, "changed")));
  const heads = ["Path", "Size", "Last change", is_served && "Since the files that are served"].filter(Boolean);
  const more = file_count > found.length ? h("p", {}, `The last changed of ${number(file_count, 0)} files.`) : null;
  return h("section", {}, h("h3", {}, "Files"), h("table", { class: "files" },
    h("thead", {}, h("tr", {}, ...heads.map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, ...shown.map(row))), more);
}

/** Returns all but the facts, which change with each try. */
function details(report) {
  const members = report.members.map((member) =>
    h("li", {}, h("a", { href: linkTo({ name: member, version: "" }) }, member)));
  return h("div", {},
    report.traceback && h("section", {}, h("h3", {}, "Traceback"), h("pre", { tabindex: "0" }, report.traceback)),
    members.length > 0 && h("section", {}, h("h3", {}, "Models of this ensemble"), h("ul", {}, ...members)),
    configuration(report), files(report));
}

/** Returns a function that shows the report in `place` while the version fails, and asks again when its reason changes. */
export function repair(place, name, version) {
  let asked = "";
  let shown = "";
  return async (model) => {
    const reason = model && hasFailed(model) ? `${model.state} ${model.reason.replace(COUNTDOWN, "")}` : "";
    if (reason === asked) return;
    asked = reason;
    if (!reason) {
      shown = "";
      place.replaceChildren();
      return;
    }
    try {
      const report = await ask(`/v2/load-report?${new URLSearchParams({ name, version })}`);
      if (reason !== asked) return;
      const { failed_ms, retry_ms, attempts, ...lasting } = report;
      // The same text stays, so that a reader keeps the place.
      if (shown === JSON.stringify(lasting)) {
        place.firstChild.replaceWith(facts(report, name));
        return;
      }
      shown = JSON.stringify(lasting);
      place.replaceChildren(facts(report, name), details(report));
      const fault = place.querySelector("mark");
      // Only the box is scrolled.
      if (fault) fault.parentElement.scrollTop = fault.offsetTop - fault.parentElement.offsetTop - 80;
    } catch (error) {
      shown = "";
      if (reason === asked) place.replaceChildren(h("p", { class: "reason" }, error.message));
    }
  };
}
