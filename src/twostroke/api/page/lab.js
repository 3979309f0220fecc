/** The lab: the same workload under two settings, side by side. */
import { ask } from "./answer_stream.js";
import { el, panel, setText } from "./dom.js";
import { key } from "./key.js";
import { sidesOf } from "./lab_sides.js";
import { pause } from "./live_feed.js";
import { currentView } from "./views.js";

const ASK_EVERY_MS = 400;

const view = document.getElementById("lab");
const problem = el("p", { className: "trouble", role: "alert", hidden: true });
const status = el("p", { role: "status" });
const progress = el("progress", { max: 1, value: 0, hidden: true, "aria-label": "Progress of the experiment" });
const stop = el("button", { type: "button", hidden: true }, "Stop");
const result = el("div");
let offers = null;
let isOpening = false;
let isAsking = false;
let starting = Promise.resolve(); // settles when the server has answered the latest request for an experiment
let shown = ""; // id of the result on the page

async function open() {
  if (currentView() !== "lab" || isOpening) return;
  if (offers) return watch(); // another page may have begun an experiment
  isOpening = true;
  view.replaceChildren(problem);
  try {
    offers = await persistently("lab");
    build();
    tell("");
    watch();
  } catch (error) {
    tell(error.message);
  } finally {
    isOpening = false;
  }
}

/** Asks until there is an answer; shows a message while the server cannot be reached. */
async function persistently(path) {
  let sinceWhen = "";
  for (let failures = 0; ; failures += 1) {
    try {
      const answer = await (await ask(path, key())).json();
      if (sinceWhen) tell("");
      return answer;
    } catch (error) {
      if (error.status >= 400 && error.status < 500) throw error; // the same question would fail again
      shown = ""; // a restarted server counts its experiments from 1 again
      sinceWhen ||= new Date().toLocaleTimeString("en-GB");
      tell(`${error.message} No data since ${sinceWhen}; trying again …`);
      await pause(failures);
    }
  }
}

function build() {
  const cards = offers.stories.map((story, i) => {
    const run = el("button", { type: "button", className: "primary", dataset: { story: story.name }, "aria-label": `Run: ${story.title}` }, "Run");
    run.addEventListener("click", () => start({ story: story.name }, tellInSight));
    return el("article", { className: "card" }, el("h3", {}, `${i + 1}. ${story.title}`), el("p", {}, story.question), el("p", { className: "hint" }, `${story.a_title} against ${story.b_title}; figure: ${story.figure_title}`), run);
  });
  const stories = panel("stories", "Six prepared experiments", el("p", { className: "hint" }, "Each runs the same requests under two settings, alternately and several times. It takes about a minute, and uses the small model that ships with Twostroke, in separate processes. The server continues to serve; its requests and the experiment compete for processor time."), el("div", { className: "cards" }, ...cards));
  view.replaceChildren(problem, stories, panel("experiment", "The experiment", status, el("div", { className: "actions" }, progress, stop), result), ownExperiment());
}

/** Return the form for an experiment of one's own: two settings, and a workload. */
function ownExperiment() {
  const sides = ["a", "b"].map((side) => el("fieldset", { dataset: { side } }, el("legend", {}, `Side ${side.toUpperCase()}`), ...offers.switches.map((choice) => el("label", {}, `${choice.title} `, switchField(choice)))));
  const workload = el("fieldset", { dataset: { side: "workload" } }, el("legend", {}, "Workload"), ...Object.entries(offers.workload).map(([name, value]) => el("label", {}, `${name} `, workloadField(name, value))));
  const refused = el("p", { className: "trouble", role: "alert", hidden: true });
  const form = el("form", { noValidate: true }, el("div", { className: "cards" }, ...sides, workload), el("div", { className: "actions" }, el("button", { type: "submit", className: "primary" }, "Run both")), refused);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const say = (words) => {
      refused.hidden = words === "";
      setText(refused, words);
    };
    try {
      start(Object.fromEntries([...form.querySelectorAll("fieldset")].map((part) => [part.dataset.side, valuesOf(part)])), say);
    } catch (error) {
      say(error.message);
    }
  });
  return panel("switches", "Your own experiment", el("p", { className: "hint" }, "Empty fields use the server's defaults."), form);
}

function switchField({ name, values, most }) {
  if (values.length === 0) return el("input", { type: "number", name, min: "1", max: String(most), placeholder: "default" });
  return el("select", { name }, ...values.map((value) => el("option", { value: JSON.stringify(value) }, value === true ? "on" : value === false ? "off" : value)));
}

function workloadField(name, value) {
  if (name === "prompts") return el("select", { name }, ...["code", "edit", "shared"].map((kind) => el("option", { value: JSON.stringify(kind) }, kind)));
  return el("input", { type: "number", step: "any", name, value: String(value) });
}

/**
 * Return the fields of one part of the form that are set; switches at their defaults are left out.
 * @throws {Error} in words
 */
function valuesOf(part) {
  const found = {};
  for (const field of part.querySelectorAll("select, input")) {
    const isDefault = field.selectedIndex === 0 && part.dataset.side !== "workload";
    if (field.validity.badInput) throw new Error(`${field.name} of “${part.firstChild.textContent}” is not a number.`);
    if (field.value === "" || isDefault) continue;
    found[field.name] = field.tagName === "SELECT" ? JSON.parse(field.value) : Number(field.value);
  }
  return found;
}

/**
 * Begins an experiment.
 * @param {object} asked as the API takes it
 * @param {function(string)} say shows a refusal
 */
async function start(asked, say) {
  try {
    say("");
    mayStart(false); // immediately: a second click would be refused because an experiment runs
    const begun = ask("lab/experiment", key(), { method: "POST", body: JSON.stringify(asked) }).then((answer) => answer.json());
    starting = begun.catch(() => {});
    show(await begun);
    document.getElementById("experiment").scrollIntoView({ block: "start" });
    watch();
  } catch (error) {
    say(error.message);
    mayStart(true);
    if (error.status === 409) watch(); // show the running experiment, which another page may have started
  }
}

/** Polls the progress while an experiment runs. */
async function watch() {
  if (isAsking) return;
  isAsking = true;
  let wasRunning = false;
  try {
    for (;;) {
      const before = starting;
      await before;
      const now = await persistently("lab/experiment");
      if (before !== starting) continue; // this status is older than the experiment that was started meanwhile
      show(now);
      if (wasRunning && now.state === "idle") setText(status, "The server was restarted, which ended the experiment.");
      wasRunning = now.state === "running";
      if (!wasRunning) break;
      await new Promise((resolve) => setTimeout(resolve, ASK_EVERY_MS));
    }
  } catch (error) {
    tell(`${error.message} The last result is shown below.`);
    offers = null; // fetched again when the view is opened again
  } finally {
    isAsking = false;
  }
}

function show(now) {
  const isRunning = now.state === "running";
  mayStart(!isRunning);
  stop.hidden = progress.hidden = !isRunning;
  if (isRunning && now.progress) {
    const { done, num_ended, num_requests } = now.progress;
    progress.value = done;
    setText(status, `${now.doing}: ${num_ended} of ${num_requests} requests have ended.`);
  } else {
    setText(status, { idle: "No experiment has run yet.", running: `${now.doing} …`, stopped: "Stopped.", failed: `Failed: ${now.problem}`, done: "Finished: both sides have run." }[now.state]);
  }
  const identity = JSON.stringify([now.experiment?.number, now.state]);
  if (identity === shown || !now.experiment) return;
  shown = identity;
  const story = offers.stories.find(({ name }) => name === now.experiment.story);
  result.replaceChildren(...sidesOf(now, story));
}

function mayStart(may) {
  for (const button of view.querySelectorAll("button.primary")) button.disabled = !may;
}

function tell(words) {
  problem.hidden = words === "";
  setText(problem, words);
}

/** Scrolls to the error, which is far from the button. */
function tellInSight(words) {
  tell(words);
  if (words) problem.scrollIntoView({ block: "center" });
}

stop.addEventListener("click", async () => {
  try {
    await ask("lab/experiment", key(), { method: "DELETE" });
  } catch (error) {
    tell(error.message);
  }
});
document.addEventListener("view", open);
document.getElementById("key").addEventListener("change", open);
open();
