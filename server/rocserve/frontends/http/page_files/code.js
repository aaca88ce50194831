// Writes a request of the page as a command of curl, as Python, and as Python with Triton's client.

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

const NUMPY = { BOOL: "bool_", BYTES: "object_", FP16: "float16", FP32: "float32", FP64: "float64" };
const numpyType = (datatype) =>
  (datatype === "BF16" ? "ml_dtypes.bfloat16" : `np.${NUMPY[datatype] ?? datatype.toLowerCase()}`);

/** Values of BYTES as tritonclient takes them. */
function bytes(value) {
  if (Array.isArray(value)) return `[${value.map(bytes).join(", ")}]`;
  if (value?.b64 === PICTURE) return "picture";
  return value?.b64 == null ? literal(value) : `base64.b64decode(${python(value.b64)})`;
}

/** Arguments that tritonclient has for some parameters of a request; it takes no others of these names. */
const ARGUMENTS = ["sequence_id", "sequence_start", "sequence_end", "priority", "timeout"];

const named = (entries) => Object.entries(entries).map(([key, value]) => `${key}=${literal(value)}`);

/** `name`, `version`: the model's. Written for the HTTP client, because the page does not know gRPC's port. */
export function asTritonClient({ name, version, body, file }) {
  const request = marked(body, file);
  const isPicture = ({ data }) => data?.length === 1 && data[0]?.b64 === PICTURE;
  const inputs = request.inputs.flatMap((input, index) => {
    const { datatype, shape, data, parameters } = input;
    const made = `inputs.append(triton.InferInput(${python(input.name)}, ${literal(shape)}, ${python(datatype)}))`;
    const { shared_memory_region: region, shared_memory_byte_size: size, shared_memory_offset: offset = 0 } = parameters ?? {};
    if (region) return [made, `inputs[${index}].set_shared_memory(${python(region)}, ${size}, ${offset})`];
    const array = isPicture(input) && datatype !== "BYTES" ? `np.frombuffer(picture, ${numpyType(datatype)})`
      : `np.array(${datatype === "BYTES" ? bytes(data) : literal(data)}, ${numpyType(datatype)})`;
    return [made, `inputs[${index}].set_data_from_numpy(${array}.reshape(${literal(shape)}))`];
  });
  const outputs = request.outputs?.map((output) => {
    const { classification } = output.parameters ?? {};
    return `triton.InferRequestedOutput(${python(output.name)}${classification ? `, class_count=${classification}` : ""})`;
  });
  const parameters = Object.entries(request.parameters ?? {});
  const others = Object.fromEntries(parameters.filter(([key]) => !ARGUMENTS.includes(key)));
  const headers = Object.fromEntries(headersNeeded().map((header) => [header, "SECRET"]));
  const given = [python(name), "inputs", ...named({ model_version: version }),
    ...(outputs?.length ? [`outputs=[${outputs.join(", ")}]`] : []), ...(request.id ? named({ request_id: request.id }) : []),
    ...named(Object.fromEntries(parameters.filter(([key]) => ARGUMENTS.includes(key)))),
    ...(Object.keys(others).length ? named({ parameters: others }) : []), ...(Object.keys(headers).length ? named({ headers }) : [])];
  const text = inputs.join("\n");
  const https = location.protocol === "https:" ? ", ssl=True" : "";
  return ["# pip install tritonclient[http]", text.includes("base64.") && "import base64",
    text.includes("ml_dtypes.") && "import ml_dtypes", "import numpy as np", "import tritonclient.http as triton", "",
    file && `with open(${python(file.name)}, "rb") as file:\n    picture = file.read()`,
    `client = triton.InferenceServerClient(${python(location.host)}${https})`, "inputs = []", text,
    `answer = client.infer(${given.join(", ")})`, "for output in answer.get_response()[\"outputs\"]:",
    "    print(output[\"name\"], answer.as_numpy(output[\"name\"]))", ""].filter((line) => line != null && line !== false).join("\n");
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
  return h("div", { class: "copies" }, button("Copy as curl", asCurl), " ", button("Copy as Python", asPython), " ",
    !request.streams && button("Copy as Triton client", asTritonClient), " ", note, code);
}
