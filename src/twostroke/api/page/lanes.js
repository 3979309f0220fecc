/** The requests of the last seconds, one lane each: queued, prefill, decode. */
import { chooser, colour, el, panel, sized } from "./dom.js";
import { LanePointer } from "./lane_pointer.js";
import { ms, short } from "./words.js";

const LANE = 14;
const MOST_LANES = 24;
const SPANS_S = [1, 2, 5, 15];
const WHY = {
  queued: ": not scheduled yet. The step chart shows what the queue waits for.",
  prefill: ": the prompt is computed.",
  decode: ": one token per step, or more with drafts. Click for the reason of each delay.",
};
const LONGEST_S = SPANS_S.at(-1);

export class Lanes {
  #canvas = chooser("Requests of the last seconds; arrow keys choose a piece");
  #pointer = new LanePointer(this.#canvas, LANE, () => this.#shown && this.show(...this.#shown));
  #lanes = [];
  #shown = null; // latest arguments of show()

  /** @param {function(string)} follow receives the request that was clicked */
  constructor(follow) {
    const legend = el("p", { className: "legend" }, ...["queued", "prefill", "decode"].map((name) => el("span", { className: `mark ${name}` }, name)));
    this.element = panel("lanes", "Recent requests", legend, el("div", { className: "drawing" }, this.#canvas), this.#pointer.line);
    this.#canvas.addEventListener("click", (event) => {
      const request = this.#lanes[Math.floor(event.offsetY / LANE)];
      if (request) follow(request.id);
    });
  }

  /**
   * @param {object} engine of the model
   * @param {number} nowS
   * @param {string|null} followed
   */
  show(engine, nowS, followed) {
    this.#shown = [engine, nowS, followed];
    const recent = [...engine.requests.values()].filter(({ arrival_s, finish_s }) => arrival_s !== null && (finish_s ?? nowS) > nowS - LONGEST_S);
    recent.sort((a, b) => a.arrival_s - b.arrival_s);
    this.#lanes = recent.slice(-MOST_LANES);
    const oldestS = nowS - Math.min(nowS, ...this.#lanes.map(({ arrival_s }) => arrival_s));
    const spanS = SPANS_S.find((span) => span >= oldestS) ?? LONGEST_S;
    const begin = nowS - spanS;
    const { context, width, height } = sized(this.#canvas, Math.max(1, this.#lanes.length) * LANE + 14);
    const x = (s) => Math.max(0, ((s - begin) / spanS) * width);
    context.font = "10px system-ui, sans-serif";
    const lanes = this.#lanes.map((request, i) => {
      const pieces = [];
      const y = i * LANE;
      const end = request.finish_s ?? nowS;
      const scheduled = request.scheduled_s ?? end;
      const first = request.first_token_s ?? end;
      for (const [name, from, to] of [["queued", request.arrival_s, Math.min(scheduled, end)], ["prefill", scheduled, Math.min(first, end)], ["decode", first, end]]) {
        if (to <= from || to <= begin) continue;
        context.fillStyle = colour(`lane-${name}`);
        context.fillRect(x(from), y + 2, Math.max(1, x(to) - x(from)), LANE - 4);
        pieces.push({ from: x(from), to: x(to), words: `${name}, ${ms(1e3 * (to - from))}${WHY[name]}` });
      }
      if (request.id === followed) {
        context.strokeStyle = colour("ink");
        context.strokeRect(Math.max(0.5, x(request.arrival_s)), y + 1, Math.max(2, x(end) - x(request.arrival_s)) - 1, LANE - 2);
      }
      return { id: short(request.id), pieces };
    });
    context.fillStyle = colour("quiet");
    for (const part of [0, 0.5, 1]) {
      const at = width - part * width;
      context.fillText(part === 0 ? "now" : `−${part * spanS} s`, Math.max(0, Math.min(width - 26, at - 10)), height - 3);
    }
    const words = this.#lanes.length === 0 ? "No requests in this period." : `${this.#lanes.length} of ${recent.length} requests are drawn; the latest is ${short(this.#lanes.at(-1).id)}.`;
    this.#pointer.drawn(context, lanes, words);
  }
}
