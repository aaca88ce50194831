// Shows the answers of a model that may send many, as they come.

import { ask } from "./data.js";
import { h, number } from "./dom.js";

/** Characters that are kept of each output. */
const MOST_SHOWN = 200_000;
const FIELDS = new Set(["id", "model_name", "model_version", "error"]);

/** A request as the members of one JSON object, which `generate_stream` takes. */
export const generateBody = ({ inputs }) =>
  Object.fromEntries(inputs.map(({ name, data }) => [name, data.length === 1 ? data[0] : data]));

/** Calls `take` with each event's JSON until the stream ends or `signal` ends it. */
async function events(path, body, signal, take) {
  const stream = await ask(path, { method: "POST", body: JSON.stringify(body), stream: true, signal });
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) take(JSON.parse(part.slice(6)));
  }
}

/** Shows the stream in `place`. Texts are put together as one text; other values are put on lines. */
export async function showStream(place, path, body) {
  const stop = new AbortController();
  const button = h("button", { type: "button", onclick: () => stop.abort() }, "Stop");
  const count = h("span");
  const status = h("p", {}, button, " ", count);
  const outputs = h("div");
  const shown = new Map();
  const began = performance.now();
  let answers = 0;
  let first = 0;
  place.replaceChildren(outputs, status);
  const many = () => `${number(answers, 0)} answer${answers === 1 ? "" : "s"}`;
  const take = (event) => {
    if (!place.isConnected) stop.abort(); // Another part of the page is shown.
    if (event.error) throw new Error(event.error);
    if (!answers) first = performance.now() - began;
    answers += 1;
    count.textContent = many();
    for (const [name, value] of Object.entries(event)) {
      if (FIELDS.has(name)) continue;
      if (!shown.has(name)) {
        shown.set(name, h("pre", { tabindex: "0" }));
        outputs.append(h("section", {}, h("h3", {}, name), shown.get(name)));
      }
      const text = typeof value === "string" ? value : `${JSON.stringify(value)}\n`;
      const box = shown.get(name);
      const isAtEnd = box.scrollTop + box.clientHeight > box.scrollHeight - 40;
      box.append(text);
      if (box.textContent.length > MOST_SHOWN) box.replaceChildren(`… ${box.textContent.slice(-MOST_SHOWN / 2)}`);
      if (isAtEnd) box.scrollTop = box.scrollHeight;
    }
  };
  try {
    await events(path, body, stop.signal, take);
    const took = performance.now() - began;
    status.replaceChildren(`${many()} in ${number(took)} ms, the first after ${number(first)} ms.`);
  } catch (error) {
    const isStopped = stop.signal.aborted;
    stop.abort();
    status.replaceChildren(isStopped ? `Stopped after ${many()}.` : many());
    if (!isStopped) place.append(h("p", { class: "reason" }, error.message));
  }
}
