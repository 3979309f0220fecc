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
  const stop = form.elements.stop.value.split("\n").filter((line) => line !== "").map(unescaped);
  if (stop.length > 0) fields.stop = stop;
  return fields;
}

const ESCAPES = { "\\n": "\n", "\\t": "\t", "\\r": "\r", "\\\\": "\\" };

/** A line in which the end of a line is written \n, as people know it from programs. */
function unescaped(line) {
  return line.replace(/\\[ntr\\]/g, (escape) => ESCAPES[escape]);
}
