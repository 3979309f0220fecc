import { Refusal } from "./answer_stream.js";

const WHOLE_NUMBERS = ["top_k", "max_tokens", "seed"];
const NUMBERS = ["temperature", "top_p", ...WHOLE_NUMBERS];

/**
 * The sampling fields that are filled in, by their names in the API; whether their values will do, the server says.
 * @param {HTMLFormElement} form
 * @throws {Refusal} where a number is none, or none that JavaScript can write down
 */
export function samplingFields(form) {
  const fields = {};
  for (const name of NUMBERS) {
    const input = form.elements[name];
    if (input.validity.badInput) throw new Refusal(`${name} is not a number.`);
    if (input.value === "") continue;
    fields[name] = Number(input.value);
    if (WHOLE_NUMBERS.includes(name) && !Number.isSafeInteger(fields[name])) {
      throw new Refusal(`${name}=${input.value}: a whole number of at most ${Number.MAX_SAFE_INTEGER}.`);
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
 * The fields for what stands in the JSON schema box; each of the two APIs has its own.
 * @param {HTMLFormElement} form
 * @param {boolean} isChat
 * @throws {Refusal} where it is no JSON, or no schema
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
 * The fields that have the answer come with its log-probabilities, where they are asked for.
 * @param {HTMLFormElement} form
 * @param {boolean} isChat
 */
export function chanceFields(form, isChat) {
  if (!form.elements.chances.checked) return {};
  return isChat ? { logprobs: true, top_logprobs: NUM_ALTERNATIVES } : { logprobs: NUM_ALTERNATIVES };
}

const ESCAPES = { "\\n": "\n", "\\t": "\t", "\\r": "\r", "\\\\": "\\" };

/** A line in which the end of a line is written \n, as people know it from programs. */
function unescaped(line) {
  return line.replace(/\\[ntr\\]/g, (escape) => ESCAPES[escape]);
}
