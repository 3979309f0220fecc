/** The server refused the request, or its answer ended early; the message is for users. */
export class Refusal extends Error {
  /**
   * @param {string} message
   * @param {number} status of HTTP; 0: there was no answer
   */
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/**
 * Sends a request and yields the chunks of its answer as they come.
 * @param {{path: string, body: object}} request as the API takes it
 * @param {string} key empty where none is needed, or where the browser sends one by itself
 * @param {AbortSignal} signal aborts the request, here and at the server
 * @returns {AsyncGenerator<object>}
 * @throws {Refusal} with the server's message, if it sent one
 * @throws {DOMException} AbortError after the signal
 */
export async function* answerChunks({ path, body }, key, signal) {
  const response = await ask(path, key, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({
      ...body,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    }),
    signal,
  });
  for await (const line of lines(response.body)) {
    if (!line.startsWith("data: ")) continue;
    const data = line.slice("data: ".length);
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(chunk.error.message);
    yield chunk;
  }
  throw new Refusal("The answer is incomplete: the server closed the connection.");
}

/** Characters that no header can carry: control characters, and all beyond Latin-1. */
const UNSENDABLE = /[^\x20-\x7e\xa0-\xff]/;

/**
 * Fetches a path of this server.
 * @param {string} path
 * @param {string} key empty where none is needed
 * @param {RequestInit} options
 * @returns {Promise<Response>} of success
 * @throws {Refusal} in words
 */
export async function ask(path, key, options = {}) {
  if (UNSENDABLE.test(key)) throw new Refusal("The API key has characters that a header cannot carry; nothing was sent. Type it again.", 401);
  const authorization = key ? { authorization: `Bearer ${key}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...options.headers, ...authorization } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  throw new Refusal(await refusalWords(response), response.status);
}

async function refusalWords(response) {
  const body = await response.json().catch(() => null);
  const words = body?.error?.message ?? response.statusText;
  const retryAfter = response.headers.get("retry-after");
  return `${response.status}: ${words}${retryAfter ? ` Try again in ${retryAfter} s.` : ""}`;
}

/**
 * Yields the lines of a body; its chunks may end anywhere, even within a character.
 * @param {ReadableStream} body
 * @throws {Refusal} the connection was lost
 */
export async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      yield* parts;
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The answer is incomplete: the connection was lost.");
  } finally {
    reader.cancel().catch(() => {}); // a body that failed cannot be cancelled
  }
}
