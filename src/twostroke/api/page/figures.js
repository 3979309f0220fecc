const RECENT_MS = 1000;

/** Latencies and rates of one answer, measured in the browser. */
export class Figures {
  #sentMs;
  #firstMs = null;
  #lastMs = null;
  #recent = []; // [ms, tokens so far] in the last second, and the latest entry before it

  numOutputTokens = 0;

  /** @param {number} sentMs when the request was sent */
  constructor(sentMs) {
    this.#sentMs = sentMs;
  }

  /**
   * Records the number of tokens so far; the time counts only if it has grown.
   * @param {number} nowMs on the clock of `sentMs`
   * @param {number} numOutputTokens all of the answer so far
   */
  observe(nowMs, numOutputTokens) {
    if (numOutputTokens <= this.numOutputTokens) return;
    this.#firstMs ??= nowMs;
    this.#lastMs = nowMs;
    this.numOutputTokens = numOutputTokens;
    this.#recent.push([nowMs, numOutputTokens]);
    while (this.#recent.length > 2 && this.#recent[1][0] <= nowMs - RECENT_MS) this.#recent.shift();
  }

  /** Time to first token; null before it. */
  get ttftMs() {
    return this.#firstMs === null ? null : this.#firstMs - this.#sentMs;
  }

  /** Mean time per output token after the first (TPOT of docs/metrics.md); null without a second token. */
  get tpotMs() {
    return this.numOutputTokens < 2 ? null : (this.#lastMs - this.#firstMs) / (this.numOutputTokens - 1);
  }

  /** Output tokens per second of the whole request; null before the first. */
  get tokensPerSecond() {
    return this.#lastMs === null ? null : (1000 * this.numOutputTokens) / (this.#lastMs - this.#sentMs);
  }

  /** Tokens per second over the last second; null before the second token. */
  get recentTokensPerSecond() {
    if (this.#recent.length < 2) return null;
    const [[fromMs, from], [toMs, to]] = [this.#recent[0], this.#recent.at(-1)];
    return toMs > fromMs ? (1000 * (to - from)) / (toMs - fromMs) : null;
  }
}
