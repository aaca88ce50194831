// Writes a request of the page as a command of curl, as Python, and as Python with Triton's client.

import { hasBinaryInputs, hasBinaryOutputs, LENGTH_HEADER, sent } from "./binary.js";
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
  if (JSON.isRawJSON(value)) return python(value);
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (value !== null && typeof value === "object")
    return `{${Object.entries(value).map(([key, each]) => `${python(key)}: ${literal(each)}`).join(", ")}}`;
  if (value === null || typeof value === "boolean") return { null: "None", true: "True", false: "False" }[value];
  return python(value);
}

const NUMPY = { BOOL: "bool_", BYTES: "object_", FP16: "float16", FP32: "float32", FP64: "float64" };
const numpyType = (datatype) =>
  (datatype === "BF16" ? "ml_dtypes.bfloat16" : `np.${NUMPY[datatype] ?? datatype.toLowerCase()}`);

/** Values of BYTES as tritonclient takes them. `isBase64`: all texts are in base64. */
function bytes(value, isBase64 = false) {
  if (Array.isArray(value)) return `[${value.map((each) => bytes(each, isBase64)).join(", ")}]`;
  if (value?.b64 === PICTURE) return "picture";
  const encoded = value?.b64 ?? (isBase64 ? value : null);
  return encoded == null ? literal(value) : `base64.b64decode(${python(encoded)})`;
}

/** An input as tritonclient takes it. A tensor of UINT8 may be written as one text in base64. */
function array({ datatype, data, parameters }) {
  if (datatype === "BYTES") return `np.array(${bytes(data, parameters?.content_type === "base64")}, np.object_)`;
  const whole = Array.isArray(data) && data.length === 1 ? data[0] : data;
  return whole?.b64 == null ? `np.array(${literal(data)}, ${numpyType(datatype)})`
    : `np.frombuffer(${bytes(whole)}, ${numpyType(datatype)})`;
}

/** Arguments of `set_shared_memory` where parameters of a tensor name a region, else null. */
function region({ shared_memory_region: name, shared_memory_byte_size: size, shared_memory_offset: offset } = {}) {
  return name ? `set_shared_memory(${python(name)}, ${size}${offset ? `, ${offset}` : ""})` : null;
}

/** Arguments that tritonclient has for some parameters of a request; it takes no others of these names. */
const ARGUMENTS = ["sequence_id", "sequence_start", "sequence_end", "priority", "timeout"];

const named = (entries) => Object.entries(entries).map(([key, value]) => `${key}=${literal(value)}`);

const namesInRegions = ({ outputs }) => (outputs ?? []).filter(({ parameters }) => region(parameters)).map(({ name }) => name);

/** `name`, `version`: the model's. Written for the HTTP client, because the page does not know gRPC's port. */
export function asTritonClient({ name, version, body, file }) {
  const request = marked(body, file);
  const inputs = request.inputs.flatMap((input, index) => {
    const { shape } = input;
    const made = `inputs.append(triton.InferInput(${python(input.name)}, ${literal(shape)}, ${python(input.datatype)}))`;
    const set = region(input.parameters) ?? `set_data_from_numpy(${array(input)}.reshape(${literal(shape)}))`;
    return [made, `inputs[${index}].${set}`];
  });
  const outputs = (request.outputs ?? []).flatMap((output, index) => {
    const { classification } = output.parameters ?? {};
    const set = region(output.parameters);
    const count = classification ? `, class_count=${classification}` : "";
    return [`outputs.append(triton.InferRequestedOutput(${python(output.name)}${count}))`, set && `outputs[${index}].${set}`];
  });
  const inRegions = namesInRegions(request);
  const parameters = Object.entries(request.parameters ?? {});
  const others = Object.fromEntries(parameters.filter(([key]) => !ARGUMENTS.includes(key)));
  const headers = Object.fromEntries(headersNeeded().map((header) => [header, "SECRET"]));
  const given = [python(name), "inputs", ...named({ model_version: version }),
    ...(outputs.length ? ["outputs=outputs"] : []), ...(request.id ? named({ request_id: request.id }) : []),
    ...named(Object.fromEntries(parameters.filter(([key]) => ARGUMENTS.includes(key)))),
    ...(Object.keys(others).length ? named({ parameters: others }) : []), ...(Object.keys(headers).length ? named({ headers }) : [])];
  const text = inputs.join("\n");
  const isBf16 = text.includes("ml_dtypes.");
  const https = location.protocol === "https:" ? ", ssl=True" : "";
  const shown = inRegions.length
    ? [`    is_here = output["name"] not in ${literal(inRegions)}`,
      "    print(output[\"name\"], answer.as_numpy(output[\"name\"]) if is_here else \"in shared memory\")"]
    : ["    print(output[\"name\"], answer.as_numpy(output[\"name\"]))"];
  return [`# pip install tritonclient[http]${isBf16 ? " ml_dtypes" : ""}`, text.includes("base64.") && "import base64",
    isBf16 && "import ml_dtypes", "import numpy as np", "import tritonclient.http as triton", "",
    file && `with open(${python(file.name)}, "rb") as file:\n    picture = file.read()`,
    `client = triton.InferenceServerClient(${python(location.host)}${https})`, "inputs = []", text,
    ...(outputs.length ? ["outputs = []", ...outputs] : []),
    `answer = client.infer(${given.join(", ")})`, "for output in answer.get_response()[\"outputs\"]:",
    ...shown, ""].filter((line) => line != null && line !== false).join("\n");
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
  const { json: text, bytes, headers: parted } = sent(marked(body, file));
  const [note, out] = hasBinaryOutputs(body)
    ? ["# answer.bin: JSON, then the values of FP16 and BF16 as bytes\n", " -o answer.bin"] : ["", ""];
  if (file) {
    const [head, tail] = text.split(PICTURE);
    return `${note}{ printf %s ${quoted(head)}; base64 < ${quoted(`./${file.name}`)} | tr -d '\\n'; printf %s ${quoted(tail)}; } |\n`
      + `  ${call}${json}${out} -d @-`;
  }
  if (bytes.length) {
    const values = btoa(Array.from(bytes, (each) => String.fromCharCode(each)).join(""));
    const parting = Object.entries(parted).map(([key, value]) => ` -H ${quoted(`${key}: ${value}`)}`).join("");
    return `${note}{ printf %s ${quoted(text)}; printf %s ${values} | base64 -d; } |\n`
      + `  ${call} -H 'Content-Type: application/octet-stream'${parting}${out} --data-binary @-`;
  }
  return note + (text.length > LONGEST_ARGUMENT ? `${call}${json}${out} -d @- <<'END'\n${text}\nEND`
    : `${call}${json}${out} -d ${quoted(text)}`);
}

const SEND_BINARY = `data = b""
for tensor in request["inputs"]:
    if tensor["datatype"] in TYPES and "data" in tensor:
        values = np.array(tensor.pop("data"), TYPES[tensor["datatype"]]).tobytes()
        tensor.setdefault("parameters", {})["binary_data_size"] = len(values)
        data += values
head = json.dumps(request).encode()`;
const RECEIVE_BINARY = `    head = answer.read(int(answer.headers.get("${LENGTH_HEADER}", -1)))
    for output in json.loads(head)["outputs"]:
        if (size := output.get("parameters", {}).get("binary_data_size")) is not None:
            output["data"] = np.frombuffer(answer.read(size), TYPES[output["datatype"]]).tolist()`;

export function asPython({ url, body, file, streams }) {
  const secrets = Object.fromEntries(headersNeeded().map((name) => [name, "SECRET"]));
  const headers = literal({ "Content-Type": "application/json", ...secrets });
  const [sendsBinary, getsBinary] = [hasBinaryInputs(body) && !streams, hasBinaryOutputs(body) && !streams];
  const isBinaryAtAll = sendsBinary || getsBinary;
  const open = file && [`with open(${python(file.name)}, "rb") as file:`, "    picture = base64.b64encode(file.read()).decode()"];
  const shown = streams
    ? ["    for line in answer:", "        if line.startswith(b\"data: \"):", "            print(json.loads(line[6:]))"]
    : [getsBinary ? RECEIVE_BINARY : "    for output in json.load(answer)[\"outputs\"]:",
      `        print(output["name"], ${namesInRegions(body).length ? 'output.get("data", "in shared memory")' : 'output["data"]'})`];
  const sending = sendsBinary
    ? [SEND_BINARY, `headers = {**${literal(secrets)}, "${LENGTH_HEADER}": str(len(head))}`,
      `call = urllib.request.Request(${python(url)}, head + data, headers)`]
    : [`call = urllib.request.Request(${python(url)}, json.dumps(request).encode(), ${headers})`];
  return [isBinaryAtAll && "# pip install numpy ml_dtypes", file && "import base64", "import json", "import urllib.request", "",
    isBinaryAtAll && "import ml_dtypes\nimport numpy as np\n",
    isBinaryAtAll && "TYPES = {\"FP16\": np.float16, \"BF16\": ml_dtypes.bfloat16}  # These have no form in JSON.",
    ...(open ?? []), `request = ${literal(marked(body, file))}`, ...sending,
    "with urllib.request.urlopen(call) as answer:", ...shown, ""].filter((line) => line != null && line !== false).join("\n");
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
