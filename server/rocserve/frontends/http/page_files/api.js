// Shows the API as /openapi.json describes it.

import { ask } from "./data.js";
import { h } from "./dom.js";

function show(api, path, verb, operation) {
  const resolved = (entry) => (entry.$ref ? entry.$ref.split("/").slice(1).reduce((part, key) => part[key], api) : entry);
  const parameters = (operation.parameters ?? []).map(resolved)
    .map((entry) => `${entry.name} (${entry.in}): ${entry.description ?? ""}`);
  const body = operation.requestBody?.content ?? {};
  const statuses = Object.entries(operation.responses)
    .map(([status, entry]) => `${status}: ${resolved(entry).description}`);
  const example = (entry) => (typeof entry === "string" ? entry : JSON.stringify(entry, null, 1));
  return h("details", {}, h("summary", {}, h("code", {}, `${verb.toUpperCase()} ${path}`), ` ${operation.summary}`),
    operation.description && h("p", {}, operation.description),
    h("ul", {}, ...[...parameters, ...statuses].map((text) => h("li", {}, text))),
    ...Object.entries(body).map(([type, entry]) => h("div", {}, h("p", {}, type),
      entry.example && h("pre", { tabindex: "0" }, example(entry.example)))));
}

export function showApi(view) {
  view.replaceChildren();
  ask("/openapi.json").then((api) => {
    const operations = Object.entries(api.paths).flatMap(([path, verbs]) =>
      Object.entries(verbs).map(([verb, operation]) => [path, verb, operation]));
    const groups = Map.groupBy(operations, ([, , operation]) => operation.tags[0]);
    view.replaceChildren(h("h2", {}, api.info.title),
      h("p", {}, api.info.description, " ", h("a", { href: "/openapi.json" }, "openapi.json")),
      ...[...groups].flatMap(([tag, entries]) => [h("h3", {}, tag), ...entries.map((entry) => show(api, ...entry))]));
  }).catch((error) => view.replaceChildren(h("p", { class: "reason" }, error.message)));
  return () => {};
}
