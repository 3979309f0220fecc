const RECENT_MS = 1000;

/** How fast an answer came, as whoever reads it sees it. */
export class Figures {
  #sentMs;
  #firstMs = null;
  #lastMs = null;
  #recent = []; // [ms, tokens so far] of the last second, and the one before it

  numOutputTokens = 0;

  /** @param {number} sentMs when the request was sent */
  constructor(sentMs) {
    this.#sentMs = sentMs;
  }

  /**
   * Notes how many tokens there are now; times are those of the last that was new.
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

  /** Time per output token after the first, as docs/metrics.md defines it; null where there is none. */
  get tpotMs() {
    return this.numOutputTokens < 2 ? null : (this.#lastMs - this.#firstMs) / (this.numOutputTokens - 1);
  }

  /** Output tokens per second of the whole request; null before the first. */
  get tokensPerSecond() {
    return this.#lastMs === null ? null : (1000 * this.numOutputTokens) / (this.#lastMs - this.#sentMs);
  }

  /** Tokens per second lately; null before the second. */
  get recentTokensPerSecond() {
    if (this.#recent.length < 2) return null;
    const [[fromMs, from], [toMs, to]] = [this.#recent[0], this.#recent.at(-1)];
    return toMs > fromMs ? (1000 * (to - from)) / (toMs - fromMs) : null;
  }
}
