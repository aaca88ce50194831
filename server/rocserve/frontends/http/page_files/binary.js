// Values that need more than JSON: requests and answers carry FP16 and BF16 as bytes after their JSON, and JavaScript's
// numbers do not hold all integers.

/** Reads JSON, and keeps the digits of integers that JavaScript's numbers cannot hold. */
export const exact = (text) => JSON.parse(text, (key, value, { source }) =>
  (typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(source) ? JSON.rawJSON(source) : value));

export const LENGTH_HEADER = "Inference-Header-Content-Length";

/** Whether this browser can read and write requests with these tensors. */
export const canSend = ({ inputs, outputs }) => Boolean(JSON.rawJSON)
  && ("getFloat16" in DataView.prototype || ![...inputs, ...outputs].some(({ datatype }) => datatype === "FP16"));

export const isBinary = ({ datatype }) => datatype === "FP16" || datatype === "BF16";

const word = new DataView(new ArrayBuffer(4));

/** BF16 is the upper half of FP32, rounded to the nearest value, in the middle to the even one. */
function bf16Bits(value) {
  word.setFloat32(0, value);
  const bits = word.getUint32(0);
  return Number.isNaN(value) ? 0x7fc0 : (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16;
}

function bf16Value(bits) {
  word.setUint32(0, bits << 16);
  return word.getFloat32(0);
}

function packed({ datatype, data }) {
  const values = data.flat(Infinity);
  const view = new DataView(new ArrayBuffer(2 * values.length));
  values.forEach((value, index) =>
    (datatype === "FP16" ? view.setFloat16(2 * index, value, true) : view.setUint16(2 * index, bf16Bits(value), true)));
  return new Uint8Array(view.buffer);
}

function unpacked(datatype, view) {
  const at = (index) =>
    (datatype === "FP16" ? view.getFloat16(2 * index, true) : bf16Value(view.getUint16(2 * index, true)));
  return Array.from({ length: view.byteLength / 2 }, (_, index) => at(index));
}

/** The request, which asks for outputs of these datatypes as bytes. */
export function withBinaryOutputs(request, metadata) {
  const binary = new Set(metadata.outputs.filter(isBinary).map(({ name }) => name));
  if (!binary.size) return request;
  const outputs = request.outputs ?? metadata.outputs.map(({ name }) => ({ name }));
  return { ...request, outputs: outputs.map((output) => {
    const { classification, shared_memory_region: region } = output.parameters ?? {};
    const isLeft = !binary.has(output.name) || classification || region;
    return isLeft ? output : { ...output, parameters: { ...output.parameters, binary_data: true } };
  }) };
}

export const hasBinaryInputs = ({ inputs }) => (inputs ?? []).some((input) => isBinary(input) && Array.isArray(input.data));
export const hasBinaryOutputs = ({ outputs }) => (outputs ?? []).some((output) => output.parameters?.binary_data);

/** What is sent for a request: its JSON, the bytes after it, and the header that parts them. */
export function sent(request) {
  if (!hasBinaryInputs(request)) return { json: JSON.stringify(request), bytes: new Uint8Array(), headers: {} };
  const parts = [];
  const inputs = request.inputs.map((input) => {
    if (!isBinary(input) || !Array.isArray(input.data)) return input;
    const { data, ...rest } = input;
    parts.push(packed(input));
    return { ...rest, parameters: { ...input.parameters, binary_data_size: parts.at(-1).length } };
  });
  const json = JSON.stringify({ ...request, inputs });
  const length = new TextEncoder().encode(json).length;
  return { json, bytes: new Uint8Array(parts.flatMap((part) => [...part])), headers: { [LENGTH_HEADER]: String(length) } };
}

/** An answer whose first `length` bytes are JSON; its values of FP16 and BF16 become numbers. */
export function received(buffer, length) {
  const answer = exact(new TextDecoder().decode(new Uint8Array(buffer, 0, length)));
  let offset = length;
  for (const output of answer.outputs) {
    const size = output.parameters?.binary_data_size;
    if (size == null) continue;
    if (isBinary(output)) output.data = unpacked(output.datatype, new DataView(buffer, offset, size));
    offset += size;
  }
  return answer;
}
