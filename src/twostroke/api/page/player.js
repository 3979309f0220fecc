/** Plays a recording: jumps to any step, goes step by step, or plays continuously. */
import { ask } from "./answer_stream.js";
import { el, setText } from "./dom.js";
import { key } from "./key.js";
import { whole } from "./words.js";

const FRAME_MS = 100;

export class Player {
  #recording;
  #show;
  #slider = el("input", { type: "range", min: "0", id: "player-step", "aria-label": "Step" });
  #play = el("button", { type: "button", id: "player-play" }, "Play");
  #speed = el("select", { "aria-label": "Speed" }, ...[1, 0.25, 4, 16].map((factor) => el("option", { value: String(factor) }, factor === 1 ? "original speed" : factor < 1 ? "4 times slower" : `${factor} times faster`)));
  #told = el("p", { role: "status", className: "hint" });
  #wanted = null;
  #isAsking = false;
  #timer = null;
  #timeS;

  /**
   * @param {object} state the first State; its `recording` describes the file
   * @param {function(object)} show receives each State
   */
  constructor(state, show) {
    this.#recording = state.recording;
    this.#timeS = state.time_s;
    this.#show = show;
    this.#slider.max = String(Math.max(0, state.recording.num_steps - 1));
    const back = el("button", { type: "button", id: "player-back" }, "Step back");
    const on = el("button", { type: "button", id: "player-on" }, "Step forward");
    back.addEventListener("click", () => this.#stepBy(-1));
    on.addEventListener("click", () => this.#stepBy(1));
    this.#play.addEventListener("click", () => this.#toggle());
    this.#slider.addEventListener("input", () => this.#goTo(Number(this.#slider.value)));
    const problem = el("p", { className: "trouble", role: "alert", hidden: !state.recording.problem }, state.recording.problem);
    this.element = el("div", { className: "panel player" }, el("p", {}, `A recording: ${state.recording.name}`), problem, el("div", { className: "actions" }, back, this.#play, on, this.#speed), this.#slider, this.#told);
    this.#showState(state);
  }

  get #step() {
    return Number(this.#slider.value);
  }

  #stepBy(number) {
    this.#pause();
    this.#goTo(Math.max(0, Math.min(Number(this.#slider.max), this.#step + number)));
  }

  #toggle() {
    if (this.#timer !== null) {
      this.#pause();
      return;
    }
    if (this.#step >= Number(this.#slider.max)) this.#slider.value = "0";
    setText(this.#play, "Pause");
    this.#told.setAttribute("aria-live", "off"); // ten announcements a second are too many
    this.#timer = setInterval(() => this.#playOn(), FRAME_MS);
  }

  #pause() {
    clearInterval(this.#timer);
    this.#timer = null;
    setText(this.#play, "Play");
    this.#told.setAttribute("aria-live", "polite");
  }

  /** Advance the recording by the time that has passed, times the speed; by at least one step. */
  #playOn() {
    if (this.#isAsking) return;
    if (this.#step >= Number(this.#slider.max)) this.#pause();
    else this.#ask(`live/state?after_s=${this.#timeS + (FRAME_MS / 1e3) * Number(this.#speed.value)}&least_step=${this.#step + 1}`);
  }

  #goTo(step) {
    this.#slider.value = String(step);
    this.#wanted = step;
    if (!this.#isAsking) this.#askWanted();
  }

  async #askWanted() {
    while (this.#wanted !== null) {
      const step = this.#wanted;
      this.#wanted = null;
      await this.#ask(`live/state?step=${step}`);
    }
  }

  async #ask(path) {
    this.#isAsking = true;
    try {
      const state = await (await ask(path, key())).json();
      if (this.#wanted === null) this.#showState(state);
    } catch (error) {
      this.#pause();
      setText(this.#told, error.message);
    } finally {
      this.#isAsking = false;
    }
  }

  #showState(state) {
    this.#timeS = state.time_s;
    this.#slider.value = String(state.recording.step);
    const { step, num_steps, first_s } = state.recording;
    const where = `${lastStep(state)}${whole(num_steps - 1 - step)} remaining`;
    const when = `${(state.time_s - first_s).toFixed(3)} s after the start`;
    this.#slider.setAttribute("aria-valuetext", where);
    setText(this.#told, num_steps === 0 ? "The recording has no steps." : `${where}, ${when}.`);
    this.#show(state);
  }
}

/** Return the latest step in words, by the number that its engine gave it. */
function lastStep({ engines, fields }) {
  const [number, atS] = ["step", "at_s"].map((name) => fields.step.indexOf(name));
  const known = Object.entries(engines).map(([place, { steps }]) => [place, steps.at(-1)]).filter(([, step]) => step);
  if (known.length === 0) return "";
  const [place, step] = known.reduce((latest, other) => (other[1][atS] > latest[1][atS] ? other : latest));
  return `Step ${step[number]}${Object.keys(engines).length > 1 ? ` of ${place}` : ""}, `;
}
