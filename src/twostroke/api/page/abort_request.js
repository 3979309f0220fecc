/** The way to end a request: a button that asks first, so that nobody ends one by a tap in the wrong place. */
import { ask } from "./answer_stream.js";
import { el, setText } from "./dom.js";
import { key } from "./key.js";
import { nameOf } from "./words.js";

export class AbortRequest {
  #begin = el("button", { type: "button" }, "Abort");
  #question = el("span");
  #yes = el("button", { type: "button" }, "Yes, abort it");
  #no = el("button", { type: "button" }, "No, let it run");
  #asking = el("span", { className: "asking", role: "group", "aria-label": "Abort?", hidden: true }, this.#question, " ", this.#yes, " ", this.#no);
  #id = null;
  #beside;
  #hasBegun = false; // an end that was asked for has not been answered yet, or has succeeded

  /** Says what came of it. */
  outcome = el("p", { className: "hint", role: "status" });
  element = el("span", {}, this.#begin, this.#asking);

  /** @param {HTMLElement} beside gets the focus when there is nothing to end any more */
  constructor(beside) {
    this.#beside = beside;
    this.#begin.addEventListener("click", () => this.#ask(true));
    this.#no.addEventListener("click", () => this.#ask(false));
    this.#yes.addEventListener("click", () => this.#abort());
    this.element.addEventListener("keydown", (event) => event.key === "Escape" && this.#ask(false));
  }

  /**
   * @param {string|null} id of the sequence that is shown
   * @param {boolean} canAbort whether it lives, and is of who looks
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
    setText(this.#question, `Abort ${nameOf(this.#id)}? Who waits for its answer gets an error.`);
    this.#asking.hidden = !isAsking;
    this.#begin.hidden = isAsking;
    (isAsking ? this.#no : this.#begin).focus({ preventScroll: true });
  }

  async #abort() {
    const id = this.#id;
    this.#hasBegun = true; // a double click is one wish
    this.show(id, false);
    let told;
    try {
      await ask(`v1/requests/${encodeURIComponent(nameOf(id))}/abort`, key(), { method: "POST" });
      told = `${nameOf(id)} was ended.`;
    } catch (error) {
      if (id === this.#id) this.#hasBegun = false;
      told = error.message;
    }
    if (id === this.#id) setText(this.outcome, told);
  }
}
