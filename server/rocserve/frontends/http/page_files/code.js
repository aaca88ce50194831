// Writes a request of the page as a command of curl and as Python.

import { headersNeeded } from "./data.js";
import { h, setText } from "./dom.js";

/** Characters up to which a shell takes a request as an argument. */
const LONGEST_ARGUMENT = 100_000;
const PICTURE = "b64 of the picture";

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const python = (value) => JSON.stringify(value); // JSON's texts are Python's texts.

/** A value as a Python literal. The picture's bytes become a variable. */
function literal(value) {
  if (value === PICTURE) return "picture";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (value !== null && typeof value === "object")
    return `{${Object.entries(value).map(([key, each]) => `${python(key)}: ${literal(each)}`).join(", ")}}`;
  if (value === null || typeof value === "boolean") return { null: "None", true: "True", false: "False" }[value];
  return python(value);
}

/** The request with a mark instead of the picture's bytes. */
const marked = (body, file) =>
  file ? JSON.parse(JSON.stringify(body, (key, value) => (key === "b64" ? PICTURE : value))) : body;

/** `file`: the picture that is in the request; null = none. `streams`: the answer is a stream of events. */
export function asCurl({ url, body, file, streams }) {
  const headers = headersNeeded().map((name) => ` -H ${quoted(`${name}: SECRET`)}`).join("");
  const call = `curl -s${streams ? "N" : ""} ${quoted(url)}${headers}`;
  const json = " -H 'Content-Type: application/json'";
  if (file && !body.outputs?.some((output) => output.parameters)) {
    const path = file.name.replace(/[\\"]/g, "\\$&");
    return `${call} -F ${quoted(`${body.inputs[0].name}=@"${path}"`)}`;
  }
  const text = JSON.stringify(marked(body, file));
  if (file) {
    const [head, tail] = text.split(PICTURE);
    return `{ printf %s ${quoted(head)}; base64 < ${quoted(`./${file.name}`)} | tr -d '\\n'; printf %s ${quoted(tail)}; } |\n`
      + `  ${call}${json} -d @-`;
  }
  return text.length > LONGEST_ARGUMENT ? `${call}${json} -d @- <<'END'\n${text}\nEND` : `${call}${json} -d ${quoted(text)}`;
}

export function asPython({ url, body, file, streams }) {
  const headers = { "Content-Type": "application/json", ...Object.fromEntries(headersNeeded().map((name) => [name, "SECRET"])) };
  const read = file
    ? ["import base64"] : [];
  const open = file ? [`with open(${python(file.name)}, "rb") as file:`, "    picture = base64.b64encode(file.read()).decode()"] : [];
  const shown = streams
    ? ["    for line in answer:", "        if line.startswith(b\"data: \"):", "            print(json.loads(line[6:]))"]
    : ["    for output in json.load(answer)[\"outputs\"]:", "        print(output[\"name\"], output[\"data\"])"];
  return [...read, "import json", "import urllib.request", "", ...open, `request = ${literal(marked(body, file))}`,
    `call = urllib.request.Request(${python(url)}, json.dumps(request).encode(), ${literal(headers)})`,
    "with urllib.request.urlopen(call) as answer:", ...shown, ""].join("\n");
}

/** Buttons that copy the request, and show what they copy: only a page of https or of this machine may write to the
 * clipboard. */
export function copies(request) {
  const code = h("pre", { tabindex: "0", class: "code", hidden: true });
  const note = h("small", { role: "status" });
  const button = (title, write) => h("button", { type: "button", onclick: async () => {
    setText(code, write(request));
    code.hidden = false;
    getSelection().selectAllChildren(code);
    const isCopied = await navigator.clipboard?.writeText(code.textContent).then(() => true, () => false);
    setText(note, isCopied ? "Copied." : "Selected: copy it with Ctrl+C.");
  } }, title);
  return h("div", { class: "copies" }, button("Copy as curl", asCurl), " ", button("Copy as Python", asPython), " ", note, code);
}
