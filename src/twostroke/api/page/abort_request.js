/** A button that aborts a request. It asks first, so that no request ends by an accidental tap. */
import { ask } from "./answer_stream.js";
import { el, setText } from "./dom.js";
import { key } from "./key.js";
import { nameOf } from "./words.js";

export class AbortRequest {
  #begin = el("button", { type: "button" }, "Abort");
  #question = el("span");
  #yes = el("button", { type: "button" }, "Yes, abort it");
  #no = el("button", { type: "button" }, "No, continue");
  #asking = el("span", { className: "asking", role: "group", "aria-label": "Abort?", hidden: true }, this.#question, " ", this.#yes, " ", this.#no);
  #id = null;
  #beside;
  #hasBegun = false; // an abort was requested, and has not failed

  /** Result of the abort. */
  outcome = el("p", { className: "hint", role: "status" });
  element = el("span", {}, this.#begin, this.#asking);

  /** @param {HTMLElement} beside gets the focus when the request has ended */
  constructor(beside) {
    this.#beside = beside;
    this.#begin.addEventListener("click", () => this.#ask(true));
    this.#no.addEventListener("click", () => this.#ask(false));
    this.#yes.addEventListener("click", () => this.#abort());
    this.element.addEventListener("keydown", (event) => event.key === "Escape" && this.#ask(false));
  }

  /**
   * @param {string|null} id of the sequence that is shown
   * @param {boolean} canAbort whether it is running and belongs to the viewer
   */
  show(id, canAbort) {
    if (id !== this.#id) {
      this.#id = id;
      this.#hasBegun = false;
      this.#asking.hidden = true;
      setText(this.outcome, "");
    }
    const isOver = !canAbort || this.#hasBegun;
    if (isOver && this.element.contains(document.activeElement)) this.#beside.focus({ preventScroll: true });
    if (isOver) this.#asking.hidden = true;
    this.element.hidden = isOver;
    this.#begin.hidden = !this.#asking.hidden;
  }

  #ask(isAsking) {
    setText(this.#question, `Abort ${nameOf(this.#id)}? Its client gets an error.`);
    this.#asking.hidden = !isAsking;
    this.#begin.hidden = isAsking;
    (isAsking ? this.#no : this.#begin).focus({ preventScroll: true });
  }

  async #abort() {
    const id = this.#id;
    this.#hasBegun = true; // a double click aborts once
    this.show(id, false);
    let told;
    try {
      await ask(`v1/requests/${encodeURIComponent(nameOf(id))}/abort`, key(), { method: "POST" });
      told = `${nameOf(id)} was aborted.`;
    } catch (error) {
      if (id === this.#id) this.#hasBegun = false;
      told = error.message;
    }
    if (id === this.#id) setText(this.outcome, told);
  }
}
