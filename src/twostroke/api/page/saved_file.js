import { ask } from "./answer_stream.js";
import { key } from "./key.js";

/**
 * Fetches a path of this server, with the key, and saves it as a file.
 * @param {string} path
 * @param {string} name of the file
 * @throws {Refusal} the server cannot be reached, or refuses
 */
export async function saveAsFile(path, name) {
  const content = await (await ask(path, key())).blob();
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
