/** Chooses a piece of a lane, by pointer or arrow keys, and describes it in a line below the canvas. */
import { choose, colour, el, setText } from "./dom.js";

const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

export class LanePointer {
  #canvas;
  #laneHeight;
  #draw;
  #lanes = [];
  #chosen = null; // [id of the lane, number of the piece]
  #idle = "";

  /** Line of text below the canvas. It is not announced, because it changes while lanes grow; the canvas announces choices. */
  line = el("p", { className: "hint told" });

  /**
   * @param {HTMLCanvasElement} canvas a chooser, with its lanes from y 0 on
   * @param {number} laneHeight in CSS pixels
   * @param {function()} draw redraws the lanes
   */
  constructor(canvas, laneHeight, draw) {
    this.#canvas = canvas;
    this.#laneHeight = laneHeight;
    this.#draw = draw;
    canvas.addEventListener("mousemove", (event) => this.#point(event.offsetX, event.offsetY));
    canvas.addEventListener("mouseleave", () => this.#choose(null));
    canvas.addEventListener("keydown", (event) => this.#move(event));
  }

  /**
   * Takes the lanes that were drawn; call it after drawing.
   * @param {CanvasRenderingContext2D} context
   * @param {{id: string, pieces: {from: number, to: number, words: string}[]}[]} lanes from and to in CSS pixels
   * @param {string} idle text while nothing is chosen
   */
  drawn(context, lanes, idle) {
    this.#lanes = lanes;
    this.#idle = idle;
    const { place, number } = this.#found();
    const piece = lanes[place]?.pieces[number];
    if (piece) {
      context.strokeStyle = colour("ink");
      context.strokeRect(piece.from - 0.5, place * this.#laneHeight + 0.5, Math.max(2, piece.to - piece.from) + 1, this.#laneHeight - 1);
    }
    setText(this.line, piece ? `${lanes[place].id}: ${piece.words}` : idle);
  }

  /** Return the current position of the chosen piece, since lanes are added, removed and extended. */
  #found() {
    const [id, number] = this.#chosen ?? [null, 0];
    const place = this.#lanes.findIndex((lane) => lane.id === id);
    return { place, number: Math.min(number, (this.#lanes[place]?.pieces.length ?? 1) - 1) };
  }

  #choose(chosen) {
    this.#chosen = chosen;
    this.#draw();
    const { place } = this.#found();
    choose(this.#canvas, Math.max(0, place), 0, Math.max(0, this.#lanes.length - 1), this.line.textContent);
  }

  #point(x, y) {
    const lane = this.#lanes[Math.floor(y / this.#laneHeight)];
    // pieces may be narrower than a pixel: take the nearest
    const away = ({ from, to }) => Math.max(from - x, x - to, 0);
    const number = (lane?.pieces ?? []).reduce((best, piece, i, all) => (best < 0 || away(piece) < away(all[best]) ? i : best), -1);
    this.#choose(number < 0 ? null : [lane.id, number]);
  }

  #move(event) {
    const step = STEPS[event.key];
    if (event.key === "Escape") this.#choose(null);
    if (!step || this.#lanes.length === 0) return;
    event.preventDefault();
    const { place, number } = this.#found();
    if (place < 0) return this.#choose([this.#lanes[0].id, 0]);
    const within = (value, length) => Math.max(0, Math.min(length - 1, value));
    const lane = this.#lanes[within(place + step[0], this.#lanes.length)];
    this.#choose([lane.id, step[0] ? 0 : within(number + step[1], lane.pieces.length)]);
  }
}
