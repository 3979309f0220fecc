/** The event stream of the live view: open while the view is visible, and reopened when it fails. */
import { ask, lines } from "./answer_stream.js";
import { key } from "./key.js";

const RETRY_MS = [500, 1000, 2000, 5000];
const SILENCE_MS = 9000; // three missing keep-alive messages (KEEP_ALIVE_S of the server's feed)

/** Waits before the server is asked again; the wait grows with each failure. */
export function pause(failures) {
  return new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
}

export class LiveFeed {
  #hear;
  #abort = null;

  /**
   * @param {{state: function(object), delta: function(object), trouble: function(string)}} hear handlers by kind of message; trouble
   *   gets a sentence, which is empty when the problem is over
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

  /** Reopens the feed, which sends a whole State; for example after the key has changed. */
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
        throw new Error("The server closed the feed.");
      } catch (error) {
        if (signal.aborted) return;
        sinceWhen ||= new Date().toLocaleTimeString("en-GB");
        this.#hear.trouble(`${error.message} No data since ${sinceWhen}; trying again …`);
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
      this.#hear.trouble(`The server sends nothing, though the connection is open: it is stopped or overloaded. No data since ${sinceWhen} …`);
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
      if (signal.aborted) return; // drop messages that arrived before the feed was closed
      hasHeard();
      if (line.startsWith("event: ")) kind = line.slice("event: ".length);
      else if (line.startsWith("data: ")) this.#hear[kind]?.(JSON.parse(line.slice("data: ".length)));
    }
  }
}
