// Shows the part of the page that the URL names, and the list of models.

import { askSecret, verbosity } from "./acts.js";
import { showApi } from "./api.js";
import { data, start, stateOf } from "./data.js";
import { badge, clock, h, setText } from "./dom.js";
import { showModel } from "./model.js";
import { countsOf, serverView } from "./server.js";
import { modelTable } from "./table.js";

const view = document.getElementById("view");
const notice = document.getElementById("notice");

function showModels() {
  const events = h("ol", { class: "events", tabindex: "0", "aria-label": "Events" });
  const server = serverView();
  const models = modelTable();
  view.replaceChildren(...server.elements, ...models.elements, h("h2", {}, "Events"), events, verbosity());
  let shown = null;
  return () => {
    server.update();
    models.update();
    if (shown === data.events) return;
    shown = data.events;
    events.replaceChildren(...data.events.map((event) => {
      const state = h("span");
      if (event.act) {
        return h("li", {}, h("time", {}, clock(event.time_ms)), " ", event.act, " ", h("b", {}, event.name),
          ` by the page at ${event.address}`);
      }
      badge(state, stateOf(event));
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
  data.inView = () => (name ? [decodeURIComponent(name)] : []);
  if (part === "model") update = showModel(view, decodeURIComponent(name), decodeURIComponent(version ?? ""));
  else if (part === "api") update = showApi(view);
  else update = showModels();
  update();
}

function showState() {
  const { overview, error, header } = data;
  const state = overview?.ready ? "ready" : "not ready";
  const parts = overview && [`${overview.server} ${overview.version}`, state, countsOf(overview.models)];
  setText(document.getElementById("server"), parts ? parts.join(" · ") : "");
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
