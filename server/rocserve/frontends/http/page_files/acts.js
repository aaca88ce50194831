// Acts: loads, unloads, the log of a model's workers, the log's verbosity. An act that the server refuses is shown as not permitted.

import { ask, kindOf, useSecret } from "./data.js";
import { clock, h, setText } from "./dom.js";

const PATH = "/v2/page/acts";
const HEADER = /expecting header '([^']+)'/;

export function askSecret(header, onUse = () => {}) {
  const value = h("input", { type: "password", autocomplete: "off", required: true, "aria-label": `value of ${header}` });
  const submit = (event) => {
    event.preventDefault();
    useSecret(header, value.value);
    onUse();
  };
  return h("form", { onsubmit: submit }, h("label", {}, `${header}: `, value), " ", h("button", {}, "Use"));
}

/** The token is asked for each time, because a server that was started again has another. */
async function act(what, name = "", level = 0) {
  const { token, refusals } = await ask(PATH);
  if (refusals[what]) throw new Error(refusals[what]);
  const body = JSON.stringify({ act: what, name, level });
  return ask(PATH, { method: "POST", headers: { "X-Rocserve-Token": token }, body });
}

/** Says that acts are not permitted; asks for the secret if that is what lacks. `onUse`: called when it is given. */
function refusal(title, text, onUse) {
  const header = HEADER.exec(text)?.[1];
  return [h("p", { class: "soft" }, `${title}: not permitted from here. `, h("small", {}, text)), header ? askSecret(header, onUse) : ""];
}

/** Runs an act of a button, and says in `result` how it went. */
async function run(button, result, doing, done, work) {
  button.disabled = true;
  result.className = "soft";
  setText(result, doing);
  try {
    await work();
    setText(result, done);
  } catch (error) {
    result.className = "reason";
    setText(result, error.message);
  }
  button.disabled = false;
}

/** The acts on a model. */
export function modelActs(name) {
  const result = h("span", { role: "status" });
  const lines = h("pre", { tabindex: "0", "aria-label": "Log of the workers" });
  const log = h("details", { ontoggle: () => log.open && showLog() },
    h("summary", {}, "Log of its workers, the last 200 lines"), lines);
  const reload = h("button", { type: "button", onclick: () => run(reload, result, "Asked for…",
    isExplicit ? "Done." : "Requested; the state shows the progress.", () => act("reload", name)) });
  const unload = h("button", { type: "button", onclick: () => confirm(`Unload ${name}? Its requests will fail.`)
    && run(unload, result, "Unloading…", "Unloaded.", () => act("unload", name)) }, "Unload");
  const element = h("section", { class: "acts", "aria-label": "Acts" });
  let isExplicit = false;

  async function showLog() {
    setText(lines, "…");
    try {
      const found = (await act("log", name)).lines;
      setText(lines, found.map((line) => `${clock(line.time_ms)} ${line.level} ${line.text}`).join("\n") || "Its workers have written no lines.");
      lines.scrollTop = lines.scrollHeight;
    } catch (error) {
      setText(lines, error.message);
    }
  }

  async function ready() {
    const told = await ask(PATH).catch(() => null); // The overview meets the same error, and reports it.
    if (!told) return;
    isExplicit = Boolean(told.is_explicit);
    element.replaceChildren(...(told.refusals.reload ? refusal("Load, unload, log", told.refusals.reload, ready)
      : [h("div", {}, reload, " ", isExplicit ? unload : "", " ", result), log]));
  }
  ready();
  return {
    element,
    update(model) {
      const kind = model ? kindOf(model) : "absent";
      setText(reload, { failed: "Try again", absent: "Load" }[kind] ?? "Reload");
      unload.hidden = !model?.platform;
    },
  };
}

/** The verbosity of the server's log. */
export function verbosity() {
  const result = h("span", { role: "status" });
  const choice = h("select", { onchange: () => run(choice, result, "", "", () => act("verbosity", "", Number(choice.value))) },
    h("option", { value: 0 }, "normal"), h("option", { value: 1 }, "verbose"));
  const element = h("div", { class: "acts" });
  async function ready() {
    const told = await ask(PATH).catch(() => null);
    if (!told) return;
    choice.value = told.log_verbose_level > 0 ? 1 : 0;
    element.replaceChildren(...(told.refusals.verbosity ? refusal("Log verbosity", told.refusals.verbosity, ready)
      : [h("label", {}, "Log of the server: ", choice), " ", result]));
  }
  ready();
  return element;
}
