// Sends a text, a picture or JSON to a model, and shows the answer.

import { canSend, exact, sent, withBinaryOutputs } from "./binary.js";
import { drawn } from "./boxes.js";
import { copies } from "./code.js";
import { ask } from "./data.js";
import { h, number } from "./dom.js";
import { pathOf } from "./model.js";
import { generateBody, showStream } from "./stream.js";
import { areTexts, isVector, LastTexts, plot, textBoxes, vector, VECTOR } from "./text.js";
import { watchTimes } from "./times.js";

const SHOWN_CLASSES = 5;
const SHOWN_ELEMENTS = 1000;

const isNumber = (datatype) => /FP|BF/.test(datatype);
/** The server makes classes of all numbers but BF16. */
const hasClasses = (datatype) => /FP/.test(datatype);
const count = (shape) => shape.reduce((product, size) => product * size, 1);

/** The inputs that a request must have. If all are optional, as TEXT or IDS, the first is enough. */
function needed(metadata, config) {
  const optional = new Set((config.input ?? []).filter((input) => input.optional).map(({ name }) => name));
  const inputs = metadata.inputs.filter(({ name }) => !optional.has(name));
  return inputs.length ? inputs : metadata.inputs.slice(0, 1);
}

/** Numbers with labels are requested as classes, because only classes come with labels. Undefined if there are none. */
function labelledOutputs(metadata, config) {
  const labelled = new Set((config.output ?? []).filter((output) => output.label_filename).map(({ name }) => name));
  if (!metadata.outputs.some(({ name, datatype }) => labelled.has(name) && hasClasses(datatype))) return undefined;
  return metadata.outputs.map(({ name, datatype }) => labelled.has(name) && hasClasses(datatype)
    ? { name, parameters: { classification: SHOWN_CLASSES } } : { name });
}

/** The smallest request, with zeros as data. */
function template(metadata, config) {
  const inputs = needed(metadata, config).map(({ name, datatype, shape }) => {
    const sizes = shape.map((size) => (size === -1 ? 1 : size));
    const element = datatype === "BYTES" ? "" : datatype === "BOOL" ? false : 0;
    const data = count(sizes) <= SHOWN_ELEMENTS ? Array(count(sizes)).fill(element) : [];
    return { name, datatype, shape: sizes, data };
  });
  return withShortLists(JSON.stringify({ inputs, outputs: labelledOutputs(metadata, config) }, null, 1));
}

/** Writes each list of numbers and empty texts in one line. Only JSON's own line breaks are "\n" in the text. */
const withShortLists = (json) => json.replace(/\[\n(?:[^[\]{}"]|"")*\]/g,
  (list) => list.replace(/,\n\s*/g, ", ").replace(/\n\s*/g, ""));

/** Names that inputs of texts and of pictures have; an input of another name may take either, and a text is offered first. */
const TEXT_NAME = /text|prompt|question|query|sentence|document|passage|message|^input_ids$/i;
const PICTURE_NAME = /image|picture|photo|encoded|jpe?g|png|img/i;

/** The input that takes a picture's bytes; null if there is none. */
function pictureInput(inputs) {
  const [input] = inputs;
  if (inputs.length !== 1 || TEXT_NAME.test(input.name) || input.shape.some((size) => size !== -1 && size !== 1)) return null;
  return input.datatype === "BYTES" || (input.datatype === "UINT8" && input.shape.includes(-1)) ? input : null;
}

async function base64(file) {
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
  return url.slice(url.indexOf(",") + 1);
}

/** For a text or a picture: outputs of probabilities are requested as classes, because only classes come with labels,
 * which an ensemble's configuration does not name. */
function requestedOutputs(metadata, config) {
  const isDetector = metadata.outputs.some((output) => output.name === "BOXES");
  return metadata.outputs.map(({ name, datatype }) => {
    const dims = config.output.find((output) => output.name === name)?.dims ?? [];
    const isClasses = !isDetector && name !== VECTOR && hasClasses(datatype) && dims.length === 1 && dims[0] > 1;
    return isClasses ? { name, parameters: { classification: SHOWN_CLASSES } } : { name };
  });
}

async function pictureRequest(file, metadata, config) {
  const input = pictureInput(needed(metadata, config));
  const shape = input.shape.map(() => 1);
  if (input.datatype === "UINT8") shape[input.shape.lastIndexOf(-1)] = file.size;
  const data = [{ b64: await base64(file) }];
  return { inputs: [{ ...input, shape, data }], outputs: requestedOutputs(metadata, config) };
}

function bars(classes, kind = "bars") {
  const most = Math.max(1, ...classes.map(({ value }) => value));
  return h("ol", { class: kind }, ...classes.map(({ label, value }) => {
    const bar = h("span", { class: "bar" });
    bar.style.width = `${Math.max(0, (100 * value) / most)}%`;
    return h("li", {}, h("span", { class: "label" }, label), bar, h("span", { class: "value" }, value.toFixed(3)));
  }));
}

/** Reads the texts of the classification extension, "value:index:label". */
function classes(output) {
  return output.data.map((text) => {
    const [value, index, ...label] = String(text).split(":");
    return { value: Number(value), label: label.join(":") || `class ${index}` };
  });
}

function tensor(output) {
  const data = output.data ?? [];
  const more = data.length > SHOWN_ELEMENTS ? `, … ${data.length - SHOWN_ELEMENTS} more` : "";
  const form = h("small", {}, `${output.datatype} [${output.shape.join(", ")}]`);
  const isLine = isNumber(output.datatype) && output.shape.at(-1) === data.length;
  return h("section", {}, h("h3", {}, `${output.name} `, form), isLine && plot(data),
    h("pre", { tabindex: "0" }, JSON.stringify(data.slice(0, SHOWN_ELEMENTS)).slice(1, -1) + more));
}

/** `lastTexts`: null unless the request is one text from its box. */
async function show(response, request, picture, lastTexts) {
  const outputs = Object.fromEntries(response.outputs.map((output) => [output.name, output]));
  if (picture && outputs.BOXES && (outputs.LABELS || outputs.CLASSES)) return [await drawn(picture, outputs)];
  const asClasses = (request.outputs ?? []).filter((output) => output.parameters?.classification);
  const asked = new Set(asClasses.map((output) => output.name));
  const parts = response.outputs.map((output) => {
    if (asked.has(output.name)) return h("section", {}, h("h3", {}, output.name), bars(classes(output)));
    return isVector(output) ? vector(output) : tensor(output);
  });
  const found = lastTexts && response.outputs.find(isVector);
  const near = found ? lastTexts.nearest(request.inputs[0].data[0], found.data) : [];
  if (near.length) parts.unshift(h("section", {}, h("h3", {}, "Nearest of the last texts"), bars(near, "bars texts")));
  if (picture) parts.unshift(h("img", { src: picture, alt: "the picture that was sent", class: "sent" }));
  return parts;
}

export function tryIt(name, version, metadata, config) {
  const title = h("h2", {}, "Try it");
  if (!canSend(metadata))
    return h("section", { class: "try" }, title, h("p", { class: "reason" },
      "This browser cannot send requests to this model: the page needs Chrome 135, Firefox 135 or Safari 18.4."));
  const text = h("textarea", { rows: 8, spellcheck: "false", "aria-label": "request as JSON" });
  text.value = template(metadata, config);
  const answer = h("div", { class: "answer", "aria-live": "polite" });
  const inputs = needed(metadata, config);
  const takesTexts = areTexts(inputs);
  const takesPictures = pictureInput(inputs) !== null;
  const accept = takesPictures ? "image/*,.json" : ".json";
  const file = h("input", { type: "file", accept, onchange: () => take(file.files[0]) });
  const isPicture = takesPictures && (!takesTexts || PICTURE_NAME.test(inputs[0].name));
  let streams = Boolean(config.model_transaction_policy?.decoupled);
  const kept = inputs.length === 1 ? new LastTexts() : null;
  const boxes = textBoxes(inputs, (filled) =>
    send(() => ({ inputs: filled, outputs: requestedOutputs(metadata, config) }), kept));
  let picture = "";

  /** Shows a request as commands, whatever its answer was. */
  const offer = (part, body, file) => answer.append(copies({
    url: `${location.origin}${pathOf(name, version)}/${part}`, name, version, body, file, streams: part === "generate_stream",
  }));

  async function stream(request) {
    const body = generateBody(request);
    await showStream(answer, `${pathOf(name, version)}/generate_stream`, body);
    offer("generate_stream", body, null);
  }

  /** `file`: the picture that `make` puts into the request. */
  async function send(make, lastTexts = null, file = null) {
    URL.revokeObjectURL(picture);
    picture = file ? URL.createObjectURL(file) : "";
    answer.replaceChildren("…");
    let request = null;
    try {
      request = await make();
      if (streams && !file) {
        await stream(request);
        return;
      }
      request = withBinaryOutputs(request, metadata);
      const times = await watchTimes(name, version, config);
      const began = performance.now();
      const { json, bytes, headers } = sent(request);
      const body = new Blob([json, bytes]);
      const response = await ask(`${pathOf(name, version)}/infer`, { method: "POST", headers, body, parse: exact });
      const took = performance.now() - began;
      const parts = await show(response, request, picture, lastTexts);
      answer.replaceChildren(...parts, await times(took) ?? h("p", {}, `Answered in ${number(took)} ms.`));
    } catch (error) {
      // An ensemble may be decoupled by a member.
      if (request && !file && !streams && /decoupled/.test(error.message)) {
        streams = true;
        await stream(request);
        return;
      }
      answer.replaceChildren(h("p", { class: "reason" }, error.message));
    }
    if (request) offer("infer", request, file);
  }

  async function take(dropped) {
    if (!dropped) return;
    if (dropped.type.startsWith("image/") && takesPictures) {
      await send(() => pictureRequest(dropped, metadata, config), null, dropped);
    } else {
      text.value = await dropped.text();
      await send(() => exact(text.value));
    }
  }

  const ondragover = (event) => event.preventDefault();
  const ondrop = (event) => {
    event.preventDefault();
    take(event.dataTransfer.files[0]);
  };
  const what = takesPictures ? "a picture or JSON" : "JSON";
  const files = h("p", {}, h("label", { class: "drop" }, `Drop ${what} here, or choose a file: `, file));
  const texts = takesTexts ? h("details", { open: !isPicture }, h("summary", {}, "Text"), boxes) : null;
  return h("section", { class: "try", ondragover, ondrop },
    title,
    ...(isPicture ? [files, texts] : [texts, files]),
    h("details", { open: !takesPictures && !takesTexts }, h("summary", {}, "Request as JSON"), text,
      h("p", {}, h("button", { type: "button", onclick: () => send(() => exact(text.value)) }, "Send"))),
    answer);
}
