/** The live view: draws what changed, when the browser is ready for a frame. */
import { ask } from "./answer_stream.js";
import { BlockMap } from "./block_map.js";
import { el, setText } from "./dom.js";
import { Histograms } from "./histograms.js";
import { key } from "./key.js";
import { Lanes } from "./lanes.js";
import { LiveFeed, pause } from "./live_feed.js";
import { LiveModel, OutOfStep } from "./live_model.js";
import { Player } from "./player.js";
import { ProcessTable } from "./process_table.js";
import { RequestTable } from "./request_table.js";
import { saveAsFile } from "./saved_file.js";
import { StepsChart } from "./steps_chart.js";
import { Tiles } from "./tiles.js";
import { TimelineView } from "./timeline_view.js";
import { currentView, goTo, offer } from "./views.js";

const TICK_MS = 250; // between updates of the clock while no message arrives
const TABLES_EVERY_MS = 200; // tables take longer to draw than canvases, and are read more slowly
const MOST_HELD = 600; // frames that are kept while the view is frozen: a minute

const view = document.getElementById("live");
const title = el("p", { id: "live-model" });
const trouble = el("p", { className: "trouble", role: "alert", hidden: true });
const freeze = el("button", { type: "button", id: "freeze", "aria-pressed": "false" }, "Freeze");
const saveTrace = el("button", { type: "button" }, "Save trace");
const saveEvents = el("button", { type: "button" }, "Save last minutes");
const said = el("p", { className: "hint", role: "status" });
const places = el("fieldset", { className: "modes", hidden: true });
const parts = {
  tiles: new Tiles(),
  steps: new StepsChart(),
  blocks: new BlockMap(follow),
  requests: new RequestTable(follow),
  lanes: new Lanes(follow),
  timeline: new TimelineView(follow),
  histograms: new Histograms(),
  processes: new ProcessTable(),
};

let model = null;
let place = null; // the engine whose steps and blocks are shown
let followed = null; // id of the selected sequence
let awaited = null; // name of a request to select when it appears
let held = null; // work of frames that arrived while the view is frozen; null: not frozen
let nowS = 0; // on the engine's clock
let heardMs = 0; // on the browser's clock, when the engine's time last arrived
let ticker = null;
let isDrawing = false;
let tablesDrawnMs = 0;
let tablesTimer = null;

window.twostrokeFrames = 0; // frames drawn so far, for benchmarks

/**
 * Selects a request, by the id of its answer, as soon as it appears.
 * @param {string} name
 */
export function followByName(name) {
  if (held) toggleFreeze();
  awaited = name;
  goTo("live"); // this fetches a State
  draw();
}

function follow(id) {
  followed = id;
  if (awaited) setText(said, "");
  awaited = null;
  tablesDrawnMs = 0;
  draw();
}

function draw() {
  if (isDrawing || !model) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    if (currentView() !== "live") return;
    drawNow();
    window.twostrokeFrames += 1;
  });
}

function drawNow() {
  showPlaces();
  drawTables();
  const engine = model.engines.get(place);
  setText(title, `${model.model}, Twostroke ${model.version}${engine ? `, ${engine.lost ? `stopped: ${engine.lost}` : engine.process}` : ""}`);
  if (!engine || !engine.config.num_blocks) return;
  if (awaited) findAwaited();
  parts.steps.show(engine);
  parts.blocks.show(engine, followed);
  parts.lanes.show(engine, nowS, followed);
  parts.timeline.show(engine, followed, model.recording !== null);
}

/** Draw the tables, at most every TABLES_EVERY_MS. */
function drawTables() {
  const waitMs = tablesDrawnMs + TABLES_EVERY_MS - performance.now();
  if (waitMs > 0 && !model.recording) {
    tablesTimer ??= setTimeout(() => { tablesTimer = null; draw(); }, waitMs);
    return;
  }
  clearTimeout(tablesTimer);
  tablesTimer = null;
  tablesDrawnMs = performance.now();
  const engine = model.engines.get(place);
  parts.tiles.show(model);
  parts.histograms.show(model);
  parts.processes.show(model);
  if (engine) parts.requests.show(engine, nowS, followed);
}

function findAwaited() {
  for (const [name, engine] of model.engines) {
    for (const id of engine.requests.keys()) {
      if (id !== awaited && !id.startsWith(`${awaited}#`)) continue;
      [followed, place, awaited] = [id, name, null];
      setText(said, "");
      return;
    }
  }
}

/** Explain a request that has left the table; the server keeps timelines for longer. */
function followUnseen() {
  followed = awaited;
  const where = "Its timeline is shown below if the server still has it.";
  setText(said, `${awaited} is not in the table: it ended some time ago. ${where}`);
}

/** Show the choice of a process if there are several. */
function showPlaces() {
  const names = [...model.engines.keys()].sort();
  if (!names.includes(place)) place = names[0] ?? null;
  places.hidden = names.length < 2;
  const known = [...places.querySelectorAll("input")].map((input) => input.value);
  if (known.join() === names.join()) return;
  const radios = names.map((name) => el("label", {}, el("input", { type: "radio", name: "place", value: name, checked: name === place }), ` ${name}`));
  places.replaceChildren(el("legend", {}, "Show steps and blocks of"), ...radios);
}

function showState(state, cameMs) {
  model = new LiveModel(state);
  setTime(cameMs);
  draw();
}

function setTime(cameMs) {
  nowS = model.timeS;
  heardMs = cameMs;
}

/** Advance the time by the browser's clock between frames, while the view is visible and the engine reports. */
function keepTime() {
  const goesOn = currentView() === "live" && !document.hidden && !held && trouble.hidden && model && !model.recording;
  if (!goesOn) {
    clearInterval(ticker);
    ticker = null;
  } else ticker ??= setInterval(tick, TICK_MS);
}

function tick() {
  const sinceMs = performance.now() - heardMs;
  if (sinceMs < TICK_MS) return;
  nowS = model.timeS + sinceMs / 1e3;
  draw();
}

/** Keep work for later while the view is frozen. */
function take(change) {
  const cameMs = performance.now();
  if (!held) change(cameMs);
  else if (held.push(() => change(cameMs)) > MOST_HELD) held.shift();
}

const feed = new LiveFeed({
  state(state) {
    if (held) held = []; // this State includes everything that came before
    take((cameMs) => {
      showState(state, cameMs);
      if (awaited) findAwaited();
      if (awaited) followUnseen();
      keepTime();
    });
    document.dispatchEvent(new Event("server")); // it may be a different server
  },
  delta: (delta) => take((cameMs) => apply(delta, cameMs)),
  trouble: tellTrouble,
});

function tellTrouble(words) {
  trouble.hidden = words === "";
  setText(trouble, words);
  keepTime();
}

function apply(delta, cameMs) {
  try {
    model.apply(delta);
    setTime(cameMs);
    draw();
  } catch (error) {
    if (!(error instanceof OutOfStep)) throw error;
    feed.restart();
  }
}

function toggleFreeze() {
  const changes = held;
  held = held ? null : [];
  freeze.setAttribute("aria-pressed", String(held !== null));
  setText(freeze, held ? "Resume" : "Freeze");
  if (changes && changes.length >= MOST_HELD) feed.restart();
  else changes?.forEach((change) => change());
  openIfSeen(); // the feed may have been closed while the view was frozen
}

async function save(path, name) {
  try {
    setText(said, "Reading …");
    await saveAsFile(path, name);
    setText(said, `Saved as ${name}.`);
  } catch (error) {
    setText(said, error.message);
  }
}

/** Show a recording: it has no model, so no playground, and no feed. */
async function begin() {
  const state = await firstState();
  if (!state.recording) return;
  offer("playground", false);
  freeze.hidden = true;
  view.firstElementChild.after(new Player(state, showState).element);
}

/** Ask what the server is, since that decides what to show. */
async function firstState() {
  for (let failures = 0; ; failures += 1) {
    try {
      const state = await (await ask("live/state", key())).json();
      tellTrouble("");
      return state;
    } catch (error) {
      tellTrouble(`${error.message} Trying again …`);
      await pause(failures);
    }
  }
}

const actions = el("div", { className: "actions" }, freeze, saveTrace, saveEvents);
const top = el("div", { className: "panel" }, title, trouble, actions, said, places);
view.append(top, ...["tiles", "processes", "steps", "blocks", "requests", "lanes", "timeline", "histograms"].map((name) => parts[name].element));
saveTrace.addEventListener("click", () => save("v1/trace", "twostroke-trace.json"));
saveEvents.addEventListener("click", () => save("flight_recorder", "twostroke-flight.jsonl"));
places.addEventListener("change", (event) => {
  place = event.target.value;
  draw();
});
document.getElementById("key").addEventListener("change", () => feed.restart());
document.addEventListener("scheme", draw);
document.addEventListener("visibilitychange", keepTime);
addEventListener("resize", draw);
function openIfSeen() {
  if (currentView() !== "live" || model?.recording) feed.close();
  else if (!held) feed.open(); // a frozen view stays as it is; "Resume" opens the feed
  keepTime();
  draw();
}
begin().then(() => {
  freeze.addEventListener("click", toggleFreeze);
  document.addEventListener("view", openIfSeen);
  openIfSeen();
});
