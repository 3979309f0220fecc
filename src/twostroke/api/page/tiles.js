/** The tiles: how it is, in ten numbers. */
import { el, panel, setText } from "./dom.js";
import { ms, percent, whole } from "./words.js";

const TILES = [
  ["running", "Running", "sequences that hold KV blocks and are computed step by step"],
  ["waiting", "Waiting", "sequences in the queue, those that were preempted included"],
  ["preempted", "Preempted", "of those that wait: had to give their blocks back. Behind the stroke: how often it happened"],
  ["prefill", "Prefill", "prompt tokens computed per second: the first stroke"],
  ["decode", "Decode", "tokens made per second: the second stroke"],
  ["kv", "KV use", "share of the KV blocks that running sequences hold"],
  ["hits", "Prefix hits", "share of the prompt tokens looked up in the prefix cache that were found there"],
  ["step", "Step", "mean of the last twenty steps; where there are pools, of the process that works and has the longest"],
  ["floor", "Its floor", "the shortest time in which this machine can do the same: the longer of arithmetic and memory; an estimate where other work disturbed the measurement of the machine"],
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

/** Of those that work now, or of all where none does. */
function longestSteps(all) {
  const known = all.filter(({ step_ms }) => step_ms !== null);
  const working = known.filter((figures) => figures.prefill_tokens_per_s + figures.decode_tokens_per_s > 0);
  const shown = working.length > 0 ? working : known;
  return shown.toSorted((a, b) => b.step_ms - a.step_ms)[0];
}
