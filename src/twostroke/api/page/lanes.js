/** The last seconds, a lane per request: in the queue, its prefill, its decode. */
import { chooser, colour, el, panel, sized } from "./dom.js";
import { LanePointer } from "./lane_pointer.js";
import { ms, short } from "./words.js";

const LANE = 14;
const MOST_LANES = 24;
const SPANS_S = [1, 2, 5, 15];
const WHY = {
  queued: ": not scheduled yet; Steps say why the queue waits.",
  prefill: ": its prompt is computed.",
  decode: ": a token a step, or more with drafts; a click tells what each step waited for.",
};
const LONGEST_S = SPANS_S.at(-1);

export class Lanes {
  #canvas = chooser("Requests of the last seconds; arrow keys choose a piece");
  #pointer = new LanePointer(this.#canvas, LANE, () => this.#shown && this.show(...this.#shown));
  #lanes = [];
  #shown = null; // what was shown last

  /** @param {function(string)} follow is told of the request that was clicked */
  constructor(follow) {
    const legend = el("p", { className: "legend" }, ...["queued", "prefill", "decode"].map((name) => el("span", { className: `mark ${name}` }, name)));
    this.element = panel("lanes", "The last seconds", legend, el("div", { className: "drawing" }, this.#canvas), this.#pointer.line);
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
    const words = this.#lanes.length === 0 ? "Nobody was here." : `${this.#lanes.length} of ${recent.length} requests are drawn, the last ${short(this.#lanes.at(-1).id)}.`;
    this.#pointer.drawn(context, lanes, words);
  }
}
