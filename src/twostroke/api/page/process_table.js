/** Tables of the pools' workers, and of the KV transfers between them. */
import { el, panel } from "./dom.js";
import { bytes, whole } from "./words.js";

export class ProcessTable {
  #pools = el("tbody");
  #links = el("tbody");
  #shown = "";

  constructor() {
    this.element = panel("processes", "Pools and KV transfers", table(["Worker", "Pool", "State", "Sequences", "Restarts"], this.#pools, "Pools"), table(["To", "Hand-overs", "Failed", "Bytes", "Rate during transfers", "Last problem"], this.#links, "Links"));
    this.element.hidden = true;
  }

  /** @param {LiveModel} model */
  show(model) {
    const pools = model.pools ?? (model.links.length > 0 ? fromLog(model.engines) : []);
    this.element.hidden = pools.length === 0 && model.links.length === 0;
    const now = JSON.stringify([pools, model.links]);
    if (now === this.#shown) return;
    this.#shown = now;
    this.#pools.replaceChildren(...pools.map((worker) => row(worker.worker_id, worker.role, worker.state + (worker.state === "running" ? "" : `: ${worker.cause}`), whole(worker.num_live), whole(worker.num_restarts))));
    this.#links.replaceChildren(...model.links.map((link) => row(link.to, whole(link.num_transfers), whole(link.num_failed), bytes(link.num_bytes), link.busy_s > 0 ? `${bytes(link.num_bytes / link.busy_s)}/s` : "–", link.last_problem || "–")));
  }
}

/** Return workers from a log, which has processes but no pools: the last process of each place, and its number of restarts. */
function fromLog(engines) {
  const places = [...engines].filter(([place]) => /^(prefill|decode)-/.test(place)).sort();
  return places.map(([place, { process, lost, figures }]) => {
    const [role] = place.split("-");
    const state = lost ? { state: "stopped", cause: lost } : { state: "running" };
    return { worker_id: process, role, ...state, num_live: figures.running + figures.waiting, num_restarts: Number(process.split(".")[1] ?? 1) - 1 };
  });
}

function table(titles, body, label) {
  const head = el("thead", {}, el("tr", {}, ...titles.map((title) => el("th", { scope: "col" }, title))));
  return el("div", { className: "scrolled", tabIndex: 0, role: "region", "aria-label": label }, el("table", {}, head, body));
}

const row = (...texts) => el("tr", {}, ...texts.map((text) => el("td", {}, text)));
