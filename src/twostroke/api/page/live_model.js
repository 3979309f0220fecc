/** State of the server's engines, updated by deltas; no DOM, no clock. docs/page.md has the format. */

export const STATES = ["free", "used", "shared", "cached", "out of use", "held for a hand-over"];
const MAX_STEPS = 240;

/** A delta is missing; a new State is needed. */
export class OutOfStep extends Error {}

export class LiveModel {
  /** @param {object} state a "State" */
  constructor(state) {
    this.fields = state.fields;
    this.model = state.model;
    this.version = state.version;
    this.recording = state.recording;
    this.slo = state.slo;
    this.seq = state.seq;
    this.timeS = state.time_s;
    this.links = state.links;
    this.pools = state.pools;
    this.engines = new Map(Object.entries(state.engines).map(([place, engine]) => [place, new Engine(engine, this.fields)]));
  }

  /**
   * Applies a "Delta".
   * @throws {OutOfStep} an earlier delta is missing
   */
  apply(delta) {
    if (delta.seq !== this.seq + 1) throw new OutOfStep(`delta ${delta.seq} behind ${this.seq}`);
    this.seq = delta.seq;
    this.timeS = delta.time_s;
    this.links = delta.links ?? this.links;
    this.pools = delta.pools ?? this.pools;
    for (const [place, changes] of Object.entries(delta.engines)) {
      const engine = this.engines.get(place);
      if (changes.whole || !engine) this.engines.set(place, new Engine(changes, this.fields));
      else engine.apply(changes);
    }
  }

  /** Return the sum of a figure over all engines; null if none has it. */
  sum(name) {
    const known = [...this.engines.values()].map((engine) => engine.figures[name]).filter((value) => value !== null && value !== undefined);
    return known.length === 0 ? null : known.reduce((a, b) => a + b, 0);
  }
}

class Engine {
  constructor(engine, fields) {
    this.fields = fields;
    this.process = engine.process;
    this.lost = engine.lost;
    this.config = engine.config;
    this.steps = engine.steps.map((row) => named(fields.step, row));
    this.requests = new Map();
    this.rows = new Map();
    this.blocks = new Uint8Array(engine.config.num_blocks ?? 0);
    this.changed = null; // blocks changed since the map was drawn; null: all
    this.written = engine.blocks.written;
    let first = 0;
    for (const [state, number] of engine.blocks.runs) {
      this.blocks.fill(state, first, first + number);
      first += number;
    }
    for (const [id, rows] of Object.entries(engine.rows)) this.rows.set(id, rows.map(([held, ids]) => ({ held, ids })));
    this.#setFigures(engine);
    this.#setRequests(engine.requests);
  }

  apply(changes) {
    if ("lost" in changes) this.lost = changes.lost;
    this.#setFigures(changes);
    for (const row of changes.steps) this.#setStep(named(this.fields.step, row));
    for (const [id, parts] of Object.entries(changes.rows)) this.#grow(id, parts);
    this.#setRequests(changes.requests);
    for (const id of changes.gone) {
      this.requests.delete(id);
      this.rows.delete(id);
    }
    if (changes.blocks) this.#setBlocks(changes.blocks);
  }

  /** Return the number of blocks in each state. */
  counts() {
    const counts = STATES.map(() => 0);
    for (const state of this.blocks) counts[state] += 1;
    return counts;
  }

  /** Return the owners of a block: [request, KV group, entry of its row]. */
  ownersOf(block) {
    const owners = [];
    for (const [id, rows] of this.rows) {
      rows.forEach(({ held, ids }, group) => {
        const entry = ids.indexOf(block, held);
        if (entry >= 0) owners.push({ id, group, entry });
      });
    }
    return owners;
  }

  /** Return all blocks of a request. */
  blocksOf(id) {
    return (this.rows.get(id) ?? []).flatMap(({ held, ids }) => ids.slice(held));
  }

  #setFigures(from) {
    this.figures = from.figures;
    this.waitingByReason = from.waiting_by_reason;
    this.histograms = from.histograms;
  }

  #setStep(step) {
    const place = this.steps.findLastIndex((known) => known.step <= step.step);
    if (place >= 0 && this.steps[place].step === step.step) this.steps[place] = step;
    else this.steps.splice(place + 1, 0, step);
    if (this.steps.length > MAX_STEPS) this.steps.splice(0, this.steps.length - MAX_STEPS);
  }

  #setRequests(rows) {
    for (const row of rows) {
      const request = named(this.fields.request, row);
      this.requests.set(request.id, request);
      if (request.state !== "running") this.rows.delete(request.id);
    }
  }

  #grow(id, parts) {
    const rows = this.rows.get(id) ?? parts.map(() => ({ held: 0, ids: [] }));
    parts.forEach(([start, held, ids], group) => {
      const row = rows[group];
      while (row.ids.length < start) row.ids.push(0);
      row.ids.length = start;
      for (const block of ids) row.ids.push(block);
      row.held = held;
    });
    this.rows.set(id, rows);
  }

  #setBlocks({ set, written }) {
    const touched = [...this.written, ...written];
    this.written = written;
    for (const [first, number, state] of set) {
      this.blocks.fill(state, first, first + number);
      for (let block = first; block < first + number; block += 1) touched.push(block);
    }
    // without drawing, the set would grow: mark all instead
    if (this.changed !== null) this.changed = this.changed.length > this.blocks.length ? null : this.changed.concat(touched);
  }
}

/** Return an array as an object, by the names of its columns. */
function named(names, row) {
  const found = {};
  names.forEach((name, i) => {
    found[name] = row[i];
  });
  return found;
}
