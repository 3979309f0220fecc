/** Chart of the steps: tokens by kind as stacked bars, time and budget as lines, and the limit of each step. */
import { choose, chooser, colour, el, panel, setText, sized } from "./dom.js";
import { ms, short, whole } from "./words.js";

const HEIGHT = 190;
const FOOT = 16;
/** Limits of the steps: the row below the bars. */
const LIMITED_BY = [["tokens", "token budget"], ["seqs", "slots"], ["kv", "KV blocks"]];
const LIMITS = { tokens: "the token budget was used up", seqs: "every slot was taken", kv: "no KV blocks were left", none: "no other request waited" };
const PARTS = [
  ["decode", "decode"],
  ["prefill", "prefill chunk"],
  ["drafts", "drafts"],
  ["cached", "cached, skipped"],
];

export class StepsChart {
  #canvas = chooser("Steps; arrow keys choose one, Escape returns to the latest");
  #told = el("p", { id: "step-told", className: "hint" }); // not announced: it changes with each step
  #steps = [];
  #engine = null;
  #chosen = null; // a step's number; null: the last one

  constructor() {
    const legend = el("p", { className: "legend" }, ...PARTS.map(([name, title]) => el("span", { className: `mark ${name}` }, title)), el("span", { className: "mark step-ms" }, "step time"), el("span", {}, "limited by:"), ...LIMITED_BY.map(([name, title]) => el("span", { className: `mark limit-${name}` }, title)));
    this.element = panel("steps", "Steps: tokens and time", legend, el("div", { className: "drawing" }, this.#canvas), this.#told);
    this.#canvas.addEventListener("mousemove", (event) => this.#choose(this.#at(event.offsetX)));
    this.#canvas.addEventListener("mouseleave", () => this.#choose(null));
    this.#canvas.addEventListener("keydown", (event) => this.#move(event));
  }

  /** @param {object} engine of the model */
  show(engine) {
    this.#engine = engine;
    this.#steps = engine.steps;
    this.#draw();
    this.#tell();
  }

  #barWidth(width) {
    return Math.max(2, Math.min(12, (width - 8) / Math.max(60, this.#steps.length)));
  }

  #visible(width) {
    return this.#steps.slice(-Math.floor((width - 8) / this.#barWidth(width)));
  }

  #draw() {
    const { context, width } = sized(this.#canvas, HEIGHT);
    const steps = this.#visible(width);
    const bar = this.#barWidth(width);
    // skipped tokens may be far more than computed ones, and are cut off at the top
    const most = Math.max(1, ...steps.map((step) => step.decode + step.prefill + step.drafts));
    const longest = Math.max(1e-3, ...steps.map((step) => step.ms ?? 0));
    const height = HEIGHT - FOOT;
    const budgets = steps.map((step) => step.budget || this.#engine.config.max_num_batched_tokens);
    const inReach = budgets.filter((budget) => budget <= 1.5 * most);
    const scale = (height - 14) / Math.max(most, ...inReach);
    steps.forEach((step, i) => {
      let y = height;
      for (const [name] of PARTS) {
        if (!step[name]) continue;
        const size = Math.min(y - 13, Math.max(1, step[name] * scale));
        if (size <= 0) continue;
        context.fillStyle = colour(`part-${name}`);
        context.globalAlpha = name === "cached" ? 0.45 : 1;
        context.fillRect(4 + i * bar, y - size, Math.max(1, bar - 1), size);
        y -= size;
      }
      context.globalAlpha = 1;
      context.fillStyle = step.limit === "none" ? colour("line") : colour(`limit-${step.limit}`);
      context.fillRect(4 + i * bar, height + 3, Math.max(1, bar - 1), 4);
      if (step.step === this.#chosen) {
        context.strokeStyle = colour("ink");
        context.strokeRect(3.5 + i * bar, 0.5, bar, height);
      }
    });
    context.strokeStyle = colour("alarm");
    context.setLineDash([5, 4]);
    line(context, budgets.flatMap((budget, i) => [0, 1].map((end) => [4 + (i + end) * bar, budget <= 1.5 * most ? height - budget * scale : null])));
    context.setLineDash([]);
    context.strokeStyle = colour("ink");
    context.lineWidth = 1.25;
    line(context, steps.map((step, i) => [4 + (i + 0.5) * bar, step.ms === null ? null : height - (step.ms / longest) * (height - 14)]));
    context.fillStyle = colour("quiet");
    context.font = "11px system-ui, sans-serif";
    const scales = `${whole(most)} tokens; line: up to ${ms(longest)}`;
    const [least, largest] = [Math.min(...budgets), Math.max(...budgets)];
    const budget = least === largest ? whole(least) : `${whole(least)} to ${whole(largest)}`;
    const more = steps.length === 0 ? scales : `${scales}; budget ${budget} tokens${inReach.length > 0 ? " (dashed)" : ", outside the chart"}`;
    context.fillText(context.measureText(more).width < width - 8 ? more : scales, 4, 10);
  }

  #at(x) {
    const width = this.#canvas.parentElement.clientWidth;
    return this.#visible(width)[Math.floor((x - 4) / this.#barWidth(width))]?.step ?? null;
  }

  #choose(step) {
    if (step === this.#chosen) return;
    this.#chosen = step;
    if (this.#engine) this.show(this.#engine);
  }

  #move(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.#choose(null);
    if (!by || this.#steps.length === 0) return;
    event.preventDefault();
    const place = this.#chosen === null ? this.#steps.length : this.#steps.findIndex((step) => step.step === this.#chosen);
    this.#choose(this.#steps[Math.max(0, Math.min(this.#steps.length - 1, place + by))].step);
  }

  #tell() {
    const step = this.#steps.find(({ step }) => step === this.#chosen) ?? this.#steps.at(-1);
    const words = step ? stepInWords(step) : "No steps yet.";
    setText(this.#told, words);
    if (step?.step !== this.#chosen) choose(this.#canvas, 0, 0, 0, "the latest step");
    else choose(this.#canvas, step.step, this.#steps[0].step, this.#steps.at(-1).step, words);
  }
}

/** Return one step in words. */
export function stepInWords(step) {
  const tokens = PARTS.filter(([name]) => step[name]).map(([name, title]) => `${whole(step[name])} ${title}`).join(", ");
  const floor = step.floor_ms === null ? "" : `, floor ${ms(step.floor_ms)} (bound by ${step.bound})`;
  const time = step.ms === null ? "still running" : `${ms(step.ms)}${floor}`;
  const wait = step.wait ? ` ${whole(step.num_waiting)} waiting: ${step.wait}.` : "";
  const preempted = step.preempted.length > 0 ? ` Preempted: ${step.preempted.map(short).join(", ")}.` : "";
  return `Step ${step.step}: ${tokens || "no tokens"}; ${time}; ${step.num_running} running; ${LIMITS[step.limit]}.${wait}${preempted}`;
}

/** Draw a line through points, with a gap where one is unknown. */
function line(context, points) {
  context.beginPath();
  let isDown = false;
  for (const [x, y] of points) {
    if (y === null) isDown = false;
    else if (isDown) context.lineTo(x, y);
    else {
      context.moveTo(x, y);
      isDown = true;
    }
  }
  context.stroke();
}
