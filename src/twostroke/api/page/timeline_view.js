/** Timeline of the selected request, with a reason for every millisecond, and a button to abort it. */
import { AbortRequest } from "./abort_request.js";
import { ask } from "./answer_stream.js";
import { el, panel, setText } from "./dom.js";
import { key } from "./key.js";
import { ms, requestOf, short, whole } from "./words.js";

const MOST_SEGMENTS = 400;

export class TimelineView {
  #title = el("p", { role: "status" }, "No request is selected. Choose one in the table, a lane, or a block.");
  #parts = el("div");
  #again = el("button", { type: "button", hidden: true }, "Refresh");
  #stop = el("button", { type: "button", hidden: true }, "Clear selection");
  #ask = el("button", { type: "button", hidden: true }, "Show prompt");
  #prompt = el("div", { role: "status" });
  #abort = new AbortRequest(this.#stop);
  #id = null;
  #hasEnd = false;

  /** @param {function(string|null)} follow receives the id of the selected request, or null */
  constructor(follow) {
    this.#again.addEventListener("click", () => this.#read());
    this.#ask.addEventListener("click", () => this.#readPrompt());
    this.#stop.addEventListener("click", () => follow(null));
    this.element = panel("followed", "Selected request", this.#title, el("div", { className: "actions" }, this.#again, this.#ask, this.#stop, this.#abort.element), this.#abort.outcome, this.#prompt, this.#parts);
  }

  /**
   * @param {object} engine of the model
   * @param {string|null} followed
   * @param {boolean} isRecording its requests cannot be aborted
   */
  show(engine, followed, isRecording) {
    const request = engine?.requests.get(followed);
    const isEnded = request?.state === "ended";
    this.#abort.show(followed, Boolean(request) && !isEnded && !isRecording && !request.tenant_is_other);
    if (followed !== this.#id) {
      this.#id = followed;
      this.#hasEnd = isEnded;
      this.#parts.replaceChildren();
      this.#prompt.replaceChildren();
      this.#again.hidden = this.#ask.hidden = this.#stop.hidden = followed === null;
      if (followed === null) setText(this.#title, "No request is selected. Choose one in the table, a lane, or a block.");
      else this.#read();
    } else if (followed !== null && isEnded && !this.#hasEnd) {
      this.#hasEnd = true; // fetched once more at the end, and not repeatedly before
      this.#read();
    }
  }

  async #read() {
    const id = this.#id;
    setText(this.#title, `Reading the timeline of ${short(id)} …`);
    try {
      const timeline = await (await ask(`v1/requests/${encodeURIComponent(requestOf(id))}/timeline`, key())).json();
      if (id !== this.#id) return; // another request has been selected meanwhile
      const lanes = timeline.lanes.map(drawLane);
      setText(this.#title, `${id}: ${ms(timeline.e2e_ms)} in all${timeline.is_complete ? "" : " so far"}.`);
      this.#parts.replaceChildren(...lanes);
    } catch (error) {
      if (id === this.#id) setText(this.#title, error.message);
    }
  }

  /** Show the prompt; no text is fetched before the user asks for it. */
  async #readPrompt() {
    const id = this.#id;
    let shown;
    try {
      const kept = await (await ask(`v1/requests/${encodeURIComponent(requestOf(id))}/prompt`, key())).json();
      shown = el("pre", { className: "prompt", tabIndex: 0, "aria-label": "Prompt" }, kept.prompt ?? `token ids ${kept.prompt_token_ids.join(", ")}`);
    } catch (error) {
      shown = el("p", { className: "hint" }, error.message);
    }
    if (id === this.#id) this.#prompt.replaceChildren(shown);
  }
}

/**
 * Return a lane as a bar of segments and a table of the same.
 * @param {object} lane of the timeline API
 */
export function drawLane(lane) {
  const bar = el("div", { className: "segments", role: "img", "aria-label": `${lane.segments.length} segments, listed below` });
  const body = el("tbody");
  const shown = lane.segments.slice(0, MOST_SEGMENTS);
  for (const segment of shown) {
    const kind = segment.label.replaceAll(" ", "-");
    const piece = el("span", { className: `segment ${kind}`, title: `${segment.label}, ${ms(segment.duration_ms)}: ${segment.reason}` });
    piece.style.flexGrow = String(Math.max(segment.duration_ms, lane.e2e_ms / 2000));
    bar.append(piece);
    body.append(el("tr", {}, el("td", {}, ms(segment.start_ms)), el("td", {}, ms(segment.duration_ms)), el("td", {}, el("span", { className: `mark ${kind}` }, segment.label)), el("td", {}, segment.num_tokens || "–"), el("td", {}, segment.reason)));
  }
  const head = el("tr", {}, ...["Start", "Duration", "Activity", "Tokens", "Reason"].map((title) => el("th", { scope: "col" }, title)));
  const more = lane.segments.length - shown.length;
  const facts = `TTFT ${ms(lane.ttft_ms)}, ${whole(lane.num_prompt_tokens ?? 0)} prompt tokens, ${whole(lane.num_cached_tokens ?? 0)} of them cached, ${whole(lane.num_output_tokens)} output tokens${lane.num_preemptions ? `, preempted ${lane.num_preemptions} times` : ""}${lane.finish_reason ? `; ended: ${lane.finish_reason}` : ""}. ${lane.notes.join(" ")}`;
  const table = el("div", { className: "scrolled", tabIndex: 0, role: "region", "aria-label": "Segments" }, el("table", {}, el("thead", {}, head), body));
  return el("div", { className: "lane" }, el("p", {}, facts), bar, table, ...(more > 0 ? [el("p", { className: "hint" }, `${more} more segments are not shown.`)] : []));
}
