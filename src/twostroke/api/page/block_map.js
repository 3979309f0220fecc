/** The KV blocks, one cell each: state, latest writes, and owners. */
import { STATES } from "./live_model.js";
import { choose, chooser, colour, el, panel, setText } from "./dom.js";
import { short, whole } from "./words.js";

const NAMES = ["free", "used", "shared", "cached", "out", "held"];
const MOST_HEIGHT = 360;

export class BlockMap {
  #canvas = chooser("KV blocks; arrow keys choose one, Enter selects its request");
  #told = el("p", { id: "block-told", className: "hint" });
  #legend = el("p", { className: "legend" });
  #counts = [];
  #engine = null;
  #columns = 1;
  #cell = 1;
  #palette = null;
  #image = null;
  #drawnFollowed = null;
  #drawnEngine = null;
  #chosen = null;
  #follow;

  /** @param {function(string)} follow receives the request whose block was clicked */
  constructor(follow) {
    this.#follow = follow;
    this.#counts = STATES.map((state, i) => {
      const count = el("b", {}, "0");
      this.#legend.append(el("span", { className: `mark block-${NAMES[i]}` }, `${state} `, count));
      return count;
    });
    this.#legend.append(el("span", { className: "mark block-written" }, "just written"), el("span", { className: "mark block-followed" }, "of the selected request"));
    this.element = panel("blocks", "KV blocks", this.#legend, el("div", { className: "drawing" }, this.#canvas), this.#told);
    this.#canvas.addEventListener("mousemove", (event) => this.#choose(this.#at(event.offsetX, event.offsetY)));
    this.#canvas.addEventListener("mouseleave", () => this.#choose(null));
    this.#canvas.addEventListener("click", () => this.#followChosen());
    this.#canvas.addEventListener("keydown", (event) => this.#move(event));
    document.addEventListener("scheme", () => (this.#palette = this.#image = null));
  }

  /**
   * @param {object} engine of the model
   * @param {string|null} followed id of the selected request
   */
  show(engine, followed) {
    this.#engine = engine;
    engine.counts().forEach((count, i) => setText(this.#counts[i], whole(count)));
    this.#draw(followed);
    this.#tell();
  }

  #draw(followed) {
    const { blocks } = this.#engine;
    if (blocks.length === 0) return;
    const width = Math.max(1, this.#canvas.parentElement.clientWidth);
    let cell = Math.max(1, Math.min(14, Math.floor(Math.sqrt((width * MOST_HEIGHT) / blocks.length))));
    while (cell > 1 && Math.ceil(blocks.length / Math.floor(width / cell)) * cell > MOST_HEIGHT) cell -= 1;
    const columns = Math.max(1, Math.floor(width / cell));
    const height = Math.ceil(blocks.length / columns) * cell;
    const isSame = this.#image && this.#drawnEngine === this.#engine && this.#image.width === columns * cell && this.#image.height === height;
    let changed = isSame && this.#drawnFollowed === followed ? this.#engine.changed : null;
    if (!isSame) {
      this.#canvas.width = columns * cell;
      this.#canvas.height = height;
      this.#image = new ImageData(columns * cell, height);
      changed = null;
    }
    [this.#columns, this.#cell, this.#drawnFollowed, this.#drawnEngine] = [columns, cell, followed, this.#engine];
    this.#palette ??= NAMES.map((name) => pixel(`block-${name}`));
    const pixels = new Uint32Array(this.#image.data.buffer);
    const paint = (block, value) => {
      const size = cell > 2 ? cell - 1 : cell;
      let at = Math.floor(block / columns) * cell * columns * cell + (block % columns) * cell;
      for (let y = 0; y < size; y += 1, at += columns * cell) pixels.fill(value, at, at + size);
    };
    if (changed === null) for (let block = 0; block < blocks.length; block += 1) paint(block, this.#palette[blocks[block]]);
    else for (const block of changed) paint(block, this.#palette[blocks[block]]);
    if (followed) for (const block of this.#engine.blocksOf(followed)) paint(block, pixel("block-followed"));
    for (const block of this.#engine.written) paint(block, pixel("block-written"));
    this.#canvas.getContext("2d").putImageData(this.#image, 0, 0);
    this.#engine.changed = [];
  }

  #at(x, y) {
    const column = Math.floor(x / this.#cell);
    const block = Math.floor(y / this.#cell) * this.#columns + column;
    return column < this.#columns && block >= 0 && this.#engine && block < this.#engine.blocks.length ? block : null;
  }

  #choose(block) {
    this.#chosen = block;
    this.#tell();
    const last = Math.max(0, (this.#engine?.blocks.length ?? 0) - 1);
    choose(this.#canvas, block ?? 0, 0, last, block === null ? "none" : this.#told.textContent);
  }

  #move(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.#columns, ArrowDown: this.#columns }[event.key];
    if (event.key === "Enter") this.#followChosen();
    if (!by || !this.#engine) return;
    event.preventDefault();
    this.#choose(Math.max(0, Math.min(this.#engine.blocks.length - 1, (this.#chosen ?? -1) + by)));
  }

  #followChosen() {
    const owner = this.#chosen === null ? null : this.#engine.ownersOf(this.#chosen)[0];
    if (owner) this.#follow(owner.id);
  }

  #tell() {
    if (this.#chosen === null || !this.#engine || this.#chosen >= this.#engine.blocks.length) {
      setText(this.#told, "Point at a block, or choose one with the arrow keys; a click or Enter selects its request.");
      return;
    }
    const sizes = this.#engine.config.block_tokens;
    const owners = this.#engine.ownersOf(this.#chosen);
    const told = owners.slice(0, 6).map(({ id, group, entry }) => `${short(id)} (tokens ${whole(entry * sizes[group])} to ${whole((entry + 1) * sizes[group] - 1)}${this.#engine.config.num_groups > 1 ? `, KV group ${group}` : ""})`);
    const more = owners.length > 6 ? `, and ${owners.length - 6} more` : "";
    setText(this.#told, `Block ${whole(this.#chosen)}: ${STATES[this.#engine.blocks[this.#chosen]]}${owners.length > 0 ? `, of ${told.join(", ")}${more}` : ""}.`);
  }
}

const pixels = new Map();
document.addEventListener("scheme", () => pixels.clear());

/** Return a colour of the style sheet in ImageData's form. */
function pixel(name) {
  if (!pixels.has(name)) {
    const context = new OffscreenCanvas(1, 1).getContext("2d");
    context.fillStyle = colour(name);
    context.fillRect(0, 0, 1, 1);
    pixels.set(name, new Uint32Array(context.getImageData(0, 0, 1, 1).data.buffer)[0]);
  }
  return pixels.get(name);
}
