/** The feed of an engine at work: opened while somebody looks, and opened again when it breaks off. */
import { ask, lines } from "./answer_stream.js";
import { key } from "./key.js";

const RETRY_MS = [500, 1000, 2000, 5000];
const SILENCE_MS = 9000; // three signs of life that did not come (KEEP_ALIVE_S of the server's feed)

/** Waits until a server may be asked again: longer, the more often it failed. */
export function pause(failures) {
  return new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
}

export class LiveFeed {
  #hear;
  #abort = null;

  /**
   * @param {{state: function(object), delta: function(object), trouble: function(string)}} hear what has come; trouble
   *   is told in a sentence, and an empty one when it is over
   */
  constructor(hear) {
    this.#hear = hear;
  }

  /** Opens it, unless it is open. */
  open() {
    if (this.#abort) return;
    this.#abort = new AbortController();
    this.#keepReading(this.#abort.signal);
  }

  /** Closes it. */
  close() {
    this.#abort?.abort();
    this.#abort = null;
  }

  /** Begins anew, with a whole State; with another key, say. */
  restart() {
    if (!this.#abort) return;
    this.close();
    this.open();
  }

  async #keepReading(signal) {
    let failures = 0;
    let sinceWhen = "";
    while (!signal.aborted) {
      try {
        const response = await ask("live/events", key(), { signal });
        failures = 0;
        sinceWhen = "";
        this.#hear.trouble("");
        await this.#read(response, signal);
        throw new Error("The server has ended the feed.");
      } catch (error) {
        if (signal.aborted) return;
        sinceWhen ||= new Date().toLocaleTimeString("en-GB");
        this.#hear.trouble(`${error.message} No news since ${sinceWhen}; trying again …`);
        await pause(failures);
        failures += 1;
      }
    }
  }

  async #read(response, signal) {
    let heard = Date.now();
    let isSilent = false;
    const listener = setInterval(() => {
      if (isSilent || Date.now() - heard < SILENCE_MS) return;
      isSilent = true;
      const sinceWhen = new Date(heard).toLocaleTimeString("en-GB");
      this.#hear.trouble(`The server is silent, though the connection stands: it is stopped, or has no time. No news since ${sinceWhen} …`);
    }, 1000);
    try {
      await this.#readLines(response, signal, () => {
        heard = Date.now();
        if (isSilent) this.#hear.trouble("");
        isSilent = false;
      });
    } finally {
      clearInterval(listener);
    }
  }

  async #readLines(response, signal, hasHeard) {
    let kind = "";
    for await (const line of lines(response.body)) {
      if (signal.aborted) return; // what had come before the feed was closed belongs to nobody
      hasHeard();
      if (line.startsWith("event: ")) kind = line.slice("event: ".length);
      else if (line.startsWith("data: ")) this.#hear[kind]?.(JSON.parse(line.slice("data: ".length)));
    }
  }
}
