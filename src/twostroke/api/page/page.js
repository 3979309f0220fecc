/** The playground: sends what is typed as a request, and shows the answer with its figures. */
import { answerChunks, ask, Refusal } from "./answer_stream.js";
import { asCurl, asOpenaiPython } from "./code.js";
import { Figures } from "./figures.js";
import { key } from "./key.js";
import { followByName } from "./live.js";
import { chanceFields, samplingFields, schemaFields } from "./request_form.js";
import { showChancesOf, tokensOf, TokenWriter } from "./token_chances.js";

const $ = (id) => document.getElementById(id);
const form = $("request");
const text = $("text");
const answer = $("answer");

let defaultLimit = null; // default max_tokens of a chat, if the server sets one
let model = null; // the model's name; null until the server has sent it
let conversation = []; // messages of the chat so far, in the API's form
let shownId = null; // id of the latest answer
let numNamings = 0; // requests for the model's name; only the answer to the latest counts
let numTimelines = 0; // requests for a timeline, likewise
let running = null; // AbortController of the current answer

const isChat = () => form.elements.mode.value === "chat";

/** Return the request of the page's current fields. */
function currentRequest() {
  const named = model ? { model } : {};
  const fields = { ...samplingFields(form), ...chanceFields(form, isChat()), ...schemaFields(form, isChat()) };
  if (!isChat()) return { path: "/v1/completions", body: { ...named, prompt: text.value, ...fields } };
  // an empty message after an answer means the question that was answered
  const messages = text.value ? [...conversation, { role: "user", content: text.value }] : conversation.slice(0, -1);
  return { path: "/v1/chat/completions", body: { ...named, messages, ...fields } };
}

async function generate() {
  if (running) return;
  showError("");
  let request;
  try {
    if (isChat() && !text.value) throw new Refusal("Write a message first.");
    request = currentRequest();
  } catch (error) {
    showError(error.message);
    return;
  }
  running = new AbortController();
  const view = isChat() ? openTurns() : openContinuation();
  setBusy(true);
  $("timeline").hidden = $("in-engine").hidden = true;
  $("chances").hidden = !form.elements.chances.checked;
  $("alternatives").replaceChildren();
  let outcome;
  try {
    outcome = `Ended: ${await show(request, view)}.`;
  } catch (error) {
    outcome = error.name === "AbortError" ? "Stopped." : "Failed.";
    if (error.name !== "AbortError") {
      showError(error.message);
      nameModel(); // a restarted server may use another name
    }
  } finally {
    if (isChat()) keepTurns(request, view);
    running = null;
    setBusy(false);
    $("status").textContent = outcome;
    readTimeline();
  }
}

/** Shows an answer as it arrives; returns its finish reason. */
async function show(request, view) {
  const figures = new Figures(performance.now());
  let reason = null;
  showFigures(figures, null);
  for await (const chunk of answerChunks(request, key(), running.signal)) {
    figures.observe(performance.now(), chunk.usage.completion_tokens);
    showFigures(figures, chunk.usage);
    offerTimeline(chunk.id);
    offerEngine(chunk.id);
    for (const choice of chunk.choices) {
      reason = choice.finish_reason ?? reason;
      view.add(choice);
    }
  }
  return reason;
}

/** Show the prompt, followed by the completion. */
function openContinuation() {
  answer.replaceChildren(piece("given", text.value));
  const made = answer.appendChild(piece("made", ""));
  const writer = new TokenWriter();
  return { made, add: (choice) => append(made, ...writer.pieces(choice.text, tokensOf(choice))) };
}

/** Show the new message below the earlier ones, and a place for the reply. */
function openTurns() {
  if (conversation.length === 0) answer.replaceChildren();
  const turns = document.createElement("div");
  turns.append(piece("role", "You"), piece("given", text.value), piece("role", "Model"));
  const reasoning = turns.appendChild(piece("reasoning", ""));
  const made = turns.appendChild(piece("made", ""));
  answer.append(turns);
  answer.scrollTop = answer.scrollHeight;
  const writer = new TokenWriter();
  return {
    made,
    forget: () => turns.remove(),
    add(choice) {
      append(reasoning, ...writer.pieces(choice.delta.reasoning ?? "", tokensOf(choice)));
      append(made, ...writer.pieces(choice.delta.content ?? "", []));
    },
  };
}

/** Add question and answer to the conversation; a question without an answer stays in the input field. */
function keepTurns(request, view) {
  const content = view.made.textContent;
  if (content === "") {
    view.forget();
    return;
  }
  conversation = [...request.body.messages, { role: "assistant", content }];
  if (text.value === request.body.messages.at(-1).content) text.value = ""; // the user may have typed the next question already
}

function piece(name, content) {
  const element = document.createElement("span");
  element.className = name;
  element.textContent = content;
  return element;
}

function append(element, ...pieces) {
  if (pieces.length === 0) return;
  const isAtEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 40;
  element.append(...pieces);
  if (isAtEnd) answer.scrollTop = answer.scrollHeight;
}

function showFigures(figures, usage) {
  $("ttft").textContent = inMs(figures.ttftMs);
  $("tpot").textContent = inMs(figures.tpotMs);
  $("rate").textContent = figures.tokensPerSecond?.toFixed(1) ?? "–";
  $("recent-rate").textContent = figures.recentTokensPerSecond?.toFixed(1) ?? "–";
  $("num-output-tokens").textContent = figures.numOutputTokens;
  const numCached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  $("num-prompt-tokens").textContent = usage
    ? `${usage.prompt_tokens}${numCached ? ` (${numCached} cached)` : ""}`
    : "–";
}

const inMs = (ms) => (ms === null ? "–" : `${ms.toFixed(ms < 10 ? 2 : ms < 100 ? 1 : 0)} ms`);

function setBusy(isBusy) {
  answer.ariaBusy = String(isBusy);
  $("send").disabled = isBusy;
  $("abort").disabled = !isBusy;
  $("renew").disabled = isBusy;
  for (const mode of form.elements.mode) mode.disabled = isBusy;
  if (isBusy) $("status").textContent = "Waiting for tokens …";
}

function showError(message) {
  $("error").textContent = message;
  $("error").hidden = message === "";
}

function offerTimeline(requestId) {
  const path = `/v1/requests/${encodeURIComponent(requestId)}/timeline?format=text`;
  if ($("timeline-link").getAttribute("href") === path) return;
  $("timeline-link").href = path;
  $("timeline").open = false;
  $("timeline-text").textContent = "";
  numTimelines += 1; // a pending answer belongs to the previous request
  $("timeline").hidden = false;
}

function offerEngine(requestId) {
  shownId = requestId;
  $("in-engine").hidden = false;
}

/** Open the live view with this request selected. */
function showInEngine() {
  followByName(shownId);
}

async function readTimeline() {
  if (!$("timeline").open) return; // fetched when opened, and once more at the end
  const number = (numTimelines += 1);
  let told;
  try {
    const response = await ask($("timeline-link").getAttribute("href"), key());
    told = await response.text();
  } catch (error) {
    told = error.message;
  }
  if (number === numTimelines) $("timeline-text").textContent = told;
}

function renew() {
  conversation = [];
  answer.replaceChildren();
  showError("");
  text.focus();
}

function changeMode() {
  $("text-label").textContent = isChat() ? "Message" : "Prompt";
  $("send").textContent = isChat() ? "Send" : "Generate";
  $("renew").hidden = !isChat();
  showLimit();
  renew();
}

/** Shows the code, and copies it to the clipboard if the browser allows that. */
async function copy(writeCode) {
  let code;
  try {
    code = writeCode(currentRequest(), location.origin, key() !== "" || "keys" in document.documentElement.dataset);
  } catch (error) {
    showError(error.message);
    return;
  }
  $("code").textContent = code;
  $("code").hidden = false;
  try {
    await navigator.clipboard.writeText(code);
    $("copied").textContent = "Copied.";
  } catch {
    getSelection().selectAllChildren($("code"));
    $("copied").textContent = "The browser does not allow copying; the code is selected below.";
  }
}

/** Show the default of an empty field. */
function showLimit() {
  form.elements.max_tokens.placeholder = isChat() ? (defaultLimit ?? "rest of the context") : "16";
}

async function nameModel() {
  const number = (numNamings += 1);
  let told;
  try {
    const [served] = (await (await ask("/v1/models", key())).json()).data;
    const capabilities = served && (await (await ask("/v1/capabilities", key())).json());
    if (number !== numNamings) return;
    told = "a recording: no model is loaded";
    if (served) {
      model = served.id;
      defaultLimit = capabilities.limits.default_max_tokens;
      showLimit();
      told = `${model}, context of ${served.max_model_len.toLocaleString("en")} tokens`;
    }
  } catch (error) {
    told = error.message;
  }
  if (number === numNamings) $("model").textContent = told;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
for (const mode of form.elements.mode) mode.addEventListener("change", changeMode);
$("abort").addEventListener("click", () => running?.abort());
$("renew").addEventListener("click", renew);
$("timeline").addEventListener("toggle", readTimeline);
$("in-engine").addEventListener("click", showInEngine);
showChancesOf(answer, $("alternatives"));
$("as-curl").addEventListener("click", () => copy(asCurl));
$("as-openai-python").addEventListener("click", () => copy(asOpenaiPython));
$("key").addEventListener("change", nameModel);
document.addEventListener("server", nameModel);
nameModel();
