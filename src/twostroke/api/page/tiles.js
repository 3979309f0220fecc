/** Tiles with the current figures. */
import { el, panel, setText } from "./dom.js";
import { ms, percent, whole } from "./words.js";

const TILES = [
  ["running", "Running", "sequences that hold KV blocks and are computed step by step"],
  ["waiting", "Waiting", "sequences in the queue, including preempted ones"],
  ["preempted", "Preempted", "waiting sequences that lost their KV blocks / number of preemptions since the start"],
  ["prefill", "Prefill", "prompt tokens computed per second"],
  ["decode", "Decode", "output tokens generated per second"],
  ["kv", "KV use", "share of the KV blocks that running sequences hold"],
  ["hits", "Cache hits", "share of the prompt tokens that were found in the prefix cache"],
  ["step", "Step time", "mean of the last 20 steps; with pools, of the working process with the longest"],
  ["floor", "Step floor", "shortest possible time for these steps on this machine: the longer of arithmetic and memory; an estimate if other work disturbed the measurement of the machine"],
];

export class Tiles {
  #values = {};

  constructor() {
    const tiles = TILES.map(([name, title, help]) => {
      this.#values[name] = el("dd", { id: `tile-${name}` }, "–");
      return el("div", {}, el("dt", {}, el("abbr", { title: help }, title)), this.#values[name]);
    });
    this.element = panel("tiles", "Now", el("dl", { className: "figures" }, ...tiles));
  }

  /** @param {LiveModel} model */
  show(model) {
    const set = (name, text) => setText(this.#values[name], text);
    const engines = [...model.engines.values()];
    for (const name of ["running", "waiting"]) set(name, whole(model.sum(name) ?? 0));
    set("preempted", `${whole(model.sum("preempted") ?? 0)} / ${whole(model.sum("num_preemptions") ?? 0)}`);
    set("prefill", `${whole(model.sum("prefill_tokens_per_s") ?? 0)} tok/s`);
    set("decode", `${whole(model.sum("decode_tokens_per_s") ?? 0)} tok/s`);
    set("kv", engines.length === 0 ? "–" : percent(Math.max(...engines.map((engine) => engine.figures.kv_usage))));
    const asked = model.sum("cache_queries");
    set("hits", asked ? percent(model.sum("cache_hits") / asked) : "–");
    const longest = longestSteps(engines.map((engine) => engine.figures));
    set("step", ms(longest?.step_ms ?? null));
    const estimate = engines.some((engine) => engine.config?.floors_are_estimates) ? " (estimate)" : "";
    set("floor", longest?.floor_ms == null ? ms(null) : ms(longest.floor_ms) + estimate);
  }
}

/** Return the figures of the engine with the longest step, among those that work now, or among all if none does. */
function longestSteps(all) {
  const known = all.filter(({ step_ms }) => step_ms !== null);
  const working = known.filter((figures) => figures.prefill_tokens_per_s + figures.decode_tokens_per_s > 0);
  const shown = working.length > 0 ? working : known;
  return shown.toSorted((a, b) => b.step_ms - a.step_ms)[0];
}
