import { Refusal } from "./answer_stream.js";

const WHOLE_NUMBERS = ["top_k", "max_tokens", "seed"];
const NUMBERS = ["temperature", "top_p", ...WHOLE_NUMBERS];

/**
 * Return the sampling fields that are filled in, by their names in the API. The server checks the values.
 * @param {HTMLFormElement} form
 * @throws {Refusal} a field is not a number, or one too large for JavaScript
 */
export function samplingFields(form) {
  const fields = {};
  for (const name of NUMBERS) {
    const input = form.elements[name];
    if (input.validity.badInput) throw new Refusal(`${name} is not a number.`);
    if (input.value === "") continue;
    fields[name] = Number(input.value);
    if (WHOLE_NUMBERS.includes(name) && !Number.isSafeInteger(fields[name])) {
      throw new Refusal(`${name}=${input.value}: must be a whole number of at most ${Number.MAX_SAFE_INTEGER}.`);
    }
  }
  const stop = form.elements.stop.value
    .split("\n")
    .filter((line) => line !== "")
    .map(unescaped);
  if (stop.length > 0) fields.stop = stop;
  return fields;
}

/**
 * Return the request fields for the JSON schema; completions and chats have different ones.
 * @param {HTMLFormElement} form
 * @param {boolean} isChat
 * @throws {Refusal} it is not JSON, or not a schema
 */
export function schemaFields(form, isChat) {
  const text = form.elements.schema.value.trim();
  if (text === "") return {};
  let schema;
  try {
    schema = JSON.parse(text);
  } catch (error) {
    throw new Refusal(`The JSON schema is not valid JSON: ${error.message}`);
  }
  if (schema === null || typeof schema !== "object" || Array.isArray(schema)) {
    throw new Refusal('The JSON schema must be an object, such as {"type": "object"}.');
  }
  if (!isChat) return { structured_outputs: { json: schema } };
  return { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } };
}

const NUM_ALTERNATIVES = 5;

/**
 * Return the fields that request log-probabilities, if the box is checked.
 * @param {HTMLFormElement} form
 * @param {boolean} isChat
 */
export function chanceFields(form, isChat) {
  if (!form.elements.chances.checked) return {};
  return isChat ? { logprobs: true, top_logprobs: NUM_ALTERNATIVES } : { logprobs: NUM_ALTERNATIVES };
}

const ESCAPES = { "\\n": "\n", "\\t": "\t", "\\r": "\r", "\\\\": "\\" };

/** Return a line with \n, \t, \r and \\ replaced by the characters they stand for. */
function unescaped(line) {
  return line.replace(/\\[ntr\\]/g, (escape) => ESCAPES[escape]);
}
