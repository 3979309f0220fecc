/** Table of the sequences, live ones first; each can be selected. */
import { el, panel, setText } from "./dom.js";
import { ms, short, whole } from "./words.js";

const MOST_ROWS = 100;
const COLUMNS = ["Request", "State", "Arrived", "Prompt tokens", "Cached", "Computed", "Output tokens", "TTFT", "ITL", "Preemptions"];
const ORDER = { running: 0, preempted: 1, waiting: 2, ended: 3 };

export class RequestTable {
  #body = el("tbody");
  #scrolled = el("div", { className: "scrolled", tabIndex: 0, role: "region", "aria-label": "Requests" });
  #rows = new Map();
  #filter = el("input", { type: "search", id: "request-filter", placeholder: "id or state", autocomplete: "off" });
  #more = el("p", { className: "hint", role: "status" });
  #follow;
  #last = null;

  /** @param {function(string|null)} follow receives the id of the selected request, or null */
  constructor(follow) {
    this.#follow = follow;
    const head = el("thead", {}, el("tr", {}, ...COLUMNS.map((title) => el("th", { scope: "col" }, title))));
    this.#scrolled.append(el("table", {}, head, this.#body));
    const filter = el("label", { htmlFor: "request-filter", className: "inline" }, "Show only ", this.#filter);
    this.element = panel("requests", "Requests", filter, this.#scrolled, this.#more);
    this.#filter.addEventListener("input", () => this.#last && this.show(...this.#last));
  }

  /**
   * @param {object} engine of the model
   * @param {number} nowS on the engine's clock
   * @param {string|null} followed
   */
  show(engine, nowS, followed) {
    this.#last = [engine, nowS, followed];
    const wanted = this.#filter.value.toLowerCase();
    const found = [...engine.requests.values()].filter(({ id, state }) => `${id} ${state}`.toLowerCase().includes(wanted));
    found.sort((a, b) => ORDER[a.state] - ORDER[b.state] || (a.state === "ended" ? b.finish_s - a.finish_s : a.arrival_s - b.arrival_s));
    const step = engine.steps.at(-1);
    const shown = found.slice(0, MOST_ROWS);
    const kept = new Set(shown.map(({ id }) => id));
    for (const [id, row] of this.#rows) {
      if (kept.has(id)) continue;
      if (row.element.contains(document.activeElement)) this.#scrolled.focus({ preventScroll: true });
      row.element.remove();
      this.#rows.delete(id);
    }
    for (const request of shown) {
      if (!this.#rows.has(request.id)) this.#rows.set(request.id, this.#makeRow(request));
      this.#fill(this.#rows.get(request.id), request, nowS, step, followed);
    }
    this.#arrange(shown.map(({ id }) => this.#rows.get(id).element));
    setText(this.#more, found.length === 0 ? "No requests." : found.length > MOST_ROWS ? `${whole(found.length - MOST_ROWS)} more rows are not shown. Use the filter to find them.` : "");
  }

  /** Moves rows into order. The row with the focus is not moved, because it would lose it; the others move around it. */
  #arrange(rows) {
    const focused = rows.find((row) => row.contains(document.activeElement));
    let next = this.#body.firstElementChild;
    for (const row of rows) {
      const isNear = row === next || (row === next?.nextElementSibling && next !== focused);
      if (row !== focused && !isNear) {
        this.#body.insertBefore(row, next);
        continue;
      }
      while (next !== row) {
        const late = next;
        next = late.nextElementSibling;
        this.#body.append(late);
      }
      next = row.nextElementSibling;
    }
  }

  #makeRow(request) {
    const follow = el("button", { type: "button", className: "link", title: request.id }, short(request.id));
    const cells = COLUMNS.map(() => el("td"));
    cells[0].append(follow); // this column stays visible when the others are scrolled
    const element = el("tr", {}, ...cells);
    element.addEventListener("click", () => this.#follow(request.id)); // clicks on the button, too
    return { element, cells };
  }

  #fill({ element, cells }, request, nowS, step, followed) {
    const state = request.state === "running" ? request.stroke || "running" : request.state === "ended" ? `ended: ${request.finish}` : request.state;
    const ttft = request.first_token_s === null || request.arrival_s === null ? null : 1e3 * (request.first_token_s - request.arrival_s);
    const texts = [
      state + whyItWaits(request, step) + (request.background ? " (flex)" : ""),
      request.arrival_s === null ? "–" : `${(nowS - request.arrival_s).toFixed(1)} s ago`,
      whole(request.num_prompt),
      whole(request.num_cached),
      whole(request.num_computed),
      `${whole(request.num_output)} of ${whole(request.max_tokens)}`,
      ms(ttft),
      ms(request.itl_ms),
      request.num_preemptions || "–",
    ];
    texts.forEach((text, i) => setText(cells[i + 1], String(text)));
    element.className = `${request.state}${request.id === followed ? " followed" : ""}`;
  }
}

/** Say why a request waits: for the limit of the latest step at the head of the queue, and for the head behind it. */
function whyItWaits({ id, state, arrival_s }, step) {
  if ((state !== "waiting" && state !== "preempted") || !step?.wait || arrival_s > step.at_s) return "";
  return id === step.head ? ` (${step.wait})` : " (behind the head of the queue)";
}
